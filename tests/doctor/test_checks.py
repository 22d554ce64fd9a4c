"""The runs of `bigtrain doctor --check`: their rules, their command and their result file."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from bigtrain import cli
from bigtrain.compare.rows import ComparisonRow
from bigtrain.devices import accelerator
from bigtrain.doctor import check_runs, command, rules
from bigtrain.doctor.checks import CHECKS, Check
from bigtrain.doctor.rules import CheckedRun, forecast_holds, same_losses
from bigtrain.units import GIB, MIB

ROW = ComparisonRow(
    "single", 1, "ok", peak_bytes=1000, predicted_peak_bytes=1004, losses=(5.0, 4.0)
)
GOOD = CheckedRun("single", "", "passed", "", status=0, row=ROW)
FAILED = CheckedRun("other", "", "passed", "it crashed", status=1, last_lines=["bigtrain: crashed"])


LOST = replace(FAILED, last_lines=["bigtrain: rank 1 was killed (signal 9)"])
PLAIN = {"peak_bytes": 1000, "losses": [5.0], "step_seconds": 1.0, "waits": None}
BESIDE = {"plain": PLAIN, "prepared": PLAIN}


def beside(**changes: object) -> dict[str, object]:
    return {"plain": PLAIN, "prepared": {**PLAIN, **changes}}


def with_figures(figures: dict[str, object]) -> CheckedRun:
    return replace(GOOD, figures=figures)


def like_single(**changes: object) -> CheckedRun:
    return replace(GOOD, name="other", row=replace(ROW, **changes))


@pytest.mark.parametrize(
    ("rule", "run", "wrong"),
    [
        (forecast_holds, GOOD, None),
        (
            forecast_holds,
            like_single(predicted_peak_bytes=1006),
            r"\+0\.60% off \(6 B\); 0\.5% is allowed",
        ),
        (forecast_holds, like_single(predicted_peak_bytes=None), "no forecast of its peak"),
        (forecast_holds, FAILED, "it crashed"),
        (same_losses("single"), like_single(losses=(5.0, 4.00001)), None),
        (
            same_losses("single"),
            like_single(losses=(5.0, 4.001)),
            r"by 2\.5e-04 from those of single",
        ),
        (same_losses("single"), like_single(losses=(5.0,)), "has 1 losses, and single 2"),
        (same_losses("single"), like_single(losses=(5.0, float("nan"))), "nan from those of"),
        (same_losses("single"), FAILED, "it crashed"),
        (rules.smaller_than("single"), like_single(peak_bytes=999), None),
        (rules.smaller_than("single"), GOOD, "1000 B is not below the 1000 B of single"),
        (rules.smaller_than("single"), FAILED, "a peak is missing"),
        (rules.has_saved, replace(GOOD, checkpoints=["step-3"]), None),
        (rules.has_saved, GOOD, "wrote no checkpoint"),
        (rules.has_saved, FAILED, "it crashed"),
        (rules.continues("single"), like_single(losses=(4.0,)), None),
        (
            rules.continues("single"),
            like_single(losses=(4.1,)),
            r"differ by 2\.5e-02 from the last",
        ),
        (rules.continues("single"), GOOD, "has 2 losses, and a part of the 2 of single"),
        (rules.continues("single"), FAILED, "it crashed"),
        (rules.ends_with_lost_rank, GOOD, "status 0 instead of 1"),
        (rules.ends_with_lost_rank, FAILED, "no line says that rank 1 was killed"),
        (rules.ends_with_lost_rank, LOST, None),
        (rules.ends_with_lost_rank, replace(LOST, leftovers=2), "2 of its processes"),
        (rules.one_context_per_rank, with_figures({"gpus-0": [0]}), None),
        (rules.one_context_per_rank, with_figures({}), "0 of 1 ranks reported"),
        (rules.one_context_per_rank, with_figures({"gpus-0": [0, 1]}), r"on the GPUs \[0, 1\]"),
        (rules.no_more_than_plain_torch, with_figures(BESIDE), None),
        (rules.no_more_than_plain_torch, FAILED, "it crashed"),
        (rules.no_more_than_plain_torch, with_figures(beside(losses=[5.1])), "differ by 2"),
        (
            rules.no_more_than_plain_torch,
            with_figures(beside(peak_bytes=1100)),
            "peak is 1.1 KiB, and the plain loop's is 1000 B",
        ),
        (rules.explains_out_of_memory, GOOD, "status 0 instead of 1"),
        (rules.explains_out_of_memory, FAILED, "does not say 'out of memory'"),
        (
            rules.explains_out_of_memory,
            replace(
                FAILED,
                last_lines=[
                    "rank 0 ran out of memory",
                    "with one of these changes the job is predicted to fit:",
                ],
            ),
            None,
        ),
    ],
)
def test_rules(rule, run, wrong) -> None:
    found = rule(run, {"single": GOOD})
    if wrong is None:
        assert found is None
    else:
        assert found is not None
        assert re.search(wrong, found)


def test_workspaces_that_are_no_larger_than_a_gpus_kernels_want_are_let_pass(monkeypatch) -> None:
    monkeypatch.setattr(rules, "accelerator", lambda: "cuda")
    sizes = (200 * MIB, 263 * MIB, 7000 * MIB, 7069 * MIB, 7100 * MIB)

    def found(peak: int, predicted: int) -> str | None:
        run = replace(GOOD, row=replace(ROW, peak_bytes=peak, predicted_peak_bytes=predicted))
        return forecast_holds(run, {})

    small, within, large, share, beyond = sizes
    assert found(within, small) is None  # 24 %, and 63 MiB
    assert found(small, within + 2 * MIB) == (
        "its forecast is +32.50% off (65.0 MiB); 64.0 MiB is allowed"
    )
    assert found(large, share) is None
    assert found(large, beyond) == "its forecast is +1.43% off (100.0 MiB); 1.0% is allowed"


def test_what_others_are_held_against_comes_first() -> None:
    names = [check.name for check in CHECKS]
    assert names[0] == "single"
    assert len(set(names)) == len(names)
    for number, check in enumerate(CHECKS[1:], start=1):
        assert set(check.after) <= set(names[:number]), check.name


def test_a_check_runs_after_those_that_it_is_compared_with() -> None:
    chosen = [check.name for check in check_runs.chosen_checks("resume")]
    assert chosen == ["single", "dropout", "resume"]


@pytest.mark.parametrize(
    ("free", "model", "rows"),
    [(80, "gpt2", 8), (11, "gpt2", 8), (10, "gpt2", 4), (8, "gpt2", 4), (5, "gpt", 8)],
)
def test_the_model_and_the_batch_follow_the_free_memory(monkeypatch, free, model, rows) -> None:
    monkeypatch.setattr(check_runs, "accelerator", lambda: "cuda")
    monkeypatch.setattr(check_runs, "device_count", lambda: 2)
    free_of = {0: 80 * GIB, 1: free * GIB}
    monkeypatch.setattr(check_runs, "free_bytes", lambda device: free_of[device.index])
    words = check_runs._job(Check("one", "", [], []))
    assert f"model.name={model}" in words
    assert f"train.global_batch_size={rows}" in words


@pytest.mark.parametrize("given", ["nothing", ",", ""])
def test_a_name_that_is_none_is_refused(given: str, capsys) -> None:
    assert cli.main(["doctor", "--check", "--only", given]) == 2
    assert "Use one of single, single_bf16" in capsys.readouterr().err


@pytest.mark.parametrize("given", ["0", "-3", "nan"])
def test_a_limit_that_no_run_can_keep_is_refused(given: str, capsys) -> None:
    assert cli.main(["doctor", "--check", "--time-limit", given]) == 2
    error = capsys.readouterr().err
    assert f"--time-limit {given}: a number above 0 is needed. Use --time-limit 300." in error


def test_a_file_that_cannot_be_written_is_refused_before_anything_runs(capsys) -> None:
    assert cli.main(["doctor", "--check", "--output", "/no/such/folder/check.json"]) == 2
    assert "there is no such folder" in capsys.readouterr().err


def test_what_is_missing_is_skipped_with_a_word(tmp_path) -> None:
    for changes, words in (
        ({"only": "accelerator"}, "torch sees no GPU"),
        ({"needs": "no_such_library"}, "no_such_library is not installed"),
    ):
        run = check_runs.run_check(Check("one", "", [], [], **changes), {}, tmp_path)
        assert (run.verdict, run.explanation) == ("skipped", words)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("only", ["recompute_full", None])
def test_checks_run_by_the_command_and_leave_one_file(tmp_path, monkeypatch, capsys, only) -> None:
    monkeypatch.chdir(tmp_path)
    chosen = [
        check.name for check in CHECKS if only is None or check.name in ("single", *only.split(","))
    ]
    assert cli.main(["doctor", "--check", *([] if only is None else ["--only", only])]) == 0
    document = json.loads(Path("check.json").read_text())
    by_name = {run["name"]: run for run in document["checks"]}
    assert list(by_name) == chosen
    skipped = {check.name for check in CHECKS if check.only == "accelerator"} & set(chosen)
    if accelerator() is None:
        verdicts = {name: run["verdict"] for name, run in by_name.items()}
        assert verdicts == {name: "skipped" if name in skipped else "passed" for name in chosen}
        more = f", {len(skipped)} skipped" if skipped else ""
        assert f"{len(chosen) - len(skipped)} passed{more}" in capsys.readouterr().out
    assert document["surroundings"]
    assert by_name["single"]["command"].startswith("bigtrain train -n 1 ")
    assert by_name["single"]["row"]["peak_bytes"] > by_name["recompute_full"]["row"]["peak_bytes"]
    if only is None:
        assert by_name["cap"]["row"] is None


def test_a_promise_that_is_not_kept_fails_the_command(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    wrong = replace(FAILED, name="single", verdict="failed", explanation="its forecast is wrong")
    monkeypatch.setattr(command, "run_check", lambda *_: wrong)
    assert cli.main(["doctor", "--check", "--only", "single", "--output", "figures.json"]) == 1
    assert "1 failed" in capsys.readouterr().out
    (run,) = json.loads(Path("figures.json").read_text())["checks"]
    assert (run["explanation"], run["last_lines"]) == (
        "its forecast is wrong",
        ["bigtrain: crashed"],
    )


def test_a_list_that_is_cut_short_leaves_what_ran(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    done: list[str] = []

    def run(check, *_):
        if done:
            raise KeyboardInterrupt
        done.append(check.name)
        return replace(GOOD, name=check.name, memory={"peak_bytes": 1})

    monkeypatch.setattr(command, "run_check", run)
    with pytest.raises(KeyboardInterrupt):
        command.main(["--check", "--only", "single,cap"])
    (kept,) = json.loads(Path("check.json").read_text())["checks"]
    assert (kept["name"], kept["memory"]) == ("single", {"peak_bytes": 1})
