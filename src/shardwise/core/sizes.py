"""Byte counts as people write and read them."""

from __future__ import annotations

import re

from shardwise.core.errors import UsageError

_FACTORS = {"": 1, "B": 1}
for _power, _letter in enumerate("KMGT", start=1):
    _FACTORS[f"{_letter}B"] = 1000**_power
    _FACTORS[f"{_letter}iB"] = 1024**_power


def parse_bytes(text: str | int) -> int:
    """Read a byte count such as ``8GiB``, ``500 MB`` or ``4096``.

    >>> parse_bytes("1.5KiB")
    1536
    """
    if isinstance(text, int):
        return text
    match = re.fullmatch(r"\s*([0-9]*\.?[0-9]+)\s*([A-Za-z]*)\s*", text)
    if match is None or match.group(2) not in _FACTORS:
        raise UsageError(f"Expected a size such as '8GiB', '500MB' or 4096 but got {text!r}.")
    return int(float(match.group(1)) * _FACTORS[match.group(2)])


def format_bytes(num_bytes: int) -> str:
    """Write a byte count with at most four significant digits.

    >>> format_bytes(1536), format_bytes(17)
    ('1.5 KiB', '17 B')
    """
    if num_bytes < 1024:
        return f"{num_bytes} B"
    value = float(num_bytes)
    for unit in ("KiB", "MiB", "GiB", "TiB"):
        value /= 1024
        if value < 1024 or unit == "TiB":
            break
    return f"{value:.4g} {unit}"
