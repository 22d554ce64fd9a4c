"""Unusual parameters, hooks, states and optimizer groups: right under a strategy, or refused."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
from support.odd_parameters import train_odd
from support.ranks import run_ranks

GROUPS = ("by_dim", "by_shape", "by_identity", "by_name", "adagrad", "lars", "some", "noted")
GROUPS = (*GROUPS, "global", "counting", "muon")
HOOKS = ("Hook", "MaskHook", "NormHook")
POST_HOOKS = ("PostHook", "PostNorm", "PostDecay", "PostShrink", "PostDrop")
STATES = ("Codes", "Bytes", "Mask", "FrozenHalf", "Extra", "InnerExtra", "Buffer", "InnerBuffer")
SHAPES = ("Scalar", "ScalarBlocks", "FrozenScalar", "Strided", "StridedRect", "Gaps")
SHAPES = (*SHAPES, "Empty", "EmptyRank", "FrozenEmpty")
KINDS = (
    "Complex",
    "Rotation",
    "Mixed",
    "MixedLayer",
    "Sparse",
    "SparseBag",
    "SparseF",
    "SparseShared",
)
TREES = ("Namespace", "DeepNamespace", "Methods", "InnerMethods", "TakenWeights")
WRITES = ("Teacher", "LerpTeacher", "Clamp")

SPARSE = {"Sparse", "SparseBag", "SparseF", "SparseShared", "SparseHead"}
WHOLE = {"global"}
FLAT = {"global", "lars", "muon", "some", "noted"}
NOT_FP32 = {"Complex", "Mixed", "MixedLayer"}
REFUSED = {
    "ddp": {"SparseF", "SparseHead"},
    "zero1_torch": SPARSE | WHOLE,
    "fsdp": SPARSE | WHOLE | {"muon"},
    "fsdp_zero2": SPARSE | WHOLE | {"muon"},
    "zero1": SPARSE | FLAT | NOT_FP32 | {*POST_HOOKS},
    "zero2": SPARSE | FLAT | NOT_FP32 | {*POST_HOOKS},
    "zero3": SPARSE
    | FLAT
    | NOT_FP32
    | {*POST_HOOKS, "counting", "Empty", "EmptyRank", "FrozenEmpty", "Rotation", *WRITES},
    "1f1b": {"SparseShared"} | WHOLE | set(WRITES),
    "tensor": SPARSE | WHOLE | {"lars", "muon", *HOOKS, *POST_HOOKS},
    "ddp+offload_disk": SPARSE | WHOLE | {"counting"},
    "oss": SPARSE | WHOLE | NOT_FP32,
    "sharded_ddp": SPARSE | WHOLE | NOT_FP32,
}
ONE_RUN = {
    "groups": [("Base", name) for name in GROUPS],
    "parameters": [
        (name, "sgd") for name in (*HOOKS, *POST_HOOKS, *STATES, *SHAPES, *KINDS, *TREES, *WRITES)
    ],
}


@pytest.mark.parametrize(("strategy", "cases"), [*product(REFUSED, ONE_RUN)])
def test_what_users_write_is_right_or_refused_by_name(strategy, cases):
    axes = {"pp": 2 if strategy == "1f1b" else 1, "tp": 2 if strategy == "tensor" else 1}
    # A forward pass that writes does so for each micro-batch, as in one process, so use a single
    # one.
    rows = 8 if strategy == "tensor" else 4
    for keys, chosen in (
        ({"train.micro_batch_size": rows}, [c for c in ONE_RUN[cases] if c[0] in WRITES]),
        ({"train.micro_batch_size": 2}, [c for c in ONE_RUN[cases] if c[0] not in WRITES]),
    ):
        for reports in run_ranks(train_odd, 2, strategy, chosen, keys, timeout_s=300, **axes)[0]:
            check(strategy, reports, cases)


def check(strategy: str, reports: dict[str, Any], cases: str) -> None:
    net, optimizer = reports["case"].split()
    expected = (optimizer if cases == "groups" else net) in REFUSED[strategy]
    assert "error" not in reports, (reports["case"], reports)
    assert ("refused" in reports) == expected, (reports["case"], reports)
    if expected:
        assert "--strategy" in reports["refused"], reports
        return
    assert reports["losses"] < 1e-6, (reports["case"], reports["losses"])
    assert reports["weights"] < 1e-5, (reports["case"], reports["weights"])
    assert not reports["names"], reports
    assert not reports["dtypes"], reports


@pytest.mark.parametrize("strategy", ["ddp", "1f1b"])
def test_extra_state_is_in_the_checkpoint(strategy):
    cases, pp = [("Extra", "sgd"), ("InnerExtra", "sgd")], 2 if strategy == "1f1b" else 1
    of_model, of_layer = run_ranks(train_odd, 2, strategy, cases, {}, pp=pp)[0]
    saved = of_model["meta"]["extra_state"]["_extra_state"]
    assert saved["of"] == ["a", 1.5, None]
    assert saved["seen"] >= 4
    assert of_layer["meta"]["extra_state"] == {"c._extra_state": 7}
