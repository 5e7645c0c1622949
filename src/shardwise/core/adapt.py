"""Decides, from what all ranks have measured, whether state is moved or more is gathered ahead. Pure: ranks with equal measures agree.

Under pressure, what costs the least time goes first: a unit gathered ahead, then the optimizer's state, gradients, parameters. Where
there has been ample room for a while, what costs the most comes back. The limits lie so far apart that what was done is not undone
while loads stay as they are; and what came back in vain waits twice as long the next time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from shardwise.core.ledger import Tier
from shardwise.core.plan import StateKind

HIGH_PART = 0.9
"""Of a device's memory: where a peak is expected above it, state leaves the device."""
GOAL_PART = 0.85
"""So much state leaves that the peak is expected below this part."""
LOW_PART = 0.75
"""State comes back if the peak is expected to stay below this part."""
WAIT_PART = 0.05
"""Of a step: where gathers are waited for longer, more is gathered ahead."""
LEAST_GAIN = 0.2
"""Of the time waited: what gathering more ahead must save."""
PATIENCE_LOOKS = 3
MOST_PREFETCH = 4
_MOST_PATIENCE_LOOKS = 1 << 20
_HOST_PART = 0.5
"""Of the host's free memory: what all ranks together may move there."""
_LASTING = (StateKind.OPTIM, StateKind.PARAM)
"""What is on the device at the peak in any case. Gradients come after it, unless they are accumulated: they are not counted on."""
_OUT = (StateKind.OPTIM, StateKind.GRAD, StateKind.PARAM)
_BACK = (StateKind.PARAM, StateKind.OPTIM, StateKind.GRAD)


@dataclass(frozen=True)
class Measures:
    """What one rank has seen since the last look: the peak on its device, and a step's time with what it waited for gathers."""

    peak_bytes: int
    capacity_bytes: int
    """0, if nobody knows it: then nothing is moved."""
    host_free_bytes: int
    step_seconds: float
    waited_seconds: float


@dataclass(frozen=True)
class Situation:
    """What could be done; the same on all ranks.

    Args:
        freed_bytes: By kind of state on the device: what its move would free on a rank.
        back_bytes: By kind of state that was moved off the device: what it would take to bring it back.
        prefetch: Units gathered ahead.
        unit_bytes: What one of them takes.
        is_fetching: Whether anything is gathered for its use at all.
        is_on_host: Whether the device is the CPU.
    """

    freed_bytes: Mapping[StateKind, int]
    back_bytes: Mapping[StateKind, int]
    prefetch: int
    unit_bytes: int
    is_fetching: bool
    is_on_host: bool


@dataclass(frozen=True)
class Past:
    """What is remembered from look to look."""

    part: float | None = None
    """What was held of the device at the last look, if nothing was changed since."""
    num_calm: int = 0
    """Looks in a row at which there was room for something to come back."""
    returned: frozenset[StateKind] = frozenset()
    patience: Mapping[StateKind, int] = field(default_factory=dict)
    waited_part: float | None = None
    """What was waited for before more was gathered ahead, until it is known whether that helped."""
    most_prefetch: int = MOST_PREFETCH


@dataclass(frozen=True)
class Decision:
    """What is done. ``part``: of the device, expected at the peak; ``waited_part``: of a step, waited for gathers."""

    moves: tuple[tuple[StateKind, Tier], ...]
    prefetch: int
    reason: str
    part: float
    waited_part: float


def held_part(measures: Sequence[Measures], extra_bytes: int = 0) -> float:
    """The largest part of a device that any rank holds at its peak."""
    return max(((each.peak_bytes + extra_bytes) / each.capacity_bytes for each in measures if each.capacity_bytes), default=0.0)


def decide(situation: Situation, measures: Sequence[Measures], past: Past) -> tuple[Decision | None, Past]:
    """What to do now, and what to remember.

    >>> hungry = [Measures(95, 100, 1000, 1.0, 0.0)]
    >>> decision, _ = decide(Situation({StateKind.OPTIM: 20}, {}, 1, 5, False, False), hungry, Past())
    >>> decision.moves
    ((<StateKind.OPTIM: 'optimizer state'>, <Tier.HOST: 'host'>),)
    """
    part = held_part(measures)
    growth = 0.0 if past.part is None else max(0.0, part - past.part)
    # A rank that waits for a slow one waits in any case: what all of them wait is the way of the bytes.
    waited = min((each.waited_seconds / each.step_seconds for each in measures if each.step_seconds), default=0.0)
    if part + growth > HIGH_PART:
        return _relieve(situation, measures, past, growth, waited)
    past = replace(past, part=part)
    if past.waited_part is not None:
        is_vain = waited > past.waited_part * (1 - LEAST_GAIN)
        past = replace(past, waited_part=None)
        if is_vain and situation.prefetch > 0:
            less = situation.prefetch - 1
            reason = "to gather more ahead has saved no time"
            return Decision((), less, reason, part, waited), replace(past, part=None, most_prefetch=less)
    found = next((kind for kind in _BACK if _has_room(situation.back_bytes.get(kind), measures, growth)), None)
    past = replace(past, num_calm=past.num_calm + 1 if found is not None else 0)
    if found is not None and past.num_calm >= past.patience.get(found, PATIENCE_LOOKS):
        decision = Decision(((found, Tier.DEVICE),), situation.prefetch, "there is room on the device", part, waited)
        return decision, replace(past, part=None, num_calm=0, returned=past.returned | {found})
    can_fetch = situation.is_fetching and situation.prefetch < past.most_prefetch
    if can_fetch and waited > WAIT_PART and _has_room(situation.unit_bytes, measures, growth):
        decision = Decision((), situation.prefetch + 1, "gathers are waited for", part, waited)
        return decision, replace(past, part=None, waited_part=waited)
    return None, past


def _has_room(num_bytes: int | None, measures: Sequence[Measures], growth: float) -> bool:
    is_known = all(each.capacity_bytes for each in measures)
    return num_bytes is not None and is_known and held_part(measures, num_bytes) + growth < LOW_PART


def _relieve(
    situation: Situation, measures: Sequence[Measures], past: Past, growth: float, waited: float
) -> tuple[Decision | None, Past]:
    """Let go of what costs least, until the peak is expected below the goal."""
    freed, prefetch = 0, situation.prefetch
    moves: list[tuple[StateKind, Tier]] = []
    if situation.is_fetching and prefetch > 0 and situation.unit_bytes:
        prefetch, freed = prefetch - 1, situation.unit_bytes
    host_bytes = _HOST_PART * min(each.host_free_bytes for each in measures)
    for kind in _OUT:
        num_bytes = situation.freed_bytes.get(kind, 0)
        if num_bytes <= 0 or held_part(measures, -freed) + growth <= GOAL_PART:
            continue
        host_bytes -= num_bytes * len(measures)
        moves.append((kind, Tier.DISK if situation.is_on_host or host_bytes < 0 else Tier.HOST))
        freed += num_bytes if kind in _LASTING else 0
    expected = held_part(measures) + growth
    if not moves and prefetch == situation.prefetch:
        return None, replace(past, part=held_part(measures), num_calm=0)
    again = {kind for kind, _ in moves} & past.returned
    longer = {kind: min(_MOST_PATIENCE_LOOKS, 2 * past.patience.get(kind, PATIENCE_LOOKS)) for kind in again}
    past = replace(
        past, part=None, num_calm=0, returned=past.returned - again, patience={**past.patience, **longer}, waited_part=None
    )
    return Decision(tuple(moves), prefetch, "the device's memory is nearly used up", expected, waited), past
