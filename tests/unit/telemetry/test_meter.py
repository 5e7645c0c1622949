"""The meter by a clock that is set by hand: every second belongs to one phase, whatever the loop does."""

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.core.events import Event
from shardwise.core.ledger import Kind, Ledger, Tier
from shardwise.core.records import DiskUse, Process, StepRecord
from shardwise.telemetry.meter import Meter, Place
from shardwise.telemetry.sink import Callback


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Kept(Callback):
    def __init__(self) -> None:
        self.records: list[StepRecord] = []

    def step(self, record: StepRecord) -> None:
        self.records.append(record)


def new_meter() -> tuple[Meter, Clock, Kept]:
    clock, kept = Clock(), Kept()
    meter = Meter(0, Ledger(), lambda: Process(0, 0, 0), lambda: 0, clock)
    meter.sinks.append(kept)
    return meter, clock, kept


def event(waited_seconds: float) -> Event:
    return Event("gather", "a", "wire", 10, 1, 0.0, 1.0, 0.5, waited_seconds)


def one_step(meter: Meter, clock: Clock) -> None:
    for place, seconds in (
        (Place.FORWARD, 3.0),
        (Place.AFTER_FORWARD, 1.0),
        (Place.BACKWARD, 5.0),
        (Place.AFTER_BACKWARD, 0.5),
    ):
        meter.move(place)
        clock.now += seconds
    meter.move(Place.UPDATE)
    clock.now += 1.5
    meter.commit()
    clock.now += 2.0  # The next batch.


def test_phases_of_a_plain_loop() -> None:
    meter, clock, kept = new_meter()
    one_step(meter, clock)
    one_step(meter, clock)
    meter.flush()
    first, second = kept.records
    assert first.phases == {
        "data": 0.0,
        "forward": 4.0,
        "backward": 5.0,
        "exposed communication": 0.0,
        "waiting for the disk": 0.0,
        "optimizer": 2.0,
        "other": 0.0,
    }
    assert second.phases == {**first.phases, "data": 2.0}
    assert (first.seconds, second.seconds) == (11.0, 13.0)


def test_what_is_waited_for_is_taken_off_the_phase() -> None:
    meter, clock, kept = new_meter()
    meter.move(Place.FORWARD)
    clock.now += 3.0
    meter.record(event(1.0))
    meter.wait(0.5)
    meter.move(Place.BACKWARD)
    clock.now += 2.0
    meter.arrive()
    meter.commit()
    meter.flush()
    (record,) = kept.records
    assert (record.phases["forward"], record.phases["exposed communication"]) == (1.5, 1.5)
    assert record.arrived_seconds == 3.5 and record.busy_seconds == 3.5
    assert record.traffic[0].wire_bytes == 10 and record.wire_bytes == 10


@dataclass
class Disk:
    read_bytes: int = 1000
    written_bytes: int = 100
    waited_seconds: float = 7.0


def test_what_the_disk_does_belongs_to_the_step_and_its_waits_are_taken_off_the_phase() -> None:
    meter, clock, kept = new_meter()
    meter.disk = disk = Disk()
    meter.wait(9.0)  # Before the first step, and none of its time.
    for number in (1, 2):
        one_step(meter, clock)
        meter.move(Place.UPDATE)
        clock.now += 3.0
        disk.read_bytes, disk.written_bytes, disk.waited_seconds = 1000 + 10 * number, 100 + number, 7.0 + number
        meter.commit()
        disk.read_bytes += 5  # A save, between steps: the next one's.
    disk.waited_seconds += 1e9  # Of a thread that waits beside the loop: no more than the time there is.
    meter.move(Place.FORWARD)
    meter.commit()
    meter.flush()
    first, second, third = kept.records
    assert (first.disk, second.disk, third.disk) == (DiskUse(10, 1), DiskUse(10, 1), DiskUse(5, 0))
    assert first.phases["waiting for the disk"] == second.disk_seconds == 1.0
    assert first.phases["optimizer"] == 6.0 and first.busy_seconds == first.seconds
    assert third.phases["data"] == 0.0
    for record in kept.records:
        assert sum(record.phases.values()) == pytest.approx(record.seconds)


def test_a_step_ends_with_the_last_of_its_updates() -> None:
    meter, clock, kept = new_meter()
    one_step(meter, clock)
    meter.log({"loss": 1.0})
    meter.move(Place.UPDATE)  # A second optimizer.
    clock.now += 1.0
    meter.commit()
    assert kept.records == []
    meter.log({"tokens": 5.0})
    meter.move(Place.FORWARD)
    (record,) = kept.records
    assert record.values == {"loss": 1.0, "tokens": 5.0} and record.seconds == 14.0


def test_nothing_is_measured_while_it_is_off() -> None:
    meter, clock, kept = new_meter()
    meter.is_on = False
    one_step(meter, clock)
    meter.record(event(1.0))
    meter.flush()
    assert kept.records == [] and meter.last is None


def test_a_listener_that_fails_is_left_out_and_ends_nothing(caplog: pytest.LogCaptureFixture) -> None:
    class Full(Callback):
        def step(self, record: StepRecord) -> None:
            raise OSError("No space left on device")

    meter, clock, kept = new_meter()
    meter.sinks.insert(0, Full())
    one_step(meter, clock)
    one_step(meter, clock)
    meter.flush()
    assert len(kept.records) == 2 and meter.sinks == [kept]
    assert [record.getMessage() for record in caplog.records] == [
        "Full fails, and is told nothing more: OSError: No space left on device"
    ]


def test_peaks_begin_anew_with_each_step() -> None:
    ledger, clock = Ledger(), Clock()
    meter = Meter(0, ledger, lambda: Process(0, 0, 0), lambda: 0, clock)
    ledger.add(Kind.GRAD, 100)
    ledger.add(Kind.GRAD, -70)
    one_step(meter, clock)
    one_step(meter, clock)
    meter.flush()
    assert meter.last is not None
    assert [(each.live_bytes, each.peak_bytes) for each in meter.last.held] == [(30, 30)]
    assert (meter.last.peak_bytes, ledger.peak_bytes, ledger.peak(Kind.GRAD)) == (30, 100, 100)


def test_a_machine_that_answers_slowly_is_asked_seldom() -> None:
    clock, num_looks = Clock(), 0

    def look() -> Process:
        nonlocal num_looks
        num_looks += 1
        clock.now += 0.5
        return Process(1, 2, 3)

    meter = Meter(0, Ledger(), look, lambda: 0, clock)
    for _ in range(41):
        one_step(meter, clock)
    assert num_looks == 1 + 40 // 4  # In the first step, and then in every fourth: 0.5 s would be due every 125 s.


@given(st.lists(st.tuples(st.sampled_from(Place), st.floats(0, 10), st.floats(0, 1), st.booleans()), min_size=1, max_size=60))
def test_phases_add_up_whatever_the_loop_does(moves: list[tuple[Place, float, float, bool]]) -> None:
    meter, clock, kept = new_meter()
    for place, seconds, part, is_update in moves:
        meter.move(place)
        clock.now += seconds
        meter.wait(seconds * part)
        if is_update:
            meter.commit()
    meter.flush()
    for record in kept.records:
        assert abs(sum(record.phases.values()) - record.seconds) < 1e-6
        assert all(seconds >= -1e-9 for seconds in record.phases.values())


def test_activations_are_what_the_forward_leaves_beyond_the_ledger() -> None:
    ledger, clock, allocated = Ledger(), Clock(), 1000
    meter = Meter(0, ledger, lambda: Process(allocated, 0, 0), lambda: allocated, clock)
    ledger.add(Kind.PARAM, 300)
    for _ in range(2):
        meter.move(Place.FORWARD)
        ledger.add(Kind.GATHERED, 50)
        allocated += 50 + 400  # 400 bytes of activations.
        meter.move(Place.AFTER_FORWARD)
        ledger.add(Kind.GATHERED, -50)
        allocated -= 450
        clock.now += 100.0
        meter.commit()
    meter.flush()
    assert meter.last is not None
    assert {each.kind: each.peak_bytes for each in meter.last.held}["activations"] == 400


def test_memory_that_is_mapped_from_the_system_is_none_of_the_allocators() -> None:
    ledger = Ledger()
    ledger.add(Kind.PARAM, 100)
    ledger.add(Kind.STAGING, 7)
    ledger.add(Kind.OPTIM, 50, Tier.HOST)
    assert (ledger.live_on(Tier.DEVICE), ledger.allocated_bytes) == (107, 100)
