"""`shardwise train` as users meet it: what it trains, what it leaves in its folder, and how it ends."""

import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from shardwise.recipes.catalog import load_recipe
from tests.e2e.commands import END_SECONDS, TIMEOUT_SECONDS, descendants, finish, is_running, shardwise, start

pytestmark = pytest.mark.e2e

TINY_SETTINGS = {
    "model.width": 32,
    "model.num_heads": 2,
    "model.num_blocks": 2,
    "model.context": 32,
    "data.max_bytes": 1_000_000,
    "data.eval_batches": 2,
    "sample.num_bytes": 30,
    "train.learning_rate": 0.01,
    "train.eval_every": 5,
}
TINY = ["train", "gpt", *(text for key, value in TINY_SETTINGS.items() for text in ("--set", f"{key}={value}"))]
FOREVER = [*TINY, "--steps", "1000000"]
needs_proc = pytest.mark.skipif(sys.platform != "linux", reason="the ranks of a command are found in /proc")


def await_steps(process: subprocess.Popen[str], folder: Path, num_steps: int) -> None:
    """Wait until a run has done some steps."""
    deadline = time.monotonic() + TIMEOUT_SECONDS
    metrics = folder / "run" / "metrics.jsonl"
    while not metrics.exists() or len(metrics.read_text().splitlines()) < num_steps:
        if process.poll() is not None or time.monotonic() > deadline:
            process.terminate()
            raise RuntimeError(f"The run did not begin:\n{(folder / 'stderr').read_text()}")
        time.sleep(0.1)


def test_run_leaves_a_folder_from_which_it_can_be_repeated(tmp_path: Path) -> None:
    answer = shardwise(*TINY, "--steps", "12", "--json", "--out", "run", folder=tmp_path)
    assert answer.exit_code == 0, answer.stderr
    result = json.loads(answer.stdout)
    assert result["first_loss"] == pytest.approx(math.log(256), abs=0.3)  # a new model knows nothing
    assert result["last_loss"] < result["first_loss"] - 0.5
    assert result["validation_loss"] < result["first_loss"] - 0.5
    assert result["sample"].startswith("def ")
    assert json.loads((tmp_path / "run" / "result.json").read_text()) == {
        key: value for key, value in result.items() if key not in ("folder", "report")
    }
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "loss" in line] == list(range(1, 13))
    assert [line["step"] for line in lines if "validation_loss" in line] == [5, 10, 12]
    recipe = load_recipe(str(tmp_path / "run" / "config.toml"))
    assert recipe.hash == result["recipe"]
    # Without a terminal: plain lines, no control sequences; the effective values and their hash stand on the screen.
    assert f"hash {recipe.hash}" in answer.stderr
    assert "model  vocab_size = 256, context = 32, width = 32" in answer.stderr
    assert "step 12/12  loss " in answer.stderr
    assert "\x1b" not in answer.stderr

    again = shardwise("train", "run/config.toml", "--out", "again", folder=tmp_path)
    assert again.exit_code == 0, again.stderr
    assert (tmp_path / "again" / "metrics.jsonl").read_text() == (tmp_path / "run" / "metrics.jsonl").read_text()
    assert "plain DDP (computed)" in again.stdout
    assert "Run folder: again" in again.stdout


def test_digits_are_read_with_over_95_percent_accuracy(tmp_path: Path) -> None:
    answer = shardwise("train", "digits", "--ranks", "2", "--json", folder=tmp_path)
    assert answer.exit_code == 0, answer.stderr
    result = json.loads(answer.stdout)
    assert result["accuracy"] > 0.95
    assert (tmp_path / result["folder"] / "result.json").is_file()
    assert result["folder"].startswith("runs/digits-")


def test_own_text_is_learned(tmp_path: Path) -> None:
    (tmp_path / "book.txt").write_text("To be, or not to be, that is the question. " * 200)
    answer = shardwise(*TINY, "--data", "book.txt", "--steps", "60", "--ranks", "1", "--json", folder=tmp_path)
    assert answer.exit_code == 0, answer.stderr
    assert json.loads(answer.stdout)["validation_loss"] < 2.0  # any English text takes far longer: it has read this one


@needs_proc
def test_interrupt_ends_all_ranks_and_says_how_to_go_on(tmp_path: Path) -> None:
    process = start(*FOREVER, "--set", "train.save_every=0", "--out", "run", folder=tmp_path)
    await_steps(process, tmp_path, 3)
    ranks = descendants(process.pid)
    assert len(ranks) >= 2
    for _ in range(2):  # as impatient people do
        process.send_signal(signal.SIGINT)
        time.sleep(0.1)
    answer = finish(process, tmp_path, END_SECONDS)
    assert answer.exit_code == 128 + signal.SIGINT
    (line,) = answer.stderr.splitlines()
    assert line.startswith("shardwise: Stopped by SIGINT: all ranks were ended.")
    assert "of 1000000 steps were done" in line
    assert "no checkpoint was saved yet" in line
    assert line.endswith("shardwise train run/config.toml")
    assert not any(is_running(pid) for pid in ranks)
    assert load_recipe(str(tmp_path / "run" / "config.toml")).train.steps == 1_000_000
    assert not (tmp_path / "run" / "result.json").exists()


@needs_proc
def test_killed_rank_is_named_with_the_largest_items_of_its_ledger(tmp_path: Path) -> None:
    process = start(*FOREVER, "--out", "run", folder=tmp_path)
    await_steps(process, tmp_path, 3)
    ranks = descendants(process.pid)
    victim = next(pid for pid in ranks if b"RANK=1" in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"))
    os.kill(victim, signal.SIGKILL)
    answer = finish(process, tmp_path, END_SECONDS)
    assert answer.exit_code == 1
    said = answer.stderr.splitlines()[-1]
    assert said.startswith("shardwise: rank 1 of 2 was killed by SIGKILL. This is how a machine that runs out of memory")
    assert re.search(r"The largest items of the ledger of rank 1: [a-z ]+ [0-9.]+ KiB, [a-z ]+ [0-9.]+ KiB", said)
    assert not any(is_running(pid) for pid in ranks)


@needs_proc
def test_end_of_memory_names_the_rank_and_the_largest_items_of_its_ledger(tmp_path: Path) -> None:
    """A layer that answers with 40 GB, in processes that may have 12."""
    wide = ["--set", "model.width=1000000", "--set", "model.dim=1", "--set", "train.batch_size=10000"]
    small = ["--set", "data.num_users=1000", "--set", "data.num_items=100"]
    process = start("train", "embeddings", *wide, *small, "--out", "run", folder=tmp_path, limit_bytes=12 * 1024**3)
    answer = finish(process, tmp_path)
    assert answer.exit_code == 1
    (said,) = answer.stderr.splitlines()
    assert said.startswith("shardwise: rank ")
    assert "out of memory in step 1" in said
    assert "The largest items of its ledger: gathered parameters " in said
    assert "--set train.batch_size=N" in said


def test_old_run_is_replaced_on_request_only(tmp_path: Path) -> None:
    command = ["train", "embeddings", "--ranks", "1", "--steps", "2", "--out", "run"]
    for extra, exit_code in (([], 0), ([], 2), (["--force", "--seed", "1"], 0)):
        answer = shardwise(*command, *extra, folder=tmp_path)
        assert answer.exit_code == exit_code, answer.stderr
    assert load_recipe(str(tmp_path / "run" / "config.toml")).seed == 1
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) == 3  # two steps and an evaluation
