"""Samples: sources by name, one global order for any number of ranks, and micro-batches.

Decides: the built-in data sources; the order of samples; which samples a rank gets; padding; random
numbers of augmentation.
"""

from bigtrain.data.catalog import SOURCES, check_data, open_data, prepare_data
from bigtrain.data.loader import MicroBatch, Step, StepLoader, validation_batches
from bigtrain.data.sampler import GlobalBatch, GlobalOrder, MicroBatchPlan, split_global_batch
from bigtrain.data.source import Data, Samples, Source

__all__ = [
    "SOURCES",
    "Data",
    "GlobalBatch",
    "GlobalOrder",
    "MicroBatch",
    "MicroBatchPlan",
    "Samples",
    "Source",
    "Step",
    "StepLoader",
    "check_data",
    "open_data",
    "prepare_data",
    "split_global_batch",
    "validation_batches",
]
