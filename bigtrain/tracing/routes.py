"""Which modules each pass calls, and which only some do: experts, towers, layers left out.

Where that depends on values or on chance, the ranks of a step may call different ones.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn

from bigtrain.data.loader import MicroBatch
from bigtrain.models.blueprint import kept_random_state
from bigtrain.tensors.fake import fake_model, run_without_numbers
from bigtrain.tensors.tree import tree_tensors
from bigtrain.tracing.made_up_answers import Answer, MadeUpAnswers, made_up_chance
from bigtrain.tracing.unreached import graph_leaves
from bigtrain.tracing.watch import CallLog, log_calls

_CHANCE: tuple[Answer, ...] = ("chance",)
_PASSES: tuple[Answer, ...] = ("everything", "nothing", *_CHANCE * 6)
"""The first two answer a pass that asks nothing of values: it can only go by its own count."""


@dataclass(frozen=True)
class Routes:
    """What some passes in training call and others do not, as far as passes without numbers show.

    Nothing is said of a model that does not run so.
    """

    modules: tuple[str, ...] = ()
    """The outermost modules that are not called equally often by every pass."""
    parameters: tuple[str, ...] = ()
    """Trained parameters that take part in some passes only."""
    cause: str | None = None
    """What makes the ways of two ranks differ; None where all take the same, if not always."""
    called: frozenset[str] = frozenset()
    """Modules that every pass calls, and equally often."""
    only_used: tuple[str, ...] = ()
    """Blocks that no pass calls, though it uses their parameters: see `ParameterUses`."""

    @property
    def differ(self) -> bool:
        """Whether the ranks of a step may take different ways."""
        return self.cause is not None and bool(self.modules or self.parameters)

    @property
    def vary(self) -> bool:
        """Whether some parameter takes part in some steps only, or on some ranks."""
        return bool(self.modules or self.parameters)

    @property
    def names(self) -> str:
        """The modules, or else the parameters, as messages name them."""
        names = self.modules or self.parameters
        shown = ", ".join(names[:3])
        return f"{shown} and {len(names) - 3} more" if len(names) > 3 else shown

    def has(self, name: str) -> bool:
        """Whether a module of this name is one of those that some passes call, or inside one."""
        return any(f"{name}.".startswith(f"{module}.") for module in self.modules)

    def calls(self, name: str) -> bool:
        """Whether every pass calls a module, as far as passes show."""
        return name not in self.only_used and not (self.differ and self.has(name))


@dataclass
class _Pass(CallLog):
    """A pass without numbers: its calls, the parameters reached, the values it asked for."""

    reached: frozenset[str] = frozenset()
    question: str | None = None
    """The first operation that asked for values."""
    asked_in: str = ""
    """The module whose code it was in."""
    called_before: frozenset[str] = frozenset()
    drew: bool = False
    ended: bool = False

    def ask(self, operation: str) -> None:
        """Note a question."""
        if self.question is None:
            self.question = operation
            self.asked_in = self.stack[-1] if self.stack else ""
            self.called_before = frozenset(self.calls)


def find_routes(model: nn.Module, example: MicroBatch) -> Routes:
    """Run a copy of the model, in training, with several answers to what it asks of values.

    Args:
        model: on any device; a copy without numbers runs.
        example: one micro-batch; only shapes matter.

    Returns:
        Nothing varies where no pass shows that it does.
    """
    try:
        with kept_random_state():
            return run_without_numbers(partial(_routes, model, example))
    except Exception:  # noqa: BLE001 - user code of any kind runs here
        return Routes()


def _routes(model: nn.Module, example: MicroBatch, device: torch.device) -> Routes:
    twin, batch = fake_model(model, device, double=False), example.fake(device)
    twin.train()
    passes: list[_Pass] = []
    error: Exception | None = None
    for number, answer in enumerate(_PASSES):
        found = _Pass()
        try:
            _run(twin, batch, answer, number, found)
        except Exception as failed:  # noqa: BLE001 - made-up answers may contradict each other
            error = failed
            if "numpy" in str(failed):  # its values are asked for by no operation
                found.ask("numpy")
        passes.append(found)
        if len(passes) > 1 and not any(p.question or p.drew for p in passes):
            break
    ended = [one for one in passes if one.ended]
    asked = next((one for one in passes if one.question), None)
    if not ended and error is not None and (asked is None or device.type == "meta"):
        raise error  # fake tensors have kernels that the meta device lacks
    cause = None
    if asked is not None:
        cause = f"{asked.question} in {asked.asked_in or 'the model'}"
    elif any(one.drew for one in passes):
        cause = "a random number of Python"
    trained = {n for n, p in model.named_parameters() if p.requires_grad}
    owners = [n for n, m in twin.named_modules() if n and _is_trained(m)]
    if ended:
        varying = {n for n in owners if len({one.calls[n] for one in ended}) > 1}
        every = frozenset.intersection(*(one.reached for one in ended))
        some = frozenset.union(*(one.reached for one in ended)) - every
    elif asked is not None:
        varying, some = set(_behind(twin, asked, owners)), frozenset()
    else:
        varying, some = set(), frozenset()
    ways = [one.calls for one in ended] or [Counter(one.called_before) for one in passes[:1]]
    called = {n for n in ways[0] if len({way[n] for way in ways}) == 1}
    outermost = [n for n in owners if n in varying and not _inside(n, varying)]
    inside = {n for n in trained if any(n.startswith(f"{m}.") for m in outermost)}
    known = [n for n, p in model.named_parameters() if n in (some | inside) & trained]
    return Routes(tuple(outermost), tuple(known), cause, frozenset(called))


def _run(twin: nn.Module, batch: MicroBatch, answer: Answer, seed: int, found: _Pass) -> None:
    """One forward pass; what it does is noted as it goes."""
    with ExitStack() as watching:
        watching.enter_context(log_calls(twin, found))
        drew = watching.enter_context(made_up_chance(answer, seed))
        watching.callback(lambda: setattr(found, "drew", drew()))
        watching.enter_context(MadeUpAnswers(answer, random.Random(seed), found.ask))
        output = twin(batch.inputs)
    found.reached = _reached(twin, output)
    found.ended = True


def _reached(twin: nn.Module, output: object) -> frozenset[str]:
    """The trained parameters in the graph of what a model returns; none if it hides some."""
    leaves: set[int] = set()
    for tensor in tree_tensors(output):
        own, is_whole = graph_leaves(tensor)
        if not is_whole:
            return frozenset()
        leaves |= own
    return frozenset(n for n, p in twin.named_parameters() if id(p) in leaves)


def _behind(twin: nn.Module, asked: _Pass, owners: list[str]) -> Iterator[str]:
    """What may be called or not where no pass came to its end: below the module that asks.

    Modules of its class ask as it does.
    """
    kind = type(twin.get_submodule(asked.asked_in))
    alike = [n for n, m in twin.named_modules() if type(m) is kind]
    for name in owners:
        is_below = any(name.startswith(f"{one}.") or not one for one in alike)
        if is_below and name not in asked.called_before:
            yield name


def _inside(name: str, others: set[str]) -> bool:
    return any(name.startswith(f"{other}.") for other in others)


def _is_trained(module: nn.Module) -> bool:
    """Whether it trains something; what is never called itself (a list of modules) is none."""
    is_called = type(module).forward is not nn.Module.forward
    return is_called and any(p.requires_grad for p in module.parameters())
