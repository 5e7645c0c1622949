"""Begins saves: ranks agree on what is written and by whom; then each does its `job`, in the foreground or beside the steps."""

from __future__ import annotations

import json
import logging
import threading
import time
import uuid
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.optim import Optimizer

from shardwise.checkpoint.collect import Collected, check_at_rest, collect
from shardwise.checkpoint.folders import find_checkpoints, is_checkpoint
from shardwise.checkpoint.job import NOT_BEGUN, Job, Saving, Wish
from shardwise.checkpoint.manifest import Summary
from shardwise.checkpoint.snapshot import Snapshot
from shardwise.core.errors import CheckpointError, OffloadError, PathError, ShardwiseError, UsageError, UsageTypeError
from shardwise.core.ledger import Kind, Ledger, Tier
from shardwise.runtime.engine import Engine
from shardwise.telemetry.meter import Place as LoopPlace
from shardwise.wire.comm import gather_bytes

_log = logging.getLogger("shardwise")
_LEAST_PATIENCE_SECONDS = 10.0


class _Saver:
    """The saves of one engine. One at a time is written beside the steps: a second one waits for it."""

    def __init__(self) -> None:
        self.last: Saving | None = None
        self.posted: list[str] = []
        self._copies: torch.Tensor | None = None

    def find_room(self, num_bytes: int, ledger: Ledger) -> torch.Tensor:
        """Host memory for copies, which is kept for the next save: to ask for it anew would cost as much as the copy.

        Raises:
            CheckpointError: There is none.
        """
        if self._copies is None or self._copies.numel() < num_bytes:
            self._copies = None
            ledger.set(Kind.SNAPSHOT, 0, Tier.HOST)
            try:
                self._copies = torch.empty(num_bytes, dtype=torch.uint8)
            except (MemoryError, RuntimeError) as error:
                raise CheckpointError(
                    f"There is no host memory for a copy of {num_bytes:,} bytes ({error}). Save with wait=True, which needs none."
                ) from error
            ledger.set(Kind.SNAPSHOT, num_bytes, Tier.HOST)
        return self._copies


_SAVERS: WeakKeyDictionary[Engine, _Saver] = WeakKeyDictionary()
_UNDER_WAY: set[threading.Thread] = set()


def wait_for_all() -> None:
    """Until all saves that run beside the steps have ended. For processes that end without Python's own end."""
    for thread in list(_UNDER_WAY):
        thread.join()


def save_state(engine: Engine, optimizers: Sequence[Optimizer], extra: Mapping[str, Any], wish: Wish, *, wait: bool) -> Saving:
    """Save a training state. A collective.

    Raises:
        UsageError, UsageTypeError: It cannot be saved as it is, or not there; nothing was written.
        CheckpointError: It could not be written, and ``wait`` was asked for.
    """
    check_at_rest(engine, "save")
    began, began_cpu = time.perf_counter(), time.thread_time()
    meter, came_from = engine.meter, engine.meter.place
    saver = _SAVERS.setdefault(engine, _Saver())
    if saver.last is not None and not saver.last.is_done:
        _log.info("The save to %s is still under way; the next one waits for it.", saver.last.path)
        saver.last._ended.wait()
    meter.move(LoopPlace.ASIDE)
    engine.come_to_rest()
    saving = saver.last = Saving(wish.place.path)
    job: Job | None = None
    try:
        job = _prepare(engine, optimizers, extra, wish, saving, saver)
        if wait:
            job.run()
        else:
            job.snapshot = Snapshot(job.parts, partial(saver.find_room, ledger=engine.ledger))
            job.parts = []
            saving._copying = engine.executor.copying = job.snapshot.copying
            _start(job)
    except BaseException:
        if job is None:
            saving.end(NOT_BEGUN)
        elif job.claim():  # No thread will do it; one that runs brings the save to its end.
            job.abandon()
        raise
    finally:
        saving._call_seconds = time.perf_counter() - began
        saving.cpu_seconds += time.thread_time() - began_cpu
        meter.move(came_from)
    if wait:
        saving.wait()
    return saving


def _prepare(
    engine: Engine, optimizers: Sequence[Optimizer], extra: Mapping[str, Any], wish: Wish, saving: Saving, saver: _Saver
) -> Job:
    """Take stock on all ranks, and agree on what is to be written and by whom."""
    lanes = engine.lanes
    facts: dict[str, Any] = {"path": wish.place.path}
    begun, collected, error = "", Collected(), None
    try:
        collected = collect(engine, optimizers, extra)
        facts["items"] = {name: item.digest for name, item in collected.items.items()}
        if lanes.rank == 0:
            begun = facts["id"] = uuid.uuid4().hex
            facts["order"] = _begin(wish, begun)
    except Exception as found:  # Whatever it is, the other ranks wait to hear of it.
        error = found if isinstance(found, ShardwiseError) else CheckpointError(f"{type(found).__name__}: {found}")
        facts["error"], facts["kind"] = str(error), _kind_of(error)
    theirs = [json.loads(text) for text in gather_bytes(lanes.gather, json.dumps(facts).encode(), label="what is to be saved")]
    failed = _failure(theirs)
    if failed is not None:
        if begun:
            wish.place.abandon(begun)
        raise failed if error is None else error
    collected.settle(lanes.rank, theirs[0]["items"])
    for key in saver.posted:
        lanes.notices.drop(key)
    first = theirs[0]
    step = engine.num_updates if wish.step is None else wish.step
    summary = Summary(first["id"], first["order"], step, time.time())
    job = Job(wish, summary, collected.parts, collected.values, engine.plan, saving, lanes.notices, lanes.rank, lanes.size)
    job.deadline_seconds = max(lanes.deadline_seconds, _LEAST_PATIENCE_SECONDS)
    saver.posted = [job.key(lanes.rank)] + ([job.verdict_key] if lanes.rank == 0 else [])
    return job


_KINDS: dict[str, type[ShardwiseError]] = {
    "path": PathError,
    "usage": UsageError,
    "type": UsageTypeError,
    "offload": OffloadError,
    "checkpoint": CheckpointError,
}


def _kind_of(error: ShardwiseError) -> str:
    return next((name for name, kind in _KINDS.items() if isinstance(error, kind)), "checkpoint")


def _failure(theirs: Sequence[Mapping[str, Any]]) -> ShardwiseError | None:
    """Why ranks do not go on, if they do not: an error of one kind on all of them."""
    for rank, facts in enumerate(theirs):
        if "error" in facts:
            return _KINDS[facts["kind"]](f"Nothing was saved: rank {rank} cannot: {facts['error']}")
        if facts["path"] != theirs[0]["path"]:
            return UsageError(
                f"Nothing was saved: rank 0 saves to {theirs[0]['path']} but rank {rank} to {facts['path']}. "
                "Give the same path on every rank."
            )
    return None


def _begin(wish: Wish, id: str) -> int:
    """On rank 0: see that there is room for the checkpoint, and clear what earlier saves have left. Returns its order."""
    place = wish.place
    if place.is_link:
        raise UsageError(f"{place.path} is a link. Save to a folder of its own.")
    if not place.is_free():
        if not wish.overwrite:
            raise UsageError(f"{place.path} is there already. Save to another path, or pass overwrite=True.")
        if not is_checkpoint(place):
            raise UsageError(f"{place.path} holds something else than a checkpoint: overwrite=True replaces checkpoints only.")
    for left in place.clean():
        _log.info("Removed what a save had left that did not come to its end: %s", left)
    newest = find_checkpoints(place.parent)
    place.begin(id)
    return newest[0].summary.order + 1 if newest else 1


def _start(job: Job) -> None:
    """Not a daemon: Python waits for it when it ends."""

    def run() -> None:
        try:
            job.run()
        finally:
            job.saving.cpu_seconds += time.thread_time()
            _UNDER_WAY.discard(thread)

    thread = threading.Thread(target=run, name=f"shardwise save {job.wish.place.path}")
    _UNDER_WAY.add(thread)
    try:
        thread.start()
    except RuntimeError:  # The system has none left.
        _UNDER_WAY.discard(thread)
        raise
