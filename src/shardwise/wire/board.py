"""Boards on which ranks of one host tell each other where bytes lie and what was read: rows of integers in a rank's own memory.

The owner alone writes; peers read it through the kernel. A row may be seen half written: its last cell shows whether it was.
"""

from __future__ import annotations

import secrets
from array import array
from typing import NamedTuple

import torch

from shardwise.devices import cross_memory

NUM_ROWS = 1024
"""Collectives of one lane that a rank may be ahead of another."""
_ROW_WIDTH = 4


class Board:
    """What one rank tells the others about one lane.

    A row with a nonce, whether the rank has left, and the first collective that it has not finished reading; then
    announcements; then which of the later collectives it has finished.
    """

    def __init__(self) -> None:
        self.nonce = secrets.randbits(62)
        self._next = 0
        self._cells = array("q", bytes(8 * (_ROW_WIDTH + NUM_ROWS * (_ROW_WIDTH + 1))))
        self._cells[0] = self.nonce

    @property
    def address(self) -> int:
        """Where it lies in this process."""
        return self._cells.buffer_info()[0]

    @property
    def num_rows(self) -> int:
        """Collectives that its rows can hold: so far a rank may be ahead of another."""
        return NUM_ROWS

    def leave(self) -> None:
        """Say that this rank reads nothing more."""
        self._cells[1] = 1

    def announce(self, sequence: int, address: int, num_bytes: int) -> None:
        """Say where the bytes of a collective lie."""
        at = _announced_at(sequence)
        self._cells[at + 1] = address
        self._cells[at + 2] = num_bytes
        self._cells[at + 3] = _check(sequence + 1, address, num_bytes)
        self._cells[at] = sequence + 1

    def finish(self, sequence: int) -> None:
        """Say that all that others brought to a collective was read."""
        self._cells[_finished_at(sequence)] = sequence + 1
        while self._cells[_finished_at(self._next)] == self._next + 1:
            self._next += 1
        self._cells[2] = self._next


class Presence(NamedTuple):
    """What a board says of its rank: whether it is there at all, whether it reads nothing more, and what it has read up to."""

    is_there: bool
    is_leaving: bool
    read_until: int


class PeerBoard:
    """Another rank's board. Every method raises OSError if the process is gone or may not be read.

    ``row`` is room for what is read: the boards of one lane, which are read in turn, share it.
    """

    def __init__(self, process: int, address: int, nonce: int, row: torch.Tensor) -> None:
        self.process = process
        self._address = address
        self._nonce = nonce
        self._row = row
        self._cell = row[:1]

    def presence(self) -> Presence:
        """Whether the process is still the rank, and how far it is."""
        cross_memory.read(self.process, self._address, self._row)
        nonce, is_leaving, read_until, _ = self._row.tolist()
        return Presence(nonce == self._nonce, bool(is_leaving), read_until)

    def find(self, sequence: int) -> tuple[int, int] | None:
        """Where the rank's bytes lie and how many there are, or None if it has not come to a collective."""
        cross_memory.read(self.process, self._address + 8 * _announced_at(sequence), self._row)
        stamp, address, num_bytes, check = self._row.tolist()
        is_there = stamp == sequence + 1 and check == _check(stamp, address, num_bytes)
        return (address, num_bytes) if is_there else None

    def has_finished(self, sequence: int) -> bool:
        """Whether the rank has read what others brought to a collective."""
        cross_memory.read(self.process, self._address + 8 * _finished_at(sequence), self._cell)
        return self._cell.item() >= sequence + 1


def new_row() -> torch.Tensor:
    """Room for a row of a board."""
    return torch.zeros(_ROW_WIDTH, dtype=torch.int64)


def _announced_at(sequence: int) -> int:
    return _ROW_WIDTH * (1 + sequence % NUM_ROWS)


def _finished_at(sequence: int) -> int:
    return _ROW_WIDTH * (1 + NUM_ROWS) + sequence % NUM_ROWS


def _check(stamp: int, address: int, num_bytes: int) -> int:
    return (stamp * 0x9E3779B1 ^ address ^ num_bytes << 20) & (2**62 - 1)
