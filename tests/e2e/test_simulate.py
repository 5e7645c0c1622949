"""``shardwise run --simulate``: a user's own script on devices of a size that is not there."""

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.e2e

SCRIPT = """
import sys
import torch
import torch.distributed as dist
import shardwise

dist.init_process_group("nccl")
device = torch.accelerator.current_accelerator()
torch.manual_seed(0)
model = torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(8))).to(device)
optimizer = torch.optim.AdamW(model.parameters())
shardwise.shard(model, optimizer, stage=int(sys.argv[1]))
for _ in range(2):
    model(torch.randn(4, 256, device=device)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
print("done on", torch.zeros(1, device=device).device)
dist.destroy_process_group()
"""


def _run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    script = folder / "train.py"
    script.write_text(SCRIPT)
    command = [sys.executable, "-m", "shardwise", "run", *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300, check=False)


def test_a_script_that_fits_runs_and_tells_what_it_held(tmp_path: Path) -> None:
    done = _run(tmp_path, "--simulate", "2x8MiB", "train.py", "3")
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.split("\n"))[-2:] == ["done on sim:0", "done on sim:1"]
    for rank in range(2):
        assert f"rank {rank}: sim:{rank} held at most" in done.stderr
        assert "of 8 MiB" in done.stderr


def test_a_script_that_does_not_fit_says_what_would(tmp_path: Path) -> None:
    done = _run(tmp_path, "--simulate", "2x6MiB", "train.py", "0")
    assert done.returncode == 3, done.stderr
    assert "rank 0: at train.py, line " in done.stderr
    assert "is out of memory" in done.stderr
    assert "It would fit with stage=" in done.stderr
    assert "It does not fit on 2x6MiB" in done.stderr


def test_a_script_that_names_cuda_is_told_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "fixed.py").write_text("import torch\ntorch.zeros(3).to('cuda')\n")
    done = _run(tmp_path, "--simulate", "1x8MiB", "fixed.py")
    assert done.returncode == 1
    assert "torch.accelerator.current_accelerator()" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--simulate", "8GiB", "train.py"), "such as 4x8GiB"),
        (("--simulate", "2x8Gib", "train.py"), "Expected a size such as"),
        (("--simulate", "0x8GiB", "train.py"), "such as 4x8GiB"),
        (("--simulate", "2x8GiB", "--ranks", "3", "train.py"), "a rank for each of 2 devices"),
    ],
)
def test_wrong_sizes_are_refused(tmp_path: Path, arguments: tuple[str, ...], message: str) -> None:
    done = _run(tmp_path, *arguments)
    assert done.returncode == 2
    assert message in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
