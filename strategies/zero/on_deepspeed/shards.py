"""The flat fp32 pieces that DeepSpeed's two optimizers update, and changes that save memory.

At every stage a rank updates a few flat pieces. It updates at most one flat slice of each
parameter, which is in one of these pieces.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from bigtrain.strategies.deepspeed_adapter import (
    add_up_in_one_buffer,
    bucket_sender,
    link_parameters,
    replace_bucketing,
    replace_end_of_backward,
    replace_gradient_of_piece,
    replace_reduction,
    set_cut_norm,
    set_flat_norm,
    skip_finite_checks,
    take_cut_from_host,
    take_flat_from_host,
    update_cut_parameters,
)
from bigtrain.strategies.zero.on_deepspeed.build import BuiltEngine
from bigtrain.strategies.zero.on_deepspeed.layout import overlap, rank_share


@dataclass(frozen=True)
class ShardSlice:
    """The elements of one parameter that this rank updates."""

    piece: int
    """The number of the flat piece that has these elements."""
    offset: int
    """The position of the first element in the flat piece."""
    start: int
    """The position of the first element in the flattened parameter."""
    length: int

    def of(self, flat: Tensor) -> Tensor:
        """Return these elements of a tensor with the layout of the piece, as a 1-dim view."""
        return flat.view(-1)[self.offset : self.offset + self.length]

    def of_parameter(self, whole: Tensor) -> Tensor:
        """Return these elements of a tensor with the shape of the parameter, as a 1-dim tensor."""
        return whole.reshape(-1)[self.start : self.start + self.length]


class OptimizerShards:
    """The flat pieces of one of DeepSpeed's two ZeRO optimizers, with a subclass for each."""

    def __init__(self, zero: Any, built: BuiltEngine) -> None:
        self.zero = zero
        self.slices: dict[int, ShardSlice] = {}
        """The slice of each parameter of which this rank has elements, by the parameter's id."""
        self.piece_of: dict[int, int] = {}
        """The number of each parameter's piece, by the parameter's id; equal on all ranks."""
        self._built = built

    @property
    def pieces(self) -> list[Tensor]:
        """The flat fp32 tensors that the optimizer updates."""
        raise NotImplementedError

    def gradient(self, piece: int) -> Tensor | None:
        """Return the averaged gradient of a piece; None if it has none.

        Valid between the last backward pass and the step.
        """
        raise NotImplementedError

    def update_parameters(self) -> None:
        """Copy the values of the pieces to the parameters. Collective."""
        raise NotImplementedError

    def set_norm(self, norm: Tensor) -> None:
        """Let DeepSpeed clip by this norm.

        DeepSpeed's norm is computed in fp64, for which whole gradients are copied.
        """
        raise NotImplementedError

    def clear(self) -> None:
        """Clear the gradients after a step.

        DeepSpeed only overwrites gradients. A parameter without a gradient in the next step would
        be updated by its old gradient.
        """
        raise NotImplementedError

    def restore_fp32(self) -> None:
        """Copy the initial fp32 values to the pieces; bf16 parameters are these values, rounded."""
        exact = self._built.fp32_values
        with torch.no_grad():
            for key, flat_slice in self.slices.items():
                if key in exact:
                    start, values = exact[key]
                    slice_values = values[flat_slice.start - start :][: flat_slice.length]
                    self.slice_of(self.pieces, flat_slice).copy_(slice_values)
        exact.clear()

    def _begin_state(self, groups: Sequence[int]) -> None:
        """Create the state of an optimizer that has state before its first step, such as Adagrad.

        DeepSpeed makes a new optimizer with a single parameter group. Here the user's optimizer
        replaces it.

        Args:
            groups: the parameter group of each piece.
        """
        if self._built.begin_state is None or self._built.optimizer is None:
            return
        optimizer = self.zero.optimizer = self._built.optimizer
        for group in optimizer.param_groups:
            group["params"] = []
        for piece, group_index in zip(self.pieces, groups, strict=True):
            optimizer.param_groups[group_index]["params"].append(piece)
        self._built.begin_state()

    def _sent(self, parameters: Iterable[nn.Parameter]) -> list[StorageWeakRef]:
        """Return references to gradients that are about to be sent; none without tracking."""
        if not self._built.tracking():
            return []
        gradients = [p.grad for p in parameters if p.grad is not None]
        return [
            StorageWeakRef(g.untyped_storage())  # type: ignore[no-untyped-call]
            for g in gradients
            if g.untyped_storage().nbytes() == g.nbytes
        ]

    @staticmethod
    def slice_of(flats: list[Tensor], flat_slice: ShardSlice) -> Tensor:
        """Return a slice as a view of its piece's flat tensor."""
        return flat_slice.of(flats[flat_slice.piece].detach())


def _until_gone(sent: list[StorageWeakRef]) -> None:
    """Wait until gloo's thread has released tensors, a moment after they have been sent.

    Otherwise the tracked memory would have them in one run and not in the next.
    """
    if not sent:
        return
    time.sleep(1e-3)  # for the copies that gloo makes itself
    for reference in sent:
        for _ in range(50):
            if reference.expired():  # type: ignore[no-untyped-call]
                break
            time.sleep(2e-4)


class FlatShards(OptimizerShards):
    """Stages 1 and 2: one flat buffer for each parameter group, an equal share for each rank."""

    def __init__(self, zero: Any, built: BuiltEngine) -> None:
        super().__init__(zero, built)
        for number, group in enumerate(zero.round_robin_bit16_groups):
            size = int(zero.partition_size[number])
            share = rank_share(size, dist.get_rank(group=zero.real_dp_process_group[number]))
            offsets = zero.round_robin_bit16_offsets[number]
            for parameter, offset in zip(group, offsets, strict=True):
                self.piece_of[id(parameter)] = number
                part = overlap(offset, offset + parameter.numel(), share)
                if part:
                    self.slices[id(parameter)] = ShardSlice(
                        piece=number,
                        offset=part.start - share.start,
                        start=part.start - offset,
                        length=len(part),
                    )
        if not zero.cpu_offload:
            if zero.dtype == torch.float32:
                self._update_in_place()
            self._reduce_into_one_buffer()
        else:
            skip_finite_checks(zero)
        self._reduce_the_rest()
        self.restore_fp32()
        self._begin_state(list(range(len(self.pieces))))

    def _update_in_place(self) -> None:
        """Update fp32 parameters themselves, and drop their fp32 copy (4P/N bytes)."""
        zero = self.zero
        for number, group in enumerate(zero.optimizer.param_groups):
            rank = dist.get_rank(group=zero.real_dp_process_group[number])
            share = zero.parallel_partitioned_bit16_groups[number][rank].detach().requires_grad_()
            before = zero.single_partition_of_fp32_groups[number]
            if before in zero.optimizer.state:
                zero.optimizer.state[share] = zero.optimizer.state.pop(before)
            zero.single_partition_of_fp32_groups[number] = share
            group["params"] = [share]
        link_parameters(zero)

    def _reduce_into_one_buffer(self) -> None:
        """Add reduced gradients to this rank's flat fp32 shard at once, and free all of them.

        DeepSpeed does this only for bf16 gradients that are accumulated in fp32. Otherwise it
        copies the gradients of its shard into one buffer, and flattens the buffer into another one.
        """
        zero = self.zero
        add_up_in_one_buffer(zero)

        def reduce_and_drop(comm_dtype: torch.dtype | None = None) -> None:
            done = [
                zero.bit16_groups[group][index]
                for dtype, bucket in zero.ipg_buckets.items()
                if comm_dtype in (None, dtype)
                for group, index, _ in bucket.params
            ]
            sent = self._sent(done)
            reduce(comm_dtype=comm_dtype)
            for parameter in done:
                parameter.grad = None
            _until_gone(sent)

        def add_and_send(parameter: nn.Parameter, group: int) -> None:
            add(parameter, group)
            for dtype, bucket in zero.ipg_buckets.items():
                if bucket.elements >= zero.reduce_bucket_size:
                    zero.reduce_ipg_grads(comm_dtype=dtype)

        reduce = replace_reduction(zero, reduce_and_drop)
        add = replace_bucketing(zero, add_and_send)

    def _reduce_the_rest(self) -> None:
        """Also reduce gradients of parameters that the last micro-batch of a step does not use.

        DeepSpeed reduces only gradients that the last micro-batch makes.
        """
        zero = self.zero

        def finish_all() -> None:
            if zero.is_gradient_accumulation_boundary():
                begun = {key for key, done in enumerate(zero.params_already_reduced) if done}
                for bucket in zero.ipg_buckets.values():
                    begun.update(key for _, _, key in bucket.params)
                for number, group in enumerate(zero.bit16_groups):
                    for parameter in group:
                        waiting = zero.get_gradient_for_reduction(parameter) is not None
                        if waiting and zero.get_param_id(parameter) not in begun:
                            zero.reduce_independent_p_g_buckets_and_remove_grads(parameter, number)
                if zero.cpu_offload:
                    take_flat_from_host(zero, skipped=begun)
            finish()

        finish = replace_end_of_backward(zero, finish_all)

    def clear(self) -> None:
        """See `OptimizerShards.clear`.

        Without offload, DeepSpeed's step frees the buffer of the gradients, and the first gradient
        after the step makes a new buffer. If there is no step, gradients of later passes would be
        added to the old buffer.
        """
        for number in self.zero.averaged_gradients:
            self.zero.averaged_gradients[number] = None
        if self.zero.cpu_offload:
            for piece in self.zero.single_partition_of_fp32_groups:
                if piece.grad is not None:
                    piece.grad.zero_()
            for gradient in self.zero.accumulated_grads_in_cpu.values():
                gradient.zero_()

    @property
    def pieces(self) -> list[Tensor]:
        """See `OptimizerShards.pieces`."""
        return list(self.zero.single_partition_of_fp32_groups)

    def gradient(self, piece: int) -> Tensor | None:
        """See `OptimizerShards.gradient`."""
        if self.zero.cpu_offload:
            grad: Tensor | None = self.zero.single_partition_of_fp32_groups[piece].grad
            return grad
        return getattr(self.zero.averaged_gradients.get(piece), "flat_partition", None)

    def update_parameters(self) -> None:
        """See `OptimizerShards.update_parameters`."""
        self.zero.update_lp_params()

    def set_norm(self, norm: Tensor) -> None:
        """See `OptimizerShards.set_norm`."""
        set_flat_norm(self.zero, norm)


class PartitionedShards(OptimizerShards):
    """Stage 3: each parameter is cut into as many equal pieces as there are ranks."""

    def __init__(self, zero: Any, built: BuiltEngine) -> None:
        super().__init__(zero, built)
        self._offsets = [0]
        for group in zero.fp16_groups:
            for parameter in group:
                piece, offset, size = zero.grad_position[zero.get_param_id(parameter)]
                self.piece_of[id(parameter)] = piece
                start = size * dist.get_rank(group=parameter.ds_process_group)
                length = min(size, parameter.ds_numel - start)
                if length > 0:
                    self.slices[id(parameter)] = ShardSlice(piece, offset, start, length)
            self._offsets.append(self._offsets[-1] + sum(p.partition_numel() for p in group))
        self._away = zero.offload_optimizer
        if not self._away:
            if zero.dtype == torch.float32:
                self._update_in_place()
            replace_gradient_of_piece(zero, self._lend_gradient)
            self._send_when_full()
        else:
            self._take_all_from_host()
        self.restore_fp32()
        self._begin_state([zero.sub_group_to_group_id[n] for n in range(len(self.pieces))])
        for group in zero.optimizer.param_groups if built.begin_state is not None else ():
            group["params"] = []  # DeepSpeed's step inserts one piece after the other

    def _send_when_full(self) -> None:
        """Reduce a full bucket at once; DeepSpeed waits until the next gradient is made."""
        zero = self.zero
        send = bucket_sender(zero)

        def add_and_send(parameter: nn.Parameter) -> None:
            add(parameter)
            for dtype, bucket in zero.ipg_buckets.items():
                if bucket.elements >= zero.reduce_bucket_size:
                    sent = self._sent(bucket.params)
                    send(dtype)
                    _until_gone(sent)

        add = replace_bucketing(zero, add_and_send)

    def _take_all_from_host(self) -> None:
        """Let the step use the sums over all micro-batches; DeepSpeed uses the last one only."""
        zero = self.zero

        def finish_all() -> None:
            finish()
            if zero.is_gradient_accumulation_boundary():
                take_cut_from_host(zero)

        finish = replace_end_of_backward(zero, finish_all)

    def clear(self) -> None:
        """See `OptimizerShards.clear`."""
        zero = self.zero
        zero.grad_partitions_flat_buffer.zero_()
        if self._away:
            for piece in zero.fp32_partitioned_groups_flat:
                if piece.grad is not None:
                    piece.grad.zero_()

    def _update_in_place(self) -> None:
        """Update fp32 parameters themselves, and drop their fp32 copy (4P/N bytes)."""
        zero = self.zero
        for number, before in enumerate(zero.fp32_partitioned_groups_flat):
            piece = zero.fp16_partitioned_groups_flat[number].detach().requires_grad_()
            piece.ds_id = before.ds_id
            if before in zero.optimizer.state:
                zero.optimizer.state[piece] = zero.optimizer.state.pop(before)
            zero.fp32_partitioned_groups_flat[number] = piece

    def _lend_gradient(self, piece: int) -> None:
        """Set a piece's gradient before the step: a view if the dtypes agree, otherwise a cast."""
        flat = self.zero.fp32_partitioned_groups_flat[piece]
        gradient = self.gradient(piece)
        flat.grad = None if gradient is None else gradient.to(flat.dtype)
        self.zero.averaged_gradients[piece] = None

    @property
    def pieces(self) -> list[Tensor]:
        """See `OptimizerShards.pieces`."""
        return list(self.zero.fp32_partitioned_groups_flat)

    def gradient(self, piece: int) -> Tensor | None:
        """See `OptimizerShards.gradient`."""
        if self._away:
            grad: Tensor | None = self.zero.fp32_partitioned_groups_flat[piece].grad
            return grad
        start, stop = self._offsets[piece], self._offsets[piece + 1]
        flat: Tensor = self.zero.grad_partitions_flat_buffer
        return flat[start:stop]

    def update_parameters(self) -> None:
        """See `OptimizerShards.update_parameters`."""
        update_cut_parameters(self.zero)

    def set_norm(self, norm: Tensor) -> None:
        """See `OptimizerShards.set_norm`."""
        set_cut_norm(self.zero, norm)
