"""Modules that only some passes call: experts, towers, skipped layers.

If values or random numbers decide which modules are called, the ranks of a step may call different
modules.
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
"""The made-up answers of each pass. If the first two passes need no values and draw no random
numbers, no further pass runs: calls can then depend only on a counter."""


@dataclass(frozen=True)
class Routes:
    """The modules that some passes in training call and other passes do not.

    All fields are empty for a model that does not run without values.
    """

    modules: tuple[str, ...] = ()
    """The outermost modules that some passes call more often than others."""
    parameters: tuple[str, ...] = ()
    """Trained parameters that only some passes use."""
    cause: str | None = None
    """The operation that makes the ranks' routes differ; None if all ranks take the same route."""
    called: frozenset[str] = frozenset()
    """Modules that all passes call equally often."""
    only_used: tuple[str, ...] = ()
    """Blocks that are not called although their parameters are used (`ParameterUses.only_used`)."""

    @property
    def differ(self) -> bool:
        """Whether the ranks of a step may take different routes."""
        return self.cause is not None and bool(self.modules or self.parameters)

    @property
    def vary(self) -> bool:
        """Whether some pass uses a module or a parameter more often than another pass."""
        return bool(self.modules or self.parameters)

    @property
    def names(self) -> str:
        """The first three modules, or else parameters, and the number of the rest, for messages."""
        names = self.modules or self.parameters
        shown = ", ".join(names[:3])
        return f"{shown} and {len(names) - 3} more" if len(names) > 3 else shown

    def has(self, name: str) -> bool:
        """Whether a module is in `modules`, or inside one of them."""
        return any(f"{name}.".startswith(f"{module}.") for module in self.modules)

    def calls(self, name: str) -> bool:
        """Whether every pass calls a module."""
        return name not in self.only_used and not (self.differ and self.has(name))


@dataclass
class _Pass(CallLog):
    """A pass without values: its calls, the parameters it reached, the values it needed."""

    reached: frozenset[str] = frozenset()
    question: str | None = None
    """The first operation that needed values."""
    asked_in: str = ""
    """The module whose code called that operation."""
    called_before: frozenset[str] = frozenset()
    drew: bool = False
    ended: bool = False

    def ask(self, operation: str) -> None:
        """Record an operation that needs values."""
        if self.question is None:
            self.question = operation
            self.asked_in = self.stack[-1] if self.stack else ""
            self.called_before = frozenset(self.calls)


def find_routes(model: nn.Module, example: MicroBatch) -> Routes:
    """Run a copy of the model in training, with several made-up answers where it needs values.

    Args:
        model: a model on any device; a copy without values runs.
        example: one micro-batch; only shapes matter.

    Returns:
        Empty routes if the model does not run without values.
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
        this_pass = _Pass()
        try:
            _run(twin, batch, answer, number, this_pass)
        except Exception as failed:  # noqa: BLE001 - made-up answers may contradict each other
            error = failed
            if "numpy" in str(failed):  # a conversion to numpy needs values and is no operation
                this_pass.ask("numpy")
        passes.append(this_pass)
        if len(passes) > 1 and not any(p.question or p.drew for p in passes):
            break
    ended = [each for each in passes if each.ended]
    asked = next((each for each in passes if each.question), None)
    if not ended and error is not None and (asked is None or device.type == "meta"):
        raise error  # fake tensors have kernels that the meta device lacks
    cause = None
    if asked is not None:
        cause = f"{asked.question} in {asked.asked_in or 'the model'}"
    elif any(each.drew for each in passes):
        cause = "a random number of Python"
    trained = {n for n, p in model.named_parameters() if p.requires_grad}
    owners = [n for n, m in twin.named_modules() if n and _is_trained(m)]
    if ended:
        varying = {n for n in owners if len({each.calls[n] for each in ended}) > 1}
        every = frozenset.intersection(*(each.reached for each in ended))
        some = frozenset.union(*(each.reached for each in ended)) - every
    elif asked is not None:
        varying, some = set(_behind(twin, asked, owners)), frozenset()
    else:
        varying, some = set(), frozenset()
    counts = [each.calls for each in ended] or [Counter(each.called_before) for each in passes[:1]]
    called = {n for n in counts[0] if len({count[n] for count in counts}) == 1}
    outermost = [n for n in owners if n in varying and not _inside(n, varying)]
    inside = {n for n in trained if any(n.startswith(f"{m}.") for m in outermost)}
    parameters = [n for n, p in model.named_parameters() if n in (some | inside) & trained]
    return Routes(tuple(outermost), tuple(parameters), cause, frozenset(called))


def _run(twin: nn.Module, batch: MicroBatch, answer: Answer, seed: int, this_pass: _Pass) -> None:
    """Run one forward pass and record it in `this_pass`, even if it fails."""
    with ExitStack() as watching:
        watching.enter_context(log_calls(twin, this_pass))
        drew = watching.enter_context(made_up_chance(answer, seed))
        watching.callback(lambda: setattr(this_pass, "drew", drew()))
        watching.enter_context(MadeUpAnswers(answer, random.Random(seed), this_pass.ask))
        output = twin(batch.inputs)
    this_pass.reached = _reached(twin, output)
    this_pass.ended = True


def _reached(twin: nn.Module, output: object) -> frozenset[str]:
    """Return the parameters in the graph of an output; none if the graph hides some."""
    leaves: set[int] = set()
    for tensor in tree_tensors(output):
        leaves_of_tensor, is_whole = graph_leaves(tensor)
        if not is_whole:
            return frozenset()
        leaves |= leaves_of_tensor
    return frozenset(n for n, p in twin.named_parameters() if id(p) in leaves)


def _behind(twin: nn.Module, asked: _Pass, owners: list[str]) -> Iterator[str]:
    """Yield modules of which no pass shows whether they are called, because no pass has ended.

    They are inside the module whose code needed values, or inside another module of the same class.
    Modules that were called before the values were needed are left out.
    """
    kind = type(twin.get_submodule(asked.asked_in))
    same_class = [n for n, m in twin.named_modules() if type(m) is kind]
    for name in owners:
        is_below = any(
            name.startswith(f"{name_of_class}.") or not name_of_class
            for name_of_class in same_class
        )
        if is_below and name not in asked.called_before:
            yield name


def _inside(name: str, others: set[str]) -> bool:
    return any(name.startswith(f"{enclosing}.") for enclosing in others)


def _is_trained(module: nn.Module) -> bool:
    """Whether a module has trained parameters and a forward pass, which a list of modules lacks."""
    is_called = type(module).forward is not nn.Module.forward
    return is_called and any(p.requires_grad for p in module.parameters())
