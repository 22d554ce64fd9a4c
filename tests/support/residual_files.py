"""Peak records for the tests of the safety margin."""

from __future__ import annotations

from bigtrain.machine.residuals import (
    PeakRecord,
    hardware_key,
    safety_margin,
)


def entry(tracked=1000, when="2030-01-01T00:00:00.000000+00:00", **other):
    """A record of a rank for which 1000 bytes were predicted and `tracked` bytes measured."""
    """A rank of which 1000 bytes were predicted."""
    values = {"engine": "torch", "strategy": "ddp", "device": "cpu", "precision": "fp32"}
    values |= {"predicted_bytes": 1000, "tracked_bytes": tracked, "process_bytes": None}
    return PeakRecord(**{**values, "when": when, **other})


def on_cpu(engine):
    """The safety margin of an engine on this CPU."""
    return safety_margin(engine, device_key=hardware_key("cpu"))
