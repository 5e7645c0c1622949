"""Faults of the disk tier through the engine, on two ranks: all stop together, say what and where, and checkpoints stay good."""

import os
import resource
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import shardwise
from shardwise.testing import World
from tests.distributed.offloaded import DEPTH, KINDS, ON_DISK, WIDTH, make, refusal, step, weights
from tests.unit.stores import children

pytestmark = pytest.mark.dist
_LABELS = {"optim": "optimizer state 'exp_avg", "grad": "gradients of", "param": "parameters of", "all": " of "}


# ---------------------------------------------------------------- folders and files


@contextmanager
def _small_files() -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8192, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def _start_badly(folder: str, fault: str) -> tuple[str, bool]:
    """Rank 1 cannot make its file, or not of that size; says what was told, and whether the model is as it was."""
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(DEPTH)))
    before = [param.data_ptr() for param in model.parameters()]
    with ExitStack() as stack:
        if dist.get_rank() == 1 and fault == "limit":
            stack.enter_context(_small_files())
        elif dist.get_rank() == 1:
            children.mount_small(Path(folder), size="16k")
            if fault == "read-only":
                children.make_read_only(Path(folder))
        told = refusal(lambda: shardwise.shard(model, torch.optim.AdamW(model.parameters()), tiers=ON_DISK, folder=folder))
    return told, [param.data_ptr() for param in model.parameters()] == before


@pytest.mark.parametrize(
    ("fault", "text"),
    [("read-only", "Read-only file system"), ("limit", "Files may not grow so large here"), ("full", "Make room")],
)
def test_a_disk_that_cannot_be_used_is_told_on_all_ranks_before_anything_is_changed(
    tmp_path: Path, fault: str, text: str
) -> None:
    folder = tmp_path / "offload"
    folder.mkdir()
    with World(num_ranks_max=2) as world:  # Its own: mounts of a process last as long as it does.
        found = world.run(_start_badly, str(folder), fault, ranks=2)
    for told, is_plain in found:
        assert is_plain
        assert str(folder) in told
        assert text in told
    assert found[0][0] == f"Rank 1: {found[1][0]}"


def _delete_in_mid_run(folder: str, stage: int, tiers: dict[str, str]) -> list[str]:
    """Somebody deletes the file of rank 1. What is told then, by a save, by a further call, and after a load elsewhere."""
    model, optimizer, handle = make(f"{folder}/a", stage=stage, tiers=tiers)
    step(model, optimizer, 0)
    shardwise.save(f"{folder}/good", model, optimizer)
    expected = weights(model)
    if dist.get_rank() == 1:
        assert handle.engine.disk is not None
        handle.engine.disk.store.path.unlink()
    dist.barrier()
    told = [refusal(lambda: [step(model, optimizer, number) for number in (1, 2)])]
    told.append(refusal(lambda: shardwise.save(f"{folder}/bad", model, optimizer)))
    told.append(refusal(lambda: model(torch.ones(1, WIDTH))))
    fresh, other, _ = make(f"{folder}/b", 1, stage=stage, tiers=tiers)
    shardwise.load(f"{folder}/good", fresh, other)
    return [*told, str(all(map(torch.equal, weights(fresh), expected))), str(Path(f"{folder}/bad").exists())]


@pytest.mark.parametrize("kind", [*KINDS, "all"])
@pytest.mark.parametrize("stage", [0, 3])
def test_a_file_deleted_in_mid_run_stops_all_ranks(world: World, tmp_path: Path, stage: int, kind: str) -> None:
    tiers = ON_DISK if kind == "all" else {kind: "disk"}
    for told, saved, called, is_good, is_bad in world.run(_delete_in_mid_run, str(tmp_path), stage, tiers, ranks=2):
        assert told.startswith("Rank 1: ")
        for text in (str(tmp_path / "a"), "somebody has deleted it", _LABELS[kind]):
            assert text in told
        assert "The state is not whole. The disk tier has failed: Rank 1: " in saved
        assert "Load a checkpoint first" in called
        assert (is_good, is_bad) == ("True", "False")


def _infer_without_file(folder: str, stage: int) -> str:
    model, _, handle = make(folder, stage=stage, tiers={"param": "disk"})
    if dist.get_rank() == 1:
        assert handle.engine.disk is not None
        handle.engine.disk.store.path.unlink()
    dist.barrier()
    with torch.no_grad():
        return refusal(lambda: model(torch.ones(1, WIDTH)))


def test_inference_without_its_file_stops_too(world: World, tmp_path: Path) -> None:
    for told in world.run(_infer_without_file, str(tmp_path), 3, ranks=2):
        assert told.startswith("Rank 1: ")
        assert "somebody has deleted it" in told
    alone = world.run(_infer_without_file, str(tmp_path), 0, ranks=2)
    assert alone[0] == ""
    assert "somebody has deleted it" in alone[1]


# ---------------------------------------------------------------- a disk that fails

_FAULTY_CALLS = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/uio.h>
#include <unistd.h>

/* What becomes of calls for the file of rank 1: the letter in the file that the environment names, while that is there. */
static char fault_of(int fd) {
    const char *flag = getenv("SHARDWISE_TEST_FAULT");
    char link[64], path[4096], fault = 0;
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = flag ? readlink(link, path, sizeof path - 1) : -1;
    if (length < 0) return 0;
    path[length] = 0;
    if (!strstr(path, "/shardwise-offload-rank-1-")) return 0;
    int file = open(flag, O_RDONLY);
    if (file < 0) return 0;
    if (read(file, &fault, 1) != 1) fault = 0;
    close(file);
    return fault;
}

static ssize_t move(const char *name, int fd, const struct iovec *parts, int count, off64_t at, int flags) {
    ssize_t (*call)(int, const struct iovec *, int, off64_t, int) = dlsym(RTLD_NEXT, name);
    int is_write = name[1] == 'w';
    char fault = fault_of(fd);
    if (fault == (is_write ? 'w' : 'r')) { errno = EIO; return -1; }
    if (fault == 'e' && !is_write) return 0;
    struct iovec few = parts[0];
    if (fault == 's' && few.iov_len > 4096) few.iov_len = 4096;
    return fault == 's' ? call(fd, &few, 1, at, flags) : call(fd, parts, count, at, flags);
}

#define CALL(name, real) ssize_t name(int fd, const struct iovec *parts, int count, off64_t at) \\
    { return move(real, fd, parts, count, at, 0); }
#define CALL2(name, real) ssize_t name(int fd, const struct iovec *parts, int count, off64_t at, int flags) \\
    { return move(real, fd, parts, count, at, flags); }
CALL(preadv, "preadv64v2") CALL(preadv64, "preadv64v2") CALL(pwritev, "pwritev64v2") CALL(pwritev64, "pwritev64v2")
CALL2(preadv2, "preadv64v2") CALL2(preadv64v2, "preadv64v2") CALL2(pwritev2, "pwritev64v2") CALL2(pwritev64v2, "pwritev64v2")
"""


@pytest.fixture(scope="module")
def faulty_world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[World, Path]]:
    """Ranks whose disk fails as a letter says that is written to a file: read errors, write errors, short counts, an early end."""
    folder, compiler = tmp_path_factory.mktemp("faulty"), shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("a failing disk is made with a C compiler, and there is none here")
    (folder / "calls.c").write_text(_FAULTY_CALLS)
    command = [compiler, "-shared", "-fPIC", "-O1", "-o", "calls.so", "calls.c", "-ldl"]
    made = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if made.returncode:
        pytest.skip(f"a failing disk cannot be made with this C library: {made.stderr}")
    with pytest.MonkeyPatch.context() as patch, World(num_ranks_max=2) as world:
        patch.setenv("LD_PRELOAD", str(folder / "calls.so"))
        patch.setenv("SHARDWISE_TEST_FAULT", str(folder / "fault"))
        yield world, folder / "fault"


@contextmanager
def _failing(flag: str, fault: str) -> Iterator[None]:
    """Rank 1's disk fails for a while."""
    dist.barrier()
    if dist.get_rank() == 1:
        Path(flag).write_text(fault)
    dist.barrier()
    try:
        yield
    finally:
        dist.barrier()
        Path(flag).unlink(missing_ok=True)
        dist.barrier()


def _fail_in_mid_run(folder: str, flag: str, fault: str, plan: dict[str, Any]) -> dict[str, Any]:
    """What is told by a step and by a save, and whether the checkpoint from before is good: here, and where nothing failed."""
    model, optimizer, handle = make(f"{folder}/a", **plan)
    step(model, optimizer, 0)
    shardwise.save(f"{folder}/good", model, optimizer)
    assert handle.engine.disk is not None
    path = handle.engine.disk.store.path
    if dist.get_rank() == 1 and fault == "cut":
        os.truncate(path, 4096)
    with _failing(flag, fault[0] if fault != "cut" else "-"):
        found: dict[str, Any] = {"told": refusal(lambda: [step(model, optimizer, number) for number in (1, 2)])}
        found["saved"] = refusal(lambda: shardwise.save(f"{folder}/bad", model, optimizer))
    fresh, other, _ = make(f"{folder}/b", 1)
    shardwise.load(f"{folder}/good", fresh, other)
    step(fresh, other, 1)
    if fault == "cut":
        with pytest.raises(shardwise.CheckpointError, match="somebody has cut it to 4096"):
            shardwise.load(f"{folder}/good", model, optimizer)
        found["again"] = refusal(lambda: step(model, optimizer, 1))
    else:
        shardwise.load(f"{folder}/good", model, optimizer)
        step(model, optimizer, 1)
        found["is_good"] = all(map(torch.equal, weights(model), weights(fresh)))
    return {**found, "path": str(path), "is_there": Path(f"{folder}/bad").exists()}


@pytest.mark.parametrize(
    ("fault", "stage", "kinds", "texts"),
    [
        (
            "read error",
            3,
            KINDS,
            ["could not be read at byte", "Input/output error", "Let the folder for offload be on another"],
        ),
        ("read error", 1, ["optim"], ["optimizer state 'exp_avg", "could not be read", "Input/output error"]),
        ("read error", 2, ["grad"], ["gradients of", "could not be read", "Input/output error"]),
        ("write error", 3, KINDS, ["could not be written at byte", "Input/output error"]),
        ("write error", 0, ["optim"], ["optimizer state 'exp_avg", "could not be written", "Input/output error"]),
        ("early end", 3, KINDS, ["the file ends at byte", "The file system has lost some"]),
        ("cut", 3, KINDS, ["somebody has cut it to 4096", "Start again from a checkpoint"]),
    ],
)
def test_a_disk_that_fails_in_mid_run_stops_all_ranks_and_checkpoints_stay_good(
    faulty_world: tuple[World, Path], tmp_path: Path, fault: str, stage: int, kinds: list[str], texts: list[str]
) -> None:
    world, flag = faulty_world
    plan = {"stage": stage, "tiers": dict.fromkeys(kinds, "disk")}
    found = world.run(_fail_in_mid_run, str(tmp_path), str(flag), fault, plan, ranks=2, timeout_seconds=60)
    assert found[0]["told"] == found[1]["told"]
    for text in ("Rank 1: ", found[1]["path"], " of ", *texts):
        assert text in found[0]["told"]
    for each in found:
        assert "The state is not whole. The disk tier has failed: Rank 1: " in each["saved"]
        assert not each["is_there"]
        assert each.get("is_good", True)
        assert "loaded in part only" in each.get("again", "loaded in part only")


def _train_with_short_counts(folder: str, flag: str) -> bool:
    """Every call moves a block at most: nothing is lost, and no bit is another."""
    model, optimizer, _ = make(folder, stage=3, tiers=ON_DISK)
    plain = make(folder, stage=3)[:2]
    with _failing(flag, "s"):
        for number in range(3):
            step(model, optimizer, number)
    for number in range(3):
        step(*plain, number)
    return all(map(torch.equal, weights(model), weights(plain[0])))


def test_a_disk_that_moves_less_than_it_was_asked_for_changes_no_bit(faulty_world: tuple[World, Path], tmp_path: Path) -> None:
    world, flag = faulty_world
    assert world.run(_train_with_short_counts, str(tmp_path), str(flag), ranks=2, timeout_seconds=60) == [True, True]


# ---------------------------------------------------------------- what one rank does alone


class _Halving(nn.Linear):
    """Writes to its own weights in its forward."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.weight.mul_(0.5)
        return super().forward(x)


def _write_in_vain(folder: str, flag: str, what: str, stage: int) -> list[str]:
    """What is told while rank 1's disk takes nothing, and by the step that comes next."""
    torch.manual_seed(0)
    kind = _Halving if what == "forward" else nn.Linear
    model = nn.Sequential(*(kind(WIDTH, WIDTH, bias=False) for _ in range(DEPTH)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    def begin() -> object:
        return shardwise.shard(
            model, optimizer, units=[nn.Linear, _Halving], folder=folder, stage=stage, tiers={"param": "disk"}
        )

    if what == "shard":
        with _failing(flag, "w"):
            return [refusal(begin)]
    begin()
    values = {name: torch.full((WIDTH, WIDTH), 0.25) for name in ("0.weight", "1.weight", "2.weight", "3.weight")}
    calls = {"user": lambda: model.load_state_dict(values), "cast": model.double, "forward": lambda: None}
    with _failing(flag, "w"):
        first = refusal(calls[what])
        x = torch.ones(1, WIDTH, dtype=torch.float64 if what == "cast" else torch.float32)
        second = refusal(lambda: model(x).sum().backward())
    return [first, second, refusal(lambda: shardwise.save(f"{folder}/bad", model, optimizer))]


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("what", ["user", "forward", "cast", "shard"])
def test_a_write_that_fails_on_one_rank_alone_stops_all_where_they_next_meet(
    faulty_world: tuple[World, Path], tmp_path: Path, what: str, stage: int
) -> None:
    world, flag = faulty_world
    found = world.run(_write_in_vain, str(tmp_path), str(flag), what, stage, ranks=2, timeout_seconds=60)
    assert found[0] == found[1]
    *early, told, saved = ["", *found[0], "The state is not whole."] if what == "shard" else found[0]
    assert early == [""]
    for text in ("Rank 1: ", str(tmp_path), "parameters of", "could not be written", "Input/output error"):
        assert text in told
    assert "The state is not whole." in saved
