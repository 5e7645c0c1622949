"""Measured facts. The executor records them; nothing else does."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import NamedTuple


class Event(NamedTuple):
    """One collective: what it was for, what it moved over which link, and how long it took and was waited for.

    ``begin_seconds`` and ``end_seconds`` are of this process's clock: when it was issued, and when its bytes were there.
    ``moving_seconds`` is how long bytes were on their way: less than the time between the two where they were not asked for at
    once, and at most that time where nobody can tell.
    """

    op: str
    unit: str
    link: str
    wire_bytes: int
    num_messages: int
    begin_seconds: float
    end_seconds: float
    moving_seconds: float
    waited_seconds: float


@dataclass
class Totals:
    """Sums over events by op since the last reset."""

    num_collectives: Counter[str] = field(default_factory=Counter)
    num_messages: Counter[str] = field(default_factory=Counter)
    wire_bytes: Counter[str] = field(default_factory=Counter)
    waited_seconds: float = 0.0

    def record(self, event: Event) -> None:
        """Count one event."""
        self.num_collectives[event.op] += 1
        self.num_messages[event.op] += event.num_messages
        self.wire_bytes[event.op] += event.wire_bytes
        self.waited_seconds += event.waited_seconds

    def reset(self) -> None:
        """Forget what was counted."""
        self.num_collectives.clear()
        self.num_messages.clear()
        self.wire_bytes.clear()
        self.waited_seconds = 0.0
