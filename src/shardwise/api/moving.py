"""``shardwise.move``: another tier for kinds of state, while a model is trained."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import nn

from shardwise.checkpoint.collect import check_at_rest
from shardwise.core.errors import UsageError, UsageTypeError
from shardwise.core.plan import Plan, StateKind
from shardwise.runtime.move import move_state, moved_plan
from shardwise.runtime.registry import engine_of


def move(model: nn.Module, kind: StateKind | str | Sequence[StateKind | str], tier: str, fraction: float = 1.0) -> None:
    """Let kinds of state rest on another tier from now on. A collective: all ranks call it alike, between steps.

    Flat buffer by flat buffer, so that no more than one of them is in two places. The weights come out the same to the bit, as if
    state had always rested there. Where it fails on a rank, it is told on all of them, and what was moved goes back.

    Args:
        model: A sharded model.
        kind: ``shardwise.OPTIM``, ``GRAD`` or ``PARAM``, or several of them.
        tier: ``"device"``, ``"host"`` or ``"disk"``. On the CPU, the host's memory is the device's.
        fraction: The part that rests there, by bytes. It is that of the plan: of all state that rests off the device.

    Raises:
        UsageError: It cannot be done, or ranks ask for different things; nothing was changed.
        OffloadError: A disk or a memory has failed one of the ranks.
        UpdateError: An update that was made beside the last step has.

    >>> import tempfile, torch, shardwise
    >>> model = torch.nn.Linear(4, 4)
    >>> optimizer = torch.optim.AdamW(model.parameters())
    >>> handle = shardwise.shard(model, optimizer, stage=3, folder=tempfile.mkdtemp())
    >>> shardwise.move(model, shardwise.OPTIM, "disk")
    >>> handle.plan.tiers
    (('optim', 'disk'),)
    """
    engine = engine_of(model)
    check_at_rest(engine, "move")

    def wanted() -> Plan:
        return moved_plan(engine.plan, _kinds(kind), tier, fraction, engine.device)

    move_state(engine, wanted)


def _kinds(kind: object) -> list[StateKind]:
    """Kinds of state, however they were given."""
    if isinstance(kind, StateKind | str):
        kind = [kind]
    if not isinstance(kind, Iterable):
        raise UsageTypeError(f"kind must be shardwise.OPTIM, GRAD or PARAM, or several of them, but is {kind!r}.")
    known = {each.key: each for each in StateKind}
    found = []
    for each in kind:
        key = each.key if isinstance(each, StateKind) else str(each).lower()
        if key not in known:
            raise UsageError(f"There is no kind of state {each!r} to move. Choose from {', '.join(known)}.")
        found.append(known[key])
    if not found:
        raise UsageError("No kind of state was named to move. Name shardwise.OPTIM, GRAD or PARAM, or several of them.")
    return found
