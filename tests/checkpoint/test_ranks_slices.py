"""Slices are saved as whole tensors: any strategy opens them, and slices open any checkpoint."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from support.nets import BlockConv
from support.ranks import run_ranks
from torch import Tensor, nn

from bigtrain.assembly.make_plan import make_plan
from bigtrain.checkpoint.command import describe_checkpoint
from bigtrain.checkpoint.read import Checkpoint
from bigtrain.checkpoint.state_differences import compare_states
from bigtrain.data import MicroBatch
from bigtrain.engine.engine import Engine
from bigtrain.errors import CheckpointError, ConfigError, UnequalRanksError
from bigtrain.job.load import job_from_keys
from bigtrain.losses.loss import CrossEntropy
from bigtrain.models.gpt import GPT, GPTConfig
from bigtrain.optim.factory import optimizer_factory
from bigtrain.ranks.context import RunContext

WORDS, ROWS, MICRO = 29, 8, 2
Mesh = dict[str, int]


def gpt(words: int = WORDS) -> nn.Module:
    """One weight for queries, keys and values; uneven numbers of heads and words on two ranks."""
    sizes = {"num_layers": 2, "width": 24, "num_heads": 3, "vocab_size": words}
    return GPT(GPTConfig(**sizes, sequence_length=6, tie_embeddings=True))


def conv() -> nn.Module:
    """A network with BatchNorm on sliced channels and without random numbers."""
    model = BlockConv(inplace=False)
    for module in model.modules():
        if isinstance(module, nn.Dropout2d):
            module.p = 0.0
    return model


def batch_of(make: Any, step: int) -> tuple[Tensor, Tensor]:
    """The global batch of a step: (inputs, targets)."""
    numbers = torch.Generator().manual_seed(step)
    if make is conv:
        images = torch.randn(ROWS, 1, 8, 8, generator=numbers)
        return images, torch.randint(3, (ROWS,), generator=numbers)
    words = torch.randint(WORDS, (ROWS, 7), generator=numbers)
    return words[:, :-1].contiguous(), words[:, 1:].contiguous()


BASE: dict[str, Any] = {
    "train.global_batch_size": ROWS,
    "train.micro_batch_size": MICRO,
    "optim.clip_norm": 0.5,
    "optim.lr": 1e-2,
    "memory.predict": False,
    "memory.track_steps": 0,
}
FP64 = {**BASE, "train.precision": "fp64"}


def run(
    context: RunContext,
    strategy: str,
    keys: dict[str, Any],
    folder: Path,
    load: Path | None = None,
    make: Any = gpt,
    steps: int = 2,
) -> tuple[Path, list[float]]:
    """Run two steps from a checkpoint or the beginning, save, and run two more; return their
    losses.
    """
    mesh = {"mesh.pp": context.pp_size, "mesh.tp": context.tp_size}
    job = job_from_keys(strategy, {**mesh, **keys})
    data_rank, size = context.dp_rank, ROWS // context.dp_size
    inputs, targets = batch_of(make, 0)
    example = MicroBatch(inputs[:MICRO], targets[:MICRO], targets[:MICRO].numel(), MICRO)
    optimizer = optimizer_factory(job.optim, 0)
    with Engine(make, CrossEntropy(), optimizer, job, context, example=example) as engine:

        def step() -> float:
            rank_rows = slice(data_rank * size, (data_rank + 1) * size)
            inputs, targets = batch_of(make, engine.steps_done)
            return engine.step((inputs[rank_rows], targets[rank_rows])).loss

        if load is not None:
            engine.load(load)
        for _ in range(0 if load is not None else steps):
            step()
        path = engine.save(folder)
        losses = [step() for _ in range(2)]
        engine.saver.wait()
        return path, losses


# Convolutions by columns, the norm between them with its statistics, and then by rows.
CHANNELS = {f"layers.*.1.{name}": "0" for name in ("weight", "bias", "running_mean", "running_var")}
SLICED_NORMS = {"layers.*.0.weight": "0", **CHANNELS, "layers.*.4.weight": "1"}
Case = tuple[str, Mesh]
CASES: dict[str, Case] = {
    "tensor on 3": ("tensor_sequence", {"tp": 3}),
    "fsdp+tensor": ("fsdp+tensor", {"tp": 2, "dp": 2}),
    "1f1b+tensor": ("1f1b+tensor", {"tp": 2, "pp": 2}),
}
MORE: dict[str, Case] = {
    "tensor": ("tensor", {"tp": 2}),
    "tensor on 4": ("tensor", {"tp": 4}),
    "ddp+tensor": ("ddp+tensor", {"tp": 2, "dp": 2}),
    "zero1_torch+tensor": ("zero1_torch+tensor", {"tp": 2, "dp": 2}),
}
OTHERS: dict[str, Case] = {
    "fsdp": ("fsdp", {"dp": 2}),
    "zero1_torch": ("zero1_torch", {"dp": 4}),
    "1f1b": ("1f1b", {"pp": 2}),
}


def runs(
    context: RunContext, strategy: str, folder: Path, loads: list[Path | None]
) -> dict[str, list[tuple[Path, list[float]]]]:
    """Run both models from each of these checkpoints; each is in a folder named after the model."""
    norms = {"strategy.slice.slices": SLICED_NORMS} if "tensor" in strategy else {}
    keys = {gpt: FP64, conv: {**FP64, **norms}}
    return {
        make.__name__: [
            run(
                context, strategy, keys[make], folder / make.__name__ / str(number),
                None if load is None else load / make.__name__ / "0" / "step-2", make,
            )
            for number, load in enumerate(loads)
        ]
        for make in (gpt, conv)
    }  # fmt: skip


def run_on_rank_0(case: Case, folder: Path, *loads: Path) -> Any:
    """The result of rank 0; see `runs`."""
    strategy, mesh = case
    ranks = math.prod(mesh.values())
    return run_ranks(runs, ranks, strategy, folder, [*loads] or [None], timeout_s=120, **mesh)[0]


def assert_same(path: Path, expected: Path, *, buffers: bool) -> None:
    """Assert that two checkpoints have the same names, shapes and values up to rounding."""
    actual, wanted = Checkpoint(path), Checkpoint(expected)
    assert actual.tensors.keys() == wanted.tensors.keys()
    for name, tensor in actual.tensors.items():
        assert tensor.shape == wanted.tensors[name].shape, name
    for far in compare_states(actual, wanted):
        if buffers or not far.name.endswith(("running_mean", "running_var", "tracked")):
            assert far.relative < 1e-9, far


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """The run of one process: its folder, and the result of `runs`."""
    folder = tmp_path_factory.mktemp("single")
    return folder, run_on_rank_0(("single", {"dp": 1}), folder)


@pytest.mark.parametrize("case", [*CASES, *MORE])
def test_slices_are_saved_whole_and_opened_from_whole_ones(
    tmp_path: Path, whole: tuple[Path, Any], case: str
) -> None:
    source, single = whole
    strategy = {**CASES, **MORE}[case]
    saved = run_on_rank_0(strategy, tmp_path / "saved")
    loaded = run_on_rank_0(strategy, tmp_path / "loaded", source)
    back = run_on_rank_0(("single", {"dp": 1}), tmp_path / "back", tmp_path / "saved")
    for name in ("gpt", "conv"):
        ((path, losses),) = single[name]
        # The running statistics of a replica depend on its samples.
        assert_same(saved[name][0][0], path, buffers=strategy[1].get("dp", 1) == 1)
        assert_same(loaded[name][0][0], path, buffers=True)
        for again in (saved, loaded, back):
            assert again[name][0][1] == pytest.approx(losses, rel=1e-11), name


@pytest.mark.parametrize("case", OTHERS)
def test_other_strategies_open_what_slices_have_saved_and_the_other_way_round(
    tmp_path: Path, whole: tuple[Path, Any], case: str
) -> None:
    _, single = whole
    of_stages = run_on_rank_0(CASES["1f1b+tensor"], tmp_path / "stages")
    run_on_rank_0(OTHERS[case], tmp_path / "other", tmp_path / "stages")
    back = run_on_rank_0(CASES["fsdp+tensor"], tmp_path / "back", tmp_path / "other")
    for name in ("gpt", "conv"):
        assert_same(back[name][0][0], of_stages[name][0][0], buffers=True)
        assert back[name][0][1] == pytest.approx(single[name][0][1], rel=1e-11)


def test_of_replicas_the_first_ones_statistics_count_in_slices_too(tmp_path: Path) -> None:
    plain = run_on_rank_0(OTHERS["fsdp"], tmp_path / "plain")
    sliced = run_on_rank_0(CASES["fsdp+tensor"], tmp_path / "sliced")
    assert_same(sliced["conv"][0][0], plain["conv"][0][0], buffers=True)
    description = describe_checkpoint(Checkpoint(sliced["conv"][0][0]))
    assert description["mesh"] == {"pp": 1, "dp": 2, "tp": 2}


OPTIONS: dict[str, tuple[str, dict[str, Any], float]] = {
    "sgd": ("tensor", {"optim.name": "sgd", "train.precision": "fp64"}, 1e-11),
    "bf16 moments": ("tensor", {"optim.state": "bf16", "optim.stochastic_rounding": False}, 1e-5),
    "by chance": ("tensor_sequence", {"optim.state": "bf16"}, 1e-2),
    "on a disk": ("tensor+offload_optimizer_disk", {"train.precision": "fp64"}, 1e-11),
    "on the host": ("tensor+offload_optimizer_cpu", {"train.precision": "fp64"}, 1e-11),
    "bf16": ("tensor_sequence", {"train.precision": "bf16"}, 1e-2),
    "bf16 weights": ("tensor", {"train.precision": "bf16", "optim.master_weights": False}, 1e-2),
    "beside": ("tensor", {"train.precision": "fp64", "checkpoint.asynchronous": True}, 1e-11),
}
"""Additional keys of a job, and the tolerance compared with one process; each third is one test."""


def keys_of(option: str, folder: Path) -> tuple[str, dict[str, Any], float]:
    strategy, keys, tolerance = OPTIONS[option]
    disk = {"strategy.offload.path": str(folder)} if strategy.endswith("disk") else {}
    return strategy, {**BASE, **keys, **disk}, tolerance


def options(context: RunContext, folder: Path, chosen: list[str]) -> dict[str, Any]:
    """For each option: the losses after a save, and after the checkpoint was opened again."""
    losses_by_option = {}
    for option in chosen:
        strategy, keys, _ = keys_of(option, folder)
        path, losses = run(context, strategy, keys, folder / option)
        _, again = run(context, strategy, keys, folder / f"{option}, again", path)
        losses_by_option[option] = losses, again
    return losses_by_option


def options_in_one_process(
    context: RunContext, folder: Path, chosen: list[str]
) -> dict[str, list[float]]:
    losses = {}
    for option in chosen:
        strategy, keys, _ = keys_of(option, folder)
        single = strategy.replace("tensor_sequence", "single").replace("tensor", "single")
        losses[option] = run(context, single, keys, folder / "one", folder / option / "step-2")[1]
    return losses


@pytest.mark.parametrize("part", [0, 1, 2])
def test_what_optimizers_keep_in_slices_is_saved_and_opened(tmp_path: Path, part: int) -> None:
    chosen = [*OPTIONS][part::3]
    ranks = run_ranks(options, 2, tmp_path, chosen, tp=2, timeout_s=120)
    (single,) = run_ranks(options_in_one_process, 1, tmp_path, chosen, timeout_s=120)
    for rank_losses in ranks:
        for option, (losses, again) in rank_losses.items():
            assert again == losses, option  # bit for bit
            assert single[option] == pytest.approx(losses, rel=OPTIONS[option][2]), option


@pytest.mark.parametrize("name", ["adafactor", "adamw_8bit", "adamw_4bit"])
def test_state_of_whole_parameters_is_refused_with_slices(name: str) -> None:
    job = job_from_keys("tensor", {**BASE, "optim.name": name, "mesh.tp": 2})
    with pytest.raises(ConfigError, match=rf"optim.name={name} .*mesh.tp=2.*optim.state=bf16"):
        make_plan(job, 2, "cpu")


def save_drifted_state(context: RunContext, folder: Path, name: str, changed_rank: int) -> str:
    """Save a state in which one rank has a different number; return the message."""
    job = job_from_keys("ddp+tensor", {**FP64, "mesh.tp": 2})
    inputs, targets = batch_of(gpt, 0)
    example = MicroBatch(inputs[:MICRO], targets[:MICRO], targets[:MICRO].numel(), MICRO)
    with Engine(
        gpt, CrossEntropy(), partial(torch.optim.AdamW, lr=0.1), job, context, example=example
    ) as engine:
        rank_rows = slice(4 * context.dp_rank, 4 * context.dp_rank + 4)
        engine.step((inputs[rank_rows], targets[rank_rows]))
        path = engine.save(folder)
        assert path.is_dir()
        if context.rank == changed_rank:
            with torch.no_grad():
                parameter = engine.runner.module.get_parameter("blocks.1.mlp_norm.weight")
                state = engine.runner.optimizer.state[parameter]
                tensor = {"parameter": parameter, **state}.get(name)
                if tensor is None:
                    torch.rand(1)
                else:
                    tensor[3] = torch.nextafter(tensor[3], tensor[3] + 1)
        engine.steps_done += 1
        with pytest.raises(UnequalRanksError) as caught:
            engine.save(folder)
        assert [one.name for one in folder.iterdir() if "step" in one.name] == ["step-1"]
        return str(caught.value)


@pytest.mark.parametrize(
    ("name", "changed_rank", "expected_message"),
    [
        ("parameter", 3, "model.blocks.1.mlp_norm.weight is not the same on rank 3 as on rank 2"),
        (
            "exp_avg_sq",
            1,
            "optimizer.blocks.1.mlp_norm.weight.exp_avg_sq is not the same on rank 1",
        ),
        ("", 0, "the stream of random numbers is not the same on rank 1 as on rank 0"),
    ],
)
def test_whole_tensors_that_differ_are_named_before_anything_is_written(
    tmp_path: Path, name: str, changed_rank: int, expected_message: str
) -> None:
    for message in run_ranks(save_drifted_state, 4, tmp_path, name, changed_rank, tp=2):
        assert message.startswith(f"step 2: {expected_message}")
        assert "train.deterministic=true" in message
        assert "no checkpoint was written" in message


def load_other_size(context: RunContext, folder: Path, load: Path) -> str:
    """The message of loading a checkpoint into a larger vocabulary; empty if it loads."""
    try:
        run(context, "tensor", FP64, folder, load, partial(gpt, words=WORDS + 4))
    except CheckpointError as error:
        return str(error)
    return ""


def test_a_checkpoint_of_another_model_is_refused_also_where_it_is_sliced(
    tmp_path: Path, whole: tuple[Path, Any]
) -> None:
    path = whole[1]["gpt"][0][0]
    for message in run_ranks(load_other_size, 2, tmp_path, path, tp=2):
        assert "model.embedding.token.weight has shape (29, 24) in the checkpoint" in message
        assert "its dim 0 is 33 long in the model" in message


def streams(context: RunContext, folder: Path, load: Path | None) -> tuple[float, str]:
    """Random numbers that a rank draws after a save or a resume."""
    keys = {**FP64, "mesh.tp": context.tp_size}
    strategy = "ddp" if context.tp_size == 1 else "ddp+tensor"
    path, _ = run(context, strategy, keys, folder, load, steps=1)
    return float(torch.rand(())), str(path)


def test_ranks_of_one_tp_group_draw_alike_also_after_a_run_of_another_mesh(tmp_path: Path) -> None:
    alike = run_ranks(streams, 4, tmp_path / "slices", None, tp=2)
    as_before = run_ranks(streams, 4, tmp_path / "again", Path(alike[0][1]), tp=2)
    apart = run_ranks(streams, 4, tmp_path / "whole", Path(alike[0][1]))
    together = run_ranks(streams, 4, tmp_path / "back", Path(apart[0][1]), tp=2)
    for draws in (alike, as_before, together):
        drawn = [number for number, _ in draws]
        assert drawn[0] == drawn[1] != drawn[2] == drawn[3]
    assert [number for number, _ in alike] == [number for number, _ in as_before]
    assert len({number for number, _ in apart}) == 4
