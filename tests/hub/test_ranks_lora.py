"""Adapters and frozen parameters under every strategy, compared with a plain loop of peft."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from support.peaks import repeat_if_above
from support.ranks import run_ranks

pytest.importorskip("peft")
from support import hub_models, lora_runs  # noqa: E402
from support.lora_faults import FAULTS, FAULTS_IN_4_BITS  # noqa: E402

from bigtrain.checkpoint.read import Checkpoint  # noqa: E402
from bigtrain.hub.export import export_folder  # noqa: E402
from bigtrain.hub.lora import adapters_of  # noqa: E402
from bigtrain.hub.nf4 import CARRIER  # noqa: E402
from bigtrain.tensors.shards import read_whole  # noqa: E402

AXES: dict[str, dict[str, int]] = {
    **dict.fromkeys(("1f1b", "gpipe", "interleaved_1f1b", "zero_bubble"), {"pp": 2}),
    **{"tensor": {"tp": 2}, "1f1b_ddp": {"pp": 2}, "1f1b_fsdp": {"pp": 2}},
}
DEEPSPEED = ("zero1", "zero2", "zero3", "zero2_offload", "zero3_offload")
REPLICAS = ("ddp", "fsdp", "fsdp_zero2", "zero1_torch")


def run(strategy: str, ranks: int, root: Path, names: list[str], **options: Any) -> Any:
    lora_runs.prepare(root, names)
    axes = AXES.get(strategy.partition("+")[0], {})
    given = (strategy, root, names, options)
    return run_ranks(lora_runs.train, ranks, *given, flavour="hub", timeout_s=400.0, **axes)


def check(strategy: str, ranks: int, root: Path, names: list[str], *, double: bool = False) -> None:
    options = {"keys": {"train.precision": "fp64"}} if double else {}
    results = run(strategy, ranks, root, names, **options)
    tolerance = 1e-10 if double else 1e-5
    for name in names:
        losses, trained = lora_runs.plain_loop(root, name, double=double)
        for result in results:
            assert "refused" not in result[name], result[name]
            assert result[name]["losses"] == pytest.approx(losses, abs=tolerance / 5), name
        check_frozen_parts([result[name] for result in results])
        lora_runs.assert_equal_on_ranks(results, name)
        step = lora_runs.saved_in(root, name, strategy) / f"step-{lora_runs.STEPS}"
        lora_runs.assert_saved(step, trained, tolerance)


def check_frozen_parts(results: list[dict[str, Any]]) -> None:
    """Frozen parameters are a part of their own, in the forecast and in the measured peak."""
    assert any(result["measured"].breakdown.frozen for result in results)
    for result in results:
        if result["predicted"] is not None:
            parts = result["predicted"].breakdown, result["measured"].breakdown
            assert parts[0].frozen == parts[1].frozen


EVERY_CASE = [*lora_runs.CASES]
GRID = [
    *((strategy, 2) for strategy in (*REPLICAS, *DEEPSPEED[:4], *AXES) if "1f1b_" not in strategy),
    *((f"{strategy}+full", 2) for strategy in ("fsdp", "zero2", "1f1b")),
    *(("ddp+offload_cpu", 2), ("fsdp", 4), ("zero3", 4), ("1f1b_ddp", 4), ("1f1b_fsdp", 4)),
]
DOUBLE = ("ddp", "fsdp", "1f1b", "tensor")


@pytest.mark.parametrize(
    ("strategy", "ranks", "names", "double"),
    [
        ("fsdp", 2, ["gpt"], False),
        ("1f1b", 2, ["path", "frozen last"], False),
        *((*one, EVERY_CASE, False) for one in GRID),
        *((one, 2, EVERY_CASE, True) for one in DOUBLE),
    ],
)
def test_adapters_are_those_of_a_plain_loop(strategy, ranks, names, double, tmp_path):
    check(strategy, ranks, tmp_path, names, double=double)


def test_peft_and_transformers_open_the_adapters_and_another_strategy_goes_on(tmp_path):
    """Two steps under fsdp, opened; the rest in a pipeline."""
    name, steps = "llama parts", 2
    run("fsdp", 2, tmp_path, [name], steps=steps, keys={"memory.predict": False})
    expected = trained_logits(tmp_path, name, steps)
    step = lora_runs.saved_in(tmp_path, name, "fsdp") / f"step-{steps}"
    check_opened(tmp_path, name, step, expected)
    options = {"steps": steps, "resumed_from": "fsdp"}
    results = run("1f1b", 2, tmp_path, [name], **options)
    losses, trained = lora_runs.plain_loop(tmp_path, name, 2 * steps)
    for result in results:
        assert result[name]["losses"] == pytest.approx(losses[steps:], abs=2e-6)
    last = lora_runs.saved_in(tmp_path, name, "1f1b") / f"step-{2 * steps}"
    lora_runs.assert_saved(last, trained)


def trained_logits(root: Path, name: str, steps: int) -> torch.Tensor:
    model = lora_runs.trained_model(root, name, steps).eval()
    return logits(model)


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        output = model.eval()(lora_runs.batch(9)[0])
    return getattr(output, "logits", output)


def check_opened(root: Path, name: str, step: Path, expected: torch.Tensor) -> None:
    """By peft from an export, merged, and the checkpoint itself by transformers."""
    import peft
    import transformers

    family = lora_runs.EVERY[name].family
    places = root / f"opened-{step.parent.name}-{step.parent.parent.name}"
    alone, merged = places / "alone", places / "merged"
    places.mkdir()
    made = export_folder(Checkpoint(step), alone, None)
    assert made.opened_by == "peft"
    with warnings.catch_warnings():  # of Conv1D
        warnings.simplefilter("ignore")
        opened = peft.PeftModel.from_pretrained(lora_runs.base_model(root, name), str(alone))
    adapters = adapters_of(lora_runs.begun(root, name))
    if adapters.quantized:  # they were trained on this base
        lora_runs.in_4_bits(opened, adapters)
    torch.testing.assert_close(logits(opened), expected, rtol=1e-5, atol=2e-6)
    if family not in hub_models.FAMILIES:
        return
    export_folder(Checkpoint(step), merged, None, merge=True)
    assert hub_models.keys_of(merged) == hub_models.keys_of(lora_runs.folder_of(root, family))
    torch.testing.assert_close(
        logits(hub_models.reopened(merged, family)), expected, rtol=1e-5, atol=2e-6
    )
    if adapters.quantized:
        return
    with hub_models.quiet(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        itself = transformers.AutoModelForCausalLM.from_pretrained(step)
    torch.testing.assert_close(logits(itself), expected, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_of_another_project_would_be_found(fault, tmp_path):
    name, strategy = "gpt", "ddp" if fault == "not averaged" else "fsdp"
    keys = {"memory.predict": False}
    steps = lora_runs.STEPS
    if fault == "first slice reloaded":
        run(strategy, 2, tmp_path, [name], keys=keys)
        results = run(
            "fsdp_zero2", 2, tmp_path, [name], keys=keys, resumed_from=strategy, fault=fault
        )
        losses, _ = lora_runs.plain_loop(tmp_path, name, 2 * steps)
        with pytest.raises(AssertionError):
            assert results[0][name]["losses"] == pytest.approx(losses[steps:], abs=2e-6)
        return
    results = run(strategy, 2, tmp_path, [name], keys=keys, fault=fault)
    _, trained = lora_runs.plain_loop(tmp_path, name)
    step = lora_runs.saved_in(tmp_path, name, strategy) / f"step-{steps}"
    with pytest.raises(AssertionError):
        lora_runs.assert_saved(step, trained)
    if fault == "not averaged":
        with pytest.raises(AssertionError):
            lora_runs.assert_equal_on_ranks(results, name)
    else:
        assert results[0][name]["losses"] == pytest.approx(lora_runs.plain_loop(tmp_path, name)[0])


def test_frozen_weights_in_bf16_change_no_number(tmp_path, monkeypatch):
    """Their fp32 values are left out: the losses are equal bit for bit, and memory is lower."""
    keys = {"train.precision": "bf16", "memory.predict": False}
    found = run("ddp", 1, tmp_path, ["gpt"], keys=keys)[0]["gpt"]
    monkeypatch.setenv(lora_runs.KEEP_FP32, "1")
    before = run("ddp", 1, tmp_path, ["gpt"], keys=keys)[0]["gpt"]
    assert found["losses"] == before["losses"]
    assert found["measured"].bytes < 0.7 * before["measured"].bytes
    saved = Checkpoint(lora_runs.saved_in(tmp_path, "gpt", "ddp") / f"step-{lora_runs.STEPS}")
    assert saved.tensors["model.blocks.0.mlp.expand.base_layer.weight"].dtype == torch.float32


@pytest.mark.parametrize(
    "strategy", ["ddp", "fsdp", "zero1_torch", "zero2", "zero3", "1f1b", "zero_bubble", "tensor"]
)
def test_their_peaks_are_predicted(strategy, tmp_path):
    names, low = ["gpt", "late", "frozen", "llama", "gpt2"], {"train.precision": "bf16"}
    for keys in ({}, low):
        rows = repeat_if_above(
            lambda keys=keys: run(strategy, 2, tmp_path, names, keys=keys),
            lambda row: min(lora_runs.peak_error(row[name]) for name in names) < -0.01,
        )
        for row in rows:
            for name in names:
                # DeepSpeed's smallest bucket has 1 KiB, 1.5 % of the smallest of these nets.
                allowed = max(0.01, 1040 / row[name]["measured"].bytes)
                assert abs(lora_runs.peak_error(row[name])) < allowed, (name, keys)


@pytest.mark.parametrize(
    "strategy",
    ["ddp", "fsdp", "fsdp_zero2", "zero2", "zero3", "1f1b", "zero1_torch", "tensor"],
)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_peaks_of_runs_that_train_some_blocks_are_predicted(strategy, precision, tmp_path):
    names, keys = [*lora_runs.WIDE_FROZEN], {"train.precision": precision}
    rows = repeat_if_above(
        lambda: run(strategy, 2, tmp_path, names, keys=keys),
        lambda row: min(lora_runs.peak_error(row[name]) for name in names) < -0.01,
    )
    errors = {name: [lora_runs.peak_error(row[name]) for row in rows] for name in names}
    assert all(abs(error) < 0.01 for row in errors.values() for error in row), errors


def test_a_frozen_parameter_that_two_stages_of_a_rank_share_counts_once(tmp_path):
    """The tied embedding of the first and the last stage, which a V shape puts on one rank."""
    keys, names = {"strategy.cut.schedule": "zbv_zero_bubble"}, ["gpt", "gpt2"]
    rows = repeat_if_above(
        lambda: run("zero_bubble", 2, tmp_path, names, keys=keys),
        lambda row: min(lora_runs.peak_error(row[name]) for name in names) < -0.01,
    )
    for name in names:
        check_frozen_parts([row[name] for row in rows])
        for row in rows:
            assert lora_runs.peak_error(row[name]) == pytest.approx(0, abs=0.01), name


@pytest.mark.parametrize("strategy", ["fsdp", "zero3", "1f1b", "tensor"])
def test_every_case_is_opened_again(strategy, tmp_path):
    names = [name for name, case in lora_runs.CASES.items() if case.lora]
    run(strategy, 2, tmp_path, names, keys={"memory.predict": False})
    for name in names:
        step = lora_runs.saved_in(tmp_path, name, strategy) / f"step-{lora_runs.STEPS}"
        check_opened(tmp_path, name, step, trained_logits(tmp_path, name, lora_runs.STEPS))


# A base in 4 bits (QLoRA): the plain loop has weights of torchao.

IN_4_BITS = [*lora_runs.QUANTIZED]
GRID_IN_4_BITS = [
    *((strategy, 2) for strategy in (*REPLICAS, "1f1b", "gpipe", "interleaved_1f1b")),
    *(("zero_bubble", 2), ("fsdp+full", 2), ("1f1b+full", 2), ("ddp+offload_cpu", 2)),
    *(("fsdp", 4), ("1f1b_ddp", 4), ("1f1b_fsdp", 4)),
]


def check_peaks(results: list[dict[str, Any]], name: str) -> None:
    for result in results:
        assert lora_runs.peak_error(result[name]) == pytest.approx(0, abs=0.01), name


def test_a_base_in_4_bits_is_sharded_saved_and_goes_on_in_a_pipeline(tmp_path):
    """Two steps under fsdp, two in a pipeline; a merged export has the logits."""
    names, steps = ["wide 4 bits", "gpt2 4 bits"], 2
    first = run("fsdp", 2, tmp_path, names, steps=steps)
    options = {"steps": steps, "resumed_from": "fsdp"}
    later = run("1f1b", 2, tmp_path, names, **options)
    for name in names:
        check_peaks([*first, *later], name)
        losses, trained = lora_runs.plain_loop(tmp_path, name, 2 * steps)
        for before, after in zip(first, later, strict=True):
            found = [*before[name]["losses"], *after[name]["losses"]]
            assert found == pytest.approx(losses, abs=2e-6)
        last = lora_runs.saved_in(tmp_path, name, "1f1b") / f"step-{2 * steps}"
        lora_runs.assert_saved(last, trained)
        same_base(lora_runs.saved_in(tmp_path, name, "fsdp") / f"step-{steps}", last)
        check_opened(tmp_path, name, last, trained_logits(tmp_path, name, 2 * steps))


def same_base(one: Path, other: Path) -> None:
    """Two checkpoints have the same weights in 4 bits, bit for bit."""
    first, second = Checkpoint(one).tensors, Checkpoint(other).tensors
    names = [name for name in first if name.endswith(CARRIER)]
    assert names
    for name in names:
        assert torch.equal(read_whole(first[name]), read_whole(second[name])), name


@pytest.mark.parametrize(
    ("strategy", "ranks", "names", "double"),
    [
        *((*one, IN_4_BITS, False) for one in GRID_IN_4_BITS),
        *((one, 2, IN_4_BITS, True) for one in ("ddp", "fsdp", "1f1b")),
    ],
)
def test_adapters_on_a_base_in_4_bits_are_those_of_a_plain_loop(
    strategy, ranks, names, double, tmp_path
):
    check(strategy, ranks, tmp_path, names, double=double)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "fsdp_zero2", "zero1_torch", "1f1b"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_peaks_with_a_base_in_4_bits_are_predicted(strategy, precision, tmp_path):
    keys = {"train.precision": precision}
    rows = repeat_if_above(
        lambda: run(strategy, 2, tmp_path, IN_4_BITS, keys=keys),
        lambda row: min(lora_runs.peak_error(row[name]) for name in IN_4_BITS) < -0.01,
    )
    for name in IN_4_BITS:
        check_peaks(rows, name)


@pytest.mark.parametrize("fault", FAULTS_IN_4_BITS)
def test_a_wrong_base_in_4_bits_would_be_found(fault, tmp_path):
    name, strategy = "gpt 4 bits", "fsdp" if "slice" in fault else "ddp"
    results = run(strategy, 2, tmp_path, [name], keys={"memory.predict": False}, fault=fault)
    losses, trained = lora_runs.plain_loop(tmp_path, name)
    for result in results:
        assert result[name]["losses"] != pytest.approx(losses, abs=2e-6)
    step = lora_runs.saved_in(tmp_path, name, strategy) / f"step-{lora_runs.STEPS}"
    with pytest.raises(AssertionError):
        lora_runs.assert_saved(step, trained)
