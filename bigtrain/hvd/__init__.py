"""Horovod's interface for PyTorch: scripts run after one change, `import bigtrain.hvd as hvd`.

Decides which functions of `horovod.torch` exist, with the same names, arguments and results; the
order of exchanges, and the checks that ranks agree on them; the part that joined ranks take in
exchanges; where elastic commits are stored.
"""

from typing import Any

from bigtrain.errors import did_you_mean
from bigtrain.hvd import elastic
from bigtrain.hvd.compression import Compression
from bigtrain.hvd.elastic import HorovodInternalError, HostsUpdatedInterrupt
from bigtrain.hvd.gathers import (
    allgather,
    allgather_async,
    allgather_object,
    alltoall,
    alltoall_async,
    barrier,
    broadcast,
    broadcast_,
    broadcast_async,
    broadcast_async_,
    broadcast_object,
    grouped_allgather,
    grouped_allgather_async,
    join,
    poll,
)
from bigtrain.hvd.gathers import wait_for as synchronize
from bigtrain.hvd.optimizer import DistributedOptimizer
from bigtrain.hvd.process_sets import (
    ProcessSet,
    add_process_set,
    get_process_set_ids_and_ranks,
    global_process_set,
    remove_process_set,
)
from bigtrain.hvd.reductions import (
    Adasum,
    Average,
    Max,
    Min,
    Product,
    Sum,
    allreduce,
    allreduce_,
    allreduce_async,
    allreduce_async_,
    grouped_allreduce,
    grouped_allreduce_,
    grouped_allreduce_async,
    grouped_allreduce_async_,
    grouped_reducescatter,
    grouped_reducescatter_async,
    reducescatter,
    reducescatter_async,
    sparse_allreduce_async,
)
from bigtrain.hvd.session import (
    ccl_built,
    cross_rank,
    cross_size,
    cuda_built,
    ddl_built,
    gloo_built,
    gloo_enabled,
    is_homogeneous,
    is_initialized,
    local_rank,
    local_size,
    mpi_built,
    mpi_enabled,
    mpi_threads_supported,
    nccl_built,
    rank,
    rocm_built,
    size,
)
from bigtrain.hvd.start import init, init_with, shutdown, start_timeline, stop_timeline
from bigtrain.hvd.state_broadcasts import broadcast_optimizer_state, broadcast_parameters
from bigtrain.hvd.sync_batch_norm import SyncBatchNorm

__all__ = [
    "Adasum",
    "Average",
    "Compression",
    "DistributedOptimizer",
    "HorovodInternalError",
    "HostsUpdatedInterrupt",
    "Max",
    "Min",
    "ProcessSet",
    "Product",
    "Sum",
    "SyncBatchNorm",
    "add_process_set",
    "allgather",
    "allgather_async",
    "allgather_object",
    "allreduce",
    "allreduce_",
    "allreduce_async",
    "allreduce_async_",
    "alltoall",
    "alltoall_async",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_async",
    "broadcast_async_",
    "broadcast_object",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "ccl_built",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "elastic",
    "get_process_set_ids_and_ranks",
    "global_process_set",
    "gloo_built",
    "gloo_enabled",
    "grouped_allgather",
    "grouped_allgather_async",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_allreduce_async",
    "grouped_allreduce_async_",
    "grouped_reducescatter",
    "grouped_reducescatter_async",
    "init",
    "init_with",
    "is_homogeneous",
    "is_initialized",
    "join",
    "local_rank",
    "local_size",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "poll",
    "rank",
    "reducescatter",
    "reducescatter_async",
    "remove_process_set",
    "rocm_built",
    "shutdown",
    "size",
    "sparse_allreduce_async",
    "start_timeline",
    "stop_timeline",
    "synchronize",
]

_ELSEWHERE = {
    "run": "starts processes. Start the script with torchrun --nproc-per-node N script.py",
    "mpi_ops": "is one module with Horovod. Its functions are here: hvd.allreduce, hvd.synchronize",
    "functions": "is a module of Horovod. Its functions are here: hvd.broadcast_object",
    "mpi_lib": "is Horovod's library. The public functions are here: hvd.allreduce",
    "process_set_included": "is a method here, too: use process_set.included()",
    "keras": "is for TensorFlow, and only torch scripts are supported. Use hvd without it",
    "tensorflow": "is not of torch, and only torch scripts are supported. Use hvd without it",
    "spark": "starts processes. Start the script with torchrun --nproc-per-node N script.py",
    "ray": "starts processes. Start the script with torchrun --nproc-per-node N script.py",
}


def __getattr__(name: str) -> Any:
    if name in _ELSEWHERE:
        raise AttributeError(f"bigtrain.hvd has no {name!r}: hvd.{name} {_ELSEWHERE[name]}.")
    raise AttributeError(f"bigtrain.hvd has no {name!r}{did_you_mean(name, __all__)}")
