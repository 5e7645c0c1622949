"""``torch.sim``: the functions that torch and other libraries look for in the module of a device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import ModuleType
from typing import Any

import torch

DEVICE_TYPE = "sim"


def runtime_module(library: Any) -> ModuleType:
    """The module over a loaded library."""
    module = ModuleType(f"torch.{DEVICE_TYPE}")
    functions = {**_devices(library), **_streams(), **_memory(), **_random(), **_precision()}
    for name, function in functions.items():
        setattr(module, name, function)
    return module


def _devices(library: Any) -> dict[str, Any]:
    @contextmanager
    def device(index: Any) -> Iterator[None]:
        before = library.current_device()
        library.set_current_device(_index(index, library))
        try:
            yield
        finally:
            library.set_current_device(before)

    return {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "device_count": library.num_devices,
        "current_device": library.current_device,
        "set_device": lambda index: library.set_current_device(_index(index, library)),
        "device": device,
        "get_device_name": lambda index=None: "simulated accelerator",
        "_is_in_bad_fork": lambda: False,
        "_lazy_init": lambda: None,
    }


def _index(device: Any, library: Any) -> int:
    if isinstance(device, int):
        return device
    index = torch.device(device).index
    return int(library.current_device()) if index is None else index


def _streams() -> dict[str, Any]:
    """All is done when it is asked for: there is one stream, whatever is asked for."""
    return {
        "Stream": lambda *args, **kwargs: torch.Stream(device=DEVICE_TYPE),
        "Event": lambda *args, **kwargs: torch.Event(device=DEVICE_TYPE),
        "current_stream": lambda device=None: torch.accelerator.current_stream(),
        "default_stream": lambda device=None: torch.accelerator.current_stream(),
        "set_stream": lambda stream: None,
        "stream": lambda stream: nullcontext(),
        "synchronize": lambda device=None: None,
    }


def _memory() -> dict[str, Any]:
    names = (
        "memory_allocated",
        "max_memory_allocated",
        "memory_reserved",
        "max_memory_reserved",
        "memory_stats",
        "empty_cache",
    )
    found = {name: getattr(torch.accelerator, name) for name in (*names, "reset_peak_memory_stats")}
    return {**found, "mem_get_info": torch.accelerator.get_memory_info}


def _random() -> dict[str, Any]:
    """The device draws from the CPU's generator, which torch.manual_seed seeds by itself."""
    return {
        "manual_seed": torch.manual_seed,
        "manual_seed_all": lambda seed: None,
        "get_rng_state": lambda device=None: torch.get_rng_state(),
        "set_rng_state": lambda state, device=None: torch.set_rng_state(state),
        "get_rng_state_all": lambda: [torch.get_rng_state()],
        "set_rng_state_all": lambda states: torch.set_rng_state(states[0]),
    }


def _precision() -> dict[str, Any]:
    return {
        "get_amp_supported_dtype": lambda: [torch.bfloat16, torch.float16],
        "is_bf16_supported": lambda: True,
    }
