"""Restart all ranks after a failure, from the newest checkpoint or from step 0.

A rank that runs out of memory leaves the other ranks in an exchange that cannot be completed. So
all ranks execute their program again in the same processes. No launcher notices this, and the
results are those of a run that was started with the new overrides. If a rank has died, the process
that started the ranks starts all of them again. The new overrides are passed in the environment.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import re
import shlex
import sys
import time
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from bigtrain.errors import BigtrainError, UnreadableError
from bigtrain.files.environment import count_in, json_in, odd_value
from bigtrain.files.parse import parse_json, read_json_object
from bigtrain.files.regular import is_regular, open_regular, read_pointer
from bigtrain.ranks.launcher_env import LAUNCH_VARIABLE

RESTART_STATUS = 76
"""The status with which a rank requests a restart of all ranks. No process exits with it."""
RESTART_VARIABLE = "BIGTRAIN_RESTART"
METRICS = "metrics.jsonl"
"""The file of a run with one JSON object for each step."""
_RESUME = "checkpoint.resume=auto"
_NOTE = "note.json"
_TAIL_BYTES = 16384
_HUB_GRACE_S = 0.5
"""Seconds that rank 0 waits before it restarts, so that its hub first informs the other ranks."""


@dataclass(frozen=True)
class Restart:
    """The overrides with which all ranks restart, and the reason."""

    words: tuple[str, ...]
    """Overrides of the job, KEY=VALUE."""
    said: str
    """The reason in one line, for the log; empty if it was printed already."""

    @classmethod
    def taken(cls, environ: MutableMapping[str, str]) -> Restart | None:
        """Return the overrides that this process was restarted with; None without a restart.

        The overrides are removed from the environment. For a rank that torchrun has started again,
        they are those that resume the run.

        Args:
            environ: the environment of this process, which is changed.

        Raises:
            ConfigError: the content of the variable is not a `Restart`.
        """
        values = json_in(environ, RESTART_VARIABLE)
        if values is None:
            count = count_in(environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
            return cls((_RESUME,), "") if count else None
        words, said = values.get("words"), values.get("said")
        if not (_are_words(words) and isinstance(said, str)):
            raise odd_value(environ, RESTART_VARIABLE, "what a run leaves for its restart")
        del environ[RESTART_VARIABLE]
        return cls(tuple(words or ()), said)

    def text(self) -> str:
        """Return the restart as one line of JSON."""
        return json.dumps(asdict(self))


def continuation_words(folder: Path, begun_at: str | None) -> list[str]:
    """Return the overrides with which a run continues in its folder, from its newest checkpoint.

    A run that began with another run's checkpoint, and has no checkpoint of its own, begins with
    that checkpoint again. The run's files of metrics are then removed, because their steps will be
    done again.

    Args:
        folder: the folder of the run.
        begun_at: the run's `checkpoint.resume`.
    """
    words = [f"log.dir={json.dumps(str(folder.parent))}", f"log.name={json.dumps(folder.name)}"]
    if begun_at not in (None, "auto") and not is_regular(folder / "checkpoints" / "latest"):
        for name in (METRICS, "validation.jsonl"):
            (folder / name).unlink(missing_ok=True)
        return words
    return [*words, _RESUME]


def _are_words(words: object) -> bool:
    return isinstance(words, list) and all(isinstance(word, str) for word in words)


@dataclass(frozen=True, kw_only=True)
class RunNote:
    """A note of a run for the process that started its ranks, and that may start them again."""

    folder: str
    """The absolute path of the run's folder."""
    begun_at: str | None
    """The run's `checkpoint.resume`."""
    words: tuple[str, ...]
    """The overrides of earlier restarts."""
    global_size: int
    """Samples of an optimizer step, over all ranks."""
    micro_size: int
    """Samples of a micro-batch in the plan of the run."""
    model_ranks: int
    """The number of ranks that hold one copy of the model; 0 if the planner chooses it."""
    timeout: float
    """Seconds that an exchange may take."""
    spare: tuple[int, ...] = ()
    """The ranks that the run may lose."""

    def leave(self, environ: Mapping[str, str]) -> None:
        """Write the note to the folder of the launch; no effect under other launchers."""
        if LAUNCH_VARIABLE in environ:
            path = Path(environ[LAUNCH_VARIABLE]).parent / _NOTE
            draft = path.with_suffix(".draft")
            with contextlib.suppress(OSError):
                draft.write_text(json.dumps(asdict(self)), "utf-8")
                draft.replace(path)

    @classmethod
    def find(cls, launch: Path) -> RunNote | None:
        """Return the note in a launch's folder; None if there is none."""
        try:
            values = read_json_object(launch / _NOTE)
            lists = {key: tuple(values.get(key, ())) for key in ("words", "spare")}
            return cls(**{**values, **lists})
        except (UnreadableError, TypeError):
            return None

    def restart_words(self, last_words: Sequence[str]) -> list[str]:
        """Return the overrides with which the run continues.

        Args:
            last_words: the overrides of the last start, which may have ended before its note.
        """
        words = [word for word in (*self.words, *last_words) if word != _RESUME]
        return list(dict.fromkeys([*words, *continuation_words(Path(self.folder), self.begun_at)]))

    def words_on(self, num_ranks: int) -> list[str] | None:
        """Return the overrides with the same global batch on another number of ranks.

        The result is empty if the planner chooses the plan. It is None if the ranks of one model do
        not divide the number of ranks, or the replicas do not divide the global batch.
        """
        if not self.model_ranks:
            return []
        replicas, rest = divmod(num_ranks, self.model_ranks)
        if rest or not replicas or self.global_size % replicas:
            return None
        share = self.global_size // replicas
        rows = next(n for n in range(min(self.micro_size, share), 0, -1) if share % n == 0)
        return [
            "mesh.dp=-1",
            f"train.global_batch_size={self.global_size}",
            f"train.micro_batch_size={rows}",
            "train.accumulation_steps=null",
        ]

    def saved_step(self) -> int:
        """Return the step of the run's newest checkpoint; 0 if it has none."""
        return saved_step(Path(self.folder))

    def last_step(self) -> int:
        """Return the last step that the run has done; 0 if there is none."""
        return last_step(Path(self.folder))


def saved_step(folder: Path) -> int:
    """Return the step of a run's newest checkpoint; 0 if it has none."""
    name = read_pointer(folder / "checkpoints" / "latest")
    return count_in(name.rpartition("-")[2], most=1 << 62) or 0


def last_step(folder: Path) -> int:
    """Return the last step that a run has done; 0 if there is none."""
    try:
        with open_regular(folder / METRICS) as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
            lines = file.read().splitlines()
    except (OSError, UnreadableError):
        return 0
    for line in reversed(lines):
        # The last line may be incomplete.
        with contextlib.suppress(UnreadableError, KeyError, TypeError, ValueError):
            return int(parse_json(line, METRICS)["step"])
    return 0


def resume_words(folder: Path) -> str:
    """Return the words that continue a run from its newest checkpoint, to add to its command."""
    words = [f"log.dir={folder.parent}", f"log.name={folder.name}"]
    return shlex.join(["--resume", "auto", *words])


def left_behind(folder: Path | None) -> str:
    """Return one line about which steps of a stopped run are saved, and how to continue it.

    Args:
        folder: the folder of the run; None if it was stopped before it had one.
    """
    done, saved = (0, 0) if folder is None else (last_step(folder), saved_step(folder))
    if folder is not None and saved:
        lost = f"; steps {saved + 1} to {done} are lost" if done > saved else ""
        return (
            f"nothing more was saved: the newest checkpoint is of step {saved}{lost}. Continue "
            f"with the same command and: {resume_words(folder)}"
        )
    if not done:
        return "stopped before the first step was done: nothing was saved, and nothing is lost"
    return (
        f"nothing was saved: the {done} steps that were done are lost. Use checkpoint.every=N to "
        "save every N steps"
    )


def note_spare_ranks(environ: Mapping[str, str], spare: Sequence[int]) -> None:
    """Add the spare ranks to the note for the process that started the ranks."""
    if LAUNCH_VARIABLE in environ:
        note = RunNote.find(Path(environ[LAUNCH_VARIABLE]).parent)
        if note is not None:
            replace(note, spare=tuple(spare)).leave(environ)


class RestartRequest(BigtrainError):
    """Raised to restart all ranks; `run_guarded` restarts this one.

    Args:
        words: overrides of the job, KEY=VALUE.
        said: the reason, one line.
    """

    exit_status = RESTART_STATUS

    def __init__(self, words: Sequence[str], said: str) -> None:
        super().__init__(said)
        self.restart = Restart(tuple(words), said)


def restart_process(text: str, *, has_hub: bool = False) -> None:
    """Execute this process's program again. The function does not return.

    Args:
        text: the result of `Restart.text`.
        has_hub: whether this process has the hub, which must first inform the other ranks.
    """
    if has_hub:
        time.sleep(_HUB_GRACE_S)
    os.environ[RESTART_VARIABLE] = text
    for child in multiprocessing.active_children():
        child.kill()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    with contextlib.suppress(ImportError, OSError, ValueError):
        import resource

        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        resource.setrlimit(resource.RLIMIT_DATA, (hard, hard))
    _close_at_exec()
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def _close_at_exec() -> None:
    """Let the kernel close libraries' files at exec: that frees the memory of a GPU.

    The three standard streams stay open, and so do files that the environment or the command line
    names, such as MPICH's `PMI_FD=7` or `/dev/fd/63`.
    """
    named = {value for name, value in os.environ.items() if name.endswith("_FD")}
    named.update(re.findall(r"/fd/(\d+)", " ".join(sys.orig_argv)))
    with contextlib.suppress(OSError):  # some machines do not have the folder
        for number in set(os.listdir("/dev/fd")) - {"0", "1", "2"} - named:
            with contextlib.suppress(OSError):  # the descriptor of the listing is closed
                os.set_inheritable(int(number), False)
