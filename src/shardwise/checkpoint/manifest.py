"""The manifest of a checkpoint: which tensors there are, and where each of their elements lies. Nothing of it is believed unchecked.

A tensor is a line of elements in the order of its strides; *pieces* of it lie in files. Readers of any layout find the elements
that they need by overlap. The first line of the text is short and tells how new the checkpoint is.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import prod
from typing import Any, NoReturn

import torch

from shardwise.checkpoint.names import MODEL
from shardwise.core.errors import CheckpointError

FORMAT = "shardwise checkpoint"
SCHEMA = 1
"""Raised when the meaning of what is written changes. Readers refuse what is newer than they are."""
MANIFEST_NAME = "manifest.json"
MAX_MANIFEST_BYTES = 2**30
_CHUNK_BYTES = 64 * 1024
_LARGE_CHUNK_BYTES = 2**20
_MANY_CHUNKS, _MOST_CHUNKS = 64, 4096
_MOST_DIMS = 64
_MOST_ELEMENTS = 2**60
_FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,200}")
_ID = re.compile(r"[0-9a-f]{8,64}")
DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2,
        torch.int64, torch.int32, torch.int16, torch.int8, torch.uint64, torch.uint32, torch.uint16, torch.uint8, torch.bool,
        torch.complex64, torch.complex128,
    )
}  # fmt: skip


def name_of(dtype: torch.dtype) -> str:
    """The name by which a dtype is written down."""
    return str(dtype).removeprefix("torch.")


def is_file_name(name: object) -> bool:
    """Whether a name is that of a file in a folder of its own, and of none elsewhere."""
    return isinstance(name, str) and bool(_FILE_NAME.fullmatch(name))


def chunk_bytes_for(num_bytes: int) -> int:
    """How much of a file of a size one checksum covers: little, as long as there are not too many of them.

    >>> chunk_bytes_for(10**6), chunk_bytes_for(10**9), chunk_bytes_for(10**11)
    (65536, 1048576, 33554432)
    """
    size = _CHUNK_BYTES if num_bytes < _CHUNK_BYTES * _MANY_CHUNKS else _LARGE_CHUNK_BYTES
    while size * _MOST_CHUNKS < num_bytes:
        size *= 2
    return size


@dataclass(frozen=True)
class ShardFile:
    """One file: a safetensors header, then data. ``checksums`` cover the data, ``chunk_bytes`` each; 0, if there are none."""

    name: str
    header_bytes: int
    data_bytes: int
    header_checksum: int
    chunk_bytes: int
    checksums: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Of the whole file."""
        return self.header_bytes + self.data_bytes


@dataclass(frozen=True)
class Piece:
    """Elements ``[start, stop)`` of a tensor, which begin at a byte of a file's data."""

    file: int
    offset: int
    start: int
    stop: int


@dataclass(frozen=True)
class Entry:
    """One tensor. ``names`` are all by which a model knows it (several where it is tied), ``pieces`` are in order and cover it."""

    names: tuple[str, ...]
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    pieces: tuple[Piece, ...]

    @property
    def numel(self) -> int:
        """Elements."""
        return prod(self.shape)

    @property
    def num_bytes(self) -> int:
        """Bytes of all elements."""
        return self.numel * self.dtype.itemsize


@dataclass(frozen=True)
class Summary:
    """What tells checkpoints apart.

    Args:
        id: Of this one save, in every file of it.
        order: Above that of all that stood in the same folder before it.
        step: Updates that were made.
        saved_at: Seconds since 1970.
    """

    id: str
    order: int
    step: int
    saved_at: float


@dataclass(frozen=True)
class Manifest:
    """All of a checkpoint but its data.

    Args:
        summary: What tells it apart.
        num_ranks: Who wrote it.
        plan: Under which plan.
        versions: Of what wrote it.
        files: Where the data is.
        tensors: By name: ``model/...``, ``optimizer.N/...``, ``gradient/...``, ``values/...``.
        values: All that is no tensor of the model: encoded, by name; ``rank.R/...`` where a rank has one of its own.
    """

    summary: Summary
    num_ranks: int
    plan: Mapping[str, Any]
    versions: Mapping[str, str]
    files: tuple[ShardFile, ...]
    tensors: Mapping[str, Entry]
    values: Mapping[str, Any] = field(default_factory=dict)

    @property
    def weights(self) -> dict[str, str]:
        """Weights and buffers by the first of their names, and how they are called in the checkpoint."""
        return {key.removeprefix(MODEL): key for key in self.tensors if key.startswith(MODEL)}

    @property
    def num_bytes(self) -> int:
        """Of all files."""
        return sum(file.num_bytes for file in self.files)

    def to_text(self) -> bytes:
        """The text of the file: a line that tells it apart, and all the rest."""
        head = {"format": FORMAT, "schema": SCHEMA, **vars(self.summary)}
        body = {
            "num_ranks": self.num_ranks,
            "plan": dict(self.plan),
            "versions": dict(self.versions),
            "files": [_file_to_dict(file) for file in self.files],
            "tensors": {name: _entry_to_dict(entry) for name, entry in self.tensors.items()},
            "values": dict(self.values),
        }
        body["checksum"] = _checksum({**head, **body})
        return f"{_dump(head)[:-1]},\n{_dump(body)[1:]}\n".encode()


def _dump(values: Any) -> str:
    return json.dumps(values, separators=(",", ":"), allow_nan=False)


def _checksum(values: Any) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def _file_to_dict(file: ShardFile) -> dict[str, Any]:
    return {**vars(file), "checksums": "".join(f"{checksum:08x}" for checksum in file.checksums)}


def _entry_to_dict(entry: Entry) -> dict[str, Any]:
    values: dict[str, Any] = {"dtype": name_of(entry.dtype), "shape": list(entry.shape)}
    if entry.stride != contiguous_stride(entry.shape):
        values["stride"] = list(entry.stride)
    if entry.names:
        values["names"] = list(entry.names)
    values["pieces"] = [list(vars(piece).values()) for piece in entry.pieces]
    return values


def contiguous_stride(shape: Sequence[int]) -> tuple[int, ...]:
    """Strides of a tensor whose last dimension lies densest.

    >>> contiguous_stride((2, 3, 4))
    (12, 4, 1)
    """
    stride, size = [], 1
    for length in reversed(shape):
        stride.append(size)
        size *= max(1, length)
    return tuple(reversed(stride))


# Reading


def read_summary(line: bytes, where: str) -> Summary:
    """What the first line of a manifest tells.

    Raises:
        CheckpointError: It is no such line, or a newer version wrote it.
    """
    return _Checks(where).summary(_parse(line.rstrip().rstrip(b",") + b"}", where))


def parse_manifest(text: bytes, where: str) -> Manifest:
    """Read a manifest. Everything in it is checked here, against itself: sizes, ranges, names.

    Args:
        where: The file, for errors.

    Raises:
        CheckpointError: It is damaged, foreign, hostile, or of a newer version.
    """
    values, checks = _parse(text, where), _Checks(where)
    summary = checks.summary(values)
    checksum = values.pop("checksum", None)
    if checksum != _checksum(values):
        checks.refuse("its checksum is wrong: it was changed or damaged after it was written")
    return checks.manifest(summary, values)


def _parse(text: bytes, where: str) -> dict[str, Any]:
    if len(text) > MAX_MANIFEST_BYTES:
        raise CheckpointError(f"{where} has {len(text):,} bytes, more than any manifest.")
    try:
        values = json.loads(text, object_pairs_hook=_without_duplicates, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(
            f"{where} is no manifest: {str(error)[:200]}. It is damaged, or something else wrote it."
        ) from error
    if not isinstance(values, dict):
        raise CheckpointError(f"{where} is no manifest: it holds no table. Something else wrote it.")
    return values


def _without_duplicates(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"the name {key[:100]!r} stands there twice")
        found[key] = value
    return found


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number")


class _Checks:
    """Turns plain values into a manifest, and refuses what does not fit together."""

    def __init__(self, where: str) -> None:
        self._where = where

    def refuse(self, why: str) -> NoReturn:
        """Say why it cannot be read."""
        raise CheckpointError(f"{self._where} cannot be used: {why}.")

    def summary(self, values: Mapping[str, Any]) -> Summary:
        """The first line."""
        if values.get("format") != FORMAT:
            self.refuse("it is no manifest of a Shardwise checkpoint")
        schema = self._whole(values.get("schema"), "schema")
        if schema > SCHEMA:
            self.refuse(f"it has schema {schema}, but this version reads up to {SCHEMA}. Update Shardwise to read it")
        found = values.get("id")
        if not isinstance(found, str) or not _ID.fullmatch(found):
            self.refuse("it has no id")
        saved_at = values.get("saved_at")
        if not isinstance(saved_at, int | float) or isinstance(saved_at, bool) or not 0 <= saved_at < 1e15:
            self.refuse("it does not say when it was saved")
        return Summary(found, self._whole(values.get("order"), "order"), self._whole(values.get("step"), "step"), saved_at)

    def manifest(self, summary: Summary, values: Mapping[str, Any]) -> Manifest:
        """All of it."""
        rows = self._list(values.get("files"), "files")
        files = tuple(self._file(self._table(row, f"file {at}")) for at, row in enumerate(rows))
        names = [file.name for file in files]
        if len(set(names)) != len(names):
            self.refuse("a file is named twice")
        tensors = {
            name: self._entry(name, self._table(entry, f"tensor {name[:100]!r}"), files)
            for name, entry in self._table(values.get("tensors"), "tensors").items()
        }
        self._check_sizes(tensors.values(), files)
        versions = self._table(values.get("versions"), "versions")
        num_ranks = self._whole(values.get("num_ranks"), "num_ranks")
        plan, kept = self._table(values.get("plan"), "plan"), self._table(values.get("values"), "values")
        return Manifest(summary, num_ranks, plan, versions, files, tensors, kept)

    def _whole(self, value: Any, what: str, most: int = 2**62) -> int:
        if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= most:
            self.refuse(f"{what} must be a whole number from 0 to {most}, but is {str(value)[:50]}")
        return value

    def _list(self, value: Any, what: str) -> list[Any]:
        if not isinstance(value, list):
            self.refuse(f"{what} must be a list, but is {str(value)[:50]}")
        return value

    def _table(self, value: Any, what: str) -> dict[str, Any]:
        if not isinstance(value, dict):
            self.refuse(f"{what} must be a table, but is {str(value)[:50]}")
        return value

    def _file(self, values: Mapping[str, Any]) -> ShardFile:
        name = values.get("name")
        if not isinstance(name, str) or not is_file_name(name) or name == MANIFEST_NAME:
            self.refuse(f"{str(name)[:100]!r} is no name of a file inside the folder")
        header_bytes, data_bytes, chunk_bytes, header_checksum = (
            self._whole(values.get(key), f"{key} of {name}")
            for key in ("header_bytes", "data_bytes", "chunk_bytes", "header_checksum")
        )
        text = values.get("checksums")
        if not isinstance(text, str) or not re.fullmatch(r"([0-9a-f]{8})*", text):
            self.refuse(f"the checksums of {name} are none")
        if len(text) // 8 != (-(-data_bytes // chunk_bytes) if chunk_bytes else 0):
            self.refuse(f"the number of checksums of {name} does not fit its size")
        checksums = tuple(int(text[at : at + 8], 16) for at in range(0, len(text), 8))
        return ShardFile(name, header_bytes, data_bytes, header_checksum, chunk_bytes, checksums)

    def _entry(self, name: str, values: Mapping[str, Any], files: Sequence[ShardFile]) -> Entry:
        what = f"tensor {name[:100]!r}"
        dtype = DTYPES.get(str(values.get("dtype")))
        if dtype is None:
            self.refuse(f"{what} has the unknown dtype {str(values.get('dtype'))[:50]!r}")
        shape = tuple(self._whole(length, f"the shape of {what}") for length in self._list(values.get("shape"), what))
        if len(shape) > _MOST_DIMS or prod(max(1, length) for length in shape) > _MOST_ELEMENTS:
            self.refuse(f"{what} has a shape that no tensor has")
        stride = contiguous_stride(shape)
        if "stride" in values:
            stride = tuple(self._whole(step, f"a stride of {what}") for step in self._list(values["stride"], what))
            self._check_stride(what, shape, stride)
        names = tuple(self._list(values.get("names", []), what))
        if not all(isinstance(each, str) for each in names):
            self.refuse(f"{what} has names that are none")
        rows = self._list(values.get("pieces"), f"the pieces of {what}")
        pieces = tuple(self._piece(what, row, dtype.itemsize, files) for row in rows)
        self._check_cover(what, prod(shape), pieces)
        return Entry(names, dtype, shape, stride, pieces)

    def _check_stride(self, what: str, shape: tuple[int, ...], stride: tuple[int, ...]) -> None:
        expected = 1
        for step, length in sorted((step, length) for step, length in zip(stride, shape, strict=False) if length > 1):
            if step != expected:
                self.refuse(f"the strides of {what} leave gaps or overlap")
            expected *= length
        if len(stride) != len(shape):
            self.refuse(f"{what} has {len(stride)} strides for {len(shape)} dimensions")

    def _piece(self, what: str, row: Any, itemsize: int, files: Sequence[ShardFile]) -> Piece:
        numbers = [self._whole(number, f"a piece of {what}") for number in self._list(row, f"a piece of {what}")]
        if len(numbers) != 4:
            self.refuse(f"a piece of {what} has {len(numbers)} numbers, not 4")
        piece = Piece(*numbers)
        if piece.file >= len(files):
            self.refuse(f"a piece of {what} lies in file {piece.file}, but there are {len(files)}")
        file = files[piece.file]
        if piece.start >= piece.stop or piece.offset + (piece.stop - piece.start) * itemsize > file.data_bytes:
            self.refuse(f"a piece of {what} lies outside of {file.name}")
        return piece

    def _check_sizes(self, entries: Iterable[Entry], files: Sequence[ShardFile]) -> None:
        """No byte belongs to two pieces: else little data could pretend to be much."""
        sizes = [0] * len(files)
        for entry in entries:
            for piece in entry.pieces:
                sizes[piece.file] += (piece.stop - piece.start) * entry.dtype.itemsize
        for size, file in zip(sizes, files, strict=True):
            if size > file.data_bytes:
                self.refuse(f"its pieces of {file.name} have {size:,} bytes, more than the file")

    def _check_cover(self, what: str, numel: int, pieces: Sequence[Piece]) -> None:
        ends = [0, *(end for piece in pieces for end in (piece.start, piece.stop)), numel]
        if any(stop != start for stop, start in list(pairwise(ends))[::2]):
            self.refuse(f"the pieces of {what} leave elements out, or hold some twice")
