"""DeepSpeed's AutoTP given a plan of slices, as it is, beside one process: its numbers.

Nothing of this project is in the loop but its GPT: DeepSpeed's engine is started on forked ranks
over gloo, trained for three steps, and compared with one process on the same batches: losses, the
norm that it reports, every weight, and whether replicated parameters are equal on all ranks. The
net whose MLP goes over places gives its layer by columns an input that is not contiguous.

    OMP_NUM_THREADS=1 .venv/bin/python benchmarks/autotp.py

Writes results/autotp.json.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from harness import keep
from torch import Tensor, nn
from torch.nn import functional as F

from bigtrain.models.gpt import GPT, GPTConfig

FILE = Path(__file__).parent / "results" / "autotp.json"
WORDS, PLACES, WIDTH, STEPS, RATE = 64, 16, 32, 3, 0.1
BASE: dict[str, Any] = {"model": "gpt", "ranks": 2, "stage": 1, "clip": 0.1, "rows": 8, "micro": 4}
CASES: dict[str, dict[str, Any]] = {
    **{
        f"gpt, stage {stage}, {ranks} ranks": {"stage": stage, "ranks": ranks}
        for stage in (0, 1, 2, 3)
        for ranks in (2, 4)
    },
    "gpt, accumulating": {"ranks": 4, "micro": 2},
    "over places, micro-batches of 4": {"model": "over places"},
    "over places, micro-batches of 1": {"model": "over places", "micro": 1},
    "over places, one sample": {"model": "over places", "rows": 1, "micro": 1, "clip": 0.0},
}
"""Slices over 2 ranks; the others are replicas."""


class OverPlaces(nn.Module):
    """A mixer's MLP: its layers take what lies along the places."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.expand, self.output = nn.Linear(PLACES, 64), nn.Linear(64, PLACES)
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, words: Tensor) -> Tensor:
        """(rows, places) to (rows, places, WORDS)."""
        x = self.words(words)
        mixed = self.output(F.gelu(self.expand(x.transpose(1, 2))))
        made: Tensor = self.head(x + mixed.transpose(1, 2))
        return made


def made(name: str) -> nn.Module:
    """A model by its name, the same on each rank."""
    torch.manual_seed(0)
    if name == "over places":
        return OverPlaces()
    shape = GPTConfig(
        vocab_size=WORDS, sequence_length=PLACES, num_layers=2, num_heads=4, width=WIDTH
    )
    model = GPT(shape)
    for parameter_name, parameter in model.named_parameters():
        parameter.data.mul_(3)
        if parameter_name.endswith("bias"):
            parameter.data.normal_(std=0.1)
    return model


LINES = [
    {"patterns": [r".*qkv\.weight$"], "partition_type": "column", "shape": [3, -1],
     "partition_dim": 0},
    {"patterns": [r".*expand\.weight$"], "partition_type": "column"},
    {"patterns": [r".*output\.weight$"], "partition_type": "row"},
]  # fmt: skip


def batch(step: int, rows: int) -> tuple[Tensor, Tensor]:
    """The global batch of a step."""
    numbers = torch.Generator().manual_seed(100 + step)
    words = torch.randint(0, WORDS, (rows, PLACES + 1), generator=numbers)
    return words[:, :-1], words[:, 1:]


def loss_of(model: Any, inputs: Tensor, targets: Tensor) -> Tensor:
    """The mean over targets."""
    return F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())


def one_process(case: dict[str, Any]) -> dict[str, Any]:
    """Losses, norms and weights of one process."""
    model = made(case["model"])
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9)
    losses, norms = [], []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = loss_of(model, *batch(step, case["rows"]))
        loss.backward()  # type: ignore[no-untyped-call]
        norm = nn.utils.clip_grad_norm_(model.parameters(), case["clip"] or 1e9)
        optimizer.step()
        losses.append(loss.item())
        norms.append(norm.item())
    weights = {name: p.detach() for name, p in model.named_parameters()}
    return {"losses": losses, "norms": norms, "weights": weights}


def on_rank(rank: int, case: dict[str, Any], folder: str) -> None:
    """The same under DeepSpeed; the first rank writes what came out."""
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    place = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(case["ranks"])}
    os.environ |= {**place, "DS_ACCELERATOR": "cpu"}
    import deepspeed
    import deepspeed.comm.torch as backend

    backend.build_shm_op = lambda: None  # a minute of compiling
    store = {"init_method": f"file://{folder}/store", "rank": rank, "world_size": case["ranks"]}
    dist.init_process_group("gloo", **store)
    deepspeed.init_distributed("gloo", auto_mpi_discovery=False, verbose=False)
    model, replicas = made(case["model"]), case["ranks"] // 2
    rows, micro = case["rows"] // replicas, case["micro"]
    times = max(1, rows // micro)
    config = {
        "train_micro_batch_size_per_gpu": min(micro, rows),
        "gradient_accumulation_steps": times,
        "gradient_clipping": case["clip"],
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": {"stage": case["stage"]},
        "tensor_parallel": {
            "autotp_size": 2,
            "partition_config": {"use_default_specs": False, "layer_specs": LINES},
        },
    }
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9)
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=optimizer, config=config, dist_init_required=False
    )
    losses, norms = [], []
    for step in range(STEPS):
        total = 0.0
        own = slice(rank // 2 * rows, (rank // 2 + 1) * rows)
        inputs, targets = (part[own] for part in batch(step, case["rows"]))
        for part in zip(*(torch.split(whole, micro) for whole in (inputs, targets)), strict=True):
            loss = loss_of(engine, *part)
            engine.backward(loss)
            engine.step()
            total += loss.item() / times
        shared = torch.tensor(total, dtype=torch.float64)
        dist.all_reduce(shared)
        losses.append(shared.item() / case["ranks"])
        norms.append(float(engine.get_global_grad_norm() or 0))
    weights, apart = {}, 0.0
    for name, parameter in engine.module.named_parameters():
        whole = gathered(engine.module, name, parameter)
        high, low = whole.clone(), whole.clone()
        dist.all_reduce(high, dist.ReduceOp.MAX)
        dist.all_reduce(low, dist.ReduceOp.MIN)
        apart = max(apart, float((high - low).abs().max()))
        weights[name] = whole
    if rank == 0:
        found = {"losses": losses, "norms": norms, "weights": weights, "apart": apart}
        torch.save(found, f"{folder}/found")
    dist.barrier()


def gathered(model: nn.Module, name: str, parameter: Any) -> Tensor:
    """A parameter as a whole."""
    if hasattr(parameter, "ds_id"):
        from deepspeed import zero

        with zero.GatheredParameters([parameter]):
            return _joined(model, name, parameter)
    return _joined(model, name, parameter)


def _joined(model: nn.Module, name: str, parameter: Any) -> Tensor:
    own = parameter.data
    if hasattr(parameter, "gather_params"):
        layer, by_place = model.get_submodule(name.rpartition(".")[0]), name.endswith("weight")
        alone = by_place or type(layer).__name__ == "SubParamLinearLayer"
        parameter.gather_params([parameter] if alone else [None, parameter])
    whole: Tensor = parameter.data.clone().contiguous()
    parameter.data = own
    return whole


def compared(case: dict[str, Any]) -> dict[str, Any]:
    """How far DeepSpeed's run is from that of one process."""
    expected = one_process(case)
    with tempfile.TemporaryDirectory() as folder:
        forks = multiprocessing.get_context("fork")
        ranks = [
            forks.Process(target=on_rank, args=(n, case, folder)) for n in range(case["ranks"])
        ]
        for rank in ranks:
            rank.start()
        for rank in ranks:
            rank.join()
        found = torch.load(f"{folder}/found")
    far = {n: float((w - found["weights"][n]).abs().max()) for n, w in expected["weights"].items()}
    furthest = max(far, key=lambda name: far[name])

    def most(key: str) -> float:
        pairs = zip(expected[key], found[key], strict=True)
        return max(abs(float(a) - float(b)) for a, b in pairs)

    return {
        **case,
        "losses_differ": most("losses"),
        "norms_differ": most("norms") if any(found["norms"]) else None,
        "weights_differ": far[furthest],
        "furthest": furthest,
        "ranks_apart": found["apart"],
    }


def main() -> None:
    """Run all cases and write them down."""
    rows = {name: compared({**BASE, **case}) for name, case in CASES.items()}
    for name, row in rows.items():
        print(name, {key: row[key] for key in row if key not in BASE})
    keep(FILE, {"cases": rows})


if __name__ == "__main__":
    main()
