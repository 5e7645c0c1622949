"""Writes figures for TensorBoard, a run a rank. Needs the extra ``tensorboard``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from shardwise.core.errors import UsageError
from shardwise.core.records import Header, StepRecord
from shardwise.telemetry.sink import Callback


class TensorBoard(Callback):
    """Scalars by step: values that users log, seconds by phase, bytes by kind and by op.

    Raises:
        UsageError: The package ``tensorboard`` is not installed.
    """

    def __init__(self, folder: Path) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise UsageError("TensorBoard is not installed: pip install 'shardwise[tensorboard]', or leave it out.") from error
        self._folder = folder
        self._make_writer: Any = SummaryWriter
        self._writer: Any = None

    def start(self, header: Header) -> None:
        """Before the first step."""
        self._writer = self._make_writer(str(self._folder / f"rank{header.rank}"))
        self._writer.add_text("configuration", f"```\n{header.to_dict()}\n```")

    def step(self, record: StepRecord) -> None:
        """Write a step."""
        scalars = {f"values/{name}": value for name, value in record.values.items()}
        scalars |= {f"seconds/{phase}": seconds for phase, seconds in record.phases.items()}
        scalars["seconds/step"] = record.seconds
        scalars |= {f"peak bytes/{each.kind}": each.peak_bytes for each in record.held}
        scalars["peak bytes/all"] = record.peak_bytes
        for row in record.traffic:
            name = f"sent bytes/{row.op}"
            scalars[name] = scalars.get(name, 0) + row.wire_bytes
        if record.disk is not None:
            scalars |= {"disk bytes/read": record.disk.read_bytes, "disk bytes/written": record.disk.written_bytes}
        for name, value in scalars.items():
            self._writer.add_scalar(name, value, record.step, walltime=record.ended_at)

    def close(self) -> None:
        """Write what is left."""
        if self._writer is not None:
            self._writer.close()
