"""Folders of Hugging Face: safetensors files with the full weights of a model, with an index where there are several."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Iterator, Mapping
from math import prod
from typing import Any

import torch

from shardwise.checkpoint import names
from shardwise.checkpoint.manifest import (
    MANIFEST_NAME,
    Entry,
    Manifest,
    Piece,
    ShardFile,
    Summary,
    contiguous_stride,
    is_file_name,
)
from shardwise.checkpoint.places import Place, Source, Writer, publishing, writing
from shardwise.checkpoint.reader import Reader
from shardwise.checkpoint.shards import DTYPE_NAMES, bytes_of, header_of
from shardwise.core.errors import CheckpointError

SINGLE_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"
MAX_SHARD_BYTES = 5 * 10**9
_MAX_HEADER_BYTES = 100 * 2**20
_DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}
_FOREIGN_ID = "0" * 32


def is_hugging_face(place: Place) -> bool:
    """Whether a folder holds weights as Hugging Face writes them."""
    found = place.names()
    return MANIFEST_NAME not in found and (SINGLE_NAME in found or INDEX_NAME in found)


def read_hugging_face(place: Place) -> Manifest:
    """The weights of a folder as a manifest: whole tensors, without checksums.

    Raises:
        CheckpointError: There are none, or a file is damaged.
    """
    place = place.following_links()
    files, tensors = [], {}
    for number, name in enumerate(_file_names(place)):
        source = place.open(name)
        try:
            file, entries = _read_header(source, name, number, f"{place.path}/{name}")
        finally:
            source.close()
        files.append(file)
        tensors.update(entries)
    versions = {"format": "Hugging Face"}
    return Manifest(Summary(_FOREIGN_ID, 0, 0, 0.0), 0, {}, versions, tuple(files), tensors)


def _file_names(place: Place) -> list[str]:
    if INDEX_NAME not in place.names():
        return [SINGLE_NAME]
    source = place.open(INDEX_NAME)
    try:
        text = bytearray(min(source.num_bytes, _MAX_HEADER_BYTES))
        source.read_into(memoryview(text), 0)
    finally:
        source.close()
    where = f"{place.path}/{INDEX_NAME}"
    try:
        found = sorted({str(name) for name in json.loads(text)["weight_map"].values()})
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{where} is no index of safetensors files: {error}.") from error
    for name in found:
        if not is_file_name(name):
            raise CheckpointError(f"{where} names the file {name[:100]!r}, which is none of its folder.")
    return found


def _read_header(source: Source, name: str, number: int, where: str) -> tuple[ShardFile, dict[str, Entry]]:
    length = bytearray(8)
    source.read_into(memoryview(length), 0)
    header_bytes = 8 + int.from_bytes(length, "little")
    if header_bytes > min(source.num_bytes, _MAX_HEADER_BYTES):
        raise CheckpointError(f"{where} is no safetensors file: its header would have {header_bytes:,} bytes.")
    header = bytearray(header_bytes)
    source.read_into(memoryview(header), 0)
    data_bytes = source.num_bytes - header_bytes
    try:
        table = json.loads(header[8:])
        table.pop("__metadata__", None)
        entries = {f"{names.MODEL}{key}": _entry(key, row, number, data_bytes) for key, row in table.items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{where} is no safetensors file that can be read: {error}.") from error
    return ShardFile(name, header_bytes, data_bytes, zlib.crc32(header), 0, ()), entries


def _entry(name: str, row: Mapping[str, Any], number: int, data_bytes: int) -> Entry:
    dtype, shape = _DTYPES.get(row["dtype"]), tuple(row["shape"])
    begin, end = row["data_offsets"]
    if dtype is None:
        raise ValueError(f"'{name}' has the unknown dtype {row['dtype']!r}")
    if not all(isinstance(number, int) and number >= 0 for number in (*shape, begin, end)) or end > data_bytes:
        raise ValueError(f"'{name}' lies outside of the file")
    if end - begin != prod(shape) * dtype.itemsize:
        raise ValueError(f"'{name}' has {end - begin} bytes, which do not fit its shape {list(shape)}")
    pieces = (Piece(number, begin, 0, prod(shape)),) if prod(shape) else ()
    return Entry((name,), dtype, shape, contiguous_stride(shape), pieces)


# Writing


def write_hugging_face(
    reader: Reader, place: Place, on_bytes: Callable[[int], None], max_shard_bytes: int = MAX_SHARD_BYTES
) -> None:
    """Write the weights of a checkpoint as Hugging Face would, tensor by tensor; tied ones once, under their first name.

    Raises:
        CheckpointError: The checkpoint is damaged, or the files cannot be written.
    """
    wanted = reader.manifest.weights
    reader.check((entry, 0, entry.numel) for entry in (reader.entry(key) for key in wanted.values()))
    shards = list(_split(wanted, reader.manifest, max_shard_bytes))
    with publishing(place) as id:
        where: dict[str, str] = {}
        for number, shard in enumerate(shards, start=1):
            name = SINGLE_NAME if len(shards) == 1 else f"model-{number:05}-of-{len(shards):05}.safetensors"
            where.update(dict.fromkeys(shard, name))
            with writing(place, id, name) as writer:
                _write_tensors(reader, writer, {each: wanted[each] for each in shard}, on_bytes)
        if len(shards) > 1:
            total = sum(reader.entry(key).num_bytes for key in wanted.values())
            index = {"metadata": {"total_size": total}, "weight_map": where}
            with writing(place, id, INDEX_NAME) as writer:
                writer.write(memoryview(json.dumps(index, indent=2).encode()))


def _split(wanted: Mapping[str, str], manifest: Manifest, max_bytes: int) -> Iterator[list[str]]:
    shard: list[str] = []
    size = 0
    for name, key in wanted.items():
        num_bytes = manifest.tensors[key].num_bytes
        if shard and size + num_bytes > max_bytes:
            yield shard
            shard, size = [], 0
        shard.append(name)
        size += num_bytes
    yield shard


def _write_tensors(reader: Reader, writer: Writer, keys: Mapping[str, str], on_bytes: Callable[[int], None]) -> None:
    entries = {each: reader.entry(key) for each, key in keys.items()}
    writer.write(memoryview(header_of([(each, _form(entry), list(entry.shape)) for each, entry in entries.items()], {})))
    for key in keys.values():
        writer.write(bytes_of(_line(reader, key, on_bytes)))


def _form(entry: Entry) -> torch.Tensor:
    return torch.empty(entry.numel, dtype=entry.dtype, device="meta")


def _line(reader: Reader, key: str, on_bytes: Callable[[int], None]) -> torch.Tensor:
    line = reader.tensor(key).contiguous().view(-1)
    on_bytes(line.numel() * line.element_size())
    return line
