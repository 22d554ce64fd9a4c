"""The structure of the project: what is frozen, and limits on growth."""

from __future__ import annotations

import argparse
import ast
import importlib
import os
import re
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
from pydantic import BaseModel
from support.rooms import imported_names, sources, tree, used_modules

import bigtrain
from bigtrain import cli
from bigtrain.assembly.make_plan import make_plan
from bigtrain.compare import list_strategies
from bigtrain.core.registry import TECHNIQUES, make_technique, technique_class
from bigtrain.doctor import command as doctor
from bigtrain.job import arguments, starter
from bigtrain.job.checkpoint_arguments import checkpoint_parser
from bigtrain.job.load import load_job
from bigtrain.job.presets import preset_names
from bigtrain.job.schema import ROLES, Job, Role
from bigtrain.job.strategy_words import read_strategy

ROOT = Path(__file__).resolve().parents[2]

FOREIGN = {"deepspeed", "fairscale"}
ADAPTERS = {f"strategies.{library}_adapter" for library in FOREIGN}
SHADOWING = {
    *("accelerate", "datasets", "deepspeed", "fairscale", "numpy", "pydantic", "rich"),
    *("safetensors", "torch", "torchvision", "transformers", "timm", "tokenizers", "peft", "yaml"),
    "torchao",
}
STARTING = {"-n", "--num-ranks", "--restarts", "--min-ranks"}
TRAIN_OPTIONS = STARTING | {
    *("-h", "--help", "--config", "--strategy", "--plan", "--resume"),
    *("--dry-run", "--cap", "--local_rank", "--local-rank", "--deepspeed", "--deepspeed_config"),
}
_SIDES = {
    *("-h", "--help", "-n", "--num-ranks", "--config", "--strategy", "--strategies"),
    *("--time-limit", "--output", "--json", "--steps"),
}
COMMANDS = {
    "plan": {
        *(
            "-h",
            "--help",
            "--config",
            "-n",
            "--num-ranks",
            "--devices",
            "--memory",
            "--cap",
            "--cluster",
            "--engines",
        ),
        *("--global-batch-size", "--output", "--picture", "--json", "--frontier", "--at"),
    },
    "fit": {
        *("-h", "--help", "-n", "--num-ranks", "--devices", "--cluster", "--memory", "--lora"),
        *("--qlora", "--length", "--global-batch-size", "--micro-batch-size", "--engines"),
        *("--every-plan", "--json"),
    },
    "check": {
        *("-h", "--help", "--config", "--strategy", "-n", "--num-ranks", "--peak", "--against"),
        *("--save", "--json"),
    },
    "explain": {
        *("-h", "--help", "-n", "--num-ranks", "--devices", "--cluster", "--memory", "--json"),
    },
    "compare": _SIDES | {"--cap", "--largest", "--picture"},
    "speedup": _SIDES | {"--cluster", "--picture"},
    "verify": _SIDES | {"--optimizer", "--fuzz", "--seed", "--script"},
    "checkpoint": {"-h", "--help"},
    "init": {"-h", "--help"},
    "strategies": {"-h", "--help", "--json"},
    "doctor": {"-h", "--help", "--json", "--no-rates", "--again", "--check"},
}
CHECKPOINT_ACTIONS = {
    "inspect": {"--tensors"},
    "verify": set(),
    "convert": {"--step", "--samples", "--tie", "--key", "--strip"},
    "export": {"--part", "--dtype", "--merge"},
    "diff": {"--exit-code"},
}
HEADINGS = ("Memory:", "Communication:", "Constraints:", "Example:")
READ_INDIRECTLY = {
    **{f"strategy.{role}": "by name, in StrategyConfig.roles" for role in ROLES},
    "strategy.deepspeed": "in StrategyConfig.deepspeed_file",
}


def test_strategies_know_no_other_strategy_and_only_the_registry_knows_them():
    text = re.compile(r"\bbigtrain\.(strategies\.\w+)")
    for module, path in sources().items():
        named = {o for o in used_modules(module) if o.startswith("strategies.")}
        named |= set(text.findall(path.read_text()))
        # The modules of one technique form a package and may import each other.
        package = ".".join(module.split(".")[:2])
        # A library's adapter may be used by all techniques that run on the library.
        named -= ADAPTERS if module.startswith("strategies.") else set()
        strangers = {name for name in named if ".".join(name.split(".")[:2]) != package}
        assert not strangers or module == "core.registry", (
            f"{module} names other strategies: {strangers}"
        )


def test_foreign_engines_are_imported_by_strategies_alone():
    for module, path in sources().items():
        within = module.startswith("strategies.")
        nodes = ast.walk(tree(path)) if not within else iter(tree(path).body)
        roots = {name.partition(".")[0] for node in nodes for name in imported_names(node)}
        assert not roots & FOREIGN, (
            f"{module}: {roots & FOREIGN} may be imported only inside a strategy's function"
        )


def loaded(statement: str, *names: str) -> list[str]:
    """The names of those modules that a fresh interpreter has loaded after a statement."""
    code = f"{statement}\nimport sys\nprint(*[n for n in {names!r} if n in sys.modules])"
    # Only this minimal environment: variables that an import has set here would already be present.
    plain = {n: os.environ[n] for n in ("PATH", "HOME", "LD_LIBRARY_PATH") if n in os.environ}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=ROOT, env=plain, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_the_engine_loads_nothing_that_only_some_runs_need():
    """The engine does not import DeepSpeed, fairscale and other libraries that only some
    runs need.
    """
    names = ("torch", "deepspeed", "fairscale", "torchvision", "sklearn", "tensorboard")
    names += ("transformers", "timm", "huggingface_hub", "tokenizers", "peft", "torchao")
    assert loaded("import bigtrain.engine.setup", *names) == ["torch"]
    assert loaded("import bigtrain.hub.export", *names) == ["torch"]


@pytest.mark.parametrize(
    "module",
    ["job.schema", "job.load", "errors", "units", "cli", "ranks.launcher_env", "ranks.launch"],
)
def test_what_answers_before_torch_is_loaded(module):
    """Modules that answer before torch is loaded, such as the help, must not import it."""
    assert loaded(f"import bigtrain.{module}", "torch") == []


def test_no_module_has_the_name_of_another():
    for path in sources().values():
        name = path.stem
        assert name not in SHADOWING | set(sys.stdlib_module_names), (
            f"{path}: a launcher may put this folder on sys.path, and `import {name}` would find "
            "it. Name it otherwise."
        )


@pytest.mark.parametrize("command", sorted(arguments.READERS))
def test_the_help_of_a_command_needs_no_torch(command):
    code = (
        "import bigtrain.cli, contextlib, io\n"
        "with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):\n"
        f"    bigtrain.cli.main(['{command}', '--help'])\n"
        "    raise RuntimeError"
    )
    assert loaded(code, "torch", "rich") == []


def test_importing_the_package_does_nothing():
    same = (
        "import os; before = dict(os.environ)\nimport bigtrain\nassert before == dict(os.environ)"
    )
    assert loaded(same, "torch", "pydantic", "yaml", "rich", "argparse") == []


def test_the_public_names_are_sorted_and_resolve():
    assert bigtrain.__all__ == sorted(bigtrain.__all__)
    assert set(bigtrain.__all__) == set(bigtrain._MODULE_OF)
    checked, at_runtime = {}, []
    for node in tree(sources()[""]).body:
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            for inner in node.body:
                checked |= {
                    n.rpartition(".")[2]: n.rpartition(".")[0] for n in imported_names(inner)
                }
        else:
            at_runtime += [n for n in imported_names(node) if n.startswith("bigtrain")]
    assert checked == {name: f"bigtrain.{module}" for name, module in bigtrain._MODULE_OF.items()}
    assert not at_runtime
    for name in bigtrain.__all__:
        assert getattr(bigtrain, name).__name__ == name
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = bigtrain.nothing


@pytest.mark.alone
def test_help_is_there_at_once():
    seconds = []
    for _ in range(5):
        began = time.perf_counter()
        done = subprocess.run(
            [sys.executable, "-X", "importtime", "-m", "bigtrain", "--help"],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=60,
        )
        seconds.append(time.perf_counter() - began)
    assert statistics.median(seconds) < 0.5
    modules = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "bigtrain.cli" in modules
    assert not modules & {"torch", "pydantic", "yaml", "rich"}


def parser_of(call: Callable[[], object], monkeypatch: pytest.MonkeyPatch) -> list[argparse.Action]:
    """The actions of the parser that a call makes, captured when it would parse arguments."""
    parsers: list[argparse.ArgumentParser] = []

    def stop(self: argparse.ArgumentParser, *_: object, **__: object) -> None:
        parsers.append(self)
        raise SystemExit

    with monkeypatch.context() as patched:
        patched.setattr(argparse.ArgumentParser, "parse_known_args", stop)
        with pytest.raises(SystemExit):
            call()
    return parsers[0]._actions


def test_the_command_line_is_frozen(monkeypatch):
    """A new option is a promise to users; a new key of the job needs none."""
    for starts_ranks in (True, False):
        actions = parser_of(
            lambda s=starts_ranks: arguments.train_arguments([], starts_ranks=s), monkeypatch
        )
        options = {option for action in actions for option in action.option_strings}
        assert options == TRAIN_OPTIONS - (set() if starts_ranks else STARTING)
    actions = parser_of(lambda: cli.main([]), monkeypatch)
    assert {o for action in actions for o in action.option_strings} == {
        *("-h", "--help", "--version")
    }
    (commands,) = [action for action in actions if not action.option_strings]
    assert set(commands.choices) == {"train", "record", "pace", *COMMANDS}
    assert set(cli.COMMANDS) == {"train", *COMMANDS}


@pytest.mark.parametrize("name", COMMANDS)
def test_the_options_of_each_command_are_frozen(name, monkeypatch):
    readers = {"compare": arguments.compare_arguments, "verify": arguments.verify_arguments}
    readers |= {"speedup": arguments.speedup_arguments, "check": arguments.peak_check_arguments}
    readers |= {"fit": arguments.fit_arguments}
    readers["explain"] = arguments.explain_arguments
    readers |= {"strategies": list_strategies.main, "doctor": doctor.main, "init": starter.main}
    readers |= {"plan": arguments.plan_arguments, "checkpoint": arguments.READERS["checkpoint"]}
    actions = parser_of(lambda: readers[name]([]), monkeypatch)
    assert {o for action in actions for o in action.option_strings} == COMMANDS[name]


def test_the_options_of_what_is_done_with_checkpoints_are_frozen():
    """The options of `bigtrain checkpoint` are frozen."""
    *_, actions = checkpoint_parser()._actions
    everywhere = {"-h", "--help", "--json"}
    options = {name: set(parser._option_string_actions) for name, parser in actions.choices.items()}
    assert options == {name: flags | everywhere for name, flags in CHECKPOINT_ACTIONS.items()}


@pytest.mark.parametrize("name", preset_names("jobs"))
def test_every_job_preset_is_a_job(name):
    job = load_job(name)
    world_size = 1 if job.strategy.name == "single" else 2
    make_plan(job, world_size, "cpu")


@pytest.mark.parametrize("name", preset_names("strategies"))
def test_every_strategy_preset_names_techniques_that_take_its_options(name):
    job = load_job("default", name)
    assert job.strategy.name == name
    for role, config in job.strategy.roles().items():
        assert make_technique(role, config).role == role


def test_nothing_else_lies_in_the_presets():
    kinds = {"clusters", "jobs", "strategies"}
    for path in (ROOT / "configs").rglob("*"):
        if path.is_file() and "__pycache__" not in path.parts and path.name != "__init__.py":
            assert path.suffix == ".yaml", path
            assert path.parent.name in kinds, path


LISTED = [(role, name) for role, table in TECHNIQUES.items() for name in table]


@pytest.mark.parametrize(("role", "name"), LISTED)
def test_every_technique_is_described_where_it_is_written(role: Role, name: str):
    technique = technique_class(role, name)
    assert (technique.name, technique.role) == (name, role)
    assert technique.summary
    assert "\n" not in technique.summary
    assert technique.__doc__
    module = importlib.import_module(technique.__module__)
    lines = (module.__doc__ or "").splitlines()
    for heading in HEADINGS:
        assert any(line.startswith(heading) for line in lines), f"{name}: {heading} is missing"
    example = next(line for line in lines if line.startswith("Example:"))
    assert "train" in example, f"{name}: the example must be one command to paste"
    file = Path(module.__file__ or "")
    files = file.parent.rglob("*.py") if file.name == "__init__.py" else [file]
    used = {n.attr for f in files for n in ast.walk(tree(f)) if _reads_options(n)}
    dead = set(technique.model_fields) - used
    assert not dead, f"{name}: nothing reads the options {sorted(dead)}"


def _reads_options(node: ast.AST) -> bool:
    return isinstance(node, ast.Attribute) and ast.unparse(node.value) in ("self", "options")


def test_every_technique_has_a_preset():
    presets = [read_strategy(n, "").values["strategy"] for n in preset_names("strategies")]
    for role, name in LISTED:
        forms = (preset.get(role) for preset in presets)
        has = any(
            form == name or (isinstance(form, dict) and form.get("name", name) == name)
            for form in forms
        )
        assert has, f"{name}: write configs/strategies/{name}.yaml"


def test_every_key_of_a_job_is_read_somewhere():
    sections = {f: i.annotation for f, i in Job.model_fields.items() if _is_section(i.annotation)}
    wanted = {f"{s}.{key}" for s, kind in sections.items() for key in kind.model_fields}
    wanted |= {f"job.{key}" for key in Job.model_fields if key not in sections}
    kinds = {kind.__name__: name for name, kind in sections.items()} | {"Job": "job"}
    read_keys = {read for path in sources().values() for read in _reads(tree(path), kinds)}
    dead = wanted - read_keys
    assert dead == set(READ_INDIRECTLY), (
        f"keys that nothing reads: {sorted(dead - set(READ_INDIRECTLY))}; listed as read "
        f"indirectly and read: {sorted(set(READ_INDIRECTLY) - dead)}"
    )


def _is_section(kind: object) -> bool:
    return isinstance(kind, type) and issubclass(kind, BaseModel)


def _reads(node: ast.AST, kinds: dict[str, str], scope: dict[str, str] | None = None) -> set[str]:
    """The keys that an expression reads.

    job.train.steps, self.job.train.steps, and train.steps of a TrainConfig read `train.steps`.
    """
    scope = dict(scope or {})
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        for argument in (*node.args.args, *node.args.kwonlyargs):
            kind = ast.unparse(argument.annotation).split(".")[-1] if argument.annotation else ""
            scope[argument.arg] = kinds.get(kind, "")
        for inner in ast.walk(node):  # `config: ModelConfig = spec.config`
            if isinstance(inner, ast.AnnAssign) and isinstance(inner.target, ast.Name):
                scope[inner.target.id] = kinds.get(ast.unparse(inner.annotation), "")
    keys = set()
    if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
        owner = node.value
        if isinstance(owner, ast.Attribute):
            keys.add(f"{owner.attr}.{node.attr}")
        elif isinstance(owner, ast.Name):
            keys.add(f"{scope.get(owner.id) or owner.id}.{node.attr}")
    for child in ast.iter_child_nodes(node):
        keys |= _reads(child, kinds, scope)
    return keys


def own_files() -> list[Path]:
    """Every file of the project that git tracks or would add."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(command, cwd=ROOT, capture_output=True, check=True).stdout.decode()
    paths = [ROOT / name for name in names.split("\0") if name]
    return [path for path in paths if path.is_file() and not path.is_symlink()]


def python_files() -> list[Path]:
    return [path for path in own_files() if path.suffix == ".py"]


def _docstring_lines(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    if ast.get_docstring(node) is None:
        return 0
    return (node.body[0].end_lineno or 0) - node.body[0].lineno + 1


@pytest.mark.filterwarnings("always::UserWarning")  # a warning, not a failure
def test_files_and_functions_stay_readable_at_a_sitting():
    for path in python_files():
        lines = len(path.read_text(encoding="utf-8").splitlines())
        assert lines <= 700, f"{path} has {lines} lines, at most 700. Divide it by idea."
        if lines > 450:
            warnings.warn(f"{path} has {lines} lines: does it hold one idea?", stacklevel=1)
        is_product = path.relative_to(ROOT).parts[0] in ("bigtrain", "strategies")
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                length = (node.end_lineno or 0) - node.lineno + 1 - _docstring_lines(node)
                assert length <= 70, (
                    f"{path}:{node.lineno}: {node.name} has {length} lines, at most 70"
                )
            assert not isinstance(node, ast.Global), (
                f"{path}:{node.lineno}: no `global`; pass the value as an argument"
            )
            assert not (is_product and isinstance(node, ast.Assert)), (
                f"{path}:{node.lineno}: raise an error instead of asserting"
            )


def test_the_script_is_the_flow_and_nothing_else():
    path = ROOT / "bigtrain" / "train.py"
    assert len(path.read_text().splitlines()) < 185
    assert not [node for node in ast.walk(tree(path)) if isinstance(node, ast.ClassDef)]


def test_the_project_speaks_of_itself_alone():
    # The patterns are written so that this line does not match itself.
    foreign = re.compile(r"TO[D]O|FIX[M]E|/wor[k]/|/roo[t]/|[Ii]ssu[e] #\d|[Ss]essio[n] \d")
    lines_found = []
    for path in own_files():
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
        except UnicodeDecodeError:
            continue
        lines_found += [
            f"{path}:{n}: {line}" for n, line in enumerate(lines, 1) if foreign.search(line)
        ]
    assert not lines_found, "\n".join(lines_found)


def test_the_links_lead_to_the_folders_at_the_top():
    for name in ("strategies", "configs"):
        link = ROOT / "bigtrain" / name
        assert link.is_symlink()
        assert os.readlink(link) == f"../{name}"
