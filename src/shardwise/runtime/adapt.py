"""Measures steps, lets ranks decide together what to change of the plan, and does it. What is decided is `core.adapt`'s."""

from __future__ import annotations

import logging
import weakref
from dataclasses import asdict

import torch

from shardwise.core.adapt import Decision, Measures, Past, Situation, decide
from shardwise.core.errors import ShardwiseError
from shardwise.core.footprint import footprint
from shardwise.core.ledger import Tier
from shardwise.core.plan import Plan, StateKind
from shardwise.core.records import Adaptation
from shardwise.devices import memory
from shardwise.runtime.engine import Engine
from shardwise.runtime.move import move_state, moved_plan
from shardwise.runtime.optimizer import num_states_of, optimizers_of

_log = logging.getLogger("shardwise")
LOOK_STEPS = 2
"""Ranks tell each other what they have measured after so many steps."""
_PARTS_OF_SECOND = 1_000_000_000


def adapt(engine: Engine) -> None:
    """Let an engine look after each step whether its plan suits it."""
    engine.after_step = _Adapter(engine).look


class _Adapter:
    """Looks at the steps of one engine, which it does not keep alive."""

    def __init__(self, engine: Engine) -> None:
        self._engine = weakref.ref(engine)
        self._past = Past()
        self._peak_bytes = self._num_steps = 0
        self._seconds = self._waited_seconds = 0.0
        self._moved: list[StateKind] = []
        """What was moved off the device here: of what the user has put elsewhere, nothing is brought back."""
        self._refused: set[StateKind] = set()
        """What could not be moved."""

    def look(self) -> None:
        """A step was committed. A collective, after every few of them."""
        engine = self._engine()
        if engine is None:
            return
        glance, room = engine.meter.glance(), memory.room_on(engine.device)
        above = engine.ledger.peak_on_since_mark(Tier.DEVICE) - engine.ledger.live_on(Tier.DEVICE)
        used = room.capacity_bytes - room.free_bytes
        self._peak_bytes = max(self._peak_bytes, used + above + glance.activation_bytes)
        self._seconds += glance.seconds
        self._waited_seconds += glance.waited_seconds
        self._num_steps += 1
        if self._num_steps % LOOK_STEPS:
            return
        measures = self._exchange(engine, room.capacity_bytes)
        self._peak_bytes, self._seconds, self._waited_seconds = 0, 0.0, 0.0
        decision, self._past = decide(self._situation(engine), measures, self._past)
        if decision is not None:
            self._carry_out(engine, decision)

    def _exchange(self, engine: Engine, capacity_bytes: int) -> list[Measures]:
        """What all ranks have measured, in whole numbers: the same on all of them."""
        seconds = (round(each * _PARTS_OF_SECOND) for each in (self._seconds, self._waited_seconds))
        mine = torch.tensor([self._peak_bytes, capacity_bytes, memory.room_on_host().free_bytes, *seconds])
        engine.executor.gather_log.add("measures")
        handle = engine.lanes.gather.gather_small(mine, label="what steps have taken")
        engine.executor.wait(handle, "use", "")
        rows = mine[None] if handle.result is None else handle.result.cpu()
        return [
            Measures(peak, capacity, free, step / _PARTS_OF_SECOND, waited / _PARTS_OF_SECOND)
            for peak, capacity, free, step, waited in rows.tolist()
        ]

    def _situation(self, engine: Engine) -> Situation:
        plan, num_states = engine.plan, num_states_of(optimizers_of(engine))
        now = footprint(engine.units, plan, engine.lanes.size, num_states)

        def at_rest(kind: StateKind, tier: Tier) -> int:
            changed = self._planned(engine, ((kind, tier),))
            return footprint(engine.units, changed, engine.lanes.size, num_states).rest_bytes

        away = Tier.DISK if engine.device.type == "cpu" else Tier.HOST
        here = [kind for kind in StateKind if plan.tier(kind) is Tier.DEVICE and kind not in self._refused]
        return Situation(
            freed_bytes={kind: now.rest_bytes - at_rest(kind, away) for kind in here},
            back_bytes={kind: at_rest(kind, Tier.DEVICE) - now.rest_bytes for kind in self._moved if kind not in self._refused},
            prefetch=plan.prefetch,
            unit_bytes=max(unit.num_bytes for unit in engine.units),
            is_fetching=plan.fetches_params,
            is_on_host=engine.device.type == "cpu",
        )

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
        try:
            move_state(engine, lambda: plan) if decision.moves else engine.use_plan(plan)
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
