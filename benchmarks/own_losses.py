"""Compare user-defined losses of models of transformers and timm with a plain torch loop.

A hundred models are drawn by a seed: sixty of transformers, which return their own loss of padded
labels (`out.loss`), and forty of timm with a user's cross entropy with label smoothing. Each trains
three steps of SGD with momentum in one process on the whole batch, by a loop without bigtrain, and
then on two ranks under each strategy, in micro-batches. A row has, for each strategy, the relative
difference of its losses from the loop's, or the reason why it was refused.

A model is left out, with its reason, if it cannot run unchanged in one process, if it is too large,
if it draws random numbers while its dropout is off, or if it has BatchNorm, whose statistics are
those of each micro-batch by intent.

bigtrain needs neither timm nor transformers: see `cut_zoo.py` for an environment with both.

    OMP_NUM_THREADS=1 /tmp/zoo/bin/python benchmarks/own_losses.py [NUMBER [FILE]]

NUMBER limits the number of models, in the same proportion of both libraries; results go to FILE.
"""

from __future__ import annotations

import json
import random
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import foreign_models
import forked
import torch
import torch.nn.functional as F
from harness import surroundings
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from bigtrain.assembly.make_plan import make_plan
from bigtrain.engine.engine import Engine
from bigtrain.engine.first_batch import example_batch
from bigtrain.engine.first_steps import disable_dropout
from bigtrain.job.load import job_from_keys
from bigtrain.losses.loss import as_loss
from bigtrain.ranks.context import RunContext

RESULTS = Path(__file__).parent / "results" / "own_losses.json"
SEED = 20261125
NUMBER, OF_TRANSFORMERS = 100, 0.6
STRATEGIES = ("ddp", "fsdp", "zero2", "zero3", "1f1b", "tensor")
ROWS, LENGTH, STEPS = 8, 24, 3
MOST_PARAMETERS, MOST_FLOPS = 12_000_000, 4_000_000_000
SAME = 2e-5
"""Relative difference of a loss that rounding in fp32 makes in three steps of such models."""
LIMIT_S, TRIAL_S = 240.0, 60.0
HEADS = (
    *("CAUSAL_LM", "MASKED_LM", "SEQ_TO_SEQ_CAUSAL_LM", "TOKEN_CLASSIFICATION"),
    *("SEQUENCE_CLASSIFICATION", "IMAGE_CLASSIFICATION"),
)
Batch = dict[str, Tensor]


class OwnLoss(nn.Module):
    """Calls a model of transformers with a dict, and returns its output with the loss."""

    def __init__(self, name: str) -> None:
        super().__init__()
        head = name.split(":")[0]
        maker: Any = foreign_models.of_transformers(name)
        self.model = maker.model
        self.head = head

    def forward(self, batch: Batch) -> Any:
        """Return the model's own output."""
        return self.model(**batch)


def model_of(name: str) -> nn.Module:
    """Return the model with weights by the seed and its dropout off."""
    torch.manual_seed(0)
    library, _, model_name = name.partition("/")
    model = OwnLoss(model_name) if library == "transformers" else foreign_models.of_timm(model_name)
    disable_dropout(model)
    config = getattr(getattr(model, "model", None), "config", None)
    for key, value in vars(config).items() if config is not None else ():
        if "drop" in key and isinstance(value, float):  # read in the forward pass
            setattr(config, key, 0.0)
    return model.train()


def batch_of(name: str, step: int, side: int) -> tuple[Any, Any]:
    """Return a batch padded to its longest row; padding does not count in the loss."""
    draw = torch.Generator().manual_seed(step)
    library, _, model_name = name.partition("/")
    head = model_name.split(":")[0] if library == "transformers" else "timm"
    if head in ("timm", "IMAGE_CLASSIFICATION"):
        images = torch.randn(ROWS, 3, side, side, generator=draw)
        labels = torch.randint(foreign_models.CLASSES, (ROWS,), generator=draw)
        return (
            (images, labels)
            if head == "timm"
            else ({"pixel_values": images, "labels": labels}, labels)
        )
    ids = torch.randint(2, foreign_models.WORDS, (ROWS, LENGTH), generator=draw)
    lengths = torch.randint(3, LENGTH + 1, (ROWS,), generator=draw)
    mask = (torch.arange(LENGTH) < lengths[:, None]).long()
    labels = ids.clone()
    if head == "SEQUENCE_CLASSIFICATION":
        labels = torch.randint(2, (ROWS,), generator=draw)
    elif head == "TOKEN_CLASSIFICATION":
        labels = torch.randint(2, ids.shape, generator=draw)
    if labels.dim() == 2:
        labels[mask == 0] = -100
    ids = ids * mask  # padding is token 0
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}, labels


def loss_of(name: str) -> Callable[[Any, Any], Tensor]:
    """Return the user's loss function."""
    if name.startswith("transformers/"):
        return lambda output, _: output.loss
    return lambda output, labels: F.cross_entropy(output, labels, label_smoothing=0.1)


def optimizer_of(parameters: Any) -> torch.optim.Optimizer:
    """Return SGD, which does not amplify rounding."""
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def plain_losses(name: str, side: int) -> list[float]:
    """Return the losses of a plain torch loop on whole batches."""
    model, loss = model_of(name), loss_of(name)
    optimizer, losses = optimizer_of(model.parameters()), []
    for step in range(STEPS):
        inputs, targets = batch_of(name, step, side)
        optimizer.zero_grad()
        value = loss(model(inputs), targets)
        value.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        losses.append(float(value.detach()))
    return losses


def train(context: RunContext, _: Any, name: str, side: int, strategy: str) -> list[float]:
    """Return the losses of the same steps under a strategy."""
    keys = {"train.global_batch_size": ROWS, "train.micro_batch_size": 2, "memory.predict": False}
    job = job_from_keys(strategy, {**keys, "memory.track_steps": 0, "device": "cpu"})
    plan = make_plan(job, context.world_size, "cpu")
    rows = ROWS // context.dp_size
    rank_rows = slice(context.dp_rank * rows, (context.dp_rank + 1) * rows)
    loss = as_loss(loss_of(name))
    first = example_batch(_rows(batch_of(name, 0, side), slice(0, 2)), loss, job, plan)
    losses = []
    with Engine(model_of(name), loss, optimizer_of, job, context, example=first) as engine:
        for step in range(STEPS):
            losses.append(engine.step(_rows(batch_of(name, step, side), rank_rows)).loss)
    return losses


def _rows(batch: tuple[Any, Any], rows: slice) -> tuple[Any, Any]:
    inputs, targets = batch
    cut = {k: v[rows] for k, v in inputs.items()} if isinstance(inputs, dict) else inputs[rows]
    return cut, targets[rows]


def tried(name: str) -> dict[str, Any]:
    """Return the row of a model; it has `left_out` if the model does not run in one process."""
    row: dict[str, Any] = {"model": name}
    try:
        row["parameters"] = _size(name)
        if row["parameters"] > MOST_PARAMETERS:
            return {**row, "left_out": "too many parameters"}
        model = model_of(name)
        row["parameters"] = sum(p.numel() for p in model.parameters())
        if row["parameters"] > MOST_PARAMETERS:
            return {**row, "left_out": "too many parameters"}
        if any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in model.modules()):
            return {**row, "left_out": "BatchNorm"}
        row["side"] = side = foreign_models.side_of(name.partition("/")[0], model)
        if side > foreign_models.SIDE:
            return {**row, "left_out": "large images"}
        with FlopCounterMode(display=False) as counter:
            inputs, targets = batch_of(name, 0, side)
            first = loss_of(name)(model(inputs), targets)
        if counter.get_total_flops() > MOST_FLOPS:
            return {**row, "left_out": "too many operations"}
        torch.manual_seed(1)
        model = model_of(name)
        torch.manual_seed(1)
        again = loss_of(name)(model(inputs), targets)
        if float(again.detach()) != float(first.detach()):
            return {**row, "left_out": "random numbers"}
        row["losses"] = plain_losses(name, side)
    except Exception as error:  # noqa: BLE001 - the table says what it was
        lines = str(error).strip().splitlines() or [""]
        return {**row, "left_out": f"{type(error).__name__}: {lines[0][:160]}"}
    return row


def _size(name: str) -> int:
    """Return the number of parameters, without memory; 0 if the constructor reads values."""
    try:
        with torch.device("meta"):
            return sum(p.numel() for p in model_of(name).parameters())
    except Exception:  # noqa: BLE001 - user code of any kind runs here
        return 0


def names_of(library: str) -> list[str]:
    """Return all names of a library, in an order drawn by the seed."""
    if library == "timm":
        names = foreign_models.names_of("timm")
    else:
        from transformers.models.auto import modeling_auto

        names = sorted(
            f"{head}:{kind}"
            for head in HEADS
            for kind in getattr(modeling_auto, f"MODEL_FOR_{head}_MAPPING_NAMES")
        )
    random.Random(f"{SEED}:{library}").shuffle(names)
    return [f"{library}/{name}" for name in names]


def rows(number: int) -> Iterator[dict[str, Any]]:
    """Yield the drawn models, each tried in its own process."""
    wanted = {"transformers": round(number * OF_TRANSFORMERS)}
    wanted["timm"] = number - wanted["transformers"]
    for library, left in wanted.items():
        for name in names_of(library):
            if not left:
                break
            task = forked.Task(name, tried, _handed, (name,), 1, 1, LIMIT_S)
            outcome = next(iter(forked.run_all([task], at_once=1)))
            row = (
                outcome.values[0] if outcome.values else {"model": name, "left_out": outcome.failed}
            )
            left -= "left_out" not in row
            yield row


def _handed(_: RunContext, prepared: Any, *__: Any) -> Any:
    return prepared


def judged(row: dict[str, Any], outcome: forked.Outcome) -> dict[str, Any]:
    """Return the result of a model under a strategy."""
    if outcome.refused is not None:
        return {"verdict": "refused", "reason": outcome.refused}
    if not outcome.values:
        return {"verdict": "failed", "reason": outcome.failed}
    far = max(
        abs(a - b) / max(abs(b), 1e-6)
        for losses in outcome.values
        for a, b in zip(losses, row["losses"], strict=True)
    )
    return {"verdict": "right" if far <= SAME else "wrong", "difference": far}


def main() -> None:
    import timm
    import transformers

    number = int(sys.argv[1]) if len(sys.argv) > 1 else NUMBER
    file = Path(sys.argv[2]) if len(sys.argv) > 2 else RESULTS
    forked.load_everything()
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    foreign_models.load()
    torch.set_num_threads(1)
    rows_done: list[dict[str, Any]] = []
    counts: dict[str, Counter[str]] = {strategy: Counter() for strategy in STRATEGIES}
    for row in rows(number):
        rows_done.append(row)
        if "left_out" in row:
            continue
        row["strategies"] = {}
        for strategy in STRATEGIES:
            axes = {"pp": 2 if strategy == "1f1b" else 1, "tp": 2 if strategy == "tensor" else 1}
            args = (row["model"], row["side"], strategy)
            task = forked.Task(
                strategy, _nothing, train, args, 2, axes["pp"], LIMIT_S, tp=axes["tp"]
            )
            outcome = next(iter(forked.run_all([task], at_once=2)))
            verdict = judged(row, outcome)
            row["strategies"][strategy] = verdict
            counts[strategy][verdict["verdict"]] += 1
        shown = {s: v["verdict"] for s, v in row["strategies"].items()}
        print(row["model"], shown, file=sys.stderr, flush=True)
        versions = {module.__name__: module.__version__ for module in (timm, transformers)}
        document = {**surroundings(), "seed": SEED, "versions_of_models": versions, "same": SAME}
        document |= {"counts": {s: dict(c) for s, c in counts.items()}, "models": rows_done}
        file.write_text(json.dumps(document, indent=1) + "\n", "utf-8")
    print(json.dumps({s: dict(c) for s, c in counts.items()}))


def _nothing(*_: Any) -> None:
    return None


if __name__ == "__main__":
    main()
