"""What a plan needs of the disk tier on one rank, and how the ranks open it together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from shardwise.core.errors import OffloadError, PlanError
from shardwise.core.footprint import LOADS_AT_ONCE
from shardwise.core.ledger import Tier
from shardwise.core.plan import Plan, StateKind
from shardwise.core.rest import Rest, rests_of
from shardwise.core.sizes import format_bytes
from shardwise.core.unit import Unit
from shardwise.runtime.engine import Setup
from shardwise.runtime.flat import Precision
from shardwise.runtime.saved_places import PIECE_BYTES
from shardwise.stores.disk import DiskStore
from shardwise.stores.ranges import round_up
from shardwise.wire.comm import Lanes, gather_bytes

DEFAULT_FOLDER = "shardwise-offload"


@dataclass(frozen=True)
class DiskNeed:
    """Bytes on disk, and the most that must be in memory at once to update a flat buffer; of the rank that needs the most."""

    file_bytes: int
    load_bytes: int


def need_of(units: Sequence[Unit], setup: Setup, device: torch.device, num_states: int) -> DiskNeed:
    """What rests on disk. Numbers that optimizers keep for each element are not known before their first step: ``num_states``."""
    rests = rests_of(units, setup.plan, is_on_host=device.type == "cpu")
    return need_of_flats(units, setup.plan, rests, setup.layout_kind, setup.lanes.size, num_states)


def need_of_flats(
    units: Sequence[Unit], plan: Plan, rests: Mapping[str, Rest], layout_kind: str, num_ranks: int, num_states: int
) -> DiskNeed:
    """The same by where each buffer's state rests."""
    file_bytes, load_bytes = [0] * num_ranks, 0
    for flat in (flat for unit in units for flat in unit.flats):
        rest, precision = rests[flat.name], Precision.of(flat, plan)
        layout = flat.layout(layout_kind, num_ranks=num_ranks, weights=plan.weights)
        sizes = layout.sizes if StateKind.OPTIM in plan.sharded else (layout.numel,) * num_ranks
        for rank, numel in enumerate(sizes):
            lines = [numel * precision.master.itemsize] * (rest.master is Tier.DISK)
            if flat.trainable:
                lines += [numel * precision.reduce.itemsize] * (rest.grad is Tier.DISK)
                lines += [numel * precision.master.itemsize] * (num_states if rest.optim is Tier.DISK else 0)
            num_bytes = sum(map(round_up, lines))
            file_bytes[rank] += num_bytes
            load_bytes = max(load_bytes, num_bytes)
    return DiskNeed(max(file_bytes), load_bytes)


def open_disk(setup: Setup, units: Sequence[Unit], device: torch.device, num_states: int) -> Setup:
    """The same setup with a store. A collective.

    Raises:
        PlanError: The plan gives too little memory between disk and computation.
        OffloadError: A rank could not make a file, on all ranks alike.
    """
    need = need_of(units, setup, device, num_states)
    check_budget(setup.plan, need)
    load_bytes = max(need.load_bytes, PIECE_BYTES if setup.plan.activations == Tier.DISK.value else 0)
    return replace(setup, store=_open_store(setup.plan, setup.lanes, need), load_bytes=load_bytes)


def check_budget(plan: Plan, need: DiskNeed) -> None:
    """Refuse too little memory between disk and computation."""
    if plan.staging_bytes is not None and plan.staging_bytes < need.load_bytes:
        raise PlanError(
            f"staging_bytes is {plan.staging_bytes} ({format_bytes(plan.staging_bytes)}), but the update of the largest flat buffer "
            f"brings {need.load_bytes} bytes from disk. Give at least that many; {LOADS_AT_ONCE * need.load_bytes} to read ahead "
            "and write behind as well."
        )


def _open_store(plan: Plan, lanes: Lanes, need: DiskNeed) -> DiskStore:
    """Make a file on every rank, with room for all that will rest there: a full disk is found now."""
    store: DiskStore | None = None
    error: OffloadError | None = None
    try:
        store = DiskStore(Path(plan.folder or DEFAULT_FOLDER), name=f"rank-{lanes.rank}", is_passing=plan.folder is None)
        store.free(store.reserve(need.file_bytes, "state that rests on disk"))
    except OffloadError as found:
        error = found
    try:
        _raise_together(error, lanes)
    except OffloadError:
        if store is not None:
            store.close()
        raise
    if store is None:
        raise OffloadError("No file for offload was made.")
    return store


def _raise_together(error: OffloadError | None, lanes: Lanes) -> None:
    """Go on if all ranks have what they need. A collective.

    Raises:
        OffloadError: One has not.
    """
    texts = gather_bytes(lanes.gather, str(error or "").encode(), label="files for offload")
    failed = next(((rank, text.decode()) for rank, text in enumerate(texts) if text), None)
    if failed is not None:
        raise error or OffloadError("Rank {}: {}".format(*failed))


def make_room(setup: Setup, units: Sequence[Unit], device: torch.device, before: Plan, num_states: int) -> None:
    """Let the files of ranks that have a store grow by what rests on disk under the plan and did not before. A collective.

    Raises:
        OffloadError: A rank has no room, on all ranks alike.
    """
    need, had = (need_of(units, replace(setup, plan=plan), device, num_states) for plan in (setup.plan, before))
    error: OffloadError | None = None
    try:
        if setup.store is not None:
            setup.store.free(setup.store.reserve(max(0, need.file_bytes - had.file_bytes), "state that is moved to disk"))
    except OffloadError as found:
        error = found
    _raise_together(error, setup.lanes)
