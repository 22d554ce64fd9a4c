"""Give the command malformed inputs, drawn by a seed; each must end in one line of error, or run.

    python benchmarks/hostile_inputs.py --inputs 2000 --seed 1

The inputs are YAML files as job, strategy, plan and cluster; words on the command line; JSON files
as DeepSpeed's configuration, as caches and as the index of a folder of weights; headers of
safetensors; and variables of launchers and of bigtrain itself. They are made from valid inputs by
changing, cutting, repeating, nesting and exchanging parts, and from values that are known to be
difficult. The checks: the exit status is 0 or 2, there is no traceback, status 2 comes with one
line of bigtrain's, and the command takes at most `LIMIT_S`. Nothing is trained: the commands are
`train --dry-run` and `checkpoint convert`.

Input N depends only on N and the seed. Processes are forked with their imports done.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import random
import re
import shutil
import struct
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

LIMIT_S = 10.0
SMALL = (
    *("model.name=gpt", "model.args.width=8", "model.args.num_layers=1"),
    "model.args.num_heads=1",
    *("data.path=text.txt", "data.args.sequence_length=8", "train.global_batch_size=4"),
    *("device=cpu", "train.steps=2"),
)
"""The words of a job that takes no time; those of an input come after them."""
_DEEP = 100_000
_MOST_LETTERS = 5200
"""Of a line that says what is wrong."""


@dataclass(frozen=True)
class HostileInput:
    """The words, files and variables of a command."""

    kind: str
    words: tuple[str, ...]
    files: Mapping[str, bytes] = field(default_factory=dict)
    environ: Mapping[str, str] = field(default_factory=dict)


def drawn_input(number: int, seed: int) -> HostileInput:
    """Return the input with this number."""
    draw = random.Random(f"{seed}:{number}")
    name = list(KINDS)[number % len(KINDS)]
    return KINDS[name](draw)


# Values that are difficult for some key.

NUMBERS = (
    *("0", "-1", "1", "2", "7", "-0", "0x10", "0b1", "1_0", "1:30:00", "1e3", "1.5", ".5", "-.inf"),
    *(".inf", ".nan", "1e999", "NaN", "Infinity", "9" * 30, "9" * 5000, "-" + "9" * 400, "1e-400"),
    *("true", "false", "yes", "off", "null", "~", "0o7", "08", "1e", "+1", "9223372036854775808"),
)
WORDS = (
    *("''", '""', "a", "ü", "'a b'", "single", "ddp", "ddp+full", "+", "++", "auto", "1f1b+fsdp"),
    *("../x", "/", ".", "..", "~nobody/x", "a" * 300, "a" * 5000, "x/" * 3000, "%s%n", "{}", "[]"),
    *(
        "2020-99-99",
        "2020-01-01",
        "0000-00-00",
        "12:99:99",
        "=",
        "<<",
        "*",
        "&",
        "!",
        "|",
        ">",
        "%",
    ),
    *("'\u202e'", "'\U0001f600'", "64KiB", "-1GiB", "1e400GiB", "NaNGiB", "os:system", "a:b", ":"),
    *("torch.nn:Linear", "builtins:exit", "$(id)", "`id`", "package.module:Name", "a.b.c:d.e"),
)
YAML_ONLY = (
    *(
        "!!int abc",
        "!!float x",
        "!!timestamp x",
        "!!bool x",
        "!!binary '#'",
        "!!python/name:os",
        "&a",
    ),
    *(
        "!!python/object/apply:os.system [id]",
        "!!set {a, b}",
        "!!omap [a: 1]",
        "!!pairs [a: 1]",
        "*a",
    ),
    *(
        '"\\0"',
        '"\\ud800"',
        '"\\x00a"',
        "!x y",
        "? a",
        "- - - a",
        "{a: 1, a: 2}",
        "[1, 2",
        "{a",
        "'a",
    ),
    *("!!null x", "!!merge <<", "!!str", "!!map []", "!!seq {}", "@a", "%YAML 9.9", "--- a\n--- b"),
    *("&a [*a]", "&a {a: *a}", "[" * 500, "{a: " * 500, "[" * _DEEP, "- " * 3000, "!!int '0x'"),
)
PLAUSIBLE = (
    *("0", "1", "2", "3", "4", "8", "16", "1000000", "0.5", "1.0e-3", "true", "false", "null"),
    *("[0.9, 0.95]", "[1, 2]", "[]", "{}", "ddp", "full", "selective", "zero", "adamw", "sgd"),
    *(
        "cosine",
        "linear",
        "poly",
        "step",
        "bf16",
        "fp64",
        "text",
        "text.txt",
        "runs",
        "first",
        "auto",
    ),
    *(
        "1GiB",
        "64KiB",
        "100%",
        "{name: ddp}",
        "{name: zero, stage: 2}",
        "{every: 2}",
        "cpu",
        "loss",
    ),
)
KEYS = (
    *("model.name", "model.args.width", "model.args", "model.loss", "model.head", "data.name"),
    *(
        "data.path",
        "data.args",
        "data.args.pattern",
        "data.args.validation_fraction",
        "data.workers",
    ),
    *("data.args.sequence_length", "optim.name", "optim.lr", "optim.betas", "optim.milestones"),
    *("optim.clip_norm", "optim.weight_decay", "optim.schedule", "train.steps", "train.epochs"),
    *(
        "train.global_batch_size",
        "train.micro_batch_size",
        "train.accumulation_steps",
        "train.seed",
    ),
    *(
        "train.precision",
        "train.compile",
        "mesh.pp",
        "mesh.dp",
        "mesh.tp",
        "mesh.backend",
        "device",
    ),
    *("mesh.timeout", "memory.cap", "memory.on_oom", "memory.predict", "checkpoint.every"),
    *("checkpoint.keep", "checkpoint.best", "checkpoint.resume", "checkpoint.snapshot_bytes"),
    *("log.dir", "log.name", "log.every", "log.tensorboard", "strategy", "strategy.name"),
    *("strategy.replicate", "strategy.replicate.name", "strategy.cut", "strategy.recompute"),
    *("strategy.recompute.every", "strategy.slice", "strategy.offload", "strategy.accumulate"),
    *("strategy.deepspeed", "train", "model", "optim", "mesh", "log", "x", "train.x", "predicted"),
)


def _value(draw: random.Random, depth: int = 0) -> str:
    """Return a random value in YAML's flow style."""
    pool = draw.choice((NUMBERS, WORDS, YAML_ONLY, PLAUSIBLE, PLAUSIBLE))
    if depth < 3 and draw.random() < 0.2:
        inner = ", ".join(_value(draw, depth + 1) for _ in range(draw.randrange(4)))
        return f"[{inner}]"
    if depth < 3 and draw.random() < 0.15:
        inner = ", ".join(
            f"{draw.choice(('a', 'name', 'every', '1', 'null', '<<'))}: {_value(draw, depth + 1)}"
            for _ in range(draw.randrange(4))
        )
        return f"{{{inner}}}"
    return draw.choice(pool)


def _yaml_text(draw: random.Random, keys: tuple[str, ...] = KEYS) -> str:
    """Return a file of nested keys, some of them valid."""
    lines: list[str] = []
    for key in draw.sample(keys, draw.randint(1, 3)):
        parts = key.split(".")
        for depth, part in enumerate(parts[:-1]):
            lines.append("  " * depth + f"{part}:")
        lines.append("  " * (len(parts) - 1) + f"{parts[-1]}: {_value(draw)}")
    return "\n".join(lines) + "\n"


def _bomb(draw: random.Random) -> str:
    """Return aliases of aliases: a few hundred bytes that expand to more than any memory."""
    levels, width = draw.randint(6, 30), draw.randint(2, 9)
    flavour = draw.choice(("list", "map", "merge"))
    lines = ["a0: &a0 {x: 1, y: 2}" if flavour != "list" else "a0: &a0 [x, y]"]
    for level in range(1, levels):
        inner = [f"*a{level - 1}"] * width
        if flavour == "list":
            lines.append(f"a{level}: &a{level} [{', '.join(inner)}]")
        elif flavour == "map":
            pairs = ", ".join(f"k{n}: {alias}" for n, alias in enumerate(inner))
            lines.append(f"a{level}: &a{level} {{{pairs}}}")
        else:
            lines.append(f"a{level}: &a{level} {{<<: [{', '.join(inner)}]}}")
    return "\n".join(lines) + "\n"


def _mutated(draw: random.Random, data: bytes) -> bytes:
    """Return data with a part changed, cut, repeated or inserted."""
    for _ in range(draw.randint(1, 4)):
        begin = draw.randrange(len(data) + 1)
        end = draw.randrange(len(data) + 1)
        first, last = sorted((begin, end))
        odd = draw.choice(
            (b"\0", b"\xff", b"\t", b"\r", b"\xef\xbb\xbf", b":", b"- ", b"{", b"]", b"&a", b"\n\n")
            + (b'"', b"\\ud800", b"\x85", b"\xe2\x80\xa8", b"<<: ", b"!!int ", b"9" * 50, b"e999")
        )
        data = draw.choice(
            (
                data[:begin] + odd + data[begin:],
                data[:first] + data[last:],
                data[:begin] + data[first:last] * 2 + data[begin:],
                data[:begin],
                data[:begin] + bytes([draw.randrange(256)]) + data[begin + 1 :],
            )
        )
    return data


def _yaml_bytes(draw: random.Random, right: str, keys: tuple[str, ...] = KEYS) -> bytes:
    way = draw.random()
    if way < 0.25:
        return _yaml_text(draw, keys).encode("utf-8", "surrogatepass")
    if way < 0.45:  # change one value of a valid file
        places = [match.span(1) for match in re.finditer(r": ([^\s,{}]+)", right)]
        begin, end = draw.choice(places)
        return (right[:begin] + _value(draw) + right[end:]).encode("utf-8", "surrogatepass")
    if way < 0.55:
        return _bomb(draw).encode()
    if way < 0.6:
        return draw.randbytes(draw.randrange(200))
    if way < 0.65:
        return _yaml_text(draw, keys).encode(draw.choice(("utf-16", "utf-32", "utf-8-sig")))
    return _mutated(draw, right.encode())


_JOB = """\
model: {name: gpt, args: {width: 8, num_layers: 1, num_heads: 1}}
data:
  name: text
  path: text.txt
  args: &args {sequence_length: 8}
optim: {name: adamw, lr: 1.0e-3, betas: [0.9, 0.95]}
train:
  steps: 2
  global_batch_size: 4
mesh: {tp: 1}
strategy: ddp+full
"""
_STRATEGY = """\
strategy:
  replicate: {name: ddp}
  recompute: {every: 2}
train: {precision: bf16}
"""
_PLAN = """\
mesh: {pp: 1, dp: 1, tp: 1}
strategy: {name: ddp+full, replicate: {name: ddp}, recompute: {name: checkpointing, mode: full}}
train: {global_batch_size: 4, micro_batch_size: 2, precision: fp32}
predicted: {peak_bytes: 1000, phase: backward, breakdown: {parameters: 10}}
"""
_DEEPSPEED = {
    "train_batch_size": 4,
    "zero_optimization": {"stage": 1, "reduce_bucket_size": 500000, "contiguous_gradients": True},
    "optimizer": {"type": "AdamW", "params": {"lr": 0.002, "betas": "auto", "eps": 1e-8}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 0, "warmup_type": "linear"}},
    "gradient_clipping": 1.0,
    "bf16": {"enabled": False},
}


def _train(*words: str) -> tuple[str, ...]:
    return ("train", "--dry-run", *words)


def _config(draw: random.Random) -> HostileInput:
    files = {"job.yaml": _yaml_bytes(draw, _JOB)}
    words = SMALL if draw.random() < 0.3 else ("device=cpu",)
    return HostileInput("job", _train("--config", "job.yaml", *words), files)


def _strategy(draw: random.Random) -> HostileInput:
    files = {"own.yaml": _yaml_bytes(draw, _STRATEGY, KEYS)}
    words = draw.choice(("own.yaml", "ddp+own.yaml", "./own.yaml+full", "own.yaml+own.yaml"))
    return HostileInput("strategy", _train(*SMALL, "--strategy", words), files)


def _plan(draw: random.Random) -> HostileInput:
    files = {"plan.yaml": _yaml_bytes(draw, _PLAN)}
    return HostileInput("plan", _train(*SMALL, "--plan", "plan.yaml"), files)


def _overrides(draw: random.Random) -> HostileInput:
    words = list(SMALL)
    for _ in range(draw.choice((1, 1, 1, 2, 3))):
        key = draw.choice((*KEYS, *KEYS, ".", "a" * 300, "train..steps", "a." * 400, "TRAIN.STEPS"))
        text = _value(draw).replace("\0", "")[:100_000]
        words += [f"{key}={text}"] if draw.random() < 0.9 else [key, text]
    return HostileInput("words", _train(*words))


_SIZES = (
    *("model.args.width", "model.args.num_layers", "model.args.num_heads", "train.steps"),
    *("data.args.sequence_length", "data.args.validation_samples", "train.global_batch_size"),
    *(
        "train.micro_batch_size",
        "train.accumulation_steps",
        "train.epochs",
        "train.seed",
        "mesh.pp",
    ),
    *("mesh.tp", "mesh.dp", "optim.base_batch_size", "optim.warmup_steps", "optim.lr", "log.every"),
    *("checkpoint.every", "checkpoint.keep", "memory.cap", "memory.track_steps", "data.workers"),
    *("model.chunk_size", "mesh.timeout", "train.eval_every", "train.check_first_steps"),
    *("strategy.recompute.every", "optim.warmup_epochs", "checkpoint.snapshot_bytes"),
)


def _sizes(draw: random.Random) -> HostileInput:
    """Return numbers of the right kind that are far too large."""
    numbers: tuple[str, ...]
    numbers = ("0", "1", "3", "7", "1000", "1000003", "10000000000", str(1 << 31), str(1 << 40))
    numbers += (str((1 << 63) - 1), str(1 << 63), str(10**18), str(10**30), "9" * 400)
    keys = draw.sample(_SIZES, draw.choice((1, 1, 2, 3)))
    return HostileInput("sizes", _train(*SMALL, *(f"{k}={draw.choice(numbers)}" for k in keys)))


def _json_text(draw: random.Random, right: Any) -> bytes:
    """Return JSON that is nearly valid, or invalid."""
    text = json.dumps(right)
    deep = draw.choice((b"[", b'{"a":', b'{"zero_optimization":', b"[[{}],"))
    values: tuple[str, ...] = (
        "NaN",
        "Infinity",
        "-1",
        "1e999",
        "true",
        "null",
        "[]",
        "{}",
        '""',
        '"auto"',
        '"\\ud800"',
    )
    values += ("9" * 5000, '"\\u0000"', "[" * 300 + "]" * 300, '{"a":1,"a":2}', '"x"', "0.5", "-0")
    way = draw.random()
    if way < 0.1:
        return deep * draw.choice((10, 70, 2000, _DEEP))
    if way < 0.2:
        return draw.choice(values).encode()
    if way < 0.65:
        places = [n for n, c in enumerate(text) if c == ":"]
        position = draw.choice(places)
        end = min(n for n in (text.find(",", position), text.find("}", position)) if n > 0)
        return (text[: position + 1] + draw.choice(values) + text[end:]).encode()
    if way < 0.75:
        return text.replace("{", '{"a": 1, "a": 2, ', draw.randint(1, 2)).encode()
    return _mutated(draw, text.encode())


def _deepspeed(draw: random.Random) -> HostileInput:
    files = {"ds.json": _json_text(draw, _DEEPSPEED)}
    agreed = ("optim.schedule=constant", "optim.warmup_steps=0", "optim.clip_norm=1.0")
    words = _train(*SMALL, *agreed, "strategy.deepspeed=ds.json")
    return HostileInput("deepspeed", words, files)


_KEPT = {
    "rates": {"key": {"rates": {"device": "cpu", "flops": {"fp32": 1e9}}, "measured": "x"}},
    "blocks": {"key": {"timed": [{"rows": 1, "shares": {}}], "sizes": [1], "when": "x"}},
    "residuals": {"key": [{"when": "x", "engine": "torch", "predicted_bytes": 1}]},
}


def _cache(draw: random.Random) -> HostileInput:
    name = draw.choice(list(_KEPT))
    files = {f"cache/bigtrain/{name}.json": _json_text(draw, _KEPT[name])}
    return HostileInput("cache", _train(*SMALL), files)


def _header(draw: random.Random) -> HostileInput:
    damages = importlib.import_module("damages")
    entry = {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}
    two = {"dtype": "I64", "shape": [4], "data_offsets": [24, 56]}
    header, body = {"__metadata__": {"format": "pt"}, "a": entry, "b": two}, bytes(range(56))
    if draw.random() < 0.6:
        _, head, body = damages.broken_header(draw, header, body)
        data = head + body
    else:
        text = _json_text(draw, header)
        data = struct.pack("<Q", len(text)) + text + body
        data = data if draw.random() < 0.5 else _mutated(draw, data)
    name = draw.choice(("weights.safetensors", "model.safetensors"))
    source = name if name == "weights.safetensors" else "."
    return HostileInput("header", ("checkpoint", "convert", source, "target"), {name: data})


def _index(draw: random.Random) -> HostileInput:
    text = b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}'
    data = struct.pack("<Q", len(text)) + text + bytes(4)
    right = {"metadata": {"total_size": 4}, "weight_map": {"a": "one.safetensors"}}
    files = {
        "hub/one.safetensors": data,
        "hub/model.safetensors.index.json": _json_text(draw, right),
        "hub/config.json": draw.choice((b"{}", b"\xff", b"[" * 100)),
    }
    return HostileInput("index", ("checkpoint", "convert", "hub", "target"), files)


_VARIABLES = (
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "LOCAL_SIZE", "MASTER_ADDR"),
    *("MASTER_PORT", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_NTASKS", "SLURM_STEP_NUM_TASKS"),
    *("SLURM_STEP_TASKS_PER_NODE", "SLURM_NODEID", "SLURM_STEP_ID", "SLURM_JOB_ID", "PMI_RANK"),
    *(
        "SLURM_NODELIST",
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
    ),
    *("OMPI_COMM_WORLD_LOCAL_SIZE", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    *("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "BIGTRAIN_RESTART", "BIGTRAIN_LAUNCH"),
    *("XDG_CACHE_HOME", "HOME", "TMPDIR", "COLUMNS", "SLURM_RESTART_COUNT"),
)
_ODD = (
    *(
        "",
        " ",
        "0",
        "1",
        "2",
        "3",
        "-1",
        "1.5",
        "abc",
        "٣",
        "²",
        "0x1",
        "1e3",
        "9" * 25,
        "9" * 5000,
    ),
    *(
        "99999999(x9999999999)",
        "2(x2)",
        "2,2",
        "1(x3),1",
        "(x2)",
        "2(x",
        ",",
        "x" * 3000,
        "\x1b[31m",
    ),
    *("{}", "[]", "null", '{"words": 5, "said": "x"}', '{"words": ["train.steps=3"], "said": ""}'),
    *(
        '{"words": ["train.steps=x"], "said": "a"}',
        "[" * 5000,
        '{"words": ["--x"], "said": "\\ud800"}',
    ),
    *(
        "/",
        "/nowhere/0",
        "relative",
        "/dev/null",
        "/proc/self",
        "gpu[07-09,12],login",
        "a\nb",
        "\udcff",
    ),
)


def _environment(draw: random.Random) -> HostileInput:
    names = draw.sample(_VARIABLES, draw.randint(1, 3))
    families: tuple[str, ...] = (
        "RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE",
        "SLURM_PROCID SLURM_LOCALID SLURM_NTASKS",
    )
    families += ("SLURM_STEP_ID SLURM_PROCID SLURM_LOCALID SLURM_NTASKS SLURM_STEP_TASKS_PER_NODE",)
    families += ("OMPI_COMM_WORLD_RANK OMPI_COMM_WORLD_SIZE", "PMI_RANK PMI_SIZE MPI_LOCALRANKID")
    values = {name: draw.choice(_ODD) for name in names}
    for name in draw.choice(families).split() if draw.random() < 0.7 else ():
        values[name] = draw.choice(("0", "1", "2", "2", *_ODD))
    return HostileInput("environment", _train(*SMALL), {}, values)


KINDS: dict[str, Callable[[random.Random], HostileInput]] = {
    "job": _config,
    "strategy": _strategy,
    "plan": _plan,
    "words": _overrides,
    "sizes": _sizes,
    "deepspeed": _deepspeed,
    "cache": _cache,
    "header": _header,
    "index": _index,
    "environment": _environment,
}


class HostileRuns:
    """Gives inputs to the command, each in its own folder.

    Args:
        folder: for all of them.
        run: as `support.zygote.forked_cli`.
        environ: the variables that an input's are added to.
        limit_s: seconds that an input may take.
    """

    def __init__(
        self,
        folder: Path,
        run: Callable[..., subprocess.CompletedProcess[str]],
        environ: Mapping[str, str],
        limit_s: float = LIMIT_S,
    ) -> None:
        self._folder, self._run, self._environ = folder, run, environ
        self._limit_s = limit_s

    def one(self, number: int, seed: int) -> dict[str, Any]:
        """Run the input with this number; `problem` is None if every check passed."""
        drawn = drawn_input(number, seed)
        folder = self._folder / f"input-{number}"
        folder.mkdir()
        (folder / "text.txt").write_text("a text of some letters, " * 40)
        for name, data in drawn.files.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(data)
        # Ranks of one launch silence each other's messages, and one process starts all inputs.
        own_environ = {"PMIX_NAMESPACE": f"{seed}-{number}-{os.getpid()}"}
        own_environ |= {"XDG_CACHE_HOME": str(folder / "cache"), "HOME": str(folder)}
        environ = {**self._environ, **own_environ, **drawn.environ}
        began = time.monotonic()
        status, problem = None, None
        try:
            done = self._run(drawn.words, cwd=folder, env=environ, timeout=3 * self._limit_s)
            status, problem = done.returncode, _fault(done)
        except subprocess.TimeoutExpired:
            problem = f"not done after {3 * self._limit_s:.0f} s"
        except ValueError as error:  # a NUL in a word: no process can have it as an argument
            problem = None if "null byte" in str(error) else str(error)
        seconds = time.monotonic() - began
        if problem is None and seconds > self._limit_s:
            problem = f"it took {seconds:.1f} s"
        shutil.rmtree(folder, ignore_errors=True)
        row = {"number": number, "kind": drawn.kind, "status": status, "problem": problem}
        if problem is not None:
            row["words"] = [word[:120] for word in drawn.words if word not in SMALL]
            row["files"] = {name: repr(data[:300]) for name, data in drawn.files.items()}
            row["environ"] = {name: value[:100] for name, value in drawn.environ.items()}
        return row


def _fault(done: subprocess.CompletedProcess[str]) -> str | None:
    errors = done.stderr
    if "Traceback (most recent call last)" in errors + done.stdout:
        lines = [line for line in errors.splitlines() if line.strip()]
        where = [line.strip() for line in lines if line.startswith("  File ")]
        return f"traceback: {lines[-1][:200]} ({where[-1] if where else ''})"
    if done.returncode not in (0, 2):
        return f"exit status {done.returncode}: {(errors or done.stdout)[-300:]}"
    if done.returncode == 2:
        own_lines = [
            line for line in errors.splitlines() if line.startswith(("bigtrain: ", "usage: "))
        ]
        if not own_lines:
            return f"exit status 2 without a line: {errors[-200:]}"
        if max(map(len, own_lines)) > _MOST_LETTERS:
            return f"a line of {max(map(len, own_lines))} letters: {own_lines[0][:200]}"
    return None


def summary_of(rows: list[dict[str, Any]], seed: int, seconds: float) -> dict[str, Any]:
    """Return a summary of the inputs and their results."""
    counts = Counter((row["kind"], row["status"]) for row in rows)
    failed = [row for row in rows if row["problem"] is not None]
    return {
        "seed": seed,
        "inputs": len(rows),
        "failed": len(failed),
        "seconds": round(seconds, 1),
        "by_kind": {
            kind: {
                "ran": counts[kind, 0],
                "refused": counts[kind, 2],
                "failed": sum(row["kind"] == kind for row in failed),
            }
            for kind in KINDS
        },
        "failures": failed,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--inputs", default="0..1999", metavar="A..B", help="their numbers, or N")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--at-once", type=int, default=2, metavar="K")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
    zygotes = importlib.import_module("support.zygote")
    from harness import keep

    first, dots, last = options.inputs.partition("..")
    numbers = range(int(first), int(last) + 1) if dots else range(int(first))
    environ = {**zygotes.surroundings(), "OMP_NUM_THREADS": "1"}
    zygotes.forked_cli(["strategies"])  # imports do not count in the time of an input
    rows: list[dict[str, Any]] = []
    began = time.monotonic()
    with (
        tempfile.TemporaryDirectory(prefix="bigtrain-hostile-") as name,
        ThreadPoolExecutor(options.at_once) as threads,
    ):
        runs = HostileRuns(Path(name), zygotes.forked_cli, environ)
        for row in threads.map(lambda n: runs.one(n, options.seed), numbers):
            rows.append(row)
            if row["problem"] is not None:
                print(json.dumps(row), flush=True)
    document = summary_of(rows, options.seed, time.monotonic() - began)
    keep(options.output, document)
    for kind, row in document["by_kind"].items():
        print(f"{kind:12} {row['ran']:5} ran, {row['refused']:5} refused, {row['failed']} failed")
    print(f"{document['inputs']} inputs, {document['failed']} failed, {document['seconds']} s")
    return 1 if document["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
