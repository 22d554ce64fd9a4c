"""Training that goes on from its last commit where the launcher starts the ranks again.

`run` wraps the training function, `TorchState` holds what it changes. Decides: where commits are
kept, and which one is gone on from.
"""

from bigtrain.hvd.elastic.running import HorovodInternalError, HostsUpdatedInterrupt
from bigtrain.hvd.elastic.running import run_elastic as run
from bigtrain.hvd.elastic.sampler import ElasticSampler
from bigtrain.hvd.elastic.state import ObjectState, State, TorchState

__all__ = [
    "ElasticSampler",
    "HorovodInternalError",
    "HostsUpdatedInterrupt",
    "ObjectState",
    "State",
    "TorchState",
    "run",
]
