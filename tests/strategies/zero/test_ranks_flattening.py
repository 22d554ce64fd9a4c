"""DeepSpeed flattens parameters on their device, even if little memory is free."""

from __future__ import annotations

import importlib
from importlib.util import find_spec
from unittest import mock

import pytest
from support.nets import TinyLM, tokens
from support.parity import largest_difference, train
from support.ranks import run_ranks

# Not imported here: the ranks import this module, and must load DeepSpeed as a run does.
pytestmark = pytest.mark.skipif(find_spec("deepspeed") is None, reason="deepspeed is missing")


def flattens_on_host(context, strategy, keys):
    """Whether parameters were flattened on the host, and the difference that this makes."""
    zero = importlib.import_module("deepspeed.runtime.zero.stage_1_and_2").DeepSpeedZeroOptimizer
    deepspeed = importlib.import_module("deepspeed")
    uses_host, flatten = [], zero.flatten_dense_tensors_aligned

    def noted(*args, use_cpu_data=False, **kwargs):
        uses_host.append(use_cpu_data)
        return flatten(*args, use_cpu_data=use_cpu_data, **kwargs)

    plain = train(context, TinyLM, tokens(8), strategy, keys, 2)
    accelerator = type(deepspeed.accelerator.get_accelerator())
    with (
        mock.patch.object(accelerator, "available_memory", return_value=0),
        mock.patch.object(zero, "flatten_dense_tensors_aligned", noted),
    ):
        little = train(context, TinyLM, tokens(8), strategy, keys, 2)
        assert accelerator.available_memory() == 0
    return uses_host[0], largest_difference(plain, little)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("strategy", ["zero1", "zero2"])
def test_parameters_stay_on_the_device_where_little_is_free(strategy, precision):
    keys = {"train.precision": precision}
    assert run_ranks(flattens_on_host, 2, strategy, keys) == [(False, 0.0)] * 2
