"""What is measured of a machine: real kernels for a moment, and what becomes of the samples."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch

from shardwise.core.errors import UsageError
from shardwise.planning import measure
from shardwise.planning.machine_file import Rooms, identity_of, machine_from
from shardwise.planning.measure import MIB, Budget, Sample
from shardwise.planning.measure_ranks import measure_all, merge, open_world

TINY = Budget(call_seconds=0.002, largest_matmul=128, largest_bytes=MIB, disk_bytes=MIB)


def test_timing_is_the_median_and_is_not_moved_by_one_slow_round() -> None:
    timing = measure.timing_of([1.0, 1.0, 1.2, 0.8, 50.0])
    assert timing.seconds == 1.0
    assert timing.spread == pytest.approx(0.1)


def test_repeat_measures_a_call_and_keeps_to_its_time() -> None:
    begin = time.perf_counter()
    timing = measure.repeat(lambda: time.sleep(0.01), 0.1)
    assert timing.seconds >= 0.01
    assert timing.seconds <= time.perf_counter() - begin


def test_one_rank_measures_every_part(tmp_path: Path) -> None:
    told: list[str] = []
    samples = measure_all(open_world(torch.device("cpu")), tmp_path / "disk", TINY, lambda part, found: told.append(part))
    assert told == ["matrix products", "elementwise kernels", "AdamW", "small kernels", "disk"]
    assert list(tmp_path.iterdir()) == []
    assert {sample.part for sample in samples} == {"matmul", "elementwise", "adamw", "kernel", "disk_read", "disk_write"}
    machine = machine_from(samples, identity_of("cpu"), Rooms(0, 2**34), ["here"])
    assert set(machine.peak_flops) == {"float32", "bfloat16"}
    assert (machine.memory_bytes, machine.num_per_node, machine.is_measured) == (2**34, 1, True)
    assert (machine.inside_node, machine.collectives, machine.to_host_bytes_per_second) == (None, (), None)


def test_unusable_folder_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "disk").write_text("a file")
    assert list(measure.measure_disk(tmp_path / "disk", TINY, 1)) == []


def test_samples_of_ranks_are_merged_by_what_they_measured() -> None:
    def sample(size: float, seconds: float, spread: float = 0.0) -> Sample:
        return Sample("matmul", "float32", 2, size, seconds, spread)

    merged = merge([[sample(8, 1.0), sample(64, 4.0, 0.1)], [sample(8, 3.0), sample(64, 4.0, 0.3)], []])
    assert merged == [sample(8, 2.0), sample(64, 4.0, 0.3)]


@pytest.mark.parametrize(
    "changes",
    [{"seconds": 0}, {"size": float("nan")}, {"spread": "wide"}, {"seconds": -1.0}, {"extra": 1}],
    ids=["no-time", "nan", "text", "negative", "unknown"],
)
def test_sample_that_cannot_be_is_refused(changes: dict[str, object]) -> None:
    values = {**Sample("matmul", "float32", 2, 8.0, 1.0, 0.0).to_dict(), **changes}
    with pytest.raises(UsageError, match="Expected a sample"):
        Sample.from_dict(values)


COLLECTIVES = [
    Sample(name, link, 2, size, seconds * slowness, 0.0)
    for link, slowness in (("host memory", 1.0), ("gloo", 4.0))
    for size, seconds in ((65536.0, 2e-4), (67108864.0, 8e-3))
    for name in ("all_gather", "reduce_scatter", "all_reduce")
]
KERNELS = [
    Sample("matmul", "float32", 1, 2e9, 0.02, 0.0),
    Sample("matmul", "float32", 2, 2e9, 0.04, 0.0),
    Sample("matmul", "float32", 2, 2e6, 1e-4, 0.0),
    Sample("elementwise", "reused", 2, 1e8, 0.01, 0.0),
    Sample("elementwise", "reused", 2, 1e6, 1e-5, 0.0),
    Sample("adamw", "fused", 2, 1e8, 0.005, 0.0),
    Sample("kernel", "autograd", 2, 64, 128e-6, 0.0),
]


@pytest.mark.parametrize("hosts", [["a", "a"], ["a", "b"]], ids=["one-host", "two-hosts"])
def test_machine_holds_what_all_ranks_get_at_once_over_the_engines_link(hosts: list[str]) -> None:
    kernels = KERNELS if hosts == ["a", "a"] else [sample for sample in KERNELS if sample.num_busy == 2]
    machine = machine_from([*kernels, *COLLECTIVES], identity_of("cpu"), Rooms(0, 2**34), hosts)
    assert machine.peak("float32") == pytest.approx(5e10)
    assert machine.memory_bytes_per_second == pytest.approx(1e10)
    assert machine.host_memory_bytes_per_second == pytest.approx(2e10)
    assert machine.kernel_seconds == pytest.approx(2e-6)
    assert [(each.name, each.num_ranks, len(each.points)) for each in machine.collectives] == [
        ("all_gather", 2, 2),
        ("reduce_scatter", 2, 2),
        ("all_reduce", 2, 2),
    ]
    assert machine.collectives[0].points == ((65536, 2e-4), (67108864, 8e-3))
    link, other = machine.inside_node, machine.between_nodes
    if hosts != ["a", "a"]:
        link, other = other, link
    assert link is not None
    assert other is None
    assert link.bytes_per_second == pytest.approx(67108864 / 2 / 8e-3)
    assert link.kind == "host memory"
