"""Shells complete what the parser knows."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from shardwise.cli.completion import WRITERS, read_commands
from shardwise.cli.main import build_parser, main

CASES = {
    "commands": ("", {"train", "report", "run", "verify", "checkpoint", "doctor", "completion"}),
    "part-of-a-command": ("tr", {"train"}),
    "options": ("train --st", {"--stage", "--steps"}),
    "values": ("train --stage ", {"0", "1", "2", "3"}),
    "precision": ("train gpt --precision b", {"bf16"}),
    "recipes": ("train dig", {"digits"}),
    "shells": ("completion z", {"zsh"}),
    "free-value": ("train --steps ", set()),
    "files": ("train --data bo", {"book.txt"}),
    "before-commands": ("--ver", {"--version"}),
}


def complete_in_bash(line: str, folder: Path) -> set[str]:
    words = ["shardwise", *line.split(" ")]
    array = " ".join(f"'{word}'" for word in words)
    script = f"""
        source completion.bash
        COMP_WORDS=({array}); COMP_CWORD={len(words) - 1}
        _shardwise
        printf '%s\\n' "${{COMPREPLY[@]}}"
    """
    done = subprocess.run(["bash", "-c", script], cwd=folder, capture_output=True, text=True, check=True)
    assert done.stderr == ""
    return set(done.stdout.split())


@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash here")
@pytest.mark.parametrize(("line", "expected"), CASES.values(), ids=CASES.keys())
def test_bash_completes(line: str, expected: set[str], tmp_path: Path) -> None:
    (tmp_path / "completion.bash").write_text(WRITERS["bash"](read_commands(build_parser())))
    (tmp_path / "book.txt").touch()
    assert complete_in_bash(line, tmp_path) == expected


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_other_shells_accept_the_script(shell: str, tmp_path: Path) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"there is no {shell} here")
    path = tmp_path / "script"
    path.write_text(WRITERS[shell](read_commands(build_parser())))
    subprocess.run([shell, "--no-execute" if shell == "fish" else "-n", str(path)], check=True)


@pytest.mark.parametrize("shell", WRITERS)
def test_every_option_of_every_command_is_there(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", shell]) == 0
    script = capsys.readouterr().out
    for command in read_commands(build_parser()):
        assert command.name in script
        for option in command.options:
            for name in option.names:
                bare = name.lstrip("-") if shell == "fish" else name
                assert re.search(rf"(?<![\w-]){re.escape(bare)}(?![\w-])", script), f"{shell} does not know {name}"
