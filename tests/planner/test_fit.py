"""The bytes of a checkpoint that the planner counts on, by the dtypes that are saved."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from bigtrain.assembly.make_plan import make_plan
from bigtrain.job.load import job_from_keys
from bigtrain.planner.fit import _saved_parameters
from bigtrain.prediction.sections import SectionTensor

TRAINED, FROZEN = 30, 70


@pytest.mark.parametrize(
    ("strategy", "precision", "width", "saved"),
    [
        ("ddp", "fp32", 4, 4 * (TRAINED + FROZEN)),
        ("zero1_torch", "bf16", 2, 4 * TRAINED + 2 * FROZEN),  # frozen ones have no fp32 value
        ("zero2", "bf16", 2, 4 * (TRAINED + FROZEN)),  # DeepSpeed's are saved in the model's dtype
    ],
)
def test_frozen_parameters_are_saved_in_the_dtype_that_they_have(strategy, precision, width, saved):
    tensors = (
        SectionTensor("a", (TRAINED,), width * TRAINED, trained=True),
        SectionTensor("b", (FROZEN,), width * FROZEN),
        SectionTensor("c", (5,), 20, is_buffer=True),
    )
    keys = {"train.precision": precision, "device": "cpu"}
    plan = make_plan(job_from_keys(strategy, keys), 2, "cpu")
    assert plan.bf16_parameters == (precision == "bf16")
    assert _saved_parameters([SimpleNamespace(name="", tensors=tensors)], plan) == saved
