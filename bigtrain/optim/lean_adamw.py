"""AdamW with little memory: bf16 moments, bf16 parameters without an fp32 copy, small temporaries.

A parameter is updated a chunk at a time, so the temporary tensors of a step are as large as a chunk
and not as the largest parameter. bf16 values are written with stochastic rounding: the nearer of
the two neighbouring bf16 numbers has the higher probability. So changes smaller than the gap
between two bf16 numbers (1/256 of the value) are correct on average instead of lost. The second
moment needs this too: it shrinks by a thousandth a step, which rounding to the nearest would undo.

Sources: Loshchilov and Hutter 2019, Decoupled Weight Decay Regularization (arXiv 1711.05101),
algorithm 2; Zamirai et al. 2020, Revisiting BFloat16 Training (arXiv 2010.06192), section 4.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, MutableMapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from bigtrain.devices import is_accelerator
from bigtrain.tensors.memory_format import flat_view, is_dense
from bigtrain.tensors.op_cost import loop_starts
from bigtrain.tensors.shards import local_tensor

CHUNK_ELEMENTS = 1 << 18
"""Elements that are updated at a time on a CPU: 1 MiB for each temporary tensor in fp32."""
ACCELERATOR_CHUNK_ELEMENTS = 1 << 22
"""Elements that are updated at a time on an accelerator: 16 MiB for each temporary tensor, so that
kernels take longer than their launches."""

MOMENTS = ("exp_avg", "exp_avg_sq")
"""The keys of the first and the second moment in a parameter's state."""


def chunks(values: Tensor) -> Iterator[slice]:
    """Yield consecutive slices of a flat tensor, which are updated one after the other.

    Of a fake tensor, only a few of the slices are yielded; see `loop_starts`.
    """
    elements = len(values)
    size = ACCELERATOR_CHUNK_ELEMENTS if is_accelerator(values.device) else CHUNK_ELEMENTS
    for start in loop_starts(values, elements, size):
        yield slice(start, min(start + size, elements))


class LeanAdamW(torch.optim.Optimizer):
    """AdamW on chunks of the parameters; with fp32 state, equal to torch's AdamW up to rounding.

    If a parameter is a DTensor, its local tensor is updated, without communication.

    Args:
        parameters: floating-point parameters of any dtype, or parameter groups. The update is
            computed in fp32 (in fp64 for fp64 parameters).
        lr: the learning rate; each group's `lr` is read at every step.
        betas: the decay of the first and of the second moment.
        eps: added to the root of the second moment.
        weight_decay: decoupled weight decay, which is multiplied by the learning rate.
        state: the dtype of the moments, torch.float32 or torch.bfloat16.
        stochastic_rounding: whether bf16 parameters and moments are rounded stochastically; False
            rounds to the nearest.
        seed: the seed of the rounding. The random numbers depend only on the seed, the step, and
            the parameter's shape (and shard), so a resumed run draws the same numbers. The
            generators are the optimizer's own.
    """

    state_keys: ClassVar[frozenset[str]] = frozenset({"step", *MOMENTS})
    """The keys of a parameter's state that are saved."""

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        state: torch.dtype = torch.float32,
        stochastic_rounding: bool = True,
        seed: int = 0,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(parameters, defaults)
        self._state_dtype = state
        self._stochastic = stochastic_rounding
        self._seed = seed
        self._generators: dict[torch.device, torch.Generator] = {}

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the parameters that have a gradient.

        Args:
            closure: computes the loss again, as in torch's optimizers.

        Returns:
            The result of the closure, or None.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group)
        return loss

    def _update(self, parameter: nn.Parameter, group: MutableMapping[str, Any]) -> None:
        slots = self.state[parameter]
        if not slots:
            slots["step"] = torch.tensor(0.0, device="cpu")
        slots["step"] += 1
        count = round(slots["step"].item())
        own_values = local_tensor(parameter).detach()
        compute_dtype = torch.float64 if own_values.dtype == torch.float64 else torch.float32
        self._store_moments(parameter, slots, compute_dtype)
        generator = self._generator(parameter, count) if self._stochastic else None
        # A parameter whose memory has gaps or overlaps is copied; this is rare.
        contiguous = (
            own_values if is_dense(own_values) else torch.empty_like(own_values).copy_(own_values)
        )
        gradient = local_tensor(parameter.grad).detach()  # type: ignore[arg-type]
        if gradient.stride() != contiguous.stride():
            gradient = torch.empty_like(contiguous).copy_(gradient)
        values, gradients = flat_view(contiguous), flat_view(gradient)
        for part in chunks(values):
            self._update_chunk(
                values[part],
                gradients[part].to(compute_dtype),
                slots,
                part,
                count,
                generator,
                group,
            )
        if contiguous is not own_values:
            own_values.copy_(contiguous)

    def _update_chunk(
        self,
        values: Tensor,
        gradient: Tensor,
        slots: MutableMapping[str, Any],
        part: slice,
        count: int,
        generator: torch.Generator | None,
        group: MutableMapping[str, Any],
    ) -> None:
        (beta1, beta2), lr = group["betas"], float(group["lr"])
        mean, mean_square = (self._read(slots, key, part, gradient.dtype) for key in MOMENTS)
        mean.lerp_(gradient, 1 - beta1)
        mean_square.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        denominator = mean_square.sqrt().div_(math.sqrt(1 - beta2**count)).add_(group["eps"])
        updated = values.to(gradient.dtype)
        updated.mul_(1 - lr * group["weight_decay"])
        updated.addcdiv_(mean, denominator, value=-lr / (1 - beta1**count))
        del denominator
        copy_rounded(values, updated, generator)
        del updated
        for key, value in zip(MOMENTS, (mean, mean_square), strict=True):
            self._write(slots, key, part, value, generator)

    def _store_moments(
        self, parameter: Tensor, slots: MutableMapping[str, Any], work: torch.dtype
    ) -> None:
        """Create the moments, or convert loaded moments to the dtype of the state."""
        dtype = torch.bfloat16 if self._state_dtype == torch.bfloat16 else work
        for key in MOMENTS:
            if key not in slots:
                slots[key] = torch.zeros_like(parameter.detach(), dtype=dtype)
            elif slots[key].dtype != dtype:
                slots[key] = slots[key].to(dtype)

    def _read(
        self, slots: MutableMapping[str, Any], key: str, part: slice, work: torch.dtype
    ) -> Tensor:
        """Return a chunk of a moment: a view of the state if the dtype is the same."""
        return flat_view(local_tensor(slots[key]))[part].to(work)

    def _write(
        self,
        slots: MutableMapping[str, Any],
        key: str,
        part: slice,
        value: Tensor,
        generator: torch.Generator | None,
    ) -> None:
        copy_rounded(flat_view(local_tensor(slots[key]))[part], value, generator)

    def _generator(self, parameter: nn.Parameter, count: int) -> torch.Generator:
        """Return a generator that is seeded anew for every parameter and step.

        Parameters of the same shape draw the same numbers. So copies of a tied parameter that
        several stages of a pipeline update stay equal.
        """
        numbers = [self._seed, count, *parameter.shape]
        if isinstance(parameter, DTensor):  # different shards draw different numbers
            places = enumerate(parameter.placements)
            sharded = [axis for axis, placement in places if placement.is_shard()]
            numbers += [parameter.device_mesh.get_local_rank(axis) for axis in sharded]
        mixed = 0
        for number in numbers:
            mixed = (mixed * 1_000_003 + number) % 2**63
        device = local_tensor(parameter).device
        generator = self._generators.setdefault(device, torch.Generator(device))
        return generator.manual_seed(mixed)


def copy_rounded(target: Tensor, value: Tensor, generator: torch.Generator | None) -> None:
    """Copy values into a tensor of the same dtype or of a smaller dtype.

    Args:
        target: a tensor of any floating-point dtype. If it shares memory with `value`, nothing is
            copied.
        value: a tensor of the same shape.
        generator: the generator for stochastic rounding to bf16; None rounds to the nearest.
    """
    if target.dtype == value.dtype:
        if target.untyped_storage()._cdata != value.untyped_storage()._cdata:
            target.copy_(value)
        return
    if generator is not None and target.dtype == torch.bfloat16:
        value = stochastically_rounded(value.float(), generator)
    target.copy_(value)


def stochastically_rounded(value: Tensor, generator: torch.Generator) -> Tensor:
    """Round each element to one of its two bf16 neighbours, with probabilities by distance.

    Args:
        value: fp32, of any shape, contiguous.
        generator: a generator on the same device; one number is drawn for each element.

    Returns:
        An fp32 tensor of the same shape with bf16 numbers, whose expectation is `value`.
    """
    # bf16 is the upper half of fp32. Adding a random lower half carries with the right probability.
    bits = torch.empty_like(value, dtype=torch.int32).random_(0, 1 << 16, generator=generator)
    rounded = bits.add_(value.view(torch.int32)).bitwise_and_(-(1 << 16)).view(torch.float32)
    # The addition may turn nan into a number, so nan is set again.
    return rounded.masked_fill_(value.isnan(), math.nan)
