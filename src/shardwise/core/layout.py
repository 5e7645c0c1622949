"""Which rank owns which elements of a flat buffer. Integers only: no tensors, no ranks' state."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise

from shardwise.core.errors import PlanError

ALIGNMENT = 64
"""Elements. Parameters start at multiples of it, and shards are cut at multiples of it."""


def align(numel: int) -> int:
    """Round up to the alignment.

    >>> align(1), align(64), align(65)
    (64, 64, 128)
    """
    return -(-numel // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True)
class Overlap:
    """Elements ``[start, stop)`` that ``source`` owns in one layout and ``target`` in another."""

    source: int
    target: int
    start: int
    stop: int


@dataclass(frozen=True)
class Layout:
    """Cuts of a flat buffer: rank ``r`` owns ``[cuts[r], cuts[r + 1])``.

    >>> Layout.even(130, num_ranks=2).cuts
    (0, 128, 256)
    """

    cuts: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.cuts) < 2 or self.cuts[0] != 0 or any(a > b for a, b in pairwise(self.cuts)):
            raise PlanError(f"The cuts of a layout begin at 0 and never fall, but these are {self.cuts}.")
        if any(cut % ALIGNMENT for cut in self.cuts):
            raise PlanError(f"The cuts of a layout are multiples of {ALIGNMENT}, but these are {self.cuts}.")

    @classmethod
    def even(cls, numel: int, *, num_ranks: int) -> Layout:
        """Shards of one size; the buffer is padded up to a whole number of them."""
        size = align(-(-numel // num_ranks))
        return cls(tuple(rank * size for rank in range(num_ranks + 1)))

    @classmethod
    def weighted(cls, numel: int, *, weights: Sequence[float]) -> Layout:
        """Shards in proportion to ``weights``, cut at the nearest multiple of the alignment."""
        total = align(numel)
        ideal = [total * part / sum(weights) for part in accumulate(weights)]
        cuts = [min(total, round(cut / ALIGNMENT) * ALIGNMENT) for cut in ideal]
        return cls((0, *cuts[:-1], total))

    @classmethod
    def whole(cls, boundaries: Sequence[int], *, num_ranks: int) -> Layout:
        """Shards that end at ``boundaries`` (where parameters begin and end), as even as these allow."""
        total = boundaries[-1]
        ideal = [total * rank / num_ranks for rank in range(1, num_ranks)]
        inner = [min(boundaries, key=lambda boundary, cut=cut: abs(boundary - cut)) for cut in ideal]  # type: ignore[misc]
        return cls((0, *inner, total))

    @property
    def numel(self) -> int:
        """Elements of the whole buffer, padding included."""
        return self.cuts[-1]

    @property
    def num_ranks(self) -> int:
        """Ranks that share the buffer."""
        return len(self.cuts) - 1

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """Elements that each rank owns."""
        return tuple(b - a for a, b in pairwise(self.cuts))

    @property
    def is_even(self) -> bool:
        """Whether all ranks own equally many elements."""
        return len(set(self.sizes)) == 1

    def bounds(self, rank: int) -> tuple[int, int]:
        """First element of a rank's shard, and one past its last."""
        return self.cuts[rank], self.cuts[rank + 1]

    def overlaps(self, other: Layout) -> Iterator[Overlap]:
        """Pieces that move when a buffer in this layout is brought into ``other``.

        >>> list(Layout((0, 64, 128)).overlaps(Layout((0, 128))))
        [Overlap(source=0, target=0, start=0, stop=64), Overlap(source=1, target=0, start=64, stop=128)]
        """
        for source in range(self.num_ranks):
            for target in range(other.num_ranks):
                start = max(self.cuts[source], other.cuts[target])
                stop = min(self.cuts[source + 1], other.cuts[target + 1])
                if start < stop:
                    yield Overlap(source, target, start, stop)
