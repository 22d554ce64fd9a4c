"""Checkpoints: plain tensor files under plain names, whole or not there at all.

    checkpoints/step-100/model.safetensors      the model's state under its own names
                         optimizer.safetensors  `NAME.KEY` for each slot of each parameter
                         state.json             step, position, random states, file hashes
    checkpoints/latest                          the name of the newest, written last

The file format is safetensors: a JSON header and raw bytes, so loading runs no code. Files are
written one tensor at a time (a checkpoint never needs a second copy of the state in memory),
under a temporary name, and renamed when everything is on disk.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
import struct
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bigtrain import devices
from bigtrain.errors import CheckpointError, ConfigError
from bigtrain.tensors.source import TensorSource

FORMAT = 1
STATE_PARTS = ("model", "optimizer")
_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


def write_checkpoint(
    folder: Path, step: int, tensors: Mapping[str, TensorSource], meta: Mapping[str, Any], keep: int
) -> Path:
    """Write one checkpoint, point `latest` at it, and remove the oldest beyond `keep`.

    Args:
        folder: the run's `checkpoints/`.
        step: optimizer steps done.
        tensors: `model.NAME` and `optimizer.NAME.KEY`, read in the order of `STATE_PARTS`.
        meta: what else belongs to the state, as JSON values.
        keep: how many of those written last stay, this one among them: after a resume from an
            older step that need not be those of the highest numbers.

    Returns:
        The checkpoint's folder.
    """
    folder.mkdir(parents=True, exist_ok=True)
    final = folder / f"step-{step}"
    draft = folder / f".step-{step}.{os.getpid()}"
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir()
    files = {}
    for part in STATE_PARTS:
        files[f"{part}.safetensors"] = write_tensors(
            draft / f"{part}.safetensors", _of_part(part, tensors)
        )
    state = {"format": FORMAT, "step": step, "torch": torch.__version__, **meta, "files": files}
    _write_text(draft / "state.json", json.dumps(state, indent=1))
    replaced = folder / f".replaced-{step}.{os.getpid()}"
    if final.exists():  # the same step again, after a resume; gone only when the new one is there
        final.rename(replaced)
    draft.rename(final)
    _write_text(folder / "latest", final.name)
    written = sorted(_numbered(folder), key=lambda p: (p == final, p.stat().st_mtime_ns))
    for old in written[:-keep]:
        shutil.rmtree(old)
    for pattern in (".step-*", ".replaced-*"):  # those of a process that was killed, too
        for left in folder.glob(pattern):
            shutil.rmtree(left, ignore_errors=True)
    return final


def join_tensor_reads(tensors: Mapping[str, TensorSource], device: torch.device) -> None:
    """Take part in what rank 0 reads while it writes, on a rank that does not.

    Never further than one tensor ahead: NCCL's watchdog counts from when an exchange is asked for,
    and would end the run where all are asked for at once and the writing takes long.
    """
    for part in STATE_PARTS:
        for source in _of_part(part, tensors).values():
            source.read()
            devices.synchronize(device)


def _of_part(part: str, tensors: Mapping[str, TensorSource]) -> dict[str, TensorSource]:
    prefix = f"{part}."
    return {n.removeprefix(prefix): t for n, t in tensors.items() if n.startswith(prefix)}


def write_tensors(path: Path, tensors: Mapping[str, TensorSource]) -> dict[str, Any]:
    """Write a safetensors file, one tensor at a time; return its size and hash."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, tensor in tensors.items():
        if tensor.dtype not in _DTYPES:
            raise CheckpointError(f"{name}: tensors of type {tensor.dtype} cannot be saved")
        size = tensor.nbytes
        header[name] = {
            "dtype": _DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offset, offset + size],
        }
        offset += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    digest = hashlib.sha256()
    with path.open("wb") as file:
        for piece in (struct.pack("<Q", len(text)), text):
            file.write(piece)
            digest.update(piece)
        for tensor in tensors.values():
            flat = tensor.read().detach().cpu().contiguous().reshape(-1)
            data = memoryview(flat.view(torch.uint8).numpy())  # type: ignore[arg-type]
            file.write(data)
            digest.update(data)
        file.flush()
        os.fsync(file.fileno())
    return {"bytes": path.stat().st_size, "sha256": digest.hexdigest()}


def _write_text(path: Path, text: str) -> None:
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    with draft.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    draft.replace(path)


def _numbered(folder: Path) -> list[Path]:
    """The checkpoints of a folder, oldest first."""
    checkpoints = [p for p in folder.glob("step-*") if p.name.removeprefix("step-").isdigit()]
    return sorted(checkpoints, key=lambda p: int(p.name.removeprefix("step-")))


def newest_checkpoint(folder: Path) -> Path | None:
    """The checkpoint that `latest` points at, or the highest number where that is missing."""
    pointer = folder / "latest"
    if pointer.is_file():
        target = folder / pointer.read_text(encoding="utf-8").strip()
        if (target / "state.json").is_file():
            return target
    complete = [p for p in _numbered(folder) if (p / "state.json").is_file()]
    return complete[-1] if complete else None


def find_checkpoint(path: str) -> Path:
    """A checkpoint from what a person would type: its folder, its run's, or the `checkpoints/`.

    Raises:
        ConfigError: there is none.
    """
    candidate = Path(path)
    if (candidate / "state.json").is_file():
        return candidate
    for folder in (candidate, candidate / "checkpoints"):
        newest = newest_checkpoint(folder) if folder.is_dir() else None
        if newest is not None:
            return newest
    raise ConfigError(
        f"checkpoint.resume: there is no checkpoint at {path!r}. "
        "Give a folder that holds state.json, a run's folder, or auto."
    )


class Checkpoint:
    """One checkpoint, opened for reading; tensors are read one at a time.

    Args:
        path: the folder `step-N`.
        verify: compare every file with the hash that was taken when it was written.

    Raises:
        CheckpointError: a file is missing or damaged, or the format is a newer one.
    """

    def __init__(self, path: Path, *, verify: bool = True) -> None:
        self.path = path
        try:
            self.meta: dict[str, Any] = json.loads((path / "state.json").read_text("utf-8"))
            files: dict[str, Any] = self.meta["files"]
            version = int(self.meta["format"])
        except (OSError, ValueError, KeyError) as error:
            raise CheckpointError(f"{path}/state.json is not readable: {error}") from None
        if version > FORMAT:
            raise CheckpointError(
                f"{path} has format {version}, this bigtrain reads up to {FORMAT}. "
                "Run: pip install --upgrade bigtrain"
            )
        if verify:
            for name, expected in files.items():
                _verify(path / name, expected)
        self._files = self._open(files)

    def _open(self, files: Iterable[str]) -> dict[str, tuple[Any, str]]:
        from safetensors import safe_open

        entries = {}
        for file in files:
            opened = safe_open(self.path / file, framework="pt")
            part = file.removesuffix(".safetensors")
            for name in opened.keys():  # type: ignore[no-untyped-call]  # noqa: SIM118
                entries[f"{part}.{name}"] = (opened, name)
        return entries

    @property
    def names(self) -> list[str]:
        """The tensors: `model.NAME` and `optimizer.NAME.KEY`."""
        return list(self._files)

    def read(self, name: str) -> Tensor:
        """One tensor, on the CPU."""
        opened, key = self._files[name]
        tensor: Tensor = opened.get_tensor(key)
        return tensor


def _verify(path: Path, expected: Mapping[str, Any]) -> None:
    advice = "Resume from an older step (checkpoint.resume=PATH)."
    if not path.is_file():
        raise CheckpointError(f"{path} is missing. {advice}")
    size = path.stat().st_size
    if size != expected["bytes"]:
        raise CheckpointError(
            f"{path} is damaged: it has {size} bytes, {expected['bytes']} were written. {advice}"
        )
    with path.open("rb") as file:
        digest = hashlib.sha256()
        while block := file.read(1 << 20):
            digest.update(block)
    if digest.hexdigest() != expected["sha256"]:
        raise CheckpointError(f"{path} is damaged: its contents changed on disk. {advice}")


def random_state() -> dict[str, Any]:
    """The process's random states as JSON values: Python's, numpy's where in use, torch's."""
    import numpy as np

    name, keys, *rest = np.random.get_state(legacy=True)
    version, internal, gauss = random.getstate()
    state: dict[str, Any] = {
        "python": [version, list(internal), gauss],
        "numpy": [str(name), np.asarray(keys).tolist(), *rest],
        "torch": torch.get_rng_state().numpy().tobytes().hex(),
    }
    if kind := devices.accelerator():
        own = devices.generator_states(kind)
        state[kind] = [one.numpy().tobytes().hex() for one in own]
    return state


def set_random_state(state: Mapping[str, Any]) -> None:
    """Put back what `random_state` took."""
    import numpy as np

    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    name, keys, *rest = state["numpy"]
    np.random.set_state((name, np.asarray(keys, dtype=np.uint32), *rest))
    torch.set_rng_state(_bytes_tensor(state["torch"]))
    if (kind := devices.accelerator()) and kind in state:
        # Fewer devices than then: the stages lie elsewhere, and draw anew.
        own = (
            [state[kind]] if isinstance(state[kind], str) else state[kind]
        )  # of one device alone: older
        for number, one in enumerate(own[: devices.device_count()]):
            devices.set_generator_state(_bytes_tensor(one), torch.device(kind, number))


def _bytes_tensor(text: str) -> Tensor:
    return torch.frombuffer(bytearray.fromhex(text), dtype=torch.uint8)


def check_optimizer_state(checkpoint: Checkpoint, optimizer: torch.optim.Optimizer) -> None:
    """Refuse a checkpoint of another kind of optimizer.

    Raises:
        CheckpointError: it keeps other state.
    """
    saved_keys = {
        name.rpartition(".")[2] for name in checkpoint.names if name.startswith("optimizer.")
    }
    keys_by_optimizer = {"AdamW": {"step", "exp_avg", "exp_avg_sq"}, "SGD": {"momentum_buffer"}}
    keys_by_optimizer["Adafactor"] = {"step", "row_var", "col_var", "variance"}
    expected = getattr(optimizer, "state_keys", keys_by_optimizer.get(type(optimizer).__name__))
    if expected is not None and not saved_keys <= expected:
        raise CheckpointError(
            f"the checkpoint's optimizer keeps {', '.join(sorted(saved_keys))}, this one keeps "
            f"{', '.join(sorted(expected))}. Use the optim.name it was saved with."
        )
