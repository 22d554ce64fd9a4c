"""The names of DeepSpeed that the techniques use, and the functions that use these names.

`DEEPSPEED` lists each name that is used, with the versions that were tested. The list includes
every attribute that any module reads from DeepSpeed's engines and optimizers. No technique imports
DeepSpeed itself: only this module does. A version that lacks one of the names is refused before the
ranks connect. An untested version gives a warning.
"""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from bigtrain.devices import is_accelerator
from bigtrain.errors import ConfigError
from bigtrain.machine.libraries import (
    ForeignLibrary,
    changed_environment,
    foreign_names,
    replaced,
)
from bigtrain.ranks.context import RunContext
from bigtrain.versions.torch_versions import all_gather_single, reduce_scatter_single

_ENGINE = "deepspeed.runtime.engine.DeepSpeedEngine"
_PIPE = "deepspeed.runtime.pipe"
_PIPE_ENGINE = f"{_PIPE}.engine.PipelineEngine"
_ACCELERATOR = "deepspeed.accelerator.abstract_accelerator.DeepSpeedAccelerator"
_FLAT_MODULE = "deepspeed.runtime.zero.stage_1_and_2"
_FLAT = f"{_FLAT_MODULE}.DeepSpeedZeroOptimizer"
_CUT_MODULE = "deepspeed.runtime.zero.stage3"
_CUT = f"{_CUT_MODULE}.DeepSpeedZeroOptimizer_Stage3"
_PARTS = "deepspeed.runtime.zero.partition_parameters"
_COORDINATOR = "deepspeed.runtime.zero.partitioned_param_coordinator"

# All strategies were run with 0.19.8. Twelve versions from 0.16.0 to 0.19.7 were only imported:
# each lacks some of these names (0.19.7 lacks one, 0.18.9 six). A later version may lack some too.
DEEPSPEED = ForeignLibrary("deepspeed", "0.19.8", "0.19.9", (
    *foreign_names("replace", "forget earlier process groups", "deepspeed.comm.comm", "cdb"),
    *foreign_names("replace", "forget earlier process groups", "deepspeed.utils.groups",
        "_WORLD_GROUP"),
    *foreign_names("replace", "compile nothing", "deepspeed.comm.torch", "build_shm_op"),
    *foreign_names("replace", "call collectives without torch 2.14's warnings",
        "deepspeed.comm.torch.TorchBackend", "all_gather_function reduce_scatter_function"),
    *foreign_names("replace", "send no weights", _ENGINE, "_broadcast_model"),
    *foreign_names("read", "do a step", _ENGINE,
        "forward backward step destroy set_gradient_accumulation_boundary optimizer module "
        "_running_engine_backward"),
    # Stages 1 and 2.
    *foreign_names("replace", "flatten without a copy", _FLAT_MODULE,
        "_flatten_dense_tensors align_dense_tensors"),
    *foreign_names("replace", "flatten where the parameters are", _ACCELERATOR,
        "available_memory"),
    *foreign_names("replace", "free gradients as soon as they are reduced", _FLAT,
        "gradient_accumulation_dtype _use_compact_grad_partition_buffer reduce_ipg_grads "
        "reduce_independent_p_g_buckets_and_remove_grads"),
    *foreign_names("replace", "reduce gradients that the last micro-batch lacks", _FLAT,
        "independent_gradient_partition_epilogue _offload_accumulated_param_ids"),
    *foreign_names("replace", "find gradients that are not finite by our norm", _FLAT,
        "update_offload_overflow_tracker"),
    *foreign_names("replace", "clip by our norm", _FLAT, "scaled_global_norm"),
    *foreign_names("read", "find the flat pieces that a rank updates", _FLAT,
        "optimizer dtype cpu_offload real_dp_process_group partition_size bit16_groups "
        "bit16_groups_flat round_robin_bit16_groups round_robin_bit16_offsets "
        "parallel_partitioned_bit16_groups single_partition_of_fp32_groups _link_all_hp_params "
        "update_lp_params"),
    *foreign_names("read", "follow gradients", _FLAT,
        "ipg_buckets reduce_bucket_size is_gradient_accumulation_boundary params_already_reduced "
        "get_param_id get_gradient_for_reduction averaged_gradients accumulated_grads_in_cpu "
        "_finalize_cpu_offload_gradient_accumulation"),
    *foreign_names("read", "follow gradients", f"{_FLAT_MODULE}.IPGBucket",
        "buffer elements params"),
    # Stage 3.
    *foreign_names("replace", "use gradients without a copy", _CUT,
        "_prepare_fp32_grad_for_sub_group"),
    *foreign_names("replace", "send a full bucket at once", _CUT,
        "reduce_independent_p_g_buckets_and_remove_grads"),
    *foreign_names("replace", "take gradients of all micro-batches", _CUT,
        "independent_gradient_partition_epilogue"),
    *foreign_names("replace", "clip by our norm", _CUT, "_get_norm_groups"),
    *foreign_names("read", "find the flat pieces that a rank updates", _CUT,
        "optimizer dtype offload_optimizer fp16_groups grad_position fp16_partitioned_groups_flat "
        "fp32_partitioned_groups_flat sub_group_to_group_id lp_param_buffer persistent_parameters "
        "_partition_all_parameters _reassign_or_swap_out_partitioned_parameters"),
    *foreign_names("read", "follow gradients", _CUT,
        "ipg_buckets reduce_bucket_size is_gradient_accumulation_boundary get_param_id "
        "averaged_gradients grad_partitions_flat_buffer parameter_offload "
        "_DeepSpeedZeroOptimizer_Stage3__reduce_and_partition_ipg_grads "
        "_finalize_offload_gradient_accumulation"),
    *foreign_names("read", "follow gradients", f"{_CUT_MODULE}.IPGBucketZ3",
        "buffer elements params"),
    *foreign_names("read", "cut parameters, and read this rank's piece", f"{_PARTS}.Init",
        "_enable_mem_efficient_linear _convert_to_deepspeed_param partition partition_numel "
        "all_gather ds_id ds_numel ds_process_group ds_shape ds_tensor"),
    *foreign_names("read", "put torch's linear layer back", _PARTS,
        "is_zero_param InsertPostInitMethodToModuleSubClasses zero3_linear_wrap"),
    *foreign_names("read", "notice that parameters are gathered",
        "deepspeed.runtime.zero.parameter_offload.DeepSpeedZeRoOffload", "get_param_coordinator"),
    *foreign_names("replace", "notice that parameters are gathered",
        f"{_COORDINATOR}.PartitionedParameterCoordinator", "fetch_sub_module"),
    *foreign_names("read", "load it silently", "deepspeed.runtime.zero.muon", "muon_optimizer"),
    # Pipelines.
    *foreign_names("replace", "do the schedule's instructions", _PIPE_ENGINE, "_INSTRUCTION_MAP"),
    *foreign_names("read", "do a step", _PIPE_ENGINE,
        "_exec_schedule _exec_reduce_grads _exec_optimizer_step pipe_buffers grid num_stages "
        "stage_id prev_stage next_stage is_first_stage is_last_stage"),
    *foreign_names("read", "know the instructions", f"{_PIPE}.schedule",
        "TrainSchedule LoadMicroBatch RecvActivation ForwardPass SendActivation RecvGrad "
        "BackwardPass SendGrad ReduceTiedGrads ReduceGrads OptimizerStep"),
    *foreign_names("read", "send and receive", f"{_PIPE}.p2p", "send recv"),
    *foreign_names("read", "give its grid the order of our mesh", _PIPE, "ProcessTopology"),
))  # fmt: skip


def load_deepspeed(device_type: str) -> Any:
    """Import DeepSpeed and the modules that have the names in `DEEPSPEED`, without any output.

    Args:
        device_type: 'cpu' or 'cuda'. DeepSpeed uses this kind of device in the whole process.

    Returns:
        The module `deepspeed`.

    Raises:
        ImportError: DeepSpeed is not installed, or cannot be imported.
    """
    logging.getLogger("DeepSpeed").addFilter(_only_errors)
    before, silent = set(os.environ), warnings.catch_warnings()
    # By default DeepSpeed uses any GPU that it finds, and loads torch's compiler for Muon.
    uncompiled = replaced(
        torch, compile=lambda function=None, **_: function or (lambda compiled: compiled)
    )
    with changed_environment(DS_ACCELERATOR=device_type), silent, uncompiled:
        warnings.simplefilter("ignore")
        loaded = import_module("deepspeed")
        DEEPSPEED.missing_names()  # imports the modules that have them
    for key in os.environ.keys() - before:  # DeepSpeed leaves variables behind
        del os.environ[key]
    return loaded


def _only_errors(record: logging.LogRecord) -> bool:
    return record.levelno >= logging.ERROR


def require_deepspeed(device_type: str, user: str, instead: str) -> None:
    """Refuse a job that needs DeepSpeed if a name in `DEEPSPEED` cannot be imported.

    Args:
        device_type: 'cpu' or 'cuda'.
        user: the key and value of the job that need DeepSpeed, for the message.
        instead: an alternative for users without DeepSpeed, as the end of a sentence.

    Raises:
        ConfigError: DeepSpeed is not installed, cannot be imported, or lacks a name.
    """
    try:
        load_deepspeed(device_type)
    except Exception as error:  # noqa: BLE001 - an extension that does not fit raises anything
        raise DEEPSPEED.does_not_load(error, user, instead) from None
    DEEPSPEED.refuse_missing(user, instead)


def parse_config(config: dict[str, Any]) -> None:
    """Let DeepSpeed parse a configuration.

    Raises:
        Exception: DeepSpeed refuses the configuration, by an error of any type.
    """
    import_module("deepspeed.runtime.config").DeepSpeedConfig(config)


def connect_deepspeed(context: RunContext, closing: ExitStack) -> Any:
    """Let DeepSpeed use the existing process group, without its C++ collectives.

    DeepSpeed's shared-memory collectives are a C++ operator that takes a minute to compile.

    Args:
        context: the device and the local rank of this rank.
        closing: takes the callbacks that undo the changes.

    Returns:
        The module `deepspeed`.

    Raises:
        ConfigError: there is no process group, or DeepSpeed already uses another kind of device in
            this process.
    """
    deepspeed = load_deepspeed(context.device.type)
    here, served = context.device.type, deepspeed.get_accelerator().device_name()
    if served != here:
        raise ConfigError(
            f"DeepSpeed uses one kind of device in a process: this process began with {served}, "
            f"and the run is on {here}. Start a new process for it."
        )
    if not dist.is_initialized():
        raise ConfigError(
            "DeepSpeed needs a process group, even for one rank. Use bigtrain.prepare, or "
            "bigtrain.connect(..., force_group=True)."
        )
    # DeepSpeed reads LOCAL_RANK as the index of its device, which is wrong if each rank sees only
    # one GPU.
    number = context.device.index if is_accelerator(context.device) else context.local_rank
    closing.enter_context(changed_environment(LOCAL_RANK=str(number)))
    # DeepSpeed's references to a process group outlive the group, and a second engine in this
    # process may have another group.
    import_module("deepspeed.comm.comm").__dict__["cdb"] = None
    import_module("deepspeed.utils.groups").__dict__["_WORLD_GROUP"] = None
    with replaced(import_module("deepspeed.comm.torch"), build_shm_op=lambda: None):
        name = "nccl" if context.device.type == "cuda" else "gloo"
        deepspeed.init_distributed(name, auto_mpi_discovery=False, verbose=False)
    backend = import_module("deepspeed.comm.comm").cdb
    backend.all_gather_function = all_gather_single
    backend.reduce_scatter_function = reduce_scatter_single
    return deepspeed


def start_engine(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    config: dict[str, Any],
    *,
    flatten: Callable[..., Tensor],
    align: Callable[..., Sequence[Tensor]],
    in_place: bool,
) -> Any:
    """Make DeepSpeed's engine for a model, without a broadcast of the weights. Collective.

    The weights have to be the same on all ranks already: DeepSpeed's broadcast fails for a 0-dim
    parameter.

    Args:
        model: a model whose parameters have values.
        optimizer: the optimizer over the trained parameters of the model.
        config: DeepSpeed's configuration.
        flatten: returns one flat tensor with the values of several tensors. It is called with these
            tensors, and with DeepSpeed's function as the keyword argument `default`.
        align: returns tensors and their padding up to a multiple of a unit. It is called with the
            tensors, the unit and `default`.
        in_place: whether `flatten` and `align` allocate no memory. If they allocate none, the
            parameters stay on the device. Otherwise DeepSpeed first moves them to the host if
            little memory is free.

    Returns:
        The engine, a DeepSpeedEngine.
    """
    deepspeed: Any = import_module("deepspeed")
    module: Any = import_module(_FLAT_MODULE)
    flat = {
        "_flatten_dense_tensors": partial(flatten, default=module._flatten_dense_tensors),
        "align_dense_tensors": partial(align, default=module.align_dense_tensors),
    }
    silent = {"_broadcast_model": lambda _engine: None}
    plenty = {"available_memory": lambda *_: 1 << 62} if in_place else {}
    accelerator = type(deepspeed.accelerator.get_accelerator())
    with (
        replaced(module, **flat),
        replaced(deepspeed.DeepSpeedEngine, **silent),
        replaced(accelerator, **plenty),
    ):
        engine, *_ = deepspeed.initialize(
            model=model, optimizer=optimizer, config=config, dist_init_required=False
        )
    keep_optimizer(engine.optimizer, optimizer)
    return engine


def keep_optimizer(zero: Any, optimizer: torch.optim.Optimizer) -> None:
    """Let DeepSpeed step the user's optimizer.

    DeepSpeed replaces the user's Adagrad optimizer by a new one, which it makes from the defaults
    of the user's optimizer. Without this function, the options of parameter groups would be lost,
    and the user's optimizer would have references to the fp32 copies of the parameters.

    Args:
        zero: DeepSpeed's ZeRO optimizer.
        optimizer: the user's optimizer.
    """
    current = zero.optimizer
    if current is optimizer:
        return
    optimizer.state.update(current.state)
    zero.optimizer = optimizer


class Partitioner:
    """Cuts parameters into the pieces of ZeRO stage 3, on ranks that all have the same values.

    The constructor replaces `torch.nn.functional.linear` by the function of ZeRO stage 3.

    Args:
        config: DeepSpeed's configuration.
        closing: gets the callback that restores `torch.nn.functional.linear`.
    """

    def __init__(self, config: dict[str, Any], closing: ExitStack) -> None:
        deepspeed: Any = import_module("deepspeed")
        self._parts: Any = import_module(_PARTS)
        group = deepspeed.comm.get_world_group()
        self._init = deepspeed.zero.Init(config_dict_or_path=config, data_parallel_group=group)
        self._init._enable_mem_efficient_linear()
        linear = self._parts.InsertPostInitMethodToModuleSubClasses.linear_bk
        closing.callback(setattr, torch.nn.functional, "linear", linear)

    def has_cut(self, parameter: nn.Parameter) -> bool:
        """Return whether a parameter is already cut."""
        return bool(self._parts.is_zero_param(parameter))

    @property
    def cuts_without_values(self) -> bool:
        """Whether the piece of a parameter is made of the parameter's own elements alone.

        Otherwise DeepSpeed quantizes the piece, or makes a second one, from the whole values.
        """
        init = self._init
        return not init.quantized_nontrainable_weights and init.zero_param_process_group is None

    def stand_in(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return a tensor of this shape that has memory for one element only.

        `cut` cuts a parameter with this value without ever having it whole. The elements of the
        piece are undefined then.
        """
        return torch.empty((), dtype=dtype, device=device).expand(tuple(shape))

    def cut(self, parameter: Any) -> Tensor:
        """Free all of a parameter but this rank's piece, without communication.

        Returns:
            The flat piece. At the end it may have padding.
        """
        self._init._convert_to_deepspeed_param(parameter)
        is_stand_in = parameter.numel() > 1 and not any(parameter.stride())
        if is_stand_in:  # DeepSpeed's call of `contiguous` would allocate the whole parameter
            parameter.contiguous = lambda: parameter
        parameter.partition()
        if is_stand_in:
            del parameter.contiguous
        piece: Tensor = parameter.ds_tensor
        return piece.detach()


def stage_3_linear() -> AbstractContextManager[None]:
    """Return a context in which `torch.nn.functional.linear` is the function of ZeRO stage 3."""
    parts: Any = import_module(_PARTS)
    return replaced(torch.nn.functional, linear=parts.zero3_linear_wrap)


def link_parameters(zero: Any) -> None:
    """Link the parameters under ZeRO stages 1 and 2 to the current fp32 pieces."""
    zero._link_all_hp_params()


def add_up_in_one_buffer(zero: Any) -> None:
    """Let ZeRO stages 1 and 2 add gradients to the fp32 shard that the step reads."""
    zero.gradient_accumulation_dtype = torch.float32
    zero._use_compact_grad_partition_buffer = lambda _group: True


Replaced = Callable[..., Any]
"""The original of a method of DeepSpeed that has been replaced."""


def replace_reduction(zero: Any, reduce: Callable[..., None]) -> Replaced:
    """Replace the method that reduces full buckets at stages 1 and 2; return the old one."""
    before: Replaced = zero.reduce_ipg_grads
    zero.reduce_ipg_grads = reduce
    return before


def replace_bucketing(zero: Any, add: Callable[..., None]) -> Replaced:
    """Replace the method that adds a gradient to its bucket, at any stage; return the old one."""
    before: Replaced = zero.reduce_independent_p_g_buckets_and_remove_grads
    zero.reduce_independent_p_g_buckets_and_remove_grads = add
    return before


def replace_end_of_backward(zero: Any, finish: Callable[[], None]) -> Replaced:
    """Replace the method that ends a backward pass, at any stage; return the old one."""
    before: Replaced = zero.independent_gradient_partition_epilogue
    zero.independent_gradient_partition_epilogue = finish
    return before


def skip_finite_checks(zero: Any) -> None:
    """Let ZeRO stages 1 and 2, with state on the host, skip the finite check of each gradient.

    Each check waits for the device, and the norm before the step covers all gradients.
    """
    zero.update_offload_overflow_tracker = lambda _gradient: None


def take_flat_from_host(zero: Any, skipped: set[int]) -> None:
    """Give the step of ZeRO stages 1 and 2 the gradients that DeepSpeed has summed on the host.

    Args:
        zero: DeepSpeed's ZeRO optimizer.
        skipped: DeepSpeed's ids of parameters that are left out, because DeepSpeed itself gives
            their gradients to the step.
    """
    accumulated = zero._offload_accumulated_param_ids
    zero._offload_accumulated_param_ids = accumulated - skipped
    zero._finalize_cpu_offload_gradient_accumulation()
    zero._offload_accumulated_param_ids = accumulated


def take_cut_from_host(zero: Any) -> None:
    """Give the step of ZeRO stage 3 the gradients that DeepSpeed has summed on the host."""
    zero._finalize_offload_gradient_accumulation()


def set_flat_norm(zero: Any, norm: Tensor) -> None:
    """Let ZeRO stages 1 and 2 clip by this gradient norm, a 0-dim tensor."""
    zero.scaled_global_norm = lambda norm_type=2: norm  # noqa: ARG005


def set_cut_norm(zero: Any, norm: Tensor) -> None:
    """Let ZeRO stage 3 clip by this gradient norm, a 0-dim tensor."""
    zero._get_norm_groups = lambda: [norm]


def replace_gradient_of_piece(zero: Any, set_gradient: Callable[[int], None]) -> None:
    """Replace the method of stage 3 that sets a flat piece's gradient before the step.

    Args:
        zero: DeepSpeed's ZeRO optimizer.
        set_gradient: called with the number of the piece.
    """
    zero._prepare_fp32_grad_for_sub_group = set_gradient


def bucket_sender(zero: Any) -> Callable[[torch.dtype], None]:
    """Return DeepSpeed's function that reduces the bucket of a given dtype under ZeRO stage 3."""
    send: Callable[[torch.dtype], None] = (
        zero._DeepSpeedZeroOptimizer_Stage3__reduce_and_partition_ipg_grads
    )
    return send


def update_cut_parameters(zero: Any) -> None:
    """Copy the values of the flat pieces to the parameters of ZeRO stage 3. Collective."""
    zero._partition_all_parameters()
    for number in range(len(zero.fp16_groups)):
        zero._reassign_or_swap_out_partitioned_parameters(number)
    if zero.persistent_parameters:
        zero.persistent_parameters[0].all_gather(zero.persistent_parameters)


def after_gathering(zero: Any, function: Callable[[nn.Module], None]) -> None:
    """Call a function with each module whose parameters ZeRO stage 3 has just gathered.

    Under stages 1 and 2 this does nothing.
    """
    if not hasattr(zero, "parameter_offload"):
        return
    coordinator = zero.parameter_offload.get_param_coordinator()
    fetch = coordinator.fetch_sub_module

    def fetch_first(module: nn.Module, forward: bool) -> None:  # noqa: FBT001 - as it is called
        fetch(module, forward)
        function(module)

    coordinator.fetch_sub_module = fetch_first


def set_instructions(engine: Any, actions: Mapping[str, Callable[..., None]]) -> None:
    """Set the function that a pipeline engine calls for each instruction of its schedule.

    Args:
        engine: the pipeline engine; it is the first argument of each function.
        actions: the functions, by the class name of their instruction.
    """
    instructions: Any = import_module(f"{_PIPE}.schedule")
    engine._INSTRUCTION_MAP = {getattr(instructions, n): do for n, do in actions.items()}


def run_schedule(engine: Any, micro_batches: int) -> None:
    """Run the 1F1B schedule of one step on a pipeline engine, by the functions set before."""
    schedule: Any = import_module(f"{_PIPE}.schedule").TrainSchedule
    engine._exec_schedule(
        schedule(micro_batches=micro_batches, stages=engine.num_stages, stage_id=engine.stage_id)
    )


def forward_stage(engine: Any, inputs: Any) -> Any:
    """Run the forward pass of a pipeline engine's stage.

    DeepSpeedEngine's method is called, because the pipeline engine's own `forward` raises.
    """
    return import_module("deepspeed.runtime.engine").DeepSpeedEngine.forward(engine, inputs)


def backward_loss(engine: Any, loss: Tensor) -> None:
    """Run the backward pass of a pipeline engine's stage from the loss.

    DeepSpeedEngine's method is called, because the pipeline engine's own `backward` raises.
    """
    plain = import_module("deepspeed.runtime.engine").DeepSpeedEngine
    plain.backward(engine, loss, scale_wrt_gas=False)


def backward_from(engine: Any, outputs: Sequence[Any], gradients: Sequence[Tensor]) -> None:
    """Run the backward pass from outputs, or their gradient edges, with the outputs' gradients."""
    engine._running_engine_backward = True  # otherwise the engine's hooks require its `backward`
    try:
        torch.autograd.backward(outputs, gradients)
    finally:
        engine._running_engine_backward = False


def reduce_pipeline_gradients(engine: Any) -> None:
    """Reduce the gradients of a step over the replicas of a stage. Collective."""
    engine._exec_reduce_grads()


def step_pipeline(engine: Any) -> None:
    """Update the parameters of a pipeline engine, whose own `step` raises."""
    engine._exec_optimizer_step()


def send_to_stage(tensor: Tensor, stage: int) -> None:
    """Send a tensor to another stage of the same replica."""
    import_module(f"{_PIPE}.p2p").send(tensor, stage)


def receive_from_stage(tensor: Tensor, stage: int) -> None:
    """Receive a tensor from another stage of the same replica, in place."""
    import_module(f"{_PIPE}.p2p").recv(tensor, stage)
