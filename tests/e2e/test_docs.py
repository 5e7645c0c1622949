"""What the documents say is run."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from shardwise.cli.main import build_parser
from shardwise.cli.train import read_settings
from shardwise.recipes.catalog import load_recipe

ROOT = Path(__file__).parents[2]
GUIDE = ROOT / "docs/guide"
PAGES = sorted(GUIDE.glob("*.md"))
NUM_PYTHON_BLOCKS_MIN = 14


def blocks(path: Path, language: str = "python") -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", path.read_text(encoding="utf-8"), re.DOTALL)


def run(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_page_of_the_guide_runs_from_top_to_bottom(page: Path) -> None:
    namespace: dict[str, object] = {}
    for block in blocks(page):
        exec(block, namespace)


def test_guide_is_not_empty() -> None:
    assert sum(len(blocks(page)) for page in PAGES) >= NUM_PYTHON_BLOCKS_MIN


def test_links_of_the_documents_lead_somewhere() -> None:
    for page in (*PAGES, ROOT / "README.md", ROOT / "docs/architecture.md"):
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text(encoding="utf-8")):
            assert (page.parent / target).exists(), f"{page.name} leads to {target}"


def test_commands_of_the_documents_are_understood() -> None:
    """Each is read by the parser, and its recipe and values are checked; what it would start is run elsewhere."""
    found = 0
    for page in (*PAGES, ROOT / "README.md"):
        for line in "\n".join(blocks(page, "sh")).splitlines():
            command = shlex.split(line, comments=True)
            if command[:1] == ["shardwise"]:
                args = build_parser().parse_args(command[1:])
                found += 1
                if command[1] == "train":
                    load_recipe(args.recipe or "gpt", read_settings(args))
    assert found >= 8


@pytest.mark.e2e
def test_the_diff_of_the_guide_turns_a_plain_script_into_a_sharded_one(tmp_path: Path) -> None:
    (diff,) = blocks(GUIDE / "index.md", "diff")
    for name, signs in (("plain.py", " -"), ("sharded.py", " +")):
        lines = [line[1:] for line in diff.splitlines() if line[:1] in signs]
        (tmp_path / name).write_text("\n".join(lines) + "\n", encoding="utf-8")
    assert run([sys.executable, str(tmp_path / "plain.py")]).count("loss") == 1
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    assert run([*torchrun, str(tmp_path / "sharded.py")]).count("loss") == 2


@pytest.mark.e2e
def test_the_readme_example_runs_on_two_ranks(tmp_path: Path) -> None:
    (example,) = blocks(ROOT / "README.md")
    script = tmp_path / "script.py"
    script.write_text(example + "\nprint('final loss', loss.item())\n", encoding="utf-8")
    assert run([sys.executable, "-m", "shardwise", "run", "--ranks", "2", str(script)]).count("final loss") == 2
