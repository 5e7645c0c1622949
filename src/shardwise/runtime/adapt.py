"""Measures steps, lets ranks decide together what to change of the plan, and does it. What is decided is `core.adapt`'s."""

from __future__ import annotations

import logging
import weakref
from collections import Counter, defaultdict
from dataclasses import asdict

import torch

from shardwise.core.adapt import Decision, Measures, Past, Situation, Staging, decide
from shardwise.core.errors import ShardwiseError
from shardwise.core.footprint import LOADS_AT_ONCE, footprint
from shardwise.core.ledger import Tier
from shardwise.core.plan import Plan, StateKind
from shardwise.core.records import Adaptation
from shardwise.core.sizes import format_bytes
from shardwise.devices import memory
from shardwise.runtime.disk_setup import need_of
from shardwise.runtime.engine import Engine
from shardwise.runtime.move import move_state, moved_plan, setup_of
from shardwise.runtime.optimizer import num_states_of, optimizers_of

_log = logging.getLogger("shardwise")
LOOK_STEPS = 2
"""Ranks tell each other what they have measured after so many steps."""
_PARTS_OF_SECOND = 1_000_000_000


def adapt(engine: Engine) -> None:
    """Let an engine look after each step whether its plan suits it."""
    engine.meter.is_watched = True
    engine.after_step = _Adapter(engine).look


class _Adapter:
    """Looks at the steps of one engine, which it does not keep alive."""

    def __init__(self, engine: Engine) -> None:
        self._engine = weakref.ref(engine)
        self._past = Past()
        self._used_bytes = self._above_bytes = self._num_steps = 0
        """What the device holds between steps, and what steps have held above it."""
        self._seconds = self._gather_seconds = self._disk_seconds = 0.0
        self._is_staging_free = engine.plan.staging_bytes is None
        """Whether the user has left open how much memory there is between disk and computation."""
        self._moved: list[StateKind] = []
        """What was moved off the device here: of what the user has put elsewhere, nothing is brought back."""
        self._refused: set[StateKind] = set()
        """What could not be moved."""

    def look(self) -> None:
        """A step was committed. A collective, after every few of them."""
        engine = self._engine()
        if engine is None:
            return
        self._num_steps += 1
        if self._num_steps == 1:
            memory.take_peak(
                engine.device
            )  # Also of what came before the steps: a checkpoint that was loaded, a first evaluation.
            return
        room = self._measure(engine)
        if self._num_steps % LOOK_STEPS:
            return
        measures = self._exchange(engine, room.capacity_bytes)
        self._used_bytes = self._above_bytes = 0
        self._seconds = self._gather_seconds = self._disk_seconds = 0.0
        decision, self._past = decide(self._situation(engine), measures, self._past)
        if decision is not None:
            self._carry_out(engine, decision)
            memory.take_peak(engine.device)  # A move holds things twice for a moment: no step did.

    def _measure(self, engine: Engine) -> memory.Room:
        """Add the step that has ended to what is known of those since the last look."""
        glance, room = engine.meter.glance(), memory.room_on(engine.device)
        above_bytes = memory.take_peak(engine.device)
        if engine.device.type == "cpu":  # Its allocator knows no peaks: what is booked, and what the forward has left.
            booked = engine.ledger.peak_on_since_mark(Tier.DEVICE) - engine.ledger.live_on(Tier.DEVICE)
            above_bytes = booked + glance.activation_bytes
        self._used_bytes = max(self._used_bytes, room.capacity_bytes - room.free_bytes)
        self._above_bytes = max(self._above_bytes, above_bytes)
        self._seconds += glance.seconds
        self._gather_seconds += glance.gather_seconds
        self._disk_seconds += glance.disk_seconds
        return room

    def _exchange(self, engine: Engine, capacity_bytes: int) -> list[Measures]:
        """What all ranks have measured, in whole numbers: the same on all of them."""
        seconds = (round(each * _PARTS_OF_SECOND) for each in (self._seconds, self._gather_seconds, self._disk_seconds))
        free_bytes = memory.room_on_host().free_bytes
        mine = torch.tensor([self._used_bytes, self._above_bytes, capacity_bytes, free_bytes, *seconds])
        engine.executor.gather_log.add("measures")
        handle = engine.lanes.gather.gather_small(mine, label="what steps have taken")
        engine.executor.wait(handle, "use", "")
        rows = (mine[None] if handle.result is None else handle.result.cpu()).tolist()
        # Ranks that compute on one host share its memory, and may come to their peaks together.
        above: dict[str, int] = defaultdict(int)
        for place, row in zip(_places(engine), rows, strict=True):
            above[place] += row[1]
        return [
            Measures(used + above[place], capacity, free, *(each / _PARTS_OF_SECOND for each in waits))
            for place, (used, _, capacity, free, *waits) in zip(_places(engine), rows, strict=True)
        ]

    def _situation(self, engine: Engine) -> Situation:
        plan, num_states = engine.plan, num_states_of(optimizers_of(engine))
        num_ranks, is_on_host = engine.lanes.size, engine.device.type == "cpu"
        num_sharing = min(Counter(_places(engine)).values())
        now = footprint(engine.units, plan, num_ranks, num_states).num_bytes

        def bytes_with(kind: StateKind, tier: Tier) -> int:
            changed = self._planned(engine, ((kind, tier),))
            return footprint(engine.units, changed, num_ranks, num_states).num_bytes

        away = Tier.DISK if is_on_host else Tier.HOST
        here = [kind for kind in StateKind if plan.tier(kind) is Tier.DEVICE and kind not in self._refused]
        back = [kind for kind in self._moved if kind not in self._refused]
        return Situation(
            freed_bytes={kind: (now - bytes_with(kind, away)) * num_sharing for kind in here},
            back_bytes={kind: (bytes_with(kind, Tier.DEVICE) - now) * num_sharing for kind in back},
            prefetch=plan.prefetch,
            unit_bytes=max(unit.num_bytes for unit in engine.units) * num_sharing,
            is_fetching=plan.fetches_params,
            is_on_host=is_on_host,
            staging=self._staging(engine, num_states),
            num_sharing=num_sharing,
        )

    def _staging(self, engine: Engine, num_states: int) -> Staging | None:
        """The memory between disk and computation, where more of it lets more of an update be read beside the backward."""
        plan = engine.plan
        is_optim_alone = [kind for kind, tier in plan.tiers if tier == Tier.DISK.value] == [StateKind.OPTIM.key]
        if not self._is_staging_free or not is_optim_alone or plan.activations == Tier.DISK.value:
            return None
        need = need_of(engine.units, setup_of(engine, plan), engine.device, num_states)
        first_bytes = LOADS_AT_ONCE * need.load_bytes
        return Staging(plan.staging_bytes or first_bytes, first_bytes, max(first_bytes, need.file_bytes))

    @staticmethod
    def _planned(engine: Engine, moves: tuple[tuple[StateKind, Tier], ...]) -> Plan:
        plan = engine.plan
        for kind, tier in moves:
            fraction = plan.fraction if plan.tiers and tier is not Tier.DEVICE else 1.0
            plan = moved_plan(plan, [kind], tier.value, fraction, engine.device)
        return plan

    def _carry_out(self, engine: Engine, decision: Decision) -> None:
        plan = self._planned(engine, decision.moves).replace(prefetch=decision.prefetch)
        changes = [f"{kind.value} to the {tier.value}" for kind, tier in decision.moves]
        if decision.prefetch != engine.plan.prefetch:
            changes.append(f"prefetch={decision.prefetch}")
        if decision.staging_bytes is not None:
            changes.append(f"staging_bytes={decision.staging_bytes} ({format_bytes(decision.staging_bytes)})")
            plan = plan.replace(staging_bytes=decision.staging_bytes)
        elif decision.moves and self._is_staging_free:
            plan = plan.replace(staging_bytes=None)  # Loads will have other sizes.
        try:
            self._use(engine, plan, is_moved=bool(decision.moves))
        except ShardwiseError as error:
            if engine.disk is not None and engine.disk.failure is not None:
                raise
            self._refused.update(kind for kind, _ in decision.moves)
            if engine.lanes.rank == 0:
                _log.warning("The plan stays as it is: %s", error)
            return
        for kind, tier in decision.moves:
            self._moved = [each for each in self._moved if each is not kind] + ([kind] if tier is not Tier.DEVICE else [])
        step = engine.num_updates
        event = Adaptation(step, ", ".join(changes), decision.reason, decision.part, decision.waited_part)
        engine.adaptations.append(event)
        engine.meter.tell(lambda sink: sink.note({"adaptation": asdict(event)}))
        if engine.lanes.rank == 0:
            _log.info("%s", event)

    def _use(self, engine: Engine, plan: Plan, *, is_moved: bool) -> None:
        """Go on under another plan, with the memory between disk and computation that it asks for."""
        before = engine.plan.staging_bytes
        move_state(engine, lambda: plan) if is_moved else engine.use_plan(plan)
        if engine.disk is not None and plan.staging_bytes != before:
            num_states = num_states_of(optimizers_of(engine))
            need = need_of(engine.units, setup_of(engine, plan), engine.device, num_states)
            engine.disk.use_staging(plan.staging_bytes or LOADS_AT_ONCE * need.load_bytes)


def _places(engine: Engine) -> list[str]:
    """By rank, what its memory is a part of: the host, if that computes, or a device of its own."""
    is_on_host = engine.device.type == "cpu"
    return [host if is_on_host else str(rank) for rank, host in enumerate(engine.lanes.hosts)]
