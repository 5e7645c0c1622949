"""From and to the formats of other tools, in one process and without a model: tensor by tensor."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from shardwise.checkpoint import names
from shardwise.checkpoint.collect import encode_item
from shardwise.checkpoint.deepspeed_format import ZeroState, find_deepspeed, read_deepspeed
from shardwise.checkpoint.folders import candidates, place_of, read_manifest
from shardwise.checkpoint.hugging_face import is_hugging_face, read_hugging_face, write_hugging_face
from shardwise.checkpoint.kinds import kinds_with
from shardwise.checkpoint.local_place import LocalPlace
from shardwise.checkpoint.manifest import MANIFEST_NAME, Entry, Manifest, Piece, Summary, contiguous_stride
from shardwise.checkpoint.places import Place, explaining, publishing, writing
from shardwise.checkpoint.reader import Reader
from shardwise.checkpoint.shards import Part, write_shard
from shardwise.checkpoint.torch_formats import ForeignTensor, is_dcp, read_dcp, write_dcp, write_torch_file
from shardwise.core.errors import UsageError

OnBytes = Callable[[int], None]
_SIDE_FILES = ("*.json", "tokenizer*", "*.model", "*.txt", "*.jinja")


def export_checkpoint(source: Place, target: Path, form: str, on_bytes: OnBytes, sides: Path | None = None) -> Place:
    """Write the weights of a checkpoint in another format.

    Args:
        source: A checkpoint, or a folder that holds some: then the newest.
        target: A file (``torch``) or folder that is to be made.
        form: ``hf``, ``torch`` or ``dcp``.
        on_bytes: Told of every tensor's bytes.
        sides: A folder from which configuration and tokenizer are copied into the export (``hf``).

    Returns:
        The checkpoint that was read.

    Raises:
        UsageError: The target is there already.
        CheckpointError: The checkpoint is damaged, or the target cannot be written.
    """
    place = candidates(source)[0]
    if sides is not None:
        LocalPlace(sides).names()  # Whether it can be looked into at all, before anything is written.
    if not LocalPlace(target).is_free():
        raise UsageError(f"{target} is there already. Export to another path.")
    with Reader(place, read_manifest(place)) as reader:
        if form == "hf":
            write_hugging_face(reader, LocalPlace(target), on_bytes)
            if sides is not None:
                _copy_sides(sides, target)
        elif form == "dcp":
            write_dcp(reader, target, on_bytes)
        else:
            write_torch_file(reader, target, on_bytes)
    return place


def export_bytes(source: Place) -> int:
    """How much an export reads, at least."""
    manifest = read_manifest(candidates(source)[0])
    return sum(manifest.tensors[key].num_bytes for key in manifest.weights.values())


def _copy_sides(source: Path, target: Path) -> None:
    with explaining(source, "copied from"):
        for pattern in _SIDE_FILES:
            for path in source.glob(pattern):
                if path.is_file() and not path.name.endswith(".index.json") and not (target / path.name).exists():
                    shutil.copy(path, target / path.name)


def import_checkpoint(source: Path, target: Place, on_bytes: OnBytes, versions: Mapping[str, str]) -> int:
    """Make a checkpoint of what another tool has written: the weights of a folder of Hugging Face or of torch's DCP, or the weights
    and the optimizer's state of a ZeRO checkpoint of DeepSpeed.

    Returns:
        How many tensors there are.

    Raises:
        UsageError: It is none of these, or the target is there already.
        CheckpointError: It is damaged.
    """
    if not target.is_free():
        raise UsageError(f"{target.path} is there already. Import to another path.")
    place = place_of(source)
    if is_hugging_face(place):
        with Reader(place.following_links(), read_hugging_face(place)) as reader:
            return _write(_from_reader(reader), target, on_bytes, versions)
    if is_dcp(place):
        return _write(_model_of(list(read_dcp(source))), target, on_bytes, versions)
    with explaining(source, "looked into"):
        zero = find_deepspeed(source)
    if zero is not None:
        return _write_zero(read_deepspeed(zero), target, on_bytes, versions)
    raise UsageError(
        f"{source} holds neither safetensors files of Hugging Face (model.safetensors), nor torch's DCP (.metadata), nor a ZeRO "
        "checkpoint of DeepSpeed (zero_pp_rank_..._optim_states.pt)."
    )


def _from_reader(reader: Reader) -> list[ForeignTensor]:
    found = []
    for name, key in reader.manifest.weights.items():
        entry = reader.entry(key)
        found.append(ForeignTensor(name, entry.dtype, entry.shape, lambda key=key: reader.tensor(key)))  # type: ignore[misc]
    return found


def _model_of(tensors: list[ForeignTensor]) -> list[ForeignTensor]:
    """Of a training state, the model: what lies below ``model.``, if anything does; else all."""
    prefix = "model."
    inside = [each for each in tensors if each.name.startswith(prefix)]
    if not inside or any(not each.name.startswith((prefix, "optim")) for each in tensors):
        return tensors
    return [ForeignTensor(each.name.removeprefix(prefix), each.dtype, each.shape, each.fetch) for each in inside]


def _write_zero(state: ZeroState, target: Place, on_bytes: OnBytes, versions: Mapping[str, str]) -> int:
    """With the optimizer's state: its groups have the parameters that were trained, in their order."""
    parts = [_part(each, on_bytes) for each in state.tensors]
    values: dict[str, Any] = {}
    groups = encode_item(names.groups(0), state.groups)
    values[names.groups(0)] = groups.value
    parts.extend(groups.parts)
    values[names.kinds(0)] = list(kinds_with(key for keys in state.moments.values() for key in keys))
    for group, step in zip(state.groups, state.steps, strict=True):
        for param in group["params"]:
            item = encode_item(names.state(0, param), {} if step is None else {"step": step})
            keys = state.moments.get(param, {})
            values[names.state(0, param)] = {**item.value, **dict.fromkeys(keys, names.ELEMENTS)}
            parts.extend(item.parts)
            parts.extend(_part(each, on_bytes, names.elements(0, param, key)) for key, each in keys.items())
    return _write_parts(parts, target, versions, values, state.num_steps)


def _write(tensors: Iterable[ForeignTensor], target: Place, on_bytes: OnBytes, versions: Mapping[str, str]) -> int:
    return _write_parts([_part(each, on_bytes) for each in tensors], target, versions, {}, 0)


def _write_parts(
    parts: Sequence[Part], target: Place, versions: Mapping[str, str], values: Mapping[str, Any], step: int
) -> int:
    name = "rank-00000.safetensors"
    with publishing(target) as id:
        with writing(target, id, name) as writer:
            file, pieces = write_shard(writer, name, parts, id)
        entries = {part.name: _entry(part, piece) for part, piece in zip(parts, pieces, strict=True)}
        summary = Summary(id, 1, step, time.time())
        with writing(target, id, MANIFEST_NAME) as writer:
            manifest = Manifest(summary, 1, {"stage": 0}, versions, (file,), entries, values)
            writer.write(memoryview(manifest.to_text()))
    return sum(part.name.startswith(names.MODEL) for part in parts)


def _part(tensor: ForeignTensor, on_bytes: OnBytes, name: str = "") -> Part:
    form = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta").view(-1)

    def fetch() -> torch.Tensor:
        line = tensor.fetch().contiguous().view(-1)
        on_bytes(line.numel() * line.element_size())
        return line

    stride = contiguous_stride(tensor.shape)
    return Part(name or f"{names.MODEL}{tensor.name}", (tensor.name,), tensor.shape, stride, 0, form.numel(), form, fetch)


def _entry(part: Part, piece: Piece) -> Entry:
    return Entry(part.names, part.line.dtype, part.shape, part.stride, (piece,) if piece.start < piece.stop else ())
