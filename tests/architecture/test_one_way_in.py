"""Files from outside are read only through `bigtrain.files`; any other reader fails a test."""

from __future__ import annotations

import ast

import pytest
from support.rooms import sources, tree

PARSERS = {
    *("json.load", "json.loads", "yaml.load", "yaml.safe_load", "yaml.compose", "yaml.load_all"),
    *("yaml.safe_load_all", "yaml.full_load", "yaml.unsafe_load", "pickle.load", "pickle.loads"),
    *("torch.load", "Image.open", "safe_open", "load_file", "np.load", "np.fromfile", "np.loadtxt"),
    *("gzip.open", "tarfile.open", "zipfile.ZipFile", "open", "os.open", "io.open", "os.fdopen"),
    *("configparser.ConfigParser", "csv.reader", "tomllib.load", "tomllib.loads"),
}
READERS = {"read_text", "read_bytes"}
ALLOWED = {
    ("checkpoint.command", "os.open"): "the null device",
    ("checkpoint.folders", "os.open"): "the lock that is made, and a folder that is synced",
    ("checkpoint.foreign.torch_files", "torch.load"): "a window of an opened file, data alone",
    ("checkpoint.write", "os.open"): "the files that are written",
    ("data.image_files", "Image.open"): "an opened file: everyone else goes through opened_image",
    ("machine.busy", "read_text"): "the kernel's",
    ("machine.rates", "read_text"): "the kernel's",
    ("memory.disk", "read_text"): "the kernel's",
    ("memory.host_memory", "read_text"): "the kernel's",
    ("compare.subprocess_runs", "read_bytes"): "the kernel's",
    ("ranks.launch", "read_text"): "the kernel's",
    ("ranks.launcher_env", "read_text"): "the kernel's",
    ("hvd.elastic.commits", "torch.load"): "an opened file that is what was written, data alone",
    ("hvd.gathers", "pickle.loads"): "messages between the ranks of one run",
    ("ranks.agreement", "json.loads"): "the same",
    ("recorder.exchanges", "pickle.loads"): "messages between the ranks of one run",
    ("recorder.root_exchange", "pickle.loads"): "the same",
    ("ranks.failure_hub", "json.loads"): "messages between the ranks of one run",
    ("ranks.shared_buffers", "os.open"): "memory of the first rank of a group, not a file",
    ("ranks.rendezvous", "os.open"): "the port that rank 0 writes for its own ranks",
    ("ranks.rendezvous", "read_text"): "the same",
}
"""Permitted readers and the reason: no file from outside, or one opened by bigtrain.files."""


def direct_reads(node: ast.AST) -> list[str]:
    """The calls in a tree that read or parse a file directly."""
    calls = []
    for call in ast.walk(node):
        if not isinstance(call, ast.Call):
            continue
        name = ast.unparse(call.func)
        if name in PARSERS and not _writes(call, 1):
            calls.append(name)
        elif isinstance(call.func, ast.Attribute) and call.func.attr in READERS:
            calls.append(call.func.attr)
        elif name not in PARSERS and name.endswith(".open") and _opens_path(call):
            calls += [] if _writes(call, 0) else [".open"]
    return calls


def _opens_path(call: ast.Call) -> bool:
    """`path.open()` and `path.open("rb")`; other methods named `open` take different arguments."""
    if not call.args:
        return not call.keywords or {k.arg for k in call.keywords} <= {"mode", "encoding", "errors"}
    return isinstance(call.args[0], ast.Constant) and isinstance(call.args[0].value, str)


def _writes(call: ast.Call, position: int) -> bool:
    modes = [
        *call.args[position : position + 1],
        *(k.value for k in call.keywords if k.arg == "mode"),
    ]
    return any(
        isinstance(mode, ast.Constant) and isinstance(mode.value, str) and {*mode.value} & {*"wax"}
        for mode in modes
    )


def test_nobody_reads_a_file_of_others_by_himself():
    readers = {
        (module, name)
        for module, path in sources().items()
        if module.partition(".")[0] not in ("files", "configs")
        for name in direct_reads(tree(path))
    }
    strangers = sorted(readers - set(ALLOWED))
    assert not strangers, f"read these files by a function of bigtrain.files: {strangers}"
    gone = sorted(set(ALLOWED) - readers)
    assert not gone, f"remove these entries, which nothing uses any more: {gone}"


@pytest.mark.parametrize(
    ("line", "names"),
    [
        ("json.loads(path.read_text('utf-8'))", ["json.loads", "read_text"]),
        ("with open(path) as file: pass", ["open"]),
        ("with path.open() as file: pass", [".open"]),
        ("with path.open('rb', buffering=0) as file: pass", [".open"]),
        ("Image.open(path)", ["Image.open"]),
        ("torch.load(path, weights_only=True)", ["torch.load"]),
        ("np.load(path)", ["np.load"]),
        ("open(path, 'w')", []),
        ("path.open('a')", []),
        ("Manifest.open(path)", []),
        ("source.open(seed=0, sequence_length=None)", []),
        ("parse_json(read_text(path), path)", []),
    ],
)
def test_what_is_found(line, names):
    assert sorted(direct_reads(ast.parse(line))) == sorted(names)
