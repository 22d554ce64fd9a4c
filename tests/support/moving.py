"""Shared by the tests of moved activations: nets of blocks, a training loop, a delayed carrier."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bigtrain.activations.offload import ActivationOffloader
from bigtrain.models.gpt import GPT, GPTConfig
from bigtrain.tensors.transfer import WaitFn

CPU = torch.device("cpu")
BLOCK = 720896
"""Bytes that one `Mixed` block moves: its input, two tensors of 4 widths, LayerNorm's output, a
mask.
"""


class Residual(nn.Module):
    """A block of a vision model: BatchNorm, in-place ReLU and in-place addition."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.first = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(width)
        self.second = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.last = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        out = self.last(self.second(self.relu(self.norm(self.first(x)))))
        out += x
        return self.relu(out)


class Mixed(nn.Module):
    """A block of a transformer, with dropout."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.down(F.gelu(self.up(self.norm(x)))))


class Gates(nn.Module):
    """An LSTM: its gates are parts of one storage and are changed in place one after another."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(64, 64, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        # oneDNN's kernel has no gates, and none for bf16 without AVX-512.
        with torch.backends.mkldnn.flags(enabled=False, allow_tf32=None):
            return x + self.lstm(x)[0]


class Net(nn.Module):
    """Blocks in sequence; `around` runs each of them."""

    def __init__(self, blocks: Sequence[nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)
        self.around: Callable[[nn.Module, Callable[[], Any]], Any] = run_block

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = self.around(block, lambda b=block, x=x: b(x))
        return x


def run_block(_: nn.Module, compute: Callable[[], Any]) -> Any:
    """Run a block without moving anything."""
    return compute()


def mixed(count: int = 6) -> tuple[Net, Tensor]:
    """A net of `Mixed` blocks and its input (8, 32, 64)."""
    return Net([Mixed() for _ in range(count)]), torch.randn(8, 32, 64)


def residual(count: int = 4) -> tuple[Net, Tensor]:
    """A net of `Residual` blocks and its input (4, 8, 16, 16)."""
    return Net([Residual() for _ in range(count)]), torch.randn(4, 8, 16, 16)


def gates(count: int = 3) -> tuple[Net, Tensor]:
    """A net of `Gates` blocks and its input (8, 16, 64)."""
    return Net([Gates() for _ in range(count)]), torch.randn(8, 16, 64)


def gpt() -> tuple[nn.Module, Tensor]:
    """A GPT of four blocks with dropout, and tokens (4, 32)."""
    config = GPTConfig(sequence_length=32, num_layers=4, width=64, dropout=0.1)
    return GPT(config), torch.randint(256, (4, 32))


def wrap(model: nn.Module, around: Callable[..., Any]) -> None:
    """Run all blocks of a `Net` or of a GPT by `around`."""
    if isinstance(model, Net):
        model.around = around
        return
    for block in model.blocks:  # type: ignore[union-attr]
        inner = block.forward
        block.forward = lambda *a, b=block, f=inner: around(b, lambda: f(*a))


def train(
    make: Callable[[], Any], mover: ActivationOffloader | None, *, bf16: bool = False
) -> list[Tensor]:
    """The losses, gradients and weights of three steps of two micro-batches."""
    torch.manual_seed(0)
    model, batch = make()
    if mover is not None:
        wrap(model, mover.offload)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    seen = []
    for _ in range(3):
        for _ in range(2):
            with torch.autocast("cpu", torch.bfloat16) if bf16 else nullcontext():
                loss = model(batch).float().square().mean()
            loss.backward()
            seen.append(loss.detach())
        seen += [p.grad.clone() for p in model.parameters()]
        optimizer.step()
        optimizer.zero_grad()
    return seen + [t.clone() for t in model.state_dict().values()]


def same(left: list[Tensor], right: list[Tensor]) -> bool:
    """Whether two lists hold equal tensors, bit for bit."""
    return len(left) == len(right) and all(map(torch.equal, left, right))


class LateCarrier:
    """Copies in memory, as late as possible, and records its calls."""

    def __init__(self) -> None:
        self.told: list[str] = []
        self.spots: dict[int, Tensor | None] = {}
        self.under_way = self.most_under_way = 0

    def copy_out(self, source: Tensor) -> tuple[Any, WaitFn]:
        location = max(self.spots, default=-1) + 1
        self.spots[location] = None

        def copy() -> None:
            self.spots[location] = source.clone()

        self.told.append(f"put {location}")
        return location, self._later(copy)

    def copy_in(self, location: Any, target: Tensor) -> WaitFn:
        target.fill_(255)  # NaN
        self.told.append(f"take {location}")
        return self._later(lambda: target.copy_(self.spots[location]))

    def _later(self, copy: Callable[[], Any]) -> WaitFn:
        self.under_way += 1
        self.most_under_way = max(self.most_under_way, self.under_way)

        def wait() -> None:
            self.under_way -= 1
            copy()

        return wait

    def stored_bytes(self, nbytes: int) -> int:
        return nbytes

    def free(self, location: Any) -> None:
        del self.spots[location]

    def close(self) -> None:
        self.told.append("close")


class Saving(torch.autograd.Function):
    """Saves the tensors it receives, and appends the unpacked ones to `seen` in the
    backward pass.
    """

    @staticmethod
    def forward(ctx, x: Tensor, seen: list, *tensors: Tensor) -> Tensor:
        ctx.save_for_backward(*tensors)
        ctx.seen, ctx.rest = seen, len(tensors)
        return x.clone()

    @staticmethod
    def backward(ctx, gradient: Tensor):
        ctx.seen += ctx.saved_tensors
        return (gradient, None, *[None] * ctx.rest)


def save_and_leave(
    mover: ActivationOffloader, module: nn.Module, *tensors: Tensor
) -> tuple[Tensor, list]:
    """Run a block that saves these tensors and a block after it, so that the tensors have moved."""
    seen: list[Tensor] = []
    x = torch.ones(1, requires_grad=True)
    y = mover.offload(module, lambda: Saving.apply(x, seen, *tensors))
    return mover.offload(module, lambda: y * 2), seen
