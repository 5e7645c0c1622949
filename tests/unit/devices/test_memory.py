"""What the machine says of this process follows what the process does."""

from pathlib import Path

import torch

from shardwise.devices.memory import allocated_bytes, free_host_bytes, peak_resident_bytes, resident_bytes

CPU = torch.device("cpu")


def test_resident_peak_follows_what_is_touched() -> None:
    before = peak_resident_bytes()
    block = bytearray(b"x" * (before + 2**26))
    assert peak_resident_bytes() >= before + 2**25
    del block
    assert peak_resident_bytes() >= before + 2**25


def test_allocated_and_resident_bytes_follow_a_tensor() -> None:
    before = allocated_bytes(CPU)
    block = torch.ones(2**24)
    assert allocated_bytes(CPU) - before >= block.nbytes
    assert resident_bytes() >= block.nbytes
    del block
    assert allocated_bytes(CPU) - before < 2**20


def test_free_memory_is_the_least_that_the_system_and_its_groups_leave(tmp_path: Path) -> None:
    assert free_host_bytes(root=tmp_path) is None
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc" / "meminfo").write_text("MemTotal:  900 kB\nMemAvailable:     700 kB\n")
    assert free_host_bytes(root=tmp_path) == 700 * 1024
    group = tmp_path / "sys" / "fs" / "cgroup"
    (group / "memory").mkdir(parents=True)
    (group / "memory" / "memory.limit_in_bytes").write_text("5000\n")
    (group / "memory" / "memory.usage_in_bytes").write_text("1000\n")
    assert free_host_bytes(root=tmp_path) == 4000
    (group / "memory.max").write_text("max\n")
    (group / "memory.current").write_text("2000\n")
    assert free_host_bytes(root=tmp_path) == 4000
    (group / "memory.max").write_text("3000\n")
    assert free_host_bytes(root=tmp_path) == 1000
    assert (free_host_bytes() or 1) > 0
