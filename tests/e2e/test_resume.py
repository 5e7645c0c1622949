"""``shardwise train --resume`` goes on where a run was ended, with the same numbers; ``shardwise checkpoint`` shows what is there."""

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.commands import END_SECONDS, descendants, finish, shardwise, start
from tests.e2e.test_train import TINY, await_steps, needs_proc

pytestmark = pytest.mark.e2e
SAVING = [*TINY, "--set", "train.save_every=4", "--set", "train.keep_last=3"]


def metrics_of(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def steps_recorded(run: Path, rank: int) -> list[int]:
    lines = (run / "ranks" / f"{rank}.jsonl").read_text().splitlines()
    return [line["step"] for line in map(json.loads, lines) if line["is"] == "step"]


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that nobody disturbed: 30 steps."""
    folder = tmp_path_factory.mktemp("straight")
    answer = shardwise(*SAVING, "--steps", "30", "--out", "run", folder=folder)
    assert answer.exit_code == 0, answer.stderr
    assert "Checkpoint: run/checkpoints/step-000030" in answer.stdout
    return folder / "run"


@needs_proc
def test_killed_run_goes_on_with_the_same_numbers(straight: Path, tmp_path: Path) -> None:
    process = start(*SAVING, "--steps", "30", "--out", "runs/gpt-1", folder=tmp_path)
    (tmp_path / "run").symlink_to(tmp_path / "runs" / "gpt-1")
    await_steps(process, tmp_path, 14)
    ranks = [pid for pid in descendants(process.pid) if b"RANK=1" in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")]
    os.kill(ranks[0], signal.SIGKILL)
    assert finish(process, tmp_path, END_SECONDS).exit_code == 1
    answer = shardwise("train", "--resume", "--json", folder=tmp_path)
    assert answer.exit_code == 0, answer.stderr
    assert "Going on after step" in answer.stderr and "runs/gpt-1/checkpoints/step-" in answer.stderr
    assert metrics_of(tmp_path / "run") == metrics_of(straight)
    expected = json.loads((straight / "result.json").read_text())
    found = json.loads((tmp_path / "run" / "result.json").read_text())
    for key in ("first_loss", "last_loss", "validation_loss", "accuracy", "steps", "sample"):
        assert found[key] == expected[key], key
    for rank in range(2):
        assert steps_recorded(tmp_path / "run", rank) == list(range(1, 31))
    kept = sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir())
    assert kept == ["step-000024", "step-000028", "step-000030"]


def test_run_goes_on_with_more_steps_ranks_and_another_stage(straight: Path, tmp_path: Path) -> None:
    answer = shardwise(*SAVING, "--steps", "8", "--out", "run", folder=tmp_path)
    assert answer.exit_code == 0, answer.stderr
    done = shardwise("train", "--resume", "run", folder=tmp_path)
    assert done.exit_code == 2 and "has done its 8 steps" in done.stderr and "--steps 16" in done.stderr
    before = (tmp_path / "run" / "config.toml").read_text()
    wrong = shardwise("train", "--resume", "run", "--steps", "10", "--set", "model.num_blocks=3", folder=tmp_path)
    assert wrong.exit_code == 1 and "does not fit: not in it: blocks.2." in wrong.stderr
    assert (tmp_path / "run" / "config.toml").read_text() == before and (tmp_path / "run" / "result.json").exists()
    more = shardwise("train", "--resume", "run", "--steps", "10", "--ranks", "1", "--stage", "1", "--json", folder=tmp_path)
    assert more.exit_code == 0, more.stderr
    assert json.loads(more.stdout)["steps"] == 10
    assert [line["step"] for line in metrics_of(tmp_path / "run") if "loss" in line] == list(range(1, 11))


def test_wrong_resumes_are_refused(straight: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for arguments, text in [
        (["--resume"], "No run in runs/ has a checkpoint"),
        (["--resume", "nowhere"], "is no run folder"),
        (["--resume", "empty"], "is no run folder"),
        (["digits", "--resume", str(straight)], "leave digits out"),
        (["--resume", str(straight), "--out", "x"], "leave --out and --force out"),
    ]:
        answer = shardwise("train", *arguments, folder=tmp_path)
        assert answer.exit_code == 2 and text in answer.stderr, answer.stderr
        assert answer.stderr.count("\n") == 1


_ENDING = """
import sys, torch, shardwise
torch.distributed.init_process_group("gloo")
model = torch.nn.Sequential(*(torch.nn.Linear(800, 800) for _ in range(4)))
optimizer = torch.optim.AdamW(model.parameters())
shardwise.shard(model, optimizer, stage=3)
model(torch.ones(1, 800)).sum().backward()
optimizer.step()
shardwise.save("last", model, optimizer, wait=False)
torch.distributed.destroy_process_group()
"""


def test_ranks_that_end_bring_their_save_to_its_end(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(_ENDING)
    answer = shardwise("run", "--ranks", "2", "script.py", folder=tmp_path)
    assert answer.exit_code == 0, answer.stderr
    found = shardwise("checkpoint", "verify", "last", "--json", folder=tmp_path)
    assert json.loads(found.stdout) == {"last": {"is_whole": True, "error": None}}
