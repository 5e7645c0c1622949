"""What one step took on one rank, and what a run is: the schema of all that is written down. Plain values, versioned.

A record is written by one version and may be read by another: readers take what they know and leave the rest.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from enum import Enum
from typing import Any, TypeVar

_Row = TypeVar("_Row", "Held", "Traffic", "Span")

SCHEMA = 1
"""Raised when the meaning of what is written changes. Readers refuse what is newer than they are."""


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise TypeError(f"expected a number, but got {value!r}")
    return value


def _whole(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"expected a whole number, but got {value!r}")
    return value


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"expected a text, but got {value!r}")
    return value


_CHECKS: Mapping[Any, Callable[[Any], Any]] = {"int": _whole, "float": _number, "str": _text}
"""By the annotation of a field: what is read may have been written by anyone."""


def plain_fields(cls: Any, values: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a class that are numbers or texts, checked.

    Raises:
        KeyError, TypeError: One is missing, or is something else.
    """
    return {key.name: _CHECKS[key.type](values[key.name]) for key in fields(cls) if key.type in _CHECKS}


def _from_row(cls: type[_Row], row: Sequence[Any]) -> _Row:
    """A class of numbers and texts from their values in turn; what follows them is left out."""
    known = fields(cls)
    return cls(*(_CHECKS[key.type](value) for key, value in zip(known, row[: len(known)], strict=True)))


class Phase(Enum):
    """What a rank does with its time. Every moment of a step belongs to one."""

    __hash__ = object.__hash__  # In C: enum's own is Python.

    DATA = "data"
    FORWARD = "forward"
    BACKWARD = "backward"
    COMMUNICATION = "exposed communication"
    DISK = "waiting for the disk"
    OPTIMIZER = "optimizer"
    OTHER = "other"


class Lane:
    """What a rank's spans lie on: the places of its loop, modules, collectives."""

    LOOP = "loop"
    COMPUTE = "compute"
    COMMUNICATION = "communication"


@dataclass(frozen=True)
class Traffic:
    """The collectives of one step for one op, unit and link."""

    op: str
    unit: str
    link: str
    num_collectives: int
    num_messages: int
    wire_bytes: int
    moving_seconds: float
    waited_seconds: float


@dataclass(frozen=True)
class Held:
    """Bytes of one kind in one tier: when the step had ended, and the most in the course of it."""

    tier: str
    kind: str
    live_bytes: int
    peak_bytes: int


@dataclass(frozen=True)
class DiskUse:
    """What of its state one rank moved from and to its disk in the course of one step, as far as that was asked for then."""

    read_bytes: int
    written_bytes: int


@dataclass(frozen=True)
class Process:
    """What the machine says of the process: bytes that its allocator has given out, that are resident, and the most of these."""

    allocated_bytes: int
    resident_bytes: int
    peak_resident_bytes: int


@dataclass(frozen=True)
class StepRecord:
    """One step on one rank.

    Args:
        step: Its number, from 1 on: updates that were committed.
        rank: Whose record it is.
        ended_at: Seconds since 1970.
        seconds: From the end of the step before it to its own end.
        phases: Seconds by `Phase`; they add up to ``seconds``.
        arrived_seconds: After which time this rank came to the step's common exchange; without what it had waited until then.
        held: Memory by tier and kind.
        peak_bytes: The most that was held at once.
        process: What the machine says; not looked at in every step, if steps are short.
        traffic: Collectives by op, unit and link.
        values: What users gave: loss, tokens, samples and the like.
        disk: What was moved from and to disk; None where no state rests there, and in records of versions that did not count it.
    """

    step: int
    rank: int
    ended_at: float
    seconds: float
    phases: Mapping[str, float]
    arrived_seconds: float
    held: tuple[Held, ...]
    peak_bytes: int
    process: Process | None
    traffic: tuple[Traffic, ...]
    values: Mapping[str, float] = field(default_factory=dict)
    disk: DiskUse | None = None

    @property
    def busy_seconds(self) -> float:
        """The time in which this rank did not wait for others; for its own disk it may have waited."""
        return self.seconds - self.phases.get(Phase.COMMUNICATION.value, 0.0)

    @property
    def wire_bytes(self) -> int:
        """Bytes that this rank sent."""
        return sum(row.wire_bytes for row in self.traffic)

    @property
    def disk_seconds(self) -> float:
        """The time in which this rank waited for its disk."""
        return self.phases.get(Phase.DISK.value, 0.0)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, with tables as rows."""
        process = None if self.process is None else asdict(self.process)
        return {
            **{key.name: getattr(self, key.name) for key in fields(self)},
            "phases": dict(self.phases),
            "values": dict(self.values),
            "held": [[each.tier, each.kind, each.live_bytes, each.peak_bytes] for each in self.held],
            "traffic": [list(vars(row).values()) for row in self.traffic],
            "process": process,
            "disk": None if self.disk is None else asdict(self.disk),
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> StepRecord:
        """Read plain values; what is unknown is left out.

        Raises:
            KeyError, TypeError, ValueError: It is no such record.
        """
        known = plain_fields(cls, values)
        process, disk = values["process"], values.get("disk")
        return cls(
            **known,
            phases={str(phase): _number(seconds) for phase, seconds in values["phases"].items()},
            held=tuple(_from_row(Held, row) for row in values["held"]),
            process=None if process is None else Process(**plain_fields(Process, process)),
            traffic=tuple(_from_row(Traffic, row) for row in values["traffic"]),
            disk=None if disk is None else DiskUse(**plain_fields(DiskUse, disk)),
            # Whatever users have logged: a loss may be no number any more, and a text is none.
            values={name: value for name, value in values["values"].items() if isinstance(value, int | float)},
        )


@dataclass(frozen=True)
class Adaptation:
    """What was changed of a plan at run time, and why.

    Args:
        step: After which step.
        change: What was done, in words.
        reason: Why.
        held_part: Of a device's memory, on the rank that holds the most: expected at the peak.
        waited_part: Of a step: waited for gathers and for the disk, by all ranks.
    """

    step: int
    change: str
    reason: str
    held_part: float
    waited_part: float

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Adaptation:
        """Read plain values; what is unknown is left out."""
        return cls(**plain_fields(cls, values))

    def __str__(self) -> str:
        seen = f"{self.held_part:.0%} of the memory, {self.waited_part:.0%} of a step waited for gathers and disk"
        return f"After step {self.step}: {self.change}, since {self.reason} ({seen})."


@dataclass(frozen=True)
class Header:
    """The first line of a rank's file: what ran, where, and under which plan. ``hash`` covers all but the rank's own facts."""

    rank: int
    num_ranks: int
    started_at: float
    plan: Mapping[str, Any]
    versions: Mapping[str, str]
    host: Mapping[str, Any]
    config: Mapping[str, Any]
    hash: str
    schema: int = SCHEMA

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Header:
        """Read plain values; what is unknown is left out.

        Raises:
            KeyError, TypeError, ValueError: It is no such header.
        """
        tables: dict[str, Any] = {name: dict(values[name]) for name in ("plan", "versions", "host", "config")}
        return cls(**plain_fields(cls, values), **tables)


@dataclass(frozen=True)
class Span:
    """Something that took time on one of a rank's lanes, in seconds since the step began."""

    lane: str
    name: str
    begin_seconds: float
    end_seconds: float
    wire_bytes: int = 0


@dataclass(frozen=True)
class StepTrace:
    """One step in detail: what happened when, and what was held.

    Args:
        step: Its number.
        rank: Whose it is.
        synced_seconds: When the step's common exchange ended. All ranks leave it at nearly the same time: laid over each other
            there, their traces need no common clock.
        spans: By lane, in the order of their ends.
        kinds: What the columns of ``memory`` are.
        memory: Rows of seconds and bytes by kind, one for each change.
    """

    step: int
    rank: int
    synced_seconds: float
    spans: tuple[Span, ...]
    kinds: tuple[str, ...]
    memory: tuple[tuple[float, ...], ...]

    def to_dict(self) -> dict[str, Any]:
        """Plain values, with tables as rows."""
        return {
            **{key.name: getattr(self, key.name) for key in fields(self)},
            "spans": [list(vars(span).values()) for span in self.spans],
            "kinds": list(self.kinds),
            "memory": [list(row) for row in self.memory],
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> StepTrace:
        """Read plain values; what is unknown is left out.

        Raises:
            KeyError, TypeError, ValueError: It is no such trace.
        """
        return cls(
            **plain_fields(cls, values),
            spans=tuple(_from_row(Span, row) for row in values["spans"]),
            kinds=tuple(map(str, values["kinds"])),
            memory=tuple(tuple(map(_number, row)) for row in values["memory"]),
        )
