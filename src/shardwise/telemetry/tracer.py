"""Writes down single steps in detail: spans on lanes, and every change of the ledger. Off but in the steps that were chosen."""

from __future__ import annotations

from collections.abc import Callable, Collection

from shardwise.core.events import Event
from shardwise.core.ledger import Account, Ledger
from shardwise.core.records import Lane, Span, StepTrace


class Tracer:
    """Traces chosen steps of one rank.

    Args:
        rank: Whose steps.
        ledger: Watched while a step is traced.
        allocated: Asks the allocator how many bytes it has given out; what the ledger does not know of them is activations and
            temporary values.
        clock: Seconds from any beginning.
    """

    def __init__(self, rank: int, ledger: Ledger, allocated: Callable[[], int], clock: Callable[[], float]) -> None:
        self.is_on = False
        self.steps: Collection[int] = ()
        self._allocated = allocated
        self._rank = rank
        self._ledger = ledger
        self._clock = clock
        self._begin_seconds = 0.0
        self._synced_seconds = 0.0
        self._spans: list[Span] = []
        self._opened: dict[tuple[str, str], float] = {}
        self._lap_seconds = 0.0
        self._changes: list[tuple[float, Account | None, int, int]] = []

    def begin_step(self, step: int, now: float) -> None:
        """Trace the step that begins, if it was chosen."""
        self.is_on = step in self.steps
        if not self.is_on:
            return
        self._begin_seconds, self._synced_seconds = now, 0.0
        self._spans, self._opened, self._changes = [], {}, []
        allocated = self._allocated()
        for account in self._ledger.accounts:
            self._changes.append((now, account, self._ledger.live(account[1], account[0]), allocated))
        self._ledger.watch = self._note

    def _note(self, account: Account | None, live_bytes: int) -> None:
        """What an account holds now; or, of none, what the allocator has given out."""
        allocated = self._allocated()
        self._changes.append((self._clock(), account, live_bytes, allocated))

    def add(self, lane: str, name: str, begin: float, end: float) -> None:
        """Something took from one time of the clock to another."""
        begin = max(begin, self._begin_seconds)
        self._spans.append(Span(lane, name, begin - self._begin_seconds, end - self._begin_seconds))

    def add_event(self, event: Event) -> None:
        """A collective, from the time when it was issued."""
        begin, end = (seconds - self._begin_seconds for seconds in (event.begin_seconds, event.end_seconds))
        name = f"{event.op} {event.unit}".strip()
        self._spans.append(Span(Lane.COMMUNICATION, name, max(0.0, begin), end, event.wire_bytes))

    def open(self, verb: str, name: str) -> None:
        """Compute of something begins."""
        if self.is_on:
            self._opened[verb, name] = self._clock()
            self._note(None, 0)

    def close(self, verb: str, name: str) -> None:
        """It ends."""
        begin = self._opened.pop((verb, name), None) if self.is_on else None
        if begin is not None:
            self._note(None, 0)
            self.add(Lane.COMPUTE, f"{verb} {name}".strip(), begin, self._clock())

    def start_laps(self) -> None:
        """Compute begins of things that come one after the other."""
        if self.is_on:
            self._lap_seconds = self._clock()

    def lap(self, verb: str, name: str) -> None:
        """Compute of one of them has ended, and that of the next begins."""
        if self.is_on:
            self._note(None, 0)
            begin, self._lap_seconds = self._lap_seconds, self._clock()
            self.add(Lane.COMPUTE, f"{verb} {name}".strip(), begin, self._lap_seconds)

    def sync(self) -> None:
        """The step's common exchange has ended."""
        self._synced_seconds = self._clock() - self._begin_seconds

    def end_step(self, step: int) -> StepTrace | None:
        """What was traced, if it was."""
        if not self.is_on:
            return None
        self.is_on, self._ledger.watch = False, None
        accounts = list(dict.fromkeys(account for _, account, _, _ in self._changes if account is not None))
        kinds = tuple(f"{tier.value}: {kind.value}" for tier, kind in accounts)
        live = dict.fromkeys(accounts, 0)
        rows = []
        for seconds, account, num_bytes, allocated in self._changes:
            if account is not None:
                live[account] = num_bytes
            rows.append((seconds - self._begin_seconds, *live.values(), allocated))
        return StepTrace(step, self._rank, self._synced_seconds, tuple(self._spans), (*kinds, "allocated"), tuple(rows))
