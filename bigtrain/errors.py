"""The errors that bigtrain raises on purpose, and the exit status of each.

A message has three parts: the key or argument at fault, the value that was given and the value
that is needed, and the fix as text to paste.
"""

from __future__ import annotations

import difflib
import os
import shlex
from collections.abc import Iterable


class BigtrainError(Exception):
    """The base class of bigtrain's errors, whose messages explain the failure and its fix."""

    exit_status = 1
    """The exit status of a process that ends with this error."""


class ConfigError(BigtrainError, ValueError):
    """The user's input is at fault.

    Raised before any process group exists, if the fault can be seen then. A model, a loss or a loop
    that does something else in a later step raises it in that step.
    """

    exit_status = 2


class UnfitModelError(ConfigError):
    """The layers of a model do not fit the job's `model.lora`."""


class UnreadableError(ConfigError):
    """A file, folder or environment variable cannot be used.

    Args:
        source: the path of the file or folder, or the name of the variable; with the line of the
            file if it is known.
        reason: why it cannot be used, without a full stop.
        fix: the remedy, as a sentence.
        missing: whether the source does not exist.
        system: whether the operating system refused to read it; otherwise its content is wrong.
        said: the whole message; if None, it is made of `source`, `reason` and `fix`.
    """

    def __init__(
        self,
        source: object,
        reason: str,
        fix: str = "",
        *,
        missing: bool = False,
        system: bool = False,
        said: str | None = None,
    ) -> None:
        shown = os.fspath(source) if isinstance(source, os.PathLike) else str(source)
        text = said or f"{plain_text(shown)} cannot be read: {reason}. {fix}".rstrip()
        super().__init__(text)
        self.reason = reason
        self.missing = missing
        self.system = system


def plain_text(text: object, most: int = 300) -> str:
    """Return a text as one printable line: control characters and lone surrogates are escaped.

    Args:
        text: any object.
        most: the largest number of characters.
    """
    line = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in str(text))
    return line if len(line) <= most else f"{line[: most - 3]}..."


class LaunchError(BigtrainError):
    """The ranks could not find each other, or one of them was lost."""


class NonFiniteError(BigtrainError):
    """A loss or gradient norm is not finite; raised before the optimizer's step if possible.

    Args:
        message: names the loss or the gradient norm, and its value.
        stepped: whether the parameters have been updated already.
    """

    def __init__(self, message: str, *, stepped: bool = False) -> None:
        super().__init__(message)
        self.stepped = stepped

    def in_step(self, step: int) -> NonFiniteError:
        """Return the same error with the number of the step, from 1, and the fix."""
        if self.stepped:
            fix = (
                "with optim.release_gradients=true the parameters were updated already. Resume "
                "from the last checkpoint with optim.release_gradients=false."
            )
        else:
            fix = (
                "the optimizer was not stepped. Lower optim.lr, set optim.clip_norm, or look at "
                "the data of this step."
            )
        return NonFiniteError(f"step {step}: {self}; {fix}", stepped=self.stepped)


class OutOfMemoryError(BigtrainError):
    """A rank ran out of memory; the message lists the largest parts, and overrides that would fit.

    Args:
        message: the message for the user.
        micro_batch_size: half of the size that ran, if a smaller size may help; None otherwise.
        printed: the beginning of the message, if it was printed already.
    """

    def __init__(
        self, message: str, *, micro_batch_size: int | None = None, printed: str = ""
    ) -> None:
        super().__init__(message)
        self.micro_batch_size, self.printed = micro_batch_size, printed


class CheckpointError(BigtrainError):
    """A checkpoint is missing, damaged, cannot be written, or does not belong to this model."""


class ForeignFileError(CheckpointError):
    """A file of weights that the user named does not have the expected format."""

    exit_status = 2


class UnfitCheckpointError(CheckpointError):
    """A checkpoint that the user named is intact, but of another model, optimizer or run."""

    exit_status = 2


class UnequalRanksError(BigtrainError):
    """Ranks that should hold equal copies of a tensor hold different values."""


class DamagedCheckpointError(CheckpointError):
    """A file of a checkpoint is missing, unreadable, or not as it was written.

    Args:
        damage: the file and its damage, as a sentence.
    """

    def __init__(self, damage: str) -> None:
        super().__init__(f"{damage} Resume from an older step (checkpoint.resume=PATH).")
        self.damage = damage


class LostRankError(CheckpointError):
    """A checkpoint was not written because a rank was lost during the save. The run continues."""


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return ", did you mean 'x'?" for the closest of `known`, or "." if none is close."""
    match = difflib.get_close_matches(str(word), list(known), n=1, cutoff=0.6)
    return f", did you mean {match[0]!r}?" if match else "."


def as_word(key: str, value: object) -> str:
    """Return `KEY=VALUE` for pasting into a shell, in quotes if the shell would change it.

    Args:
        key: a key of a job.
        value: the value of the key. It is written as YAML: null for None, true or false, lists
            without spaces. A string is written without YAML's quotes.
    """
    return shlex.quote(unquoted_word(key, value))


def unquoted_word(key: str, value: object) -> str:
    """Return `KEY=VALUE` without quotes; see `as_word`."""
    return f"{key}={_yaml_word(value)}"


def _yaml_word(value: object) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list | tuple):
        return f"[{','.join(map(_yaml_word, value))}]"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{key}: {_yaml_word(each)}' for key, each in value.items())}}}"
    return str(value)
