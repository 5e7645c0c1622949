"""The profile of a machine as a file: it comes back as it was, and what is foreign, damaged or old is refused with the remedy."""

from __future__ import annotations

import json
import stat
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from shardwise.core.errors import ShardwiseError, UsageError
from shardwise.planning.machine import LinkRate, Machine, MeasuredCollective
from shardwise.planning.machine_file import MachineProfile, identity_of, load_machine, read_profile, write_profile
from shardwise.planning.measure import Sample

MADE_AT = datetime(2026, 5, 4, 12, 30, tzinfo=UTC)
SOON = MADE_AT + timedelta(days=1)


def profile_of_here() -> MachineProfile:
    machine = Machine(
        name="here",
        peak_flops={"float32": 8.5e10, "bfloat16": 2.1e11},
        memory_bytes=2**33,
        memory_bytes_per_second=1.8e10,
        num_per_node=2,
        inside_node=LinkRate(5.5e9, latency_seconds=1e-4, kind="host memory"),
        kernel_seconds=3e-6,
        collectives=(MeasuredCollective("all_gather", 2, ((65536, 1.9e-4), (2**26, 5.8e-3))),),
        is_measured=True,
    )
    samples = (Sample("matmul", "float32", 2, 2e9, 0.023, 0.04), Sample("kernel", "plain", 1, 32.0, 4e-5, 0.0))
    return MachineProfile(machine, samples, identity_of("cpu"), 2, 1, MADE_AT)


def test_profile_comes_back_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "cache" / "machine.json"
    write_profile(path, profile_of_here())
    assert read_profile(path) == profile_of_here()
    assert load_machine(path, now=SOON) == profile_of_here().machine
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert list(path.parent.iterdir()) == [path]


def test_profile_is_replaced_whole(tmp_path: Path) -> None:
    path = tmp_path / "machine.json"
    path.write_text("what was there")
    broken = replace(profile_of_here(), num_ranks=object())  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        write_profile(path, broken)
    assert path.read_text() == "what was there"
    write_profile(path, profile_of_here())
    assert [each.name for each in tmp_path.iterdir()] == ["machine.json"]
    assert read_profile(path) == profile_of_here()


def test_place_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ShardwiseError, match="--output"):
        write_profile(tmp_path / "file" / "machine.json", profile_of_here())


def test_missing_profile_says_how_to_make_one(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"There is no profile of this machine .*shardwise doctor"):
        load_machine(tmp_path / "machine.json")


DAMAGES: dict[str, Callable[[dict[str, Any]], object]] = {
    "schema": lambda values: values.update(schema=99),
    "no-machine": lambda values: values.pop("machine"),
    "unknown-field": lambda values: values["machine"].update(horse_power=3),
    "lost-field": lambda values: values["machine"].pop("memory_bytes"),
    "samples": lambda values: values["samples"][0].update(seconds=-1),
    "no-list": lambda values: values.update(samples=7),
    "date": lambda values: values.update(made_at="yesterday"),
    "no-zone": lambda values: values.update(made_at="2026-05-04T12:30:00"),
    "identity": lambda values: values["identity"].update(torch="1.0"),
    "points": lambda values: values["machine"]["collectives"][0].update(points=[[2, 1.0], [1, 1.0]]),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES.keys())
def test_damaged_profile_is_refused(tmp_path: Path, damage: Callable[[dict[str, Any]], object]) -> None:
    values = profile_of_here().to_dict()
    damage(values)
    path = tmp_path / "machine.json"
    path.write_text(json.dumps(values))
    with pytest.raises(UsageError, match=r"machine\.json is damaged.*Run `shardwise doctor`"):
        load_machine(path, now=SOON)


@pytest.mark.parametrize("content", [b"{", b"[]", b"", b"\xff\xfe"], ids=["cut", "list", "empty", "binary"])
def test_file_that_is_no_profile_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "machine.json"
    path.write_bytes(content)
    with pytest.raises(UsageError, match=r"machine\.json .*Run `shardwise doctor`"):
        load_machine(path)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"cpu_model": "Another"}, "the processor was Another"),
        ({"torch": "2.12.0"}, "torch was 2.12.0, here it is"),
        ({"num_cores": 96}, "the number of cores was 96"),
    ],
    ids=["processor", "torch", "cores"],
)
def test_foreign_profile_says_what_differs(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    path = tmp_path / "machine.json"
    here = profile_of_here()
    write_profile(path, replace(here, identity=replace(here.identity, **changes)))
    with pytest.raises(UsageError, match=f"{words}.*Run `shardwise doctor`"):
        load_machine(path, now=SOON)


def test_profile_of_another_device_is_foreign(tmp_path: Path) -> None:
    path = tmp_path / "machine.json"
    write_profile(path, profile_of_here())
    with pytest.raises(UsageError, match="the device was cpu, here it is cuda"):
        load_machine(path, device="cuda", now=SOON)


def test_old_profile_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "machine.json"
    write_profile(path, profile_of_here())
    with pytest.raises(UsageError, match="181 days old"):
        load_machine(path, now=MADE_AT + timedelta(days=181))
