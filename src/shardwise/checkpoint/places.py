"""Where checkpoints stand: folders of this machine, or of a file system that fsspec knows. Knows files and names, not what is in them.

On disk a checkpoint is written aside and published by one rename. Where there is no rename, it is written in its place, and the
manifest last: a folder without one is no checkpoint.
"""

from __future__ import annotations

import errno
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from shardwise.core.errors import CheckpointError, PathError

_OF_PATHS = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG)
"""What another path, or other permissions, would mend."""


class Writer(Protocol):
    """A file that is being written."""

    def write(self, data: memoryview) -> None:
        """Add bytes."""
        ...

    def finish(self) -> None:
        """All is written: bring it to the disk, and close it."""
        ...

    def close(self) -> None:
        """Close it, finished or not."""
        ...


class Source(Protocol):
    """A file that is being read."""

    num_bytes: int

    def read_into(self, target: memoryview, offset: int) -> None:
        """Fill memory with the bytes from an offset on.

        Raises:
            CheckpointError: The file ends before that, or cannot be read.
        """
        ...

    def close(self) -> None:
        """Nothing more is read."""
        ...


class Place(Protocol):
    """One folder in which a checkpoint stands or will stand."""

    path: str

    @property
    def parent(self) -> Place:
        """The folder that it stands in."""
        ...

    def child(self, name: str) -> Place:
        """A folder in this one."""
        ...

    def names(self) -> list[str]:
        """What the folder holds; nothing, if it is not there.

        Raises:
            PathError: It may not be looked into.
        """
        ...

    def exists(self) -> bool:
        """Whether anything stands there."""
        ...

    def is_file(self) -> bool:
        """Whether a file stands there, or in the way to it."""
        ...

    def open(self, name: str) -> Source:
        """Read a file. Links are not followed: a checkpoint holds its own files."""
        ...

    def following_links(self) -> Place:
        """The same place, where files may be links: caches of other tools are made of them."""
        ...

    @property
    def is_link(self) -> bool:
        """Whether it stands for another folder."""
        ...

    def is_free(self) -> bool:
        """Whether a checkpoint can be put there: nothing is there, or an empty folder."""
        ...

    def begin(self, id: str) -> None:
        """On one rank: make ready for a save, before any rank creates a file."""
        ...

    def create(self, id: str, name: str) -> Writer:
        """A new file of a save that is under way."""
        ...

    def publish(self, id: str, *, overwrite: bool) -> None:
        """On one rank: all files but the manifest, which was created last, are finished: let the checkpoint be seen."""
        ...

    def abandon(self, id: str) -> None:
        """On one rank: remove what was written for a save."""
        ...

    def remove(self) -> None:
        """Remove the checkpoint; it is gone for readers at once."""
        ...

    def clean(self) -> list[str]:
        """Remove what saves have left in the parent that did not come to their end; says what."""
        ...


@contextmanager
def writing(place: Place, id: str, name: str) -> Iterator[Writer]:
    """A new file of a save, which is finished at the end, and closed in any case."""
    writer = place.create(id, name)
    try:
        yield writer
        writer.finish()
    finally:
        writer.close()


@contextmanager
def publishing(place: Place) -> Iterator[str]:
    """A save of one process alone, under an id: published at the end, or abandoned."""
    id = uuid.uuid4().hex
    place.clean()
    place.begin(id)
    try:
        yield id
        place.publish(id, overwrite=False)
    except BaseException:
        place.abandon(id)
        raise


@contextmanager
def explaining(path: object, doing: str) -> Iterator[None]:
    """Turn errors of the file system into one that names the file."""
    try:
        yield
    except OSError as error:
        hint = {
            errno.ENOSPC: " The disk is full: make room, or save elsewhere.",
            errno.EDQUOT: " The quota is used up: make room, or save elsewhere.",
            errno.ENOENT: " It must be in a folder that all ranks can reach.",
            errno.ELOOP: " It is a link, which is not followed.",
            errno.EACCES: " Give a path that this user may use.",
            errno.ENOTDIR: " A part of the path is a file.",
        }.get(error.errno or 0, "")
        kind = PathError if error.errno in _OF_PATHS else CheckpointError
        raise kind(f"{path} cannot be {doing}: {error.strerror or error}.{hint}") from error
