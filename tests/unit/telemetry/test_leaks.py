"""Growth is found, and noise is not taken for it."""

import random

import pytest

from shardwise.core.records import Held, Process
from shardwise.telemetry.leaks import UNBOOKED, Leak, LeakWatch
from tests.unit.report.made import record

KiB = 1024


class Someone:
    """Is asked, and counts how often."""

    def __init__(self, name: str | None = "someone") -> None:
        self.name = name
        self.calls: list[str] = []

    def look(self) -> None:
        self.calls.append("look")

    def look_again(self) -> None:
        self.calls.append("look again")

    def owner(self, num_bytes: int) -> str | None:
        self.calls.append("owner")
        return self.name


def watched(
    booked: list[int], unbooked: list[int] | None = None, owner: str | None = "someone"
) -> tuple[list[Leak], list[str]]:
    """Leaks found in a series of looks, and what was asked for in turn."""
    leaks: list[Leak] = []
    witness = Someone(owner)
    watch = LeakWatch(witness, leaks.append)
    for step, num_bytes in enumerate(booked, start=1):
        beside = 10**8 if unbooked is None else unbooked[step - 1]
        held = (Held("device", "gradient shards", num_bytes, num_bytes),)
        watch.step(record(step, 0, held=held, process=Process(num_bytes + beside, 0, 0)))
    return leaks, witness.calls


def test_growth_from_some_step_on_is_found_once_with_that_step() -> None:
    series = [1000] * 40 + [1000 + 64 * at for at in range(1, 80)]
    (leak,), calls = watched(series)
    assert leak.kind == "gradient shards (device)" and leak.owner == "someone"
    assert leak.found_step <= 40 + 50 and 38 <= leak.first_step <= leak.found_step
    assert leak.bytes_per_step == pytest.approx(64, rel=0.2)
    assert calls == ["look", "look again", "owner"]


def test_growth_every_other_step_is_found() -> None:
    (leak,), _ = watched([1000 + 4096 * (at // 2) for at in range(60)])
    assert leak.found_step <= 50


@pytest.mark.parametrize("seed", range(5))
def test_noise_steps_and_sawteeth_are_no_growth(seed: int) -> None:
    draw = random.Random(seed)
    noise = [10**6 + draw.randrange(10**5) for _ in range(300)]
    steps = [10**6 + 10**5 * (at // 100) for at in range(300)]
    teeth = [10**6 + 10**4 * (at % 9) for at in range(300)]
    for series in (noise, steps, teeth):
        assert watched(series)[0] == [] and watched([1000] * 300, series)[0] == []


@pytest.mark.parametrize("every", [4, 7, 10, 12, 20, 25])
def test_what_evaluations_leave_behind_once_is_no_growth(every: int) -> None:
    """A little that the program itself gathers makes each look higher than the one before: it must not make a leak of the jump."""
    kept = [10**8 + 100 * at + (200 * KiB if at >= every else 0) for at in range(300)]
    while_held = [10**8 + 100 * at + (200 * KiB if at % every < every // 2 else 0) for at in range(300)]
    for series in (kept, while_held):
        assert watched([1000] * 300, series)[0] == []


def test_little_growth_beside_the_ledger_is_the_programs_own() -> None:
    assert watched([1000] * 300, [10**8 + 200 * at for at in range(300)])[0] == []
    (leak,), _ = watched([1000] * 300, [10**8 + 8 * KiB * at for at in range(300)])
    assert leak.kind == UNBOOKED and leak.found_step <= 50
    assert "8 KiB a step" in str(leak) and "someone" in str(leak)


def test_what_nobody_holds_is_told_of_when_it_is_much() -> None:
    little = [10**8 + 8 * KiB * at for at in range(300)]
    assert watched([1000] * 300, little, owner=None)[0] == []
    (leak,), _ = watched([1000] * 300, [10**8 + 1024 * KiB * at for at in range(300)], owner=None)
    assert 64 <= leak.found_step <= 100 and "held by an extension" in str(leak)
    (leak,), _ = watched([1000 + 64 * at for at in range(300)], owner=None)  # What is booked grows for a reason.
    assert leak.found_step <= 50


def test_what_is_booked_on_the_host_is_not_beside_the_ledger_of_a_cpu() -> None:
    for tiers, num_leaks in ((("device", "host"), 0), (("device",), 1)):
        leaks: list[Leak] = []
        watch = LeakWatch(Someone(), leaks.append, tiers)
        for step in range(1, 60):
            held = (Held("device", "buffers", 10, 10), Held("host", "copies for checkpoints", step * 10**6, step * 10**6))
            watch.step(record(step, 0, held=held, process=Process(10**8 + step * 10**6, 0, 0)))
        assert [leak.kind for leak in leaks].count(UNBOOKED) == num_leaks
