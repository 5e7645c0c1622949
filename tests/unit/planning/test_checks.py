"""What doctor finds wrong with a set-up: each finding appears for the facts that call for it, and for no others."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from shardwise.planning.checks import CHECKS, Check, Finding, Host, Severity, check_all
from shardwise.planning.facts import Facts

MIB, GIB = 2**20, 2**30

HEALTHY = Facts(
    rank=0,
    host="node-1",
    python="3.11.9",
    torch="2.13.0",
    shardwise="0.1.0",
    device="cpu",
    cpu_model="AMD EPYC 7763 64-Core Processor",
    num_cores=8,
    cpu_quota=None,
    governor="performance",
    num_threads=4,
    omp_setting="4",
    malloc_settings={},
    memory_bytes=64 * GIB,
    free_memory_bytes=60 * GIB,
    group_limit_bytes=None,
    swap_used_bytes=0,
    commit_room_bytes=None,
    shared_bytes=32 * GIB,
    shared_free_bytes=32 * GIB,
    shared_write_rate=2e9,
    temp_folder="/tmp",
    temp_free_bytes=20 * GIB,
    can_read_peers=True,
    ptrace_scope=1,
    num_files=65536,
    compiler="/usr/bin/c++",
    has_python_headers=True,
    folder="/scratch/offload",
    folder_free_bytes=500 * GIB,
    folder_error="",
    is_direct=True,
)

CASES: dict[str, tuple[dict[str, Any], str, Severity, str]] = {
    "oversubscribed": ({"num_threads": 8}, "threads-oversubscribed", Severity.WARNING, "OMP_NUM_THREADS=4"),
    "more-ranks": ({"num_cores": 1, "num_threads": 1}, "more-ranks-than-cores", Severity.WARNING, "at most 1 ranks"),
    "idle-cores": ({"omp_setting": None, "num_threads": 1}, "threads-unset", Severity.WARNING, "OMP_NUM_THREADS=4"),
    "unset": ({"omp_setting": None, "num_threads": 1, "num_cores": 2}, "threads-unset", Severity.HINT, "OMP_NUM_THREADS=1"),
    "quota": ({"cpu_quota": 1.5}, "cpu-quota", Severity.WARNING, "at most 1 thread"),
    "governor": ({"governor": "powersave"}, "cpu-governor", Severity.HINT, "performance"),
    "little-memory": ({"free_memory_bytes": 300 * MIB}, "little-memory", Severity.WARNING, "fewer ranks"),
    "swap": ({"swap_used_bytes": 2 * GIB}, "swap-in-use", Severity.WARNING, "swapoff"),
    "memory-limit": ({"group_limit_bytes": 8 * GIB}, "memory-limit", Severity.HINT, "memory_limit"),
    "commit": ({"commit_room_bytes": GIB}, "strict-overcommit", Severity.WARNING, "overcommit_memory=0"),
    "no-shm": ({"shared_bytes": 0, "shared_free_bytes": 0}, "no-shared-memory", Severity.WARNING, "mount"),
    "docker-shm": (
        {"shared_bytes": 64 * MIB, "shared_free_bytes": 64 * MIB},
        "small-shared-memory",
        Severity.WARNING,
        "--shm-size",
    ),
    "slow-shm": ({"shared_write_rate": 5e7}, "slow-shared-memory", Severity.WARNING, "findmnt"),
    "no-temp": ({"temp_free_bytes": MIB}, "no-temporary-room", Severity.BROKEN, "TMPDIR"),
    "seccomp": ({"can_read_peers": False}, "no-cross-memory", Severity.WARNING, "SYS_PTRACE"),
    "yama": ({"can_read_peers": False, "ptrace_scope": 2}, "no-cross-memory", Severity.WARNING, "ptrace_scope=1"),
    "buffered": ({"is_direct": False}, "no-direct-io", Severity.HINT, "--folder"),
    "full-disk": ({"folder_free_bytes": GIB}, "little-free-disk", Severity.HINT, "larger disk"),
    "folder": ({"folder_error": "it is read-only", "is_direct": False}, "folder-unusable", Severity.WARNING, "--folder"),
    "few-files": ({"num_files": 256}, "few-files", Severity.WARNING, "ulimit -n"),
    "no-files": ({"num_files": 64}, "few-files", Severity.BROKEN, "ulimit -n"),
    "compiler": ({"compiler": ""}, "no-compiler", Severity.HINT, "g++"),
    "headers": ({"has_python_headers": False}, "no-compiler", Severity.HINT, "python3-dev"),
    "perturb": ({"malloc_settings": {"MALLOC_PERTURB_": "85"}}, "debug-malloc", Severity.WARNING, "unset MALLOC_PERTURB_"),
    "threshold": ({"malloc_settings": {"MALLOC_MMAP_THRESHOLD_": "65536"}}, "malloc-threshold", Severity.HINT, "unset"),
}


def ranks_of(num_ranks: int = 2, **changes: Any) -> list[Facts]:
    return [replace(HEALTHY, rank=rank, **changes) for rank in range(num_ranks)]


def names(findings: list[Finding]) -> list[str]:
    return [finding.name for finding in findings]


def test_nothing_is_found_on_a_healthy_machine() -> None:
    assert check_all(ranks_of(), ["host memory"]) == []


@pytest.mark.parametrize(("changes", "name", "severity", "remedy"), CASES.values(), ids=CASES.keys())
def test_finding_names_what_is_wrong_and_what_to_do(
    changes: dict[str, Any], name: str, severity: Severity, remedy: str
) -> None:
    (finding,) = check_all(ranks_of(**changes))
    assert (finding.name, finding.severity) == (name, severity)
    assert remedy in finding.remedy
    assert finding.found.startswith(finding.found[0].upper())


LIMITS: dict[str, dict[str, Any]] = {
    "all-cores-in-use": {"num_threads": 4, "num_cores": 8},
    "quota-of-all-cores": {"cpu_quota": 8.0},
    "some-swap": {"swap_used_bytes": 64 * MIB},
    "limit-of-all-memory": {"group_limit_bytes": 64 * GIB},
    "room-to-commit": {"commit_room_bytes": 60 * GIB},
    "enough-shared": {"shared_free_bytes": GIB, "shared_write_rate": 3e8},
    "enough-files": {"num_files": 1024},
    "unlimited-files": {"num_files": None},
    "unknown-memory": {"free_memory_bytes": 0},
    "checks-off": {"malloc_settings": {"MALLOC_CHECK_": "0"}},
    "preloaded": {"malloc_settings": {"LD_PRELOAD": "libjemalloc.so"}},
    "accelerator-alone": {"device": "cuda:0", "omp_setting": None, "num_threads": 1, "can_read_peers": False},
}


@pytest.mark.parametrize("changes", LIMITS.values(), ids=LIMITS.keys())
def test_nothing_is_found_at_the_limit(changes: dict[str, Any]) -> None:
    assert check_all(ranks_of(**changes)) == []


def test_ranks_that_fell_back_to_sockets_are_found_although_each_could_read_itself() -> None:
    assert names(check_all(ranks_of(), ["gloo"])) == ["no-cross-memory"]


def test_one_rank_needs_no_link() -> None:
    assert check_all(ranks_of(1, num_threads=8, omp_setting="8"), []) == []


@pytest.mark.parametrize(
    ("field", "value", "name", "severity"),
    [
        ("torch", "2.12.1", "mismatched-torch", Severity.BROKEN),
        ("shardwise", "0.2.0", "mismatched-shardwise", Severity.BROKEN),
        ("python", "3.12.1", "mismatched-python", Severity.WARNING),
        ("cpu_model", "Intel(R) Xeon(R)", "mismatched-processor", Severity.HINT),
        ("device", "cuda:0", "mismatched-kind", Severity.WARNING),
    ],
)
def test_mismatch_names_the_ranks(field: str, value: str, name: str, severity: Severity) -> None:
    first, second, third = ranks_of(3, num_threads=2)
    (finding,) = check_all([first, second, replace(third, host="node-2", **{field: value})])
    assert (finding.name, finding.severity) == (name, severity)
    assert "on ranks 0, 1 (node-1)" in finding.found
    assert "on rank 2 (node-2)" in finding.found


def test_finding_names_the_host_where_there_are_several() -> None:
    first, second = ranks_of(num_threads=8, omp_setting="8")
    (finding,) = check_all([first, replace(second, host="node-2", swap_used_bytes=GIB)], ["gloo"])
    assert (finding.name, finding.found[:13]) == ("swap-in-use", "Host node-2: ")


def test_worst_comes_first() -> None:
    findings = check_all(ranks_of(compiler="", swap_used_bytes=GIB, num_files=32))
    assert [finding.severity for finding in findings] == [Severity.BROKEN, Severity.WARNING, Severity.HINT]


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_every_check_has_a_case(check: Check) -> None:
    assert any(list(check(Host(tuple(ranks_of(**changes))))) for changes, *_ in CASES.values())
