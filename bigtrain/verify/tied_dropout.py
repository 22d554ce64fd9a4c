"""Tie dropout masks to samples instead of ranks, so that they are the same on all meshes.

A mask is a function of five things: the seed, the step, the sample's index in the global batch, the
open calls of modules, and the number of the draw in the innermost call. A call is identified by the
module's name, and by its number among the calls of that name in the outer call. The current
position in the forward pass is stored as the seed of torch's default generator. Code that computes
a part again (activation checkpointing, a stage of a pipeline) restores this generator to its state
at the part's beginning, and so restores the position.

Source: Salmon et al. 2011, Parallel Random Numbers: As Easy as 1, 2, 3 (SC '11), for random numbers
that are a function of a key instead of a sequence.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from bigtrain.core.strategy import Plan
from bigtrain.data.loader import MicroBatch, Step
from bigtrain.data.sampler import split_global_batch
from bigtrain.files.parse import read_json_object
from bigtrain.ranks.context import RunContext

_FIRST_SEED = 2**60
"""Seeds from here on identify positions in forward passes. No other code uses such seeds."""
_UNIFORM = frozenset(("rand", "rand_like", "uniform_"))


@dataclass(frozen=True)
class _Position:
    """A position in the forward pass of a micro-batch."""

    step: int
    samples: tuple[int, ...]
    """The indices of the micro-batch's rows in the global batch; empty for padding."""
    calls: tuple[tuple[str, int], ...] = ()
    """The open calls of modules, the outermost first: the module's name, and the number of the call
    among those of this name in the outer call."""
    draws: int = 0
    """The number of draws so far in the innermost open call."""
    ended_calls: Mapping[str, int] = field(default_factory=dict)
    """The number of ended calls of each module within the innermost open call."""


class TiedDropout(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Draws the dropout masks of a model inside its `with` block.

    Args:
        model: the model, with the names of the user's model. Calls of its modules are counted until
            `close`, including calls that a stage of a pipeline skips.
        seed: the seed of the job.
        spine: the names of modules whose forward code every stage of a pipeline runs; empty
            without stages.
    """

    def __init__(self, model: nn.Module, seed: int, spine: Iterable[str] = ()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.untied: dict[str, str] = {}
        """The reasons why masks could not be tied to samples, by the name of the module."""
        self._seed, self._spine = seed, frozenset(spine)
        self._first_seed = _FIRST_SEED
        self._positions: list[_Position] = []
        self._micro_batches: dict[int, _Position] = {}
        self._placed: int | None = None
        self._entered = True
        self._thread = threading.get_ident()
        self._calls_before: list[tuple[nn.Module, Any]] = []
        for name, module in model.named_modules():
            # `nn.Module.compile` and pipeline stages also replace calls by this attribute.
            before = module._compiled_call_impl
            self._calls_before.append((module, before))
            module._compiled_call_impl = partial(self._call, name, before or module._call_impl)

    def close(self) -> None:
        """Restore the calls of the modules."""
        for module, before in self._calls_before:
            module._compiled_call_impl = before

    def begin_step(self, step: int, samples: Mapping[int, tuple[int, ...]]) -> None:
        """Begin a step.

        Args:
            step: the number of the step.
            samples: the result of `sample_places` for the step's batch.
        """
        self._first_seed += len(self._positions) + 1  # makes the seeds of earlier steps invalid
        self._positions.clear()
        self._micro_batches = {key: _Position(step, places) for key, places in samples.items()}
        self._placed, self._entered = None, True
        torch.default_generator.manual_seed(0)

    def begin_micro_batch(self, micro_batch: MicroBatch) -> None:
        """Begin the forward pass of a micro-batch.

        The masks of a micro-batch that does not belong to the step are not tied to samples.
        """
        if self._placed not in (None, id(micro_batch)) and not self._entered:
            self.untied[""] = "micro-batches are placed before earlier ones are computed"
        self._placed, self._entered = id(micro_batch), False
        position = self._micro_batches.get(id(micro_batch))
        if position is None:
            torch.default_generator.manual_seed(0)
        else:
            self._move(position)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """See `TorchDispatchMode`."""
        del types
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded not in func.tags or _draws_nothing(func, args, kwargs):
            return func(*args, **kwargs)
        position = self._position()
        name = position.calls[-1][0] if position is not None and position.calls else ""
        if position is None:
            self.untied.setdefault(name, "it draws random numbers for no known sample")
            return func(*args, **kwargs)
        if not position.samples:  # padding, whose loss does not count
            return func(*args, **kwargs)
        reason = self._reason(func, args, position)
        if reason is not None:
            self.untied.setdefault(name, reason)
            return func(*args, **kwargs)
        self._move(replace(position, draws=position.draws + 1))
        return self._drawn(position, func, args, kwargs)

    def _reason(self, func: Any, args: tuple[Any, ...], position: _Position) -> str | None:
        """Return why a draw cannot be tied to samples; None if it can."""
        name = func._overloadpacket.__name__
        if name not in _UNIFORM | {"bernoulli", "bernoulli_", "native_dropout"}:
            return f"{name} draws inside its kernel"
        if position.calls and position.calls[-1][0] in self._spine:
            return "several stages run its forward code"
        shape = tuple(args[0].shape if isinstance(args[0], Tensor) else args[0])
        if not shape or shape[0] != len(position.samples):
            return (
                f"{name} draws {shape}, whose first dimension is not that of the "
                f"{len(position.samples)} samples"
            )
        return None

    def _drawn(
        self, position: _Position, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        name, like = func._overloadpacket.__name__, args[0]
        if name in ("rand", "rand_like"):
            result = func(*args, **kwargs)
            return result.copy_(self._uniform(position, result))
        uniform = self._uniform(position, like)
        if name == "uniform_":
            low = args[1] if len(args) > 1 else kwargs.get("from", 0.0)
            high = args[2] if len(args) > 2 else kwargs.get("to", 1.0)
            return like.copy_(low + (high - low) * uniform)
        if name == "bernoulli_":
            return like.copy_(uniform < (args[1] if len(args) > 1 else kwargs.get("p", 0.5)))
        if name == "bernoulli":
            return (uniform < (args[1] if len(args) > 1 else kwargs.get("p", like))).to(like.dtype)
        mask = uniform >= args[1]
        return like * mask * (1 / (1 - args[1])), mask

    def _uniform(self, position: _Position, like: Tensor) -> Tensor:
        """Return numbers in [0, 1) of the shape of `like`.

        Each row depends only on the seed, the step, the sample's index in the global batch, and
        the place of the draw in the forward pass. The numbers are in fp32 whatever the dtype of
        `like`, so that masks are the same in all precisions.
        """
        rows = []
        for sample in position.samples:
            key = repr((self._seed, position.step, sample, position.calls, position.draws))
            digest = hashlib.blake2b(key.encode(), digest_size=7).digest()
            generator = torch.Generator().manual_seed(int.from_bytes(digest, "big"))
            rows.append(torch.rand(like.shape[1:], generator=generator))
        return torch.stack(rows).to(like.device)

    def _call(self, name: str, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        position = self._position()
        if position is None:
            return call(*args, **kwargs)
        self._entered = True
        if threading.get_ident() != self._thread and not _in_backward():
            self.untied[""] = "modules run in other threads"
        count = position.ended_calls.get(name, 0)
        after = replace(position, ended_calls={**position.ended_calls, name: count + 1})
        self._move(_Position(position.step, position.samples, (*position.calls, (name, count))))
        try:
            return call(*args, **kwargs)
        finally:
            self._move(after)

    def _move(self, position: _Position) -> None:
        torch.default_generator.manual_seed(self._first_seed + len(self._positions))
        self._positions.append(position)

    def _position(self) -> _Position | None:
        number = torch.default_generator.initial_seed() - self._first_seed
        return self._positions[number] if 0 <= number < len(self._positions) else None

    def write(self, folder: Path, rank: int) -> None:
        """Write this rank's file for `untied_reason` into a folder."""
        (folder / f"dropout-{rank}.json").write_text(json.dumps(self.untied) + "\n", "utf-8")


def sample_places(batch: Step, context: RunContext, plan: Plan) -> dict[int, tuple[int, ...]]:
    """Return, for each micro-batch of this rank, the indices of its rows in the global batch.

    Args:
        batch: this rank's batch of a step.
        context: this rank's context.
        plan: the plan of the run.

    Returns:
        The indices by the `id` of the micro-batch; empty indices for padding.
    """
    shares = (plan.data_rank(context.dp_rank), plan.batch.dp_size, plan.batch.micro_size)
    plans = split_global_batch(range(batch.samples), *shares)
    return {
        id(micro_batch): () if part.padding else tuple(part.indices)
        for micro_batch, part in zip(batch.micro_batches, plans, strict=True)
    }


class NoDropout(nullcontext[None]):
    """Replaces `TiedDropout` if blocks are compiled.

    torch cannot compile under a dispatch mode that changes random numbers, so dropout is off.
    """

    def begin_step(self, step: int, samples: Mapping[int, tuple[int, ...]]) -> None:
        """Do nothing, because dropout is off."""

    def close(self) -> None:
        """Do nothing."""

    def write(self, folder: Path, rank: int) -> None:
        """Do nothing, because no masks are drawn."""


def untied_reason(reference: Path, other: Path) -> str | None:
    """Return a reason why masks of one of two runs are not tied to samples; None if all are tied.

    Args:
        reference: the folder of the reference.
        other: the folder of the other run, which may be the same folder.
    """
    for folder in (reference, other):
        for path in sorted(folder.glob("dropout-*.json")):
            for name, reason in read_json_object(path).items():
                return f"{name or 'the model'}: {reason}"
    return None


def _draws_nothing(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Return whether an operation that may draw does not draw, or draws no mask of this model."""
    if kwargs.get("generator") is not None:
        return True
    leaves = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    if any(isinstance(leaf, FakeTensor) or leaf.device.type == "meta" for leaf in leaves):
        return True
    for index, argument in enumerate(func._schema.arguments):
        if argument.name in ("dropout_p", "p", "train", "training"):
            value = args[index] if index < len(args) else kwargs.get(argument.name, True)
            if not isinstance(value, Tensor) and value is not None and not value:
                return argument.name != "p" or "dropout" in func._overloadpacket.__name__
    return str(kwargs.get("device")) == "meta"


def _in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1
