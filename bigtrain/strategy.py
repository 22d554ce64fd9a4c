"""The names that the author of a strategy needs; see "Add a strategy" in CONTRIBUTING.md."""

from bigtrain.activations.policy import BlockPolicy
from bigtrain.core.layer_strategies import RecomputeStrategy, SliceStrategy
from bigtrain.core.loop import LoopRunner
from bigtrain.core.replicas import GradientAverager
from bigtrain.core.runner import Runner
from bigtrain.core.state import replica_state, state_of_replica
from bigtrain.core.strategy import (
    Assembly,
    CutStrategy,
    ModelFacts,
    Plan,
    Strategy,
)
from bigtrain.core.traits import CutTraits, Need, OffloadTiers, Traits
from bigtrain.core.variants import Shape, Variant
from bigtrain.core.workload import Workload
from bigtrain.costs.forecast import Forecast, Profile
from bigtrain.costs.rank_replay import RankActions
from bigtrain.costs.traffic import Traffic, parameter_shapes
from bigtrain.cutting.layout import Layout
from bigtrain.errors import ConfigError
from bigtrain.job.schema import Bytes, Role
from bigtrain.memory.timeline import Span, Timeline
from bigtrain.schedules.orders import Action
from bigtrain.tensors.shards import SavedTensor, StateTensor, read_whole

__all__ = [
    "Action",
    "Assembly",
    "BlockPolicy",
    "Bytes",
    "ConfigError",
    "CutStrategy",
    "CutTraits",
    "Forecast",
    "GradientAverager",
    "Layout",
    "LoopRunner",
    "ModelFacts",
    "Need",
    "OffloadTiers",
    "Plan",
    "Profile",
    "RankActions",
    "RecomputeStrategy",
    "Role",
    "Runner",
    "SavedTensor",
    "Shape",
    "SliceStrategy",
    "Span",
    "StateTensor",
    "Strategy",
    "Timeline",
    "Traffic",
    "Traits",
    "Variant",
    "Workload",
    "parameter_shapes",
    "read_whole",
    "replica_state",
    "state_of_replica",
]
