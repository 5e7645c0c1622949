"""The folder of one run: what was asked, what was measured, what came out. Nothing is ever overwritten unasked.

======================  ==========================================================================
``config.toml``         all effective values: a recipe that repeats the run
``metrics.jsonl``       one line a step, and one an evaluation
``ranks/N.json``        what rank N held, after its first step and at the end
``ranks/N.jsonl``       what each step took on rank N: for ``shardwise report``
``report.html``         the page of the run
``tensorboard/``        figures for TensorBoard, if asked for
``checkpoints/``        the newest states, from which ``shardwise train --resume`` goes on
``result.json``         what came out; it is there only when the run has ended
======================  ==========================================================================
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardwise.core.errors import UsageError

CONFIG_NAME = "config.toml"


@dataclass(frozen=True)
class RunFolder:
    """A folder by its path."""

    path: Path

    @property
    def config(self) -> Path:
        """All effective values."""
        return self.path / CONFIG_NAME

    @property
    def new_config(self) -> Path:
        """Those with which the run is to go on, until its state is loaded."""
        return self.path / f"new-{CONFIG_NAME}"

    def adopt_config(self) -> None:
        """The state was loaded: the run goes on with the new values, and has no result yet."""
        os.replace(self.new_config, self.config)
        self.result.unlink(missing_ok=True)

    @property
    def metrics(self) -> Path:
        """Lines of JSON."""
        return self.path / "metrics.jsonl"

    @property
    def result(self) -> Path:
        """What came out."""
        return self.path / "result.json"

    @property
    def checkpoints(self) -> Path:
        """States of the training."""
        return self.path / "checkpoints"

    def rank(self, rank: int) -> Path:
        """What one rank held."""
        return self.path / "ranks" / f"{rank}.json"

    def add_metrics(self, values: Mapping[str, Any]) -> None:
        """Add one line. It is on its way to the disk when this returns, whatever becomes of the process."""
        with self.metrics.open("a", encoding="utf-8") as file:
            file.write(json.dumps(values) + "\n")

    def drop_metrics_after(self, step: int) -> None:
        """Forget what comes after a step: the run goes on from there."""
        kept = []
        for line in self.metrics.read_text(encoding="utf-8").splitlines() if self.metrics.exists() else []:
            try:
                if json.loads(line)["step"] <= step:
                    kept.append(line + "\n")
            except (ValueError, KeyError, TypeError):
                continue
        aside = self.metrics.with_name("new-metrics.jsonl")
        aside.write_text("".join(kept), encoding="utf-8")
        os.replace(aside, self.metrics)

    def write_rank(self, rank: int, values: Mapping[str, Any]) -> None:
        """Keep what a rank held."""
        self.rank(rank).write_text(json.dumps(values), encoding="utf-8")

    def read_rank(self, rank: int) -> dict[str, Any]:
        """What a rank held, or nothing if it has not said so yet."""
        try:
            values: dict[str, Any] = json.loads(self.rank(rank).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        return values

    def last_step(self) -> int:
        """How many steps the metrics tell of."""
        try:
            lines = self.metrics.read_text(encoding="utf-8").splitlines()
            return max((json.loads(line)["step"] for line in lines), default=0)
        except (OSError, ValueError):
            return 0

    def write_result(self, values: Mapping[str, Any]) -> None:
        """Keep what came out."""
        self.result.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")


def name_folder(parent: Path, recipe: str) -> Path:
    """A new name below a folder, by recipe and time."""
    stem = f"{Path(recipe).stem}-{time.strftime('%Y%m%d-%H%M%S')}"
    names = [stem, *(f"{stem}-{number}" for number in range(2, 1000))]
    return next(parent / name for name in names if not (parent / name).exists())


def check_folder(path: Path, *, is_forced: bool) -> None:
    """Refuse a folder that cannot be used, before anything is written.

    Raises:
        UsageError: It holds something and is not to be overwritten, it is no folder, or it cannot be written to.
    """
    try:
        if path.exists() and not path.is_dir():
            raise UsageError(f"The run folder {path} is a file. Choose another place with --out.")
        held = {entry.name for entry in path.iterdir()} if path.exists() else set()
        nearest = next(folder for folder in (path, *path.absolute().parents) if folder.exists())
    except OSError as error:
        raise _unusable(path, error) from error
    if held and not is_forced:
        raise UsageError(
            f"The run folder {path} holds an earlier run or other files. Choose another with --out, or use --force."
        )
    if held and CONFIG_NAME not in held:
        raise UsageError(f"The folder {path} holds files, but no run: --force replaces runs only. Choose another with --out.")
    if not nearest.is_dir():
        raise UsageError(f"The run folder {path} cannot be made: {nearest} is a file. Choose another place with --out.")
    if not os.access(nearest, os.W_OK | os.X_OK, effective_ids=os.access in os.supports_effective_ids):
        raise UsageError(
            f"The run folder {path} cannot be made: there is no permission to write to {nearest}. Choose another place with --out."
        )


def make_folder(path: Path, config: str) -> RunFolder:
    """Make the folder of a new run, or empty that of an old one of what a run had put there.

    Raises:
        UsageError: It cannot be written.
    """
    folder = RunFolder(path)
    try:
        folder.rank(0).parent.mkdir(parents=True, exist_ok=True)
        for old in (folder.metrics, folder.result, path / "report.html", *folder.rank(0).parent.glob("*.json*")):
            old.unlink(missing_ok=True)
        shutil.rmtree(path / "tensorboard", ignore_errors=True)
        shutil.rmtree(folder.checkpoints, ignore_errors=True)
        folder.config.write_text(config, encoding="utf-8")
    except OSError as error:
        raise _unusable(path, error) from error
    return folder


def reopen_folder(path: Path, config: str) -> RunFolder:
    """The folder of a run that is gone on with, perhaps with other values: they take effect when its state is loaded.

    Raises:
        UsageError: It cannot be written.
    """
    folder = RunFolder(path)
    try:
        folder.new_config.write_text(config, encoding="utf-8")
    except OSError as error:
        raise _unusable(path, error) from error
    return folder


def newest_run(parent: Path) -> Path | None:
    """The run below a folder that has a checkpoint and was written to last, if any has. What may not be looked into is passed over.

    Raises:
        UsageError: The folder itself may not be looked into.
    """
    try:
        names = sorted(os.listdir(parent)) if os.path.lexists(parent) else []
    except OSError as error:
        raise UsageError(f"The folder {parent} cannot be looked into: {error.strerror}. Give a run folder.") from error
    found = [parent / name for name in names if os.path.isfile(parent / name / CONFIG_NAME)]
    saved = [folder for folder in found if any(folder.glob("checkpoints/[!.]*/manifest.json"))]
    return max(saved, key=lambda folder: (folder / "checkpoints").stat().st_mtime, default=None)


def _unusable(path: Path, error: OSError) -> UsageError:
    return UsageError(f"The run folder {path} cannot be used: {error.strerror}. Choose another place with --out.")
