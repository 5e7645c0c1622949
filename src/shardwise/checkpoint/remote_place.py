"""Folders of file systems that fsspec knows. There is no rename: the manifest is written last, and makes the checkpoint."""

from __future__ import annotations

import posixpath
from contextlib import suppress
from typing import Any

import fsspec  # type: ignore[import-untyped]

from shardwise.checkpoint.manifest import MANIFEST_NAME
from shardwise.checkpoint.places import explaining
from shardwise.core.errors import CheckpointError, UsageError


class RemotePlace:
    """A folder behind fsspec: s3, gcs, memory and the like."""

    def __init__(self, path: str) -> None:
        self.path = path.rstrip("/")
        with explaining(path, "reached"):
            try:
                self._files, self._root = fsspec.core.url_to_fs(self.path)
            except (ImportError, ValueError) as error:
                raise UsageError(f"{path} cannot be reached: {error}.") from error
        self._files.use_listings_cache = False

    @property
    def parent(self) -> RemotePlace:
        """The folder that it stands in."""
        protocol, _, rest = self.path.partition("://")
        return RemotePlace(f"{protocol}://{posixpath.dirname(rest)}")

    def child(self, name: str) -> RemotePlace:
        """A folder in this one."""
        return RemotePlace(f"{self.path}/{name}")

    def names(self) -> list[str]:
        """What the folder holds, in order."""
        self._files.invalidate_cache()
        with explaining(self.path, "looked into"):
            try:
                return sorted(posixpath.basename(str(path).rstrip("/")) for path in self._files.ls(self._root, detail=False))
            except (FileNotFoundError, NotADirectoryError):
                return []

    def exists(self) -> bool:
        """Whether it holds anything."""
        return bool(self.names())

    def is_file(self) -> bool:
        """Whether a file stands there."""
        with explaining(self.path, "reached"):
            return bool(self._files.isfile(self._root))

    @property
    def is_link(self) -> bool:
        """There are none."""
        return False

    def is_free(self) -> bool:
        """Whether there is no checkpoint, nor a file of other people; what a save has left that did not end is no matter."""
        return all(name.startswith("rank-") for name in self.names())

    def open(self, name: str) -> RemoteSource:
        """Read a file of it."""
        return RemoteSource(self._files, f"{self._root}/{name}")

    def following_links(self) -> RemotePlace:
        """There are none."""
        return self

    def begin(self, id: str) -> None:
        """What an earlier save has left in this place goes. A checkpoint stays: without a rename it could not be replaced at once."""
        if MANIFEST_NAME in self.names():
            raise UsageError(f"{self.path} cannot be replaced: there is no rename in this file system. Save to another path.")
        self._remove_files()
        with explaining(self.path, "made"):
            self._files.makedirs(self._root, exist_ok=True)

    def create(self, id: str, name: str) -> RemoteWriter:
        """A new file in its place."""
        return RemoteWriter(self._files, f"{self._root}/{name}")

    def publish(self, id: str, *, overwrite: bool) -> None:
        """The manifest is there: that is all."""

    def abandon(self, id: str) -> None:
        """Remove what was written."""
        self._remove_files()

    def remove(self) -> None:
        """The manifest first: without it there is no checkpoint."""
        with explaining(self.path, "removed"):
            self._files.rm_file(f"{self._root}/{MANIFEST_NAME}")
        self._remove_files()

    def _remove_files(self) -> None:
        with suppress(OSError):
            for name in self.names():
                self._files.rm_file(f"{self._root}/{name}")

    def clean(self) -> list[str]:
        """Nothing tells a save that has died from one that is under way: `prune` removes them when asked."""
        return []


class RemoteWriter:
    """Writes a file through fsspec."""

    def __init__(self, files: Any, path: str) -> None:
        self._path = path
        with explaining(path, "written"):
            self._file = files.open(path, "wb")

    def write(self, data: memoryview) -> None:
        """Add bytes."""
        with explaining(self._path, "written"):
            self._file.write(data)

    def finish(self) -> None:
        """Send what is left."""
        with explaining(self._path, "written"):
            self._file.close()

    def close(self) -> None:
        """Close it; a half of it may have been sent, but without a manifest it is nothing."""
        with suppress(OSError):
            self._file.close()


class RemoteSource:
    """Reads ranges of a file through fsspec."""

    def __init__(self, files: Any, path: str) -> None:
        self._path = path
        self._files = files
        with explaining(path, "read"):
            self.num_bytes = int(files.size(path))

    def read_into(self, target: memoryview, offset: int) -> None:
        """Fill memory."""
        if not target:
            return
        with explaining(self._path, "read"):
            data = self._files.cat_file(self._path, start=offset, end=offset + len(target))
        if len(data) != len(target):
            raise CheckpointError(f"{self._path} ends before it should: it was cut off.")
        target[:] = data

    def close(self) -> None:
        """Nothing is held."""
