"""Records as lines of JSON, a file a rank: written so that a killed run keeps all but its last line, and read back so.

The first line is the header. Each line says in ``is`` what it is; readers skip what they do not know.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shardwise.core.errors import UsageError
from shardwise.core.records import SCHEMA, Adaptation, Header, StepRecord, StepTrace
from shardwise.telemetry.leaks import Leak

HEADER, STEP, TRACE, NOTE = "header", "step", "trace", "note"


class JsonLines:
    """Writes one rank's records into a file. Each line goes to the system whole, at once: what was written outlives the process.

    Args:
        path: The file.
        keep_until: Records of a run that is gone on with stay, up to this step; none, if 0.

    Raises:
        UsageError: The file cannot be written.
    """

    def __init__(self, path: Path, keep_until: int = 0) -> None:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            kept = _lines_until(path, keep_until) if keep_until else b""
            self._file: int | None = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o644)
            os.write(self._file, kept)
        except OSError as error:
            raise UsageError(f"Records cannot be written to {path}: {error.strerror}. Choose another folder.") from error

    def start(self, header: Header) -> None:
        """Before the first step."""
        self._write(HEADER, header.to_dict())

    def step(self, record: StepRecord) -> None:
        """A step was committed."""
        self._write(STEP, record.to_dict())

    def trace(self, trace: StepTrace) -> None:
        """A step was traced."""
        self._write(TRACE, trace.to_dict())

    def note(self, values: Mapping[str, Any]) -> None:
        """Something else that is to be remembered."""
        self._write(NOTE, values)

    def close(self) -> None:
        """Nothing more comes."""
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _write(self, what: str, values: Mapping[str, Any]) -> None:
        if self._file is not None:
            text = json.dumps({"is": what, **values}, separators=(",", ":"), default=_plain)
            os.write(self._file, f"{text}\n".encode())


def _lines_until(path: Path, step: int) -> bytes:
    """The lines of an earlier run that do not go beyond a step. One that cannot be read goes."""
    kept = []
    for line in path.read_bytes().split(b"\n") if path.exists() else []:
        try:
            values = json.loads(line)
            is_kept = values.get("is") not in (STEP, TRACE) or values["step"] <= step
        except (ValueError, KeyError, TypeError, AttributeError):
            continue
        if is_kept:
            kept.append(line + b"\n")
    return b"".join(kept)


def _plain(value: Any) -> Any:
    """Tensors and the like as numbers, anything else as its name."""
    return value.item() if hasattr(value, "item") else str(value)


@dataclass
class RankLog:
    """What one rank has written, as far as it can be read. ``problems`` says what cannot."""

    path: Path
    header: Header | None = None
    steps: list[StepRecord] = field(default_factory=list)
    traces: list[StepTrace] = field(default_factory=list)
    notes: list[dict[str, Any]] = field(default_factory=list)
    leaks: list[Leak] = field(default_factory=list)
    adaptations: list[Adaptation] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    @property
    def rank(self) -> int | None:
        """Whose it is, if it says so."""
        return self.header.rank if self.header is not None else self.steps[0].rank if self.steps else None


def read_log(path: Path) -> RankLog:
    """Read a rank's file: all whole lines, whatever state it was left in.

    Raises:
        UsageError: It was written by a newer version, whose figures may mean something else.
    """
    log = RankLog(path)
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        log.problems.append(f"{path} cannot be read: {error.strerror}")
        return log
    for number, line in enumerate(lines, start=1):
        if line.strip():
            _take(log, number, line, is_last=number == len(lines))
    return log


def _take(log: RankLog, number: int, line: bytes, *, is_last: bool) -> None:
    try:
        values = json.loads(line)
        kind = values["is"]
        if kind == HEADER:
            _check_schema(log.path, values["schema"])
            log.header = Header.from_dict(values)
        elif kind == STEP:
            log.steps.append(StepRecord.from_dict(values))
        elif kind == TRACE:
            log.traces.append(StepTrace.from_dict(values))
        elif kind == NOTE:
            log.notes.append(values)
            if "leak" in values:
                log.leaks.append(Leak.from_dict(values["leak"]))
            if "adaptation" in values:
                log.adaptations.append(Adaptation.from_dict(values["adaptation"]))
    except UsageError:
        raise
    except (ValueError, KeyError, TypeError, IndexError, AttributeError):
        what = "is cut off: the run was ended while it was written" if is_last else "is no record"
        log.problems.append(f"line {number} of {log.path} {what}")


def _check_schema(path: Path, schema: Any) -> None:
    if not isinstance(schema, int) or schema > SCHEMA:
        raise UsageError(
            f"{path} has schema {schema}, but this version reads up to {SCHEMA}. Update Shardwise to read this run."
        )
