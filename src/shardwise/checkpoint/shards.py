"""Files with data: written as a stream of safetensors with checksums, read by ranges. Knows bytes, not what they mean.

The format is that of the safetensors library, which needs all tensors at once to write them, and copies each; here one after the
other goes from where it lies to the file.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch

from shardwise.checkpoint.manifest import Piece, ShardFile, chunk_bytes_for, contiguous_stride
from shardwise.checkpoint.places import Place, Source, Writer
from shardwise.core.errors import CheckpointError
from shardwise.runtime.copying import Guards

_BLOCK_BYTES = 2**20
_STAGING_BYTES = 16 * 2**20
_MAX_HEADER_BYTES = 2**30
DTYPE_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.complex64: "C64",
}
"""How safetensors calls what it knows. Other dtypes are written as bytes; the manifest tells what they are."""


@dataclass(frozen=True)
class Part:
    """Elements ``[start, stop)`` of one tensor, as this rank has them: one line, in the order of the tensor's strides."""

    name: str
    names: tuple[str, ...]
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    start: int
    stop: int
    line: torch.Tensor
    fetch: Callable[[], torch.Tensor] | None = None
    """Brings the values when they are written, where ``line`` has a form alone."""
    guards: Guards = ()
    """Through what alone the values change, and in updates alone, so that they can be copied beside the steps; none, if they may change
    at any time."""

    @property
    def num_bytes(self) -> int:
        """Bytes of the line."""
        return self.line.numel() * self.line.element_size()

    @property
    def key(self) -> str:
        """Its name in the file: with its range, unless it is the whole tensor."""
        return self.name if self.line.numel() == prod(self.shape) else f"{self.name}@{self.start}:{self.stop}"


def bytes_of(line: torch.Tensor) -> memoryview:
    """The memory of a dense line of the host, without a copy."""
    return line.detach().view(torch.uint8).numpy().data


def write_shard(writer: Writer, name: str, parts: Sequence[Part], id: str) -> tuple[ShardFile, list[Piece]]:
    """Write all parts into one file.

    Returns:
        What the manifest says of the file, and where each part lies, with 0 for the file's number.
    """
    header = header_of([(part.key, part.line, list(_shape_in_file(part))) for part in parts], {"shardwise": id})
    data_bytes = sum(part.num_bytes for part in parts)
    stream = _Stream(writer, chunk_bytes_for(data_bytes))
    writer.write(memoryview(header))
    pieces, offset = [], 0
    for part in parts:
        pieces.append(Piece(0, offset, part.start, part.stop))
        stream.add(part.line if part.fetch is None else part.fetch())
        offset += part.num_bytes
    stream.end()
    return ShardFile(name, len(header), data_bytes, zlib.crc32(header), stream.chunk_bytes, tuple(stream.checksums)), pieces


def _shape_in_file(part: Part) -> tuple[int, ...]:
    is_whole = part.line.numel() == prod(part.shape)
    return part.shape if is_whole and part.stride == contiguous_stride(part.shape) else (part.line.numel(),)


def header_of(tensors: Iterable[tuple[str, torch.Tensor, list[int]]], metadata: dict[str, str]) -> bytes:
    """The beginning of a safetensors file that holds lines, one after the other."""
    table: dict[str, Any] = {"__metadata__": {"format": "pt", **metadata}}
    offset = 0
    for key, line, shape in tensors:
        num_bytes = line.numel() * line.element_size()
        dtype = DTYPE_NAMES.get(line.dtype)
        form = {"dtype": dtype, "shape": shape} if dtype else {"dtype": "U8", "shape": [num_bytes]}
        table[key] = {**form, "data_offsets": [offset, offset + num_bytes]}
        offset += num_bytes
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


class _Stream:
    """Lines on their way into a file, with a checksum for each chunk."""

    def __init__(self, writer: Writer, chunk_bytes: int) -> None:
        self._writer = writer
        self.chunk_bytes = chunk_bytes
        self.checksums: list[int] = []
        self._checksum = 0
        self._room = chunk_bytes

    def add(self, line: torch.Tensor) -> None:
        """Write a line. What lies on a device comes over in parts."""
        if line.device.type == "cpu":
            self._add_bytes(bytes_of(line))
            return
        step = max(1, _STAGING_BYTES // line.element_size())
        for start in range(0, line.numel(), step):
            self._add_bytes(bytes_of(line[start : start + step].cpu()))

    def _add_bytes(self, data: memoryview) -> None:
        for start in range(0, len(data), _BLOCK_BYTES):
            block = data[start : start + _BLOCK_BYTES]
            self._add_to_checksums(block)
            self._writer.write(block)

    def _add_to_checksums(self, block: memoryview) -> None:
        while block:
            part, block = block[: self._room], block[self._room :]
            self._checksum = zlib.crc32(part, self._checksum)
            self._room -= len(part)
            if not self._room:
                self.end()

    def end(self) -> None:
        """A chunk is full, or all is written."""
        if self._room < self.chunk_bytes:
            self.checksums.append(self._checksum)
        self._checksum, self._room = 0, self.chunk_bytes


class ShardReader:
    """Reads one file of a checkpoint, and tests it against the manifest.

    Raises:
        CheckpointError: It is not there, not as long as it should be, or of another checkpoint.
    """

    def __init__(self, place: Place, file: ShardFile, id: str) -> None:
        self._where = f"{place.path}/{file.name}"
        self._file = file
        self._id = id
        self._source: Source = place.open(file.name)
        if self._source.num_bytes != file.num_bytes:
            found = self._source.num_bytes
            self.close()
            what = "cut off" if found < file.num_bytes else "another file"
            raise CheckpointError(f"{self._where} has {found:,} bytes, but should have {file.num_bytes:,}: it is {what}.")

    def close(self) -> None:
        """Nothing more is read."""
        self._source.close()

    def check_header(self) -> None:
        """Test the header.

        Raises:
            CheckpointError: It is damaged, or of another checkpoint.
        """
        header = bytearray(min(self._file.header_bytes, _MAX_HEADER_BYTES))
        self._source.read_into(memoryview(header), 0)
        if zlib.crc32(header) != self._file.header_checksum:
            raise CheckpointError(f"{self._where} cannot be used: {self._why(bytes(header))}.")

    def _why(self, header: bytes) -> str:
        try:
            found = json.loads(header[8:])["__metadata__"]["shardwise"]
        except (ValueError, KeyError, TypeError, RecursionError):
            return "its header is damaged"
        if found != self._id:
            return f"it belongs to the checkpoint {str(found)[:64]!r}, not to {self._id!r}"
        return "its header is damaged"

    def check_chunks(self, chunks: Iterable[int], on_bytes: Callable[[int], None] = lambda num_bytes: None) -> None:
        """Test some of the data.

        Raises:
            CheckpointError: It is damaged.
        """
        room = memoryview(bytearray(min(self._file.chunk_bytes, _BLOCK_BYTES)))
        for chunk in chunks:
            begin = chunk * self._file.chunk_bytes
            end = min(begin + self._file.chunk_bytes, self._file.data_bytes)
            checksum = 0
            for start in range(begin, end, len(room)):
                block = room[: min(len(room), end - start)]
                self._source.read_into(block, self._file.header_bytes + start)
                checksum = zlib.crc32(block, checksum)
                on_bytes(len(block))
            if checksum != self._file.checksums[chunk]:
                raise CheckpointError(
                    f"{self._where} is damaged: the checksum of bytes {begin:,} to {end:,} of its data is wrong. "
                    "Load an older checkpoint (fallback=True)."
                )

    def chunks_of(self, start: int, stop: int) -> range:
        """The chunks in which bytes of the data lie; none, where there are no checksums."""
        if not self._file.chunk_bytes:
            return range(0)
        return range(start // self._file.chunk_bytes, -(-stop // self._file.chunk_bytes))

    def read(self, target: torch.Tensor, dtype: torch.dtype, offset: int) -> None:
        """Fill a line with elements of a dtype that begin at a byte of the data; they are cast, if the line has another."""
        if target.device.type == "cpu" and target.dtype == dtype and target.is_contiguous():
            self._source.read_into(bytes_of(target), self._file.header_bytes + offset)
            return
        step = max(1, _STAGING_BYTES // dtype.itemsize)
        for start in range(0, target.numel(), step):
            part = target[start : start + step]
            staged = torch.empty(part.numel(), dtype=dtype)
            self._source.read_into(bytes_of(staged), self._file.header_bytes + offset + start * dtype.itemsize)
            part.copy_(staged)
