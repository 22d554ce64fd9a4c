"""Compare a choice of recomputation by blocks with the best choice by operations, on one GPT.

    python benchmarks/by_operations.py --output benchmarks/results/by_operations.json

bigtrain chooses for each block one of three policies: save all activations, recompute selectively,
or recompute in full. A compiler can choose for each operation whether its result is saved. This
script says how much faster the best choice by operations is at the same bytes.

The graph of one block's forward and backward pass is traced. Each operation of its forward pass is
timed alone. For every set of results that could be saved, the script computes the bytes of the set,
and the seconds of the operations that have to run again, because the backward pass, or another
repeated operation, needs their results. So the best sets of a block are exact; they are combined
over all blocks by dynamic programming. Two things are left out, in both choices alike: memory that
a recomputation needs for a moment, and what runs outside of blocks.
"""

from __future__ import annotations

import argparse
import operator
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from harness import keep
from torch import fx, nn
from torch.fx.experimental.proxy_tensor import make_fx

from bigtrain.activations.recompute import SAVED_ATTENTION, SAVED_PRODUCTS
from bigtrain.models.gpt import Block, GPTConfig

ROWS, BLOCKS = 8, 8
CONFIG = GPTConfig(num_layers=BLOCKS, width=768, num_heads=12, sequence_length=128, vocab_size=256)
REPEATS = 15
BUDGETS = 40
"""The number of budgets, evenly spread between the least and the most bytes."""
Point = tuple[int, float]
"""Bytes that are saved, and seconds of what is recomputed."""


@dataclass
class Operation:
    """An operation of a block's forward pass."""

    name: str
    node: fx.Node
    nbytes: int
    """Bytes of its results."""
    seconds: float
    sources: frozenset[int]
    """The indices of the operations whose results it reads."""
    is_needed: bool = False
    """Whether the backward pass reads one of its results."""


def main() -> None:
    """Compute both choices for all budgets, and print the differences."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    torch.manual_seed(0)
    operations, input_bytes = operations_of(Block(CONFIG))
    by_operation = undominated(sets_of(operations, input_bytes))
    policies = policies_of(operations, input_bytes)
    forward = sum(op.seconds for op in operations)
    grid, finest = spread(list(policies.values()), BLOCKS), spread(by_operation, BLOCKS)
    rows = list(differences(grid, finest, BLOCKS * 3 * forward))
    shares = [row["share_of_step"] for row in rows]
    document = {
        "model": {"blocks": BLOCKS, "rows": ROWS, "sequence_length": CONFIG.sequence_length},
        "operations": [
            {"name": op.name, "bytes": op.nbytes, "seconds": op.seconds, "needed": op.is_needed}
            for op in operations
        ],
        "policies": {
            name: {"bytes": saved, "seconds": seconds}
            for name, (saved, seconds) in policies.items()
        },
        "sets_undominated": len(by_operation),
        "lost_share_of_step": {"median": statistics.median(shares), "most": max(shares)},
        "rows": rows,
    }
    for name, (saved, seconds) in policies.items():
        print(f"{name}: {saved / 2**20:.1f} MiB a block, {1000 * seconds:.2f} ms again")
    print(
        f"by blocks, a step is slower by {100 * statistics.median(shares):.1f} % (median of "
        f"{len(rows)} budgets), at most {100 * max(shares):.1f} %"
    )
    keep(options.output, document)


def operations_of(block: nn.Module) -> tuple[list[Operation], int]:
    """Return the operations of a block's forward pass, and the bytes of the block's input."""
    x = torch.randn(ROWS, CONFIG.sequence_length, CONFIG.width)
    names, values = zip(*block.named_parameters(), strict=True)

    def forward(params: Sequence[torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        by_name = dict(zip(names, params, strict=True))
        output: torch.Tensor = torch.func.functional_call(block, by_name, (x,))
        return output

    def both(
        params: Sequence[torch.Tensor], x: torch.Tensor, gradient: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        output = forward(params, x)
        return output, *torch.autograd.grad(output, [x, *params], gradient)

    params = [value.detach().requires_grad_() for value in values]
    inputs = x.clone().requires_grad_()
    steps = len(calls(make_fx(forward)(params, inputs)))
    graph = make_fx(both)(params, inputs, torch.randn_like(x))
    results = Timed(graph).results(params, inputs, torch.randn_like(x))
    return _grouped(calls(graph), steps, results), x.numel() * x.element_size()


def calls(graph: fx.GraphModule) -> list[fx.Node]:
    """Return the operations of a graph, without those that only copy an autograd reference."""
    return [
        node
        for node in graph.graph.nodes
        if node.op == "call_function" and "detach" not in node.name
    ]


class Timed(fx.Interpreter):
    """Runs a graph; each operation is timed alone."""

    def results(self, *args: Any) -> dict[fx.Node, tuple[Any, float]]:
        """Return by node its result and its seconds, the median of `REPEATS`."""
        self._results: dict[fx.Node, tuple[Any, float]] = {}
        flat, _ = torch.utils._pytree.tree_flatten(args)
        with torch.no_grad():
            self.run(*flat, enable_io_processing=False)
        return self._results

    def run_node(self, n: fx.Node) -> Any:
        """Run a node several times."""
        seconds, result = [], None
        for _ in range(REPEATS if n.op == "call_function" else 1):
            began = time.perf_counter()
            result = super().run_node(n)
            seconds.append(time.perf_counter() - began)
        self._results[n] = (result, statistics.median(seconds))
        return result


def _grouped(
    nodes: Sequence[fx.Node], steps: int, results: dict[fx.Node, tuple[Any, float]]
) -> list[Operation]:
    """Return the operations of the first `steps` nodes; views belong to the results they view."""
    operations: list[Operation] = []
    owners: dict[fx.Node, frozenset[int]] = {}  # by node, the operations whose results it reads
    storages: dict[int, int] = {}
    for node in nodes[:steps]:
        result, seconds = results[node]
        sources = _owners(node, owners)
        tensors = [t for t in torch.utils._pytree.tree_leaves(result) if _is_tensor(t)]
        fresh = [t for t in tensors if t.untyped_storage().data_ptr() not in storages]
        is_view = node.target is operator.getitem or _views(node)
        if is_view or not fresh:
            owners[node] = sources
            continue
        number = len(operations)
        nbytes = sum(t.numel() * t.element_size() for t in fresh)
        operations.append(Operation(node.name, node, nbytes, seconds, sources))
        owners[node] = frozenset([number])
    for node in nodes[steps:]:
        for number in _owners(node, owners):
            operations[number].is_needed = True
    return operations


def _owners(node: fx.Node, owners: dict[fx.Node, frozenset[int]]) -> frozenset[int]:
    found: frozenset[int] = frozenset()
    pending = list(node.all_input_nodes)
    while pending:
        source = pending.pop()
        if source in owners:
            found |= owners[source]
        elif source.op == "call_function" and "detach" in source.name:
            pending += source.all_input_nodes
    return found


def _is_tensor(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor)


def _views(node: fx.Node) -> bool:
    """Whether an operation returns a view of its input, by its schema."""
    schema = getattr(node.target, "_schema", None)
    return schema is not None and any(r.alias_info is not None for r in schema.returns)


def sets_of(operations: Sequence[Operation], input_bytes: int) -> list[Point]:
    """Return the bytes and the repeated seconds of every set of saved results."""
    count = len(operations)
    chosen = np.arange(2**count)
    saved = [(chosen >> number) & 1 == 1 for number in range(count)]
    again = [np.zeros(2**count, dtype=bool) for _ in operations]
    for number in reversed(range(count)):
        wanted = np.full(2**count, operations[number].is_needed)
        for user in range(number + 1, count):
            if number in operations[user].sources:
                wanted |= again[user]
        again[number] = wanted & ~saved[number]
    nbytes = np.full(2**count, input_bytes, dtype=np.int64)
    seconds = np.zeros(2**count)
    for operation, is_saved, repeats in zip(operations, saved, again, strict=True):
        nbytes += operation.nbytes * is_saved
        seconds += operation.seconds * repeats
    return list(zip(nbytes.tolist(), seconds.tolist(), strict=True))


def policies_of(operations: Sequence[Operation], input_bytes: int) -> dict[str, Point]:
    """Return the bytes and the repeated seconds of bigtrain's policies for a block.

    A recomputation runs all operations whose results are not saved, up to the last one that the
    backward pass needs.
    """
    last = max(number for number, op in enumerate(operations) if op.is_needed)
    costly = [_kind(op.node) in (*SAVED_PRODUCTS, *SAVED_ATTENTION) for op in operations]
    kept = {
        "keep": [op.is_needed for op in operations],
        "selective": [is_costly and number <= last for number, is_costly in enumerate(costly)],
        "full": [False] * len(operations),
    }
    points = {}
    for name, saved in kept.items():
        repeated = name != "keep"
        points[name] = (
            input_bytes + sum(op.nbytes for op, s in zip(operations, saved, strict=True) if s),
            sum(
                op.seconds
                for number, (op, s) in enumerate(zip(operations, saved, strict=True))
                if repeated and not s and number <= last
            ),
        )
    return points


def _kind(node: fx.Node) -> str:
    packet = getattr(node.target, "_overloadpacket", node.target)
    return str(getattr(packet, "__name__", packet))


def undominated(points: Sequence[Point]) -> list[Point]:
    """Return the points than which no other has fewer bytes and fewer seconds."""
    front: list[Point] = []
    for point in sorted(points):
        if not front or point[1] < front[-1][1]:
            front.append(point)
    return front


def spread(choices: Sequence[Point], blocks: int) -> list[Point]:
    """Return the best points of a model whose blocks each take one of the choices."""
    front: list[Point] = [(0, 0.0)]
    for _ in range(blocks):
        front = undominated([(a + c, b + d) for a, b in front for c, d in choices])
    return front


def differences(
    grid: Sequence[Point], finest: Sequence[Point], step: float
) -> list[dict[str, float]]:
    """Return for each budget the repeated seconds of both choices.

    Args:
        grid: the points of the choice by blocks.
        finest: the points of the choice by operations.
        step: the seconds of a step's computation, for the share.
    """
    least, most = grid[0][0], grid[-1][0]
    rows = []
    for number in range(BUDGETS + 1):
        budget = least + (most - least) * number // BUDGETS
        coarse, fine = (
            min(seconds for saved, seconds in points if saved <= budget)
            for points in (grid, finest)
        )
        rows.append(
            {
                "budget_bytes": budget,
                "by_blocks_seconds": coarse,
                "by_operations_seconds": fine,
                "share_of_step": (coarse - fine) / (step + fine),
            }
        )
    return rows


if __name__ == "__main__":
    main()
