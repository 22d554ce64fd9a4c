"""Distinguish the four kinds of files, and read each with its own module."""

from __future__ import annotations

from collections.abc import Callable

from bigtrain.errors import ConfigError, plain_text
from bigtrain.explain.config_file import KINDS_TEXT, ConfigFile, read_config_file
from bigtrain.explain.request import ToolRequest
from bigtrain.explain.tools import (
    accelerate_file,
    axolotl_file,
    axolotl_keys,
    deepspeed_file,
    trl_file,
)
from bigtrain.job.schema import Job

_READERS: dict[str, Callable[[ConfigFile], ToolRequest]] = {
    "Accelerate": accelerate_file.read_accelerate_file,
    "axolotl": axolotl_file.read_axolotl_file,
    "TRL": trl_file.read_trl_file,
    "DeepSpeed": deepspeed_file.read_deepspeed_file,
}
_MARKS = {
    "Accelerate": accelerate_file.ACCELERATE_MARKS,
    "axolotl": axolotl_keys.AXOLOTL_MARKS,
    "TRL": trl_file.TRL_MARKS,
    "DeepSpeed": deepspeed_file.DEEPSPEED_MARKS,
}
"""By tool, keys that only its files have."""
_KEYS = {
    "Accelerate": accelerate_file.ACCELERATE_KEYS.known,
    "axolotl": axolotl_keys.AXOLOTL_KEYS.known,
    "TRL": trl_file.TRL_KEYS.known,
    "DeepSpeed": deepspeed_file.DEEPSPEED_KEYS,
}
_LEAST_KNOWN = 2
"""The number of a tool's keys that identify its file, if the file has no key of `_MARKS`."""
_SHOWN = 5


def read_request(path: str) -> ToolRequest:
    """Read a file of any of the four kinds.

    Args:
        path: the path of the file.

    Raises:
        ConfigError: there is no such file, it is of another kind, or a value is impossible.
    """
    file = read_config_file(path)
    return _READERS[tool_of(file)](file)


def tool_of(file: ConfigFile) -> str:
    """Return the tool that a file is for.

    Raises:
        ConfigError: the file is of none of the four kinds.
    """
    for tool, marks in _MARKS.items():
        if any(mark in file.values for mark in marks):
            return tool
    own = [key for key in file.values if key in Job.model_fields]
    known = {tool: len(keys & file.values.keys()) for tool, keys in _KEYS.items()}
    tool = max(known, key=lambda each: known[each])
    if known[tool] >= min(_LEAST_KNOWN, len(file.values)) and known[tool] > len(own):
        return tool
    if own and len(own) == len(file.values):
        raise ConfigError(
            f"FILE: {file.path} is a job of bigtrain. Run: bigtrain train --config {file.path} "
            "--dry-run"
        )
    keys = ", ".join(plain_text(key, 40) for key in list(file.values)[:_SHOWN])
    signs = "; ".join(f"{tool}: {' or '.join(marks)}" for tool, marks in _MARKS.items())
    raise ConfigError(
        f"FILE: {file.path} is none of the files that are read (its keys: {keys}). Give "
        f"{KINDS_TEXT}; each is known by a key ({signs})."
    )
