"""Small modules that share a configuration, of which a forward pass changes a field."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from pydantic import BaseModel
from support.cutting_odd_nets import linear
from torch import Tensor, nn


class Settings:
    """What transformers calls a configuration: read by every layer, with a field of the head's."""

    def __init__(self) -> None:
        self.scale = 2.0
        self.kind: str | None = None


@dataclass(frozen=True)
class FrozenSettings:
    scale: float = 2.0
    kind: str | None = None


class CheckedSettings(BaseModel):
    """One of pydantic's, whose class is made by a class of its own."""

    scale: float = 2.0
    kind: str | None = None


class Scaled(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config, self.layer = config, linear()

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * self.config.scale


class Configured(nn.Module):
    """Three layers and a head, whose kind is settled by the last code of the first pass."""

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
    """The field is written beside the second layer, and read by the code after the third."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers[0](x)
        self.settle(x)
        x = self.layers[2](self.layers[1](x))
        return self.head(x if self.config.kind == "single" else x.tanh())

    def settle(self, x: Tensor) -> None:
        self.config.kind = "single" if x.shape[-1] > 1 else "regression"


class ConfiguredFrozen(ConfiguredEarly):
    """It is written past the class's own methods, by which nobody sees it."""

    def __init__(self) -> None:
        super().__init__(FrozenSettings)

    def settle(self, x: Tensor) -> None:
        object.__setattr__(self.config, "kind", "single" if x.shape[-1] > 1 else "regression")


class ConfiguredTaken(ConfiguredEarly):
    """It is written and read through the object's dict."""

    def settle(self, x: Tensor) -> None:
        vars(self.config)["kind"] = "single" if x.shape[-1] > 1 else "regression"


class ConfiguredNamespace(ConfiguredEarly):
    """An object of a class that nothing can be put beneath."""

    def __init__(self) -> None:
        super().__init__(lambda: SimpleNamespace(scale=2.0, kind=None))


class ConfiguredMapping(nn.Module):
    """A mapping that two modules hold: one writes into it, the other reads."""

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
