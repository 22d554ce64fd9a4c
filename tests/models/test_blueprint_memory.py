"""The number of operations and bytes of describing a model and of making its values."""

from __future__ import annotations

from typing import Any

import torch
from support.described import module_with_buffer
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from bigtrain.models.blueprint import describe


def test_the_cost_grows_with_the_model_and_not_with_its_square() -> None:
    def deep() -> nn.Module:
        return nn.Sequential(*(nn.Linear(4, 4) for _ in range(1000)))

    blueprint = describe(deep)
    assert sum(len(origin.closure) for origin in blueprint._origins.values()) == 2000
    blueprint.materialize("cpu", seed=0, only=["999.weight"])
    assert blueprint.model.get_parameter("998.weight").is_meta


class HeldBytes(TorchDispatchMode):
    """The peak of bytes in CPU storages that are allocated inside a `with` block."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.storages: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and tensor.device.type == "cpu":
                storage = tensor.untyped_storage()
                self.storages[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        alive = [size for reference, size in self.storages.values() if not reference.expired()]
        self.peak = max(self.peak, sum(alive))
        return result


def test_little_more_than_one_tensor_is_held_while_materialising() -> None:
    size = 2**18

    def make() -> torch.Tensor:
        x = torch.randn(size)
        for _ in range(5):
            x = x * 2
        return x

    blueprint = describe(module_with_buffer(make))
    with HeldBytes() as held_bytes:
        blueprint.materialize("cpu", seed=0)
    assert size * 4 <= held_bytes.peak <= 2.01 * size * 4  # input and output of one operation

    layers = describe(lambda: nn.ModuleList(nn.Linear(512, 512) for _ in range(8)))
    with HeldBytes() as held_bytes:
        layers.materialize("cpu", seed=0)
    assert held_bytes.peak <= 1.01 * 8 * 512 * 513 * 4  # only the result
