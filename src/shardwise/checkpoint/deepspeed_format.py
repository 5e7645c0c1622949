"""ZeRO checkpoints of DeepSpeed, stages 1 to 3, as its ``save_checkpoint`` writes them: read without DeepSpeed, and without running
anything of what they name.

Its files are pickles that name classes of its own. They are read with empty objects in the place of all names but a few of torch's
that make tensors: nothing else is ever called.
"""

from __future__ import annotations

import pickle
import re
import zipfile
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch

from shardwise.checkpoint.manifest import is_file_name
from shardwise.checkpoint.places import explaining
from shardwise.checkpoint.torch_formats import ForeignTensor
from shardwise.core.errors import CheckpointError
from shardwise.devices import torch_private

_LATEST_NAME = "latest"
_OPTIM_FILE = re.compile(r"(?:bf16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")
_MODEL_FILES = ("mp_rank_00_model_states.pt", "zero_pp_rank_{rank}_mp_rank_00_model_states.pt")
_WHOLE, _BY_PARAMETER = "single_partition_of_fp32_groups", "fp32_flat_groups"


class _Empty:
    """Stands for something of another library. It takes what pickle gives it, and does nothing with it."""

    def __new__(cls, *args: Any, **options: Any) -> _Empty:
        return super().__new__(cls)

    def __init__(self, *args: Any, **options: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        pass

    def __setitem__(self, key: Any, value: Any) -> None:
        pass

    def append(self, item: Any) -> None:
        """Pickle adds to what it takes for a list."""

    def extend(self, items: Any) -> None:
        """The same."""


class _Pickle:
    """What torch's reader takes for the module pickle."""

    class Unpickler(pickle.Unpickler):
        """Finds what makes tensors, and puts nothing in the place of all else."""

        def find_class(self, module: str, name: str) -> Any:
            """A class or function by its name."""
            builder = torch_private.tensor_builders().get((module, name))
            if builder is not None:
                return builder
            if (module, name) == ("collections", "OrderedDict"):
                return OrderedDict
            if (module, name) == ("torch", "Size"):
                return torch.Size
            found = getattr(torch, name, None) if module == "torch" else None
            return found if isinstance(found, torch.dtype) else _Empty


@dataclass(frozen=True)
class ZeroState:
    """What a checkpoint of DeepSpeed holds.

    Args:
        tensors: Weights in full precision, and buffers.
        moments: By parameter and key, what the optimizer holds for each element.
        groups: The optimizer's options, and the names of its parameters.
        steps: By group, how often it was stepped.
        num_steps: Steps of the whole training.
    """

    tensors: list[ForeignTensor]
    moments: dict[str, dict[str, ForeignTensor]]
    groups: list[dict[str, Any]]
    steps: list[Any]
    num_steps: int


def find_deepspeed(path: Path) -> Path | None:
    """The folder with DeepSpeed's files: this one, or that which ``latest`` in it names."""
    if any(_OPTIM_FILE.fullmatch(each.name) for each in path.iterdir()):
        return path
    latest = path / _LATEST_NAME
    if not latest.is_file() or latest.stat().st_size > 1000:
        return None
    name = latest.read_text(encoding="utf-8", errors="replace").strip()
    return path / name if is_file_name(name) and (path / name).is_dir() and find_deepspeed(path / name) else None


def read_deepspeed(path: Path) -> ZeroState:
    """Read a checkpoint of stages 1 to 3. Tensors stay in their files until they are asked for.

    Raises:
        CheckpointError: It is damaged, incomplete, or of a model that was split in other ways as well.
    """
    found = sorted((match for each in path.iterdir() if (match := _OPTIM_FILE.fullmatch(each.name))), key=lambda m: int(m[1]))
    if any(int(match[2]) for match in found):
        raise CheckpointError(f"{path} is of a model that was split by tensors or stages of a pipeline, which is not read.")
    if [int(match[1]) for match in found] != list(range(len(found))):
        raise CheckpointError(f"{path} is not complete: it has optimizer states of ranks {[int(match[1]) for match in found]}.")
    try:
        states = [_load(path / match[0])["optimizer_state_dict"] for match in found]
        models = [_load(path / name) for name in _model_names(path, len(found))]
        return _assemble(states, models, path)
    except CheckpointError:
        raise
    except Exception as error:  # Whatever bytes make of the reader, it is the file's fault.
        raise CheckpointError(
            f"{path} cannot be read as a ZeRO checkpoint of DeepSpeed: {type(error).__name__}: {error}."
        ) from error


def _model_names(path: Path, num_ranks: int) -> list[str]:
    one, each = _MODEL_FILES
    return [one] if (path / one).exists() else [each.format(rank=rank) for rank in range(num_ranks)]


def _load(path: Path) -> dict[str, Any]:
    with explaining(path, "read"):
        # torch would hand a file with code of TorchScript to another reader, which runs it.
        with zipfile.ZipFile(path) as archive:
            if any("constants.pkl" in name for name in archive.namelist()):
                raise CheckpointError(f"{path} cannot be used: it holds code.")
        found = torch.load(path, map_location="cpu", weights_only=False, pickle_module=_Pickle, mmap=True)
    if not isinstance(found, dict):
        raise CheckpointError(f"{path} cannot be used: it holds no table.")
    return found


def _assemble(states: Sequence[dict[str, Any]], models: Sequence[dict[str, Any]], path: Path) -> ZeroState:
    shapes: list[dict[str, tuple[int, ...]]] = [
        {name: tuple(shape) for name, shape in group.items()} for group in models[0]["param_shapes"]
    ]
    is_by_parameter = _BY_PARAMETER in states[0]
    split = _split_by_parameter if is_by_parameter else _split_whole
    bases = [state["optimizer_state_dict" if is_by_parameter else "base_optimizer_state"] for state in states]
    weights = split([state[_BY_PARAMETER if is_by_parameter else _WHOLE] for state in states], shapes)
    tensors = {name: _foreign(name, torch.float32, shapes_of(shapes)[name], parts) for name, parts in weights.items()}
    for name, tensor in models[0]["module"].items():
        is_known = name in tensors or name in (models[0].get("shared_params") or {})
        if not is_known and isinstance(tensor, torch.Tensor) and (tensor.numel() or name in models[0]["buffer_names"]):
            tensors[name] = ForeignTensor(name, tensor.dtype, tuple(tensor.shape), _same(tensor))
    for name, shape in (models[0].get("frozen_param_shapes") or {}).items():
        parts = [model["frozen_param_fragments"][name] for model in models]
        tensors[name] = _foreign(name, parts[0].dtype, tuple(shape), [part.reshape(-1) for part in parts])
    moments: dict[str, dict[str, ForeignTensor]] = {name: {} for name in weights}
    for key in _element_keys(bases[0]):
        held = [[base["state"][group][key] for group in sorted(base["state"])] for base in bases]
        for name, parts in split(held, shapes).items():
            moments[name][key] = _foreign(name, parts[0].dtype, shapes_of(shapes)[name], parts)
    groups = [
        {"options": {key: value for key, value in options.items() if key != "params"}, "params": list(names)}
        for options, names in zip(bases[0]["param_groups"], shapes, strict=True)
    ]
    steps = [_step_of(bases[0]["state"].get(group, {})) for group in range(len(groups))]
    return ZeroState(list(tensors.values()), moments, groups, steps, int(models[0].get("global_steps", 0)))


def shapes_of(groups: Sequence[Mapping[str, tuple[int, ...]]]) -> dict[str, tuple[int, ...]]:
    """Of all groups in one table."""
    return {name: shape for group in groups for name, shape in group.items()}


def _element_keys(base: Mapping[str, Any]) -> list[str]:
    first = base["state"][min(base["state"])] if base["state"] else {}
    return [key for key, value in first.items() if isinstance(value, torch.Tensor) and value.dim() == 1]


def _step_of(held: Mapping[str, Any]) -> Any:
    step = held.get("step")
    return step.clone() if isinstance(step, torch.Tensor) else step


Parts = dict[str, list[torch.Tensor]]


def _split_whole(ranks: Sequence[Sequence[torch.Tensor]], groups: Sequence[Mapping[str, tuple[int, ...]]]) -> Parts:
    """Stages 1 and 2: the parameters of a group one after the other, cut once for each rank."""
    found: Parts = {}
    for number, shapes in enumerate(groups):
        lines = [rank[number].reshape(-1) for rank in ranks]
        offset = 0
        for name, shape in shapes.items():
            found[name] = _cut(lines, offset, offset + prod(shape))
            offset += prod(shape)
    return found


def _cut(lines: Sequence[torch.Tensor], start: int, stop: int) -> list[torch.Tensor]:
    """Elements of lines that lie one after the other."""
    parts, begin = [], 0
    for line in lines:
        low, high = max(start, begin), min(stop, begin + line.numel())
        if low < high:
            parts.append(line[low - begin : high - begin])
        begin += line.numel()
    return parts


def _split_by_parameter(ranks: Sequence[Sequence[torch.Tensor]], groups: Sequence[Mapping[str, tuple[int, ...]]]) -> Parts:
    """Stage 3: every parameter is cut for the ranks; a rank has its parts one after the other."""
    found: Parts = {}
    lines = [torch.cat([part.reshape(-1) for part in rank]) if len(rank) > 1 else rank[0].reshape(-1) for rank in ranks]
    offset = 0
    for name, shape in shapes_of(groups).items():
        size = -(-prod(shape) // len(ranks))
        found[name] = [line[offset : offset + size] for line in lines]
        offset += size
    return found


def _foreign(name: str, dtype: torch.dtype, shape: tuple[int, ...], parts: Sequence[torch.Tensor]) -> ForeignTensor:
    def fetch() -> torch.Tensor:
        line = torch.cat(list(parts)) if parts else torch.empty(0, dtype=dtype)
        if line.numel() < prod(shape):
            raise CheckpointError(f"'{name}' has {line.numel()} elements of {prod(shape)}: the checkpoint is not complete.")
        return line[: prod(shape)].to(dtype).view(shape)

    return ForeignTensor(name, dtype, shape, fetch)


def _same(tensor: torch.Tensor) -> Any:
    return lambda: tensor
