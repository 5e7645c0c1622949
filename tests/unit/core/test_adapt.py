"""What is decided of measures: it helps, all ranks decide alike, and nothing goes to and fro."""

from dataclasses import dataclass, field, replace

from hypothesis import given
from hypothesis import strategies as st

from shardwise.core.adapt import GOAL_PART, HIGH_PART, LOW_PART, Measures, Past, Situation, decide, held_part
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
        waited_seconds=st.sampled_from([0.0, 0.03, 0.2]),
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
)
pasts = st.builds(Past, part=st.none() | st.floats(0, 1), num_calm=st.integers(0, 5), waited_part=st.none() | st.floats(0, 1))


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
    assert decision.moves or decision.prefetch != situation.prefetch
    growth = max(0.0, held_part(measures) - past.part) if past.part is not None else 0.0
    freed = situation.unit_bytes if decision.prefetch < situation.prefetch else 0
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
