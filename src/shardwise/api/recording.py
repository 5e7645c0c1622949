"""``record``: write down what each step of a sharded model takes, and hand it to whoever listens."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import platform
import socket
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import nn

from shardwise.api.arguments import versions
from shardwise.api.pool_report import report_of
from shardwise.core.errors import UsageError
from shardwise.core.ledger import Tier
from shardwise.core.records import Header, StepRecord
from shardwise.devices.flops import FlopCounter, peak_flops
from shardwise.runtime.engine import Engine
from shardwise.runtime.probe import link_bytes_per_second
from shardwise.runtime.registry import engine_of
from shardwise.runtime.suspects import Suspects
from shardwise.telemetry.files import JsonLines
from shardwise.telemetry.leaks import Leak, LeakWatch
from shardwise.telemetry.sink import Sink

_log = logging.getLogger("shardwise")
DEFAULT_TRACE = (3,)
"""One step in detail shows what all do; the first two are unlike the others."""


class Recording:
    """The records of one model on this rank, until it is closed."""

    def __init__(self, engine: Engine, sinks: Sequence[Sink]) -> None:
        self._engine = engine
        self.leaks: list[Leak] = []
        engine.meter.sinks.extend(sinks)
        # On the CPU, what rests on the host comes from the same allocator.
        tiers = (Tier.DEVICE.value, Tier.HOST.value) if engine.device.type == "cpu" else (Tier.DEVICE.value,)
        engine.meter.watch = LeakWatch(Suspects(engine.model), self._tell_of_leak, tiers)
        engine.forward.flop_counter = FlopCounter(self._tell_of_flops)

    @property
    def last(self) -> StepRecord | None:
        """The last step that has ended. It is known when the next one begins."""
        return self._engine.meter.last

    def log(self, **values: float) -> None:
        """Values of the step under way or just done, such as ``loss``, ``tokens`` or ``samples`` of this rank."""
        self._engine.meter.log(values)

    def flush(self) -> None:
        """End the step that was just committed without waiting for the next one to begin."""
        self._engine.meter.flush()

    def _tell_of_flops(self, num_flops: int) -> None:
        """The first forward was counted; a backward does twice as much."""
        self._engine.meter.tell(lambda sink: sink.note({"forward_flops": num_flops}))

    def _tell_of_leak(self, leak: Leak) -> None:
        self.leaks.append(leak)
        _log.warning("rank %d: %s", self._engine.lanes.rank, leak)
        self._engine.meter.tell(lambda sink: sink.note({"leak": asdict(leak)}))

    def close(self) -> None:
        """End the last step, and let those who listen go."""
        self.flush()
        self._engine.meter.tell(lambda sink: sink.note({"pool": report_of(self._engine).to_rows()}))
        self._engine.meter.tell(lambda sink: sink.close())
        self._engine.meter.sinks.clear()
        self._engine.meter.tracer.steps = ()
        self._engine.meter.watch = None
        self._engine.forward.flop_counter = None

    def __enter__(self) -> Recording:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def record(
    model: nn.Module,
    folder: str | os.PathLike[str] | None = None,
    *,
    sinks: Sequence[Sink] = (),
    trace: Collection[int] = DEFAULT_TRACE,
    config: Mapping[str, Any] | None = None,
    keep_until: int = 0,
) -> Recording:
    """Record the steps of a sharded model: memory by kind, bytes by collective, time by phase. A collective: all ranks call it.

    It begins by measuring, for a few hundredths of a second, what the device and the link can do.

    Args:
        model: A sharded model.
        folder: Where each rank writes ``ranks/N.jsonl``, for ``shardwise report``; nowhere, if None.
        sinks: Further listeners: see ``shardwise.telemetry.sink``.
        trace: Steps that are written down in detail.
        config: What the run was asked to do, to be kept with it.
        keep_until: The folder is that of a run that goes on: its records up to this step stay.

    >>> import torch, shardwise
    >>> model = torch.nn.Linear(4, 1)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> _ = shardwise.shard(model, optimizer, stage=2)
    >>> with shardwise.record(model) as recording:
    ...     loss = model(torch.ones(8, 4)).square().mean()
    ...     loss.backward()
    ...     optimizer.step()
    ...     recording.log(loss=loss.item(), samples=8)
    >>> recording.last.step, recording.last.values["samples"], sorted(recording.last.phases)[0]
    (1, 8, 'backward')
    """
    engine = engine_of(model)
    if not engine.meter.is_on:
        raise UsageError("The model was sharded with accounting=False, so there is nothing to record. Leave that out.")
    if engine.meter.watch is not None:
        raise UsageError("The model is being recorded already. Close that recording first, or give it all sinks at once.")
    if any(step < 1 for step in trace):
        raise UsageError(f"trace takes numbers of steps, from 1 on, but got {sorted(trace)[0]}.")
    header = _header(engine, {} if config is None else config)
    own: list[Sink] = [] if folder is None else [JsonLines(Path(folder) / "ranks" / f"{header.rank}.jsonl", keep_until)]
    own.extend(sinks)
    for sink in own:
        sink.start(header)
    engine.meter.tracer.steps = frozenset(trace)
    return Recording(engine, own)


def _compute_dtype(engine: Engine) -> torch.dtype:
    sizes: dict[torch.dtype, int] = {}
    for unit in engine.executor.units.values():
        for flat in unit.flats:
            sizes[flat.precision.compute] = sizes.get(flat.precision.compute, 0) + flat.layout.numel
    return max(sizes, key=lambda dtype: sizes[dtype])


def _header(engine: Engine, config: Mapping[str, Any]) -> Header:
    running = versions()
    plan = engine.plan.to_dict()
    facts = json.dumps([plan, running, dict(config)], sort_keys=True, default=str)
    return Header(
        rank=engine.lanes.rank,
        num_ranks=engine.lanes.size,
        started_at=time.time(),
        plan=plan,
        versions=running,
        host=_host(engine),
        config=dict(config),
        hash=hashlib.sha256(facts.encode()).hexdigest()[:12],
    )


def _host(engine: Engine) -> dict[str, Any]:
    return {
        "name": socket.gethostname(),
        "system": platform.platform(),
        "num_cpus": os.cpu_count(),
        "num_threads": torch.get_num_threads(),
        "device": str(engine.device),
        "link": engine.lanes.gather.link,
        "num_parameters": sum(param.numel for unit in engine.units for param in unit.params),
        "num_units": len(engine.units),
        "peak_flops": peak_flops(engine.device, _compute_dtype(engine)),
        "link_bytes_per_second": link_bytes_per_second(engine.lanes, engine.device),
    }
