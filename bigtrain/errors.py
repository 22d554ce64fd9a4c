"""The errors that bigtrain raises on purpose, and the exit status of each.

Every message says three things: what failed (with the key or argument), what was got and
needed (with the numbers), and the fix, as words to paste.
"""

from __future__ import annotations

import difflib
import os
import shlex
from collections.abc import Iterable


class BigtrainError(Exception):
    """A failure that bigtrain explains; `exit_status` is what the command line returns."""

    exit_status = 1


class ConfigError(BigtrainError, ValueError):
    """The user's input is at fault; raised before any process group exists."""

    exit_status = 2


class UnreadableError(ConfigError):
    """A file, folder or variable that others have written cannot be used.

    Args:
        place: its path, with a line where that is known, or its name.
        reason: what is wrong with it, without a full stop.
        fix: what helps, as a sentence.
        missing: whether it is not there at all.
        system: whether the system does not give it, and not what is in it is wrong.
        said: the whole message, where that is another one.
    """

    def __init__(
        self,
        place: object,
        reason: str,
        fix: str = "",
        *,
        missing: bool = False,
        system: bool = False,
        said: str | None = None,
    ) -> None:
        shown = os.fspath(place) if isinstance(place, os.PathLike) else str(place)
        text = said or f"{plain_text(shown)} cannot be read: {reason}. {fix}".rstrip()
        super().__init__(text)
        self.reason = reason
        self.missing = missing
        self.system = system


def plain_text(text: object, most: int = 300) -> str:
    """A text in one line, as it can be shown anywhere: no control character, no half of one."""
    found = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in str(text))
    return found if len(found) <= most else f"{found[: most - 3]}..."


class LaunchError(BigtrainError):
    """The ranks could not find each other, or one of them was lost."""


class NonFiniteError(BigtrainError):
    """A loss or gradient norm is not finite; raised before the optimizer step, where it can be.

    Args:
        message: what is not finite.
        stepped: whether the parameters are updated already.
    """

    def __init__(self, message: str, *, stepped: bool = False) -> None:
        super().__init__(message)
        self.stepped = stepped

    def in_step(self, step: int) -> NonFiniteError:
        """The same with the step's number, from 1, and what helps."""
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
    """A rank got no more memory; the message says what it held, and what would fit.

    Args:
        message: for the user.
        micro_batch_size: half of what ran, where less at a time may help; None otherwise.
        told: the beginning of the message that was printed already.
    """

    def __init__(
        self, message: str, *, micro_batch_size: int | None = None, told: str = ""
    ) -> None:
        super().__init__(message)
        self.micro_batch_size, self.told = micro_batch_size, told


class CheckpointError(BigtrainError):
    """A checkpoint is missing, damaged, cannot be written, or does not belong to this model."""


class ForeignFileError(CheckpointError):
    """A file of weights that was named on the command line is not of its format."""

    exit_status = 2


class UnfitCheckpointError(CheckpointError):
    """A checkpoint that the user named is whole, and of another model, optimizer or run."""

    exit_status = 2


class UnequalRanksError(BigtrainError):
    """Ranks that hold the same tensor have other values in it: from some step on they drifted."""


class DamagedCheckpointError(CheckpointError):
    """A file of a checkpoint is not what was written.

    Args:
        damage: which file, and how it is damaged, as a sentence.
    """

    def __init__(self, damage: str) -> None:
        super().__init__(f"{damage} Resume from an older step (checkpoint.resume=PATH).")
        self.damage = damage


class LostRankError(CheckpointError):
    """A checkpoint was not written because a rank was lost meanwhile that the others do without."""


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return ", did you mean 'x'?" for the closest of `known`, or "." where none is close."""
    match = difflib.get_close_matches(str(word), list(known), n=1, cutoff=0.6)
    return f", did you mean {match[0]!r}?" if match else "."


def as_word(key: str, value: object) -> str:
    """`KEY=VALUE` as it is pasted behind a command: in quotes where a shell would take it apart.

    Args:
        key: of a job.
        value: as YAML holds it: null for None, lists without spaces.
    """
    return shlex.quote(unquoted_word(key, value))


def unquoted_word(key: str, value: object) -> str:
    """`KEY=VALUE` as it is told, and as YAML holds the value; see `as_word`."""
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
