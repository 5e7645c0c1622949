"""Reads elements of a checkpoint's tensors into lines of memory: only what is needed, tested before anything is changed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch

from shardwise.checkpoint.manifest import Entry, Manifest, Piece
from shardwise.checkpoint.places import Place
from shardwise.checkpoint.shards import ShardReader
from shardwise.core.errors import CheckpointError


@dataclass(frozen=True)
class Slot:
    """Elements ``[start, stop)`` of a tensor, in the order of ``stride``, and the line that is to hold them.

    The line is asked for when it is filled: until then nothing is allocated.
    """

    entry: Entry
    stride: tuple[int, ...]
    start: int
    stop: int
    line: Callable[[], torch.Tensor]
    done: Callable[[torch.Tensor], None] | None = None
    """Takes the line when it is filled, where it is not itself the place of its values."""

    @property
    def is_in_order(self) -> bool:
        """Whether the elements lie in the checkpoint as they are wanted."""
        forms = (zip(self.entry.shape, stride, strict=True) for stride in (self.entry.stride, self.stride))
        wanted, found = ([step for length, step in form if length > 1] for form in forms)
        return wanted == found

    @property
    def needed(self) -> tuple[int, int]:
        """The elements that must be read, in the order of the checkpoint."""
        return (self.start, self.stop) if self.is_in_order else (0, self.entry.numel)


class Reader:
    """Reads one checkpoint."""

    def __init__(self, place: Place, manifest: Manifest) -> None:
        self.place = place
        self.manifest = manifest
        self.num_bytes_read = 0
        self._files: dict[int, ShardReader] = {}

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *error: object) -> None:
        for file in self._files.values():
            file.close()
        self._files.clear()

    def _file(self, number: int) -> ShardReader:
        if number not in self._files:
            self._files[number] = ShardReader(self.place, self.manifest.files[number], self.manifest.summary.id)
        return self._files[number]

    # Testing

    def check(self, ranges: Iterable[tuple[Entry, int, int]]) -> None:
        """Test all that lies in ranges of elements: files, headers, checksums.

        Raises:
            CheckpointError: Something is missing, damaged, or of another checkpoint.
        """
        chunks: dict[int, set[int]] = {}
        for entry, start, stop in ranges:
            for piece, low, high in _overlaps(entry, start, stop):
                begin = piece.offset + (low - piece.start) * entry.dtype.itemsize
                end = piece.offset + (high - piece.start) * entry.dtype.itemsize
                chunks.setdefault(piece.file, set()).update(self._file(piece.file).chunks_of(begin, end))
        for number in sorted(chunks):
            self._file(number).check_header()
            self._file(number).check_chunks(sorted(chunks[number]), self._count)

    def check_all(self, on_bytes: Callable[[int], None] = lambda num_bytes: None) -> None:
        """Test every byte.

        Raises:
            CheckpointError: Something is missing, damaged, or of another checkpoint.
        """
        for number, file in enumerate(self.manifest.files):
            self._file(number).check_header()
            self._file(number).check_chunks(range(len(file.checksums)), on_bytes)

    def _count(self, num_bytes: int) -> None:
        self.num_bytes_read += num_bytes

    # Reading

    def fill(self, slot: Slot) -> None:
        """Read what a slot wants."""
        if slot.start == slot.stop:
            return
        line = slot.line()
        self._fill(slot, line)
        if slot.done is not None:
            slot.done(line)

    def _fill(self, slot: Slot, line: torch.Tensor) -> None:
        if slot.is_in_order:
            self._read(slot.entry, slot.start, slot.stop, line)
            return
        whole = torch.empty(slot.entry.numel, dtype=slot.entry.dtype)
        self._read(slot.entry, 0, slot.entry.numel, whole)
        turned = torch.empty_strided(slot.entry.shape, slot.stride, dtype=whole.dtype)
        turned.copy_(whole.as_strided(slot.entry.shape, slot.entry.stride))
        line.copy_(turned.as_strided((slot.entry.numel,), (1,))[slot.start : slot.stop])

    def tensor(self, name: str) -> torch.Tensor:
        """A whole tensor, on the host.

        Raises:
            CheckpointError: There is none of that name.
        """
        entry = self.entry(name)
        line = torch.empty(entry.numel, dtype=entry.dtype)
        self._read(entry, 0, entry.numel, line)
        return line.as_strided(entry.shape, entry.stride)

    def entry(self, name: str) -> Entry:
        """What the manifest says of a tensor.

        Raises:
            CheckpointError: There is none of that name.
        """
        entry = self.manifest.tensors.get(name)
        if entry is None:
            raise CheckpointError(f"{self.place.path} has no tensor {name[:100]!r}, which its manifest refers to.")
        return entry

    def _read(self, entry: Entry, start: int, stop: int, line: torch.Tensor) -> None:
        size = entry.dtype.itemsize
        with torch.no_grad():
            for piece, low, high in _overlaps(entry, start, stop):
                offset = piece.offset + (low - piece.start) * size
                self._file(piece.file).read(line[low - start : high - start], entry.dtype, offset)
                self._count((high - low) * size)


def _overlaps(entry: Entry, start: int, stop: int) -> Iterator[tuple[Piece, int, int]]:
    """The pieces that hold some of a range of elements, and which."""
    for piece in entry.pieces:
        low, high = max(start, piece.start), min(stop, piece.stop)
        if low < high:
            yield piece, low, high
