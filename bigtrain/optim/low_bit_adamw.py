"""AdamW with moments of 8 or 4 bits an element, in the formats of torchao.

A block of consecutive elements (256 with 8 bits, 128 with 4) is divided by its largest absolute
value. Each quotient is stored as the code of the nearest of 256 or 16 values, which are denser
where moments are small. The update itself is in fp32, on chunks of a parameter. torchao's own step
is compiled, which needs a C++ compiler on a CPU, and temporary memory that cannot be measured. The
step of this module runs without compilation.

Memory: 2.03 bytes of state for each parameter with 8 bits and 1.06 with 4, compared with 8 in fp32.
As in torchao, parameters of fewer than 4096 elements, or with an incomplete block, have fp32
moments.

Sources: Dettmers et al. 2022, 8-bit Optimizers via Block-wise Quantization (arXiv 2110.02861),
sections 2 and 3; Li et al. 2023, Memory Efficient Optimizers with 4-bit States (arXiv 2309.01507).
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Iterable, MutableMapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from bigtrain.errors import ConfigError
from bigtrain.optim.lean_adamw import MOMENTS, LeanAdamW, chunks
from bigtrain.tensors.memory_format import flat_view
from bigtrain.tensors.shards import local_tensor

QUANTIZATION_BLOCK = {8: 256, 4: 128}
"""The number of elements that share a scale, by the bits of an element, as in torchao."""

MIN_QUANTIZED_ELEMENTS = 4096
"""Elements of the smallest parameter whose moments are quantized."""


class LowBitAdamW(LeanAdamW):
    """`LeanAdamW` with moments of 8 or 4 bits.

    The state has `exp_avg` and `exp_avg_sq` as uint8 codes, and for each of them the fp32 scales of
    the blocks. With 8 bits the codes have the shape of the parameter. With 4 bits they are flat,
    with two codes to a byte.

    Args:
        parameters: see `LeanAdamW`. They have to be whole, because blocks are counted from the
            first element of a parameter.
        bits: bits of an element, 8 or 4.
        more: lr, betas, eps, weight_decay, stochastic_rounding and seed of `LeanAdamW`.

    Raises:
        ConfigError: torchao is not installed.
    """

    state_keys: ClassVar[frozenset[str]] = frozenset({"step", *MOMENTS})

    def __init__(self, parameters: Iterable[nn.Parameter], bits: int, **more: Any) -> None:
        self._maps = quantization_maps(bits)
        self._tables: dict[tuple[str, torch.device], tuple[Tensor, Tensor]] = {}
        self._bits, self._block = bits, QUANTIZATION_BLOCK[bits]
        super().__init__(parameters, **more)
        keys = (f"{key}_scale{bits}" for key in MOMENTS)
        self.state_keys = frozenset({*LeanAdamW.state_keys, *keys})  # type: ignore[misc]

    def _store_moments(
        self, parameter: Tensor, slots: MutableMapping[str, Any], work: torch.dtype
    ) -> None:
        size = parameter.numel()
        if size < MIN_QUANTIZED_ELEMENTS or size % self._block:
            super()._store_moments(parameter, slots, work)
            return
        device = parameter.device
        for key in MOMENTS:
            before = slots.get(key)
            if before is not None and not before.is_floating_point():
                continue
            if self._bits == 8:
                slots[key] = torch.zeros_like(parameter.detach(), dtype=torch.uint8)
            else:
                slots[key] = torch.zeros(size // 2, dtype=torch.uint8, device=device)
            slots[self._scale(key)] = torch.zeros(size // self._block, device=device)
            if before is not None:  # loaded moments of a run without quantization
                elements = flat_view(before)
                for part in chunks(elements):
                    self._write(slots, key, part, elements[part].to(work), None)

    def _scale(self, key: str) -> str:
        return f"{key}_scale{self._bits}"

    def _read(
        self, slots: MutableMapping[str, Any], key: str, part: slice, work: torch.dtype
    ) -> Tensor:
        if self._scale(key) not in slots:
            return super()._read(slots, key, part, work)
        scales = slots[self._scale(key)][part.start // self._block : part.stop // self._block]
        codes = flat_view(local_tensor(slots[key]))
        if self._bits == 8:
            codes = codes[part]
        else:
            pairs = codes[part.start // 2 : part.stop // 2]
            codes = torch.stack((pairs >> 4, pairs & 15), dim=-1).view(-1)
        values, _ = self._table(key, codes.device)
        dequantized = values[codes.int()].view(len(scales), -1).mul_(scales[:, None])
        return dequantized.view(-1).to(work)

    def _write(
        self,
        slots: MutableMapping[str, Any],
        key: str,
        part: slice,
        value: Tensor,
        generator: torch.Generator | None,
    ) -> None:
        if self._scale(key) not in slots:
            super()._write(slots, key, part, value, generator)
            return
        blocks = value.float().view(-1, self._block)
        scales = blocks.abs().amax(-1).clamp_(min=1e-12)
        slots[self._scale(key)][part.start // self._block : part.stop // self._block] = scales
        _, middles = self._table(key, value.device)
        blocks = (blocks / scales[:, None]).view(-1)
        codes = torch.bucketize(blocks, middles, right=True, out_int32=True).to(torch.uint8)
        target = flat_view(local_tensor(slots[key]))
        if self._bits == 8:
            target[part] = codes
        else:
            pairs = codes.view(-1, 2)
            target[part.start // 2 : part.stop // 2] = (pairs[:, 0] << 4) | pairs[:, 1]

    def _table(self, key: str, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return the values of the codes, and the midpoints between neighbouring values."""
        if (key, device) not in self._tables:
            values = torch.tensor(self._maps[key], device=device)
            self._tables[key, device] = (values, (values[1:] + values[:-1]) / 2)
        return self._tables[key, device]


def quantization_maps(bits: int) -> dict[str, tuple[float, ...]]:
    """Return the values of torchao's codes in ascending order, for each of `MOMENTS`.

    Args:
        bits: bits of an element, 8 or 4.

    Raises:
        ConfigError: torchao is not installed.
    """
    logger = logging.getLogger("torch.utils._pytree")
    level = logger.level
    try:
        logger.setLevel(logging.ERROR)  # hides the warning of a deprecated call in torchao
        formats = importlib.import_module(f"torchao.optim.subclass_{bits}bit")
    except ImportError as error:
        raise ConfigError(
            f"optim.name=adamw_{bits}bit needs the formats of torchao, and torchao cannot "
            f"be imported ({error}). Run: pip install 'bigtrain[lowbit]', or set "
            "optim.state=bf16 with optim.name=adamw."
        ) from None
    finally:
        logger.setLevel(level)
    return {
        "exp_avg": tuple(formats.get_qmap_signed()),
        "exp_avg_sq": tuple(formats.get_qmap_unsigned()),
    }
