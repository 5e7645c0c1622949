"""Faults planted at a given rank and step: what a test calls in its loop to make one rank die, fail or stall.

It owns the faults alone. It does not know who runs the ranks or what notices that one of them is gone.
"""

import os
import signal
import time
from dataclasses import dataclass, field
from typing import Literal, get_args

import torch.distributed as dist

Action = Literal["kill", "raise", "stall"]


class InjectedFault(RuntimeError):
    """The error that a fault with `action="raise"` raises."""


@dataclass
class Fault:
    """A fault that strikes once, when its rank reaches its step. It travels to other processes by pickle."""

    rank: int
    step: int
    action: Action
    seconds: float
    struck: bool = field(default=False, init=False)

    def __call__(self, step: int) -> None:
        """Strike if this is the rank and the step; return at once otherwise."""
        if self.struck or step != self.step or _current_rank() != self.rank:
            return
        self.struck = True
        match self.action:
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "raise":
                raise InjectedFault(f"Injected fault on rank {self.rank} at step {self.step}.")
            case "stall":
                time.sleep(self.seconds)


def fail_at(rank: int, step: int, action: Action = "kill", *, seconds: float = 3600.0) -> Fault:
    """Return a fault for one rank at one step.

    Args:
        action: `"kill"` is `kill -9` of the own process, `"raise"` raises `InjectedFault`, `"stall"` sleeps.
        seconds: how long a stall lasts.

    A fault strikes once in the life of a process: a loop that repeats the step goes through, a new process that is handed the
    same fault is struck again.

    >>> fault = fail_at(rank=0, step=1, action="raise")
    >>> for step in range(3):
    ...     fault(step)
    Traceback (most recent call last):
    shardwise.testing.faults.InjectedFault: Injected fault on rank 0 at step 1.
    """
    if action not in get_args(Action):
        raise ValueError(f"A fault's action must be one of {', '.join(get_args(Action))}, not {action!r}.")
    return Fault(rank, step, action, seconds)


def _current_rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0
