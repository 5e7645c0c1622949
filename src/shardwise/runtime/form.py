"""What a flat buffer holds at rest, by where its state rests: decided when a model is sharded, and anew when state is moved."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import torch

from shardwise.core.ledger import Account, Kind, Ledger, Tier
from shardwise.core.plan import Plan, StateKind
from shardwise.core.rest import Rest
from shardwise.core.unit import FlatSpec
from shardwise.devices.host import on_host
from shardwise.runtime.flat import FlatState, Precision


@dataclass(frozen=True)
class Form:
    """How the values of a flat buffer are kept.

    ``is_fetched``: full values are there only while they are used. ``is_aliased``: the owned values are a part of the full ones.
    ``has_copy``: there is a copy of the owned values, from which full ones are gathered, where the parameters rest: the owned values
    rest elsewhere, or are updated beside steps, which must not see that before its time.
    """

    is_fetched: bool
    is_aliased: bool
    has_copy: bool

    @classmethod
    def of(cls, spec: FlatSpec, rest: Rest, precision: Precision, plan: Plan) -> Form:
        """What follows from where a buffer's state rests."""
        is_fetched = StateKind.PARAM in plan.sharded or rest.param is not Tier.DEVICE
        is_away = rest.master is not Tier.DEVICE
        is_apart = plan.is_delayed and spec.trainable
        is_aliased = not is_fetched and precision.compute == precision.master and not is_away and not is_apart
        return cls(is_fetched, is_aliased, has_copy=is_fetched and (is_apart or (is_away and rest.param is Tier.DEVICE)))


def copy_of(
    owned: torch.Tensor, spec: FlatSpec, rest: Rest, precision: Precision, device: torch.device, *, is_left: bool = False
) -> torch.Tensor:
    """A copy of the owned values in the dtype of compute, where the parameters rest.

    Args:
        is_left: Whether nobody else keeps the memory of the owned values: where it suits, it is the copy's.
    """
    if rest.param is Tier.DEVICE:
        return owned.to(device, precision.compute, copy=not is_left)
    return on_host(owned.to(precision.compute), f"parameters of {spec.name}")


def held_at_rest(flat: FlatState) -> Counter[Account]:
    """Bytes of memory that a buffer's values take. Those that are not compute's, or not where these are, are master weights."""
    is_copied = flat.shard is not None or (flat.full is not None and not flat.is_aliased)
    kind = Kind.MASTER if is_copied or flat.precision.compute != flat.precision.master else Kind.PARAM
    held: Counter[Account] = Counter()
    if flat.line is None:
        held[flat.rest.master, kind] += flat.master.nbytes
    if flat.shard is not None:
        held[flat.rest.param, Kind.PARAM] += flat.shard.nbytes
    if flat.full is not None:
        held[Tier.DEVICE, Kind.PARAM] += flat.full.nbytes - (flat.master.nbytes if flat.is_aliased else 0)
    return held


def book(flat: FlatState, ledger: Ledger, before: Counter[Account] | None = None) -> None:
    """Note what a buffer holds at rest, in place of what it held before: what came, and then what went."""
    change = held_at_rest(flat)
    change.subtract(before or {})
    for (tier, kind), num_bytes in sorted(change.items(), key=lambda item: -item[1]):
        ledger.add(kind, num_bytes, tier)
