"""Saving and loading beside torch's distributed checkpoints (DCP), on the ranks of one job; both take turns."""

from __future__ import annotations

import gc
import os
import shutil
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.workloads import LARGE, TINY, WORKLOADS
from shardwise.devices.memory import peak_resident_bytes, resident_bytes

MiB = 2**20


def _timed(action: Callable[[], object]) -> float:
    dist.barrier()
    begin = time.perf_counter()
    action()
    dist.barrier()
    return time.perf_counter() - begin


def _shared_folder() -> Path:
    """A folder that rank 0 makes for all."""
    names = [tempfile.mkdtemp(prefix="shardwise-bench-") if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(names, 0)
    return Path(str(names[0]))


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: tuple[torch.Tensor, torch.Tensor]) -> None:
    model(*batch).backward()
    optimizer.step()
    optimizer.zero_grad()


def sides(num_rounds: int) -> dict[str, Any]:
    """Seconds of saves and loads of one state, by Shardwise and by DCP with FSDP2, in turns; and how long a step is held up."""
    import shardwise

    folder = _shared_folder()
    try:
        ours, theirs = _ours(), _theirs()
        seconds: dict[str, list[float]] = {}
        for number in range(num_rounds + 1):
            for name, (save, load) in (
                (("shardwise", ours), ("dcp", theirs)) if number % 2 else (("dcp", theirs), ("shardwise", ours))
            ):
                path = folder / f"{name}-{number}"
                seconds.setdefault(f"{name} save", []).append(_timed(lambda save=save, path=path: save(path)))
                seconds.setdefault(f"{name} load", []).append(_timed(lambda load=load, path=path: load(path)))
                if dist.get_rank() == 0:
                    shutil.rmtree(path)
        stalls = [_stall(shardwise, folder / f"beside-{number}", ours) for number in range(num_rounds + 1)]
        return {
            "seconds": {name: values[1:] for name, values in seconds.items()},
            "stall_seconds": statistics.median(stall for stall, _ in stalls[1:]),
            "copy_seconds": statistics.median(copy for _, copy in stalls[1:]),
        }
    finally:
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(folder, ignore_errors=True)


class _Ours:
    def __init__(self) -> None:
        import shardwise

        self.model = LARGE.model()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        shardwise.shard(self.model, self.optimizer, stage=3)
        _step(self.model, self.optimizer, LARGE.batch(0, dist.get_rank()))

    def save(self, path: Path) -> None:
        import shardwise

        shardwise.save(path, self.model, self.optimizer)

    def load(self, path: Path) -> None:
        import shardwise

        shardwise.load(path, self.model, self.optimizer)

    def __iter__(self) -> Any:
        return iter((self.save, self.load))


def _ours() -> _Ours:
    return _Ours()


def _theirs() -> tuple[Callable[[Path], object], Callable[[Path], object]]:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict
    from torch.distributed.fsdp import fully_shard

    warnings.simplefilter("ignore")
    model: Any = LARGE.model()
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    _step(model, optimizer, LARGE.batch(0, dist.get_rank()))

    def state() -> dict[str, Any]:
        weights, moments = get_state_dict(model, optimizer)
        return {"model": weights, "optim": moments}

    return lambda path: dcp.save(state(), checkpoint_id=path), lambda path: dcp.load(state(), checkpoint_id=path)


def _stall(shardwise: Any, path: Path, ours: _Ours) -> tuple[float, float]:
    """For how long a save holds up the loop and the step beside it, which waits before its update, and how long one copy takes."""
    tensors = [value for state in ours.optimizer.state.values() for value in state.values() if value.dim()]
    tensors += [param.detach() for group in ours.optimizer.param_groups for param in group["params"]]
    room = [torch.zeros_like(tensor) for tensor in tensors]

    def copy_all() -> None:
        for target, tensor in zip(room, tensors, strict=True):
            target.copy_(tensor)

    copy = _timed(copy_all)
    room.clear()
    dist.barrier()
    saving = shardwise.save(path, ours.model, ours.optimizer, wait=False)
    _step(ours.model, ours.optimizer, LARGE.batch(0, dist.get_rank()))
    saving.wait()
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(path)
    return saving.stall_seconds, copy


def every_ten(num_rounds: int) -> dict[str, Any]:
    """Ten steps with a save beside them, and ten without, in turns."""
    import shardwise

    load, folder = WORKLOADS["compute"], _shared_folder()
    model = load.model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    shardwise.shard(model, optimizer, stage=3)
    batch = load.batch(0, dist.get_rank())

    costs: list[float] = []

    def ten(path: Path | None) -> None:
        saving = None if path is None else shardwise.save(path, model, optimizer, wait=False, keep_last=1)
        began = time.process_time()
        for _ in range(10):
            _step(model, optimizer, batch)
        if saving is not None:
            saving.wait()
            beside.append(saving)
        else:
            costs.append(time.process_time() - began)

    beside: list[Any] = []
    try:
        ten(folder / "first")
        plain, saved = [], []
        for number in range(num_rounds):
            for is_saved in (False, True) if number % 2 else (True, False):
                path = folder / f"step-{number}" if is_saved else None
                (saved if is_saved else plain).append(_timed(lambda path=path: ten(path)))
        cpu = statistics.median(saving.cpu_seconds for saving in beside[1:]) / statistics.median(costs)
        return {"plain_seconds": plain, "saved_seconds": saved, "cpu_part": cpu}
    finally:
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(folder, ignore_errors=True)


def load_peak() -> dict[str, Any]:
    """The most resident memory of a load into a fresh model, above what the process held before there was one."""
    import shardwise

    _step(tiny := TINY.model(), torch.optim.AdamW(tiny.parameters(), fused=True), TINY.batch(0, 0))
    folder = _shared_folder()
    try:
        ours = _Ours()
        ours.save(folder / "first")
        del ours
        gc.collect()
        from shardwise.devices.malloc import release_unused

        release_unused()
        before = resident_bytes()
        model = LARGE.model()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
        handle = shardwise.shard(model, optimizer, stage=3)
        gc.collect()
        release_unused()
        Path("/proc/self/clear_refs").write_text("5")
        shardwise.load(folder / "first", model, optimizer)
        own = handle.ledger.live_bytes
        unit = max(unit.num_bytes for unit in handle.units)
        return {
            "peak_mib": (peak_resident_bytes() - before) / MiB,
            "own_mib": own / MiB,
            "unit_mib": unit / MiB,
            "pid": os.getpid(),
        }
    finally:
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(folder, ignore_errors=True)
