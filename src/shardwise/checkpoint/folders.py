"""Checkpoints in folders: which there are, which is the newest, which may go. Reads no data."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from shardwise.checkpoint.local_place import LocalPlace
from shardwise.checkpoint.manifest import MANIFEST_NAME, MAX_MANIFEST_BYTES, Manifest, Summary, parse_manifest, read_summary
from shardwise.checkpoint.places import Place
from shardwise.core.errors import CheckpointError, PathError, UsageError

_HEAD_BYTES = 4096


def place_of(path: str | os.PathLike[str]) -> Place:
    """The place of a path: a local one, or ``protocol://...`` for fsspec."""
    text = os.fspath(path)
    if not text:
        raise UsageError("A checkpoint needs a path, but it is empty.")
    protocol = text.split("://", 1)[0] if "://" in text else "file"
    if protocol in ("file", "local"):
        path = Path(text.split("://", 1)[-1])
        if not Path(os.path.abspath(path)).name:
            raise UsageError(f"{path} is no place for a checkpoint. Give a folder that is to be made.")
        return LocalPlace(path)
    from shardwise.checkpoint.remote_place import RemotePlace

    return RemotePlace(text)


@dataclass(frozen=True)
class Found:
    """A complete checkpoint: it has a manifest. Whether its data is whole, a look into it tells."""

    place: Place
    summary: Summary

    @property
    def is_readable(self) -> bool:
        """Whether its manifest at least begins as one."""
        return self.summary != _UNREADABLE


_UNREADABLE = Summary("", 2**62, 0, 0.0)
"""Of a manifest that cannot be read, or a folder that may not be looked into: it may be the newest."""


def find_checkpoints(folder: Place, *, with_damaged: bool = False) -> list[Found]:
    """The complete checkpoints in a folder, the newest first; with those, before all others, whose manifest cannot be read."""
    found = [each for each in _found_in(folder) if with_damaged or each.is_readable]
    return sorted(found, key=lambda each: (each.summary.order, each.summary.saved_at), reverse=True)


def _found_in(folder: Place) -> Iterator[Found]:
    for name in folder.names():
        place = folder.child(name)
        if name.startswith(".") or place.is_link:
            continue
        try:
            if not is_checkpoint(place):
                continue
            summary = read_head(place)
        except CheckpointError:
            summary = _UNREADABLE
        yield Found(place, summary)


def read_head(place: Place) -> Summary:
    """What tells a checkpoint apart, from the first line of its manifest.

    Raises:
        CheckpointError: There is none, or it cannot be read.
    """
    text = _read(place, _HEAD_BYTES)
    return read_summary(text.split(b"\n", 1)[0], f"{place.path}/{MANIFEST_NAME}")


def read_manifest(place: Place) -> Manifest:
    """The manifest of a checkpoint, checked.

    Raises:
        CheckpointError: There is none, or it cannot be used.
    """
    return parse_manifest(read_manifest_text(place), f"{place.path}/{MANIFEST_NAME}")


def read_manifest_text(place: Place) -> bytes:
    """The same unparsed, to be handed to other ranks.

    Raises:
        CheckpointError: There is none, or it is too large for one.
    """
    return _read(place, MAX_MANIFEST_BYTES)


def _read(place: Place, most_bytes: int) -> bytes:
    source = place.open(MANIFEST_NAME)
    try:
        if source.num_bytes > MAX_MANIFEST_BYTES:
            raise CheckpointError(f"{place.path}/{MANIFEST_NAME} has {source.num_bytes:,} bytes, more than any manifest.")
        text = bytearray(min(source.num_bytes, most_bytes))
        source.read_into(memoryview(text), 0)
    finally:
        source.close()
    return bytes(text)


def is_checkpoint(place: Place) -> bool:
    """Whether a folder has a manifest."""
    return MANIFEST_NAME in place.names()


def candidates(path: Place, *, with_older: bool = False) -> list[Place]:
    """Where a load from a path looks: there (and then at older ones beside it, if asked to), or in the folders in it, the newest first.

    Raises:
        CheckpointError: There is no checkpoint.
    """
    if is_checkpoint(path):
        if not with_older:
            return [path]
        older = [each.place for each in find_checkpoints(path.parent)]
        paths = [place.path for place in older]
        at = next((at for at, found in enumerate(paths) if os.path.basename(found) == os.path.basename(path.path)), None)
        return [path, *(older[at + 1 :] if at is not None else older)]
    found = [each.place for each in find_checkpoints(path, with_damaged=True)]
    if not found:
        raise nothing_in(path)
    return found


def nothing_in(path: Place) -> CheckpointError:
    """Says of a path that there is no checkpoint, and why."""
    hint = "Give a folder that shardwise.save has written, or one that holds such folders."
    if path.is_file():
        return PathError(f"{path.path} is no folder, or a part of the path is a file. {hint}")
    return CheckpointError(f"{path.path} {'holds no complete checkpoint' if path.exists() else 'is not there'}. {hint}")


@dataclass(frozen=True)
class Keep:
    """Which checkpoints stay: the newest ``last``, and those whose step is a multiple of ``every``; all, if neither is given."""

    last: int | None = None
    every: int | None = None

    def __post_init__(self) -> None:
        for name, number in (("keep_last", self.last), ("keep_every", self.every)):
            if number is not None and (not isinstance(number, int) or isinstance(number, bool) or number < 1):
                raise UsageError(f"{name} must be a whole number from 1 on, but is {number!r}.")

    def surplus(self, found: list[Found]) -> list[Found]:
        """Those that may go, of checkpoints that are sorted from the newest. The newest always stays."""
        if self.last is None and self.every is None:
            return []
        kept_last = self.last or 1
        return [
            each
            for at, each in enumerate(found)
            if at >= kept_last and not (self.every is not None and each.summary.step % self.every == 0)
        ]
