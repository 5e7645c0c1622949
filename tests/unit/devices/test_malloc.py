"""Memory that was freed and is not needed goes back to the system, and not more often than it pays."""

import pytest
import torch

from shardwise.devices import malloc
from shardwise.devices.malloc import Heap, release_unused, resident_bytes, used_bytes

MiB = 2**20

pytestmark = pytest.mark.skipif(used_bytes() == 0, reason="the C library does not tell what is in use")


def holes(num_mib: int) -> list[torch.Tensor]:
    """Make so much of the heap idle that no later block of the same size can use it: what is held lies in between."""
    blocks = [torch.ones(2**14) for _ in range(num_mib * 16)]  # 64 KiB each: never mapped by themselves.
    return blocks[::8]


@pytest.fixture
def heap() -> Heap:
    release_unused()
    heap = Heap()
    for _ in range(3):
        heap.keep_lean()  # Learns what is not the allocator's, and what is needed now.
    return heap


def test_idle_memory_goes_back_before_the_process_grows(heap: Heap, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heap, "_resume_at", 0.0)
    before = resident_bytes()
    held = holes(200)
    assert resident_bytes() - before > 150 * MiB
    heap.keep_lean()
    assert resident_bytes() - before < 80 * MiB
    assert all(bool((block == 1).all()) for block in held)


def test_it_waits_before_it_is_done_again(heap: Heap, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heap, "_resume_at", float("inf"))
    before = resident_bytes()
    held = holes(200)
    heap.keep_lean()
    assert resident_bytes() - before > 150 * MiB and held
    monkeypatch.setattr(heap, "_resume_at", 0.0)
    heap.keep_lean()
    assert resident_bytes() - before > 150 * MiB, "what was reached before the pause ended counts as needed"


def test_memory_in_use_is_no_reason(heap: Heap, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heap, "_resume_at", 0.0)
    monkeypatch.setattr(malloc, "release_unused", lambda: pytest.fail("nothing was idle"))
    held = [torch.ones(2**14) for _ in range(200 * 16)]
    heap.keep_lean()
    assert held
