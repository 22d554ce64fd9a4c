"""Small modules that share a configuration object, with a field that the forward pass changes."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from pydantic import BaseModel
from support.cutting_odd_nets import linear
from torch import Tensor, nn


class Settings:
    """A configuration as in transformers: every layer reads it, and one field belongs to
    the head.
    """

    def __init__(self) -> None:
        self.scale = 2.0
        self.kind: str | None = None


@dataclass(frozen=True)
class FrozenSettings:
    """A frozen dataclass as configuration."""

    scale: float = 2.0
    kind: str | None = None


class CheckedSettings(BaseModel):
    """A pydantic configuration, whose class is made by a metaclass."""

    scale: float = 2.0
    kind: str | None = None


class Scaled(nn.Module):
    """A layer whose scale is read from the configuration."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config, self.layer = config, linear()

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * self.config.scale


class Configured(nn.Module):
    """Three layers and a head; code at the end of the first pass chooses the head's kind."""

    def __init__(self, make: Any = Settings) -> None:
        super().__init__()
        self.config = make()
        self.layers = nn.ModuleList(Scaled(self.config) for _ in range(3))
        self.head = linear(4)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        x = self.head(x * self.config.scale)
        if self.config.kind is None:
            self.config.kind = "single" if x.shape[-1] > 1 else "regression"
        return x.tanh() if self.config.kind == "single" else x


class ConfiguredEarly(Configured):
    """Code after the first layer writes the field; code after the third layer reads it."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers[0](x)
        self.settle(x)
        x = self.layers[2](self.layers[1](x))
        return self.head(x if self.config.kind == "single" else x.tanh())

    def settle(self, x: Tensor) -> None:
        self.config.kind = "single" if x.shape[-1] > 1 else "regression"


class ConfiguredFrozen(ConfiguredEarly):
    """The field is written by `object.__setattr__`, which bypasses the class's methods."""

    def __init__(self) -> None:
        super().__init__(FrozenSettings)

    def settle(self, x: Tensor) -> None:
        object.__setattr__(self.config, "kind", "single" if x.shape[-1] > 1 else "regression")


class ConfiguredTaken(ConfiguredEarly):
    """The field is written and read through the object's `__dict__`."""

    def settle(self, x: Tensor) -> None:
        vars(self.config)["kind"] = "single" if x.shape[-1] > 1 else "regression"


class ConfiguredNamespace(ConfiguredEarly):
    """The configuration's class cannot be subclassed by a tracer."""

    def __init__(self) -> None:
        super().__init__(lambda: SimpleNamespace(scale=2.0, kind=None))


class ConfiguredMapping(nn.Module):
    """Two modules hold the same mapping: one writes into it, the other reads it."""

    class Layer(nn.Module):
        def __init__(self, seen: dict[str, float], *, writes: bool) -> None:
            super().__init__()
            self.layer, self.seen, self.writes = linear(), seen, writes

        def forward(self, x: Tensor) -> Tensor:
            if self.writes:
                self.seen["scale"] = 3.0
            return self.layer(x) * self.seen.get("scale", 1.0)

    def __init__(self) -> None:
        super().__init__()
        seen: dict[str, float] = {}
        self.first, self.middle, self.head = linear(), linear(), linear(4)
        self.writer = ConfiguredMapping.Layer(seen, writes=True)
        self.reader = ConfiguredMapping.Layer(seen, writes=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.reader(self.middle(self.writer(self.first(x)))))
