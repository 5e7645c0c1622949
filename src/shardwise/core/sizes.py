"""Sizes in bytes and counts of parameters, as people write and read them."""

from __future__ import annotations

import re
from fractions import Fraction

from shardwise.core.errors import UsageError

_PREFIXES = "KMGTP"
_BYTES = {"B": 1, "kB": 1000}
for _power, _letter in enumerate(_PREFIXES, start=1):
    for _unit, _base in ((f"{_letter}B", 1000), (f"{_letter}iB", 1024)):
        # Written in one case, a unit is clear. 'Gb' and 'Gib' are not: links are measured in bits.
        _BYTES |= dict.fromkeys((_unit, _unit.lower(), _unit.upper()), _base**_power)

_COUNTS = {"k": 10**3, "m": 10**6, "b": 10**9, "t": 10**12}
_LEAST_BARE_COUNT = 1000
"""A smaller number without a unit is taken for one that has lost it: '7' for '7B'."""

_NUMBER = re.compile(r"\s*([+-]?)([0-9]{1,20}(?:\.[0-9]{0,20})?|\.[0-9]{1,20})\s*([A-Za-z]*)\s*", re.ASCII)
_SIZE = "Expected a size such as '8GiB' (2^30 bytes each) or '80GB' (10^9 bytes each)"
_COUNT = "Expected a number of parameters such as '7.5B' (10^9 each), '350M', '1T' or 7500000000"


def parse_bytes(text: str | int) -> int:
    """Read a size such as ``8GiB``, ``80GB`` or ``1.5 TB``; a number, which is no text, counts bytes.

    GB is 10^9 bytes and GiB is 2^30. Parts of a byte are dropped.

    Raises:
        UsageError: The unit is missing or may mean two things, or the size is not above 0.

    >>> parse_bytes("1.5KiB"), parse_bytes("1.5kB"), parse_bytes(4096)
    (1536, 1500, 4096)
    """
    number, unit = _split(text, _SIZE)
    factor = 1 if unit is None else _BYTES.get(unit)
    if factor is None:
        raise UsageError(f"{_SIZE} but got {text!r}{_on_unit(str(text), unit or '')}.")
    return _whole(number * factor, text, _SIZE)


def parse_count(text: str | int) -> int:
    """Read a number of parameters such as ``7.5B``, ``13b``, ``350M``, ``1T`` or ``7500000000``.

    Raises:
        UsageError: The unit is unknown or seems to be missing, or the number is not above 0 or not a whole one.

    >>> parse_count("7.5B"), parse_count("350m")
    (7500000000, 350000000)
    """
    number, unit = _split(text, _COUNT)
    if unit == "" and number < _LEAST_BARE_COUNT and number > 0:
        bare = str(text).strip()
        raise UsageError(f"{_COUNT} but got {text!r}, which has no unit: write '{bare}B' or '{bare}M'.")
    factor = 1 if not unit else _COUNTS.get(unit.lower())
    if factor is None:
        raise UsageError(f"{_COUNT} but got {text!r}: the units of counts are K, M, B (10^9) and T (10^12).")
    count = number * factor
    if count.denominator != 1:
        raise UsageError(f"{_COUNT} but got {text!r}, which is no whole number.")
    return _whole(count, text, _COUNT)


def _split(text: str | int, expected: str) -> tuple[Fraction, str | None]:
    """The number and the unit, which is None for what is no text."""
    if isinstance(text, int) and not isinstance(text, bool):
        return Fraction(text), None
    match = _NUMBER.fullmatch(text) if isinstance(text, str) else None
    if match is None:
        raise UsageError(f"{expected} but got {text!r}.")
    sign, digits, unit = match.groups()
    return Fraction(f"{sign}{digits}"), unit


def _whole(number: Fraction, text: str | int, expected: str) -> int:
    if number <= 0:
        raise UsageError(f"{expected}, above 0, but got {text!r}.")
    if number < 1:
        raise UsageError(f"{expected}, 1 or more, but got {text!r}, which is less than one.")
    return int(number)


def _on_unit(text: str, unit: str) -> str:
    """What is wrong with the unit of a size."""
    number = text.strip().removesuffix(unit).strip()
    letter = unit[:1].upper()
    if not unit:
        return f", which has no unit: write '{number}GB', '{number}GiB' or '{number}B'"
    if unit.upper() in _PREFIXES:
        return f", which may be either: write '{number}{letter}B' or '{number}{letter}iB'"
    if unit.upper() in _BYTES:
        wide = unit[1:].upper().replace("I", "i")
        return f", which may be bits: write '{number}{letter}{wide}' for bytes"
    return ": the units of sizes are B, kB, MB, GB, TB and PB (powers of 1000), KiB, MiB, GiB, TiB and PiB (powers of 1024)"


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
