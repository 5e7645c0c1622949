"""The folder of a run as a report reads it: every rank's log, as far as there is one. Writes nothing."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from shardwise.core.errors import UsageError
from shardwise.core.ledger import Tier
from shardwise.core.records import Adaptation, Header, StepRecord, StepTrace
from shardwise.telemetry.files import RankLog, read_log
from shardwise.telemetry.leaks import Leak


@dataclass
class RunLog:
    """What all ranks of one run have written."""

    path: Path
    ranks: dict[int, RankLog]
    result: Mapping[str, Any] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    @property
    def name(self) -> str:
        """The name of its folder."""
        return self.path.resolve().name

    @property
    def header(self) -> Header | None:
        """Of the first rank that has one."""
        return next((log.header for log in self.ranks.values() if log.header is not None), None)

    def host_number(self, key: str) -> float:
        """What the header says of its host; 0 where it says nothing, or no number."""
        return 0.0 if self.header is None else as_number(self.header.host.get(key))

    @property
    def allocator_tiers(self) -> tuple[str, ...]:
        """Tiers whose memory comes from the allocator that was asked: on the CPU, the host's memory is the device's."""
        is_on_cpu = self.header is None or str(self.header.host.get("device", "cpu")).startswith("cpu")
        return (Tier.DEVICE.value, Tier.HOST.value) if is_on_cpu else (Tier.DEVICE.value,)

    @property
    def resident_tiers(self) -> tuple[str, ...]:
        """Tiers whose memory is the host's."""
        return self.allocator_tiers if Tier.HOST.value in self.allocator_tiers else (Tier.HOST.value,)

    @cached_property
    def steps(self) -> dict[int, dict[int, StepRecord]]:
        """Records by step and rank. A step that not all ranks have written is there with those that have."""
        found: dict[int, dict[int, StepRecord]] = {}
        for rank, log in self.ranks.items():
            for record in log.steps:
                found.setdefault(record.step, {})[rank] = record
        return dict(sorted(found.items()))

    @cached_property
    def whole_steps(self) -> dict[int, dict[int, StepRecord]]:
        """Those that all ranks have written."""
        return {step: by_rank for step, by_rank in self.steps.items() if len(by_rank) == len(self.ranks)}

    @property
    def steady_steps(self) -> dict[int, dict[int, StepRecord]]:
        """Whole steps without the first two, in which buffers are made and orders are learnt, if there are others."""
        whole = self.whole_steps
        steady = {step: by_rank for step, by_rank in whole.items() if step > 2}
        return steady or whole

    @property
    def steady_records(self) -> list[StepRecord]:
        """The records of those, of all ranks."""
        return [record for by_rank in self.steady_steps.values() for record in by_rank.values()]

    def steady_records_of(self, rank: int) -> list[StepRecord]:
        """Those of one rank."""
        return [by_rank[rank] for by_rank in self.steady_steps.values()]

    def traces_of(self, step: int) -> dict[int, StepTrace]:
        """What was traced of a step, by rank."""
        return {rank: trace for rank, log in self.ranks.items() for trace in log.traces if trace.step == step}

    @property
    def leaks(self) -> list[tuple[int, Leak]]:
        """Memory that was found to grow, with the rank."""
        return [(rank, leak) for rank, log in self.ranks.items() for leak in log.leaks]

    @property
    def adaptations(self) -> list[Adaptation]:
        """What was changed of the plan at run time: all ranks do the same, so one rank's account is enough."""
        return max((log.adaptations for log in self.ranks.values()), key=len, default=[])

    @property
    def traced_steps(self) -> list[int]:
        """Steps that any rank has traced."""
        return sorted({trace.step for log in self.ranks.values() for trace in log.traces})


def as_number(value: object) -> float:
    """A number that somebody may have written; 0 for anything else."""
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else 0.0


def load_run(path: Path) -> RunLog:
    """Read the folder of a run: whatever is there of a killed or running one.

    Raises:
        UsageError: It is no such folder, or holds nothing that can be shown.
    """
    if not path.exists():
        raise UsageError(
            f"There is no run folder {path}. Give a folder that `shardwise train` or shardwise.record has written."
        )
    if not path.is_dir():
        raise UsageError(f"{path} is a file. Give the run folder that holds it.")
    logs = [read_log(file) for file in sorted((path / "ranks").glob("*.jsonl"))]
    if not logs:
        raise UsageError(
            f"The folder {path} holds no records: there is no ranks/N.jsonl in it. Give the folder of one run, such as runs/gpt-...; "
            "one that ended before its first rank had started has nothing to show."
        )
    problems = [problem for log in logs for problem in log.problems]
    ranks = {log.rank: log for log in logs if log.rank is not None}
    if not ranks:
        what = problems[0] if problems else "they are empty"
        raise UsageError(f"The records in {path} cannot be read: {what}. Give the folder of another run.")
    run = RunLog(path, dict(sorted(ranks.items())), _read_result(path / "result.json"), problems)
    problems.extend(_missing(run))
    return run


def _missing(run: RunLog) -> list[str]:
    header = run.header
    missing = [] if header is None else [rank for rank in range(header.num_ranks) if rank not in run.ranks]
    return [f"rank {rank} has written nothing" for rank in missing]


def _read_result(path: Path) -> Mapping[str, Any]:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return values if isinstance(values, dict) else {}
