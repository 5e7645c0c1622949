"""Buffers between disk and memory: aligned, never overlapping, never above the budget, and used again."""

import gc
import threading
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardwise.core.errors import OffloadError, UsageError
from shardwise.stores.disk import DiskStore
from shardwise.stores.ranges import BLOCK_BYTES
from shardwise.stores.staging import Staging
from shardwise.stores.store import Ticket

MANY = st.lists(st.tuples(st.booleans(), st.integers(0, 40000), st.integers(0, 100)), max_size=60)


@given(MANY, st.integers(BLOCK_BYTES, 150000))
def test_buffers_never_overlap_nor_exceed_the_budget(asked: list[tuple[bool, int, int]], budget_bytes: int) -> None:
    told: list[int] = []
    staging = Staging(budget_bytes, on_change=told.append)
    lent: list[torch.Tensor] = []
    for is_take, num_bytes, which in asked:
        if is_take:
            try:
                buffer = staging.take(num_bytes)
            except UsageError:
                assert num_bytes > staging.report.largest_free_bytes
                continue
            assert buffer.shape == (num_bytes,)
            assert buffer.data_ptr() % BLOCK_BYTES == 0
            buffer.fill_(len(lent) + 1)
            lent.append(buffer)
        elif lent:
            staging.give(lent.pop(which % len(lent)))
        report = staging.report
        assert sum(buffer.nbytes for buffer in lent) + report.slack_bytes == report.live_bytes <= report.peak_bytes
        assert report.peak_bytes <= report.touched_bytes <= budget_bytes
        spans = sorted((buffer.data_ptr(), buffer.data_ptr() + buffer.nbytes) for buffer in lent if buffer.nbytes)
        assert all(end <= begin for (_, end), (begin, _) in pairwise(spans))
    for buffer in lent:
        staging.give(buffer)
    assert (staging.live_bytes, staging.report.slack_bytes) == (0, 0)
    assert staging.report.largest_free_bytes == budget_bytes // BLOCK_BYTES * BLOCK_BYTES
    assert max(told, default=0) == staging.report.peak_bytes
    assert not told or told[-1] == 0


def test_memory_that_was_given_back_serves_again() -> None:
    staging = Staging(2**20)
    first = staging.take(3000)
    address = first.data_ptr()
    staging.give(first.view(torch.bfloat16))
    second = staging.take(4096).view(torch.float32)
    assert second.data_ptr() == address
    assert second.isnan().all(), "in tests, what was given back is overwritten"


def test_a_request_waits_for_what_was_promised() -> None:
    staging = Staging(3 * BLOCK_BYTES)
    buffers = [staging.take(BLOCK_BYTES) for _ in range(3)]
    tickets = [Ticket(buffer) for buffer in buffers]
    for ticket, buffer in zip(tickets, buffers, strict=True):
        staging.give_when(ticket, buffer)
    assert staging.report.live_bytes == 3 * BLOCK_BYTES
    threading.Timer(0.05, tickets[0].finish).start()
    threading.Timer(0.1, tickets[1].finish, (OffloadError("failed"),)).start()
    assert staging.take(2 * BLOCK_BYTES).data_ptr() == buffers[0].data_ptr()
    assert staging.report.wait_seconds > 0.05
    assert staging.live_bytes == 3 * BLOCK_BYTES
    tickets[2].finish()
    assert staging.live_bytes == 2 * BLOCK_BYTES


def test_a_buffer_comes_back_when_all_that_was_asked_of_it_is_done() -> None:
    staging = Staging(2 * BLOCK_BYTES)
    buffer = staging.take(BLOCK_BYTES)
    tickets = [Ticket(buffer), Ticket(buffer)]
    staging.give_when(tickets, buffer)
    tickets[1].finish()
    assert staging.live_bytes == BLOCK_BYTES
    assert staging.take_at_once(2 * BLOCK_BYTES) is None
    tickets[0].finish()
    whole = staging.take_at_once(2 * BLOCK_BYTES)
    assert whole is not None
    staging.give_when([], whole)
    assert staging.live_bytes == 0


def test_a_request_that_cannot_be_served_is_refused() -> None:
    staging = Staging(4 * BLOCK_BYTES)
    with pytest.raises(UsageError, match=r"20 KiB .* budget for staging is 16 KiB\. Raise it to 20480 bytes at least"):
        staging.take(4 * BLOCK_BYTES + 1)
    buffers = [staging.take(BLOCK_BYTES) for _ in range(4)]
    staging.give(buffers[0])
    staging.give(buffers[2])
    with pytest.raises(
        UsageError, match=r"8 KiB is needed .* 8 KiB of the budget of 16 KiB are lent .* at most 4 KiB lie together"
    ):
        staging.take(2 * BLOCK_BYTES)
    assert staging.live_bytes == 2 * BLOCK_BYTES
    with pytest.raises(UsageError, match="at least 4096"):
        Staging(4095)


def test_what_is_not_lent_cannot_be_given() -> None:
    staging = Staging(4 * BLOCK_BYTES)
    buffer = staging.take(100)
    for foreign in (torch.zeros(100, dtype=torch.uint8), buffer[1:]):
        with pytest.raises(UsageError, match="not lent"):
            staging.give(foreign)
    staging.give_when(Ticket(buffer), buffer)
    with pytest.raises(UsageError, match="promised already"):
        staging.give(buffer)


def test_closing_frees_the_memory_and_leaves_lent_buffers_whole() -> None:
    told: list[int] = []
    staging = Staging(2**20, on_change=told.append)
    buffer = staging.take(5000).fill_(7)
    staging.close()
    staging.close()
    gc.collect()
    assert buffer.eq(7).all()
    assert (staging.live_bytes, told[-1]) == (0, 0)
    staging.give(buffer)
    with pytest.raises(UsageError, match="closed"):
        staging.take(1)


def test_buffers_first_used_in_inference_serve_training() -> None:
    with torch.inference_mode():
        staging = Staging(2**20)
        assert not staging.take(100).is_inference()
    assert not staging.take(100).is_inference()


@pytest.mark.parametrize("direct", [True, False], ids=["direct", "buffered"])
def test_much_state_passes_through_a_small_budget(tmp_path: Path, direct: bool) -> None:
    """Reads ahead and writes behind, as an optimizer step does them: ten times the budget passes through it."""
    store, staging = DiskStore(tmp_path, name="rank-0", direct=direct), Staging(3 * 2**20)
    slots = [store.reserve(2**20 - 4 * number, f"state {number}") for number in range(30)]
    for step in range(3):
        for number, slot in enumerate(slots):
            buffer = staging.take(slot.num_bytes)
            state = buffer.view(torch.float32)
            if step == 0:
                state.fill_(number)
            else:
                store.read(slot, buffer).wait()
                assert state.eq(number + step - 1).all()
                state.add_(1)
            staging.give_when(store.write(slot, state), state)
    store.close()
    assert staging.report.peak_bytes <= staging.budget_bytes
    assert staging.live_bytes == 0
