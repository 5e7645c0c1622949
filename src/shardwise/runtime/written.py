"""What a forward writes to its own weights: found when they are taken out of the modules, and kept in the values at rest."""

from __future__ import annotations

import torch

from shardwise.runtime.flat import FlatState, ParamState, slice_of


def keep_written(state: ParamState) -> None:
    """Bring what was written to this rank's part of the values at rest.

    Elements that were not written keep the bits that compute in a narrower dtype does not have.
    """
    flat = state.flat
    version = state.compute._version
    if version != state.version:
        flat.written[state.index] = version
    state.version, state.is_handed_out = version, False
    if flat.is_aliased or not state.piece.numel:
        return
    with flat.attempt():
        _keep_changed(state)


def _keep_changed(state: ParamState) -> None:
    flat = state.flat
    before = state.piece.view(flat.read_part(state.piece.start, state.piece.stop), shift=state.piece.start)
    part = slice_of(state.compute.detach(), state, before).to(before.device)
    is_changed = part.to(flat.precision.compute) != before.to(flat.precision.compute)
    if bool(is_changed.any()):
        with flat.part_at_hand(state.piece) as target:
            target.copy_(torch.where(is_changed, part.to(target.dtype), target))


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
