"""Starts the command line as users do: real processes, whose output and end can be looked at."""

import fcntl
import os
import pty
import re
import resource
import select
import struct
import subprocess
import sys
import termios
import time
from dataclasses import dataclass
from pathlib import Path

# Generous: a loaded machine may take seconds to import torch, and a name server that does not answer adds some more.
TIMEOUT_SECONDS = 240.0
END_SECONDS = 60.0


@dataclass(frozen=True)
class Answer:
    """What a command left behind."""

    exit_code: int
    stdout: str
    stderr: str

    @property
    def pids(self) -> list[int]:
        """Of the ranks that have named themselves."""
        return [int(line.split()[-1]) for line in self.stdout.splitlines() if " is process " in line]


def start(*arguments: str, folder: Path, limit_bytes: int | None = None) -> subprocess.Popen[str]:
    """Start a command; with a limit, no process of it may have more address space than that."""
    environment = {key: value for key, value in os.environ.items() if key != "OMP_NUM_THREADS"}
    command = [sys.executable, "-m", "shardwise", *arguments]
    # Files, not pipes: two streams of a process that must not block are read when it has ended.
    with (folder / "stdout").open("w") as out, (folder / "stderr").open("w") as err:
        process = subprocess.Popen(command, cwd=folder, env=environment, stdout=out, stderr=err, text=True)
    if limit_bytes is not None:
        # Before it starts any other, which inherit it.
        resource.prlimit(process.pid, resource.RLIMIT_AS, (limit_bytes, limit_bytes))
    return process


def finish(process: subprocess.Popen[str], folder: Path, timeout_seconds: float = TIMEOUT_SECONDS) -> Answer:
    try:
        exit_code = process.wait(timeout_seconds)
    except BaseException:
        # The launcher ends its ranks; it alone knows them.
        process.terminate()
        process.wait(END_SECONDS)
        raise
    return Answer(exit_code, (folder / "stdout").read_text(), (folder / "stderr").read_text())


def shardwise(*arguments: str, folder: Path) -> Answer:
    return finish(start(*arguments, folder=folder), folder)


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def descendants(pid: int) -> list[int]:
    """All processes below one, by what the kernel says."""
    try:
        children = [int(text) for text in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except FileNotFoundError:
        return []
    return [each for child in children for each in (child, *descendants(child))]


def in_terminal(*arguments: str, folder: Path, width: int, press: tuple[str, bytes] | None = None) -> Answer:
    """Run a command on a terminal of its own. What is on its screen is in stdout; with `press`, a key follows once a text is there."""
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(folder)
        environment = {key: value for key, value in os.environ.items() if key not in ("NO_COLOR", "COLUMNS", "LINES")}
        environment["TERM"] = "xterm-256color"
        os.execve(sys.executable, [sys.executable, "-m", "shardwise", *arguments], environment)
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 50, width, 0, 0))
    screen, deadline = b"", time.monotonic() + TIMEOUT_SECONDS
    try:
        while True:
            is_ready = select.select([terminal], [], [], max(0.0, deadline - time.monotonic()))[0]
            if not is_ready:
                raise TimeoutError(f"The command did not end; it has shown:\n{screen.decode(errors='replace')}")
            try:
                screen += os.read(terminal, 2**16)
            except OSError:  # Nobody holds the other end any more.
                break
            if press is not None and re.search(press[0], screen.decode(errors="replace")):
                os.write(terminal, press[1])
                press = None
    finally:
        os.close(terminal)  # Which ends the command, if it still runs.
    exit_code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return Answer(exit_code, screen.decode(errors="replace"), "")
