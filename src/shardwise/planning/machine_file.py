"""The profile of a measured machine as a file: what `doctor` writes and the planner reads. Knows no environment and no command.

A profile is of one machine and one torch. What is foreign, damaged or old is refused with what to do, since a plan that is made with
figures of another machine looks as good as any.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import torch

from shardwise.core.errors import ShardwiseError, UsageError
from shardwise.planning.facts import cpu_model, num_cores
from shardwise.planning.machine import COLLECTIVES, LinkRate, Machine, MeasuredCollective
from shardwise.planning.measure import Sample

SCHEMA = 1
REDO = "Run `shardwise doctor` here."
OLD_AFTER = timedelta(days=180)
"""Machines change: kernels, microcode, what else runs on them."""


@dataclass(frozen=True)
class Identity:
    """What makes figures valid: another processor, torch or device has others."""

    cpu_model: str
    num_cores: int
    architecture: str
    torch: str
    device: str

    @property
    def hash(self) -> str:
        """Short, for the name of a file."""
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()[:16]


@dataclass(frozen=True)
class MachineProfile:
    """A measured machine, with all that it was made from."""

    machine: Machine
    samples: tuple[Sample, ...]
    identity: Identity
    num_ranks: int
    num_threads: int
    made_at: datetime

    def to_dict(self) -> dict[str, Any]:
        """As JSON takes it."""
        return {
            "schema": SCHEMA,
            "identity": asdict(self.identity),
            "identity_hash": self.identity.hash,
            "made_at": self.made_at.isoformat(timespec="seconds"),
            "num_ranks": self.num_ranks,
            "num_threads": self.num_threads,
            "machine": self.machine.to_dict(),
            "samples": [sample.to_dict() for sample in self.samples],
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> MachineProfile:
        """Read what `to_dict` wrote.

        Raises:
            UsageError: Something is missing, or is not what it should be.
        """
        if not isinstance(values, Mapping) or values.get("schema") != SCHEMA:
            found = values.get("schema", "none") if isinstance(values, Mapping) else "no table of values"
            raise UsageError(f"Expected a machine's profile of schema {SCHEMA}, but found {found}.")
        try:
            identity = Identity(**{field.name: values["identity"][field.name] for field in fields(Identity)})
            profile = cls(
                Machine.from_dict(values["machine"]),
                tuple(Sample.from_dict(each) for each in values["samples"]),
                identity,
                int(values["num_ranks"]),
                int(values["num_threads"]),
                datetime.fromisoformat(values["made_at"]),
            )
            told = values["identity_hash"]
        except (KeyError, TypeError, ValueError) as error:
            what = f"{error} is missing" if isinstance(error, KeyError) else str(error)
            raise UsageError(f"A part of it cannot be read: {what}.") from error
        if told != identity.hash:
            raise UsageError(f"Its identity was changed: it has hash {told} but should have {identity.hash}.")
        if profile.made_at.tzinfo is None:
            raise UsageError(f"Its date {values['made_at']} has no time zone.")
        return profile


def identity_of(device: str) -> Identity:
    """Of the machine that this runs on."""
    return Identity(cpu_model(), num_cores(), platform.machine(), torch.__version__, device.partition(":")[0])


def write_profile(path: Path, profile: MachineProfile) -> None:
    """Put a profile in its place, for this user alone: all of it, or what was there before.

    Raises:
        ShardwiseError: It cannot be written there.
    """
    text = json.dumps(profile.to_dict(), indent=2) + "\n"
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")  # Which nobody else may read.
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            os.replace(name, path)
        except BaseException:
            with suppress(OSError):
                os.unlink(name)
            raise
    except OSError as error:
        raise ShardwiseError(f"The profile cannot be written to {path}: {error}. Give another place with --output.") from error


def read_profile(path: Path) -> MachineProfile:
    """Read a profile, of whichever machine.

    Raises:
        UsageError: There is none, or it is damaged.
    """
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise UsageError(f"There is no profile of this machine ({path}). {REDO}") from error
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"The machine's profile {path} cannot be read: {error}. {REDO}") from error
    except json.JSONDecodeError as error:
        raise UsageError(f"The machine's profile {path} is damaged: it is no JSON ({error}). {REDO}") from error
    try:
        return MachineProfile.from_dict(values)
    except UsageError as error:
        raise UsageError(f"The machine's profile {path} is damaged, or of another version. {error} {REDO}") from error


def load_machine(path: Path, *, device: str = "cpu", now: datetime | None = None) -> Machine:
    """The measured machine of a profile that was made here, with this torch, not too long ago.

    Args:
        device: What ranks compute on, as ``torch.device.type`` says it.
        now: For tests.

    Raises:
        UsageError: There is none, or it is damaged, foreign or stale: the message says which and how to redo it.
    """
    profile = read_profile(path)
    check_is_of_here(profile, identity_of(device), path)
    age = (now or datetime.now(UTC)) - profile.made_at
    if age > OLD_AFTER:
        raise UsageError(f"The machine's profile {path} is {age.days} days old: machines change. {REDO}")
    return profile.machine


def check_is_of_here(profile: MachineProfile, here: Identity, path: Path) -> None:
    """Refuse a profile of another machine, torch or device, and say what differs."""
    there = profile.identity
    names = [field.name for field in fields(Identity) if getattr(there, field.name) != getattr(here, field.name)]
    if names:
        told = "; ".join(f"{_LABELS[name]} was {getattr(there, name)}, here it is {getattr(here, name)}" for name in names)
        raise UsageError(f"The profile {path} was made on another machine or with other software: {told}. {REDO}")


_LABELS = {
    "cpu_model": "the processor",
    "num_cores": "the number of cores",
    "architecture": "the architecture",
    "torch": "torch",
    "device": "the device",
}


def machine_from(samples: Sequence[Sample], identity: Identity, rooms: Rooms, hosts: Sequence[str]) -> Machine:
    """The figures that predictions need, with all ranks of a host busy.

    Args:
        rooms: Memory of the device and of the host.
        hosts: Of each rank.

    Raises:
        UsageError: Something was not measured.
    """
    num_local = max(hosts.count(host) for host in hosts)
    busy = [sample for sample in samples if sample.num_busy in (num_local, len(hosts))]
    inside, between = _links(busy, hosts)
    is_host = identity.device == "cpu"
    return Machine(
        name=identity.cpu_model if is_host else f"{identity.device} ({identity.cpu_model})",
        peak_flops={dtype: max(each.rate for each in _of(busy, "matmul", dtype)) for dtype in _variants(busy, "matmul")},
        memory_bytes=rooms.host_bytes // num_local if is_host else rooms.device_bytes,
        memory_bytes_per_second=_largest(_of(busy, "elementwise", "reused")).rate,
        num_per_node=num_local,
        inside_node=inside,
        between_nodes=between,
        to_host_bytes_per_second=_rate(busy, "to_host"),
        from_host_bytes_per_second=_rate(busy, "to_device"),
        host_memory_bytes=rooms.host_bytes or None,
        host_memory_bytes_per_second=_rate(busy, "adamw_host") or _rate(busy, "adamw"),
        disk_read_bytes_per_second=_rate(busy, "disk_read"),
        disk_write_bytes_per_second=_rate(busy, "disk_write"),
        kernel_seconds=1 / _largest(_of(busy, "kernel", "autograd")).rate,
        collectives=tuple(_measured(busy, name, len(hosts)) for name in COLLECTIVES if _of(busy, name)),
        is_measured=True,
    )


@dataclass(frozen=True)
class Rooms:
    """Memory of a rank's device, and of its host."""

    device_bytes: int
    host_bytes: int


def _links(samples: Sequence[Sample], hosts: Sequence[str]) -> tuple[LinkRate | None, LinkRate | None]:
    """What the engine's gathers went over: inside a host, or between several."""
    gathers = _engine_link(_of(samples, "all_gather"))
    if not gathers:
        return None, None
    most, least = _largest(gathers), min(gathers, key=lambda sample: sample.size)
    part = (len(hosts) - 1) / len(hosts)
    rate = most.rate * part
    latency = max(0.0, least.seconds - least.size * part / rate)
    link = LinkRate(rate, latency_seconds=latency, kind=most.variant)
    return (link, None) if len(set(hosts)) == 1 else (None, link)


def _measured(samples: Sequence[Sample], name: str, num_ranks: int) -> MeasuredCollective:
    found = sorted(_engine_link(_of(samples, name)), key=lambda sample: sample.size)
    return MeasuredCollective(name, num_ranks, tuple((int(sample.size), sample.seconds) for sample in found))


def _engine_link(samples: list[Sample]) -> list[Sample]:
    """Of the link that the engine takes: the first that was measured."""
    return [sample for sample in samples if sample.variant == samples[0].variant]


def _of(samples: Sequence[Sample], part: str, variant: str | None = None) -> list[Sample]:
    return [sample for sample in samples if sample.part == part and variant in (None, sample.variant)]


def _variants(samples: Sequence[Sample], part: str) -> list[str]:
    return list(dict.fromkeys(sample.variant for sample in _of(samples, part)))


def _largest(samples: list[Sample]) -> Sample:
    if not samples:
        raise UsageError("Something that predictions need was not measured. Run all of doctor.")
    return max(samples, key=lambda sample: sample.size)


def _rate(samples: Sequence[Sample], part: str) -> float | None:
    found = _of(samples, part)
    return _largest(found).rate if found else None
