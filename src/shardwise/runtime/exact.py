"""Sums that do not depend on how a buffer is cut: the same bits at every stage, layout and number of ranks that share it.

Floating-point sums depend on their order, so a norm over shards differs from a norm over the whole. Here, blocks of one
alignment unit (which no cut divides) are summed pairwise in fixed order; the block sums are then added as integers, which is
exact in any order: each is split into its mantissa and a window of its exponent, and mantissas are added window by window.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from shardwise.core.layout import ALIGNMENT

_WINDOW_BITS = 4


@dataclass(frozen=True)
class _Format:
    """How mantissas are split. A piece, shifted within its window, leaves room for 2 ** 22 blocks in 63 bits."""

    mantissa_bits: int
    lowest_exponent: int
    highest_exponent: int
    piece_bits: int

    @property
    def num_pieces(self) -> int:
        return -(-self.mantissa_bits // self.piece_bits)

    @property
    def num_windows(self) -> int:
        highest = self.highest_exponent - self.lowest_exponent + (self.num_pieces - 1) * self.piece_bits
        return (highest >> _WINDOW_BITS) + 1


_FORMATS = {
    torch.float32: _Format(mantissa_bits=24, lowest_exponent=-149, highest_exponent=128, piece_bits=24),
    torch.float64: _Format(mantissa_bits=53, lowest_exponent=-1074, highest_exponent=1024, piece_bits=18),
}


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """In which dtype powers of a tensor's elements are taken."""
    return torch.float64 if dtype in (torch.float64, torch.complex128) else torch.float32


def num_windows(dtype: torch.dtype) -> int:
    """Integers that hold one exact sum of elements of a dtype."""
    return _FORMATS[accumulation_dtype(dtype)].num_windows


def block_sums(values: torch.Tensor, power: float) -> torch.Tensor:
    """Sum of ``|x| ** power`` over each aligned block, by pairwise adds in fixed order."""
    width = ALIGNMENT
    if values.is_complex():
        values, width = values.abs(), ALIGNMENT
    terms = values.to(accumulation_dtype(values.dtype)).view(-1, width)
    terms = terms * terms if power == 2.0 else terms.abs() if power == 1.0 else terms.abs().pow(power)
    while width > 1:
        width //= 2
        terms = terms[:, :width] + terms[:, width:]
    return terms[:, 0]


def to_windows(sums: torch.Tensor, keys: torch.Tensor, num_keys: int) -> torch.Tensor:
    """Add finite, non-negative block sums exactly, by key: an int64 matrix of (key, window)."""
    form = _FORMATS[sums.dtype]
    mantissa, exponent = torch.frexp(sums)
    digits = (mantissa * 2.0**form.mantissa_bits).to(torch.int64)
    place = exponent.to(torch.int64) - form.lowest_exponent
    windows = torch.zeros(num_keys * form.num_windows, dtype=torch.int64, device=sums.device)
    for piece in range(form.num_pieces):
        part = (digits >> (piece * form.piece_bits)) & ((1 << form.piece_bits) - 1)
        at = place + piece * form.piece_bits
        index = keys * form.num_windows + (at >> _WINDOW_BITS)
        windows.index_add_(0, index, part << (at & ((1 << _WINDOW_BITS) - 1)))
    return windows.view(num_keys, form.num_windows)


def from_windows(rows: Iterable[Iterable[int]], dtype: torch.dtype) -> float:
    """The sum over several rows of windows, correctly rounded."""
    form = _FORMATS[accumulation_dtype(dtype)]
    total = 0
    for row in rows:
        for window, count in enumerate(row):
            if count:
                total += count << (window << _WINDOW_BITS)
    try:
        return math.ldexp(float(total), form.lowest_exponent - form.mantissa_bits)
    except OverflowError:
        # A sum in float64 may pass its range only after scaling; scale first where the integer is too long.
        shift = max(0, total.bit_length() - 1000)
        try:
            return math.ldexp(float(total >> shift), form.lowest_exponent - form.mantissa_bits + shift)
        except OverflowError:
            return math.inf
