"""What is decided of measures: it helps, all ranks decide alike, and nothing goes to and fro."""

from dataclasses import dataclass, field, replace

from hypothesis import given
from hypothesis import strategies as st

from shardwise.core.adapt import (
    GOAL_PART,
    HIGH_PART,
    LOW_PART,
    WAIT_LOOKS,
    Ahead,
    Decision,
    Measures,
    Past,
    Situation,
    Staging,
    decide,
    held_part,
)
from shardwise.core.ledger import Tier
from shardwise.core.plan import GRAD, OPTIM, PARAM, StateKind

KINDS = (OPTIM, GRAD, PARAM)
CAPACITY = 1000
measures_of_ranks = st.lists(
    st.builds(
        Measures,
        peak_bytes=st.integers(0, 1200),
        capacity_bytes=st.sampled_from([0, CAPACITY]),
        host_free_bytes=st.integers(0, 5000),
        step_seconds=st.sampled_from([0.0, 1.0]),
        gather_seconds=st.sampled_from([0.0, 0.03, 0.2]),
        disk_seconds=st.sampled_from([0.0, 0.03, 0.2]),
    ),
    min_size=1,
    max_size=4,
)
situations = st.builds(
    Situation,
    freed_bytes=st.dictionaries(st.sampled_from(KINDS), st.integers(0, 300)),
    back_bytes=st.dictionaries(st.sampled_from(KINDS), st.integers(0, 300)),
    prefetch=st.integers(0, 4),
    unit_bytes=st.integers(0, 100),
    is_fetching=st.booleans(),
    is_on_host=st.booleans(),
    staging=st.none() | st.builds(Staging, st.integers(30, 100), st.just(30), st.integers(100, 300)),
    num_sharing=st.integers(1, 2),
)
waits = st.fixed_dictionaries(dict.fromkeys(Ahead, st.sampled_from([0.0, 0.03, 0.2])))
pasts = st.builds(
    Past,
    part=st.none() | st.floats(0, 1),
    num_calm=st.integers(0, 5),
    waits=st.lists(waits, max_size=WAIT_LOOKS).map(tuple),
    tried=st.none() | st.tuples(st.sampled_from(Ahead), st.floats(0, 1)),
)


@given(situations, measures_of_ranks, pasts, st.randoms())
def test_the_order_of_ranks_does_not_matter(situation: Situation, measures: list[Measures], past: Past, draw: object) -> None:
    mixed = list(measures)
    draw.shuffle(mixed)  # type: ignore[attr-defined]
    assert decide(situation, mixed, past) == decide(situation, measures, past)


@given(situations, measures_of_ranks, pasts)
def test_nothing_is_done_that_does_not_help(situation: Situation, measures: list[Measures], past: Past) -> None:
    decision, _ = decide(situation, measures, past)
    if decision is None:
        return
    assert decision.moves or decision.prefetch != situation.prefetch or decision.staging_bytes is not None
    growth = max(0.0, held_part(measures) - past.part) if past.part is not None else 0.0
    freed = situation.unit_bytes if decision.prefetch < situation.prefetch else 0
    staging = situation.staging
    if decision.staging_bytes is not None:
        assert staging is not None
        more = decision.staging_bytes - staging.num_bytes
        assert more != 0 or staging.num_bytes == staging.first_bytes
        assert staging.first_bytes <= decision.staging_bytes <= staging.most_bytes
        if more > 0 and situation.is_on_host:
            assert held_part(measures, more * situation.num_sharing) <= LOW_PART
        elif more > 0:
            assert more * len(measures) <= min(each.host_free_bytes for each in measures) / 2
        freed += max(0, -more) * situation.num_sharing if situation.is_on_host else 0
    for kind, tier in decision.moves:
        if tier is Tier.DEVICE:
            assert all(each.capacity_bytes for each in measures)
            assert held_part(measures, situation.back_bytes[kind]) < LOW_PART
        else:
            assert held_part(measures) + growth > HIGH_PART
            assert situation.freed_bytes[kind] > 0
            assert held_part(measures, -freed) + growth > GOAL_PART  # What went before was not enough.
            assert tier is Tier.DISK or not situation.is_on_host
            freed += situation.freed_bytes[kind] if kind is not GRAD else 0  # They may not be there yet at the peak.
    if decision.prefetch > situation.prefetch:
        assert situation.is_fetching
        assert held_part(measures, situation.unit_bytes) < LOW_PART


@dataclass
class Machine:
    """A run whose loads stay as they are: what a decision does to its measures. What a move frees may be less than was thought."""

    load_bytes: int
    state_bytes: dict[StateKind, int]
    truth: float
    waited: float
    helps: bool
    away: set[StateKind] = field(default_factory=set)
    prefetch: int = 1

    def measures(self) -> list[Measures]:
        held = sum(num_bytes for kind, num_bytes in self.state_bytes.items() if kind not in self.away)
        kept = sum((1 - self.truth) * self.state_bytes[kind] for kind in self.away)
        waited = self.waited / (1 + self.prefetch) if self.helps else self.waited
        peak = round(self.load_bytes + held + kept + 20 * self.prefetch)
        return [Measures(peak, CAPACITY, 10**6, 1.0, waited)] * 2

    def situation(self) -> Situation:
        here = {kind: num_bytes for kind, num_bytes in self.state_bytes.items() if kind not in self.away}
        there = {kind: num_bytes for kind, num_bytes in self.state_bytes.items() if kind in self.away}
        return Situation(here, there, self.prefetch, 20, is_fetching=True, is_on_host=False)


@given(
    st.integers(0, 900),
    st.fixed_dictionaries({kind: st.integers(0, 300) for kind in KINDS}),
    st.sampled_from([1.0, 0.7, 0.3, 1.3]),
    st.sampled_from([0.0, 0.1, 0.5]),
    st.booleans(),
)
def test_a_run_whose_loads_stay_comes_to_rest(
    load: int, states: dict[StateKind, int], truth: float, waited: float, helps: bool
) -> None:
    machine, past, when = Machine(load, states, truth, waited, helps), Past(), []
    for look in range(400):
        decision, past = decide(machine.situation(), machine.measures(), past)
        if decision is None:
            continue
        when.append(look)
        machine.prefetch = decision.prefetch
        for kind, tier in decision.moves:
            machine.away.symmetric_difference_update({kind})
            assert (kind in machine.away) == (tier is not Tier.DEVICE)
    if truth <= 1.0:  # What moves free was not more than thought: no kind goes twice.
        assert len(when) <= 12
    assert sum(look >= 200 for look in when) <= 2  # Else ever more rarely.


def test_pressure_that_grows_is_met_before_it_is_there() -> None:
    situation = Situation(dict.fromkeys(KINDS, 100), {}, 0, 10, is_fetching=False, is_on_host=False)
    rising = [replace(Measures(0, CAPACITY, 10**6, 1.0, 0.0), peak_bytes=peak) for peak in (700, 780, 860)]
    decision, past = decide(situation, rising[:1], Past())
    assert decision is None
    decision, past = decide(situation, rising[1:2], past)
    assert decision is None
    decision, past = decide(situation, rising[2:], past)
    assert decision is not None
    assert [kind for kind, _ in decision.moves] == [OPTIM]
    assert decision.part > HIGH_PART


def test_a_host_without_room_lets_it_go_to_disk() -> None:
    situation = Situation({OPTIM: 100, GRAD: 100}, {}, 2, 10, is_fetching=True, is_on_host=False)
    decision, _ = decide(situation, [Measures(1100, CAPACITY, 300, 1.0, 0.0)], Past())
    assert decision is not None
    assert decision.moves == ((OPTIM, Tier.HOST), (GRAD, Tier.DISK))
    assert decision.prefetch == 1


def _decide_often(situation: Situation, measures: Measures, past: Past) -> tuple[Decision | None, Past]:
    """What is decided when as many looks have seen the same as it takes to judge waits."""
    decision: Decision | None = None
    for look in range(WAIT_LOOKS):
        decision, past = decide(situation, [measures] * 2, past)
        assert look == WAIT_LOOKS - 1 or decision is None
    return decision, past


def test_one_slow_look_changes_nothing() -> None:
    situation = Situation({}, {}, 1, 10, is_fetching=True, is_on_host=False)
    past = Past()
    for gather_seconds in (0.9, 0.0, 0.0, 0.8, 0.0, 0.0):
        decision, past = decide(situation, [Measures(100, CAPACITY, 10**6, 1.0, gather_seconds)], past)
        assert decision is None


def test_more_is_gathered_ahead_until_that_saves_nothing() -> None:
    situation = Situation({}, {}, 1, 10, is_fetching=True, is_on_host=False)
    decision, past = _decide_often(situation, Measures(100, CAPACITY, 10**6, 1.0, 0.4), Past())
    assert decision is not None
    assert (decision.prefetch, decision.reason) == (2, Ahead.GATHERS.value)
    decision, past = _decide_often(replace(situation, prefetch=2), Measures(110, CAPACITY, 10**6, 1.0, 0.2), past)
    assert decision is not None
    assert decision.prefetch == 3
    decision, past = _decide_often(replace(situation, prefetch=3), Measures(120, CAPACITY, 10**6, 1.0, 0.19), past)
    assert decision is not None
    assert (decision.prefetch, decision.reason) == (2, "to gather more ahead has saved no time")
    decision, _ = _decide_often(replace(situation, prefetch=2), Measures(110, CAPACITY, 10**6, 1.0, 0.2), past)
    assert decision is None  # Not tried again.


def test_as_much_is_read_ahead_as_there_is_room_for_and_undone_in_vain() -> None:
    situation = Situation({}, {}, 1, 10, is_fetching=True, is_on_host=False, staging=Staging(30, 30, 500))
    waiting = Measures(100, CAPACITY, 800, 1.0, 0.0, 0.4)
    decision, past = _decide_often(situation, waiting, Past())
    assert decision is not None
    assert (decision.staging_bytes, decision.reason) == (30 + 800 // 2 // 2, Ahead.READS.value)
    raised = replace(situation, staging=Staging(230, 30, 500))
    decision, _ = _decide_often(raised, waiting, past)
    assert decision is not None
    assert (decision.staging_bytes, decision.reason) == (30, "to read more ahead has saved no time")
    decision, past = _decide_often(raised, replace(waiting, host_free_bytes=400, disk_seconds=0.0), past)
    assert decision is None
    decision, _ = decide(raised, [replace(waiting, host_free_bytes=150, disk_seconds=0.0)] * 2, past)
    assert decision is not None
    assert (decision.staging_bytes, decision.reason) == (30, "the host's memory is nearly used up")


def test_on_a_host_that_computes_what_is_read_ahead_goes_first() -> None:
    situation = Situation(
        {OPTIM: 300}, {}, 0, 10, is_fetching=False, is_on_host=True, staging=Staging(80, 30, 500), num_sharing=2
    )
    decision, _ = decide(situation, [Measures(940, CAPACITY, 10**6, 1.0, 0.0)] * 2, Past())
    assert decision is not None
    assert (decision.moves, decision.staging_bytes) == ((), 30)
