"""Damage checkpoints at random, by a seed, and check that no damaged one is loaded.

    python benchmarks/faults.py --damage 1000 --seed 1

A run has two checkpoints. The newer one is damaged in one of these ways: in its bytes; in its files
(missing, empty, swapped, or a folder, a pipe, a device or a link in place of a file); by an error
of the system when a file is opened or read (EACCES, EIO, ESTALE); or in the content of its
manifest, its state or a header of its tensors, with hashes that match. Each time the test requires:
the checkpoint is refused by an error of bigtrain that names a file; a resume continues from the
older checkpoint, bit for bit, and prints that; nothing takes longer than `LIMIT_S`. `latest` and
`best` only point at checkpoints, so damage to them must not hide an undamaged checkpoint.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import random
import shutil
import signal
import socket
import struct
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from io import FileIO
from pathlib import Path
from typing import Any

import torch
from torch import nn

from bigtrain.checkpoint.manifest import file_record, manifest_text
from bigtrain.checkpoint.read import Checkpoint
from bigtrain.engine.engine import Engine
from bigtrain.engine.resume import resume
from bigtrain.errors import CheckpointError
from bigtrain.files import regular
from bigtrain.job.load import job_from_keys
from bigtrain.losses.loss import CrossEntropy
from bigtrain.ranks.context import RunContext

LIMIT_S = 10
OLD, NEW = 1, 2
"""The steps of the two checkpoints."""
_DEEP = 100_000
_Damage = Callable[[random.Random, Path], str]


def small_engine() -> Engine:
    """Return an engine of a net with two layers, in this process."""
    keys = {"train.global_batch_size": 4, "checkpoint.resume": "auto", "device": "cpu"}
    return Engine(
        lambda: nn.Sequential(nn.Linear(24, 48), nn.ReLU(), nn.Linear(48, 5)),
        CrossEntropy(),
        torch.optim.AdamW,
        job_from_keys("single", keys),
        RunContext.alone(),
    )


def written_run(folder: Path) -> Path:
    """Return the folder of a run with two checkpoints."""
    generator = torch.Generator().manual_seed(1)
    batch = torch.randn(4, 24, generator=generator), torch.tensor([0, 1, 2, 3])
    with small_engine() as engine:
        for _ in (OLD, NEW):
            engine.step(batch)
            engine.save(folder / "checkpoints")
    return folder


class DamagedRuns:
    """Damages copies of a run one after another, and checks the result of each.

    Args:
        written: of `written_run`.
        scratch: an empty folder.
    """

    def __init__(self, written: Path, scratch: Path) -> None:
        self._written, self._copy = written, scratch / "run"
        self._engine = small_engine()
        self._states: dict[int, dict[str, torch.Tensor]] = {}
        for step in (OLD, NEW):
            self._engine.load(written / "checkpoints" / f"step-{step}")
            state = self._engine.runner.module.state_dict()
            self._states[step] = {name: value.clone() for name, value in state.items()}

    def one(self, number: int, seed: int) -> dict[str, Any]:
        """Make the damage with this number; `problem` is None if every check passed."""
        draw = random.Random(f"{seed}:{number}")
        shutil.rmtree(self._copy, ignore_errors=True)
        shutil.copytree(self._written, self._copy)
        name = list(KINDS)[number % len(KINDS)]
        checkpoints = self._copy / "checkpoints"
        began = time.monotonic()
        with contextlib.ExitStack() as stack:
            if name.startswith("system"):
                target = draw.choice(sorted((checkpoints / f"step-{NEW}").iterdir()))
                description = stack.enter_context(_failing(draw, name, target))
            else:
                description = KINDS[name](draw, checkpoints)
            problem = self._problem(checkpoints, pointers_only=name == "pointer")
        seconds = time.monotonic() - began
        if problem is None and seconds > LIMIT_S:
            problem = f"it took {seconds:.1f} s"
        return {"number": number, "kind": name, "what": description, "problem": problem}

    def _problem(self, checkpoints: Path, *, pointers_only: bool) -> str | None:
        new = checkpoints / f"step-{NEW}"
        previous = signal.signal(signal.SIGALRM, _too_long)
        signal.alarm(LIMIT_S)
        try:
            if not pointers_only:
                refusal = _refusal(new)
                if refusal is None:
                    return "it was opened as if it were undamaged"
                if "\n" in refusal or str(new) not in refusal:
                    return f"the error names no file, or has several lines: {refusal[:300]}"
            self._engine.load(self._written / "checkpoints" / f"step-{NEW}")
            lines = resume(self._engine.job, self._engine, self._copy)
        except Exception as error:  # noqa: BLE001 - every other error is what is looked for
            return f"{type(error).__name__}: {str(error)[:300]}"
        finally:
            signal.alarm(0)
            signal.signal(signal.SIGALRM, previous)
        expected = NEW if pointers_only else OLD
        if not pointers_only and not any(line.startswith("warning: ") for line in lines):
            return f"no warning: {lines}"
        if self._engine.steps_done != expected and not pointers_only:
            return (
                f"continued from step {self._engine.steps_done}, but step {expected} is undamaged"
            )
        state = self._engine.runner.module.state_dict()
        saved = self._states[self._engine.steps_done]
        if not all(torch.equal(value, saved[name]) for name, value in state.items()):
            return "weights other than those that were saved"
        return None


def _refusal(path: Path) -> str | None:
    try:
        checkpoint = Checkpoint(path)
        len(checkpoint.tensors)
    except CheckpointError as error:
        return str(error)
    return None


def _too_long(*_: object) -> None:
    raise TimeoutError(f"not done after {LIMIT_S} s")


# The kinds of damage; each function returns a few words on it.


def _files(checkpoints: Path) -> list[Path]:
    return sorted((checkpoints / f"step-{NEW}").iterdir())


def _any_file(draw: random.Random, checkpoints: Path) -> Path:
    return draw.choice([path for path in _files(checkpoints) if path.stat().st_size])


def _flipped(draw: random.Random, checkpoints: Path) -> str:
    path = _any_file(draw, checkpoints)
    data, count = bytearray(path.read_bytes()), draw.choice((1, 1, 1, 2, 40))
    for bit in draw.sample(range(8 * len(data)), min(count, 8 * len(data))):
        data[bit // 8] ^= 1 << bit % 8
    path.write_bytes(data)
    return f"{count} bits of {path.name}"


def _cut(draw: random.Random, checkpoints: Path) -> str:
    path = _any_file(draw, checkpoints)
    size = draw.choice((0, 1, 7, 8, draw.randrange(path.stat().st_size)))
    os.truncate(path, min(size, path.stat().st_size - 1))
    return f"{path.name} cut to {size} bytes"


def _longer(draw: random.Random, checkpoints: Path) -> str:
    path = _any_file(draw, checkpoints)
    with path.open("ab") as file:
        file.write(draw.choice((b"\0", b"{", b"\n{}", draw.randbytes(40))))
    return f"{path.name} is longer"


def _lost_page(draw: random.Random, checkpoints: Path) -> str:
    path = _any_file(draw, checkpoints)
    data = bytearray(path.read_bytes())
    begin = draw.randrange(len(data))
    part = bytes(min(512, len(data) - begin))
    data[begin : begin + len(part)] = part if data[begin : begin + len(part)] != part else b"\xff"
    path.write_bytes(data)
    return f"a page of {path.name}"


def _gone(draw: random.Random, checkpoints: Path) -> str:
    path = _any_file(draw, checkpoints)
    path.unlink()
    return f"no {path.name}"


def _swapped(draw: random.Random, checkpoints: Path) -> str:
    pairs = [(a, b) for a in _files(checkpoints) for b in _files(checkpoints) if a < b]
    first, second = draw.choice([(a, b) for a, b in pairs if a.read_bytes() != b.read_bytes()])
    content = first.read_bytes()
    first.write_bytes(second.read_bytes())
    second.write_bytes(content)
    return f"{first.name} and {second.name} swapped"


def _of_the_other(draw: random.Random, checkpoints: Path) -> str:
    """Replace a file of the newer checkpoint by the same file of the older one."""
    older = checkpoints / f"step-{OLD}"
    names = [
        path.name
        for path in _files(checkpoints)
        if (older / path.name).read_bytes() != path.read_bytes()
    ]
    name = draw.choice(names)
    shutil.copy(older / name, checkpoints / f"step-{NEW}" / name)
    return f"{name} of the older one"


def _in_place_of(draw: random.Random, checkpoints: Path) -> str:
    path = _any_file(draw, checkpoints)
    path.unlink()
    kind = draw.choice(
        ("folder", "pipe", "socket", "loop", "nowhere", "/dev/zero", "/dev/null", "/proc/self/mem")
    )
    if kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "socket":
        _bind_socket(path)
    elif kind in ("loop", "nowhere"):
        path.symlink_to(path.name if kind == "loop" else "not-there")
    else:
        path.symlink_to(kind)
    return f"{kind} in place of {path.name}"


def _bind_socket(path: Path) -> None:
    here = os.getcwd()
    os.chdir(path.parent)  # a socket's path may have about a hundred bytes
    try:
        with socket.socket(socket.AF_UNIX) as unix_socket:
            unix_socket.bind(path.name)
    finally:
        os.chdir(here)


@contextlib.contextmanager
def _failing(draw: random.Random, name: str, target: Path) -> Iterator[str]:
    """Let the system refuse to open a file, or to read it from some read on."""
    code = draw.choice((errno.EACCES, errno.EIO, errno.ESTALE, errno.ENXIO, errno.EMFILE))
    real_open, real_file, real_read = os.open, FileIO, os.pread
    doomed: set[tuple[int, int]] = set()
    state = os.stat(target)
    doomed.add((state.st_dev, state.st_ino))

    def is_doomed(descriptor: int) -> bool:
        status = os.fstat(descriptor)
        return (status.st_dev, status.st_ino) in doomed

    def refuse_open(path: Any, *args: Any, **options: Any) -> int:
        if os.fspath(path) == str(target):
            raise OSError(code, os.strerror(code), str(path))
        return real_open(path, *args, **options)

    def refuse_read(descriptor: int, *args: Any) -> bytes:
        if is_doomed(descriptor):
            raise OSError(code, os.strerror(code))
        return real_read(descriptor, *args)

    class Failing(FileIO):
        def read(self, size: int | None = -1, /) -> bytes:
            if is_doomed(self.fileno()):
                raise OSError(code, os.strerror(code))
            return super().read(size)

    if name == "system open":
        os.open = refuse_open
    else:
        os.pread = refuse_read
        regular.FileIO = Failing  # type: ignore[attr-defined]
    try:
        yield f"{errno.errorcode[code]} of {target.name}"
    finally:
        os.open, os.pread, regular.FileIO = real_open, real_read, real_file  # type: ignore[attr-defined]


def _rehash(checkpoints: Path) -> None:
    """Write a manifest that matches the files as they are now."""
    folder = checkpoints / f"step-{NEW}"
    named = json.loads((folder / "manifest.json").read_text())["files"]
    files = {name: file_record((folder / name).read_bytes()) for name in named}
    (folder / "manifest.json").write_text(manifest_text(files))


def _header(draw: random.Random, checkpoints: Path) -> str:
    """Write a header that breaks the format, with matching hashes."""
    tensors = [path for path in _files(checkpoints) if path.suffix == ".safetensors"]
    path = draw.choice(tensors)
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header, body = json.loads(data[8 : 8 + length]), data[8 + length :]
    description, text, body = broken_header(draw, header, body)
    path.write_bytes(text + body)
    _rehash(checkpoints)
    return f"{path.name}: {description}"


def broken_header(
    draw: random.Random, header: dict[str, Any], body: bytes
) -> tuple[str, bytes, bytes]:
    """Return a safetensors file that breaks the format in one way.

    Returns:
        The way in a few words; the length and the header; the bytes of the tensors.
    """
    name = draw.choice([n for n in header if n != "__metadata__" and header[n]["shape"]])
    entry_ways = _entry_ways(draw, header, body, name)
    way = draw.choice([*entry_ways, *_LENGTHS, *_TEXTS, "a name twice", "a gap", "bytes behind"])
    entry = dict(header[name])
    if way in entry_ways:
        entry_ways[way]()
    elif way == "a gap":
        body = _with_gap(header, entry["data_offsets"][1], body)
    elif way == "bytes behind":
        body += bytes(8)
    text = json.dumps(header, separators=(",", ":")).encode()
    if way == "a name twice":
        text = text[:-1] + b"," + json.dumps({name: entry}).encode()[1:]
    text = _TEXTS[way](text) if way in _TEXTS else text
    length = _LENGTHS[way](len(text), len(body)) if way in _LENGTHS else len(text)
    return way, struct.pack("<Q", length) + text, body


def _with_gap(header: dict[str, Any], end: int, body: bytes) -> bytes:
    """Insert eight bytes after a tensor that belong to no tensor."""
    for entry in header.values():
        if "data_offsets" in entry and entry["data_offsets"][0] >= end:
            entry["data_offsets"] = [offset + 8 for offset in entry["data_offsets"]]
    return body[:end] + bytes(8) + body[end:]


def _entry_ways(
    draw: random.Random, header: dict[str, Any], body: bytes, name: str
) -> dict[str, Callable[[], Any]]:
    """Return the possible errors of a tensor's entry in a header, by name."""
    entry = header[name]
    (begin, end), shape = entry["data_offsets"], entry["shape"]
    over = 4 if begin == 0 else -4

    def change(**values: Any) -> Callable[[], Any]:
        return lambda: entry.update(values)

    return {
        "begins before the tensors": change(data_offsets=[begin - 8, end - 8]),
        "negative": change(data_offsets=[begin - end, 0]),
        "overlaps": change(data_offsets=[begin + over, end + over]),
        "beyond the end": change(data_offsets=[begin + len(body), end + len(body)]),
        "turned": change(data_offsets=[end, begin]),
        "three offsets": change(data_offsets=[begin, end, end]),
        "offsets as floats": change(data_offsets=[float(begin), float(end)]),
        "offsets as texts": change(data_offsets=[str(begin), str(end)]),
        "a truth in the shape": change(shape=[True, *shape]),
        "a float in the shape": change(shape=[float(shape[0]), *shape[1:]]),
        "a negative size": change(shape=[-n for n in shape]),
        "another shape": change(shape=[shape[0] + 1, *shape[1:]]),
        "a shape that wraps around": change(shape=[1 << 62, 4, *shape]),
        "endless sizes": change(shape=[10**4000] * 50),
        "a shape that is a text": change(shape="24"),
        "an unknown type": change(dtype="F33"),
        "a type that is a list": change(dtype=["F32"]),
        "another type": change(dtype="U8"),
        "one key more": change(more=1),
        "one key less": lambda: entry.pop(draw.choice(("dtype", "shape", "data_offsets"))),
        "no object": lambda: header.update({name: [1, 2]}),
        "metadata of numbers": lambda: header.update(__metadata__={"format": 1}),
        "metadata as a list": lambda: header.update(__metadata__=[1]),
        "half of a character": lambda: header.update({"\ud800": header.pop(name)}),
    }


_TEXTS: dict[str, Callable[[bytes], bytes]] = {
    "nested deep": lambda _: b'{"a":' * _DEEP + b"1" + b"}" * _DEEP,
    "lists nested deep": lambda _: b"[" * _DEEP + b"]" * _DEEP,
    "a list": lambda _: b"[]",
    "no JSON": lambda text: text.replace(b":", b";", 1),
    "no UTF-8": lambda _: b'{"\xff\xfe":1}',
    "spaces before it": lambda text: b"  " + text,
    "an endless number": lambda _: b'{"a":' + b"9" * 6000 + b"}",
}
_LENGTHS: dict[str, Callable[[int, int], int]] = {
    "endless length": lambda _text, _body: 1 << 63,
    "length beyond the file": lambda text, body: text + body + 1,
    "length of nothing": lambda _text, _body: 0,
}


def _manifest(draw: random.Random, checkpoints: Path) -> str:
    """Write a manifest that is not a list of files, sometimes with a matching hash of itself."""
    path = checkpoints / f"step-{NEW}" / "manifest.json"
    content = json.loads(path.read_text())
    files = content["files"]
    name = draw.choice(list(files))
    record = files[name]
    ways: dict[str, Callable[[], Any]] = {
        "files as a list": lambda: content.update(files=[*files]),
        "no files": lambda: content.pop("files"),
        "pieces of no bytes": lambda: content.update(piece_bytes=0),
        "pieces of true bytes": lambda: content.update(piece_bytes=True),
        "pieces of 1.5 bytes": lambda: content.update(piece_bytes=1.5),
        "format 2.0 as a text": lambda: content.update(format="2"),
        "format -1": lambda: content.update(format=-1),
        "a record as a list": lambda: files.update({name: [1]}),
        "no hashes": lambda: record.update(xxh3_128=[]),
        "hashes as numbers": lambda: record.update(xxh3_128=[1]),
        "an unknown hash": lambda: record.update(crc=record.pop("xxh3_128")),
        "a negative size": lambda: record.update(bytes=-1),
        "a size as a text": lambda: record.update(bytes=str(record["bytes"])),
        "another size": lambda: record.update(bytes=record["bytes"] + 1),
        "a file elsewhere": lambda: files.update({"../../step-1/state.json": files.pop(name)}),
        "a file with NUL": lambda: files.update({"a\0b": files.pop(name)}),
        "a file of 5000 letters": lambda: files.update({"a" * 5000: files.pop(name)}),
    }
    raw = {
        "nested deep": "[" * _DEEP + "]" * _DEEP,
        "objects nested deep": '{"a":' * _DEEP + "1" + "}" * _DEEP,
        "nothing": "",
        "null": "null",
        "a key twice": path.read_text().replace('"format"', '"format": 2, "format"', 1),
        "no UTF-8": "\udcff\udcfe",
        "zeros": "\0" * 200,
    }
    way = draw.choice([*ways, *raw])
    if way in raw:
        path.write_text(raw[way], errors="surrogateescape")
        return f"manifest: {way}"
    ways[way]()
    content.pop("sha256", None)
    digest = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
    path.write_text(json.dumps({**content, "sha256": digest}))
    return f"manifest: {way}"


def _state(draw: random.Random, checkpoints: Path) -> str:
    """Write an invalid state, with matching hashes."""
    path = checkpoints / f"step-{NEW}" / "state.json"
    content = json.loads(path.read_text())
    ways: dict[str, Any] = {
        "no step": {k: v for k, v in content.items() if k != "step"},
        "a negative step": {**content, "step": -1},
        "step true": {**content, "step": True},
        "step 1.5": {**content, "step": 1.5},
        "samples as a text": {**content, "samples_seen": "8"},
        "no samples": {k: v for k, v in content.items() if k != "samples_seen"},
        "a list": [content],
        "nothing": None,
    }
    raw = {"nested deep": '{"a":' * _DEEP + "1" + "}" * _DEEP, "empty": "", "no JSON": "{'a': 1}"}
    raw["a key twice"] = path.read_text().replace("{", '{"step": 7,', 1)
    way = draw.choice([*ways, *raw])
    path.write_text(raw[way] if way in raw else json.dumps(ways[way]))
    _rehash(checkpoints)
    return f"state: {way}"


def _pointer(draw: random.Random, checkpoints: Path) -> str:
    path = checkpoints / draw.choice(("latest", "best"))
    path.unlink(missing_ok=True)
    texts = (b"", b"\0\0", b"step-9", b"../..", b"/", b"step-1\nstep-2", b"\xff\xfe", b"a" * 5000)
    kind = draw.choice(("folder", "pipe", "loop", "/dev/zero", *texts))
    if isinstance(kind, bytes):
        path.write_bytes(kind)
    elif kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to(path.name if kind == "loop" else kind)
    return f"{path.name}: {kind!r}"[:60]


def _junk(draw: random.Random, checkpoints: Path) -> str:
    """Add folders that look like newer checkpoints but are none, and damage the newest, too."""
    number = draw.choice((1, 30, 300))
    for step in range(10, 10 + number):
        folder = checkpoints / f"step-{step}"
        folder.mkdir()
        text = draw.choice(("", "{}", "[]", "null", '{"format": 2}'))
        (folder / "manifest.json").write_text(text)
    return f"{number} that are none, and {_cut(draw, checkpoints)}"


KINDS: dict[str, _Damage] = {
    "bits": _flipped,
    "cut": _cut,
    "longer": _longer,
    "page": _lost_page,
    "gone": _gone,
    "swapped": _swapped,
    "older": _of_the_other,
    "in place": _in_place_of,
    "system open": _cut,  # see `_failing`
    "system read": _cut,
    "header": _header,
    "manifest": _manifest,
    "state": _state,
    "pointer": _pointer,
    "junk": _junk,
}


def damage_all(number: int, seed: int, say: Callable[[str], None] = print) -> dict[str, Any]:
    """Make a number of damages; return their summary."""
    counts: Counter[str] = Counter()
    failed: list[dict[str, Any]] = []
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="bigtrain-damages-") as name:
        scratch = Path(name)
        runs = DamagedRuns(written_run(scratch / "written"), scratch)
        for n in range(number):
            outcome = runs.one(n, seed)
            counts[outcome["kind"]] += 1
            if outcome["problem"] is not None:
                failed.append(outcome)
                say(f"{n} {outcome['kind']}: {outcome['what']}: {outcome['problem']}")
    by_kind = {
        kind: {"damages": counts[kind], "failed": sum(f["kind"] == kind for f in failed)}
        for kind in KINDS
    }
    return {
        "seed": seed,
        "damages": number,
        "failed": len(failed),
        "seconds": round(time.monotonic() - began, 1),
        "by_kind": by_kind,
        "failures": failed,
    }
