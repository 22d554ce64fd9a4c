"""Parse and format sizes, seconds and counts. In the code, bytes are integers."""

from __future__ import annotations

import re

from bigtrain.errors import ConfigError

KIB, MIB, GIB, TIB = 2**10, 2**20, 2**30, 2**40

_FACTORS = {
    "": 1,
    "b": 1,
    "k": KIB,
    "kib": KIB,
    "kb": 10**3,
    "m": MIB,
    "mib": MIB,
    "mb": 10**6,
    "g": GIB,
    "gib": GIB,
    "gb": 10**9,
    "t": TIB,
    "tib": TIB,
    "tb": 10**12,
}
MOST_BYTES = 2**60
"""The largest size: an exbibyte."""
_PATTERN = re.compile(r"\s*([0-9]*\.?[0-9]+)\s*([A-Za-z]*)\s*")


def parse_bytes(text: str | int, option: str = "") -> int:
    """Read '2GiB', '512MiB', '80GB' or a plain number as bytes.

    Args:
        text: the text.
        option: the option whose value it is, for messages, such as `--at`.

    Raises:
        ConfigError: the text is not a size, or it means more than an exbibyte.
    """
    if isinstance(text, int) and not isinstance(text, bool):
        return _bounded(text, option)
    match = _PATTERN.fullmatch(text) if isinstance(text, str) else None
    factor = _FACTORS.get(match[2].lower()) if match else None
    if match is None or factor is None:
        raise ConfigError(
            f"{option}{' ' if option else ''}{text!r} is not a size in bytes. "
            "Write it like 2GiB, 512MiB or 80GB."
        )
    return _bounded(float(match[1]) * factor, option)


def _bounded(size: int | float, option: str) -> int:
    """Return the size as an integer; refuse sizes that the kernel or torch cannot represent."""
    if size > MOST_BYTES:
        raise ConfigError(
            f"{option + ': ' if option else ''}a size has at most {MOST_BYTES // TIB} TiB. Write "
            "it like 2GiB or 1TiB."
        )
    return int(size)


def format_bytes(size: int | float) -> str:
    """Write bytes for a person: '1.53 GiB', '12.4 MiB', '512 B'."""
    magnitude = abs(size)
    for factor, unit in ((TIB, "TiB"), (GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if magnitude >= factor:
            return f"{size / factor:.2f} {unit}" if factor >= GIB else f"{size / factor:.1f} {unit}"
    return f"{int(size)} B"


def format_seconds(seconds: float) -> str:
    """Write seconds for a person: '1.53 s', '12.4 ms'."""
    return f"{seconds:.2f} s" if seconds >= 1 else f"{1000 * seconds:.1f} ms"


def format_share(part: float, whole: float) -> str:
    """Write `part / whole` for a person: '62.5%', '<0.1%'; '0.0%' only for 0 or less."""
    share = part / whole
    if 0 < share < 0.0005:
        return "<0.1%"
    return f"{share:.1%}" if abs(share) >= 0.0005 else "0.0%"


def signed_share(share: float | None, digits: int = 1) -> str:
    """Write a relative difference with its sign: '+2.5%', '-0.3%', '0.0%'; '-' for None.

    Args:
        share: the difference as a share, such as 0.025.
        digits: decimal places of the percentage.
    """
    if share is None:
        return "-"
    rounded = round(share, digits + 2)
    return f"{rounded:+.{digits}%}" if rounded else f"{0:.{digits}%}"


def format_duration(seconds: float) -> str:
    """Write a duration for a person: '26 s', '3 min 05 s', '2 h 10 min'."""
    total = round(seconds)
    if total < 60:
        return f"{total} s"
    if total < 3600:
        return f"{total // 60} min {total % 60:02} s"
    minutes = round(seconds / 60)
    if minutes < 24 * 60:
        return f"{minutes // 60} h {minutes % 60:02} min"
    hours = round(seconds / 3600)
    return f"{hours // 24} d {hours % 24} h"


def format_flops(rate: float) -> str:
    """Write operations per second for a person: '312.0 TFLOP/s', '88.4 GFLOP/s'."""
    factor, unit = (1e12, "TFLOP/s") if rate >= 1e12 else (1e9, "GFLOP/s")
    return f"{rate / factor:.1f} {unit}"


def format_count(count: int | float) -> str:
    """Write a count for a person: '10.6M', '175.0B', '512'."""
    for factor, unit in ((10**12, "T"), (10**9, "B"), (10**6, "M"), (10**3, "k")):
        if abs(count) >= factor:
            return f"{count / factor:.1f}{unit}"
    return f"{int(count)}"
