"""AdamW in little memory: moments in bf16, parameters in bf16 without an fp32 copy, no big copies.

A parameter is updated a piece at a time, so that what the step needs beside the states is bounded
by the piece and not by the largest parameter. Numbers that are kept in bf16 are written with
stochastic rounding: up or down with the odds of the distance, so that changes smaller than the
gap between two bf16 numbers (1/256 of the value) are kept on average instead of lost. It matters
for the second moment just as much: it shrinks by a thousandth a step, which plain rounding undoes.

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
from bigtrain.tensors.shards import local_tensor

CHUNK_ELEMENTS = 1 << 18
"""Elements that are updated at a time on a CPU: 1 MiB for each temporary tensor in fp32."""
ACCELERATOR_CHUNK_ELEMENTS = 1 << 22
"""The same on an accelerator, 16 MiB: its kernels then take longer than their launches."""

MOMENTS = ("exp_avg", "exp_avg_sq")


def chunks(elements: int, device: torch.device) -> Iterator[slice]:
    """The stretches in which so many elements are updated."""
    size = ACCELERATOR_CHUNK_ELEMENTS if is_accelerator(device) else CHUNK_ELEMENTS
    for start in range(0, elements, size):
        yield slice(start, min(start + size, elements))


class LeanAdamW(torch.optim.Optimizer):
    """AdamW on pieces of the parameters; with fp32 state it is torch's within rounding.

    A DTensor's local part is updated, of any shape; nothing is exchanged.

    Args:
        parameters: floating-point, of any dtype; computed with in fp32 (fp64 where they are that).
        lr: learning rate; each group's `lr` is read at every step.
        betas: decay of the first and second moment.
        eps: added to the root of the second moment.
        weight_decay: decoupled, times the learning rate.
        state: dtype of the moments: torch.float32 or torch.bfloat16.
        stochastic_rounding: how parameters and moments in bf16 are written; False rounds to the
            nearest.
        seed: of the rounding, whose numbers are a function of seed, step and the parameter's
            shape alone: a resumed run draws the same ones, and no other generator is moved.
    """

    state_keys: ClassVar[frozenset[str]] = frozenset({"step", *MOMENTS})
    """What the state of a parameter consists of, as it is saved."""

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
            closure: computes the loss again, as for torch's optimizers; most have none.

        Returns:
            What the closure gave, or None.
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
        # Memory in another order, or with gaps (rare): a copy of this one parameter.
        contiguous = (
            own_values if is_dense(own_values) else torch.empty_like(own_values).copy_(own_values)
        )
        gradient = local_tensor(parameter.grad).detach()  # type: ignore[arg-type]
        if gradient.stride() != contiguous.stride():
            gradient = torch.empty_like(contiguous).copy_(gradient)
        values, gradients = flat_view(contiguous), flat_view(gradient)
        for part in chunks(len(values), values.device):
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
        """Make the moments, or bring loaded ones to the dtype in which they are held."""
        dtype = torch.bfloat16 if self._state_dtype == torch.bfloat16 else work
        for key in MOMENTS:
            if key not in slots:
                slots[key] = torch.zeros_like(parameter.detach(), dtype=dtype)
            elif slots[key].dtype != dtype:
                slots[key] = slots[key].to(dtype)

    def _read(
        self, slots: MutableMapping[str, Any], key: str, part: slice, work: torch.dtype
    ) -> Tensor:
        """A piece of a moment to compute with: the state itself where the dtype is the same."""
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
        """A generator that begins anew at every parameter and step.

        Parameters of one shape draw the same numbers, so that copies of a tied parameter, which
        stages of a pipeline update each for itself, stay equal.
        """
        numbers = [self._seed, count, *parameter.shape]
        if isinstance(parameter, DTensor):  # other parts of one parameter draw other numbers
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
    """Copy values into a tensor of their own dtype or a smaller one.

    Args:
        target: of any floating-point dtype; with the values' own memory nothing is done.
        value: of the same shape; used up where it is rounded.
        generator: rounds to bf16 up or down by chance; None rounds to the nearest.
    """
    if target.dtype == value.dtype:
        if target.untyped_storage()._cdata != value.untyped_storage()._cdata:
            target.copy_(value)
        return
    if generator is not None and target.dtype == torch.bfloat16:
        value = stochastically_rounded(value.float(), generator)
    target.copy_(value)


def stochastically_rounded(value: Tensor, generator: torch.Generator) -> Tensor:
    """Round each number to one of its two neighbours in bf16, with the odds of the distances.

    Args:
        value: fp32, of any shape, contiguous.
        generator: on the same device; one number is drawn for each element.

    Returns:
        fp32 tensor of the same shape, whose numbers are all bf16 numbers; on average `value`.
    """
    # bf16 is the upper half of fp32: a random lower half is added, and what carries over counts.
    bits = torch.empty_like(value, dtype=torch.int32).random_(0, 1 << 16, generator=generator)
    rounded = bits.add_(value.view(torch.int32)).bitwise_and_(-(1 << 16)).view(torch.float32)
    # What is not a number must stay so, whatever its bits carry over into.
    return rounded.masked_fill_(value.isnan(), math.nan)
