"""Decides, from what all ranks have measured, whether state is moved or more is brought ahead. Pure: ranks with equal measures agree.

Under pressure, what costs the least time goes first: what was brought ahead, then the optimizer's state, gradients, parameters. Where
there has been ample room for a while, what costs the most comes back. The limits lie so far apart that what was done is not undone
while loads stay as they are; and what came back in vain waits twice as long the next time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from statistics import median
from typing import Any

from shardwise.core.ledger import Tier
from shardwise.core.plan import StateKind

HIGH_PART = 0.9
"""Of a device's memory: where a peak is expected above it, state leaves the device."""
GOAL_PART = 0.85
"""So much state leaves that the peak is expected below this part."""
LOW_PART = 0.75
"""State comes back if the peak is expected to stay below this part."""
WAIT_PART = 0.05
"""Of a step: where gathers or the disk are waited for longer, more is brought ahead."""
LEAST_GAIN = 0.2
"""Of the time waited: what bringing more ahead must save."""
WAIT_LOOKS = 3
"""Waits are judged by the median of so many looks since the last change: single steps are held up by whatever else a machine does."""
PATIENCE_LOOKS = 3
MOST_PREFETCH = 4
_MOST_PATIENCE_LOOKS = 1 << 20
_HOST_PART = 0.5
"""Of the host's free memory: what all ranks together may take of it."""
_LASTING = (StateKind.OPTIM, StateKind.PARAM)
"""What is on the device at the peak in any case. Gradients come after it, unless they are accumulated: they are not counted on."""
_OUT = (StateKind.OPTIM, StateKind.GRAD, StateKind.PARAM)
_BACK = (StateKind.PARAM, StateKind.OPTIM, StateKind.GRAD)


class Ahead(Enum):
    """What is brought before it is needed."""

    GATHERS = "gathers are waited for"
    READS = "the disk is waited for"


@dataclass(frozen=True)
class Measures:
    """What one rank has seen since the last look: the peak on its device, and the time of its steps with what it waited for."""

    peak_bytes: int
    capacity_bytes: int
    """0, if nobody knows it: then nothing is moved."""
    host_free_bytes: int
    step_seconds: float
    gather_seconds: float
    disk_seconds: float = 0.0

    def waited_part(self, ahead: Ahead) -> float:
        """Of the steps."""
        seconds = self.gather_seconds if ahead is Ahead.GATHERS else self.disk_seconds
        return seconds / self.step_seconds if self.step_seconds else 0.0


@dataclass(frozen=True)
class Staging:
    """The memory between disk and computation: what there is, what there was at first, and what more is of no use."""

    num_bytes: int
    first_bytes: int
    most_bytes: int


@dataclass(frozen=True)
class Situation:
    """What could be done; the same on all ranks.

    Args:
        freed_bytes: By kind of state on the device: what its move would free on a device.
        back_bytes: By kind of state that was moved off the device: what it would take to bring it back.
        prefetch: Units gathered ahead.
        unit_bytes: What one of them takes.
        is_fetching: Whether anything is gathered for its use at all.
        is_on_host: Whether the device is the CPU.
        staging: None, if it is not to be changed.
        num_sharing: Ranks whose staging is in one memory with that of others.
    """

    freed_bytes: Mapping[StateKind, int]
    back_bytes: Mapping[StateKind, int]
    prefetch: int
    unit_bytes: int
    is_fetching: bool
    is_on_host: bool
    staging: Staging | None = None
    num_sharing: int = 1


@dataclass(frozen=True)
class Past:
    """What is remembered from look to look."""

    part: float | None = None
    """What was held of the device at the last look, if nothing was changed since."""
    num_calm: int = 0
    """Looks in a row at which there was room for something to come back."""
    returned: frozenset[StateKind] = frozenset()
    patience: Mapping[StateKind, int] = field(default_factory=dict)
    waits: tuple[Mapping[Ahead, float], ...] = ()
    """Of a step, at the last looks since anything was changed."""
    tried: tuple[Ahead, float] | None = None
    """Of what more is brought ahead and what was waited before, until it is known whether that helped."""
    most: Mapping[Ahead, int] = field(default_factory=dict)
    """More than this has saved nothing."""


@dataclass(frozen=True)
class Decision:
    """What is done. ``part``: of the device, expected at the peak; ``waited_part``: of a step, waited for gathers and for the disk.

    ``staging_bytes`` is None if it stays as it is.
    """

    moves: tuple[tuple[StateKind, Tier], ...]
    prefetch: int
    reason: str
    part: float
    waited_part: float
    staging_bytes: int | None = None


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
    waits = {ahead: min(each.waited_part(ahead) for each in measures) for ahead in Ahead}
    stay = Decision((), situation.prefetch, "", part + growth, sum(waits.values()))
    if part + growth > HIGH_PART:
        return _relieve(situation, measures, past, stay)
    past = replace(past, part=part, waits=(*past.waits, waits)[-WAIT_LOOKS:])
    decision, past = _judge(situation, past, stay)
    if decision is not None:
        return decision, past
    staging = situation.staging
    if staging is not None and not situation.is_on_host:
        more_bytes = (staging.num_bytes - staging.first_bytes) * len(measures)
        if min(each.host_free_bytes for each in measures) < _HOST_PART * more_bytes:
            decision = replace(stay, staging_bytes=staging.first_bytes, reason="the host's memory is nearly used up")
            return decision, _changed(past, tried=None)
    found = next((kind for kind in _BACK if _has_room(situation.back_bytes.get(kind), measures, growth)), None)
    past = replace(past, num_calm=past.num_calm + 1 if found is not None else 0)
    if found is not None and past.num_calm >= past.patience.get(found, PATIENCE_LOOKS):
        decision = replace(stay, moves=((found, Tier.DEVICE),), reason="there is room on the device")
        return decision, _changed(past, num_calm=0, returned=past.returned | {found}, tried=None)
    return _bring_more(situation, measures, past, stay)


def _changed(past: Past, **changes: Any) -> Past:
    """What is remembered when something is changed: peaks and waits from before it say nothing of those after it."""
    return replace(past, part=None, waits=(), **changes)


def _waited(past: Past, ahead: Ahead) -> float | None:
    """Of a step; None, if there were too few looks."""
    return median(each[ahead] for each in past.waits) if len(past.waits) == WAIT_LOOKS else None


def _judge(situation: Situation, past: Past, stay: Decision) -> tuple[Decision | None, Past]:
    """Undo what was brought ahead in vain, as soon as that is known."""
    if past.tried is None:
        return None, past
    ahead, before = past.tried
    now = _waited(past, ahead)
    if now is None:
        return None, past
    past = replace(past, tried=None)
    if now <= before * (1 - LEAST_GAIN):
        return None, past
    if ahead is Ahead.GATHERS and situation.prefetch > 0:
        less = situation.prefetch - 1
        decision = replace(stay, prefetch=less, reason="to gather more ahead has saved no time")
    elif ahead is Ahead.READS and situation.staging is not None:
        less = situation.staging.first_bytes
        decision = replace(stay, staging_bytes=less, reason="to read more ahead has saved no time")
    else:
        return None, past
    return decision, _changed(past, most={**past.most, ahead: less})


def _bring_more(situation: Situation, measures: Sequence[Measures], past: Past, stay: Decision) -> tuple[Decision | None, Past]:
    """Bring more ahead, where that is waited for and there is room."""
    growth = stay.part - held_part(measures)
    for ahead in Ahead if past.tried is None else ():
        waited = _waited(past, ahead)
        if waited is None or waited <= WAIT_PART:
            continue
        decision, staging = replace(stay, reason=ahead.value), situation.staging
        if ahead is Ahead.GATHERS:
            can_be_more = situation.is_fetching and situation.prefetch < past.most.get(ahead, MOST_PREFETCH)
            if can_be_more and _has_room(situation.unit_bytes, measures, growth):
                return replace(decision, prefetch=situation.prefetch + 1), _changed(past, tried=(ahead, waited))
        elif staging is not None:
            room_bytes = _room_on_host(situation, measures, growth)
            more = min(staging.num_bytes + room_bytes, past.most.get(ahead, staging.most_bytes))
            if more > staging.num_bytes:
                return replace(decision, staging_bytes=more), _changed(past, tried=(ahead, waited))
    return None, past


def _has_room(num_bytes: int | None, measures: Sequence[Measures], growth: float) -> bool:
    is_known = all(each.capacity_bytes for each in measures)
    return num_bytes is not None and is_known and held_part(measures, num_bytes) + growth < LOW_PART


def _room_on_host(situation: Situation, measures: Sequence[Measures], growth: float) -> int:
    """What each rank may take of the host."""
    if not situation.is_on_host:
        return int(_HOST_PART * min(each.host_free_bytes for each in measures)) // len(measures)
    if not all(each.capacity_bytes for each in measures):
        return 0
    room_bytes = min((LOW_PART - growth) * each.capacity_bytes - each.peak_bytes for each in measures)
    return max(0, int(room_bytes)) // situation.num_sharing


def _relieve(situation: Situation, measures: Sequence[Measures], past: Past, stay: Decision) -> tuple[Decision | None, Past]:
    """Let go of what costs least, until the peak is expected below the goal."""
    freed, prefetch, staging_bytes = 0, situation.prefetch, None
    growth = stay.part - held_part(measures)
    moves: list[tuple[StateKind, Tier]] = []
    if situation.is_fetching and prefetch > 0 and situation.unit_bytes:
        prefetch, freed = prefetch - 1, situation.unit_bytes
    staging = situation.staging
    if situation.is_on_host and staging is not None and staging.num_bytes > staging.first_bytes:
        staging_bytes = staging.first_bytes
        freed += (staging.num_bytes - staging.first_bytes) * situation.num_sharing
    host_bytes = _HOST_PART * min(each.host_free_bytes for each in measures)
    for kind in _OUT:
        num_bytes = situation.freed_bytes.get(kind, 0)
        if num_bytes <= 0 or held_part(measures, -freed) + growth <= GOAL_PART:
            continue
        host_bytes -= num_bytes * len(measures)
        moves.append((kind, Tier.DISK if situation.is_on_host or host_bytes < 0 else Tier.HOST))
        freed += num_bytes if kind in _LASTING else 0
    if not moves and prefetch == situation.prefetch and staging_bytes is None:
        return None, replace(past, part=held_part(measures), num_calm=0)
    again = {kind for kind, _ in moves} & past.returned
    longer = {kind: min(_MOST_PATIENCE_LOOKS, 2 * past.patience.get(kind, PATIENCE_LOOKS)) for kind in again}
    past = _changed(past, num_calm=0, returned=past.returned - again, patience={**past.patience, **longer}, tried=None)
    reason = "the device's memory is nearly used up"
    return replace(stay, moves=tuple(moves), prefetch=prefetch, staging_bytes=staging_bytes, reason=reason), past
