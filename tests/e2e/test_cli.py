"""The command line as users meet it: real processes, exit codes, what stands on the screen, and nothing left running."""

import json
import signal
import subprocess
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.commands import END_SECONDS, TIMEOUT_SECONDS, Answer, finish, is_running, shardwise, start

pytestmark = pytest.mark.e2e

SCRIPT_HEAD = """
    import os, signal, sys, time
    import torch, torch.distributed as dist
    import shardwise

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    os.write(1, f"rank {rank} is process {os.getpid()}\\n".encode())  # In one piece: ranks share the pipe.
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    shardwise.shard(model, optimizer, stage=3)

    def train_step():
        loss = model(torch.ones(4, 8)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()
"""
TRAINS = """
    losses = [train_step() for _ in range(4)]
    # In one piece: ranks write to one file, and print writes a line's end by itself.
    told = f"rank {rank} got {sys.argv[1:]} and {os.environ['OMP_NUM_THREADS']} thread: loss falls is {losses[-1] < losses[0]}"
    sys.stdout.write(told + "\\n")
    dist.destroy_process_group()
"""
FAILS_ON_RANK_1 = """
    for step in range(1_000_000):
        if rank == 1 and step == 2:
            raise RuntimeError("a planted fault")
        train_step()
"""
TRAINS_FOREVER = """
    train_step()
    print("ready", flush=True)
    while True:
        train_step()
"""
IGNORES_INTERRUPTS = """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    print("ready", flush=True)
    time.sleep(1_000_000)
"""
MODULE = """
    import torch

    def build():
        print("the user's own line")
        model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))
        batches = [torch.randn(4, 8) for _ in range(3)]
        return model, torch.optim.AdamW(model.parameters()), batches, lambda model, batch: model(batch).square().mean()

    def build_differently():
        model, optimizer, batches, _ = build()
        # No sharded run can be equal to one with other numbers in every call.
        return model, optimizer, batches, lambda model, batch: model(batch + next(counter)).square().mean()

    counter = iter(range(1_000_000))
"""


def write_script(folder: Path, body: str) -> str:
    (folder / "job.py").write_text(textwrap.dedent(SCRIPT_HEAD) + textwrap.dedent(body))
    return "job.py"


def await_ready(process: subprocess.Popen[str], folder: Path, num_ranks: int) -> None:
    deadline = time.monotonic() + TIMEOUT_SECONDS
    while (folder / "stdout").read_text().count("ready") < num_ranks:
        if process.poll() is not None or time.monotonic() > deadline:
            process.terminate()
            raise RuntimeError(f"The ranks did not get ready:\n{(folder / 'stderr').read_text()}")
        time.sleep(0.1)


QUICK: dict[str, tuple[str, ...]] = {
    "help": ("--help",),
    "version": ("--version",),
    "run-help": ("run", "--help"),
    "train-help": ("train", "--help"),
    "verify-help": ("verify", "--help"),
    "no-script": ("run", "nowhere/job.py"),
    "no-function": ("verify", "user_model:buidl"),
    "too-many-ranks": ("run", "--ranks", "100000", "user_model.py"),
    "no-recipe": ("train", "gtp"),
    "debug": ("verify", "--debug", "user_model:buidl"),
}


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Answer]]:
    """Answers of the commands that start no ranks. They run two at a time: each spends its time importing torch."""
    answers: dict[str, Answer] = {}
    names = list(QUICK)
    for pair in zip(names[::2], names[1::2], strict=True):
        folders = {name: tmp_path_factory.mktemp(name) for name in pair}
        for folder in folders.values():
            (folder / "user_model.py").write_text(textwrap.dedent(MODULE))
        processes = {name: start(*QUICK[name], folder=folder) for name, folder in folders.items()}
        answers |= {name: finish(process, folders[name]) for name, process in processes.items()}
    yield answers


@pytest.mark.parametrize("name", ["help", "run-help", "train-help", "verify-help"])
def test_help_has_an_example(quick: dict[str, Answer], name: str) -> None:
    answer = quick[name]
    assert (answer.exit_code, answer.stderr) == (0, "")
    assert "example:\n  shardwise " in answer.stdout
    assert max(map(len, answer.stdout.splitlines())) <= 120


def test_version_names_torch_as_well(quick: dict[str, Answer]) -> None:
    import torch

    import shardwise as package

    answer = quick["version"]
    assert answer.exit_code == 0
    assert answer.stdout.startswith(f"shardwise {package.__version__} (torch {torch.__version__}, Python ")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("no-script", ["nowhere/job.py"]),
        ("no-function", ["user_model.py", "'buidl'", "'build'"]),
        ("too-many-ranks", ["100000 ranks", "can start about"]),
        ("no-recipe", ["'gtp'", "'gpt'"]),
    ],
    ids=["no-script", "no-function", "too-many-ranks", "no-recipe"],
)
def test_wrong_use_is_one_clear_line(quick: dict[str, Answer], name: str, words: list[str]) -> None:
    answer = quick[name]
    assert (answer.exit_code, answer.stdout) == (2, "")
    assert len(answer.stderr.splitlines()) == 1, answer.stderr
    assert all(word in answer.stderr for word in words), answer.stderr


def test_debug_shows_the_traceback(quick: dict[str, Answer]) -> None:
    answer = quick["debug"]
    assert answer.exit_code == 2
    assert "Traceback" in answer.stderr
    assert "load_function" in answer.stderr


def test_run_trains_a_script_on_all_ranks(tmp_path: Path) -> None:
    answer = shardwise("run", "--ranks", "2", write_script(tmp_path, TRAINS), "--rate", "3", "--ranks", folder=tmp_path)
    assert (answer.exit_code, answer.stderr) == (0, "")
    lines = [line for line in answer.stdout.splitlines() if "got" in line]
    said = "got ['--rate', '3', '--ranks'] and 1 thread: loss falls is True"
    assert sorted(lines) == [f"rank 0 {said}", f"rank 1 {said}"]


def test_run_names_the_rank_that_failed(tmp_path: Path) -> None:
    answer = shardwise(
        "run", "--ranks", "2", "-m", write_script(tmp_path, FAILS_ON_RANK_1).removesuffix(".py"), folder=tmp_path
    )
    assert answer.exit_code == 1
    assert answer.stderr.splitlines()[-1] == "shardwise: rank 1 of 2 failed with exit code 1."
    assert "RuntimeError: a planted fault" in answer.stderr
    assert len(answer.pids) == 2
    assert not any(is_running(pid) for pid in answer.pids)


@pytest.mark.parametrize(
    ("body", "num_interrupts"), [(TRAINS_FOREVER, 1), (IGNORES_INTERRUPTS, 3)], ids=["training", "stubborn"]
)
def test_interrupt_ends_all_ranks(tmp_path: Path, body: str, num_interrupts: int) -> None:
    process = start("run", "--ranks", "2", write_script(tmp_path, body), folder=tmp_path)
    await_ready(process, tmp_path, num_ranks=2)
    for _ in range(num_interrupts):
        process.send_signal(signal.SIGINT)
        time.sleep(0.2)
    answer = finish(process, tmp_path, END_SECONDS)
    assert answer.exit_code == 128 + signal.SIGINT
    assert answer.stderr.splitlines()[-1] == "shardwise: Stopped by SIGINT: all ranks were ended."
    assert len(answer.pids) == 2
    assert not any(is_running(pid) for pid in answer.pids)


def test_verify_finds_equal_bits(tmp_path: Path) -> None:
    (tmp_path / "user_model.py").write_text(textwrap.dedent(MODULE))
    answer = shardwise("verify", "user_model:build", "--stage", "3", "--json", folder=tmp_path)
    assert answer.exit_code == 0, answer.stderr
    verdict = json.loads(answer.stdout)
    assert (verdict["equal"], verdict["stage"], verdict["num_ranks"]) == (True, 3, 2)
    assert verdict["first_difference"] is None
    assert "the user's own line" in answer.stderr


def test_verify_names_the_first_difference(tmp_path: Path) -> None:
    (tmp_path / "user_model.py").write_text(textwrap.dedent(MODULE))
    answer = shardwise("verify", "user_model:build_differently", "--steps", "1", "--ranks", "1", folder=tmp_path)
    assert answer.exit_code == 1
    assert answer.stdout.splitlines()[-1].startswith("Different: stage 3")
    assert "after step 1" in answer.stdout
    assert answer.stderr == ""
