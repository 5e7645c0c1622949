"""Times the steps of one model on one rank: where the loop is, what is waited for, what moves. Knows neither models nor torch.

The loop is always at one *place*; the time that it spends there, less what it waits for others, belongs to one phase. So the
phases of a step add up to it, whatever users do in between.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from enum import Enum
from typing import NamedTuple, Protocol

from shardwise.core.events import Event
from shardwise.core.ledger import Kind, Ledger, Tier
from shardwise.core.records import DiskUse, Held, Lane, Phase, Process, StepRecord, Traffic
from shardwise.telemetry.leaks import LeakWatch
from shardwise.telemetry.sink import Sink
from shardwise.telemetry.tracer import Tracer

_log = logging.getLogger("shardwise")
_LOOK_PART = 0.004
"""How much of the time may go into asking the machine about the process."""
_LOOK_STEPS = 4
"""After so many steps it is asked in any case."""


class Place(Enum):
    """Where a training loop is. A step leads from OUTSIDE to OUTSIDE."""

    __hash__ = object.__hash__  # In C: enum's own is Python.

    OUTSIDE = "between steps"
    FORWARD = "forward"
    AFTER_FORWARD = "loss"
    BACKWARD = "backward"
    AFTER_BACKWARD = "after backward"
    UPDATE = "update"
    ASIDE = "a call without gradients"


_PHASE_AT = {
    Place.OUTSIDE: Phase.DATA,
    Place.FORWARD: Phase.FORWARD,
    Place.AFTER_FORWARD: Phase.FORWARD,
    Place.BACKWARD: Phase.BACKWARD,
    Place.AFTER_BACKWARD: Phase.OPTIMIZER,
    Place.UPDATE: Phase.OPTIMIZER,
    Place.ASIDE: Phase.OTHER,
}
_PHASE_BEFORE = {
    (Place.AFTER_BACKWARD, Place.FORWARD): Phase.DATA,  # The next batch of an accumulation.
    (Place.AFTER_BACKWARD, Place.ASIDE): Phase.OTHER,
    (Place.OUTSIDE, Place.ASIDE): Phase.OTHER,
    (Place.OUTSIDE, Place.UPDATE): Phase.OPTIMIZER,  # A second optimizer.
}
"""What the time between two places was for, where that depends on what comes next."""


class DiskCounter(Protocol):
    """What a disk tier counts from its beginning on."""

    read_bytes: int
    written_bytes: int

    @property
    def waited_seconds(self) -> float:
        """How long it was waited for."""
        ...


class Glance(NamedTuple):
    """A step that was committed: how long it took, what was waited for, and what lay beside the ledger after its forward."""

    seconds: float
    gather_seconds: float
    """With what was waited for the disk in forward and backward: parameters that rest there are read for gathers."""
    disk_seconds: float
    """By the update."""
    activation_bytes: int


class Meter:
    """Measures steps, and hands a record of each to those who listen.

    Args:
        rank: Whose steps these are.
        ledger: What the rank holds.
        look: Asks the machine about the process.
        allocated: Asks the allocator how many bytes it has given out.
        clock: Seconds from any beginning.
    """

    def __init__(
        self,
        rank: int,
        ledger: Ledger,
        look: Callable[[], Process],
        allocated: Callable[[], int],
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.clock = clock
        self.sinks: list[Sink] = []
        self.watch: LeakWatch | None = None
        self.disk: DiskCounter | None = None
        """Set if state rests on disk."""
        self.is_on = True
        self.is_watched = False
        """Whether what lies beside the ledger after a forward is looked at in every step."""
        self.last: StepRecord | None = None
        self.num_steps = 0
        self.tracer = Tracer(rank, ledger, allocated, clock)
        self._rank = rank
        self._ledger = ledger
        self._look = look
        self._allocated = allocated
        self._look_again_at = 0.0
        self._look_seconds = 0.0
        self._place = Place.OUTSIDE
        self._since: float | None = None
        self._waited_seconds = 0.0
        self._held_up_seconds = 0.0
        self._disk_seconds = 0.0
        """What the disk's counter of waits stood at when the loop came to its place."""
        self._disk_begin = self._disk_end = DiskUse(0, 0)
        """What its counters of bytes stood at when the step began, and when it was committed."""
        self._is_committed = False
        self._values: dict[str, float] = {}
        self._begin_step(0.0)

    def _begin_step(self, now: float) -> None:
        self._begin_seconds = now
        self._phases = dict.fromkeys(Phase, 0.0)
        self._arrived_seconds = self._pass_disk_seconds = 0.0
        self._traffic: dict[tuple[str, str, str], list[float]] = {}
        self._is_committed = False
        self._is_looking = now >= self._look_again_at or self.num_steps % _LOOK_STEPS == _LOOK_STEPS - 1
        self._beside_ledger_bytes = 0
        """The most that the allocator had given out beyond the ledger when a forward had ended."""

    # What the runtime tells

    def move(self, to: Place) -> None:
        """The loop comes to another place: what has passed since it came to the last one belongs to a phase."""
        if not self.is_on:
            return
        now = self.clock()
        if self._since is None:
            self._disk_begin, self._waited_seconds = self._disk_use(), 0.0
            self._begin_step(now)  # The first step has no time before it.
            self.tracer.begin_step(self.num_steps + 1, now)
        elif self._place is Place.OUTSIDE and self._is_committed and to is not Place.UPDATE:
            self._end_step(self._since)
        since = now if self._since is None else self._since
        if to is Place.AFTER_FORWARD and (self._is_looking or self.is_watched):
            self._beside_ledger_bytes = max(self._beside_ledger_bytes, self._allocated() - self._ledger.allocated_bytes)
            self._look_seconds += self.clock() - now
        phase = _PHASE_BEFORE.get((self._place, to)) or _PHASE_AT[self._place]
        seconds = now - since - self._waited_seconds - self._held_up_seconds
        on_disk = self._take_disk_seconds(seconds)
        self._phases[phase] += seconds - on_disk
        self._phases[Phase.COMMUNICATION] += self._waited_seconds
        self._phases[Phase.OTHER] += self._held_up_seconds
        self._phases[Phase.DISK] += on_disk
        self._pass_disk_seconds += on_disk if phase in (Phase.FORWARD, Phase.BACKWARD) else 0.0
        if self.tracer.is_on:
            self.tracer.add(Lane.LOOP, self._place.value, since, now)
        self._place, self._since, self._waited_seconds, self._held_up_seconds = to, now, 0.0, 0.0

    def _take_disk_seconds(self, most_seconds: float) -> float:
        """How long the disk was waited for at the place that is left; no longer than that took: threads of savers wait as well."""
        if self.disk is None:
            return 0.0
        before, self._disk_seconds = self._disk_seconds, self.disk.waited_seconds
        return 0.0 if self._since is None else max(0.0, min(self._disk_seconds - before, most_seconds))

    def use_disk(self, disk: DiskCounter | None) -> None:
        """Look at another disk's counters from now on, or at none."""
        self.disk = disk
        self._disk_begin = self._disk_end = self._disk_use()
        self._disk_seconds = 0.0 if disk is None else disk.waited_seconds

    def _disk_use(self) -> DiskUse:
        """What the disk's counters stand at."""
        return DiskUse(0, 0) if self.disk is None else DiskUse(self.disk.read_bytes, self.disk.written_bytes)

    @property
    def place(self) -> Place:
        """Where the loop is."""
        return self._place

    def record(self, event: Event) -> None:
        """A collective has ended."""
        if not self.is_on:
            return
        self._waited_seconds += event.waited_seconds
        key = (event.op, event.unit, event.link)
        row = self._traffic.get(key)
        if row is None:
            row = self._traffic[key] = [0, 0, 0, 0.0, 0.0]
        row[0] += 1
        row[1] += event.num_messages
        row[2] += event.wire_bytes
        row[3] += event.moving_seconds
        row[4] += event.waited_seconds
        if self.tracer.is_on:
            self.tracer.add_event(event)

    def wait(self, seconds: float) -> None:
        """Others were waited for, beside the collectives that are recorded."""
        self._waited_seconds += seconds

    def hold_up(self, seconds: float) -> None:
        """The loop was held up by what is no part of training, such as a save beside it."""
        if self.is_on:
            self._held_up_seconds += seconds

    def arrive(self) -> None:
        """This rank has come to the step's common exchange."""
        if self.is_on and self._since is not None:
            waited = self._waited_seconds + self._phases[Phase.COMMUNICATION]
            self._arrived_seconds = self.clock() - self._begin_seconds - waited

    def commit(self) -> None:
        """An update is made: the step ends with it, unless another update follows."""
        self.move(Place.OUTSIDE)
        self._is_committed = True
        self._disk_end = self._disk_use()

    def glance(self) -> Glance:
        """The step that was just committed. Activations are 0 where the ledger has them, or nobody has looked."""
        seconds = 0.0 if self._since is None else self._since - self._begin_seconds
        gathered = self._pass_disk_seconds + sum(row[4] for (op, _, _), row in self._traffic.items() if op == "gather")
        is_booked = self._ledger.peak_since_mark(Kind.ACTIVATION) > 0
        activation_bytes = 0
        if not is_booked and self._beside_ledger_bytes:
            between = self._allocated() - self._ledger.allocated_bytes
            activation_bytes = max(0, self._beside_ledger_bytes - between)
        return Glance(seconds, gathered, self._phases[Phase.DISK] - self._pass_disk_seconds, activation_bytes)

    # What users tell and ask

    def log(self, values: dict[str, float]) -> None:
        """Values of the step that is under way, or was just committed."""
        self._values.update(values)

    def tell(self, call: Callable[[Sink], None]) -> None:
        """Tell all who listen. One that fails is left out from then on: a full disk or a lost server must not end a training."""
        for sink in list(self.sinks):
            try:
                call(sink)
            except Exception as error:
                self.sinks.remove(sink)
                _log.warning("%s fails, and is told nothing more: %s: %s", type(sink).__name__, type(error).__name__, error)

    def flush(self) -> None:
        """End the step that was committed, if any, without waiting for the next one."""
        if self._is_committed and self._since is not None and self._place is Place.OUTSIDE:
            self._end_step(self._since)

    def _end_step(self, now: float) -> None:
        """All that belongs to the step is known. ``now`` is when its update ended."""
        self.num_steps += 1
        process = self._look_at_process() if self._is_looking else None
        self.last = StepRecord(
            step=self.num_steps,
            rank=self._rank,
            ended_at=time.time() - (self.clock() - now),
            seconds=now - self._begin_seconds,
            phases={phase.value: seconds for phase, seconds in self._phases.items()},
            arrived_seconds=self._arrived_seconds,
            held=(*held_in(self._ledger), *self._activations(process)),
            peak_bytes=self._ledger.peak_bytes_since_mark,
            process=process,
            traffic=_rows(self._traffic.items()),
            values=self._values,
            disk=self._disk_of_step(),
        )
        self._ledger.mark()
        self._values = {}
        record, trace = self.last, self.tracer.end_step(self.num_steps)
        self.tell(lambda sink: sink.step(record))
        if self.watch is not None:
            self.watch.step(record)
        if trace is not None:
            self.tell(lambda sink: sink.trace(trace))
        self._begin_step(now)
        self.tracer.begin_step(self.num_steps + 1, now)

    def _disk_of_step(self) -> DiskUse | None:
        begin, end = self._disk_begin, self._disk_end
        self._disk_begin = end
        return (
            None if self.disk is None else DiskUse(end.read_bytes - begin.read_bytes, end.written_bytes - begin.written_bytes)
        )

    def _look_at_process(self) -> Process:
        begin = self.clock()
        process = self._look()
        end = self.clock()
        self._look_again_at = end + (end - begin + self._look_seconds) / _LOOK_PART
        self._look_seconds = 0.0
        return process

    def _activations(self, process: Process | None) -> tuple[Held, ...]:
        """What the forward has left for the backward, by the allocator: beyond the ledger, and beyond what is there between steps."""
        is_booked = self._ledger.peak_since_mark(Kind.ACTIVATION) > 0
        if is_booked or process is None or not process.allocated_bytes or not self._beside_ledger_bytes:
            return ()
        between = process.allocated_bytes - self._ledger.allocated_bytes
        return (Held(Tier.DEVICE.value, Kind.ACTIVATION.value, 0, max(0, self._beside_ledger_bytes - between)),)


def held_in(ledger: Ledger) -> tuple[Held, ...]:
    """What a ledger holds, and the most since its mark."""
    rows = ((tier, kind, ledger.live(kind, tier), ledger.peak_since_mark(kind, tier)) for tier, kind in ledger.accounts)
    return tuple(Held(tier.value, kind.value, live, peak) for tier, kind, live, peak in rows if live or peak)


def _rows(traffic: Iterable[tuple[tuple[str, str, str], Sequence[float]]]) -> tuple[Traffic, ...]:
    return tuple(
        Traffic(*key, int(count), int(messages), int(size), moving, waited)
        for key, (count, messages, size, moving, waited) in traffic
    )
