"""Sizes and counts as people write them."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.cli.simulated import parse_devices
from shardwise.core.errors import UsageError
from shardwise.core.sizes import format_bytes, parse_bytes, parse_count


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("8GiB", 8 * 2**30),
        ("80GB", 80 * 10**9),
        ("512 MiB", 512 * 2**20),
        ("1.5TB", 1_500_000_000_000),
        (" 0.5 KiB ", 512),
        (".5KiB", 512),
        ("1.KiB", 1024),
        ("+2kB", 2000),
        ("2KB", 2000),
        ("80gb", 80 * 10**9),
        ("8gib", 8 * 2**30),
        ("8GIB", 8 * 2**30),
        ("3PiB", 3 * 2**50),
        ("17 B", 17),
        ("1.1 KB", 1100),
        ("0.3PB", 3 * 10**14),  # In floating-point numbers, 299999999999999.94.
        (4096, 4096),
    ],
)
def test_sizes_are_read_to_the_byte(text: str | int, expected: int) -> None:
    assert parse_bytes(text) == expected


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("80G", "'80GB' or '80GiB'"),
        ("80 g", "'80GB' or '80GiB'"),
        ("80", "no unit"),
        ("80Gb", "may be bits: write '80GB'"),
        ("8Gib", "may be bits: write '8GiB'"),
        ("8GX", "the units of sizes"),
        ("0GiB", "above 0"),
        ("0.0001B", "less than one"),
        ("-8GiB", "above 0"),
        (0, "above 0"),
        (-1, "above 0"),
        ("nan", "but got 'nan'"),
        ("nanGiB", "but got 'nanGiB'"),
        ("infGB", "but got 'infGB'"),
        ("1e3GB", "but got '1e3GB'"),
        ("1,000GB", "but got '1,000GB'"),
        ("8GiB 4GiB", "but got"),
        ("٨GiB", "but got"),
        ("9" * 5000 + "GB", "but got"),
        ("", "but got ''"),
        (float("nan"), "but got nan"),
        (8e9, "but got 8000000000.0"),
        (True, "but got True"),
        (None, "but got None"),
    ],
)
def test_sizes_that_say_nothing_clear_are_refused(text: Any, words: str) -> None:
    with pytest.raises(UsageError, match=r"^Expected a size such as '8GiB'") as caught:
        parse_bytes(text)
    assert words in str(caught.value)


@given(st.integers(1, 2**60))
def test_what_is_written_is_read_again(num_bytes: int) -> None:
    if num_bytes < 10_000 * 2**40:
        assert abs(parse_bytes(format_bytes(num_bytes)) - num_bytes) <= num_bytes * 5e-4 + 1
    assert parse_bytes(f"{num_bytes}B") == num_bytes


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("7.5B", 7_500_000_000),
        ("13b", 13_000_000_000),
        ("350M", 350_000_000),
        ("1T", 10**12),
        ("1.1 k", 1100),
        ("0.1B", 100_000_000),
        ("124439808", 124_439_808),
        (7, 7),
    ],
)
def test_counts_are_read_exactly(text: str | int, expected: int) -> None:
    assert parse_count(text) == expected


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("7", "no unit: write '7B' or '7M'"),
        ("7.5", "no unit"),
        ("80G", "the units of counts"),
        ("80GB", "the units of counts"),
        ("1234.5", "no whole number"),
        ("0.0000000001B", "no whole number"),
        ("0B", "above 0"),
        ("0", "above 0"),
        ("-7B", "above 0"),
        ("nan", "but got 'nan'"),
        ("", "but got ''"),
        (7.5, "but got 7.5"),
        (False, "but got False"),
    ],
)
def test_counts_that_say_nothing_clear_are_refused(text: Any, words: str) -> None:
    with pytest.raises(UsageError, match=r"^Expected a number of parameters such as") as caught:
        parse_count(text)
    assert words in str(caught.value)


@pytest.mark.parametrize("text", ["4x8", "4x8G", "4x0GiB", "4x-8GiB"])
def test_simulated_devices_have_sizes_with_units(text: str) -> None:
    with pytest.raises(UsageError, match="Expected a size such as"):
        parse_devices(text)
