"""Moves of state at run time: ranks agree on what is moved, and bring it to its new place flat buffer by flat buffer, or to none."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch.optim import Optimizer

from shardwise.core.errors import OffloadError, PlanError, ShardwiseError, UsageError, UsageTypeError
from shardwise.core.footprint import advice
from shardwise.core.ledger import Tier
from shardwise.core.plan import Plan, StateKind
from shardwise.core.rest import Rest, rests_of
from shardwise.core.tree import host_tree
from shardwise.devices import memory
from shardwise.devices.malloc import release_unused
from shardwise.runtime.disk_setup import check_budget, make_room, need_of, open_disk
from shardwise.runtime.engine import Engine, Setup
from shardwise.runtime.flat import FlatState
from shardwise.runtime.move_flat import FlatMove
from shardwise.runtime.offload import DiskTier
from shardwise.runtime.optimizer import check_optimizer, num_states_of, optimizers_of, state_bytes
from shardwise.telemetry.meter import Place
from shardwise.wire.comm import gather_bytes

_KINDS: dict[str, type[ShardwiseError]] = {
    "plan": PlanError,
    "type": UsageTypeError,
    "usage": UsageError,
    "offload": OffloadError,
    "other": ShardwiseError,
}


@dataclass(frozen=True)
class _Failure:
    """What went wrong on one of the ranks."""

    rank: int
    text: str


def moved_plan(plan: Plan, kinds: Iterable[StateKind], tier: str, fraction: float, device: torch.device) -> Plan:
    """The plan with kinds of state on another tier. The fraction is the plan's: that of all state that rests off the device.

    Raises:
        PlanError: There is no such tier, or no such fraction of it.
    """
    if tier == Tier.HOST.value and device.type == "cpu":
        tier, fraction = Tier.DEVICE.value, 1.0  # The host's memory is the device's.
    if tier == Tier.DEVICE.value and fraction != 1.0:
        raise PlanError(
            f"fraction={fraction!r} says how much rests off the device, but the move is to the device. Move that part to the "
            "host or to the disk instead."
        )
    tiers = {**dict(plan.tiers), **{kind.key: tier for kind in kinds}}
    found = plan.replace(tiers=tiers, fraction=plan.fraction if tier == Tier.DEVICE.value else fraction)
    return found if found.tiers else found.replace(fraction=1.0)


def move_state(engine: Engine, wanted: Callable[[], Plan]) -> None:
    """Bring all state to where a plan lets it rest. A collective, between steps.

    Args:
        wanted: Works the plan out. What it raises is raised on all ranks.

    Raises:
        UsageError: It cannot be done, or ranks want different things; nothing was changed.
        OffloadError: It failed on a rank: told on all of them.
        UpdateError: An update beside the last step did.
    """
    came_from = engine.meter.place
    engine.meter.move(Place.ASIDE)
    try:
        engine.updates.settle()  # A collective: also of ranks that ask for what cannot be done.
        optimizers = optimizers_of(engine)
        plan = _agreed(engine, optimizers, wanted)
        with torch.no_grad(), torch.inference_mode(False):
            _carry_out(engine, plan, optimizers)
    finally:
        engine.meter.move(came_from)


def _agreed(engine: Engine, optimizers: Sequence[Optimizer], wanted: Callable[[], Plan]) -> Plan:
    """The plan that all ranks want and can have."""
    plan, error = engine.plan, None
    try:
        plan = wanted()
        _check(engine, plan, optimizers)
    except ShardwiseError as found:
        error = found
    facts: dict[str, str] = {"plan": plan.to_json()}
    if error is not None:
        facts = {"error": str(error), "kind": next(name for name, kind in _KINDS.items() if isinstance(error, kind))}
    text = json.dumps(facts).encode()
    # Of a length that no other exchange has: one who goes on with something else is found out.
    mine = torch.frombuffer(bytearray(hashlib.sha256(text).digest() + bytes([error is not None])), dtype=torch.uint8)
    handle = engine.lanes.gather.gather_small(mine, label="what is to be moved")
    engine.executor.wait(handle, "use", "")
    rows = mine[None] if handle.result is None else handle.result.cpu()
    if error is None and bool((rows == rows[0]).all()):
        return plan
    theirs = [json.loads(each) for each in gather_bytes(engine.lanes.gather, text, label="what is to be moved")]
    for rank, facts in enumerate(theirs):
        if "error" in facts:
            told = "" if rank == engine.lanes.rank else f"Rank {rank}: "
            raise _KINDS[facts["kind"]](f"{told}{facts['error']}") from error
    raise UsageError(_difference([Plan.from_json(facts["plan"]) for facts in theirs]))


def _difference(plans: Sequence[Plan]) -> str:
    rank = next(rank for rank, plan in enumerate(plans) if plan != plans[0])
    first, other = (f"tiers={dict(plan.tiers)}, fraction={plan.fraction:g}" for plan in (plans[0], plans[rank]))
    return (
        f"Ranks disagree, so nothing was moved: with what rank 0 asks for, state would rest at {first}, with what rank {rank} asks "
        f"for at {other}. Ask for the same move on every rank."
    )


def _check(engine: Engine, plan: Plan, optimizers: Sequence[Optimizer]) -> None:
    """Refuse what cannot be done; nothing was changed yet."""
    engine.updates.refuse_open("shardwise.move was called")
    engine.let_go()
    engine.executor.before_change()
    held = next((unit for unit in engine.executor.units.values() if unit.num_leases), None)
    if held is not None:
        raise UsageError(
            f"Unit '{held.unit.label}' is still gathered: a call has returned its weights, or a backward has built a graph. Move state "
            "after optimizer.step()."
        )
    if engine.disk is not None:
        engine.disk.settle()
        engine.disk.refuse_failed("No state can be moved.")
    for optimizer in optimizers:
        check_optimizer(optimizer, plan, engine.layout_kind)
    if plan.uses_disk:
        check_budget(plan, need_of(engine.units, setup_of(engine, plan), engine.device, num_states_of(optimizers)))


def setup_of(engine: Engine, plan: Plan) -> Setup:
    """What an engine would be built from under a plan."""
    store = None if engine.disk is None else engine.disk.store
    return Setup(plan, engine.lanes, plan.tree or host_tree(engine.lanes.hosts), engine.layout_kind, store)


def _carry_out(engine: Engine, plan: Plan, optimizers: Sequence[Optimizer]) -> None:
    """Have a disk if it is needed, move, and let go of what is not needed any more."""
    had_disk, num_states = engine.disk is not None, num_states_of(optimizers)
    setup = setup_of(engine, plan)
    if plan.uses_disk and had_disk:
        make_room(setup, engine.units, engine.device, engine.plan, num_states)
    elif plan.uses_disk:
        setup = open_disk(setup, engine.units, engine.device, num_states)
        if setup.store is not None:
            engine.use_disk(DiskTier(setup.store, engine.ledger, setup.load_bytes, plan.staging_bytes, engine.device))
    rests = rests_of(engine.units, plan, is_on_host=engine.device.type == "cpu")
    left = {flat: flat.rest for flat in engine.executor.flats if flat.rest != rests[flat.spec.name]}
    failure = _move_all(engine, optimizers, {flat: rests[flat.spec.name] for flat in left})
    if failure is None:
        engine.use_plan(plan)
        num_ranks = engine.lanes.size
        memory.advise(engine.device, lambda capacity: advice(engine.units, plan, num_ranks, capacity, num_states))
    else:
        _move_all(engine, optimizers, {flat: rest for flat, rest in reversed(left.items()) if flat.rest != rest})
    rests_on_disk = any(Tier.DISK in vars(flat.rest).values() for flat in engine.executor.flats)
    if not rests_on_disk and engine.plan.activations != Tier.DISK.value:
        _close_disk(engine)
    _let_go(engine, optimizers)
    if failure is not None:
        _raise(engine, failure, [flat for flat, rest in left.items() if flat.rest != rest])


def _move_all(engine: Engine, optimizers: Sequence[Optimizer], rests: Mapping[FlatState, Rest]) -> _Failure | None:
    """Move flat buffers one after the other, each on all ranks or on none; up to the first that fails on one of them."""
    for flat, rest in rests.items():
        move, error = FlatMove(flat, rest, engine, optimizers), ""
        try:
            move.prepare()
        except Exception as found:  # Whatever it is, the other ranks wait to hear of it.
            error = str(found) or type(found).__name__
        failure = _first_failure(engine, error)
        if failure is not None:
            move.undo()
            return failure
        move.commit()
        if engine.disk is not None:
            engine.disk.sweep()
    return None


def _first_failure(engine: Engine, error: str) -> _Failure | None:
    mine = torch.tensor([bool(error)], dtype=torch.uint8)
    handle = engine.lanes.gather.gather_small(mine, label="a move of state")
    engine.executor.wait(handle, "use", "")
    if not bool((mine if handle.result is None else handle.result).any()):
        return None
    texts = gather_bytes(engine.lanes.gather, error.encode(), label="a move of state")
    return next(_Failure(rank, text.decode()) for rank, text in enumerate(texts) if text)


def _close_disk(engine: Engine) -> None:
    """Nothing rests on disk, on any rank."""
    disk = engine.disk
    if disk is None or disk.failure is not None:
        return
    disk.settle()
    engine.use_disk(None)
    disk.close()


def _let_go(engine: Engine, optimizers: Sequence[Optimizer]) -> None:
    """Memory that was left goes back to where it came from, and the books say what is held."""
    engine.executor.trim()
    engine.pool.trim()
    if engine.device.type == "cpu":
        release_unused()
    engine.book_optimizer(sum((state_bytes(optimizer) for optimizer in optimizers), Counter()))


def _raise(engine: Engine, failure: _Failure, stranded: Sequence[FlatState]) -> None:
    if engine.disk is not None:
        engine.agreement.agree_on_disk()  # What could not be read is lost.
    where = "all of it is where it was"
    if stranded:
        name, more = stranded[0].spec.name, len(stranded) - 1
        where = f"that of {name} and of {more} more could not be brought back, and is at its new place"
    raise OffloadError(f"State could not be moved; {where}. Rank {failure.rank}: {failure.text}")
