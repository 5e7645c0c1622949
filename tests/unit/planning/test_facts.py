"""Facts of the system: of this machine, and of trees of files as kernels show them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from shardwise.core.errors import ShardwiseError
from shardwise.planning.facts import Facts, gather_facts

GIB = 2**30


def plant(root: Path, files: dict[str, str]) -> None:
    for path, text in files.items():
        target = root / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)


def gather(tmp_path: Path, files: dict[str, str], **environment: str) -> Facts:
    plant(tmp_path / "root", files)
    return gather_facts(tmp_path / "offload", environment, version="0.1.0", rank=3, root=tmp_path / "root")


def test_this_machine_tells_of_itself(tmp_path: Path) -> None:
    facts = gather_facts(tmp_path / "offload", os.environ, version="0.1.0")
    assert facts.memory_bytes >= facts.free_memory_bytes > 0
    assert 1 <= facts.num_cores <= (os.cpu_count() or 1)
    assert facts.cpu_model
    assert facts.folder_error == ""
    assert facts.folder_free_bytes > 0
    assert list(tmp_path.iterdir()) == []  # What was made to try it is gone.
    assert Facts.from_dict(facts.to_dict()) == facts


@pytest.mark.parametrize(
    ("files", "quota", "limit"),
    [
        ({"sys/fs/cgroup/cpu.max": "150000 100000\n", "sys/fs/cgroup/memory.max": f"{8 * GIB}\n"}, 1.5, 8 * GIB),
        ({"sys/fs/cgroup/cpu.max": "max 100000\n", "sys/fs/cgroup/memory.max": "max\n"}, None, None),
        (
            {
                "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "200000\n",
                "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
                "sys/fs/cgroup/memory/memory.limit_in_bytes": f"{GIB}\n",
            },
            2.0,
            GIB,
        ),
        (
            {
                "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n",
                "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
                "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
            },
            None,
            None,
        ),
        ({}, None, None),
    ],
    ids=["second-version", "second-unlimited", "first-version", "first-unlimited", "none"],
)
def test_limits_of_control_groups_are_read(
    tmp_path: Path, files: dict[str, str], quota: float | None, limit: int | None
) -> None:
    facts = gather(tmp_path, files)
    assert (facts.cpu_quota, facts.group_limit_bytes) == (quota, limit)


def test_memory_is_read_as_the_kernel_shows_it(tmp_path: Path) -> None:
    meminfo = (
        "MemTotal: 1048576 kB\nSwapTotal: 2097152 kB\nSwapFree: 1048576 kB\nCommitLimit: 3145728 kB\nCommitted_AS: 1048576 kB\n"
    )
    files = {
        "proc/meminfo": meminfo,
        "proc/sys/vm/overcommit_memory": "2\n",
        "proc/sys/kernel/yama/ptrace_scope": "2\n",
        "proc/cpuinfo": "processor\t: 0\nmodel name\t: A fast one\n\nprocessor\t: 1\nmodel name\t: A fast one\n",
        "sys/devices/system/cpu/cpu0/cpufreq/scaling_governor": "powersave\n",
    }
    facts = gather(tmp_path, files, OMP_NUM_THREADS="3", MALLOC_PERTURB_="1", MALLOC_ARENA_MAX="", HOME="/root")
    assert (facts.memory_bytes, facts.swap_used_bytes, facts.commit_room_bytes) == (GIB, GIB, 2 * GIB)
    assert (facts.ptrace_scope, facts.cpu_model, facts.governor) == (2, "A fast one", "powersave")
    assert (facts.omp_setting, facts.malloc_settings, facts.rank) == ("3", {"MALLOC_PERTURB_": "1"}, 3)
    assert (facts.shared_bytes, facts.shared_write_rate) == (0, 0.0)


def test_shared_memory_is_written_to(tmp_path: Path) -> None:
    (tmp_path / "root/dev/shm").mkdir(parents=True)
    facts = gather(tmp_path, {})
    assert facts.shared_write_rate > 0
    assert list((tmp_path / "root/dev/shm").iterdir()) == []


def test_folder_in_the_way_of_a_file_is_told(tmp_path: Path) -> None:
    (tmp_path / "offload").write_text("a file")
    facts = gather(tmp_path, {})
    assert facts.folder_error
    assert not facts.is_direct


def test_rank_of_another_version_is_named(tmp_path: Path) -> None:
    values = gather(tmp_path, {}).to_dict()
    del values["governor"]
    with pytest.raises(ShardwiseError, match=r"Rank 3 did not tell governor: it runs shardwise 0\.1\.0"):
        Facts.from_dict(values)
