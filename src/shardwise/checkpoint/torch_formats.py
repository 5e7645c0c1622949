"""torch's own formats: files of full state dicts, and folders of its distributed checkpoints (DCP).

Both are pickles. What torch writes is written by torch. What is read is unpickled by a reader that knows a few harmless classes by
name and no others: a name that it does not know is refused before anything of it could run.
"""

from __future__ import annotations

import io
import pickle
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import metadata as dcp_metadata
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save as save_dcp

from shardwise.checkpoint import names, tree
from shardwise.checkpoint.places import Place, explaining
from shardwise.checkpoint.reader import Reader
from shardwise.core.errors import CheckpointError
from shardwise.devices import torch_private

METADATA_NAME = ".metadata"
_MAX_METADATA_BYTES = 2**30
_MODEL, _OPTIMIZER = "model", "optim"


# Full state dicts


def write_torch_file(reader: Reader, path: Path, on_bytes: Callable[[int], None]) -> None:
    """Write the full weights as ``torch.load`` reads them; tied ones under all of their names. They are all in memory at once.

    Raises:
        CheckpointError: The checkpoint is damaged, or the file cannot be written.
    """
    state: dict[str, torch.Tensor] = {}
    for name, key in reader.manifest.weights.items():
        entry = reader.entry(key)
        reader.check([(entry, 0, entry.numel)])
        tensor = reader.tensor(key)
        on_bytes(entry.num_bytes)
        state.update(dict.fromkeys((name, *entry.names), tensor))
    aside = path.with_name(f".{path.name}.partial")
    with explaining(path, "written"):
        try:
            with aside.open("wb") as file:  # Opened here: where torch cannot open it, it does not say so as others do.
                torch.save(state, file)
            aside.rename(path)
        finally:
            aside.unlink(missing_ok=True)


# Distributed checkpoints, written


class _LazyPlanner(DefaultSavePlanner):
    """Reads tensors when they are written: until then there are forms alone."""

    def __init__(self, reader: Reader, keys: Mapping[str, str], on_bytes: Callable[[int], None]) -> None:
        super().__init__()
        self._reader = reader
        self._keys = keys
        self._on_bytes = on_bytes

    def lookup_object(self, index: dcp_metadata.MetadataIndex) -> Any:
        """The tensor behind a form."""
        found = super().lookup_object(index)
        if isinstance(found, torch.Tensor) and found.device.type == "meta":
            found = self._reader.tensor(self._keys[index.fqn]).contiguous()
            self._on_bytes(found.numel() * found.element_size())
        return found


def write_dcp(reader: Reader, path: Path, on_bytes: Callable[[int], None]) -> None:
    """Write a folder that ``torch.distributed.checkpoint.load`` reads: ``model`` by name, and ``optim`` as torch's
    ``get_optimizer_state_dict`` gives it.

    Raises:
        CheckpointError: The checkpoint is damaged, or the folder cannot be written.
    """
    keys: dict[str, str] = {}
    model = {}
    for name, key in reader.manifest.weights.items():
        model[name], keys[f"{_MODEL}.{name}"] = _form(reader, key), key
    state: dict[str, Any] = {_MODEL: model}
    if names.groups(0) in reader.manifest.values:
        state[_OPTIMIZER] = _optimizer_state(reader, keys)
    reader.check((entry, 0, entry.numel) for entry in map(reader.entry, keys.values()))
    with explaining(path, "written"):
        planner = _LazyPlanner(reader, keys, on_bytes)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # That there is one process: there is.
            path.mkdir(parents=True, exist_ok=True)
            try:
                save_dcp(state, storage_writer=FileSystemWriter(path, thread_count=1), planner=planner, no_dist=True)
            except CheckpointException as error:  # torch's wrapping of what went wrong in which rank; no Exception.
                shutil.rmtree(path, ignore_errors=True)
                cause = next((cause for cause, _ in error.failures.values()), error)
                if isinstance(cause, OSError | CheckpointError):
                    raise cause from error
                raise CheckpointError(f"{path} cannot be written: {cause}.") from error


def _form(reader: Reader, key: str) -> torch.Tensor:
    entry = reader.entry(key)
    return torch.empty(entry.shape, dtype=entry.dtype, device="meta")


def _optimizer_state(reader: Reader, keys: dict[str, str]) -> dict[str, Any]:
    values = reader.manifest.values
    groups = tree.decode(values[names.groups(0)], reader.tensor)
    state: dict[str, dict[str, Any]] = {}
    for param in (param for group in groups for param in group["params"]):
        held = values.get(names.state(0, param))
        if not isinstance(held, dict):
            continue
        state[param] = {}
        for key, value in held.items():
            if names.is_elements(value):
                found = names.elements(0, param, key)
                state[param][key] = _form(reader, found)
                keys[f"{_OPTIMIZER}.state.{param}.{key}"] = found
            else:
                state[param][key] = tree.decode(value, reader.tensor)
    return {"state": state, "param_groups": [{"params": group["params"], **group["options"]} for group in groups]}


# Distributed checkpoints, read


@dataclass(frozen=True)
class ForeignTensor:
    """A tensor of another tool: its form, and how to get it."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    fetch: Callable[[], torch.Tensor]


def _allowed() -> dict[tuple[str, str], Any]:
    module = "torch.distributed.checkpoint.metadata"
    found: dict[tuple[str, str], Any] = {(module, name): getattr(dcp_metadata, name) for name in dcp_metadata.__all__}
    for kind in torch_private.dcp_classes():
        found[kind.__module__, kind.__qualname__] = kind
    found["torch", "Size"] = torch.Size
    found["torch.serialization", "_get_layout"] = _layout
    found["collections", "OrderedDict"] = dict
    found["pathlib", "PosixPath"] = found["pathlib", "PurePosixPath"] = _text
    for dtype in (value for value in vars(torch).values() if isinstance(value, torch.dtype)):
        found["torch", str(dtype).removeprefix("torch.")] = dtype
    return found


def _layout(name: str) -> torch.layout:
    return torch.strided


def _text(*parts: str) -> str:
    return "/".join(map(str, parts))


class _Unpickler(pickle.Unpickler):
    """Knows the classes of DCP's metadata, and nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        """One of the known names.

        Raises:
            pickle.UnpicklingError: It is none of them: it could run anything.
        """
        found = _allowed().get((module, name))
        if found is None:
            raise pickle.UnpicklingError(f"it names {module}.{name}, which is not read for the sake of safety")
        return found


def is_dcp(place: Place) -> bool:
    """Whether a folder holds a distributed checkpoint of torch."""
    return METADATA_NAME in place.names()


def read_dcp(path: Path) -> Iterator[ForeignTensor]:
    """The tensors of a distributed checkpoint of torch, one after the other.

    Raises:
        CheckpointError: It is damaged, or its metadata is more than metadata.
    """
    where = path / METADATA_NAME
    with explaining(where, "read"):
        if where.stat().st_size > _MAX_METADATA_BYTES:
            raise CheckpointError(f"{where} is too large for metadata.")
        text = where.read_bytes()
    try:
        metadata = _Unpickler(io.BytesIO(text)).load()
        entries, storage = dict(metadata.state_dict_metadata), dict(metadata.storage_data)
        tensors = {key: entry for key, entry in entries.items() if isinstance(entry, dcp_metadata.TensorStorageMetadata)}
        forms = {key: (entry.properties.dtype, tuple(map(int, entry.size))) for key, entry in tensors.items()}
        for dtype, shape in forms.values():
            torch.empty(shape, dtype=dtype, device="meta")
    except Exception as error:  # Whatever bytes make of the reader, it is the file's fault.
        raise CheckpointError(f"{where} cannot be read: {error}.") from error
    for key, (dtype, shape) in forms.items():
        yield ForeignTensor(key, dtype, shape, _Fetch(path, key, tensors[key], storage))


class _Fetch:
    """Puts a tensor together from its chunks."""

    def __init__(self, path: Path, key: str, entry: Any, storage: Mapping[Any, Any]) -> None:
        self._path = path
        self._key = key
        self._entry = entry
        self._storage = storage

    def __call__(self) -> torch.Tensor:
        """Read it."""
        num_elements = 0
        try:
            whole = torch.empty(tuple(self._entry.size), dtype=self._entry.properties.dtype)
            for chunk in self._entry.chunks:
                info = self._storage[dcp_metadata.MetadataIndex(self._key, chunk.offsets)]
                target = whole[tuple(slice(a, a + n) for a, n in zip(chunk.offsets, chunk.sizes, strict=True))]
                target.copy_(self._read(info))
                num_elements += prod(chunk.sizes)
        except CheckpointError:
            raise
        except Exception as error:  # Whatever bytes make of the reader, it is the file's fault.
            raise CheckpointError(f"'{self._key}' of {self._path} cannot be read: {error}.") from error
        if num_elements != whole.numel():
            raise CheckpointError(f"'{self._key}' of {self._path} is not complete.")
        return whole

    def _read(self, info: Any) -> torch.Tensor:
        name = str(info.relative_path)
        if "/" in name or name.startswith("."):
            raise CheckpointError(f"{self._path} names the file {name!r}, which is none of its own.")
        with explaining(self._path / name, "read"), (self._path / name).open("rb") as file:
            file.seek(info.offset)
            data = file.read(info.length)
        found = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
        if not isinstance(found, torch.Tensor):
            raise CheckpointError(f"'{self._key}' of {self._path} is no tensor.")
        return found
