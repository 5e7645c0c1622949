"""The inside of a worker process: take a job, run it in a fresh process group, answer, forget everything, repeat.

It owns what is said over the pipe (`Job`, `Answer`) and the state of the own process between jobs. It knows nothing of the
other workers, of deadlines or of who else failed: the parent in `flights` decides those.

Everything crosses the pipe as plain pickle, in which tensors travel by value. The pickler that `multiprocessing` uses by itself
would share their memory through file descriptors and leave it behind when a rank is killed.
"""

import faulthandler
import functools
import gc
import importlib
import os
import pickle
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import connection, parent_process
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from shardwise.devices import sim
from shardwise.devices.pool import Poison

STACK_SIGNAL = signal.SIGUSR1
# What the pipe carries besides jobs and answers. The parent ends a job on all ranks together: a rank that left its process
# group early could break the last collective of the others.
READY, END, IDLE = b"ready", b"end", b"idle"


class Failure(NamedTuple):
    """What went wrong on one rank."""

    type_name: str
    message: str
    traceback_text: str = ""


@dataclass(frozen=True)
class Call:
    """A function with its arguments, and the path on which the worker finds the function's module."""

    module_name: str
    name: str
    sys_path: list[str]
    pickled: bytes


@dataclass(frozen=True)
class Job:
    """A call for one rank. Without a `store_file`, through which the ranks meet, there is no process group."""

    call: Call
    rank: int
    num_ranks: int
    store_file: str | None
    timeout_seconds: float


@dataclass(frozen=True)
class Answer:
    """The pickled result of a job, or why there is none."""

    pickled_result: bytes = b""
    failure: Failure | None = None


def pack_call(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
    """Write a call such that a worker can run it.

    Raises:
        ValueError: the function cannot be found by name in another process.
    """
    target = fn.func if isinstance(fn, functools.partial) else fn
    qualname = getattr(target, "__qualname__", type(target).__qualname__)
    if "<" in qualname:
        raise ValueError(
            f"A job needs a function that other processes can find by name, not {qualname}. "
            "Move it to the top level of its module and pass what it captured as arguments."
        )
    return Call(target.__module__, qualname, _import_path(target.__module__), pickle.dumps((fn, args, kwargs)))


def _import_path(module_name: str) -> list[str]:
    """Return the own import path, with the root of the module in front where it is missing (pytest's importlib mode)."""
    file = getattr(sys.modules.get(module_name), "__file__", None) or ""
    stem = module_name.replace(".", os.sep)
    for suffix in (f"{os.sep}{stem}.py", f"{os.sep}{stem}{os.sep}__init__.py"):
        root = file.removesuffix(suffix)
        if root != file and root not in sys.path:
            return [root, *sys.path]
    return list(sys.path)


def work(pipe: Connection, stacks: Connection, num_devices: int) -> None:
    """Serve jobs until the parent closes the pipe or dies, with so many simulated devices."""
    _prepare(stacks)
    if num_devices:
        sim.enable(num_devices)
    state = _ProcessState()
    try:
        pipe.send_bytes(READY)
        while True:
            job: Job = pickle.loads(pipe.recv_bytes())
            pipe.send_bytes(pickle.dumps(_perform(job)))
            pipe.recv_bytes()
            _leave_group()
            state.restore()
            pipe.send_bytes(IDLE)
    except (EOFError, OSError):
        return


def _prepare(stacks: Connection) -> None:
    # The parent decides what an interrupt means: it gets the same Ctrl-C and kills its workers.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    faulthandler.register(STACK_SIGNAL, file=stacks.fileno(), all_threads=True)
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    torch.set_num_threads(1)
    Poison.enabled = True  # A late read of released memory gives NaN, in every test.
    _freeze_heap()


def _exit_with_parent() -> None:
    """End the process as soon as its parent is gone, even in the middle of a job."""
    parent = parent_process()
    if parent is not None:
        connection.wait([parent.sentinel])
        os._exit(1)


def _freeze_heap() -> None:
    """Take what is alive now out of garbage collection: torch's own objects would make every collection slow."""
    gc.collect()
    gc.freeze()


class _ProcessState:
    """The process-wide settings that a job may change, as they were before the first job."""

    def __init__(self) -> None:
        self._default_dtype = torch.get_default_dtype()
        self._num_threads = torch.get_num_threads()
        self._environment = dict(os.environ)

    def restore(self) -> None:
        torch.set_default_dtype(self._default_dtype)
        torch.set_num_threads(self._num_threads)
        Poison.enabled = True
        for device in range(sim.num_devices()):
            sim.configure(device, capacity_bytes=0, bytes_per_second=0.0)
        if self._environment != os.environ:
            os.environ.clear()
            os.environ.update(self._environment)


def _perform(job: Job) -> Answer:
    try:
        _import_module(job.call)
        fn, args, kwargs = pickle.loads(job.call.pickled)
        if job.store_file is not None:
            _join_group(job, job.store_file)
        return Answer(pickled_result=pickle.dumps(fn(*args, **kwargs)))
    except BaseException as error:
        # Also SystemExit: a job that calls sys.exit() failed, the worker goes on.
        text = "".join(traceback.format_exception(error))
        return Answer(failure=Failure(type(error).__name__, str(error), text))


def _import_module(call: Call) -> None:
    sys.path[:] = call.sys_path
    if call.module_name not in sys.modules:
        importlib.import_module(call.module_name)
        _freeze_heap()


def _join_group(job: Job, store_file: str) -> None:
    # Not a TCPStore: it looks its peers' names up at every connection, and takes seconds wherever DNS does not answer.
    if sim.is_enabled():
        torch.accelerator.set_device_index(job.rank)
    dist.init_process_group(
        "cpu:gloo,sim:sim" if sim.is_enabled() else "gloo",
        init_method=f"file://{store_file}",
        rank=job.rank,
        world_size=job.num_ranks,
        timeout=timedelta(seconds=job.timeout_seconds),
    )


def _leave_group() -> None:
    # First what the job left behind: a group that is still referenced keeps its connections, and its peers would wait for it.
    gc.collect()
    if dist.is_initialized():
        dist.destroy_process_group()
    gc.collect()
