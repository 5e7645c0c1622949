"""What is written to a store is what is read from it, in any order, alignment and size; the file goes with the store."""

import gc
import os
import signal
import stat
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardwise.core.errors import OffloadError, UsageError
from shardwise.stores import direct_io
from shardwise.stores.direct_io import aligned_memory
from shardwise.stores.disk import DiskStore
from shardwise.stores.store import Slot, Ticket
from tests.unit.stores import children

LABEL = "optimizer state 'exp_avg' of unit 'blocks.0'"


@pytest.fixture(params=[True, False], ids=["direct", "buffered"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[DiskStore]:
    store = DiskStore(tmp_path / "offload", name="rank-0", direct=request.param)
    yield store
    store.close()


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Nothing moves before it is set."""
    gate = threading.Event()
    move_all = direct_io.move_all

    def wait_and_move(*args: Any) -> None:
        gate.wait()
        move_all(*args)

    monkeypatch.setattr(direct_io, "move_all", wait_and_move)
    yield gate
    gate.set()


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Transfers of a few blocks are cut as large ones are."""
    monkeypatch.setattr(direct_io, "PIECE_BYTES", 2 * 4096)
    monkeypatch.setattr(direct_io, "BOUNCE_BYTES", 2 * 4096)


def random_bytes(num_bytes: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 256, (num_bytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def aligned_copy(values: torch.Tensor, shift: int = 0) -> torch.Tensor:
    """The same at an address that is a multiple of a block, or so many bytes behind one."""
    memory = aligned_memory(values.nbytes + shift + 1)[shift : shift + values.nbytes]
    return memory.copy_(values)


# What comes back

SIZES = [1, 4095, 4096, 4097, 12288, 2**20 + 1, 9 * 2**20 + 77]


@pytest.mark.parametrize("shift", [0, 64, 3])
@pytest.mark.parametrize("num_bytes", SIZES)
def test_bytes_come_back(store: DiskStore, num_bytes: int, shift: int) -> None:
    source = aligned_copy(random_bytes(num_bytes), shift)
    target = aligned_copy(torch.zeros(num_bytes, dtype=torch.uint8), shift)
    slot = store.reserve(num_bytes, LABEL)
    store.write(slot, source)
    ticket = store.read(slot, target)
    ticket.wait()
    assert torch.equal(source, target)
    assert ticket.num_bytes == num_bytes
    assert ticket.is_done
    assert 0 < ticket.begin_seconds < ticket.end_seconds


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.bool, torch.complex64])
def test_tensors_of_every_dtype_come_back(store: DiskStore, dtype: torch.dtype) -> None:
    source = torch.randn(33, 77).to(dtype)
    target = torch.zeros(33, 77, dtype=dtype)
    slot = store.reserve(source.nbytes, LABEL)
    store.write(slot, source).wait()
    store.read(slot, target).wait()
    assert torch.equal(source, target)


def test_parameters_and_empty_tensors_come_back(store: DiskStore) -> None:
    parameter = torch.nn.Parameter(torch.randn(100))
    slot, nothing = store.reserve(400, LABEL), store.reserve(0, "nothing")
    store.write(slot, parameter).wait()
    target = torch.nn.Parameter(torch.zeros(100))
    store.read(slot, target).wait()
    assert torch.equal(parameter, target)
    assert store.read(nothing, torch.empty(0)).wait() == 0.0
    store.free(nothing)


def test_one_way_is_read_by_the_other(tmp_path: Path) -> None:
    """Nothing is left in the page cache by direct writes, nor on its way by buffered ones: a plain read sees what was written."""
    for direct in (True, False):
        store = DiskStore(tmp_path, name="rank-0", direct=direct)
        source = random_bytes(3 * 4096 + 5)
        slot = store.reserve(source.nbytes, LABEL)
        store.write(slot, source).wait()
        assert store.path.read_bytes()[slot.offset : slot.offset + slot.num_bytes] == source.numpy().tobytes()
        store.close()


Op = tuple[bool, int, int, int, int]


@st.composite
def ops(draw: st.DrawFn) -> list[Op]:
    """Reads and writes of parts of three slots: (is write, slot, at, number of bytes, distance of the memory from a block)."""
    found = []
    for _ in range(draw(st.integers(1, 25))):
        at = draw(st.sampled_from([0, 0, 4096, 8192, 1, 4000]) | st.integers(0, 30000))
        num_bytes = draw(st.sampled_from([4096, 16384]) | st.integers(0, 30000 - at)) if at < 30000 else 0
        found.append(
            (draw(st.booleans()), draw(st.integers(0, 2)), at, min(num_bytes, 30000 - at), draw(st.sampled_from([0, 64])))
        )
    return found


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("direct", [True, False], ids=["direct", "buffered"])
def test_order_is_that_of_the_calls(tmp_path: Path, direct: bool) -> None:
    """Nobody waits for anything before all was asked for."""
    store = DiskStore(tmp_path, name="rank-0", num_workers=3, direct=direct)

    @given(ops())
    def check(asked: list[Op]) -> None:
        slots = [store.reserve(30000, f"slot {number}") for number in range(3)]
        expected = [torch.zeros(30000, dtype=torch.uint8) for _ in slots]
        tickets = [store.write(slot, zeros.clone()) for slot, zeros in zip(slots, expected, strict=True)]
        reads = []
        for seed, (is_write, number, at, num_bytes, shift) in enumerate(asked):
            memory = aligned_copy(random_bytes(num_bytes, seed), shift)
            if is_write:
                tickets.append(store.write(slots[number], memory, at=at))
                expected[number][at : at + num_bytes] = memory
            else:
                tickets.append(store.read(slots[number], memory, at=at))
                reads.append((memory, expected[number][at : at + num_bytes].clone()))
        for slot in slots:
            store.free(slot)
        for ticket in tickets:
            ticket.wait()
        for memory, values in reads:
            assert torch.equal(memory, values)
        assert store.live_bytes == 0

    try:
        check()
    finally:
        store.close()


def test_a_place_that_was_freed_while_it_is_read_is_not_overwritten(store: DiskStore, gate: threading.Event) -> None:
    first = store.reserve(4096, "first")
    old, new, target = random_bytes(4096, 1), random_bytes(4096, 2), torch.zeros(4096, dtype=torch.uint8)
    tickets = [store.write(first, old), store.read(first, target)]
    store.free(first)
    second = store.reserve(4096, "second")
    assert second.offset == first.offset
    tickets.append(store.write(second, new))
    gate.set()
    for ticket in tickets:
        ticket.wait()
    assert torch.equal(target, old)
    store.read(second, target).wait()
    assert torch.equal(target, new)


def test_reads_of_one_place_go_side_by_side(store: DiskStore, monkeypatch: pytest.MonkeyPatch) -> None:
    slot = store.reserve(4096, LABEL)
    store.write(slot, random_bytes(4096)).wait()
    both = threading.Barrier(2, timeout=30)
    move_all = direct_io.move_all

    def meet_and_move(*args: Any) -> None:
        both.wait()
        move_all(*args)

    monkeypatch.setattr(direct_io, "move_all", meet_and_move)
    for ticket in [store.read(slot, aligned_memory(4096)) for _ in range(2)]:
        ticket.wait()


# Places


def test_places_are_whole_blocks_and_used_again(store: DiskStore) -> None:
    slots = [store.reserve(num_bytes, LABEL) for num_bytes in (5000, 1, 4096)]
    assert [slot.offset for slot in slots] == [0, 8192, 12288]
    assert (store.live_bytes, store.file_bytes, store.free_bytes) == (16384, 16384, 0)
    assert store.path.stat().st_size == 16384
    store.free(slots[0])
    store.free(slots[2])
    assert (store.live_bytes, store.free_bytes, store.largest_free_bytes) == (4096, 12288, 8192)
    store.free(slots[1])
    assert store.largest_free_bytes == 16384
    assert store.reserve(20000, LABEL).offset == 0, "a larger file: what was free at its end is part of the place"
    assert store.file_bytes == 20480


def test_room_on_the_disk_is_taken_when_it_is_reserved(store: DiskStore) -> None:
    store.reserve(2**20, LABEL)
    assert store.path.stat().st_blocks * 512 >= 2**20


def test_wrong_use_is_refused(store: DiskStore, tmp_path: Path) -> None:
    slot = store.reserve(400, LABEL)
    with pytest.raises(UsageError, match=r"has 400\."):
        store.write(slot, torch.zeros(101))
    with pytest.raises(UsageError, match=r"has 400\."):
        store.read(slot, torch.zeros(100), at=1)
    with pytest.raises(UsageError, match="contiguous"):
        store.write(slot, torch.zeros(10, 10).t())
    with pytest.raises(UsageError, match="device meta"):
        store.write(slot, torch.zeros(100, device="meta"))
    store.free(slot)
    for use in (lambda: store.free(slot), lambda: store.read(slot, torch.zeros(1)), lambda: store.write(slot, torch.zeros(1))):
        with pytest.raises(UsageError, match="exp_avg"):
            use()
    with pytest.raises(UsageError, match="cannot have -1 bytes"):
        store.reserve(-1, LABEL)
    for name in ("", "a/b", "../x", "a b"):
        with pytest.raises(UsageError, match="letters"):
            DiskStore(tmp_path, name=name)
    with pytest.raises(UsageError, match="at least one worker"):
        DiskStore(tmp_path, name="x", num_workers=0)


# Tickets


def test_a_ticket_keeps_its_tensor_until_it_is_done(store: DiskStore, gate: threading.Event) -> None:
    expected = random_bytes(2**20)
    slot = store.reserve(2**20, LABEL)
    source = expected.clone()
    storage = weak_storage(source)
    ticket = store.write(slot, source)
    del source
    gc.collect()
    assert storage()
    gate.set()
    ticket.wait()
    assert not storage()
    target = torch.empty_like(expected)
    store.read(slot, target).wait()
    assert torch.equal(target, expected)


def weak_storage(tensor: torch.Tensor) -> Callable[[], bool]:
    """Whether anybody holds a tensor."""
    reference = weakref.ref(tensor)
    return lambda: reference() is not None


def test_waiting_tells_how_long_and_can_be_interrupted(store: DiskStore, gate: threading.Event) -> None:
    ticket = store.write(store.reserve(4, LABEL), torch.zeros(1))
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # Shells let what runs in the background ignore it.
    try:
        threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT)).start()
        with pytest.raises(KeyboardInterrupt):
            ticket.wait()
    finally:
        signal.signal(signal.SIGINT, before)
    assert not ticket.is_done
    threading.Timer(0.1, gate.set).start()
    assert ticket.wait() > 0.05
    assert ticket.wait() == 0.0


# The end


def test_closing_deletes_the_file_and_stops_the_threads(store: DiskStore) -> None:
    slot = store.reserve(4096, LABEL)
    store.write(slot, random_bytes(4096))
    before = threading.active_count()
    store.close()
    store.close()
    assert list(store.path.parent.iterdir()) == []
    assert threading.active_count() == before - 2
    for use in (lambda: store.reserve(1, LABEL), lambda: store.read(slot, torch.zeros(1)), lambda: store.free(slot)):
        with pytest.raises(UsageError, match="closed"):
            use()


def test_closing_lets_what_is_under_way_fail(store: DiskStore, gate: threading.Event) -> None:
    slots = [store.reserve(4096, f"slot {number}") for number in range(4)]
    tickets: list[Ticket] = []
    for slot in slots:
        tickets += [
            store.write(slot, random_bytes(4096)),
            store.read(slot, random_bytes(4096)),
            store.write(slot, random_bytes(1)),
        ]
    closing = threading.Thread(target=store.close)
    closing.start()
    time.sleep(0.05)
    gate.set()
    closing.join()
    for ticket in tickets[2:]:
        assert ticket.is_done
    with pytest.raises(OffloadError, match="slot 3 was not moved: the store was closed"):
        tickets[-3].wait()


def test_a_store_that_nobody_holds_is_closed(tmp_path: Path) -> None:
    store = DiskStore(tmp_path, name="rank-0")
    ticket = store.write(store.reserve(4, LABEL), torch.zeros(1))
    del store
    gc.collect()
    assert list(tmp_path.iterdir()) == []
    assert ticket.is_done


def test_the_file_goes_at_the_end_of_the_interpreter(tmp_path: Path) -> None:
    code = (
        "import sys, torch; from pathlib import Path; from shardwise.stores.disk import DiskStore\n"
        "store = DiskStore(Path(sys.argv[1]), name='rank-0')\n"
        "slot = store.reserve(2**24, 'x'); [store.write(slot, torch.zeros(2**22)) for _ in range(4)]\n"
        "print(len(list(Path(sys.argv[1]).iterdir())))"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "1\n", "")
    assert list(tmp_path.iterdir()) == []


def test_a_forked_process_leaves_the_store_alone(store: DiskStore) -> None:
    slot = store.reserve(4096, LABEL)
    source = random_bytes(4096)
    store.write(slot, source).wait()

    def use_and_close() -> None:
        for use in (lambda: store.read(slot, torch.zeros(1)), lambda: store.reserve(1, LABEL), lambda: store.free(slot)):
            with pytest.raises(UsageError, match="forked"):
                use()
        store.close()

    children.run(use_and_close)
    target = torch.zeros_like(source)
    store.read(slot, target).wait()
    assert torch.equal(source, target)


def test_others_cannot_read_the_file(tmp_path: Path) -> None:
    umask = os.umask(0)
    try:
        store = DiskStore(tmp_path / "a" / "b", name="rank-0")
    finally:
        os.umask(umask)
    assert stat.S_IMODE(store.path.stat().st_mode) == 0o600
    assert stat.S_IMODE(store.path.parent.stat().st_mode) == 0o700
    store.close()
    tmp_path.chmod(0o755)
    DiskStore(tmp_path, name="rank-0").close()
    assert stat.S_IMODE(tmp_path.stat().st_mode) == 0o755, "a folder that was there stays as it is"


def test_slots_are_known_by_themselves(store: DiskStore) -> None:
    slot = store.reserve(10, LABEL)
    with pytest.raises(UsageError, match="of another store"):
        store.free(Slot(slot.offset, slot.num_bytes, slot.label))


def test_the_file_may_grow_while_it_is_read_and_written(store: DiskStore) -> None:
    """A thread that looks at the file just before it grows must not take it for one that was cut off."""
    slot, values = store.reserve(64, LABEL), torch.arange(16, dtype=torch.float32)
    store.write(slot, values).wait()
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)  # Threads take turns as often as they can.
    try:
        targets = [torch.zeros(16) for _ in range(600)]
        tickets = []
        for target in targets:
            tickets.append(store.read(slot, target))
            store.reserve(4096, LABEL)
        for ticket in tickets:
            ticket.wait()
    finally:
        sys.setswitchinterval(interval)
    assert all(torch.equal(target, values) for target in targets)
