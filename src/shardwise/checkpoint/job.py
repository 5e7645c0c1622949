"""The writing of one save: each rank its file, and rank 0 the manifest when all have reported. Runs in any thread, beside the steps.

Ranks report through notices, not collectives, so that it never gets between the steps.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from shardwise.checkpoint.folders import Keep, find_checkpoints, read_head
from shardwise.checkpoint.manifest import MANIFEST_NAME, Entry, Manifest, Piece, ShardFile, Summary, name_of
from shardwise.checkpoint.places import Place, writing
from shardwise.checkpoint.shards import Part, write_shard
from shardwise.checkpoint.snapshot import Snapshot
from shardwise.core.errors import CheckpointError
from shardwise.core.plan import Plan
from shardwise.runtime.copying import Copying
from shardwise.wire.notices import Notices

_log = logging.getLogger("shardwise")
NOT_BEGUN = "The save was not begun."
_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 0.0005, 0.05


@dataclass(frozen=True)
class Wish:
    """What a save is asked to do."""

    place: Place
    step: int | None = None
    overwrite: bool = False
    keep: Keep = field(default_factory=Keep)
    versions: Mapping[str, str] = field(default_factory=dict)


class Saving:
    """A save that is under way, or has ended."""

    def __init__(self, path: str) -> None:
        self.path = path
        """Where the checkpoint stands when it is done."""
        self.num_bytes = 0
        """What this rank has written."""
        self.cpu_seconds = 0.0
        """What the save took of this rank's CPU, in the loop and beside it."""
        self._ended = threading.Event()
        self._error: str | None = None
        self._call_seconds = 0.0
        self._copying: Copying | None = None

    @property
    def stall_seconds(self) -> float:
        """For how long the loop was held up so far: by the call, and where it waited for the copy."""
        return self._call_seconds + (0.0 if self._copying is None else self._copying.waited_seconds)

    @property
    def is_done(self) -> bool:
        """Whether it has ended, well or not."""
        return self._ended.is_set()

    @property
    def error(self) -> str | None:
        """What went wrong, if it has ended and something did."""
        return self._error if self.is_done else None

    def wait(self) -> None:
        """Until it has ended.

        Raises:
            CheckpointError: It has failed, on all ranks alike. Older checkpoints are as they were.
        """
        self._ended.wait()
        if self._error is not None:
            raise CheckpointError(self._error)

    def wait_copied(self) -> None:
        """Until the copy is made, or has failed. From then on, optimizer state and weights may be changed in any way."""
        if self._copying is not None:
            self._copying.wait()

    def end(self, error: str | None) -> None:
        """It has ended."""
        self._error = error
        self._ended.set()

    def __repr__(self) -> str:
        state = "under way" if not self.is_done else "failed" if self._error else "done"
        return f"Saving({self.path!r}, {state})"


@dataclass
class Job:
    """The writing of one rank, and on rank 0 the end of it all."""

    wish: Wish
    summary: Summary
    parts: list[Part]
    values: dict[str, Any]
    plan: Plan
    saving: Saving
    notices: Notices
    rank: int
    num_ranks: int
    deadline_seconds: float = 0.0
    snapshot: Snapshot | None = None
    """Where a copy is written: it has the parts then."""
    _claimed: threading.Lock = field(default_factory=threading.Lock)

    def key(self, rank: int) -> str:
        """Where a rank reports."""
        return f"save/{self.summary.id}/{rank}"

    @property
    def verdict_key(self) -> str:
        """Where rank 0 says how it ended."""
        return f"save/{self.summary.id}/verdict"

    def claim(self) -> bool:
        """Whether it is left to whoever asks first to bring it to its end: an interrupt may come as a thread begins to."""
        return self._claimed.acquire(blocking=False)

    def abandon(self) -> None:
        """Nothing of it is going to be written."""
        if self.rank == 0:
            self.wish.place.abandon(self.summary.id)
        if self.snapshot is not None:
            self.snapshot.copying.end()
        self.saving.end(NOT_BEGUN)

    def run(self) -> None:
        """Write, report, and learn how it ended. All ranks end with the same verdict; only an interrupt is raised."""
        if not self.claim():
            return
        try:
            error = self._run()
        except BaseException as interrupt:
            if self.rank == 0:
                self.wish.place.abandon(self.summary.id)
            self.saving.end(f"The save to {self.wish.place.path} was interrupted: {interrupt!r}")
            raise
        if error is not None:
            _log.error("rank %d: %s", self.rank, error)
        self.saving.end(error)

    def _run(self) -> str | None:
        began = time.monotonic()
        report = self._write()
        self.parts = []
        patience = max(self.deadline_seconds, 2 * (time.monotonic() - began))
        try:
            if self.rank == 0:
                error = self._conclude(report, patience)
                self.notices.post(self.verdict_key, json.dumps(error).encode())
                if error is None:
                    self._prune()
            else:
                self.notices.post(self.key(self.rank), json.dumps(report).encode())
                error = self._hear_verdict(patience)
        except Exception as failure:
            return f"The save to {self.wish.place.path} failed: {failure}"
        return error

    def _write(self) -> dict[str, Any]:
        name = f"rank-{self.rank:05}.safetensors"
        try:
            if self.snapshot is not None:
                self.parts = self.snapshot.finish()
            with writing(self.wish.place, self.summary.id, name) as writer:
                file, pieces = write_shard(writer, name, self.parts, self.summary.id)
            if self.snapshot is not None:
                self.snapshot.check()
        except Exception as error:
            return {"error": str(error) or type(error).__name__}
        self.saving.num_bytes = file.num_bytes
        forms = [[part.name, part.names, name_of(part.line.dtype), part.shape, part.stride] for part in self.parts]
        rows = [[piece.offset, piece.start, piece.stop] for piece in pieces]
        return {"file": vars(file), "forms": forms, "pieces": rows, "values": self.values}

    def _conclude(self, own: dict[str, Any], patience: float) -> str | None:
        """On rank 0: hear all ranks, write the manifest, publish. Returns what went wrong, if anything did."""
        place, id = self.wish.place, self.summary.id
        reports = [own, *(self._hear(self.key(rank), rank, patience) for rank in range(1, self.num_ranks))]
        failed = [f"rank {rank}: {report['error']}" for rank, report in enumerate(reports) if "error" in report]
        try:
            if failed:
                raise CheckpointError("; ".join(failed))
            with writing(place, id, MANIFEST_NAME) as writer:
                writer.write(memoryview(_assemble(reports, self.summary, self.plan, self.wish.versions).to_text()))
            place.publish(id, overwrite=self.wish.overwrite)
        except Exception as error:
            place.abandon(id)
            return f"The checkpoint {place.path} was not saved: {error} Older checkpoints are as they were."
        return None

    def _prune(self) -> None:
        """Remove old ones. The new one is saved, whatever becomes of that."""
        if self.wish.keep == Keep():
            return
        try:
            for surplus in self.wish.keep.surplus(find_checkpoints(self.wish.place.parent)):
                if surplus.summary.id != self.summary.id:
                    surplus.place.remove()
        except Exception as error:
            _log.warning("Old checkpoints stay: %s", error)

    def _hear(self, key: str, rank: int, patience: float) -> dict[str, Any]:
        text = self._await(key, patience)
        if text is None:
            return {"error": f"it has not reported within {patience:.0f} seconds: it is dead or stalled."}
        report: dict[str, Any] = json.loads(text)
        return report

    def _hear_verdict(self, patience: float) -> str | None:
        try:
            text = self._await(self.verdict_key, 2 * patience)
        except Exception:  # Rank 0 may be gone: it ends when all is published.
            text = None
        if text is None:
            try:
                is_there = read_head(self.wish.place).id == self.summary.id
            except CheckpointError:
                is_there = False
            return None if is_there else f"Rank 0 did not say whether {self.wish.place.path} was saved: it is dead or stalled."
        verdict: str | None = json.loads(text)
        return verdict

    def _await(self, key: str, patience: float) -> bytes | None:
        limit, pause = time.monotonic() + patience, _FIRST_PAUSE_SECONDS
        while True:
            text = self.notices.read(key)
            if text is not None or time.monotonic() > limit:
                return text
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)


def _assemble(reports: Sequence[Mapping[str, Any]], summary: Summary, plan: Plan, versions: Mapping[str, str]) -> Manifest:
    """One manifest of what all ranks have written."""
    files = []
    forms: dict[str, list[Any]] = {}
    pieces: dict[str, list[Piece]] = {}
    values: dict[str, Any] = {}
    for number, report in enumerate(reports):
        files.append(ShardFile(**{**report["file"], "checksums": tuple(report["file"]["checksums"])}))
        for form, (offset, start, stop) in zip(report["forms"], report["pieces"], strict=True):
            forms.setdefault(form[0], form)
            pieces.setdefault(form[0], [])
            if start < stop:
                pieces[form[0]].append(Piece(number, offset, start, stop))
        values.update(report["values"])
    tensors = {
        name: Entry(
            tuple(aliases),
            getattr(torch, dtype),
            tuple(shape),
            tuple(stride),
            tuple(sorted(pieces[name], key=lambda p: p.start)),
        )
        for name, aliases, dtype, shape, stride in forms.values()
    }
    return Manifest(summary, len(reports), plan.to_dict(), versions, tuple(files), tensors, values)
