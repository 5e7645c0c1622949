"""What the command line does before any rank starts: mistakes are one line, and each exit code has its meaning."""

import argparse
import socket
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import NoReturn

import pytest

from shardwise.cli import jobs, launch, run, train, verify
from shardwise.cli.exits import CommandError, ExitCode, exit_code_of
from shardwise.cli.main import main
from shardwise.core.errors import DesyncError, PlanError, UsageTypeError
from shardwise.recipes.catalog import load_recipe
from shardwise.recipes.config import GPTRecipe

MODULE = """
    def build():
        return None

    number = 3
"""

WRONG_USES = {
    "nothing": ("", ["COMMAND", "shardwise --help"]),
    "unknown-command": ("trian", ["'trian'", "train"]),
    "no-ranks": ("run --ranks 0 job.py", ["--ranks", "1 or more", "'0'", "shardwise run --help"]),
    "ranks-no-number": ("run --ranks two job.py", ["--ranks", "'two'"]),
    "no-script": ("run nowhere/job.py", ["nowhere/job.py"]),
    "script-is-folder": ("run .", ["__main__.py"]),
    "no-module": ("run -m no_such_package.job", ["no_such_package.job"]),
    "no-steps": ("train --steps 0", ["--steps", "1 or more"]),
    "no-stage": ("train --stage 4", ["--stage", "4"]),
    "unknown-recipe": ("train gtp", ["no recipe 'gtp'", "'gpt'"]),
    "unknown-key": ("train --set train.stpes=3", ["no key 'train.stpes'", "'train.steps'"]),
    "key-of-another-recipe": ("train digits --set data.path=x", ["no key 'data.path'"]),
    "ill-typed-key": ("train --set train.steps=many", ["train.steps must be a whole number, 1 or more", "'many'"]),
    "no-sign": ("train --set train.steps", ["KEY=VALUE", "'train.steps'"]),
    "set-twice": ("train --steps 3 --set train.steps=4", ["train.steps", "--steps", "--set"]),
    "no-precision": ("train --precision fp8", ["--precision", "fp8"]),
    "data-missing": ("train --data nowhere.txt", ["nowhere.txt does not exist"]),
    "data-empty": ("train --data empty.txt", ["empty.txt is an empty file"]),
    "data-binary": ("train --data image.png", ["image.png is binary"]),
    "data-short": ("train --data plan.toml", ["plan.toml holds 24 bytes", "model.context"]),
    "data-for-another-recipe": ("train digits --data plan.toml", ["digits brings its own data", "gpt"]),
    "too-many-ranks": ("train --ranks 100000", ["100000 ranks", "can start about", "--ranks"]),
    "no-port": ("train --port 70000", ["--port", "65535", "'70000'"]),
    "old-run": ("train --out old", ["old holds an earlier run", "--force"]),
    "no-run": ("train --out no_run --force", ["no_run holds files", "--out"]),
    "out-is-file": ("train --out plan.toml", ["plan.toml is a file"]),
    "out-below-file": ("train --out plan.toml/run", ["plan.toml", "--out"]),
    "no-shell": ("completion tcsh", ["tcsh"]),
    "no-colon": ("verify cli_user_model.build", ["MODULE:FUNCTION", "cli_user_model.build"]),
    "no-function": ("verify cli_user_model:buidl", ["cli_user_model.py", "'buidl'", "'build'"]),
    "not-callable": ("verify cli_user_model:number", ["cli_user_model:number", "int"]),
    "no-build-module": ("verify no_such_package:build", ["no_such_package"]),
    "no-plan": ("verify cli_user_model:build --plan nowhere.toml", ["nowhere.toml"]),
    "bad-plan": ("verify cli_user_model:build --plan plan.toml", ["'prefetsch'", "'prefetch'"]),
}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A current directory with a user's module and a plan with a mistake; no command may start ranks."""
    (tmp_path / "cli_user_model.py").write_text(textwrap.dedent(MODULE))
    (tmp_path / "cli_needs_more.py").write_text("import no_such_package\n")
    (tmp_path / "cli_broken.py").write_text("1 / 0\n")
    (tmp_path / "plan.toml").write_text("stage = 3\nprefetsch = 2\n")
    (tmp_path / "empty.txt").touch()
    (tmp_path / "image.png").write_bytes(b"\x89PNG\0\0")
    for name, file in (("old", "config.toml"), ("no_run", "thesis.tex")):
        (tmp_path / name).mkdir()
        (tmp_path / name / file).write_text("mine")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    for module in (launch, run, jobs):
        monkeypatch.setattr(module, "launch", refuse_to_start)
    for module in (train, verify):
        monkeypatch.setattr(module, "call_on_ranks", refuse_to_start)
    return tmp_path


def refuse_to_start(*args: object, **options: object) -> NoReturn:
    raise RuntimeError("ranks were started")


def call(line: str) -> int:
    try:
        return main(line.split())
    except SystemExit as error:
        assert isinstance(error.code, int)
        return error.code


def snapshot() -> dict[str, bytes | None]:
    paths = (path for path in Path().rglob("*") if "__pycache__" not in path.parts)
    return {str(path): path.read_bytes() if path.is_file() else None for path in paths}


@pytest.mark.parametrize(("line", "words"), WRONG_USES.values(), ids=WRONG_USES.keys())
def test_wrong_use_is_one_clear_line(line: str, words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    before = snapshot()
    assert call(line) == ExitCode.WRONG_USE
    out, err = capsys.readouterr()
    assert out == ""
    assert len(err.splitlines()) == 1, err
    assert all(word in err for word in words), err
    assert snapshot() == before, "something was written"


def test_taken_port_is_refused_before_anything_is_written(capsys: pytest.CaptureFixture[str]) -> None:
    before = snapshot()
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert call(f"train --port {port}") == ExitCode.WRONG_USE
    assert f"Port {port} is in use" in capsys.readouterr().err
    assert snapshot() == before


def test_interrupt_before_ranks_start_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupt(*args: object, **options: object) -> NoReturn:
        raise KeyboardInterrupt

    monkeypatch.setattr(train, "call_on_ranks", interrupt)
    assert call("train digits") == 130
    assert capsys.readouterr().err == "shardwise: Stopped by SIGINT: nothing was started.\n"


def test_show_prints_a_recipe_that_repeats_the_effective_values(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "book.txt").write_text("text")
    assert call("train gpt --steps 7 --seed 3 --data book.txt --set model.width=64 --set model.num_heads=4 --show") == 0
    (folder / "own.toml").write_text(capsys.readouterr().out)
    recipe = load_recipe("own.toml")
    assert isinstance(recipe, GPTRecipe)
    assert (recipe.train.steps, recipe.seed, recipe.model.width, recipe.model.num_heads) == (7, 3, 64, 4)
    assert recipe.data.path == str(folder / "book.txt")  # absolute: it means the same from everywhere
    assert not (folder / "runs").exists()


def test_command_line_answers_without_torch() -> None:
    """To import it takes seconds, and a shell that completes a word would wait for it."""
    lines = ["--help", "--version", "train --help", "completion bash", "train --show", "train --data nowhere.txt"]
    for line in lines:
        script = f"""
            import sys
            from shardwise.cli.main import main
            try:
                main({line.split()!r})
            except SystemExit:
                pass
            assert "torch" not in sys.modules
        """
        subprocess.run([sys.executable, "-c", textwrap.dedent(script)], check=True, capture_output=True)


@pytest.mark.parametrize("line", ["--debug verify nope:build", "verify --debug nope:build"])
def test_debug_may_stand_before_or_after_the_command(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(line) == ExitCode.WRONG_USE
    assert "Traceback" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("module", "words"),
    [("cli_needs_more", ["no_such_package", "cli_needs_more"]), ("cli_broken", ["ZeroDivisionError", "Traceback", "1 / 0"])],
)
def test_module_that_fails_is_a_failure_not_wrong_use(
    module: str, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(f"verify {module}:build") == ExitCode.FAILED
    err = capsys.readouterr().err
    assert all(word in err for word in words), err


def test_arguments_after_the_script_are_its_own(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started = []
    monkeypatch.setattr(run, "launch", lambda command, num_ranks, **options: started.append((command[2:], num_ranks)))
    (folder / "job.py").touch()
    assert call("run --ranks 3 job.py --ranks 5 -m --debug") == ExitCode.DONE
    assert call("run -m cli_user_model -x") == ExitCode.DONE
    assert started == [(["job.py", "--ranks", "5", "-m", "--debug"], 3), (["-m", "cli_user_model", "-x"], 2)]


@pytest.mark.parametrize(
    ("error", "exit_code"),
    [
        (PlanError("contradiction"), 2),
        (UsageTypeError("no module"), 2),
        (DesyncError("rank 1 is elsewhere"), 1),
        (CommandError("too big", ExitCode.WILL_NOT_FIT), 3),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else str(value),
)
def test_exit_code_follows_the_kind_of_error(error: Exception, exit_code: int) -> None:
    assert exit_code_of(error) == exit_code


def test_verify_says_equal_or_different_by_exit_code(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for is_equal, exit_code in ((True, ExitCode.DONE), (False, ExitCode.FAILED)):
        verdict = {"is_equal": is_equal, "text": f"equal is {is_equal}", "values": {}}
        monkeypatch.setattr(verify, "call_on_ranks", lambda *args, verdict=verdict, **options: verdict)
        assert call("verify cli_user_model:build") == exit_code
        assert capsys.readouterr().out == f"equal is {is_equal}\n"


def test_verify_takes_stage_3_unless_a_plan_or_stage_is_given(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "plan.toml").write_text("stage = 1\n")
    asked: list[argparse.Namespace] = []

    def answer(job: jobs.Job, *args: object, **options: object) -> dict[str, object]:
        asked.append(argparse.Namespace(**job.arguments))
        return {"is_equal": True, "text": "", "values": {}}

    monkeypatch.setattr(verify, "call_on_ranks", answer)
    for options in ("", "--stage 1", "--plan plan.toml", "--plan plan.toml --stage 2"):
        assert call(f"verify cli_user_model:build {options}") == ExitCode.DONE
    assert [each.stage for each in asked] == [3, 1, None, 2]
    assert [each.plan and each.plan["stage"] for each in asked] == [None, None, 1, 1]
