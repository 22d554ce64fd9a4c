"""The flat fp32 pieces of DeepSpeed's two optimizers, and how they are made leaner.

Whatever the stage, a rank updates a few flat pieces, and each parameter has at most one stretch
of its elements in one of them.
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
    look_at_the_norm_alone,
    replace_bucketing,
    replace_end_of_backward,
    replace_gradient_of_piece,
    replace_reduction,
    set_cut_norm,
    set_flat_norm,
    take_cut_from_host,
    take_flat_from_host,
    update_cut_parameters,
)
from bigtrain.strategies.zero.on_deepspeed.build import BuiltEngine


@dataclass(frozen=True)
class ShardSlice:
    """What this rank updates of a parameter: elements of it, and where they lie."""

    piece: int
    offset: int
    """In the flat piece."""
    start: int
    """In the parameter, its elements one after the other."""
    length: int


class OptimizerShards:
    """The flat pieces of one of DeepSpeed's two optimizers; what differs between the stages."""

    def __init__(self, zero: Any, built: BuiltEngine) -> None:
        self.zero = zero
        self.slices: dict[int, ShardSlice] = {}
        """By the id of a parameter: those that this rank has elements of."""
        self.piece_of: dict[int, int] = {}
        """By the id of a parameter: the piece in which it lies, whoever has its elements."""
        self._built = built

    @property
    def pieces(self) -> list[Tensor]:
        """The fp32 values that the optimizer updates."""
        raise NotImplementedError

    def gradient(self, piece: int) -> Tensor | None:
        """The averaged gradient of a piece, between the backward pass and the step."""
        raise NotImplementedError

    def update_parameters(self) -> None:
        """Let the parameters follow the pieces. Collective."""
        raise NotImplementedError

    def set_norm(self, norm: Tensor) -> None:
        """Let DeepSpeed clip by this norm and work out none itself.

        It would do so in fp64, through copies of whole gradients.
        """
        raise NotImplementedError

    def clear(self) -> None:
        """Forget the gradients after a step: a parameter may get none in the next one.

        DeepSpeed overwrites those that come, and would take the others to be there still.
        """
        raise NotImplementedError

    def restore_fp32(self) -> None:
        """Give the pieces the values that were put aside before they were rounded to bf16."""
        exact = self._built.fp32_values
        with torch.no_grad():
            for key, stretch in self.slices.items():
                if key in exact:
                    start, values = exact[key]
                    mine = values[stretch.start - start :][: stretch.length]
                    self.slice_of(self.pieces, stretch).copy_(mine)
        exact.clear()

    def _begin_state(self, groups: Sequence[int]) -> None:
        """Begin an Adagrad's state on the pieces: DeepSpeed makes one of its own, of one group.

        Args:
            groups: in which group each piece is.
        """
        if self._built.begin_state is None or self._built.optimizer is None:
            return
        optimizer = self.zero.optimizer = self._built.optimizer
        for group in optimizer.param_groups:
            group["params"] = []
        for piece, place in zip(self.pieces, groups, strict=True):
            optimizer.param_groups[place]["params"].append(piece)
        self._built.begin_state()

    def _sent(self, parameters: Iterable[nn.Parameter]) -> list[StorageWeakRef]:
        """The gradients that are about to be sent, to see them go while memory is tracked."""
        if not self._built.tracking():
            return []
        gradients = [p.grad for p in parameters if p.grad is not None]
        return [
            StorageWeakRef(g.untyped_storage())  # type: ignore[no-untyped-call]
            for g in gradients
            if g.untyped_storage().nbytes() == g.nbytes
        ]

    @staticmethod
    def slice_of(flats: list[Tensor], stretch: ShardSlice) -> Tensor:
        """A stretch of flat tensors, as a view."""
        flat = flats[stretch.piece].detach().view(-1)
        return flat[stretch.offset : stretch.offset + stretch.length]


def _until_gone(sent: list[StorageWeakRef]) -> None:
    """Wait for gloo's thread, which lets go of a tensor a moment after it has been sent.

    Tracked meanwhile, it would be there in one run and not in the next.
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
    """Stages 1 and 2: one flat buffer for each parameter group, an equal part for each rank."""

    def __init__(self, zero: Any, built: BuiltEngine) -> None:
        super().__init__(zero, built)
        for number, group in enumerate(zero.round_robin_bit16_groups):
            size = int(zero.partition_size[number])
            begin = size * dist.get_rank(group=zero.real_dp_process_group[number])
            offsets = zero.round_robin_bit16_offsets[number]
            for parameter, offset in zip(group, offsets, strict=True):
                self.piece_of[id(parameter)] = number
                first = max(offset, begin)
                last = min(offset + parameter.numel(), begin + size)
                if first < last:
                    self.slices[id(parameter)] = ShardSlice(
                        number, first - begin, first - offset, last - first
                    )
        if not zero.cpu_offload:
            if zero.dtype == torch.float32:
                self._update_in_place()
            self._reduce_into_one_buffer()
        else:
            look_at_the_norm_alone(zero)
        self._reduce_the_rest()
        self.restore_fp32()
        self._begin_state(list(range(len(self.pieces))))

    def _update_in_place(self) -> None:
        """Drop the fp32 copy of fp32 parameters: 4P/N bytes."""
        zero = self.zero
        for number, group in enumerate(zero.optimizer.param_groups):
            rank = dist.get_rank(group=zero.real_dp_process_group[number])
            mine = zero.parallel_partitioned_bit16_groups[number][rank].detach().requires_grad_()
            before = zero.single_partition_of_fp32_groups[number]
            if before in zero.optimizer.state:
                zero.optimizer.state[mine] = zero.optimizer.state.pop(before)
            zero.single_partition_of_fp32_groups[number] = mine
            group["params"] = [mine]
        link_parameters(zero)

    def _reduce_into_one_buffer(self) -> None:
        """Add reduced gradients to this rank's flat fp32 shard at once, and let go of the rest.

        DeepSpeed does so for bf16 gradients that are accumulated in fp32. Otherwise it copies the
        gradients of its shard into one buffer, and flattens that into another for the step.
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
        """Reduce, too, what earlier micro-batches of a step had gradients of and the last has not.

        DeepSpeed looks at those parameters only whose gradients the last one brings.
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
                    take_flat_from_host(zero, but=begun)
            finish()

        finish = replace_end_of_backward(zero, finish_all)

    def clear(self) -> None:
        """See `OptimizerShards.clear`; without offload they are in a buffer, made with the first.

        DeepSpeed lets it go in its step; passes without one would be added up in it.
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
            found: Tensor | None = self.zero.single_partition_of_fp32_groups[piece].grad
            return found
        return getattr(self.zero.averaged_gradients.get(piece), "flat_partition", None)

    def update_parameters(self) -> None:
        """See `OptimizerShards.update_parameters`."""
        self.zero.update_lp_params()

    def set_norm(self, norm: Tensor) -> None:
        """See `OptimizerShards.set_norm`."""
        set_flat_norm(self.zero, norm)


class PartitionedShards(OptimizerShards):
    """Stage 3: each parameter cut into as many equal parts as there are ranks."""

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
            group["params"] = []  # its step puts one piece after the other there

    def _send_when_full(self) -> None:
        """Reduce a full bucket at once, and not when the next gradient is there as well."""
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
        """Take the gradients of all micro-batches, and not of those parameters in the last only."""
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
        """Drop the fp32 copy of fp32 parameters: 4P/N bytes."""
        zero = self.zero
        for number, before in enumerate(zero.fp32_partitioned_groups_flat):
            mine = zero.fp16_partitioned_groups_flat[number].detach().requires_grad_()
            mine.ds_id = before.ds_id
            if before in zero.optimizer.state:
                zero.optimizer.state[mine] = zero.optimizer.state.pop(before)
            zero.fp32_partitioned_groups_flat[number] = mine

    def _lend_gradient(self, piece: int) -> None:
        """The gradient of a sub-group as the view that it is, and not a flattened copy of it."""
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
            found: Tensor | None = self.zero.fp32_partitioned_groups_flat[piece].grad
            return found
        start, stop = self._offsets[piece], self._offsets[piece + 1]
        flat: Tensor = self.zero.grad_partitions_flat_buffer
        return flat[start:stop]

    def update_parameters(self) -> None:
        """See `OptimizerShards.update_parameters`."""
        update_cut_parameters(self.zero)

    def set_norm(self, norm: Tensor) -> None:
        """See `OptimizerShards.set_norm`."""
        set_cut_norm(self.zero, norm)
