"""Threads that read and write pieces of a file, in an order in which nobody sees half of a write. Knows no slots.

Transfers whose blocks overlap, one of them a write, follow each other; all others go on side by side. Blocks and not bytes: a
write that changes a part of a block writes all of it.
"""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple

from shardwise.core.errors import OffloadError
from shardwise.stores.direct_io import Bounce, Piece, cut
from shardwise.stores.disk_file import DiskFile
from shardwise.stores.ranges import round_down, round_up
from shardwise.stores.store import Ticket


@dataclass(eq=False)
class Transfer:
    """A read or a write that was asked for."""

    whole: Piece
    is_write: bool
    label: str
    ticket: Ticket
    num_awaited: int = 0
    """Earlier transfers that must end before this one begins."""
    followers: list[Transfer] = field(default_factory=list)
    num_pieces_left: int = 0
    error: BaseException | None = None

    @property
    def begin(self) -> int:
        """Where its first block begins."""
        return round_down(self.whole.offset)

    @property
    def end(self) -> int:
        """Where its last block ends."""
        return round_up(self.whole.offset + self.whole.num_bytes)

    def must_follow(self, other: Transfer) -> bool:
        """Whether the order of the two can be seen."""
        return (self.is_write or other.is_write) and self.overlaps(other)

    def overlaps(self, other: Transfer) -> bool:
        """Whether any block is of both."""
        return self.begin < other.end and other.begin < self.end


class _Loss(NamedTuple):
    """Bytes that a write did not bring to the file, or only some of them."""

    begin: int
    end: int
    error: BaseException

    def without(self, begin: int, end: int) -> list[_Loss]:
        """What of it is left outside of a range."""
        parts = (_Loss(self.begin, min(self.end, begin), self.error), _Loss(max(self.begin, end), self.end, self.error))
        return [part for part in parts if part.begin < part.end]


class Workers:
    """The threads of a file. The last one to leave removes the file.

    The threads do not know the store that holds them: it may go while they work, and closes them then. Since that may happen
    in any thread, at any moment, also in one of these that holds the lock, `close` changes nothing but one flag.
    """

    def __init__(self, file: DiskFile) -> None:
        self._file = file
        self._changed = threading.Condition()
        self._ready: deque[tuple[Transfer, Piece]] = deque()
        self._under_way: list[Transfer] = []
        self._losses: list[_Loss] = []
        """Of writes that failed, what no later one has made good."""
        self._threads: list[threading.Thread] = []
        self._num_at_work = 0
        self._is_closing = False

    def start(self, num_workers: int) -> None:
        """Let so many threads begin. They are daemons: at the end of the interpreter, `close` is called while they still run."""
        for number in range(num_workers):
            thread = threading.Thread(target=self._work, args=(Bounce(),), name=f"offload-{number}", daemon=True)
            thread.start()
            self._threads.append(thread)

    def submit(self, transfer: Transfer) -> None:
        """Do it when nothing stands in its way."""
        with self._changed:
            if self._is_closing:
                self._file.raise_closed()
            for other in self._under_way:
                if transfer.must_follow(other):
                    other.followers.append(transfer)
                    transfer.num_awaited += 1
            self._under_way.append(transfer)
            if not transfer.num_awaited:
                self._make_ready(transfer)

    def close(self) -> None:
        """Let what is under way fail, and the file go."""
        if not self._file.is_open:  # Also in a forked process: there are no threads in it, and the lock may be held forever.
            return
        with self._changed:
            self._is_closing = True
            self._changed.notify_all()
        if threading.current_thread() not in self._threads:
            for thread in self._threads:
                thread.join()
            self._file.remove()

    def forget(self, begin: int, end: int) -> None:
        """Nobody needs these bytes any more: what is written there next is something else."""
        with self._changed:
            self._losses = [part for loss in self._losses for part in loss.without(begin, end)]

    # What follows is called with the lock held.

    def _make_ready(self, transfer: Transfer) -> None:
        pieces = cut(transfer.whole)
        transfer.num_pieces_left = len(pieces)
        if not transfer.is_write:
            transfer.error = self._loss(transfer)
        self._ready.extend((transfer, piece) for piece in pieces)
        self._changed.notify(len(pieces))

    def _loss(self, transfer: Transfer) -> OffloadError | None:
        """Why a read would give old bytes, or half of new ones: nobody need have looked at the ticket of the write."""
        begin, end = transfer.whole.offset, transfer.whole.offset + transfer.whole.num_bytes
        for loss in self._losses:
            if loss.begin < end and begin < loss.end:
                return OffloadError(
                    f"{self._file.path}: {transfer.label} cannot be read, since writing it failed: {loss.error}"
                )
        return None

    def _finish(self, transfer: Transfer) -> None:
        self._under_way.remove(transfer)
        if transfer.is_write:
            begin, end = transfer.whole.offset, transfer.whole.offset + transfer.whole.num_bytes
            self._losses = [part for loss in self._losses for part in loss.without(begin, end)]
            if transfer.error is not None:
                self._losses.append(_Loss(begin, end, transfer.error))
        for follower in transfer.followers:
            follower.num_awaited -= 1
            if not follower.num_awaited:
                self._make_ready(follower)
        transfer.followers = []

    # The threads

    def _work(self, bounce: Bounce) -> None:
        with self._changed:
            self._num_at_work += 1
        while self._do_next(bounce):
            pass
        with self._changed:
            self._num_at_work -= 1
            is_last = not self._num_at_work
        if is_last:
            self._file.remove()

    def _do_next(self, bounce: Bounce) -> bool:
        """Move one piece, when there is one; False when there will be none. Between two, a worker holds on to nothing."""
        with self._changed:
            while not self._ready and not self._is_closing:
                self._changed.wait()
            if not self._ready:
                return False
            transfer, piece = self._ready.popleft()
            transfer.ticket.begin()
        error = transfer.error or self._move(transfer, piece, bounce)
        with self._changed:
            transfer.error = transfer.error or error
            transfer.num_pieces_left -= 1
            is_done = not transfer.num_pieces_left
            if is_done:
                self._finish(transfer)
        if is_done:
            transfer.ticket.finish(transfer.error)
        return True

    def _move(self, transfer: Transfer, piece: Piece, bounce: Bounce) -> BaseException | None:
        try:
            if self._is_closing:
                raise OffloadError(
                    f"{self._file.path}: {transfer.label} was not moved: the store was closed. Wait for tickets first."
                )
            if transfer.is_write:
                self._file.write(piece, transfer.label, bounce)
            else:
                self._file.read(piece, transfer.label, bounce)
        except BaseException as error:  # Whatever it is, it is raised where the ticket is waited for.
            return error
        return None
