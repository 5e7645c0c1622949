"""Where the state of each flat buffer rests. Pure: from units and a plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shardwise.core.ledger import Tier
from shardwise.core.plan import Plan, StateKind
from shardwise.core.unit import Unit


@dataclass(frozen=True)
class Rest:
    """The tiers of one flat buffer, by kind of state; ``master``: of the values that the optimizer updates."""

    param: Tier = Tier.DEVICE
    grad: Tier = Tier.DEVICE
    optim: Tier = Tier.DEVICE
    master: Tier = Tier.DEVICE


ON_DEVICE = Rest()


def _master_tier(param: Tier, optim: Tier, *, is_on_host: bool) -> Tier:
    """Where the values that the optimizer updates rest.

    With the parameters, wherever these are; but an optimizer that rests off an accelerator keeps values of its own there, of which
    the parameters on the device are a copy: so that they travel once a step, and in one direction. On the CPU, an optimizer
    that works on the host reaches the parameters where they are.
    """
    return optim if param is Tier.DEVICE and not is_on_host else param


def rests_of(units: Sequence[Unit], plan: Plan, *, is_on_host: bool = False) -> dict[str, Rest]:
    """By the name of a flat buffer, where its state rests: all of it on the device, or where the plan says.

    A fraction is met buffer by buffer, spread evenly over the model, as closely as whole buffers allow.

    Args:
        is_on_host: Whether the device is the CPU.

    >>> from shardwise.core.unit import find_units
    >>> from torch import nn
    >>> units = find_units(nn.Sequential(*(nn.Linear(8, 8) for _ in range(4))), units=[nn.Linear])
    >>> [rest.optim.value for rest in rests_of(units, Plan(tiers={"optim": "host"}, fraction=0.5)).values()]
    ['host', 'device', 'host', 'device']
    """
    param, grad, optim = (plan.tier(kind) for kind in (StateKind.PARAM, StateKind.GRAD, StateKind.OPTIM))
    away = Rest(param, grad, optim, _master_tier(param, optim, is_on_host=is_on_host))
    rests: dict[str, Rest] = {}
    seen_bytes = taken_bytes = 0
    for unit in units:
        for flat in unit.flats:
            if not flat.trainable and away.param is Tier.DEVICE:
                rests[flat.name] = ON_DEVICE  # It has neither gradients nor optimizer state.
                continue
            num_bytes = flat.numel * flat.dtype.itemsize
            seen_bytes += num_bytes
            is_away = taken_bytes + num_bytes / 2 <= plan.fraction * seen_bytes
            taken_bytes += num_bytes * is_away
            rests[flat.name] = away if is_away else ON_DEVICE
    return rests
