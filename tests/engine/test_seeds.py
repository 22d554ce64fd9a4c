"""The kernels that a run requests from torch, and the return to the earlier settings afterwards."""

from __future__ import annotations

import pytest
import torch

from bigtrain import devices
from bigtrain.engine import seeds
from bigtrain.engine.seeds import kernels_as_asked
from bigtrain.errors import ConfigError
from bigtrain.job.schema import TrainConfig

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


def torch_settings() -> tuple[str, bool, bool]:
    """Torch's settings of matrix precision, TF32 in convolutions, and determinism."""
    precision = torch.get_float32_matmul_precision()
    is_deterministic = torch.are_deterministic_algorithms_enabled()
    return precision, torch.backends.cudnn.allow_tf32, is_deterministic


@pytest.mark.parametrize("matmul", ["highest", "high"])
def test_products_and_convolutions_are_as_exact_as_asked_for_on_a_gpu(matmul: str) -> None:
    before = torch_settings()
    assert before[1], "torch lets convolutions use TF32 by itself"
    with kernels_as_asked(TrainConfig(matmul=matmul), GPU):
        assert torch_settings() == (matmul, matmul == "high", False)
    assert torch_settings() == before
    with kernels_as_asked(TrainConfig(matmul=matmul), CPU):
        assert torch_settings() == before


def test_deterministic_kernels_end_with_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(seeds.os, "environ", {})
    seen: list[tuple[bool, dict[str, str]]] = []
    note = lambda _device: seen.append((torch_settings()[2], dict(seeds.os.environ)))  # noqa: E731
    monkeypatch.setattr(devices, "multiply", note)
    before = torch_settings()
    with kernels_as_asked(TrainConfig(deterministic=True), GPU):
        assert torch_settings()[2]
        assert seeds.os.environ == {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    assert torch_settings() == before
    assert seen == [(True, {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"})]


def test_a_process_that_has_multiplied_before_is_told_what_to_set(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(_device: torch.device) -> None:
        raise RuntimeError("it uses CuBLAS ... set CUBLAS_WORKSPACE_CONFIG=:4096:8 or :16:8")

    monkeypatch.setattr(seeds.os, "environ", {})
    monkeypatch.setattr(devices, "multiply", refuse)
    before = torch_settings()
    with (
        pytest.raises(ConfigError, match="Start it with CUBLAS_WORKSPACE_CONFIG=:4096:8"),
        kernels_as_asked(TrainConfig(deterministic=True), GPU),
    ):
        pytest.fail("its results would not be deterministic")
    assert torch_settings() == before
