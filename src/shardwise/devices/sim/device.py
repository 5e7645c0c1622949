"""What Python sees of the simulated accelerator: how it is switched on, and what it counts."""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.backend_registration import generate_methods_for_privateuse1_backend, rename_privateuse1_backend

from shardwise.core.errors import ShardwiseError, UsageError
from shardwise.devices import torch_private
from shardwise.devices.sim import build
from shardwise.devices.sim.module import DEVICE_TYPE, runtime_module

_MOST_DEVICES = 64


class _Loaded:
    """The library of this process, once it is loaded."""

    library: Any = None
    pinned_capacity_bytes = 0


@dataclass(frozen=True)
class Memory:
    """What a simulated device holds."""

    live_bytes: int
    peak_bytes: int
    capacity_bytes: int
    num_refusals: int


@dataclass(frozen=True)
class Traffic:
    """What was copied to a simulated device from the host, from it to the host, and within it."""

    in_bytes: int
    out_bytes: int
    within_bytes: int


def is_enabled() -> bool:
    """Whether this process has simulated devices."""
    return _Loaded.library is not None


def enable(
    num_devices: int = 1,
    *,
    capacity_bytes: int = 0,
    bytes_per_second: float = 0.0,
    say: build.Say | None = None,
    cache: Path | None = None,
) -> None:
    """Let torch have devices ``sim:0``, ``sim:1`` ... in this process. Called again, it sets them anew.

    Args:
        num_devices: How many there are.
        capacity_bytes: What each of them holds; without a limit, if 0.
        bytes_per_second: How fast copies between host and device are; as fast as they go, if 0.
        say: Told when the library is compiled, which is done once; stderr, if None.
        cache: Where the library is kept; in the user's cache folder, if None.
    """
    if not 1 <= num_devices <= _MOST_DEVICES:
        raise UsageError(f"From 1 to {_MOST_DEVICES} devices can be simulated, not {num_devices}.")
    if capacity_bytes < 0 or bytes_per_second < 0:
        raise UsageError("The capacity and the bandwidth of a simulated device are 0 (no limit) or more.")
    if _Loaded.library is None:
        _refuse_others()
        loaded = _load(build.library(say or _say, cache))
        rename_privateuse1_backend(DEVICE_TYPE)
        torch_private.register_device_module(DEVICE_TYPE, runtime_module(loaded))
        generate_methods_for_privateuse1_backend(for_tensor=True, for_module=True, for_storage=True)
        dist.Backend.register_backend(DEVICE_TYPE, _new_backend, devices=[DEVICE_TYPE])
        _Loaded.library = loaded
    _Loaded.library.configure(num_devices, capacity_bytes, bytes_per_second)


def num_devices() -> int:
    """How many devices are simulated in this process; none, before `enable`."""
    return 0 if _Loaded.library is None else int(_Loaded.library.num_devices())


def configure(device: int, *, capacity_bytes: int | None = None, bytes_per_second: float | None = None) -> None:
    """Change one device."""
    if capacity_bytes is not None:
        _library().set_capacity(device, capacity_bytes)
    if bytes_per_second is not None:
        _library().set_bandwidth(device, bytes_per_second)


def set_advice(device: int, text: str) -> None:
    """What a device adds to its error when it is out of memory."""
    _library().set_advice(device, text)


def memory(device: int = 0) -> Memory:
    """What a device holds, and held at most since `reset_peak`."""
    account = _library().account(device)
    return Memory(account.live_bytes, account.peak_bytes, account.capacity_bytes, account.num_refusals)


def reset_peak(device: int = 0) -> None:
    """Look for the peak anew."""
    _library().reset_peak(device)


def traffic(device: int = 0) -> Traffic:
    """What was copied since `reset_traffic`."""
    account = _library().account(device)
    return Traffic(account.in_bytes, account.out_bytes, account.within_bytes)


def reset_traffic(device: int = 0) -> None:
    """Count anew."""
    _library().reset_traffic(device)


def set_pinned_capacity(num_bytes: int) -> None:
    """How much of the host's memory may be pinned; without a limit, if 0."""
    _library().set_pinned_capacity(num_bytes)
    _Loaded.pinned_capacity_bytes = num_bytes


def pinned_room_bytes() -> int | None:
    """How much more may be pinned, if there is a limit."""
    capacity_bytes = _Loaded.pinned_capacity_bytes
    return max(0, capacity_bytes - int(_library().pinned_bytes())) if capacity_bytes else None


def _library() -> Any:
    if _Loaded.library is None:
        raise ShardwiseError("There are no simulated devices in this process. Call enable() first.")
    return _Loaded.library


def _refuse_others() -> None:
    if torch.accelerator.is_available():
        found = torch.accelerator.current_accelerator()
        raise UsageError(
            f"This machine has an accelerator of its own ({found}), and torch knows one kind at a time. Simulate on a machine without "
            "one, or hide it (for CUDA: CUDA_VISIBLE_DEVICES= in the environment)."
        )


def _load(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(build.NAME, path)
    if spec is None or spec.loader is None:
        raise ShardwiseError(f"{path} cannot be loaded. Remove it, and it is compiled anew.")
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except ImportError as error:
        raise ShardwiseError(f"{path} cannot be loaded: {error}. Remove it, and it is compiled anew.") from error
    return module


def _new_backend(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
    """Collectives on memory of simulated devices: gloo's, on the same memory."""
    return _Loaded.library.over(dist.ProcessGroupGloo(store, rank, size, timeout))


def _say(text: str) -> None:
    print(f"shardwise: {text}", file=sys.stderr, flush=True)
