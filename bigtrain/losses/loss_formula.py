"""Finds the divisors of a user's loss by comparing two recordings of the loss.

The second recording is of a batch with every row twice. So a tensor whose shape doubles has a value
for each row, a sum over rows doubles its value, and a tensor that does not change is a constant.
The comparison shows which calls average over rows, the divisor of each average, and whether the
loss is a sum of such averages. If it is, the loss of a global batch is the sum of the contributions
of its micro-batches, provided that every divisor is that of the global batch.
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
    SUM = "a contribution of the batch; contributions add up"
    STATISTIC = "follows from sums over the targets, which are known before the forward pass"
    LOCAL = "follows from the targets, and not by sums: a maximum"
    PLACES = "how many rows went where: no more than an order of rows, as for experts"
    OTHER = "anything else"


@dataclass(frozen=True)
class Meaning:
    """The dependence of a tensor on the rows of the batch."""

    kind: Dependence
    reason: str = ""
    """For OTHER: the call that is not supported, and why."""
    replayable: bool = True
    """Whether the tensor's value for a micro-batch can be computed from that micro-batch's targets.
    It cannot if a figure of the global batch was put into a call that leads to the tensor."""


@dataclass(eq=False)
class Total:
    """One or more numbers of a micro-batch that are added up over the global batch."""

    words: str
    """The name of the total in messages."""
    size: int
    """How many numbers the total has."""
    static: float | None = None
    """The value of the total, if it depends only on shapes."""
    needs: tuple[Node, ...] = ()
    """The arguments of `compute`."""
    compute: Callable[..., Tensor] | None = None
    """Computes the value of the total, if it depends on targets."""


@dataclass(frozen=True)
class Recipe:
    """The computation of a statistic of the global batch from the totals."""

    calls: tuple[Call, ...]
    starts: Mapping[int, Callable[[Sequence[float]], Tensor]]
    """By node number, functions that compute the value of a node directly from the totals."""
    node: Node
    """The node of the statistic."""

    def of(self, totals: Sequence[float]) -> Tensor:
        """Return the statistic of the global batch, on the host.

        Args:
            totals: the numbers of all totals, in order.
        """
        values = {number: start(totals) for number, start in self.starts.items()}
        for call in self.calls:
            call.replay(values, torch.device("cpu"))
        return value_of(self.node, values, torch.device("cpu"))


@dataclass(frozen=True)
class Change:
    """A change of one call of the loss, so that contributions add up."""

    kind: Literal["statistic", "share", "mean", "loss", "number"]
    """The kind of the change:

    * statistic: an argument is replaced by its value for the global batch;
    * share: an argument that does not depend on the batch is multiplied by this micro-batch's share
      of the rows;
    * mean: `torch.mean` is replaced by a sum divided by a total;
    * loss: a mean loss of torch is replaced by a summed loss divided by a total;
    * number: a Python number is replaced by a total."""
    position: int = 0
    """The index of the argument in the flattened arguments."""
    total: int = 0
    """The index of the total's first number among the numbers of all totals."""
    recipe: Recipe | None = None
    """For statistic: the computation of the argument."""
    inverse: bool = False
    """For number: whether the number is one divided by the total."""


Place = tuple[str, int, Any, int]
"""The position of a call in a loss: frame, number of the frame's call, function, occurrence. See
`loss_trace.Call`."""


@dataclass(frozen=True)
class LossFormula:
    """A loss as a sum of averages over the global batch."""

    totals: tuple[Total, ...]
    changes: Mapping[Place, tuple[Change, ...]]
    replayed: tuple[Call, ...]
    """The calls that compute the totals, in order."""
    inputs: tuple[Node, ...]
    """The tensors of the recorded batch."""
    guards: tuple[tuple[Node, bool], ...]
    """The nodes on whose truth values the loss branches, with the values in the recording."""
    shares_result: bool
    """Whether the loss is no sum over rows. A micro-batch then contributes the loss times its share
    of the rows of the global batch."""

    @property
    def width(self) -> int:
        """How many numbers all totals have together."""
        return sum(total.size for total in self.totals)

    @property
    def frames(self) -> frozenset[str]:
        """The names of the frames with changed calls.

        A name is `model.NAME` for a module of the model, and `IN_LOSS` for the loss function.
        """
        return frozenset(frame for frame, _, _, _ in self.changes)

    @property
    def layout(self) -> str:
        """The names and sizes of the totals, as text; only totals of equal layouts are added up."""
        return "; ".join(f"{total.words}[{total.size}]" for total in self.totals)


class NoFormulaError(Exception):
    """A loss is not a sum of averages; the message has the reason."""


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
"""Functions that mix the values along a dim and keep its length."""
_ORDERED = {"sort", "argsort", "msort", "topk"}
"""Functions that order the values along a dim, by default the last."""
_INDEX_OF_DIM: dict[str, tuple[int, int | None]] = {
    **{"topk": (2, -1), "sort": (1, -1), "argsort": (1, -1), "msort": (1, 0)},
    **{"roll": (2, 0), "normalize": (2, 1), "diff": (2, -1)},
}
"""For functions that work along a dim, the index of the argument that names the dim, and its
default. For functions that are not listed, the index is 1 and there is no default."""
_COUNTED = {"histc", "bincount"}
_BY_PLACES = {
    *("__getitem__", "index_select", "gather", "take_along_dim", "index_add", "index_add_"),
    *("index_copy", "index_copy_", "scatter", "scatter_", "scatter_add", "scatter_add_"),
    *("grouped_mm", "_grouped_mm", "grouped_mm_fallback", "repeat_interleave"),
    *("searchsorted", "bucketize"),
}
"""Functions with arguments that contain positions of rows."""
_NEW = {"new_zeros", "new_ones", "new_full", "new_empty", "new_tensor"}


def find_formula(first: Trace, second: Trace) -> LossFormula:
    """Return the formula of a loss from two recordings of it.

    Args:
        first: the recording for a batch.
        second: the recording for the same batch with every row twice.

    Raises:
        NoFormulaError: the loss is not a sum of averages over rows.
    """
    if first.result is None:
        raise NoFormulaError("it does not return a tensor that it computes from the outputs")
    same = len(first.calls) == len(second.calls) and all(
        a.func == b.func and a.spec == b.spec and a.frame == b.frame
        for a, b in zip(first.calls, second.calls, strict=True)
    )
    if not same or len(first.reads) != len(second.reads):
        raise NoFormulaError("its calls depend on the number of rows")
    return _Analysis(first, second, first.result).formula()


@dataclass
class _Pair:
    """The same call in both recordings."""

    one: Call
    two: Call
    meanings: list[Meaning]
    """The meanings of the arguments that are tensors."""

    @property
    def name(self) -> str:
        return self.one.name

    def has(self, *kinds: Dependence) -> bool:
        return any(meaning.kind in kinds for meaning in self.meanings)

    def positions(self) -> list[int]:
        """Return the indices of the arguments that are tensors."""
        return [i for i, leaf in enumerate(self.one.leaves) if isinstance(leaf, Node)]

    def numbers(self) -> list[tuple[int, float, float]]:
        """Return the arguments that are numbers: index, and value in both recordings."""
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
        for nodes, others in ((first.inputs, second.inputs), (first.outputs, second.outputs)):
            for node, second_node in zip(nodes, others, strict=True):
                grown = node.shape != second_node.shape
                kind = Dependence.ROWS if grown else Dependence.LOCAL
                if not grown and node.value is None:
                    kind = Dependence.OTHER
                self.meanings[node.number] = Meaning(kind, "an output of the model without rows")
        for first_call, second_call in zip(first.calls, second.calls, strict=True):
            pair = _Pair(
                first_call, second_call, [self._meaning(node) for node in first_call.nodes]
            )
            results = zip(first_call.results, second_call.results, strict=True)
            meanings = [self._result(pair, node, second_node) for node, second_node in results]
            for node, meaning in zip(first_call.results, meanings, strict=True):
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
            {call_site: tuple(changes) for call_site, changes in self.changes.items()},
            self._slice(needed),
            tuple(first.inputs),
            tuple(guards),
            shares_result=result.kind is not Dependence.SUM,
        )

    def _meaning(self, node: Node) -> Meaning:
        return self.meanings.get(node.number, Meaning(Dependence.CONSTANT))

    def _slice(self, nodes: Sequence[Node]) -> tuple[Call, ...]:
        """Return the calls that compute these nodes from the targets, in order."""
        wanted = {node.number for node in nodes}
        chosen = []
        for call in reversed(self.first.calls):
            if call.known and wanted & {node.number for node in call.results}:
                chosen.append(call)
                wanted |= {node.number for node in call.nodes}
        return tuple(reversed(chosen))

    def _result(self, pair: _Pair, node: Node, second_node: Node) -> Meaning:
        """Return the meaning of one result of a call, and note the changes of the call."""
        for meaning in pair.meanings:
            if meaning.kind is Dependence.OTHER:
                return meaning
        if pair.has(Dependence.PLACES):
            return self._of_places(pair, node, second_node)
        if pair.has(Dependence.ROWS):
            return self._of_rows(pair, node, second_node)
        if pair.has(Dependence.SUM):
            return self._of_sums(pair)
        if node.shape != second_node.shape:
            return Meaning(Dependence.ROWS)
        if pair.has(Dependence.STATISTIC, Dependence.LOCAL):
            return self._of_statistics(pair)
        if node.value is not None and second_node.value is not None:
            return self._of_known(node, second_node)
        return Meaning(Dependence.CONSTANT)

    def _of_places(self, pair: _Pair, node: Node, second_node: Node) -> Meaning:
        """Return the meaning of a call's result if an argument counts rows by position.

        A mixture of experts counts the rows of each expert. If the counts only order the rows, the
        result has a value for each row. If the result is a number, as in a loss that balances
        experts, it is not supported: the count of a micro-batch is not that of the global batch.
        """
        if not pair.has(Dependence.ROWS, Dependence.SUM, Dependence.STATISTIC, Dependence.LOCAL):
            return Meaning(Dependence.PLACES, replayable=False)
        if (
            pair.name in _BY_PLACES
            and pair.has(Dependence.ROWS)
            and node.shape != second_node.shape
        ):
            return self._of_rows(pair, node, second_node)
        return Meaning(Dependence.OTHER, f"{pair.name} of a count of rows of one micro-batch")

    def _of_known(self, node: Node, second_node: Node) -> Meaning:
        """Return the meaning of a tensor made from Python numbers: `torch.tensor(len(targets))`."""
        if torch.equal(node.known, second_node.known):
            return Meaning(Dependence.CONSTANT)
        if node.size == 1 and float(second_node.known) == 2 * float(node.known):
            number = self._total(Total("a number", 1, static=float(node.known)))
            self._start(node, number, 1)
            return Meaning(Dependence.STATISTIC)
        return Meaning(Dependence.LOCAL)

    def _of_statistics(self, pair: _Pair) -> Meaning:
        """Return the meaning of a call's result if its arguments are figures of the targets."""
        replayable = all(meaning.replayable for meaning in pair.meanings)
        if pair.one.known and replayable:
            return Meaning(Dependence.LOCAL if pair.has(Dependence.LOCAL) else Dependence.STATISTIC)
        if pair.has(Dependence.LOCAL):
            return Meaning(Dependence.OTHER, f"{pair.name} of a figure of one micro-batch")
        self._replace_statistics(pair)
        return Meaning(Dependence.CONSTANT)

    def _of_rows(self, pair: _Pair, node: Node, second_node: Node) -> Meaning:
        """Return the meaning of a call's result if an argument has a value for each row."""
        if pair.name in _NEW and pair.name != "new_tensor":
            return Meaning(
                Dependence.CONSTANT if node.shape == second_node.shape else Dependence.ROWS
            )
        if node.shape == second_node.shape:
            return self._reduced(pair, node, second_node)
        grown = [
            i for i, (a, b) in enumerate(zip(node.shape, second_node.shape, strict=False)) if a != b
        ]
        ratios = [second_node.shape[i] / max(node.shape[i], 1) for i in grown]
        is_doubled = len(node.shape) == len(second_node.shape) and ratios in ([2.0], [])
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

    def _reduced(self, pair: _Pair, node: Node, second_node: Node) -> Meaning:
        """Return the meaning of the result of a call that reduces the rows."""
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
            if torch.equal(node.known * 2, second_node.known):
                size = max(1, node.size)
                number = self._total(Total(f"{pair.name} of targets", size, None, (node,), _self))
                self._start(node, number, size)
                return Meaning(Dependence.STATISTIC)
            return Meaning(Dependence.LOCAL)
        if known:
            return Meaning(Dependence.LOCAL)
        if pair.name in _COUNTED:
            return Meaning(Dependence.PLACES, replayable=False)
        return Meaning(Dependence.OTHER, f"{pair.name} over the rows is not an average of them")

    def _mean(self, pair: _Pair, node: Node) -> Meaning:
        """Return the meaning of an average over outputs, and change the call."""
        source = pair.one.nodes[0]
        each = source.size / max(node.size, 1)
        number = self._counted(pair, each, source.size_of, pair.two.nodes[0].size_of)
        self._change(pair.one, Change("mean", total=number))
        return Meaning(Dependence.SUM)

    def _known_mean(self, pair: _Pair, node: Node) -> Meaning:
        """Return the meaning of an average over targets: a statistic, from a sum and a count."""
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
        """Return the meaning of the result of a loss of torch, and change the call."""
        call, func = pair.one, pair.one.func
        if reduction == "none":
            return Meaning(Dependence.OTHER, f"{pair.name} does not return a value for each row")
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
            second_result = pair.two.nodes[0]
            number = self._counted(pair, each, source.size_of, second_result.size_of)
        self._change(call, Change("loss", total=number))
        return Meaning(Dependence.SUM)

    def _counted(
        self, pair: _Pair, each: float, source: Node | None, second_source: Node | None
    ) -> int:
        """Add the count of an average to the totals, and return its index.

        Args:
            pair: the call that averages.
            each: the count in the first recording.
            source: the mask on whose values the count depends; None if it depends on shapes alone.
            second_source: the mask in the second recording.
        """
        if source is None or source.value is None or second_source is None:
            return self._total(Total(f"values of {pair.name}", 1, static=each))
        chosen = max(1, int(source.value.sum()))
        factor = each / chosen

        def count(mask: Tensor) -> Tensor:
            return mask.sum(dtype=torch.float64) * factor

        return self._total(Total(f"chosen values of {pair.name}", 1, None, (source,), count))

    def _of_sums(self, pair: _Pair) -> Meaning:
        """Return the meaning of a call's result if arguments are contributions of the batch."""
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
            return Meaning(Dependence.OTHER, f"{name} of a mean over the batch is not a mean")
        self._replace_statistics(pair)
        self._replace_numbers(pair)
        for _, first_number, second_number in pair.numbers():
            if first_number != second_number and not self._is_known_number(
                first_number, second_number
            ):
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
        for position, first_number, second_number in pair.numbers():
            is_alpha = isinstance(pair.one.leaves[position], float | int) and _is_alpha(
                pair.one, position
            )
            if first_number != second_number and not self._is_known_number(
                first_number, second_number
            ):
                return Meaning(
                    Dependence.OTHER, f"{pair.name} of a number that is read from the outputs"
                )
            if (first_number or second_number) and not is_alpha:
                self._change(pair.one, Change("share", position))
        return Meaning(Dependence.SUM)

    def _replace_statistics(self, pair: _Pair) -> None:
        """Replace the arguments of a call that are statistics by those of the global batch."""
        for position, meaning in zip(pair.positions(), pair.meanings, strict=True):
            if meaning.kind is Dependence.STATISTIC:
                node = pair.one.leaves[position]
                change = Change("statistic", position, recipe=self._recipe(node))
                self._change(pair.one, change)

    def _replace_numbers(self, pair: _Pair) -> bool:
        """Replace an arithmetic call's Python numbers by those of the global batch.

        Numbers that do not depend on the batch are not replaced.

        Returns:
            Whether any number is replaced.
        """
        if pair.name not in _MUL | _DIV | _ADD:
            return False
        replaced = False
        for position, first_number, second_number in pair.numbers():
            if first_number == second_number:
                continue
            read = self._read_of(first_number, second_number)
            if read is not None:
                change = Change("statistic", position, recipe=self._recipe(read))
            elif (
                second_number in (2 * first_number, first_number / 2) and not self._changing_reads()
            ):
                inverse = second_number == first_number / 2
                static = 1 / first_number if inverse else float(first_number)
                number = self._total(Total(f"number in {pair.name}", 1, static=static))
                change = Change("number", position, total=number, inverse=inverse)
            else:
                continue
            self._change(pair.one, change)
            replaced = True
        return replaced

    def _is_known_number(self, first_number: float, second_number: float) -> bool:
        if self._read_of(first_number, second_number) is not None:
            return True
        return second_number in (2 * first_number, first_number / 2) and not self._changing_reads()

    def _read_of(self, first_number: float, second_number: float) -> Node | None:
        """Return the statistic that Python read as these numbers in the two recordings, if any."""
        for read, second_read in zip(self.first.reads, self.second.reads, strict=True):
            if isinstance(read.value, bool) or not isinstance(read.value, (int, float)):
                continue
            statistic = self._meaning(read.node).kind is Dependence.STATISTIC
            if statistic and read.value == first_number and second_read.value == second_number:
                return read.node
        return None

    def _changing_reads(self) -> bool:
        """Whether Python has read a number that differs between the recordings.

        Python may have computed other numbers from it.
        """
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
        """Whether a call computes only with statistics and constants, and not from the targets."""
        if any(node.number in self.starts for node in call.results):
            return False
        return all(
            self._meaning(node).kind in (Dependence.STATISTIC, Dependence.CONSTANT)
            for node in call.nodes
        )

    def _total(self, total: Total) -> int:
        """Add a total, unless an equal one exists; return the index of its first number."""
        start = 0
        for known_total in self.totals:
            if (known_total.words, known_total.static, known_total.needs) == (
                total.words,
                total.static,
                total.needs,
            ):
                return start
            start += known_total.size
        self.totals.append(total)
        return start

    def _start(self, node: Node, number: int, size: int) -> None:
        shape, dtype = node.shape, node.dtype

        def start(totals: Sequence[float]) -> Tensor:
            flat = torch.tensor(totals[number : number + size], dtype=torch.float64)
            return flat.reshape(shape).to(dtype)

        self.starts[node.number] = start

    def _change(self, call: Call, change: Change) -> None:
        call_site = (*call.frame, call.func, call.occurrence)
        self.changes.setdefault(call_site, []).append(change)


def _self(value: Tensor) -> Tensor:
    return value


def _sum(value: Tensor) -> Tensor:
    return value.sum(dtype=torch.float64)


def _number(value: float) -> Tensor:
    return torch.tensor(value, dtype=torch.float64)


def _dims_of(call: Call, num_dims: int) -> set[int]:
    """Return the dims along which the function of a call works, counted from the front."""
    args, kwargs = tree_unflatten(call.leaves, call.spec)
    index, default = _INDEX_OF_DIM.get(call.name, (1, None))
    argument = args[index] if len(args) > index else default
    argument = kwargs.get("dim", kwargs.get("dims", argument))
    if call.name == "flip" and isinstance(argument, int):  # x.flip(0, 1)
        argument = args[1:]
    dims = argument if isinstance(argument, (tuple, list)) else (argument,)
    return {dim % max(1, num_dims) for dim in dims if isinstance(dim, int)}


def _orders_values(call: Call) -> bool:
    """Whether a call orders rows by values. A sort by integers, as by experts, does not count."""
    is_number = call.nodes[0].dtype.is_floating_point
    return call.name in _ORDERED and (is_number or call.name == "topk")


def _is_alpha(call: Call, position: int) -> bool:
    """Whether a number is a keyword argument, such as `alpha` of `torch.add(a, b, alpha=...)`."""
    args, _ = tree_unflatten(list(range(len(call.leaves))), call.spec)
    return position not in args
