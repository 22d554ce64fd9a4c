"""The documentation: line width, and every name, link, path, command and figure must be right.

`python tests/test_docs.py --write` makes the table of rooms from the rooms' docstrings, the page of
all keys from the types, and the pages of the API from signatures and docstrings.
"""

from __future__ import annotations

import ast
import json
import re
import shlex
import sys
from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest
from support.api_reference import api_reference
from support.key_reference import key_reference
from support.rooms import ORDER, sources, tree
from support.zygote import forked_cli

from bigtrain.assembly.make_plan import make_plan
from bigtrain.job import arguments
from bigtrain.job.load import load_job
from bigtrain.job.presets import preset_names

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))
from drawings import DRAWINGS, PICTURES  # noqa: E402

sys.path.remove(str(ROOT / "benchmarks"))
ARCHITECTURE = ROOT / "docs" / "internals" / "architecture.md"
KEYS = ROOT / "docs" / "keys.md"
MARK = "<!-- rooms -->"
GROUPS = {
    "ground": (
        *("files", "versions", "job", "recorder", "memory", "ranks", "machine", "tensors"),
        *("checkpoint", "slicing"),
    ),
    "learning": ("losses", "data", "hub", "models", "activations", "optim"),
    "stages": ("schedules", "tracing", "cutting", "slice_planning"),
    "contract": ("costs", "core", "pipeline", "prediction", "strategies"),
    "a run": ("assembly", "timing", "own_loop", "engine", "report"),
    "commands": ("planner", "fit", "explain", "compare", "speedup", "verify", "doctor", "hvd"),
}
MOST_WIDTH = 120
CONTENTS_FROM_LINES = 150
GENERATED = ("api.md", "api_strategies.md")
OTHERS = {"Sequential", "run_ranks", "vit_b_16", "deepspeed_env"}
"""Names on the pages that belong to torch, torchvision, or the tests."""
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


def room_table() -> str:
    """The table of rooms, from the bottom up: the purpose of each, and its design decisions."""
    lines = ["| package | what it is for | what is decided there |", "| --- | --- | --- |"]
    for group, rooms in GROUPS.items():
        lines.append(f"| **{group}** | | |")
        for room in rooms:
            purpose, _, decided = (ast.get_docstring(tree(sources()[room])) or "").partition("\n\n")
            lines.append(f"| `{room}` | {purpose} | {' '.join(decided.split())} |")
    return "\n".join(lines)


def with_table(page: str) -> str:
    """The page with the table replaced by the generated one."""
    before, _, after = page.split(MARK)
    return f"{before}{MARK}\n{room_table()}\n{MARK}{after}"


def test_the_table_of_rooms_is_that_of_the_docstrings():
    page = ARCHITECTURE.read_text(encoding="utf-8")
    assert page == with_table(page), "run: python tests/test_docs.py --write"
    assert [room for rooms in GROUPS.values() for room in rooms] == [
        room for room in ORDER if (ROOT / "bigtrain" / room).is_dir()
    ]


def test_the_page_of_keys_is_that_of_the_types():
    page = KEYS.read_text(encoding="utf-8")
    assert page == key_reference(), "run: python tests/test_docs.py --write"
    assert not re.findall(r"^\| `(\S+)` .*\|  \|$", page, re.MULTILINE), (
        "each key needs a docstring"
    )


@pytest.mark.parametrize("room", [room for rooms in GROUPS.values() for room in rooms])
def test_every_room_says_in_a_line_what_it_is_for_and_then_what_is_decided_there(room):
    lines = (ast.get_docstring(tree(sources()[room])) or "").splitlines()
    assert lines[0].endswith(".")
    assert lines[1] == ""
    assert 1 <= len(lines[2:]) <= 4


def test_the_drawing_has_every_room():
    drawing = re.findall(r"```\n(.*?)```", ARCHITECTURE.read_text(encoding="utf-8"), re.DOTALL)[0]
    rows = {
        name.strip(): tuple(rooms.split())
        for name, rooms in (line.split("|") for line in drawing.splitlines())
    }
    assert rows == GROUPS


@pytest.mark.parametrize("name", GENERATED)
def test_the_pages_of_the_api_are_those_of_the_docstrings(name):
    page = (ROOT / "docs" / name).read_text(encoding="utf-8")
    assert page == api_reference(name), "run: python tests/test_docs.py --write"


@each_page
def test_lines_are_at_most_120_wide(page):
    """Except for lines that cannot be broken: table rows, a single link, a program's output."""
    in_code = False
    for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), 1):
        if line.startswith("```"):
            in_code = not in_code
        if len(line) <= MOST_WIDTH or line.startswith("|"):
            continue
        words = re.sub(r"\[[^\]]*\]\([^)]*\)", "link", line.strip().lstrip("*-#! "))
        shown = (in_code or line.startswith("    ")) and not re.match(PROGRAMS, words)
        assert shown or " " not in words, f"{page.name}:{number}"


@each_page
def test_long_pages_begin_with_their_contents(page):
    text = page.read_text(encoding="utf-8")
    if len(text.splitlines()) >= CONTENTS_FROM_LINES:
        contents = text.partition("\n## Contents\n")[2].partition("\n## ")[0]
        sections = anchors(page, level="##")[1:]
        listed = set(re.findall(r"\]\(#([\w-]+)\)", contents))
        if page.name in GENERATED:  # a table of all names follows instead of headings
            sections = [name for name in anchors(page, level="###") if name not in sections]
        assert contents, f"{page.name} has no section Contents"
        assert [name for name in sections if name not in listed] == [], page.name


def anchors(page: Path, level: str = "#+") -> list[str]:
    """The anchors that GitHub makes from a page's headings."""
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    headings = re.findall(rf"^{level} (.+)$", text, re.MULTILINE)
    plain = [re.sub(r"[^\w\- ]", "", heading.lower()) for heading in headings]
    return [heading.replace(" ", "-") for heading in plain]


def test_the_page_of_source_files_names_at_least_three_for_each_subject():
    page = ROOT / "docs" / "internals" / "source_files.md"
    sections = page.read_text(encoding="utf-8").split("\n## ")[1:]
    assert len(sections) > 20
    for section in sections:
        if not section.startswith("Contents\n"):
            assert len(re.findall(r"^\d\. `\S+\.py`", section, re.MULTILINE)) >= 3, section


@each_page
def test_links_lead_to_files_and_headings(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
        path, _, anchor = target.partition("#")
        if "://" in target:
            continue
        file = page.parent / path if path else page
        assert file.exists(), f"{page.name}: {target}"
        assert not anchor or anchor in anchors(file), f"{page.name}: {target}"


def test_the_index_leads_to_every_page():
    index = ROOT / "docs" / "README.md"
    linked = {
        (index.parent / target.partition("#")[0]).resolve()
        for target in re.findall(r"\]\(([^)\s]+)\)", index.read_text(encoding="utf-8"))
    }
    assert [page.name for page in PAGES if page not in linked and page != index] == []


@pytest.mark.parametrize("name", sorted(DRAWINGS))
def test_the_drawings_are_those_of_the_code(name):
    drawn = (PICTURES / name).read_text(encoding="utf-8")
    assert drawn == DRAWINGS[name](), "run: python benchmarks/drawings.py"


def code_in(page: Path) -> list[str]:
    """The code in backticks on a page, and the lines of its code blocks."""
    text = page.read_text(encoding="utf-8")
    if page.name == "coming_from.md":  # the first column contains code of other tools
        text = re.sub(r"^\| .*? \| ", "| ", text, flags=re.MULTILINE)
    blocks = re.findall(r"```\w*\n(.*?)```", text, re.DOTALL)
    plain = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    indented = re.findall(r"^    (.*)$", plain, re.MULTILINE)
    lines = [line for block in blocks for line in block.splitlines()]
    return [*re.findall(r"`([^`\n]+)`", plain), *indented, *lines]


@each_page
def test_paths_and_modules_exist(page):
    for code in code_in(page):
        for path in re.findall(
            r"(?<![\w/.])(?:bigtrain|strategies|configs|benchmarks|examples|tests|docs)/[\w./-]*",
            code,
        ):
            written = path.rstrip(".").endswith(("NAME.py", "NAME.yaml"))
            assert written or (ROOT / path.rstrip(".")).exists(), f"{page.name}: {path}"
        for name in re.findall(r"\bbigtrain((?:\.[a-z_]\w*)+)", code):
            module = name[1:]
            while module and module not in sources():
                module, _, attribute = module.rpartition(".")
                assert attribute in words(), f"{page.name}: bigtrain{name}"


@cache
def words() -> set[str]:
    """Every word of the sources and the presets."""
    files = [*sources().values(), *(ROOT / "configs").rglob("*.yaml")]
    text = " ".join(path.read_text(encoding="utf-8") for path in files)
    return set(re.findall(r"\w+", text)) | {path.stem for path in files}


@each_page
def test_names_in_backticks_are_names_of_the_project(page):
    """Classes, functions, keys and strategies: every word in backticks that has the form of one."""
    for code in code_in(page):
        for name in re.findall(r"^(?:[\w.]*\.)?([A-Z][a-z]\w+|[a-z]+_\w+)(?:\(.*\))?$", code):
            without_number = re.sub(r"_\d+$", "", name)  # fsdp_3 is the strategy fsdp with a number
            known = name in words() | OTHERS or without_number in preset_names("strategies")
            assert known, f"{page.name}: `{code}`"


def test_names_of_the_flow_are_names_of_the_project():
    text = ARCHITECTURE.read_text(encoding="utf-8").partition("## The flow")[2]
    (flow,) = re.findall(r"```\n(.*?)```", text.partition("## ")[0], re.DOTALL)
    defined = {
        node.name
        for path in sources().values()
        for node in ast.walk(tree(path))
        if isinstance(node, ast.FunctionDef | ast.ClassDef)
    }
    functions = re.findall(r"-([a-z_]+)--+>", flow)
    classes = re.findall(r"\b[A-Z][a-z]+[A-Za-z]*[a-z]\b", flow)
    assert len(functions) > 5
    assert not sorted({*functions, *classes} - defined)


PROGRAMS = r"^(?:\$ )?(?:bigtrain|torchrun|deepspeed|srun|mpiexec|python) .*"


def commands() -> list[tuple[str, list[str]]]:
    """Every command on the pages without its launcher: (page, words)."""
    starts = re.compile(PROGRAMS)
    lines = []
    for page in PAGES:
        text = "\n".join(code_in(page)).replace("\\\n", "")
        for line in filter(starts.match, text.splitlines()):
            lines.append((page.name, shlex.split(line.removeprefix("$ "), comments=True)))
    return lines


OPTIONS = {
    "train": lambda given: arguments.train_arguments(given, starts_ranks=True),
    "plan": arguments.plan_arguments,
    "check": arguments.peak_check_arguments,
    "fit": arguments.fit_arguments,
    "explain": arguments.explain_arguments,
    "compare": arguments.compare_arguments,
    "speedup": arguments.speedup_arguments,
    "verify": arguments.verify_arguments,
    "checkpoint": arguments.READERS["checkpoint"],
}
COUNTS = {"-n", "--num_accelerators", "--num_gpus", "--nproc-per-node", "--ntasks-per-node"}
NODES = {"--nnodes", "-N"}
SCRIPTS = {"my.py", "my_loop.py", "script.py"}
"""Scripts of the reader, which do not exist here."""


def as_train_command(words: list[str]) -> list[str]:
    """A training command in the form `bigtrain train -n N`; other commands unchanged."""
    if "-m" in words:  # the installed package instead of the script
        at = words.index("-m")
        words = [*words[:at], "bigtrain/train.py", *words[at + 3 :]]
    if "bigtrain/train.py" not in words:
        return ["2" if word == "N" else word for word in words]
    position = words.index("bigtrain/train.py")
    pairs = list(pairwise(words[:position]))
    number = next((int(value) for word, value in pairs if word in COUNTS), 1)
    nodes = next((int(value) for word, value in pairs if word in NODES), 1)
    return ["bigtrain", "train", "-n", str(number * nodes), *words[position + 1 :]]


@pytest.mark.parametrize(("page", "words"), commands(), ids=lambda value: " ".join(value))
def test_commands_in_the_pages_can_be_read(page, words, tmp_path, monkeypatch):
    (strategy_text,) = re.findall(
        r"```yaml\n(.*?)```", (ROOT / "CONTRIBUTING.md").read_text(), re.DOTALL
    )
    (tmp_path / "path.yaml").write_text(strategy_text)
    monkeypatch.chdir(tmp_path)
    words = as_train_command(words)
    alone = [["bigtrain", name] for name in ("train", "check", "fit", "explain")]
    if SCRIPTS & set(words) or words in alone:
        return
    if words[0] == "python":
        assert (ROOT / words[1]).exists() or words[1].startswith("-"), words
        return
    assert words[0] == "bigtrain", words
    assert words[1] in {*OPTIONS, "init", "strategies", "doctor"}, words
    if words[1] not in OPTIONS or words == ["bigtrain", "checkpoint"]:
        return
    options = OPTIONS[words[1]](words[2:])  # an unknown option ends in SystemExit
    whole = " ".join(words)
    if words[1] in ("compare", "speedup", "verify"):
        for name in options.strategies.split(","):
            assert name == "all" or load_job(None, name), words
    if words[1] == "train" and not re.search(r"NAME|auto|\.yaml|PATH|\.json", whole):
        job = load_job(options.config, options.strategy, options.overrides)
        if job.strategy.budget is None:  # the planner chooses within a budget
            make_plan(job, options.num_ranks or 1, "cpu")


STARTED = [
    given
    for page, given in commands()
    if page == "README.md" and given[:3] == ["bigtrain", "train", "-n"]
    if not any(re.search(r"mylib|^N$|FOLDER", word) for word in given)  # the reader's own
]


@pytest.mark.parametrize("words", STARTED, ids=" ".join)
def test_the_train_commands_of_the_readme_run_dry(words, tmp_path):
    done = forked_cli([*words[1:], "--dry-run"], cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "predicted peak" in done.stdout
    assert not (tmp_path / "runs").exists()


@each_page
def test_names_of_presets_are_presets(page):
    text = page.read_text(encoding="utf-8")
    for row in re.findall(r"^\| (`\S+`(?:, `\S+`)*) \|", text, re.MULTILINE):
        if page.name == "README.md":
            for name in re.findall(r"`([^`]+)`", row):
                assert set(name.split("+")) <= set(preset_names("strategies")), name


def test_figures_of_the_readme_are_those_of_the_result_file():
    """Each row of the first table is a row of the measured comparison."""
    parts = ("parameters", "gradients", "optimizer", "activations", "temporary")
    document = json.loads((ROOT / "benchmarks" / "results" / "compare.json").read_text("utf-8"))
    measured = set()
    for row in document["rows"]:
        if row["status"] == "ok":
            sizes = (row["peak_bytes"], row["predicted_peak_bytes"])
            sizes += tuple(row["breakdown"][part] for part in parts)
            shown = [f"{size / 2**20:.1f}" for size in sizes]
            seconds = (row["step_seconds"], row["predicted_step_seconds"])
            measured.add(
                (str(row["num_ranks"]), *shown, *(f"{s:.2f} s" if s else "-" for s in seconds))
            )
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `\S+` \| (\d \| .*) \|$", text, re.MULTILINE)
    assert len(rows) > 9
    for row in rows:
        assert tuple(row.split(" | ")) in measured, row


if __name__ == "__main__" and sys.argv[1:] == ["--write"]:
    ARCHITECTURE.write_text(with_table(ARCHITECTURE.read_text("utf-8")), "utf-8")
    KEYS.write_text(key_reference(), "utf-8")
    for generated in GENERATED:
        (ROOT / "docs" / generated).write_text(api_reference(generated), "utf-8")
