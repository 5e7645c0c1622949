"""What the documents say is run."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def blocks(path: Path) -> list[str]:
    return re.findall(r"```python\n(.*?)```", path.read_text(encoding="utf-8"), re.DOTALL)


def test_the_guide_runs_from_top_to_bottom() -> None:
    found = blocks(ROOT / "docs/guide/index.md")
    assert len(found) > 8
    namespace: dict[str, object] = {}
    for block in found:
        exec(block, namespace)


@pytest.mark.e2e
def test_the_readme_example_runs_on_two_ranks(tmp_path: Path) -> None:
    (example,) = blocks(ROOT / "README.md")
    script = tmp_path / "script.py"
    script.write_text(example + "\nprint('final loss', loss.item())\n", encoding="utf-8")
    command = [sys.executable, "-m", "shardwise", "run", "--ranks", "2", str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    assert (done.stdout + done.stderr).count("final loss") == 2
