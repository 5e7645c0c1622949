"""Values at rest that are being copied beside the steps: who is about to change them waits for it. Knows neither files nor models."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Sequence

import torch

Guards = tuple[torch.Tensor, ...]
"""Tensors through which values can be changed: autograd counts the writes to each."""


def guards_of(*tensors: torch.Tensor) -> Guards:
    """Tensors to which writes are counted; none, if those to one of them are not (it was made in inference mode)."""
    return () if any(tensor.is_inference() for tensor in tensors) else tensors


class Copying:
    """A copy that is under way in another thread.

    Writes that pass the engine wait for it. Others are found: autograd's counts of writes are compared with those of the beginning,
    not before the loop waits or all is written down, so that a write that was going on when the copy ended is found as well.

    Args:
        guarded: By name: through what the values that are copied can be changed.
    """

    def __init__(self, guarded: Iterable[tuple[str, Guards]] = ()) -> None:
        self.waited_seconds = 0.0
        """For how long the loop has waited for it."""
        self._ended = threading.Event()
        self._lock = threading.Lock()
        self._noted = [(name, guards, _count_writes(guards)) for name, guards in guarded]
        self._changed: list[str] = []

    def end(self) -> None:
        """All is copied, or nothing more is going to be."""
        self._ended.set()

    def wait(self) -> float:
        """Let the loop wait until all is copied: it may then be changed. Returns for how many seconds it had to."""
        began = time.perf_counter()
        self._ended.wait()
        self.seal()
        seconds = time.perf_counter() - began
        self.waited_seconds += seconds
        return seconds

    def seal(self) -> Sequence[str]:
        """The names of what someone has written to who did not wait. What is written after the first call does not matter."""
        with self._lock:
            noted, self._noted = self._noted, []
            self._changed.extend(name for name, guards, counts in noted if _count_writes(guards) != counts)
            return self._changed


def _count_writes(guards: Guards) -> list[int]:
    return [tensor._version for tensor in guards]
