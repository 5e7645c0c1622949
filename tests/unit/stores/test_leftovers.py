"""What killed processes left is removed by the next store in the folder; what belongs to the living stays."""

import fcntl
import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Thread

import pytest
import torch

from shardwise.devices.files import alone_in
from shardwise.stores.disk import DiskStore
from shardwise.stores.leftovers import make_file, remove_leftovers
from tests.unit.stores import children

DEAD = "shardwise-offload-rank-0-123-0123456789abcdef.bin"


def open_and_hold(folder: Path, name: str) -> str:
    """In a child: a store that is open and busy when the process is killed."""
    global held  # noqa: PLW0603
    held = DiskStore(folder, name=name)
    slot = held.reserve(2**20, "x")
    held.write(slot, torch.zeros(2**18))
    return str(held.path)


held: DiskStore


def test_killed_processes_leave_nothing_and_living_ones_keep_theirs(tmp_path: Path) -> None:
    with children.living(lambda: open_and_hold(tmp_path, "rank-1")) as (_, path_of_living):
        with children.living(lambda: open_and_hold(tmp_path, "rank-2")) as (pid, path_of_dead):
            children.kill(pid)
        assert Path(path_of_dead).exists()
        store = DiskStore(tmp_path, name="rank-0")
        again = DiskStore(tmp_path, name="rank-0")
        assert {str(path) for path in tmp_path.iterdir()} == {str(store.path), str(again.path), path_of_living}
        store.close()
        again.close()
    DiskStore(tmp_path, name="rank-0").close()
    assert list(tmp_path.iterdir()) == []


def test_children_of_a_killed_process_do_not_keep_its_file(tmp_path: Path) -> None:
    """Workers that load data are forked from the process that trains, and may outlive it for some time."""
    reader, writer = os.pipe()

    def open_and_fork() -> str:
        path = open_and_hold(tmp_path, "rank-0")
        pid = os.fork()
        if pid == 0:
            os.close(writer)
            os.read(reader, 1)  # Until the test has ended.
            os._exit(0)
        return path

    try:
        with children.living(open_and_fork) as (pid, path):
            children.kill(pid)
        DiskStore(tmp_path, name="rank-0").close()
        assert not Path(path).exists()
    finally:
        os.close(writer)
        os.close(reader)


def test_a_file_that_is_made_but_not_yet_locked_stays(tmp_path: Path) -> None:
    stores: list[DiskStore] = []
    opening = Thread(target=lambda: stores.append(DiskStore(tmp_path, name="rank-1")))
    with (tmp_path / DEAD).open("w") as file:
        with alone_in(tmp_path):
            opening.start()
            time.sleep(0.1)
            assert not stores
            fcntl.flock(file, fcntl.LOCK_EX)
        opening.join()
        assert (tmp_path / DEAD).exists()
    stores[0].close()


def test_a_file_that_was_taken_for_left_over_is_made_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where folders have no locks, others may come between."""
    chmod = os.fchmod

    def chmod_and_clean(file: int, mode: int) -> None:
        chmod(file, mode)
        monkeypatch.setattr(os, "fchmod", chmod)
        assert len(remove_leftovers(tmp_path)) == 1

    monkeypatch.setattr(os, "fchmod", chmod_and_clean)
    path, file = make_file(tmp_path, "rank-0")
    assert path.exists()
    assert remove_leftovers(tmp_path) == []
    os.close(file)
    assert remove_leftovers(tmp_path) == [path]


def test_stores_that_open_and_close_at_once_do_not_remove_each_other(tmp_path: Path) -> None:
    def open_and_close() -> str:
        for _ in range(15):
            store = DiskStore(tmp_path, name="rank")
            slot = store.reserve(4096, "x")
            store.write(slot, torch.ones(1024)).wait()
            store.close()
        return "all went well"

    with children.living(open_and_close) as (_, first), children.living(open_and_close) as (_, second):
        assert open_and_close() == first == second
    assert list(tmp_path.iterdir()) == []


def test_what_is_not_ours_stays(tmp_path: Path) -> None:
    (tmp_path / "data.bin").write_text("data")
    (tmp_path / "shardwise-offload-notes.bin").write_text("notes")
    (tmp_path / DEAD.replace("0123", "3210")).symlink_to("data.bin")
    os.mkfifo(tmp_path / DEAD.replace("0123", "4567"))
    (tmp_path / DEAD.replace("0123", "89ab")).mkdir()
    before = sorted(tmp_path.iterdir())
    (tmp_path / DEAD).write_text("left by a dead one")
    store = DiskStore(tmp_path, name="rank-0")
    assert sorted([*before, store.path]) == sorted(tmp_path.iterdir())
    store.close()
    assert sorted(tmp_path.iterdir()) == before


def test_a_folder_that_was_made_to_pass_goes_with_its_last_file(tmp_path: Path) -> None:
    first = DiskStore(tmp_path / "passing", name="rank-0", is_passing=True)
    second = DiskStore(tmp_path / "passing", name="rank-1", is_passing=True)
    first.close()
    assert second.path.exists()
    second.close()
    assert not (tmp_path / "passing").exists()


def test_a_folder_that_others_have_made_or_use_stays(tmp_path: Path) -> None:
    (tmp_path / "theirs").mkdir()
    DiskStore(tmp_path / "theirs", name="rank-0", is_passing=True).close()
    store = DiskStore(tmp_path / "ours", name="rank-0", is_passing=True)
    (tmp_path / "ours" / "notes").touch()
    store.close()
    DiskStore(tmp_path / "named", name="rank-0").close()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["named", "ours", "theirs"]


def test_stores_that_come_and_go_do_not_lose_the_folder_to_each_other(tmp_path: Path) -> None:
    def come_and_go() -> None:
        for _ in range(100):
            DiskStore(tmp_path / "passing", name="rank-0", num_workers=1, is_passing=True).close()

    with ThreadPoolExecutor(2) as threads:
        for done in [threads.submit(come_and_go) for _ in range(2)]:
            done.result()
    assert not (tmp_path / "passing").exists()
