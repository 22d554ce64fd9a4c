"""Training that resumes from its last commit after the launcher has restarted the ranks.

`run` wraps the training function, and `TorchState` holds the state that the function changes.
Decides where commits are stored, and from which commit training resumes.
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
