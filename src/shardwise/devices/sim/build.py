"""Compiles the simulated accelerator on first use, and keeps it for the next time."""

from __future__ import annotations

import fcntl
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from shardwise.core.errors import ShardwiseError
from shardwise.devices.cache import cache_folder

NAME = "shardwise_sim"
_HERE = Path(__file__).parent
_SOURCES = ("memory.cpp", "kernels.cpp", "collectives.cpp")
_HEADER = "sim.h"
_COMPILERS = ("c++", "g++", "clang++")
_FLAGS = ("-O1", "-std=c++20", "-fPIC", "-w", f"-DTORCH_EXTENSION_NAME={NAME}")
_LIBRARIES = ("-lc10", "-ltorch", "-ltorch_cpu", "-ltorch_python")

Say = Callable[[str], None]


def library(say: Say, cache: Path | None = None) -> Path:
    """The compiled library, made first if it is not there. Processes that ask at once wait for the one that compiles.

    Args:
        say: Told what takes long.
        cache: Where it is kept; in the user's cache folder, if None.
    """
    folder = (cache_folder() if cache is None else cache) / _fingerprint()
    found = folder / f"{NAME}.so"
    if found.exists():
        return found
    compiler = next((path for path in map(shutil.which, _COMPILERS) if path is not None), None)
    if compiler is None:
        raise ShardwiseError(
            f"The simulated accelerator is compiled on first use, but there is no C++ compiler (looked for {', '.join(_COMPILERS)}). "
            "Install one, such as the package g++."
        )
    _check_headers()
    folder.mkdir(parents=True, exist_ok=True)
    with _alone(folder):
        if not found.exists():
            say("Compiling the simulated accelerator; this is done once and takes about a minute ...")
            _compile(compiler, found)
            say("Compiled.")
    return found


def _fingerprint() -> str:
    """What the library depends on: another torch, Python or source is another library."""
    digest = hashlib.sha256()
    for part in (torch.__version__, sys.version, platform.machine(), *_FLAGS):
        digest.update(part.encode())
    for name in (_HEADER, *_SOURCES):
        digest.update((_HERE / name).read_bytes())
    return f"sim-{digest.hexdigest()[:16]}"


def _check_headers() -> None:
    if not Path(sysconfig.get_path("include"), "Python.h").exists():
        raise ShardwiseError(
            "The simulated accelerator is compiled on first use, but Python's headers are missing "
            f"(no Python.h in {sysconfig.get_path('include')}). Install them, such as the package python3-dev."
        )


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _compile(compiler: str, target: Path) -> None:
    """All sources at once, then link; the library appears whole or not at all."""
    root = Path(torch.__file__).parent
    includes = [root / "include", root / "include" / "torch" / "csrc" / "api" / "include", Path(sysconfig.get_path("include"))]
    with tempfile.TemporaryDirectory(dir=target.parent) as directory:
        parts = Path(directory)
        commands = [
            [compiler, *_FLAGS, *(f"-I{path}" for path in includes), "-c", str(_HERE / name), "-o", str(parts / f"{name}.o")]
            for name in _SOURCES
        ]
        _run_all(commands)
        objects = [str(parts / f"{name}.o") for name in _SOURCES]
        libraries = [f"-L{root / 'lib'}", *_LIBRARIES]
        _run_all([[compiler, "-shared", *objects, "-o", str(parts / target.name), *libraries]])
        os.replace(parts / target.name, target)


def _run_all(commands: list[list[str]]) -> None:
    running = [subprocess.Popen(command, stderr=subprocess.PIPE, text=True) for command in commands]
    try:
        for process in running:
            _, errors = process.communicate()
            if process.returncode:
                lines = "\n".join(errors.strip().splitlines()[:20])
                raise ShardwiseError(f"The simulated accelerator could not be compiled with {commands[0][0]}:\n{lines}")
    finally:
        for process in running:
            if process.poll() is None:
                process.kill()
                process.wait()
