"""How bytes go between memory and a file: past the page cache, if the file system allows it. Knows addresses and offsets.

**A file is accessed in one way only**, found out by trying when it is made. If directly, then every byte of it, also where
memory, offset or length do not fit the blocks of the disk: such bytes pass through a small aligned buffer of the worker, and
blocks of which a write changes a part are read first. So no block is ever in the page cache, and none can be written there and
read from the disk, or the other way round. The copy costs no more than that of the page cache would, and memory that is lined
up with the file (as `Staging` gives it) needs none. If not directly, then every byte goes through the page cache, which is told
not to keep them.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import NamedTuple

import torch

from shardwise.stores.ranges import BLOCK_BYTES, round_down, round_up

PIECE_BYTES = 8 * 2**20
"""What one call to the system moves: large enough for the disk, small enough for two workers to share a transfer."""
BOUNCE_BYTES = 2**20
"""The same where it passes through a worker's own buffer."""


def aligned_memory(num_bytes: int) -> torch.Tensor:
    """Bytes at an address that is a multiple of a block, of which only pages that are touched cost memory.

    The memory is this process's own: were it shared, the system would not count it as resident.
    """
    pages = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with torch.inference_mode(False):  # What is first used in inference must serve training as well.
        return torch.frombuffer(pages, dtype=torch.uint8)  # Holds the pages, which go when the last view of it does.


class Piece(NamedTuple):
    """Bytes that lie one after the other in the file and in memory."""

    offset: int
    address: int
    num_bytes: int
    ends_slot: bool
    """Whether the rest of its last block is nobody's."""

    @property
    def is_lined_up(self) -> bool:
        """Whether blocks of the file are blocks of memory."""
        return (self.address - self.offset) % BLOCK_BYTES == 0


def cut(whole: Piece) -> list[Piece]:
    """In pieces for one call each. No block is in two of them: they are moved at the same time, by several workers."""
    end = whole.offset + whole.num_bytes
    most = PIECE_BYTES if whole.is_lined_up else BOUNCE_BYTES
    pieces = []
    low = whole.offset
    while low < end:
        high = min(end, round_down(low) + most)
        pieces.append(Piece(low, whole.address + low - whole.offset, high - low, whole.ends_slot and high == end))
        low = high
    return pieces


class Bounce:
    """A worker's own aligned buffer."""

    def __init__(self) -> None:
        self._memory = aligned_memory(BOUNCE_BYTES)
        self.address = self._memory.data_ptr()


class _Run(NamedTuple):
    """Whole blocks of a piece that pass through the buffer, and where in memory the bytes between them belong."""

    offset: int
    num_bytes: int
    room: int
    """Address in the buffer."""
    low: int
    high: int
    """Which bytes of the file are the piece's."""
    address: int

    def fill(self) -> None:
        """From memory into the buffer."""
        ctypes.memmove(self.room + self.low - self.offset, self.address, self.high - self.low)

    def empty(self) -> None:
        """From the buffer into memory."""
        ctypes.memmove(self.address, self.room + self.low - self.offset, self.high - self.low)

    def shared_blocks(self, *, ends_slot: bool) -> set[int]:
        """Offsets of blocks that hold other bytes beside the piece's: the first one, the last one, or one that is both."""
        end = self.offset + self.num_bytes
        first = {self.offset} if self.low > self.offset else set()
        last = {end - BLOCK_BYTES} if self.high < end and not ends_slot else set()
        return first | last


def _runs_of(piece: Piece, bounce: Bounce) -> list[_Run]:
    """What of a piece passes through the buffer: all, or what is left of blocks at both ends."""
    low, high = piece.offset, piece.offset + piece.num_bytes
    inner_low, inner_high = round_up(low), round_down(high)
    if not piece.is_lined_up or inner_low >= inner_high:
        begin = round_down(low)
        return [_Run(begin, round_up(high) - begin, bounce.address, low, high, piece.address)]
    runs = []
    if low < inner_low:
        runs.append(_Run(inner_low - BLOCK_BYTES, BLOCK_BYTES, bounce.address, low, inner_low, piece.address))
    if high > inner_high:
        room, address = bounce.address + BLOCK_BYTES, piece.address + inner_high - low
        runs.append(_Run(inner_high, BLOCK_BYTES, room, inner_high, high, address))
    return runs


def _views_of(piece: Piece, runs: Sequence[_Run]) -> list[memoryview]:
    """The memory of all blocks of a piece, in order: one call moves them together."""
    views = [(run.offset, view(run.room, run.num_bytes)) for run in runs]
    inner_low, inner_high = round_up(piece.offset), round_down(piece.offset + piece.num_bytes)
    if piece.is_lined_up and inner_low < inner_high:
        views.append((inner_low, view(piece.address + inner_low - piece.offset, inner_high - inner_low)))
    return [memory for _, memory in sorted(views, key=lambda item: item[0])]


def read_directly(file: int, piece: Piece, bounce: Bounce) -> None:
    """Fill memory from a file that was opened for direct access."""
    runs = _runs_of(piece, bounce)
    move_all(os.preadv, file, _views_of(piece, runs), round_down(piece.offset))
    for run in runs:
        run.empty()


def write_directly(file: int, piece: Piece, bounce: Bounce) -> None:
    """Write memory to a file that was opened for direct access."""
    runs = _runs_of(piece, bounce)
    for run in runs:
        for offset in run.shared_blocks(ends_slot=piece.ends_slot):
            move_all(os.preadv, file, [view(run.room + offset - run.offset, BLOCK_BYTES)], offset)
        run.fill()
    move_all(os.pwritev, file, _views_of(piece, runs), round_down(piece.offset))


def read_buffered(file: int, piece: Piece) -> None:
    """Fill memory through the page cache."""
    move_all(os.preadv, file, [view(piece.address, piece.num_bytes)], piece.offset)
    _forget(file)


def write_buffered(file: int, piece: Piece) -> None:
    """Write memory through the page cache."""
    move_all(os.pwritev, file, [view(piece.address, piece.num_bytes)], piece.offset)
    _forget(file)


def _forget(file: int) -> None:
    """Let the page cache begin to write what is not yet on the disk, without waiting, and drop what is.

    All of the file: what was being written at the last call may be dropped at this one. So the cache holds no more of it than
    the disk is behind. Nothing is ever synced: nobody will read the file after this process.
    """
    if hasattr(os, "posix_fadvise"):
        with suppress(OSError):
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)


def view(address: int, num_bytes: int) -> memoryview:
    """Memory as the system's calls take it. Whoever calls keeps it alive."""
    return memoryview((ctypes.c_char * num_bytes).from_address(address)).cast("B")


def move_all(
    call: Callable[[int, Sequence[memoryview], int], int], file: int, views: Sequence[memoryview], offset: int
) -> None:
    """Call until everything has moved: the system may move less than it was asked for.

    Raises:
        EOFError: The file ends before that.
    """
    while views:
        count = call(file, views, offset)
        if count == 0:
            raise EOFError(f"the file ends at byte {offset}")
        offset += count
        views = _rest(views, count)


def _rest(views: Sequence[memoryview], count: int) -> Sequence[memoryview]:
    """What is left of views after so many bytes."""
    while views and count >= len(views[0]):
        count -= len(views[0])
        views = views[1:]
    return [views[0][count:], *views[1:]] if count else views


def can_go_directly(file: int) -> bool:
    """Whether an empty file takes a block, and gives it back: some file systems open a file for it, and refuse then."""
    bounce = Bounce()
    block = [view(bounce.address, BLOCK_BYTES)]
    try:
        return os.pwritev(file, block, 0) == os.preadv(file, block, 0) == BLOCK_BYTES
    except OSError:
        return False
    finally:
        with suppress(OSError):
            os.ftruncate(file, 0)
