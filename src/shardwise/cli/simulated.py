"""``python -m shardwise.cli.simulated SPEC [-m] SCRIPT ...``: a user's script as one rank on a simulated device.

The launcher starts it. The script is run as it is. Its process group gets collectives for simulated devices, whichever backend it
names.
"""

from __future__ import annotations

import functools
import io
import os
import re
import runpy
import sys
import traceback
from dataclasses import dataclass
from typing import Any, TextIO

from shardwise.cli.exits import ExitCode
from shardwise.core.errors import UsageError
from shardwise.core.sizes import format_bytes, parse_bytes

_BACKEND = "cpu:gloo,sim:sim"


@dataclass(frozen=True)
class Devices:
    """How many devices of which size."""

    count: int
    capacity_bytes: int


def parse_devices(text: str) -> Devices:
    """Read ``4x8GiB``.

    >>> parse_devices("4x8GiB")
    Devices(count=4, capacity_bytes=8589934592)
    """
    match = re.fullmatch(r"([0-9]+)x(.+)", text.strip())
    if match is None or not 1 <= int(match.group(1)) <= 64:
        raise UsageError(f"Expected a number of devices and their size, such as 4x8GiB, but got {text!r}.")
    return Devices(int(match.group(1)), parse_bytes(match.group(2)))


def prepare(stream: TextIO) -> None:
    """Compile the simulated accelerator before ranks are started, if it is not there."""
    from shardwise.devices.sim import build

    build.library(lambda text: print(f"shardwise: {text}", file=stream, flush=True))


def main(arguments: list[str]) -> int:
    """Run a script, and say what its device held."""
    import torch

    from shardwise.devices import sim

    devices = parse_devices(arguments[0])
    _write_whole_lines(sys.stdout)
    rank, local_rank = int(os.environ.get("RANK", "0")), int(os.environ.get("LOCAL_RANK", "0"))
    sim.enable(devices.count, capacity_bytes=devices.capacity_bytes)
    torch.accelerator.set_device_index(local_rank)
    _meet_on_simulated_devices()
    try:
        _run(arguments[1:])
    except torch.OutOfMemoryError as error:
        _say(rank, f"{_place_of(error)}{error}")
        return ExitCode.WILL_NOT_FIT
    except (AssertionError, RuntimeError) as error:
        if "CUDA" in str(error):
            _say(
                rank,
                "there is no CUDA here: take the device from torch.accelerator.current_accelerator(), and it runs on both.",
            )
        raise
    finally:
        _say(rank, _describe(local_rank))
    return ExitCode.DONE


def _write_whole_lines(stream: TextIO) -> None:
    """Ranks share the terminal: without this, an unbuffered ``print`` writes its pieces between those of other ranks."""
    if isinstance(stream, io.TextIOWrapper):
        stream.reconfigure(line_buffering=True, write_through=False)


def _place_of(error: BaseException) -> str:
    """Where in the user's own files an error came from: the innermost line of them."""
    root = os.getcwd()
    own = [frame for frame in traceback.extract_tb(error.__traceback__) if _is_own(frame.filename, root)]
    return f"at {os.path.relpath(own[-1].filename, root)}, line {own[-1].lineno} ({own[-1].line}): " if own else ""


def _is_own(filename: str, root: str) -> bool:
    path = os.path.abspath(filename)
    is_installed = any(part in path for part in ("site-packages", os.path.join("src", "shardwise")))
    return os.path.exists(path) and path.startswith(root + os.sep) and not is_installed


def _run(arguments: list[str]) -> None:
    is_module = arguments[0] == "-m"
    target, *rest = arguments[1:] if is_module else arguments
    sys.argv = [target, *rest]
    if is_module:
        sys.path.insert(0, os.getcwd())
        runpy.run_module(target, run_name="__main__", alter_sys=True)
    else:
        sys.path.insert(0, os.path.dirname(os.path.abspath(target)))
        runpy.run_path(target, run_name="__main__")


def _meet_on_simulated_devices() -> None:
    """Scripts name the backend of the machine that they were written for: here there is one for simulated devices."""
    import torch.distributed as dist

    begin = dist.init_process_group

    @functools.wraps(begin)
    def init_process_group(backend: Any = None, *args: Any, **kwargs: Any) -> None:
        kwargs.pop("device_id", None)
        begin(_BACKEND, *args, **kwargs)

    dist.init_process_group = init_process_group


def _describe(device: int) -> str:
    from shardwise.devices import sim

    memory, traffic = sim.memory(device), sim.traffic(device)
    part = memory.peak_bytes / memory.capacity_bytes
    return (
        f"sim:{device} held at most {format_bytes(memory.peak_bytes)} of {format_bytes(memory.capacity_bytes)} ({part:.0%}); "
        f"{format_bytes(traffic.in_bytes)} came from the host, {format_bytes(traffic.out_bytes)} went to it"
        + (f"; it refused {memory.num_refusals} time(s)" if memory.num_refusals else "")
    )


def _say(rank: int, text: str) -> None:
    sys.stderr.write(f"shardwise: rank {rank}: {text}\n")  # At once: ranks share the terminal.
    sys.stderr.flush()


if __name__ == "__main__":
    exit_code = main(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    if exit_code:
        # Not sys.exit: threads that wait in a collective of the step that failed would keep the process alive.
        os._exit(exit_code)
