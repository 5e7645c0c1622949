"""What a forward writes to its own weights: found when they are taken out of the modules, and kept in the values at rest."""

from __future__ import annotations

import torch

from shardwise.core.errors import UsageError
from shardwise.runtime.flat import FlatState, ParamState, slice_of


def keep_written(state: ParamState, *, is_behind: bool = False) -> None:
    """Bring what was written to this rank's part of the values at rest.

    Elements that were not written keep the bits that compute in a narrower dtype does not have.

    Args:
        is_behind: Whether an update has changed the values at rest since, or is about to.

    Raises:
        UsageError: Then nothing can be kept.
    """
    flat = state.flat
    version = state.compute._version
    if version != state.version:
        flat.written[state.index] = version
    state.version, state.is_handed_out = version, False
    if flat.is_aliased or not state.piece.numel:
        return
    if is_behind and flat.shard is None:
        _refuse(state)
    with flat.attempt():
        _keep_changed(state, is_behind=is_behind)


def _keep_changed(state: ParamState, *, is_behind: bool) -> None:
    flat = state.flat
    # A copy that is computed with may lag behind the values at rest, but is not written to.
    held = flat.read_part(state.piece.start, state.piece.stop) if flat.shard is None else _part_of(flat.shard, state)
    before = state.piece.view(held, shift=state.piece.start)
    part = slice_of(state.compute.detach(), state, before).to(before.device)
    is_changed = part.to(flat.precision.compute) != before.to(flat.precision.compute)
    if bool(is_changed.any()):
        if is_behind:
            _refuse(state)
        with flat.part_at_hand(state.piece) as target:
            target.copy_(torch.where(is_changed.to(target.device), part.to(target.device, target.dtype), target))


def _refuse(state: ParamState) -> None:
    raise UsageError(
        f"A forward has written to its weight '{state.spec.name}', or taken its .data, while sync='delayed' had an update of it under "
        "way. Use sync='exact', or write after the step, inside `with shardwise.gathered(model):`."
    )


def _part_of(shard: torch.Tensor, state: ParamState) -> torch.Tensor:
    low = state.flat.bounds[0]
    return shard[state.piece.start - low : state.piece.stop - low]


def check_version(flat: FlatState, offset: int, version: int) -> None:
    """Refuse to differentiate through a weight that was written after autograd had saved it, as torch does."""
    for state in flat.params:
        if state.spec.offset <= offset < max(state.spec.stop, state.spec.offset + 1):
            latest = flat.written.get(state.index, version)
            if latest > version:
                raise RuntimeError(
                    "One of the variables needed for gradient computation has been modified by an inplace operation: "
                    f"'{state.spec.name}' is at version {latest}; expected version {version} instead."
                )
