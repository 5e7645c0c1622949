"""Buffers are used again where they fit, never while someone holds them, and every byte is in the ledger."""

import pytest
import torch

from shardwise.core.ledger import Kind, Ledger, Tier
from shardwise.devices.pool import Poison, Pool, PoolReport

CPU = torch.device("cpu")


def take(pool: Pool, numel: int, kind: Kind = Kind.GATHERED, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return pool.take(numel, dtype, CPU, kind)


@pytest.fixture
def ledger() -> Ledger:
    return Ledger()


@pytest.fixture
def pool(ledger: Ledger) -> Pool:
    return Pool(ledger)


def test_what_was_given_back_is_used_again(pool: Pool, ledger: Ledger) -> None:
    first = take(pool, 1000)
    address = first.data_ptr()
    pool.give(first, Kind.GATHERED)
    del first
    assert (ledger.live(Kind.GATHERED), ledger.live(Kind.POOL)) == (0, 4000)
    again = take(pool, 1200, dtype=torch.bfloat16)  # in another dtype, and not quite so large
    assert again.data_ptr() == address and again.shape == (1200,)
    assert (ledger.live(Kind.GATHERED), ledger.live(Kind.POOL)) == (2400, 1600)
    assert take(pool, 1000).data_ptr() != address


def test_much_too_large_and_too_small_ones_are_left(pool: Pool) -> None:
    large, small = take(pool, 10_000), take(pool, 10)
    addresses = {large.data_ptr(), small.data_ptr()}
    pool.give(large, Kind.GATHERED)
    pool.give(small, Kind.GATHERED)
    del large, small
    assert take(pool, 1000).data_ptr() not in addresses


def test_memory_of_which_someone_holds_a_view_is_left_to_them(pool: Pool, ledger: Ledger) -> None:
    buffer = take(pool, 1000)
    view = buffer[10:20]
    address = buffer.data_ptr()
    pool.give(buffer, Kind.GATHERED)
    del buffer
    others = [take(pool, 1000) for _ in range(3)]
    assert all(other.data_ptr() != address for other in others)
    assert view.numel() == 10
    assert ledger.live_bytes == 12_000


def test_memory_of_an_accelerators_host_is_lent_again_when_its_last_view_is_gone(ledger: Ledger) -> None:
    pool = Pool(ledger, torch.device("meta"))
    large = take(pool, 1200, Kind.GRAD)
    address = large.data_ptr()
    pool.give(large, Kind.GRAD)
    del large
    buffer = take(pool, 1000, Kind.GRAD)  # A part of the same memory.
    assert buffer.data_ptr() == address
    view = buffer[10:20]
    pool.give(buffer, Kind.GRAD)
    del buffer
    assert take(pool, 1000, Kind.GRAD).data_ptr() != address
    del view
    again = take(pool, 1000, Kind.GRAD)
    assert again.data_ptr() == address
    view = again[10:20]
    pool.give(again, Kind.GRAD)
    del again
    pool.trim()
    assert ledger.live(Kind.POOL, Tier.HOST) == 0, "What someone has a view of is theirs."
    assert view.numel() == 10


def test_memory_of_gradients_is_not_kept(pool: Pool, ledger: Ledger) -> None:
    pool.give(take(pool, 1000, Kind.GRAD), Kind.GRAD)
    assert ledger.live_bytes == 0


def test_what_a_step_did_not_use_is_freed_at_its_end(pool: Pool, ledger: Ledger) -> None:
    buffers = [take(pool, 1000) for _ in range(3)]
    while buffers:
        pool.give(buffers.pop(), Kind.GATHERED)
    pool.end_step()
    assert ledger.live(Kind.POOL) == 12_000
    pool.give(take(pool, 1000), Kind.GATHERED)
    pool.end_step()
    assert ledger.live(Kind.POOL) == 4000
    pool.trim()
    assert ledger.live_bytes == 0


def test_poison(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Poison, "enabled", True)
    buffer = take(pool, 64)
    assert bool(buffer.isnan().all())
    storage = buffer.fill_(1.0).untyped_storage()
    pool.give(buffer, Kind.GATHERED)
    assert bool(torch.empty(0).set_(storage, 0, (64,), (1,)).isnan().all()) or storage.nbytes() == 256


def test_the_report_tells_what_is_lent_idle_and_wasted(pool: Pool) -> None:
    first, second = take(pool, 1000), take(pool, 500)
    pool.give(first, Kind.GATHERED)
    del first
    lent = take(pool, 750)
    pool.give(second, Kind.GATHERED)
    del second
    assert pool.report == PoolReport(lent_bytes=3000, slack_bytes=1000, idle_bytes=2000, largest_idle_bytes=2000, num_idle=1)
    assert pool.report.taken_bytes == 6000 and lent.numel() == 750
