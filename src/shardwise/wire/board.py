"""Boards on which ranks of one host tell each other where bytes lie and what was read: rows of integers in memory that they share.

The owner alone writes. A row may be seen half written: its last cell shows whether it was. The memory belongs to a file without a
name, which is gone with the last process that holds it.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import secrets
from typing import NamedTuple
from weakref import finalize

import torch

from shardwise.devices import cross_memory

NUM_ROWS = 1024
"""Collectives of one lane that a rank may be ahead of another."""
_ROW_WIDTH = 4
_NUM_BYTES = 8 * (_ROW_WIDTH + NUM_ROWS * (_ROW_WIDTH + 1))


class Board:
    """What one rank tells the others about one lane.

    A row with a nonce, whether the rank has left, and the first collective that it has not finished reading; then
    announcements; then which of the later collectives it has finished.
    """

    def __init__(self) -> None:
        self.nonce = secrets.randbits(62)
        self._next = 0
        self.file = os.memfd_create("shardwise-board")
        """Under which number peers find the file among those of this process."""
        finalize(self, os.close, self.file)
        os.ftruncate(self.file, _NUM_BYTES)
        shared = mmap.mmap(self.file, _NUM_BYTES)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(shared))
        """Where it lies in this process."""
        self._cells = memoryview(shared).cast("q")
        self._cells[0] = self.nonce

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


class BoardFacts(NamedTuple):
    """Where peers find a board: the process, the number of its file there, the address of its memory there, and what it begins with."""

    process: int
    file: int
    address: int
    nonce: int


class PeerBoard:
    """Another rank's board, as it is now. It can still be read when the process is gone.

    Raises:
        OSError: This process cannot open it.
    """

    def __init__(self, facts: BoardFacts) -> None:
        self.process = facts.process
        self._facts = facts
        file = os.open(f"/proc/{facts.process}/fd/{facts.file}", os.O_RDONLY)
        try:
            if os.fstat(file).st_size != _NUM_BYTES:
                raise OSError(f"process {facts.process} has another file under this number")
            self._cells = memoryview(mmap.mmap(file, _NUM_BYTES, prot=mmap.PROT_READ)).cast("q")
        finally:
            os.close(file)

    def is_there(self) -> bool:
        """Whether the process is still the rank. Asks the kernel.

        Raises:
            OSError: The process is gone, or it may not be read.
        """
        row = torch.empty(1, dtype=torch.int64)
        cross_memory.read(self.process, self._facts.address, row)
        return row.item() == self._cells[0] == self._facts.nonce

    @property
    def is_leaving(self) -> bool:
        """Whether the rank has said that it reads nothing more."""
        return bool(self._cells[1])

    @property
    def read_until(self) -> int:
        """The first collective of which the rank has not read all that others brought."""
        return self._cells[2]

    def find(self, sequence: int) -> tuple[int, int] | None:
        """Where the rank's bytes lie and how many there are, or None if it has not come to a collective."""
        at = _announced_at(sequence)
        stamp, address, num_bytes, check = self._cells[at : at + _ROW_WIDTH]
        is_there = stamp == sequence + 1 and check == _check(stamp, address, num_bytes)
        return (address, num_bytes) if is_there else None

    def has_finished(self, sequence: int) -> bool:
        """Whether the rank has read what others brought to a collective."""
        return self._cells[_finished_at(sequence)] >= sequence + 1


def _announced_at(sequence: int) -> int:
    return _ROW_WIDTH * (1 + sequence % NUM_ROWS)


def _finished_at(sequence: int) -> int:
    return _ROW_WIDTH * (1 + NUM_ROWS) + sequence % NUM_ROWS


def _check(stamp: int, address: int, num_bytes: int) -> int:
    return (stamp * 0x9E3779B1 ^ address ^ num_bytes << 20) & (2**62 - 1)
