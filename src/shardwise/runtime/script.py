"""A cursor over the gathers of one phase of the schedule. Ranks that skip units catch up, so that all issue one order."""

from __future__ import annotations

from collections.abc import Sequence

from shardwise.core.schedule import Entry


class Script:
    """The opening moments of a phase, how far this rank has come, and the units that came when the phase had passed them."""

    def __init__(self, entries: Sequence[Entry]) -> None:
        self._entries = tuple(entries)
        self._at = 0
        self.strays: list[str] = []

    @property
    def is_finished(self) -> bool:
        """Whether no further moment comes."""
        return self._at == len(self._entries)

    def arrive(self, unit: str) -> tuple[Sequence[Entry], Entry | None]:
        """Go to the next moment of a unit: the entries passed over, and its own (None if it does not come any more)."""
        for position in range(self._at, len(self._entries)):
            if self._entries[position].moment.unit == unit:
                passed = self._entries[self._at : position]
                self._at = position + 1
                return passed, self._entries[position]
        self.strays.append(unit)
        return (), None

    def finish(self) -> Sequence[Entry]:
        """The entries that never came."""
        rest = self._entries[self._at :]
        self._at = len(self._entries)
        return rest
