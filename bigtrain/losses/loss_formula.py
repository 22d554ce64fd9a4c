"""What a user's loss divides by: found by comparing two recordings of it.

The second recording is of a batch of twice the rows, each row twice. So whatever doubles its shape
has a value for each row, a sum over rows doubles its value, and what stays is a constant. From
this follows which calls average over the rows, what each average divides by, and whether the loss
is a sum of such averages. If it is, the loss of a global batch is the sum of what its
micro-batches contribute, once every divisor is that of the global batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_unflatten

from bigtrain.losses.loss_divisors import (
    BY_TARGET,
    ValidTargets,
    bound_arguments,
    is_labels,
    number_of_values,
    reduction_of,
)
from bigtrain.losses.loss_trace import Call, Node, Trace, value_of


class Dependence(Enum):
    """How a tensor of a loss depends on the rows of the batch."""

    CONSTANT = "the same for every batch"
    ROWS = "a value for each row"
    SUM = "what a batch contributes; contributions add up"
    STATISTIC = "follows from sums over the targets, which are known before the forward pass"
    LOCAL = "follows from the targets, and not by sums: a maximum"
    PLACES = "how many rows went where: no more than an order of rows, as for experts"
    OTHER = "anything else"


@dataclass(frozen=True)
class Meaning:
    """The kind of a tensor."""

    kind: Dependence
    reason: str = ""
    """Of OTHER: what made it so."""
    replayable: bool = True
    """Nothing in it was replaced by a figure of the global batch."""


@dataclass(eq=False)
class Total:
    """A number, or several, of a micro-batch that is added up over the global batch."""

    words: str
    size: int
    """How many numbers."""
    static: float | None = None
    """Its value where shapes alone decide it."""
    needs: tuple[Node, ...] = ()
    compute: Callable[..., Tensor] | None = None
    """Its value from those of `needs`, where targets decide it."""


@dataclass(frozen=True)
class Recipe:
    """How a statistic of the global batch follows from the totals."""

    calls: tuple[Call, ...]
    starts: Mapping[int, Callable[[Sequence[float]], Tensor]]
    """Statistics that are totals, by the numbers of their nodes."""
    node: Node

    def of(self, totals: Sequence[float]) -> Tensor:
        """The statistic, on the host."""
        values = {number: start(totals) for number, start in self.starts.items()}
        for call in self.calls:
            call.replay(values, torch.device("cpu"))
        return value_of(self.node, values, torch.device("cpu"))


@dataclass(frozen=True)
class Change:
    """What is done otherwise in one call of the loss, so that contributions add up."""

    kind: Literal["statistic", "share", "mean", "loss", "number"]
    """statistic: an argument becomes that of the global batch; share: an argument that does not
    depend on the batch is multiplied by this micro-batch's share of the rows; mean, loss: the sum
    divided by a total; number: a Python number becomes a total."""
    position: int = 0
    """Of the argument, in the flattened arguments."""
    total: int = 0
    """Where the total is in the totals."""
    recipe: Recipe | None = None
    inverse: bool = False
    """The number is one over the total."""


Place = tuple[str, int, Any, int]
"""Frame, number of the frame's call, function, occurrence: see `loss_trace.Call`."""


@dataclass(frozen=True)
class LossFormula:
    """A loss as a sum of averages over the global batch."""

    totals: tuple[Total, ...]
    changes: Mapping[Place, tuple[Change, ...]]
    replayed: tuple[Call, ...]
    """The calls from which totals follow, in order."""
    given: tuple[Node, ...]
    guards: tuple[tuple[Node, bool], ...]
    """Truth values that the loss branched on, with what they were."""
    shares_result: bool
    """The loss does not depend on the batch: each micro-batch has its share of it."""

    @property
    def width(self) -> int:
        """How many numbers the totals are."""
        return sum(total.size for total in self.totals)

    @property
    def frames(self) -> frozenset[str]:
        """Where changed calls are made: in modules of the model, by name, or in the loss."""
        return frozenset(frame for frame, _, _, _ in self.changes)

    @property
    def layout(self) -> str:
        """Tells two formulas apart whose totals must not be added up."""
        return "; ".join(f"{total.words}[{total.size}]" for total in self.totals)


class NoFormulaError(Exception):
    """A loss is no sum of averages; the message says why."""


_SUMS = {
    *("sum", "nansum", "count_nonzero", "matmul", "mm", "mv", "dot", "vdot", "bmm", "einsum"),
    *("tensordot", "inner", "linear", "__matmul__", "__rmatmul__"),
}
_LINEAR = {
    *("neg", "positive", "to", "float", "double", "half", "bfloat16", "type", "type_as", "clone"),
    *("detach", "contiguous", "reshape", "view", "view_as", "flatten", "unflatten", "squeeze"),
    *("unsqueeze", "sum", "mean", "stack", "cat", "concat", "__getitem__", "index_select"),
    *("select", "narrow", "split", "chunk", "unbind", "permute", "transpose", "t", "T", "mT"),
    *("expand", "expand_as", "broadcast_to", "requires_grad_", "cpu", "cuda", "ravel", "data"),
    *("__neg__", "squeeze_", "unsqueeze_", "movedim", "swapaxes", "reshape_as", "atleast_1d"),
}
_ADD = {
    *("add", "add_", "__add__", "__radd__", "__iadd__", "sub", "sub_", "subtract", "__sub__"),
    *("__isub__", "rsub", "__rsub__"),
}
_MUL = {"mul", "mul_", "multiply", "__mul__", "__rmul__", "__imul__"}
_DIV = {"div", "div_", "divide", "true_divide", "__truediv__", "__itruediv__"}
_COUPLED = {
    *("softmax", "log_softmax", "cumsum", "cumprod", "logcumsumexp", "flip", "roll"),
    *("normalize", "cummax", "cummin", "diff"),
}
"""Functions that mix what lies along a dim and keep its length."""
_ORDERED = {"sort", "argsort", "msort", "topk"}
"""Functions that order what lies along a dim, the last one where none is named."""
_PLACE_OF_DIM: dict[str, tuple[int, int | None]] = {
    **{"topk": (2, -1), "sort": (1, -1), "argsort": (1, -1), "msort": (1, 0)},
    **{"roll": (2, 0), "normalize": (2, 1), "diff": (2, -1)},
}
"""Where the dim is among the arguments of such a function, and what it is where it is left out."""
_COUNTED = {"histc", "bincount"}
_BY_PLACES = {
    *("__getitem__", "index_select", "gather", "take_along_dim", "index_add", "index_add_"),
    *("index_copy", "index_copy_", "scatter", "scatter_", "scatter_add", "scatter_add_"),
    *("grouped_mm", "_grouped_mm", "grouped_mm_fallback", "repeat_interleave"),
    *("searchsorted", "bucketize"),
}
"""Functions that take some of their arguments for the places of rows."""
_NEW = {"new_zeros", "new_ones", "new_full", "new_empty", "new_tensor"}


def find_formula(first: Trace, second: Trace) -> LossFormula:
    """The formula of a loss from its two recordings; see the module.

    Raises:
        NoFormulaError: it is no sum of averages over rows.
    """
    if first.result is None:
        raise NoFormulaError("it returns no tensor that it computed from the outputs")
    same = len(first.calls) == len(second.calls) and all(
        a.func == b.func and a.spec == b.spec and a.frame == b.frame
        for a, b in zip(first.calls, second.calls, strict=True)
    )
    if not same or len(first.reads) != len(second.reads):
        raise NoFormulaError("what it computes depends on the number of rows")
    return _Analysis(first, second, first.result).formula()


@dataclass
class _Pair:
    """A call in both recordings."""

    one: Call
    two: Call
    meanings: list[Meaning]
    """Of the arguments that are tensors."""

    @property
    def name(self) -> str:
        return self.one.name

    def has(self, *kinds: Dependence) -> bool:
        return any(meaning.kind in kinds for meaning in self.meanings)

    def positions(self) -> list[int]:
        """Of the arguments that are tensors."""
        return [i for i, leaf in enumerate(self.one.leaves) if isinstance(leaf, Node)]

    def numbers(self) -> list[tuple[int, float, float]]:
        """Arguments that are numbers: position, value in both recordings."""
        return [
            (i, a, b)
            for i, (a, b) in enumerate(zip(self.one.leaves, self.two.leaves, strict=True))
            if isinstance(a, (int, float)) and not isinstance(a, bool)
        ]


@dataclass
class _Analysis:
    first: Trace
    second: Trace
    result: Node
    meanings: dict[int, Meaning] = field(default_factory=dict)
    totals: list[Total] = field(default_factory=list)
    changes: dict[Place, list[Change]] = field(default_factory=dict)
    starts: dict[int, Callable[[Sequence[float]], Tensor]] = field(default_factory=dict)

    def formula(self) -> LossFormula:
        first, second = self.first, self.second
        for nodes, others in ((first.given, second.given), (first.outputs, second.outputs)):
            for node, other in zip(nodes, others, strict=True):
                grown = node.shape != other.shape
                kind = Dependence.ROWS if grown else Dependence.LOCAL
                if not grown and node.value is None:
                    kind = Dependence.OTHER
                self.meanings[node.number] = Meaning(kind, "an output of the model without rows")
        for one, two in zip(first.calls, second.calls, strict=True):
            pair = _Pair(one, two, [self._meaning(node) for node in one.nodes])
            results = zip(one.results, two.results, strict=True)
            found = [self._result(pair, node, other) for node, other in results]
            for node, meaning in zip(one.results, found, strict=True):
                self.meanings[node.number] = meaning
        result = self._meaning(self.result)
        if result.kind is Dependence.OTHER:
            raise NoFormulaError(result.reason)
        if result.kind is Dependence.PLACES:
            raise NoFormulaError("it counts rows, which has no gradient")
        if result.kind is Dependence.ROWS:
            raise NoFormulaError("it returns a value for each row")
        needed = [node for total in self.totals for node in total.needs]
        guards = [(r.node, r.value) for r in first.reads if isinstance(r.value, bool)]
        needed += [node for node, _ in guards]
        return LossFormula(
            tuple(self.totals),
            {place: tuple(changes) for place, changes in self.changes.items()},
            self._slice(needed),
            tuple(first.given),
            tuple(guards),
            shares_result=result.kind is not Dependence.SUM,
        )

    def _meaning(self, node: Node) -> Meaning:
        return self.meanings.get(node.number, Meaning(Dependence.CONSTANT))

    def _slice(self, nodes: Sequence[Node]) -> tuple[Call, ...]:
        """The known calls that these nodes follow from, in order."""
        wanted = {node.number for node in nodes}
        chosen = []
        for call in reversed(self.first.calls):
            if call.known and wanted & {node.number for node in call.results}:
                chosen.append(call)
                wanted |= {node.number for node in call.nodes}
        return tuple(reversed(chosen))

    def _result(self, pair: _Pair, node: Node, other: Node) -> Meaning:
        """The meaning of one result of a call; notes what has to be done otherwise in it."""
        for meaning in pair.meanings:
            if meaning.kind is Dependence.OTHER:
                return meaning
        if pair.has(Dependence.PLACES):
            return self._of_places(pair, node, other)
        if pair.has(Dependence.ROWS):
            return self._of_rows(pair, node, other)
        if pair.has(Dependence.SUM):
            return self._of_sums(pair)
        if node.shape != other.shape:
            return Meaning(Dependence.ROWS)
        if pair.has(Dependence.STATISTIC, Dependence.LOCAL):
            return self._of_statistics(pair)
        if node.value is not None and other.value is not None:
            return self._of_known(node, other)
        return Meaning(Dependence.CONSTANT)

    def _of_places(self, pair: _Pair, node: Node, other: Node) -> Meaning:
        """The result of a call that was told how many rows go where.

        Rows in another order are still the rows. As a number, as in a loss that balances experts,
        the count of a micro-batch is not that of the global batch.
        """
        if not pair.has(Dependence.ROWS, Dependence.SUM, Dependence.STATISTIC, Dependence.LOCAL):
            return Meaning(Dependence.PLACES, replayable=False)
        if pair.name in _BY_PLACES and pair.has(Dependence.ROWS) and node.shape != other.shape:
            return self._of_rows(pair, node, other)
        return Meaning(Dependence.OTHER, f"{pair.name} of a count of rows of one micro-batch")

    def _of_known(self, node: Node, other: Node) -> Meaning:
        """A tensor that was made from Python numbers: `torch.tensor(len(targets))`."""
        if torch.equal(node.known, other.known):
            return Meaning(Dependence.CONSTANT)
        if node.size == 1 and float(other.known) == 2 * float(node.known):
            number = self._total(Total("a number", 1, static=float(node.known)))
            self._start(node, number, 1)
            return Meaning(Dependence.STATISTIC)
        return Meaning(Dependence.LOCAL)

    def _of_statistics(self, pair: _Pair) -> Meaning:
        """What follows from statistics alone."""
        replayable = all(meaning.replayable for meaning in pair.meanings)
        if pair.one.known and replayable:
            return Meaning(Dependence.LOCAL if pair.has(Dependence.LOCAL) else Dependence.STATISTIC)
        if pair.has(Dependence.LOCAL):
            return Meaning(Dependence.OTHER, f"{pair.name} of a figure of one micro-batch")
        self._replace_statistics(pair)
        return Meaning(Dependence.CONSTANT)

    def _of_rows(self, pair: _Pair, node: Node, other: Node) -> Meaning:
        """The result of a call that was given values for each row."""
        if pair.name in _NEW and pair.name != "new_tensor":
            return Meaning(Dependence.CONSTANT if node.shape == other.shape else Dependence.ROWS)
        if node.shape == other.shape:
            return self._reduced(pair, node, other)
        grown = [i for i, (a, b) in enumerate(zip(node.shape, other.shape, strict=False)) if a != b]
        ratios = [other.shape[i] / max(node.shape[i], 1) for i in grown]
        is_doubled = len(node.shape) == len(other.shape) and ratios in ([2.0], [])
        if not is_doubled and node.shape and 0 not in node.shape:
            return Meaning(
                Dependence.OTHER, f"{pair.name} compares the rows of a batch with each other"
            )
        if pair.has(Dependence.SUM):
            return Meaning(
                Dependence.OTHER, f"{pair.name} relates each row to a figure of its micro-batch"
            )
        goes_along = pair.name in _COUPLED or _orders_values(pair.one)
        if goes_along and not _dims_of(pair.one, len(node.shape)).isdisjoint(grown):
            return Meaning(Dependence.OTHER, f"{pair.name} goes along the rows of a batch")
        replayable = all(meaning.replayable for meaning in pair.meanings)
        if pair.has(Dependence.STATISTIC):
            self._replace_statistics(pair)
            replayable = False
        replayable = not self._replace_numbers(pair) and replayable
        return Meaning(Dependence.ROWS, replayable=replayable)

    def _reduced(self, pair: _Pair, node: Node, other: Node) -> Meaning:
        """The result of a call that leaves no rows."""
        known = pair.one.known and all(meaning.replayable for meaning in pair.meanings)
        reduction = reduction_of(pair.one)
        if reduction is not None:
            return self._loss(pair, reduction)
        if pair.name == "mean":
            source = pair.one.nodes[0]
            if not node.shape or node.shape != source.shape:
                return self._known_mean(pair, node) if known else self._mean(pair, node)
        if pair.name in _SUMS:
            if not known:
                return Meaning(Dependence.SUM)
            if torch.equal(node.known * 2, other.known):
                size = max(1, node.size)
                number = self._total(Total(f"{pair.name} of targets", size, None, (node,), _self))
                self._start(node, number, size)
                return Meaning(Dependence.STATISTIC)
            return Meaning(Dependence.LOCAL)
        if known:
            return Meaning(Dependence.LOCAL)
        if pair.name in _COUNTED:
            return Meaning(Dependence.PLACES, replayable=False)
        return Meaning(Dependence.OTHER, f"{pair.name} over the rows is no average of theirs")

    def _mean(self, pair: _Pair, node: Node) -> Meaning:
        """An average over unknown values."""
        source = pair.one.nodes[0]
        each = source.size / max(node.size, 1)
        number = self._counted(pair, each, source.size_of, pair.two.nodes[0].size_of)
        self._change(pair.one, Change("mean", total=number))
        return Meaning(Dependence.SUM)

    def _known_mean(self, pair: _Pair, node: Node) -> Meaning:
        """An average of targets: a statistic, of a sum and a count."""
        source = pair.one.nodes[0]
        size = max(1, node.size)

        def added(value: Tensor, source: Tensor) -> Tensor:
            return value * (source.numel() / size)

        total = self._total(Total("mean of targets", size, None, (node, source), added))
        count = self._total(
            Total("numbers of a mean", 1, None, (source,), lambda s: _number(s.numel() / size))
        )
        shape, dtype = node.shape, node.dtype

        def start(totals: Sequence[float]) -> Tensor:
            summed = torch.tensor(totals[total : total + size], dtype=torch.float64)
            return (summed / max(totals[count], 1e-300)).reshape(shape).to(dtype)

        self.starts[node.number] = start
        return Meaning(Dependence.STATISTIC)

    def _loss(self, pair: _Pair, reduction: str) -> Meaning:
        """The result of one of torch's losses with a reduction."""
        call, func = pair.one, pair.one.func
        if reduction == "none":
            return Meaning(Dependence.OTHER, f"{pair.name} returns no value for each row")
        if reduction == "sum":
            return Meaning(Dependence.SUM)
        arguments = bound_arguments(call)
        target, weight = arguments.get("target"), arguments.get("weight")
        labels = target if isinstance(target, Node) and is_labels(target) else None
        is_known = labels is not None and labels.value is not None
        if is_known and func in BY_TARGET and labels and self._meaning(labels).replayable:
            ignored = arguments.get("ignore_index")
            classes = weight if isinstance(weight, Node) else None
            needs = (labels,) if classes is None else (labels, classes)
            if classes is not None and classes.value is None:
                return Meaning(
                    Dependence.OTHER, f"{pair.name} has class weights that are not known"
                )
            words = "valid targets" if classes is None else "class weights of valid targets"
            count = ValidTargets(-100 if ignored is None else int(ignored))
            number = self._total(Total(f"{words} of {pair.name}", 1, None, needs, count))
        elif isinstance(weight, Node) and func in (F.mse_loss, F.l1_loss, F.huber_loss):
            if weight.value is None or not self._meaning(weight).replayable:
                return Meaning(
                    Dependence.OTHER, f"{pair.name} divides by weights that are not known"
                )
            number = self._total(Total(f"weights of {pair.name}", 1, None, (weight,), _sum))
        else:
            each = number_of_values(call, arguments, reduction)
            source = call.nodes[0]
            other = pair.two.nodes[0]
            number = self._counted(pair, each, source.size_of, other.size_of)
        self._change(call, Change("loss", total=number))
        return Meaning(Dependence.SUM)

    def _counted(self, pair: _Pair, each: float, source: Node | None, other: Node | None) -> int:
        """Where the count of an average is in the totals.

        Args:
            pair: the call that averages.
            each: the count in the first recording.
            source: the mask that decided how many values there are; None where shapes did.
            other: the same in the second recording.
        """
        if source is None or source.value is None or other is None:
            return self._total(Total(f"values of {pair.name}", 1, static=each))
        chosen = max(1, int(source.value.sum()))
        factor = each / chosen

        def count(mask: Tensor) -> Tensor:
            return mask.sum(dtype=torch.float64) * factor

        return self._total(Total(f"chosen values of {pair.name}", 1, None, (source,), count))

    def _of_sums(self, pair: _Pair) -> Meaning:
        """The result of a call that was given contributions, and no rows."""
        name, positions = pair.name, pair.positions()
        sums = [
            i for i, m in zip(positions, pair.meanings, strict=True) if m.kind is Dependence.SUM
        ]
        if pair.has(Dependence.LOCAL):
            return Meaning(
                Dependence.OTHER, f"{name} relates a mean to a figure of one micro-batch"
            )
        if name in _ADD:
            return self._added(pair, sums)
        only = len(sums) == len(positions)
        if name in _LINEAR and only:
            return Meaning(Dependence.SUM)
        scaled = name in _MUL or (name in _DIV and sums == [positions[0]])
        if not scaled or len(sums) > 1:
            return Meaning(Dependence.OTHER, f"{name} of a mean over the batch is no mean itself")
        self._replace_statistics(pair)
        self._replace_numbers(pair)
        for _, one, two in pair.numbers():
            if one != two and not self._is_known_number(one, two):
                return Meaning(
                    Dependence.OTHER, f"{name} by a number that is read from the outputs"
                )
        return Meaning(Dependence.SUM)

    def _added(self, pair: _Pair, sums: Sequence[int]) -> Meaning:
        self._replace_statistics(pair)
        self._replace_numbers(pair)
        for position in pair.positions():
            if position not in sums:
                self._change(pair.one, Change("share", position))
        for position, one, two in pair.numbers():
            is_alpha = isinstance(pair.one.leaves[position], float | int) and _is_alpha(
                pair.one, position
            )
            if one != two and not self._is_known_number(one, two):
                return Meaning(
                    Dependence.OTHER, f"{pair.name} of a number that is read from the outputs"
                )
            if (one or two) and not is_alpha:
                self._change(pair.one, Change("share", position))
        return Meaning(Dependence.SUM)

    def _replace_statistics(self, pair: _Pair) -> None:
        """Let a call have the statistics of the global batch."""
        for position, meaning in zip(pair.positions(), pair.meanings, strict=True):
            if meaning.kind is Dependence.STATISTIC:
                node = pair.one.leaves[position]
                change = Change("statistic", position, recipe=self._recipe(node))
                self._change(pair.one, change)

    def _replace_numbers(self, pair: _Pair) -> bool:
        """Let an arithmetic call have Python numbers of the global batch; whether there are any."""
        if pair.name not in _MUL | _DIV | _ADD:
            return False
        replaced = False
        for position, one, two in pair.numbers():
            if one == two:
                continue
            read = self._read_of(one, two)
            if read is not None:
                change = Change("statistic", position, recipe=self._recipe(read))
            elif two in (2 * one, one / 2) and not self._changing_reads():
                inverse = two == one / 2
                static = 1 / one if inverse else float(one)
                number = self._total(Total(f"number in {pair.name}", 1, static=static))
                change = Change("number", position, total=number, inverse=inverse)
            else:
                continue
            self._change(pair.one, change)
            replaced = True
        return replaced

    def _is_known_number(self, one: float, two: float) -> bool:
        if self._read_of(one, two) is not None:
            return True
        return two in (2 * one, one / 2) and not self._changing_reads()

    def _read_of(self, one: float, two: float) -> Node | None:
        """The statistic that Python read this number from."""
        for read, other in zip(self.first.reads, self.second.reads, strict=True):
            if isinstance(read.value, bool) or not isinstance(read.value, (int, float)):
                continue
            statistic = self._meaning(read.node).kind is Dependence.STATISTIC
            if statistic and read.value == one and other.value == two:
                return read.node
        return None

    def _changing_reads(self) -> bool:
        """Whether Python read numbers that may be in others: which, nobody can tell."""
        pairs = zip(self.first.reads, self.second.reads, strict=True)
        return any(
            isinstance(a.value, (int, float))
            and not isinstance(a.value, bool)
            and a.value != b.value
            for a, b in pairs
        )

    def _recipe(self, node: Node) -> Recipe:
        calls = [call for call in self._slice([node]) if self._after_start(call)]
        return Recipe(tuple(calls), dict(self.starts), node)

    def _after_start(self, call: Call) -> bool:
        """Whether a call computes with statistics, and is not what they are computed from."""
        if any(node.number in self.starts for node in call.results):
            return False
        return all(
            self._meaning(node).kind in (Dependence.STATISTIC, Dependence.CONSTANT)
            for node in call.nodes
        )

    def _total(self, total: Total) -> int:
        """Add a total; where its first number is among all."""
        start = 0
        for other in self.totals:
            if (other.words, other.static, other.needs) == (total.words, total.static, total.needs):
                return start
            start += other.size
        self.totals.append(total)
        return start

    def _start(self, node: Node, number: int, size: int) -> None:
        shape, dtype = node.shape, node.dtype

        def start(totals: Sequence[float]) -> Tensor:
            flat = torch.tensor(totals[number : number + size], dtype=torch.float64)
            return flat.reshape(shape).to(dtype)

        self.starts[node.number] = start

    def _change(self, call: Call, change: Change) -> None:
        place = (*call.frame, call.func, call.occurrence)
        self.changes.setdefault(place, []).append(change)


def _self(value: Tensor) -> Tensor:
    return value


def _sum(value: Tensor) -> Tensor:
    return value.sum(dtype=torch.float64)


def _number(value: float) -> Tensor:
    return torch.tensor(value, dtype=torch.float64)


def _dims_of(call: Call, num_dims: int) -> set[int]:
    """The dims that a function goes along, counted from the front."""
    args, kwargs = tree_unflatten(call.leaves, call.spec)
    place, default = _PLACE_OF_DIM.get(call.name, (1, None))
    given = args[place] if len(args) > place else default
    given = kwargs.get("dim", kwargs.get("dims", given))
    if call.name == "flip" and isinstance(given, int):  # x.flip(0, 1)
        given = args[1:]
    dims = given if isinstance(given, (tuple, list)) else (given,)
    return {dim % max(1, num_dims) for dim in dims if isinstance(dim, int)}


def _orders_values(call: Call) -> bool:
    """Whether a call orders rows by what they are; by a whole number, as of an expert, all stay."""
    is_number = call.nodes[0].dtype.is_floating_point
    return call.name in _ORDERED and (is_number or call.name == "topk")


def _is_alpha(call: Call, position: int) -> bool:
    """Whether a number is the factor of `torch.add(a, b, alpha=...)`."""
    args, _ = tree_unflatten(list(range(len(call.leaves))), call.spec)
    return position not in args
