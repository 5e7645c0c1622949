"""Ranges of a line of bytes, all cut at blocks: which of them nobody holds. Integers only."""

from __future__ import annotations

from bisect import bisect_left

from shardwise.core.errors import ShardwiseError

BLOCK_BYTES = 4096
"""What disks move at once: offsets, lengths and addresses that are multiples of it suit all that are in use."""


def round_up(num_bytes: int) -> int:
    """To whole blocks.

    >>> round_up(0), round_up(1), round_up(4096)
    (0, 4096, 4096)
    """
    return -(-num_bytes // BLOCK_BYTES) * BLOCK_BYTES


def round_down(num_bytes: int) -> int:
    """To whole blocks.

    >>> round_down(4095), round_down(4097)
    (0, 4096)
    """
    return num_bytes // BLOCK_BYTES * BLOCK_BYTES


class FreeRanges:
    """What nobody holds: the first range that is large enough serves, and neighbours become one.

    >>> free = FreeRanges(100)
    >>> free.take(60), free.take(30), free.take(20)
    (0, 60, None)
    >>> free.give(0, 60); free.free_bytes, free.largest_bytes
    (70, 60)
    >>> free.give(60, 30); free.largest_bytes
    100
    """

    def __init__(self, num_bytes: int = 0) -> None:
        self._ranges: list[tuple[int, int]] = []
        """Begin and end of each, in order; no two of them touch."""
        self.free_bytes = 0
        self.give(0, num_bytes)

    @property
    def largest_bytes(self) -> int:
        """The most that could be taken at once."""
        return max((end - begin for begin, end in self._ranges), default=0)

    def ending_at(self, end: int) -> int:
        """How many bytes are free just before an offset."""
        begin, last = self._ranges[-1] if self._ranges else (0, 0)
        return last - begin if last == end else 0

    def take(self, num_bytes: int) -> int | None:
        """Where so many bytes are from now on held, or None if no range is large enough."""
        if num_bytes == 0:
            return 0
        for at, (begin, end) in enumerate(self._ranges):
            if end - begin >= num_bytes:
                if end - begin == num_bytes:
                    del self._ranges[at]
                else:
                    self._ranges[at] = (begin + num_bytes, end)
                self.free_bytes -= num_bytes
                return begin
        return None

    def give(self, begin: int, num_bytes: int) -> None:
        """Nobody holds these bytes any more."""
        if num_bytes == 0:
            return
        end = begin + num_bytes
        at = bisect_left(self._ranges, (begin, begin))
        if (at and self._ranges[at - 1][1] > begin) or (at < len(self._ranges) and self._ranges[at][0] < end):
            raise ShardwiseError(f"Bytes {begin} to {end} were given back, but nobody held all of them.")
        joins_next = at < len(self._ranges) and self._ranges[at][0] == end
        joins_last = at > 0 and self._ranges[at - 1][1] == begin
        first, last = at - joins_last, at + joins_next
        self._ranges[first:last] = [
            (self._ranges[first][0] if joins_last else begin, self._ranges[at][1] if joins_next else end)
        ]
        self.free_bytes += num_bytes
