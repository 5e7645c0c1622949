"""Finds memory that grows from step to step. Knows records only; who holds the memory is found by others."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Any, Protocol

from shardwise.core.ledger import MAPPED
from shardwise.core.records import StepRecord, plain_fields
from shardwise.core.sizes import format_bytes

NUM_LOOKS = 12
_NUM_BLOCKS = 4
_LEAST_EVENNESS = 0.25
"""Of a rise between blocks, against the mean of all: what jumps once, as at the first evaluation, does not leak."""
_WARM_UP_STEPS = 5
_CONFIRM_STEPS = 2
"""After which variables of a loop are bound to other things."""
_LEAST_BYTES = 32 * 1024
"""Of what is not booked: the program's own lists and caches grow by less in so many steps."""
_LEAST_UNOWNED_BYTES = 64 * 2**20
"""Of what is not booked and nobody is found to hold: logs of libraries that fill up, such as that of torch's collectives, have less."""
UNBOOKED = "memory beside the ledger"
NOBODY = "No tensors that Python knows have gathered: it is held by an extension, or is none of torch's."


@dataclass(frozen=True)
class Leak:
    """Memory of one kind that grows: since when, by how much a step, and who holds it, as far as that can be told."""

    kind: str
    first_step: int
    found_step: int
    bytes_per_step: float
    owner: str

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Leak:
        """Read plain values; what is unknown is left out."""
        return cls(**plain_fields(cls, values))

    def __str__(self) -> str:
        return (
            f"{self.kind} has grown since step {self.first_step} by {format_bytes(round(self.bytes_per_step))} a step "
            f"(found at step {self.found_step}). {self.owner}"
        )


class Growth:
    """The latest looks at one kind of memory."""

    def __init__(self, least_bytes: int) -> None:
        self._least_bytes = least_bytes
        self._looks: deque[tuple[int, int]] = deque(maxlen=NUM_LOOKS)
        self._first_bytes: int | None = None
        self.is_reported = False
        self.suspected_at = -NUM_LOOKS
        """The last step at which it seemed to grow."""
        self.grows_since: int | None = None
        """The step at which it was seen to grow, until it is asked who holds it."""
        self.asked_at = -NUM_LOOKS
        """The last step at which it was asked who holds it."""

    def add(self, step: int, num_bytes: int) -> None:
        """Take a look."""
        self._looks.append((step, num_bytes))
        self._first_bytes = num_bytes if self._first_bytes is None else self._first_bytes

    def rises(self, num_looks: int = NUM_LOOKS) -> bool:
        """Whether, over the last looks, no look of a block lies below one of the block before it, and blocks rise by like amounts."""
        looks = [num_bytes for _, num_bytes in self._looks][-num_looks:]
        if len(looks) < num_looks:
            return False
        size = NUM_LOOKS // _NUM_BLOCKS
        blocks = [looks[at : at + size] for at in range(0, num_looks, size)]
        middles = [median(block) for block in blocks]
        risen, num_rises = middles[-1] - middles[0], len(blocks) - 1
        if risen < self._least_bytes * num_rises / _NUM_BLOCKS:
            return False
        least_rise = max(1.0, _LEAST_EVENNESS * risen / num_rises)
        return all(max(before) <= min(after) for before, after in pairwise(blocks)) and all(
            after - before >= least_rise for before, after in pairwise(middles)
        )

    @property
    def first_step(self) -> int:
        """The first of the looks that lies above all before it and to which no later one comes back."""
        return self._looks[min(self._lowest + 1, len(self._looks) - 1)][0]

    @property
    def all_bytes(self) -> int:
        """How much it has grown since the first look."""
        return self._looks[-1][1] - (self._first_bytes or 0)

    @property
    def bytes_per_step(self) -> float:
        """How fast it grows."""
        (first, low), (last, high) = self._looks[self._lowest], self._looks[-1]
        return (high - low) / max(1, last - first)

    @property
    def _lowest(self) -> int:
        """The last of the lowest looks: from there on it grows."""
        least = min(num_bytes for _, num_bytes in self._looks)
        return max(at for at, (_, num_bytes) in enumerate(self._looks) if num_bytes == least)


class Witness(Protocol):
    """Knows who holds memory. All of it is slow, and called when memory seems to grow."""

    def look(self) -> None:
        """Note what is there, so that it can be told later what has come."""
        ...

    def look_again(self) -> None:
        """Note what is there now: what is gone some steps later was a step's own."""
        ...

    def owner(self, num_bytes: int) -> str | None:
        """Who holds what has come since the first look and was there at the second, or None if nobody is found.

        Args:
            num_bytes: How much has come since the first look.
        """
        ...


class LeakWatch:
    """Looks at every record, and tells of each kind that grows once.

    Args:
        witness: Asked who holds what grows.
        report: Called with what was found.
        tiers: Those whose memory comes from the allocator that is asked.
    """

    def __init__(self, witness: Witness, report: Callable[[Leak], None], tiers: Collection[str] = ("device",)) -> None:
        self._witness = witness
        self._report = report
        self._tiers = tiers
        self._growths: dict[str, Growth] = {}

    def step(self, record: StepRecord) -> None:
        """A step was committed."""
        if record.step <= _WARM_UP_STEPS:
            return
        for kind, num_bytes in self._looks_of(record):
            growth = self._growths.setdefault(kind, Growth(_LEAST_BYTES if kind == UNBOOKED else 1))
            growth.add(record.step, num_bytes)
            if not growth.is_reported:
                self._follow(kind, growth, record.step)

    def _follow(self, kind: str, growth: Growth, step: int) -> None:
        """First it seems to grow, then it does, and some steps later it is asked who has kept what was there."""
        if growth.grows_since is not None:
            if step - growth.grows_since >= _CONFIRM_STEPS:
                self._ask(kind, growth, step)
        elif growth.rises() and step - growth.asked_at >= NUM_LOOKS:
            growth.grows_since = step
            self._witness.look_again()
        elif growth.rises(NUM_LOOKS // 2) and step - growth.suspected_at >= NUM_LOOKS:
            growth.suspected_at = step
            self._witness.look()

    def _ask(self, kind: str, growth: Growth, step: int) -> None:
        """Something grows: tell of it, unless it is little and nobody holds it."""
        growth.asked_at, growth.grows_since = step, None
        owner = self._witness.owner(round(growth.bytes_per_step * (step - growth.suspected_at)))
        if owner is not None or kind != UNBOOKED or growth.all_bytes >= _LEAST_UNOWNED_BYTES:
            growth.is_reported = True
            self._report(Leak(kind, growth.first_step, step, growth.bytes_per_step, owner or NOBODY))

    def _looks_of(self, record: StepRecord) -> Iterable[tuple[str, int]]:
        for each in record.held:
            yield f"{each.kind} ({each.tier})", each.live_bytes
        if record.process is not None and record.process.allocated_bytes:
            booked = sum(each.live_bytes for each in record.held if each.tier in self._tiers and each.kind != MAPPED.value)
            yield UNBOOKED, record.process.allocated_bytes - booked
