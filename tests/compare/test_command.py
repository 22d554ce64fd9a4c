"""`bigtrain compare` as a user runs it: rows, failures, limits, Ctrl-C, and the page."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from rich.console import Console
from support.zygote import forked_cli, interpreter, surroundings

from bigtrain.compare.command import main
from bigtrain.compare.largest import find_largest
from bigtrain.compare.pictures import pareto_front
from bigtrain.compare.rows import ComparisonRow, largest_loss_difference
from bigtrain.compare.subprocess_runs import reason_in
from bigtrain.compare.table import comparison_table
from bigtrain.memory.timeline import MEMORY_KINDS
from bigtrain.ranks.exit_status import run_guarded

LENET = [
    *("model.name=lenet", "data.name=synthetic", "data.args.kind=classification"),
    *("data.args.input_shape=[1,32,32]", "train.global_batch_size=8"),
]
ODD = {
    "hangs": "strategy: {replicate: {name: 'support.odd_strategies:Hangs'}}\n",
    "crashes": "strategy: {replicate: {name: 'support.odd_strategies:Crashes'}}\n",
}


def bigtrain(folder, *words):
    return forked_cli(words, cwd=folder, timeout=300)


@pytest.fixture(scope="module")
def compared(tmp_path_factory):
    """One comparison for several tests: two strategies that work and four that do not."""
    folder = tmp_path_factory.mktemp("compare")
    for name, text in ODD.items():
        (folder / f"{name}.yaml").write_text(text)
    names = "single,ddp,fairscale_fsdp,crashes.yaml,hangs.yaml"
    words = ("--strategies", names, "-n", "2", "--steps", "5", "--time-limit", "15")
    done = bigtrain(folder, "compare", *words, "--json", "--picture", "bars.svg", *LENET)
    assert done.returncode == 0, done.stderr
    return folder, json.loads(done.stdout), done.stderr


def test_rows_that_ran_have_every_figure(compared):
    _, document, _ = compared
    rows = {row["strategy"]: row for row in document["rows"]}
    assert rows["single"]["num_ranks"] == 1
    assert rows["ddp"]["num_ranks"] == 2
    for name in ("single", "ddp"):
        row = rows[name]
        assert row["status"] == "ok"
        assert sum(row["breakdown"].values()) == row["peak_bytes"]
        assert abs(row["prediction_error"]) < 0.01
        assert row["process_peak_bytes"] > 0
        assert row["step_seconds"] > 0
        assert row["samples_per_second"] == pytest.approx(8 / row["step_seconds"])
        assert len(row["losses"]) == 5
    assert rows["ddp"]["losses"] == pytest.approx(rows["single"]["losses"], abs=1e-5)


def test_a_row_has_the_seconds_that_its_run_foretold(tmp_path):
    """A row shows the seconds that the run predicted."""
    rank = {"peak_bytes": 5, "predicted_peak_bytes": 4, "process_peak_bytes": 6, "phase": "forward"}
    (tmp_path / "memory.json").write_text(json.dumps({"ranks": [{**rank, "breakdown": {}}]}))
    step = {"step_seconds": 0.2, "samples": 8, "loss": 1.0}
    lines = [{**step, "predicted_step_seconds": 0.125}, step, step]
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)))
    row = ComparisonRow.of_run("ddp", 2, tmp_path)
    assert (row.step_seconds, row.predicted_step_seconds) == (0.2, 0.125)
    table = comparison_table([row], "a", None)
    cells = {str(column.header): list(column.cells) for column in table.columns}
    assert (cells["s/step"], cells["predicted s"]) == (["0.200"], ["0.125"])


def test_timeline_has_the_phases_of_a_step_and_its_peak(compared):
    _, document, _ = compared
    row = document["rows"][0]
    timeline = row["timeline"]
    assert [phase for _, phase in timeline["phases"]] == ["forward", "backward", "step"]
    assert timeline["seconds"] == sorted(timeline["seconds"])
    totals = [sum(at) for at in zip(*timeline["parts"].values(), strict=True)]
    assert max(totals) == row["peak_bytes"]


def test_each_failure_costs_its_own_row_and_says_why(compared):
    _, document, output = compared
    rows = {row["strategy"]: row for row in document["rows"]}
    assert rows["fairscale_fsdp"]["status"] == "refused"
    assert "CUDA" in rows["fairscale_fsdp"]["reason"]
    assert rows["crashes"]["status"] == "failed"
    assert "signal 11" in rows["crashes"]["reason"]
    assert rows["hangs"]["status"] == "time limit"
    assert "not done after 15 s" in rows["hangs"]["reason"]
    assert "5/5 hangs: time limit" in output
    assert not left_over(compared[0])


def left_over(folder):
    """Processes whose command line names the folder or whose current folder it is."""
    processes = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if os.readlink(process / "cwd") == str(folder) and int(process.name) != os.getpid():
                processes.append(process.name)
        except OSError:
            continue
    return processes


def test_results_lie_in_one_folder(compared):
    folder, document, output = compared
    results_folder = folder / "runs/compare-1"
    assert json.loads((results_folder / "compare.json").read_text()) == document
    assert (results_folder / "single/memory.json").is_file()
    assert (results_folder / "hangs.log").is_file()
    assert "results in runs/compare-1" in output
    svg = (folder / "bars.svg").read_text()
    assert "bar-ddp-parameters" in svg


def test_page_is_whole_and_right_in_a_browser(compared):
    """In a real Chromium: nothing is fetched, no errors are logged, and every bar has
    its number.
    """
    folder, document, _ = compared
    from playwright import sync_api

    page_file = (folder / "runs/compare-1/report.html").resolve()
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium(), args=["--no-sandbox"])
        try:
            for width in (1400, 1280, 400, 390):
                check_page(browser, page_file, width, document["rows"])
        finally:
            browser.close()


def chromium():
    import shutil

    names = ("chromium", "chromium-browser", "google-chrome")
    browser_path = next((path for path in map(shutil.which, names) if path), None)
    if browser_path is None:
        if os.environ.get("CI"):
            pytest.fail("chromium is missing, although CI installs it")
        pytest.skip("needs chromium: sudo apt-get install chromium")
    return browser_path


def check_page(browser, file, width, rows):
    page = browser.new_page(viewport={"width": width, "height": 900})
    complaints, fetched = [], []
    page.on("console", lambda message: complaints.append(message.text))
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("request", lambda request: fetched.append(request.url))
    page.goto(file.as_uri())
    assert [url for url in fetched if not url.startswith("data:")] == [file.as_uri()]
    assert complaints == []
    kind = "wide" if width > 700 else "narrow"
    for row in rows:
        number = page.locator(f"[id='{kind}-number-{row['strategy']}']")
        assert number.is_visible()
        wanted = row["status"]
        if row["status"] == "ok":
            wanted = f"{row['peak_bytes'] / 2**20:,.1f}"
            bar = page.locator(f"[id='{kind}-bar-{row['strategy']}-parameters']")
            assert bar.bounding_box()["width"] > 0
        assert number.text_content().strip() == wanted
    cut = page.evaluate(
        "[...document.querySelectorAll('table, th, td')].filter(e => e.offsetParent !== null && "
        "(e.getBoundingClientRect().right > innerWidth || e.scrollWidth > e.clientWidth + 1))"
        ".map(e => e.textContent)"
    )
    assert cut == []
    # No text is cut off or widens the page beyond the screen, and all text is large enough to read.
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    sizes = page.evaluate(
        """() => [...document.querySelectorAll('svg text')]
            .filter(t => t.getBoundingClientRect().width > 0)
            .map(t => t.getBoundingClientRect().height)"""
    )
    assert sizes
    assert min(sizes) >= 8
    page.close()


# Before the interpreter's shutdown, which touches pages of all libraries and would raise the peak.
HELD = """
import os, pathlib, threading, time

def held():
    pathlib.Path("held-" + os.environ["RANK"]).write_text(str(os.getpid()))
    end = time.monotonic() + 60
    while not pathlib.Path("seen").exists() and time.monotonic() < end:
        time.sleep(0.01)

if "RANK" in os.environ:
    threading._register_atexit(held)
"""


@pytest.mark.alone
def test_process_peak_is_what_is_read_from_outside(tmp_path):
    """Compared with each rank's VmHWM, read by another process after the rank's report."""
    (tmp_path / "sitecustomize.py").write_text(HELD)
    command = [sys.executable, "-m", "bigtrain", "train", "-n", "2", "--strategy", "ddp", *LENET]
    command += ["train.global_batch_size=128", "train.steps=8", "checkpoint.at_end=false"]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    path = f"{tmp_path}{os.pathsep}{surroundings()['PYTHONPATH']}"
    outside = {}
    with subprocess.Popen(
        command, cwd=tmp_path, env=surroundings() | {"PYTHONPATH": path}, **quiet
    ) as process:
        while process.poll() is None and len(outside) < 2:
            time.sleep(0.05)
            for file in tmp_path.glob("held-*"):
                if pid := file.read_text():
                    text = Path(f"/proc/{pid}/status").read_text()
                    outside[int(file.name[5:])] = int(text.split("VmHWM:")[1].split()[0]) * 1024
        (tmp_path / "seen").touch()
    assert process.returncode == 0
    (run,) = (tmp_path / "runs").iterdir()
    ranks = json.loads((run / "memory.json").read_text())["ranks"]
    assert sorted(outside) == [0, 1]
    for rank in ranks:
        inside = rank["process_base_bytes"] + rank["process_peak_bytes"]
        assert inside == pytest.approx(outside[rank["rank"]], rel=0.03)


@pytest.mark.alone
def test_ctrl_c_ends_every_child_and_keeps_the_rows_that_are_done(tmp_path):
    (tmp_path / "hangs.yaml").write_text(ODD["hangs"])
    command = [sys.executable, "-m", "bigtrain", "compare", "--strategies", "single,hangs.yaml"]
    command += ["-n", "2", "--steps", "3", "--json", *LENET]
    with subprocess.Popen(
        command,
        cwd=tmp_path,
        env=surroundings(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        log = tmp_path / "runs/compare-1/hangs.log"
        end = time.monotonic() + 120
        while not (log.exists() and len(left_over(tmp_path)) >= 3) and time.monotonic() < end:
            time.sleep(0.2)
        time.sleep(2)
        os.killpg(process.pid, signal.SIGINT)
        out, output = process.communicate(timeout=60)
    assert process.returncode == 130, output
    document = json.loads(out)
    assert document["stopped"]
    assert [row["strategy"] for row in document["rows"]] == ["single"]
    assert "stopped: 1 of 2 strategies are done" in output
    end = time.monotonic() + 5
    while left_over(tmp_path) and time.monotonic() < end:
        time.sleep(0.1)
    assert not left_over(tmp_path)


@pytest.mark.alone
def test_a_stop_from_outside_ends_every_child(tmp_path):
    (tmp_path / "hangs.yaml").write_text(ODD["hangs"])
    command = [sys.executable, "-m", "bigtrain", "compare", "--strategies", "hangs.yaml", "-n", "2"]
    with subprocess.Popen(
        [*command, *LENET],
        cwd=tmp_path,
        env=surroundings(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    ) as process:
        end = time.monotonic() + 60
        while len(left_over(tmp_path)) < 4 and time.monotonic() < end:
            time.sleep(0.2)
        process.terminate()
        assert process.wait(60) == 143
    assert not left_over(tmp_path)


def test_job_whose_checkpoint_is_gone_is_refused_before_anything_runs(tmp_path):
    words = ["checkpoint.resume=nowhere", "memory.on_oom=adapt", "--strategies", "single"]
    done = bigtrain(tmp_path, "compare", *words, "--steps", "2", "--json", *LENET)
    assert done.returncode == 2  # the job itself names a missing checkpoint
    assert "there is no checkpoint at 'nowhere'" in done.stderr


def test_two_comparisons_at_once_do_not_meet(tmp_path):
    command = [interpreter(), "-m", "bigtrain", "compare", "--strategies", "ddp", "-n", "2"]
    command += ["--steps", "2", "--json", *LENET]
    both_processes = [
        subprocess.Popen(
            command,
            cwd=tmp_path,
            env=surroundings(),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    outputs = [process.communicate(timeout=240) for process in both_processes]
    assert [process.returncode for process in both_processes] == [0, 0], outputs
    assert sorted(p.name for p in (tmp_path / "runs").iterdir()) == ["compare-1", "compare-2"]
    first_row, two = (json.loads(out)["rows"][0] for out, _ in outputs)
    assert first_row["losses"] == two["losses"]


def test_largest_is_where_it_stops_fitting(tmp_path):
    words = ("--strategies", "single", "--cap", "40MiB", "--largest", "micro_batch_size", "--json")
    words = (*words, *LENET, "train.global_batch_size=128")
    done = bigtrain(tmp_path, "compare", *words)
    assert done.returncode == 0, done.stderr
    (row,) = json.loads(done.stdout)["rows"]
    assert row["largest"] > 8
    assert "ran out of memory" in row["largest_reason"]
    peak = row["peak_bytes"]
    assert 20 * 2**20 < peak < 40 * 2**20


@pytest.mark.parametrize("limit", [1, 2, 3, 7, 8, 9, 31, 100])
@pytest.mark.parametrize("first", [1, 4, 8, 50])
def test_bisection_finds_the_edge(limit, first):
    tried = []

    def fault(value):
        tried.append(value)
        return None if value <= limit else f"{value} is too much"

    largest, reason = find_largest(fault, first)
    assert limit - limit // 32 <= largest <= limit
    assert reason == f"{largest + 1} is too much" or limit > 32
    assert len(tried) == len(set(tried)) <= 16


def test_bisection_says_where_nothing_fits_and_where_everything_does():
    assert find_largest(lambda _: "never", 8) == (None, "never")
    assert find_largest(lambda _: None, 8, maximum=64) == (64, None)


def row(name, peak, speed):
    return ComparisonRow(name, 1, "ok", peak_bytes=peak, samples_per_second=speed)


def test_front_is_what_nothing_beats():
    """The front contains exactly the rows that no other row dominates."""
    rows = [row("a", 100, 10), row("b", 50, 8), row("c", 60, 7), row("d", 200, 10), row("e", 40, 1)]
    assert [r.strategy for r in pareto_front(rows)] == ["e", "b", "a"]


@pytest.mark.parametrize(
    ("output", "reason"),
    [
        ("noise\nbigtrain: the cause. Fix it\nmore noise\n", "the cause. Fix it"),
        ("bigtrain: the cause\nbigtrain: rank 1 lost rank 0: gone\n", "the cause"),
        ("bigtrain: rank 1 lost rank 0: gone\n", "rank 1 lost rank 0: gone"),
        ("bigtrain: it ran out\nbigtrain: rank 0 failed in the forward pass (x)\n", "it ran out"),
        ("bigtrain: rank 0 failed: ValueError\n", "rank 0 failed: ValueError"),
        ("bigtrain: bad\nbigtrain: nothing was saved: the 3 steps are lost\n", "bad"),
        ("Traceback\n  File\nValueError: bad\n", "ValueError: bad"),
        (
            "ValueError: bad\nbigtrain: rank 0 failed in the forward pass of `x`\n",
            "ValueError: bad",
        ),
        (
            "bigtrain: the last events of each rank: a\n",
            "the last events of each rank: a",
        ),
        ("only noise\n", "exit status 3: only noise"),
        ("", "exit status 3: it printed nothing"),
    ],
)
def test_reason_is_the_line_that_says_most(tmp_path, output, reason):
    log = tmp_path / "log"
    log.write_text(output)
    assert reason_in(log, 3) == reason


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--strategies", "dpd"], r"unknown 'dpd', did you mean 'ddp'"),
        (["--strategies", "ddp,ddp"], "ddp is named twice"),
        (["--strategies", ","], "names no strategy"),
        (["-n", "0"], "at least 1 rank is needed"),
        (["no_such_job"], "unknown 'no_such_job'"),
        (["--steps", "0"], "at least 1 is needed"),
        (["--cap", "much"], "'much' is not a size"),
        (["--largest", "train.precision", "--strategies", "ddp"], "only whole numbers"),
        (["--strategies", "fairscale_fsdp"], "none of these strategies can run"),
        (["--picture", "bars.pdf", "--strategies", "ddp"], "ends in .svg or .png"),
        (["model.name=lenet"], "is for classification"),
        (["train.stepz=3"], "did you mean train.steps"),
        (["--nope"], "there is no option --nope"),
        (["strategy=zero2"], "Write --strategy zero2"),
        (["train.steps"], "train.steps has no value"),
        (["mesh.pp=2", "--strategies", "ddp"], "none of these strategies can run"),
    ],
)
def test_wrong_input_is_refused_before_anything_runs(tmp_path, monkeypatch, capsys, words, message):
    monkeypatch.chdir(tmp_path)
    assert run_guarded(lambda: main(words)) == 2
    errors = capsys.readouterr().err
    assert message in errors
    assert "Traceback" not in errors
    assert not list(tmp_path.glob("runs/*/*"))


@pytest.mark.parametrize("width", [80, 100, 140, 175])
def test_the_table_is_cut_at_no_width(width):
    """Columns that do not fit the terminal are left to the page; no cell is shortened."""
    breakdown = dict.fromkeys(MEMORY_KINDS, 123 * 2**20)
    names = ("single", "ddp", "zero1_torch_offload_disk", "1f1b")
    rows = [
        ComparisonRow(
            name,
            2,
            "ok",
            peak_bytes=738 * 2**20,
            predicted_peak_bytes=740 * 2**20,
            process_peak_bytes=999 * 2**20,
            breakdown=breakdown,
            step_seconds=1.234,
            predicted_step_seconds=1.2,
            sent_bytes=2**27,
            losses=(1.0, 2.0, share),
        )
        for name, share in zip(names, (3.0, 3.0, 3.3, float("nan")), strict=True)
    ]
    console = Console(width=width, file=io.StringIO())
    console.print(comparison_table(rows, "gpt", None, width))
    output = console.file.getvalue()
    assert "…" not in output
    assert max(map(len, output.splitlines())) <= width
    for name in names:
        assert f"│ {name} " in output
    assert ("params" in output) is (width >= 130)
    assert ("sent" in output) is (width >= 165)


def test_the_largest_difference_of_losses_is_a_number():
    def row(name, *losses):
        return ComparisonRow(name, 2, "ok", losses=losses)

    first = row("single", 4.0, 2.0)
    assert largest_loss_difference([first]) is None
    assert largest_loss_difference([ComparisonRow("x", 2, "refused", "why"), first]) is None
    same = largest_loss_difference([first, row("ddp", 4.0, 2.0)])
    assert str(same) == "Every loss is that of single, to the last bit."
    rows = [first, row("ddp", 4.0, 2.0002), ComparisonRow("y", 2, "failed", "why")]
    rows.append(row("1f1b", 4.0004, 2.0))
    apart = largest_loss_difference(rows)
    assert apart.relative == pytest.approx(1e-4)
    assert "The largest difference of a loss from that of single: 1.0e-04 of it, by " in str(apart)
    broken = largest_loss_difference([first, row("ddp", 4.0, float("nan"))])
    assert broken.relative == float("inf")
