"""A copy of all that a rank writes, in host memory: what may change at any time is copied at once, the rest beside the steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from shardwise.checkpoint.shards import Part
from shardwise.core.errors import CheckpointError
from shardwise.runtime.copying import Copying

_ALIGNMENT_BYTES = 64
_MOST_NAMED = 3


class Snapshot:
    """Begun in the loop, and finished by the thread that writes it, in which its failures are raised: so all ranks hear of them.

    Args:
        parts: What is to be copied.
        find_room: Host memory of at least so many bytes.
    """

    def __init__(self, parts: Sequence[Part], find_room: Callable[[int], torch.Tensor]) -> None:
        self.copying = Copying((part.name, part.guards) for part in parts if part.guards)
        """What changes in updates alone, until it is copied as well."""
        self._parts = list(parts)
        self._rooms: list[torch.Tensor] = []
        self._error: Exception | None = None
        try:
            self._rooms = _divide(find_room(sum(map(_room_bytes, parts))), parts)
            self._copy(is_guarded=False)
        except Exception as error:
            self._error = error

    def finish(self) -> list[Part]:
        """Copy what is left; returns the copies."""
        try:
            if self._error is not None:
                raise self._error
            self._copy(is_guarded=True)
            copies = zip(self._parts, self._rooms, strict=True)
            return [replace(part, line=room, fetch=None, guards=()) for part, room in copies]
        finally:
            self._parts, self._rooms = [], []
            self.copying.end()

    def _copy(self, *, is_guarded: bool) -> None:
        for part, room in zip(self._parts, self._rooms, strict=True):
            if bool(part.guards) is is_guarded:
                # From a device it goes through the thread's own stream, the default one, after what was enqueued there.
                room.copy_(part.line if part.fetch is None else part.fetch())

    def check(self) -> None:
        """All is written down: see that it is one state.

        Raises:
            CheckpointError: Someone has changed some of it who did not wait for the copy.
        """
        changed = self.copying.seal()
        if changed:
            more = f" and {len(changed) - _MOST_NAMED} more" if len(changed) > _MOST_NAMED else ""
            raise CheckpointError(
                f"{', '.join(changed[:_MOST_NAMED])}{more} changed while being copied beside the steps, by a write that is not seen in "
                "time. Make such changes before the save or after saving.wait_copied(), or save with wait=True."
            )


def _room_bytes(part: Part) -> int:
    return -(-part.num_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES


def _divide(memory: torch.Tensor, parts: Sequence[Part]) -> list[torch.Tensor]:
    rooms, offset = [], 0
    for part in parts:
        rooms.append(memory[offset : offset + part.num_bytes].view(part.line.dtype))
        offset += _room_bytes(part)
    return rooms
