"""Faults of the disk, of the folder and of other people: each is told by path and label, and nothing hangs."""

import errno
import os
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from shardwise.core.errors import OffloadError, ShardwiseError
from shardwise.stores import direct_io, disk_file
from shardwise.stores.disk import DiskStore
from shardwise.stores.store import Slot
from tests.unit.privileges import as_nobody
from tests.unit.stores import children

LABEL = "optimizer state 'exp_avg' of unit 'blocks.0'"


@pytest.fixture(params=[True, False], ids=["direct", "buffered"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[DiskStore]:
    store = DiskStore(tmp_path / "offload", name="rank-0", direct=request.param)
    yield store
    store.close()
    assert not store.path.exists()


def written_slot(store: DiskStore, num_bytes: int = 8192) -> Slot:
    slot = store.reserve(num_bytes, LABEL)
    store.write(slot, torch.ones(num_bytes, dtype=torch.uint8)).wait()
    return slot


def check_told(told: pytest.ExceptionInfo[OffloadError], store: DiskStore, *texts: str) -> None:
    assert isinstance(told.value, ShardwiseError)
    assert isinstance(told.value, OSError)
    for text in (str(store.path), LABEL, *texts):
        assert text in str(told.value)


# Other people


def test_a_file_that_was_cut_off_is_told(store: DiskStore) -> None:
    slot = written_slot(store)
    os.truncate(store.path, 5000)
    for ticket in (store.read(slot, torch.zeros(2048)), store.write(slot, torch.zeros(1))):
        with pytest.raises(OffloadError) as told:
            ticket.wait()
        check_told(told, store, "should have 8192 bytes", "cut it to 5000", "Start again from a checkpoint")
    with pytest.raises(OffloadError, match="cut it to 5000"):
        store.reserve(4096, LABEL)


def test_a_file_that_is_cut_off_in_the_middle_of_a_read_is_told(store: DiskStore, monkeypatch: pytest.MonkeyPatch) -> None:
    slot = written_slot(store)
    move_all = direct_io.move_all

    def truncate_and_move(*args: Any) -> None:
        os.truncate(store.path, 4096)
        move_all(*args)

    monkeypatch.setattr(direct_io, "move_all", truncate_and_move)
    with pytest.raises(OffloadError) as told:
        store.read(slot, torch.zeros(2048)).wait()
    check_told(told, store, "cut it to 4096")


def test_a_file_that_was_deleted_is_told(store: DiskStore) -> None:
    slot = written_slot(store)
    store.path.unlink()
    for ticket in (store.read(slot, torch.zeros(2048)), store.write(slot, torch.zeros(1))):
        with pytest.raises(OffloadError) as told:
            ticket.wait()
        check_told(told, store, "somebody has deleted it", "Start again from a checkpoint")


def test_a_file_that_was_put_in_the_place_of_ours_stays(tmp_path: Path) -> None:
    store = DiskStore(tmp_path, name="rank-0")
    store.path.unlink()
    store.path.write_text("somebody else's")
    store.close()
    assert store.path.read_text() == "somebody else's"


# The disk


@pytest.fixture
def faults(monkeypatch: pytest.MonkeyPatch) -> dict[Any, int]:
    """Which of the system's calls (``os.preadv``, ``os.pwritev``) fail, with which number."""
    numbers: dict[Any, int] = {}
    move_all = direct_io.move_all

    def fail_or_move(call: Any, *args: Any) -> None:
        if call in numbers:
            raise OSError(numbers[call], os.strerror(numbers[call]))
        move_all(call, *args)

    monkeypatch.setattr(direct_io, "move_all", fail_or_move)
    return numbers


def test_a_disk_that_cannot_be_read_is_told_and_others_go_on(store: DiskStore, faults: dict[Any, int]) -> None:
    slot = written_slot(store)
    faults[os.preadv] = errno.EIO
    read, write = store.read(slot, torch.zeros(2048)), store.write(slot, torch.full((2048,), 2.0))
    with pytest.raises(OffloadError) as told:
        read.wait()
    check_told(told, store, "8 KiB", "could not be read at byte 0", "Input/output error", "another disk")
    assert told.value.errno == errno.EIO
    write.wait()
    faults.clear()
    target = torch.zeros(2048)
    store.read(slot, target).wait()
    assert target.eq(2.0).all()


def test_what_was_not_written_is_not_read(store: DiskStore, faults: dict[Any, int]) -> None:
    slot, other = written_slot(store), written_slot(store)
    faults[os.pwritev] = errno.EIO
    write = store.write(slot, torch.full((1024,), 2.0), at=4096)
    read = store.read(slot, torch.zeros(2048))
    write.join()
    faults.clear()
    with pytest.raises(OffloadError) as told:
        read.wait()
    check_told(told, store, "cannot be read, since writing it failed", "Input/output error")
    store.read(other, torch.zeros(2048)).wait()
    store.read(slot, torch.zeros(1024)).wait()
    store.write(slot, torch.zeros(512), at=4096).wait()
    with pytest.raises(OffloadError, match="since writing it failed"):
        store.read(slot, torch.zeros(2048)).wait()
    store.write(slot, torch.zeros(512), at=6144).wait()
    store.read(slot, torch.zeros(2048)).wait()


def test_a_place_of_which_a_write_failed_serves_the_next_one(store: DiskStore, faults: dict[Any, int]) -> None:
    slot = written_slot(store)
    faults[os.pwritev] = errno.EIO
    store.write(slot, torch.zeros(2048)).join()
    store.free(slot)
    faults.clear()
    slot = store.reserve(100, LABEL)
    store.write(slot, torch.zeros(20), at=20).wait()
    store.read(slot, torch.zeros(25)).wait()


@pytest.mark.parametrize("direct", [True, False], ids=["direct", "buffered"])
def test_a_full_disk_is_found_when_room_is_reserved(tmp_path: Path, direct: bool) -> None:
    def fill() -> None:
        children.mount_small(tmp_path, "1m")
        store = DiskStore(tmp_path, name="rank-0", direct=direct)
        slot = written_slot(store, 2**19)
        with pytest.raises(OffloadError) as told:
            store.reserve(2**20, LABEL)
        check_told(told, store, "1 MiB could not be reserved", "512 KiB are free", "No space left", "Make room")
        assert told.value.errno == errno.ENOSPC
        assert store.file_bytes == store.path.stat().st_size == 2**19
        target = torch.zeros(2**19, dtype=torch.uint8)
        store.read(slot, target).wait()
        assert target.eq(1).all()
        store.reserve(2**18, LABEL)
        store.close()

    children.run(fill)


def test_a_disk_that_others_fill_is_told_where_room_cannot_be_reserved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_file, "allocate", lambda *args: False)

    def fill() -> None:
        children.mount_small(tmp_path, "1m")
        store = DiskStore(tmp_path, name="rank-0")
        with pytest.raises(OffloadError, match="could not be reserved"):
            store.reserve(2**21, LABEL)
        slot = store.reserve(2**19, LABEL)
        (tmp_path / "others").write_bytes(bytes(2**19 + 2**18))
        with pytest.raises(OffloadError) as told:
            store.write(slot, torch.zeros(2**17)).wait()
        check_told(told, store, "512 KiB of", "could not be written", "0 B are free", "Make room")
        (tmp_path / "others").unlink()
        store.write(slot, torch.zeros(2**17)).wait()
        store.read(slot, torch.zeros(2**17)).wait()
        store.close()

    children.run(fill)


def test_a_file_that_may_not_grow_so_large_is_told(tmp_path: Path) -> None:
    def grow() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, 2**20))
        store = DiskStore(tmp_path, name="rank-0")
        with pytest.raises(OffloadError) as told:
            store.reserve(2**21, LABEL)
        check_told(told, store, "2 MiB could not be reserved", "ulimit -f")
        store.close()

    children.run(grow)


# The folder


@pytest.mark.parametrize("path", ["file", "file/below", "link"])
def test_what_is_no_folder_is_refused(tmp_path: Path, path: str) -> None:
    (tmp_path / "file").write_text("text")
    (tmp_path / "link").symlink_to("nowhere")
    with pytest.raises(OffloadError, match=rf"{path}: no file for offload could be made: .*needs a folder"):
        DiskStore(tmp_path / path, name="rank-0")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "link"]


def test_a_folder_of_others_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o555)
    with as_nobody(), pytest.raises(OffloadError, match=r"Permission denied.*in which this user may make files"):
        DiskStore(tmp_path / "new", name="rank-0")
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_read_only_is_refused(tmp_path: Path) -> None:
    def refuse() -> None:
        children.mount_small(tmp_path)
        (tmp_path / "there").mkdir()
        children.make_read_only(tmp_path)
        for name in ("there", "new"):
            with pytest.raises(OffloadError, match=f"{name}: no file for offload could be made: Read-only file system"):
                DiskStore(tmp_path / name, name="rank-0")

    children.run(refuse)
