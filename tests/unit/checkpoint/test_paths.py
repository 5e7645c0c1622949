"""Paths that lead nowhere (closed folders, files where folders should be) are told in one line, with the exit code of wrong use."""

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

import shardwise
from shardwise.cli.main import main
from shardwise.core.errors import PathError
from tests.unit.privileges import as_nobody

ACTIONS = {
    "inspect": ["inspect", "PATH"],
    "verify": ["verify", "PATH"],
    "prune": ["prune", "PATH", "--keep-last", "2"],
    "hf": ["export", "PATH", "out-hf"],
    "torch": ["export", "PATH", "out-torch", "--to", "torch"],
    "dcp": ["export", "PATH", "out-dcp", "--to", "dcp"],
    "import": ["import", "PATH", "out-import"],
}
TARGETS = {"hf": "hf", "torch": "torch", "dcp": "dcp"}


def new_training() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    shardwise.shard(model, optimizer, stage=1)
    return model, optimizer


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    """Folders that others may enter: ``good`` with two checkpoints, and copies of it that are closed in some way."""
    folder = Path(tempfile.mkdtemp())
    training = new_training()
    for name in ("first", "second"):
        shardwise.save(folder / "good" / name, *training)
    shutil.copytree(folder / "good", folder / "run" / "checkpoints")
    (folder / "run" / "config.toml").write_text("")
    for name in ("closed", "half", "listed", "read-only"):
        shutil.copytree(folder / "good", folder / name)
    shutil.copytree(folder / "run", folder / "closed-run")
    shutil.copytree(folder / "run", folder / "half-run")
    (folder / "file").write_text("text")
    modes = {"closed": 0, "half/second": 0, "listed": 0o644, "read-only": 0o555, "closed-run": 0, "half-run/checkpoints": 0}
    for name, mode in modes.items():
        (folder / name).chmod(mode)
    folder.chmod(0o777)
    yield folder
    for name in modes:
        (folder / name).chmod(0o755)
    shutil.rmtree(folder)


@pytest.fixture
def command(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):  # type: ignore[no-untyped-def]
    """Runs a command as an ordinary user; returns its exit code and what it said."""
    monkeypatch.chdir(folder)

    def run(*arguments: str) -> tuple[int, str]:
        with as_nobody():
            exit_code = main(list(arguments))
        return exit_code, capsys.readouterr().err

    # All that commands import must be there already: an ordinary user may not be allowed to read the libraries.
    main(["train", "--resume", "nowhere"])
    for name, action in ACTIONS.items():
        path = "out-hf" if name == "import" else "good"
        main(["checkpoint", *(word.replace("PATH", path) for word in action)])
    capsys.readouterr()
    yield run
    for left in folder.glob("out-*"):
        left.unlink() if left.is_file() else shutil.rmtree(left)


def test_paths_that_cannot_be_followed_are_wrong_use(command, folder: Path) -> None:  # type: ignore[no-untyped-def]
    for path, why in {
        "closed": "closed cannot be looked into: Permission denied",
        "closed/first": "closed/first cannot be looked into: Permission denied",
        "listed": r"listed/first/manifest.json cannot be read: Permission denied",
        "file": "file is no folder",
        "file/below": "a part of the path is a file",
    }.items():
        for name, action in ACTIONS.items():
            words = [word.replace("PATH", path).replace("out-", "out-new-") for word in action]
            exit_code, text = command("checkpoint", *words)
            assert text.count("\n") == 1 and not list(folder.glob("out-new-*")), (words, text)
            if (name, path) == ("verify", "listed"):  # It says of each checkpoint whether it is whole.
                assert exit_code == 1 and why in text
            else:
                assert exit_code == 2 and (name == "import" or why in text), (words, text)


def test_targets_that_cannot_be_made_are_wrong_use(command, folder: Path) -> None:  # type: ignore[no-untyped-def]
    for target, why in {
        "closed/new": "Permission denied", "closed/new/deep": "Permission denied", "read-only/new": "Permission denied",
        "listed/new": "Permission denied", "file": "there already", "file/new": "A part of the path is a file",
    }.items():  # fmt: skip
        for words in (["import", "out-hf", target], *(["export", "good", target, "--to", to] for to in TARGETS.values())):
            exit_code, text = command("checkpoint", *words)
            assert exit_code == 2 and text.count("\n") == 1 and text.startswith(f"shardwise: {target} ") and why in text, text
    for sides in ("closed", "closed/first", "file"):
        exit_code, text = command("checkpoint", "export", "good", "out-new", "--with", sides)
        assert exit_code == 2 and text.count("\n") == 1 and sides in text and not (folder / "out-new").exists()
    exit_code, text = command("checkpoint", "prune", "read-only", "--keep-last", "1")
    assert exit_code == 2 and text == (
        "shardwise: read-only/first cannot be removed: Permission denied. Give a path that this user may use.\n"
    )


def test_a_checkpoint_is_no_folder_to_be_pruned(command) -> None:  # type: ignore[no-untyped-def]
    assert command("checkpoint", "prune", "good/first", "--keep-last", "1")[0] == 2


def test_runs_that_may_not_be_looked_into_are_not_gone_on_with(  # type: ignore[no-untyped-def]
    command, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for arguments, why in [
        (["closed-run"], "closed-run cannot be looked into: Permission denied"),
        (["closed-run/deep"], "closed-run/deep cannot be looked into: Permission denied"),
        (["half-run"], "half-run/checkpoints cannot be looked into: Permission denied"),
        (["file"], "file is no run folder"),
        (["file/below"], "is no run folder"),
    ]:
        exit_code, text = command("train", "--resume", *arguments)
        assert exit_code == 2 and text.count("\n") == 1 and why in text, text
    for name, why in {"closed": "runs cannot be looked into: Permission denied", "file": "Not a directory"}.items():
        (folder / "runs").symlink_to(folder / name)
        exit_code, text = command("train", "--resume")
        (folder / "runs").unlink()
        assert exit_code == 2 and text.count("\n") == 1 and why in text, text


def test_a_closed_run_beside_others_is_passed_over(folder: Path) -> None:
    from shardwise.recipes.run_folder import newest_run

    with as_nobody():
        assert newest_run(folder) == folder / "run"


def test_calls_tell_of_paths_as_wrong_use(folder: Path) -> None:
    training = new_training()
    with as_nobody():
        for path in ("closed", "closed/first", "half", "half/second", "file", "file/below"):
            with pytest.raises(PathError, match=r"Permission denied|a file"):
                shardwise.load(folder / path, *training)
        for path in ("closed/new", "file/new", "read-only/new"):
            with pytest.raises(PathError, match=rf"{path} cannot be.* (Permission denied|A part of the path is a file)"):
                shardwise.save(folder / path, *training)
        # A folder that may not be looked into may be the newest: it is not passed over, unless older ones will do.
        loaded = shardwise.load(folder / "half", *training, fallback=True)
    assert loaded.path == str(folder / "half" / "first") and loaded.is_fallback
    shutil.copytree(folder / "half", folder / "open", ignore=shutil.ignore_patterns("second"))
    (folder / "open").chmod(0o777)
    (folder / "open" / "other").mkdir(mode=0)
    with as_nobody():
        shardwise.save(folder / "open" / "third", *training, keep_last=2)
    assert sorted(path.name for path in (folder / "open").iterdir()) == ["first", "other", "third"]
