"""Going on after a fault: every rank begins anew, from the newest checkpoint or the beginning.

A rank that is out of memory has left the others in the middle of an exchange that cannot be
mended. So all of them start their program again, under the same process numbers: no launcher
notices, and the numbers that follow are those of a run that had been started so. Where a rank has
died, who started the ranks starts all of them again. What is to be different goes through the
environment.
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
"""With this status a rank asks all ranks to begin anew; no process ends with it."""
RESTART_VARIABLE = "BIGTRAIN_RESTART"
METRICS = "metrics.jsonl"
"""The file of a run's steps, one object each."""
_GO_ON = "checkpoint.resume=auto"
_NOTE = "note.json"
_TAIL_BYTES = 16384
# Rank 0 relays the news: it begins anew when all have them.
_RELAY_S = 0.5


@dataclass(frozen=True)
class Restart:
    """What is different from now on."""

    words: tuple[str, ...]
    """Keys of the job, as on the command line."""
    said: str
    """One line on why, for the log; empty where it has been said."""

    @classmethod
    def taken(cls, environ: MutableMapping[str, str]) -> Restart | None:
        """What an earlier life of this process left, which is thereby taken.

        A rank that torchrun has started again goes on, too.

        Raises:
            ConfigError: the variable holds something else.
        """
        values = json_in(environ, RESTART_VARIABLE)
        if values is None:
            count = count_in(environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
            return cls((_GO_ON,), "") if count else None
        words, said = values.get("words"), values.get("said")
        if not (_are_words(words) and isinstance(said, str)):
            raise odd_value(environ, RESTART_VARIABLE, "what a run leaves for its next life")
        del environ[RESTART_VARIABLE]
        return cls(tuple(words or ()), said)

    def text(self) -> str:
        """One line of JSON."""
        return json.dumps(asdict(self))


def words_to_go_on(folder: Path, begun_at: str | None) -> list[str]:
    """The words by which a run finds its folder again, and its newest checkpoint.

    Where it began at another run's checkpoint and has none of its own yet, it begins there again.

    Args:
        folder: of the run.
        begun_at: `checkpoint.resume` of the run.
    """
    words = [f"log.dir={json.dumps(str(folder.parent))}", f"log.name={json.dumps(folder.name)}"]
    if begun_at not in (None, "auto") and not is_regular(folder / "checkpoints" / "latest"):
        for name in (METRICS, "validation.jsonl"):  # these steps will be done again
            (folder / name).unlink(missing_ok=True)
        return words
    return [*words, _GO_ON]


def _are_words(words: object) -> bool:
    return isinstance(words, list) and all(isinstance(word, str) for word in words)


@dataclass(frozen=True, kw_only=True)
class RunNote:
    """What a run leaves for the one who started its ranks, so that he can start them again."""

    folder: str
    """Of the run; absolute."""
    begun_at: str | None
    """`checkpoint.resume`."""
    words: tuple[str, ...]
    """What was changed already."""
    global_size: int
    """Samples of a step."""
    micro_size: int
    """Samples of a micro-batch; 0 where the planner chooses it."""
    model_ranks: int
    """Ranks that hold one model together; 0 where the planner chooses it."""
    timeout: float
    """Seconds that an exchange may take."""
    spare: tuple[int, ...] = ()
    """The ranks without which the others go on."""

    def leave(self, environ: Mapping[str, str]) -> None:
        """Write it where the one who started the ranks looks; nothing under other launchers."""
        if LAUNCH_VARIABLE in environ:
            path = Path(environ[LAUNCH_VARIABLE]).parent / _NOTE
            draft = path.with_suffix(".draft")
            with contextlib.suppress(OSError):
                draft.write_text(json.dumps(asdict(self)), "utf-8")
                draft.replace(path)

    @classmethod
    def find(cls, launch: Path) -> RunNote | None:
        """The note in a launch's folder."""
        try:
            values = read_json_object(launch / _NOTE)
            lists = {key: tuple(values.get(key, ())) for key in ("words", "spare")}
            return cls(**{**values, **lists})
        except (UnreadableError, TypeError):
            return None

    def restart_words(self, given: Sequence[str]) -> list[str]:
        """The words with which the run goes on.

        Args:
            given: those of its last life, which may have ended before it could leave a note.
        """
        kept = [word for word in (*self.words, *given) if word != _GO_ON]
        return list(dict.fromkeys([*kept, *words_to_go_on(Path(self.folder), self.begun_at)]))

    def words_on(self, num_ranks: int) -> list[str] | None:
        """The words with which it goes on with the same global batch on another number of ranks.

        None where that does not divide.
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
        """The step of the checkpoint that it goes on from; 0 for the beginning."""
        return saved_step(Path(self.folder))

    def last_step(self) -> int:
        """The last step that was done; 0 where there is none."""
        return last_step(Path(self.folder))


def saved_step(folder: Path) -> int:
    """The step of a run's newest checkpoint; 0 where it has none."""
    name = read_pointer(folder / "checkpoints" / "latest")
    return count_in(name.rpartition("-")[2], most=1 << 62) or 0


def last_step(folder: Path) -> int:
    """The last step that a run has done; 0 where there is none."""
    try:
        with open_regular(folder / METRICS) as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
            lines = file.read().splitlines()
    except (OSError, UnreadableError):
        return 0
    for line in reversed(lines):
        with contextlib.suppress(UnreadableError, KeyError, TypeError, ValueError):  # a torn one
            return int(parse_json(line, METRICS)["step"])
    return 0


def resume_words(folder: Path) -> str:
    """What is added to the same command, so that the run goes on from its newest checkpoint."""
    words = [f"log.dir={folder.parent}", f"log.name={folder.name}"]
    return shlex.join(["--resume", "auto", *words])


def left_behind(folder: Path | None) -> str:
    """What a run that was stopped without saving has left, and how it goes on; one line.

    Args:
        folder: of the run; None where it did not come so far as to have one.
    """
    done, saved = (0, 0) if folder is None else (last_step(folder), saved_step(folder))
    if folder is not None and saved:
        lost = f"; steps {saved + 1} to {done} are lost" if done > saved else ""
        return (
            f"nothing more was saved: the newest checkpoint is of step {saved}{lost}. Go on with "
            f"the same command and: {resume_words(folder)}"
        )
    if not done:
        return "stopped before the first step was done: nothing was saved, and nothing is lost"
    return (
        f"nothing was saved: the {done} steps that were done are lost. checkpoint.every=N saves "
        "every N steps"
    )


def note_spare_ranks(environ: Mapping[str, str], spare: Sequence[int]) -> None:
    """Tell the one who started the ranks without which of them the others go on."""
    if LAUNCH_VARIABLE in environ:
        note = RunNote.find(Path(environ[LAUNCH_VARIABLE]).parent)
        if note is not None:
            replace(note, spare=tuple(spare)).leave(environ)


class RestartRequest(BigtrainError):
    """Raised where all ranks are to begin anew; `run_guarded` does it."""

    exit_status = RESTART_STATUS

    def __init__(self, words: Sequence[str], said: str) -> None:
        super().__init__(said)
        self.restart = Restart(tuple(words), said)


def restart_process(text: str, *, relays: bool = False) -> None:
    """Start this process's program again; does not return.

    Args:
        text: of the `Restart`.
        relays: wait until the other ranks have heard of it.
    """
    if relays:
        time.sleep(_RELAY_S)
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
    """Let the kernel close what libraries have open: a GPU's memory is free when its files are.

    Left open: the three streams, and what the surroundings name, as MPICH's `PMI_FD=7` or a
    `/dev/fd/63` among the words.
    """
    named = {value for name, value in os.environ.items() if name.endswith("_FD")}
    named.update(re.findall(r"/fd/(\d+)", " ".join(sys.orig_argv)))
    with contextlib.suppress(OSError):  # a machine without the folder
        for number in set(os.listdir("/dev/fd")) - {"0", "1", "2"} - named:
            with contextlib.suppress(OSError):  # of the listing itself
                os.set_inheritable(int(number), False)
