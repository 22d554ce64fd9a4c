"""Runs with adapters and frozen parameters under strategies, and a plain loop with peft."""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from support import hub_models, lora_faults
from torch import Tensor, nn

from bigtrain.assembly import build
from bigtrain.assembly.make_plan import make_plan
from bigtrain.checkpoint.read import Checkpoint
from bigtrain.engine.engine import Engine
from bigtrain.engine.first_batch import example_batch
from bigtrain.errors import BigtrainError
from bigtrain.hub.lora import Adapters, adapters_of
from bigtrain.hub.nf4 import Nf4Layout
from bigtrain.job.load import job_from_keys
from bigtrain.job.schema import ModelConfig
from bigtrain.losses.loss import as_loss
from bigtrain.models.blueprint import Blueprint
from bigtrain.models.spec import ModelSpec
from bigtrain.ranks.context import RunContext
from bigtrain.tensors.shards import read_whole

ROWS, STEPS, SEED = 4, 3, 0
KEEP_FP32 = "LORA_RUNS_KEEP_FP32"
LORA = {"rank": 4, "alpha": 8}
IN_4_BITS = {**LORA, "quantize": "nf4"}


class Plain(nn.Module):
    """A user's model: an embedding, two blocks of linear layers, and a head."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.table = nn.Embedding(hub_models.WORDS, width)
        self.blocks = nn.ModuleList(_Mix(width) for _ in range(4))
        self.head = nn.Linear(width, hub_models.WORDS)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids)
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.head(x)
        return out


class _Mix(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.wide, self.thin = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.thin(torch.tanh(self.wide(self.norm(x))))
        return out


@dataclass(frozen=True)
class Case:
    """A model by name, and its section `model.lora` or its frozen patterns."""

    family: str
    """A family of `hub_models`, `gpt`, or `path`."""
    lora: Mapping[str, Any] | None = None
    freeze: tuple[str, ...] = ()
    args: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of `gpt` besides those of a small one."""

    def config(self, root: Path) -> ModelConfig:
        section: dict[str, Any] = {"lora": self.lora, "freeze": self.freeze}
        if self.family == "gpt":
            args = {"num_layers": 4, "width": 32, "num_heads": 2, "vocab_size": hub_models.WORDS}
            args |= {"sequence_length": hub_models.LENGTH, **self.args}
            section |= {"name": "gpt", "args": args}
        elif self.family == "path":
            section["name"] = "support.lora_runs:Plain"
        else:
            section["name"] = f"hf:{folder_of(root, self.family)}"
        return ModelConfig.model_validate(section)


CASES = {
    "llama": Case("llama", LORA),
    "llama parts": Case(
        "llama", {**LORA, "targets": ["q_proj", "embed_tokens"], "modules_to_save": ["lm_head"]}
    ),
    "gpt2": Case("gpt2", LORA),
    "gpt": Case("gpt", LORA),
    "path": Case("path", {**LORA, "targets": ["wide", "table"], "modules_to_save": ["head"]}),
    "late": Case("path", {**LORA, "targets": ["blocks.[23].wide"]}),
    "frozen": Case("path", freeze=("*", "!blocks.1.*", "!head")),
    "frozen last": Case("gpt", freeze=("blocks.2", "blocks.3", "norm")),
}


WIDE = {"width": 256, "num_heads": 4, "num_layers": 2}
QUANTIZED = {
    "llama 4 bits": Case("llama", IN_4_BITS),
    "llama 4 bits parts": Case(
        "llama",
        {
            **{**IN_4_BITS, "targets": ["q_proj", "embed_tokens"], "modules_to_save": ["lm_head"]},
            "quantize_except": ["layers.1.mlp"],
        },
    ),
    "gpt2 4 bits": Case("gpt2", IN_4_BITS),
    "gpt 4 bits": Case("gpt", IN_4_BITS),
    "path 4 bits": Case("path", {**IN_4_BITS, "targets": ["wide", "table"]}),
    "wide 4 bits": Case("gpt", IN_4_BITS, args=WIDE),
}
"""Cases whose frozen weights are in 4 bits."""
WIDE_FROZEN = {
    name: Case("gpt", freeze=freeze, args={**WIDE, "num_layers": 4})
    for name, freeze in {
        "one of four": ("*", "!blocks.1.*", "!norm"),
        "first and third": ("*", "!blocks.0.*", "!blocks.2.*", "!norm"),
        "last": ("*", "!blocks.3.*", "!norm"),
        "norm alone": ("*", "!norm"),
    }.items()
}
"""Cases of which some blocks are trained, large enough that a block is a quarter of a peak."""
EVERY = {**CASES, **QUANTIZED, **WIDE_FROZEN}


def folder_of(root: Path, family: str) -> Path:
    return root / family.replace(" ", "_")


def prepare(root: Path, names: list[str]) -> None:
    """Save the folders of the cases' models of transformers."""
    for family in {EVERY[name].family for name in names} & set(hub_models.FAMILIES):
        if not folder_of(root, family).exists():
            hub_models.save(family, folder_of(root, family))


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.5)


def rows_loss(output: Any, targets: Tensor) -> Tensor:
    logits = getattr(output, "logits", output)
    return F.cross_entropy(logits.flatten(0, -2), targets.flatten())


def batch(step: int) -> tuple[Tensor, Tensor]:
    ids = hub_models.inputs("llama", step, ROWS)
    return ids, ids.roll(-1, 1)


def train(
    context: RunContext, strategy: str, root: Path, names: list[str], options: Mapping[str, Any]
) -> dict[str, Any]:
    """By case the losses, peaks and this rank's trained tensors; the state is saved at the end."""
    return {name: train_one(context, strategy, root, name, **options) for name in names}


def train_one(
    context: RunContext,
    strategy: str,
    root: Path,
    name: str,
    *,
    keys: Mapping[str, Any] | None = None,
    steps: int = STEPS,
    resumed_from: str | None = None,
    fault: str | None = None,
) -> dict[str, Any]:
    """Train one case, from the checkpoint of another strategy if there is one."""
    fixed = {"train.global_batch_size": ROWS, "train.micro_batch_size": 1, "device": "cpu"}
    try:
        job = job_from_keys(strategy, {**fixed, "memory.track_steps": steps, **(keys or {})})
        plan = make_plan(job, context.world_size, "cpu")
        spec = ModelSpec.of(EVERY[name].config(root))
        blueprint = spec.describe(num_classes=None, sequence_length=None)
        assert blueprint.deferred, blueprint.reason
        loss = as_loss(rows_loss)
        first = tuple(t[: job.train.micro_batch_size] for t in batch(0))
        example = example_batch(first, loss, job, plan)
        with (
            _fp32_kept(),
            lora_faults.put_in(fault, context.rank, blueprint.model),
            Engine(blueprint, loss, sgd, job, context, example=example) as engine,
        ):
            lora_faults.spoil_shards(fault, engine.model)
            if resumed_from is not None:
                engine.load(saved_in(root, name, resumed_from) / f"step-{steps}")
            each, done = ROWS // context.dp_size, engine.steps_done
            own = slice(context.dp_rank * each, (context.dp_rank + 1) * each)
            losses = [
                engine.step(tuple(t[own].clone() for t in batch(n))).loss
                for n in range(done, done + steps)
            ]
            engine.save(saved_in(root, name, strategy))
            prediction = engine.prediction
            return {
                "losses": losses,
                "predicted": prediction.peak,
                "note": prediction.note,
                "measured": engine.meter.measured().peak,
                "state": local_tensors(engine),
            }
    except BigtrainError as error:
        return {"refused": str(error)}


@contextmanager
def _fp32_kept() -> Iterator[None]:
    """With `KEEP_FP32` in the environment frozen parameters of bf16 runs keep fp32 values."""
    if os.environ.get(KEEP_FP32):
        with mock.patch.object(build, "frozen_low_names", return_value=()):
            yield
    else:
        yield


def saved_in(root: Path, name: str, strategy: str) -> Path:
    return root / "saved" / name.replace(" ", "_") / strategy


def local_tensors(engine: Engine) -> dict[str, Tensor]:
    """The whole trained parameters that this rank has, by plain names."""
    found = {}
    for name, tensor in engine.runner.state().items():
        held = sum(extent.size for extent in tensor.extents)
        if name.startswith("model.") and "lora_" in name and held == math.prod(tensor.shape):
            found[name] = tensor.values().clone()
    return found


def begun(root: Path, name: str, *, double: bool = False) -> nn.Module:
    """The model of a case with the values that every run begins with, in one process."""
    model = described(root, name).materialize("cpu", seed=SEED)
    return model.double() if double else model


def described(root: Path, name: str) -> Blueprint:
    """The model of a case, without values."""
    spec = ModelSpec.of(EVERY[name].config(root))
    return spec.describe(num_classes=None, sequence_length=None)


def base_model(root: Path, name: str) -> nn.Module:
    """The model of a case without adapters, made without bigtrain if transformers has it."""
    family = EVERY[name].family
    if family in hub_models.FAMILIES:
        opened: nn.Module = hub_models.reopened(folder_of(root, family), family)
        return opened
    spec = ModelSpec.of(Case(family, args=EVERY[name].args).config(root))
    return spec.describe(num_classes=None, sequence_length=None).materialize("cpu", seed=SEED)


def plain_model(root: Path, name: str, *, double: bool = False) -> nn.Module:
    """The model of a case, made with transformers and peft alone, with the run's adapters."""
    import peft

    case, start = EVERY[name], begun(root, name, double=double)
    base = base_model(root, name)
    base = base.double() if double else base
    if case.lora is None:
        trained = {n for n, p in start.named_parameters() if p.requires_grad}
        for one, parameter in base.named_parameters():
            parameter.requires_grad_(one in trained)
        return base.train()
    lora = case.lora
    adapters = adapters_of(start)
    assert adapters is not None
    targets = "|".join(one.replace(".", r"\.") for one in adapters.targets)
    config = peft.LoraConfig(
        r=lora["rank"],
        lora_alpha=lora["alpha"],
        target_modules=targets,
        modules_to_save=list(adapters.trained) or None,
    )
    with warnings.catch_warnings():  # of Conv1D
        warnings.simplefilter("ignore")
        model = peft.get_peft_model(base, config)  # type: ignore[arg-type]
    if adapters.quantized:
        in_4_bits(model, adapters)
    given = {
        f"base_model.model.{one}": value
        for one, value in start.state_dict().items()
        if "lora_" in one
    }
    unknown = model.load_state_dict(given, strict=False).unexpected_keys
    assert not unknown, unknown
    return model.train()


def in_4_bits(model: Any, adapters: Adapters) -> None:
    """Give the frozen linear layers of peft's model weights of torchao, in 4 bits."""
    from torchao.quantization import to_nf4

    modules = dict(model.named_modules())
    for name, quantized in adapters.quantized.items():
        place = f"base_model.model.{name}"
        place += ".base_layer" if f"{place}.base_layer" in modules else ""
        layer, size = modules[place], Nf4Layout(quantized.shape).scale_block
        values = layer.weight.detach().float()
        if quantized.transposed:  # torchao multiplies by a transpose only
            linear = nn.Linear(*quantized.shape[::-1])
            linear.bias, values = layer.bias, values.t().contiguous()
            parent, _, own = place.rpartition(".")
            setattr(modules[parent], own, linear)
            layer = linear
        layer.weight = nn.Parameter(to_nf4(values, 64, size), requires_grad=False)


def plain_loop(
    root: Path, name: str, steps: int = STEPS, *, double: bool = False
) -> tuple[list[float], dict[str, Tensor]]:
    """The losses of a plain torch loop, and its trained tensors by their names in a checkpoint."""
    model = plain_model(root, name, double=double)
    losses = train_plainly(model, steps)
    trained = {n: p.detach() for n, p in model.named_parameters() if p.requires_grad}
    return losses, {f"model.{_own_name(one)}": value for one, value in trained.items()}


def trained_model(root: Path, name: str, steps: int) -> nn.Module:
    """The model of a case after some steps of a plain torch loop."""
    model = plain_model(root, name)
    train_plainly(model, steps)
    return model


def train_plainly(model: nn.Module, steps: int) -> list[float]:
    losses = []
    optimizer = sgd([p for p in model.parameters() if p.requires_grad])
    for step in range(steps):
        ids, targets = batch(step)
        loss = rows_loss(model(ids), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def assert_equal_on_ranks(results: list[dict[str, Any]], name: str) -> None:
    """The trained tensors that several ranks hold as a whole are equal on all of them."""
    first = results[0][name]["state"]
    for result in results[1:]:
        for one, tensor in result[name]["state"].items():
            if one in first:
                assert torch.equal(tensor, first[one]), one


def assert_saved(step: Path, plain: Mapping[str, Tensor], tolerance: float = 1e-5) -> None:
    """The trained tensors of a checkpoint, and those of peft's file, are those of a plain loop."""
    saved = Checkpoint(step).tensors
    for name, expected in plain.items():
        assert saved[name].shape == tuple(expected.shape), name
        found = read_whole(saved[name]).to(expected.dtype)
        torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance, msg=name)
        is_moved = expected.abs().sum(dim=-1) > 0
        assert torch.equal(found.abs().sum(dim=-1) > 0, is_moved), f"{name}: rows of zeros"
    weights = step / "adapter_model.safetensors"
    if not weights.exists():
        return
    from safetensors.torch import load_file

    alone = load_file(weights)
    assert len(alone) == len(plain)
    for name, expected in plain.items():
        own = name.removeprefix("model.").replace(".default", "")
        found = alone[f"base_model.model.{own}"].to(expected.dtype)
        torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance, msg=name)


def peak_error(result: Mapping[str, Any]) -> float:
    """How far the predicted peak of a rank is from the measured one, as a share of it."""
    assert result["predicted"] is not None, result["note"]
    return float(result["predicted"].bytes / result["measured"].bytes - 1)


def _own_name(name: str) -> str:
    """The name that a parameter of peft's model has in a run."""
    return name.removeprefix("base_model.model.").replace(".modules_to_save.default", "")
