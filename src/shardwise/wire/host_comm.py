"""Collectives between ranks of one host that read each other's memory: one copy, at the speed of memory, and no threads.

Each rank keeps a *board* for each lane, in its own memory: a row for each collective that says where the bytes lie that this
rank brings, and a row for each that says it has read what the others brought. Peers look at it; nobody writes to another's
memory. What lies at an address must stay there until all have read it: ``Handle.receipt`` tells.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from itertools import pairwise
from multiprocessing.util import Finalize
from typing import NamedTuple
from weakref import WeakSet

import torch

from shardwise.devices import cross_memory
from shardwise.wire.board import Board, BoardFacts, PeerBoard
from shardwise.wire.comm import Exchange, Handle, Moved, Room, gather_bytes, put_in_place
from shardwise.wire.torch_comm import TorchComm, raw_bytes

_FAREWELL_SECONDS = 60.0
_LOOKS = 64
"""Looks at a board in vain before the kernel is asked whether its process is still there."""


class _Receipt(NamedTuple):
    """Whether one's bytes of a collective were read by all."""

    comm: HostComm
    sequence: int
    where: str

    @property
    def is_read(self) -> bool:
        """Ask the peers' boards."""
        return self.comm.has_been_read(self.sequence)

    def wait(self) -> None:
        """Until all peers have finished, or the deadline."""
        self.comm.wait_until_read(self.sequence, self.where)


class HostComm:
    """One lane between ranks of one host."""

    link = "host memory"
    is_staged = False

    def __init__(self, lane: TorchComm, board: Board, peers: Sequence[PeerBoard], deadline: timedelta) -> None:
        self.rank = lane.rank
        self.size = lane.size
        self._others = [(lane.rank + step) % lane.size for step in range(1, lane.size)]
        self._lane = lane
        self._board = board
        self._peers = peers
        self._deadline_seconds = deadline.total_seconds()
        self._sequence = 0
        self._num_looks = 0
        self._unread: dict[int, torch.Tensor] = {}
        self._read_until = dict.fromkeys(self._others, 0)
        """The first collective of this rank that a peer had not read when it was last asked."""
        _ALL.add(self)

    @property
    def has_failed(self) -> bool:
        """Whether the lane cannot be used any more."""
        return self._lane.has_failed

    # Collectives

    def all_gather(self, buffer: torch.Tensor, cuts: Sequence[int], *, label: str) -> Handle:
        """Read every other rank's slice straight into place."""
        own = buffer[cuts[self.rank] : cuts[self.rank + 1]]
        return self._gather(own, cuts, lambda: buffer, buffer, label)

    def gather_parts(self, source: torch.Tensor, cuts: Sequence[int], room: Room, *, label: str) -> Handle:
        """The same; no buffer is needed before there is something to read."""
        return self._gather(source, cuts, lambda: put_in_place(source, cuts, room, self.rank), None, label)

    def _gather(self, own: torch.Tensor, cuts: Sequence[int], prepare: Room, result: torch.Tensor | None, label: str) -> Handle:
        sequence, item = self._announce(raw_bytes(own)), own.element_size()
        raw: list[torch.Tensor] = []
        moved = Moved()

        def read(peer: int, address: int) -> None:
            if not raw:
                raw.append(raw_bytes(prepare()))
            self._copy(peer, address, raw[0][cuts[peer] * item : cuts[peer + 1] * item], moved)

        sizes = [(b - a) * item for a, b in pairwise(cuts)]
        wire_bytes = cuts[-1] * item - own.nbytes
        return self._handle("all_gather", label, wire_bytes, self.size - 1, result, sequence, sizes, read, moved)

    def exchange(self, source: torch.Tensor, cuts: Sequence[int], *, room: torch.Tensor | None = None, label: str) -> Exchange:
        """Let peers read their parts of ``source``, piece by piece, as they add them up."""
        start, item = cuts[self.rank], source.element_size()
        sequence = self._announce(raw_bytes(source))
        where = f"exchange for {label}"
        addresses: dict[int, int] = {}
        scratch: dict[int, torch.Tensor] = {}
        moved = Moved()

        def note(peer: int, address: int) -> None:
            addresses[peer] = address

        def part(rank: int, low: int, high: int) -> torch.Tensor:
            if rank == self.rank:
                return source[start + low : start + high]
            piece = scratch.get(rank)
            if piece is None or piece.numel() < high - low:
                piece = scratch[rank] = torch.empty(high - low, dtype=source.dtype)
            if piece.numel() > high - low:
                piece = piece[: high - low]
            try:
                self._copy(rank, addresses[rank] + (start + low) * item, piece, moved)
            except OSError as error:
                raise self._lane.failed(where, error) from error
            return piece

        wire_bytes = (cuts[-1] - (cuts[self.rank + 1] - start)) * item
        sizes = [cuts[-1] * item] * self.size
        handle = self._handle(
            "exchange", label, wire_bytes, self.size - 1, None, sequence, sizes, note, moved, is_finished=False
        )
        return Exchange(**vars(handle), _part=part, _close=lambda: self._board.finish(sequence))

    def swap(
        self, sends: Sequence[tuple[int, torch.Tensor]], receives: Sequence[tuple[int, torch.Tensor]], *, label: str
    ) -> Handle:
        """Through the process group: sums between ranks of one host do not need it."""
        return self._lane.swap(sends, receives, label=label)

    def broadcast(self, buffer: torch.Tensor, source: int, *, label: str) -> Handle:
        """Read the source's buffer."""
        raw = raw_bytes(buffer)
        is_source = self.rank == source
        # A copy, since the source goes on before all have read.
        sequence = self._announce(raw.clone() if is_source else raw[:0])
        moved = Moved()

        def read(peer: int, address: int) -> None:
            if peer == source:
                self._copy(peer, address, raw, moved)

        sizes = [raw.nbytes if peer == source else 0 for peer in range(self.size)]
        return self._handle("broadcast", label, raw.nbytes, 1, buffer, sequence, sizes, read, moved)

    def gather_small(self, values: torch.Tensor, *, label: str) -> Handle:
        """Read all ranks' values."""
        mine = raw_bytes(values.detach().contiguous().clone())
        rows = values.new_empty((self.size, *values.shape))
        rows[self.rank] = values
        sequence = self._announce(mine)
        moved = Moved()

        def read(peer: int, address: int) -> None:
            self._copy(peer, address, raw_bytes(rows[peer]), moved)

        wire_bytes, sizes = mine.nbytes * (self.size - 1), [mine.nbytes] * self.size
        return self._handle("gather_small", label, wire_bytes, self.size - 1, rows, sequence, sizes, read, moved)

    # How it is done

    def _announce(self, raw: torch.Tensor) -> int:
        """Put bytes on the board, and keep them until all have read them."""
        sequence, self._sequence = self._sequence, self._sequence + 1
        while self._unread and self.has_been_read(next(iter(self._unread))):
            pass
        if self._unread and sequence - next(iter(self._unread)) >= self._board.num_rows:
            oldest = next(iter(self._unread))
            self.wait_until_read(oldest, "an early collective")
        self._unread[sequence] = raw
        _HOLDING.add(self)
        self._board.announce(sequence, raw.data_ptr(), raw.nbytes)
        return sequence

    def _handle(  # noqa: PLR0913
        self,
        op: str,
        label: str,
        wire_bytes: int,
        num_messages: int,
        result: torch.Tensor | None,
        sequence: int,
        sizes: Sequence[int],
        read: Callable[[int, int], None],
        moved: Moved,
        *,
        is_finished: bool = True,
    ) -> Handle:
        """What waits for each peer's announcement, and reads what it brought."""
        where = f"{op} for {label}"
        seen: dict[int, tuple[int, int]] = {}

        def finish() -> None:
            try:
                for peer in self._others:
                    read(peer, self._address_of(peer, sequence, sizes[peer], seen.get(peer)))
            except (OSError, TimeoutError) as error:
                raise self._lane.failed(where, error) from error
            if is_finished:
                self._board.finish(sequence)

        def poll() -> bool:
            for peer in self._others:
                if peer not in seen:
                    row = self._peers[peer].find(sequence)
                    if row is None:
                        return self._is_any_gone()  # Then waiting ends at once, and says so.
                    seen[peer] = row
            return True

        receipt = _Receipt(self, sequence, where)
        cancel = partial(self._board.finish, sequence)
        return Handle(op, wire_bytes, num_messages, result, finish, poll, (), receipt, cancel, self.link, moved)

    def _copy(self, peer: int, address: int, target: torch.Tensor, moved: Moved) -> None:
        begin = time.perf_counter()
        cross_memory.read(self._peers[peer].process, address, target)
        moved.seconds += time.perf_counter() - begin

    def _address_of(self, peer: int, sequence: int, num_bytes: int, found: tuple[int, int] | None) -> int:
        num_looks = 0

        def is_there() -> bool:
            nonlocal found, num_looks
            found = self._peers[peer].find(sequence)
            num_looks += 1
            if found is None and num_looks % _LOOKS == 0:
                self._check_presence(peer, sequence)
            return found is not None

        if found is None and not is_there():
            self._until(is_there, f"rank {peer} has not come")
        if found is None:
            raise TimeoutError(f"rank {peer} has not come")
        address, size = found
        if size != num_bytes:
            raise OSError(f"rank {peer} brought {size} bytes where {num_bytes} were expected")
        return address

    def _check_presence(self, awaited: int, sequence: int) -> None:
        """Do not wait for one who has left, nor where another has died: the one who is waited for may wait for that one."""
        for peer in self._others:
            board = self._peers[peer]
            if not board.is_there():
                raise OSError(f"process {board.process} is not rank {peer} any more")
            if peer == awaited and board.is_leaving and board.find(sequence) is None:
                raise OSError(f"rank {peer} has ended")

    def _until(self, is_true: Callable[[], bool], what: str) -> None:
        """Wait for something that peers do: at first without sleep, then with longer and longer ones."""
        begin = time.monotonic()
        pause_seconds = 0.0
        while not is_true():
            if time.monotonic() - begin > self._deadline_seconds:
                raise TimeoutError(f"{what} within {self._deadline_seconds:g} s")
            time.sleep(pause_seconds)
            pause_seconds = min(0.0005, pause_seconds + 0.00002)

    def has_been_read(self, sequence: int) -> bool:
        """Whether all peers have read what this rank brought: then it is let go. One that is gone will not read any more."""
        if sequence in self._unread:
            for peer, end in self._read_until.items():
                if sequence >= end and not self._has_read(peer, sequence):
                    return False
            del self._unread[sequence]
            if not self._unread:
                _HOLDING.discard(self)
        return True

    def wait_until_read(self, sequence: int, where: str) -> None:
        """Wait until all peers have read what this rank brought."""
        try:
            self._until(lambda: self.has_been_read(sequence), "others have not read what this rank brought")
        except TimeoutError as error:
            raise self._lane.failed(where, error) from error

    def _has_read(self, peer: int, sequence: int) -> bool:
        board = self._peers[peer]
        end = self._read_until[peer] = board.read_until
        return sequence < end or board.has_finished(sequence) or board.is_leaving or self._is_gone(peer)

    def _is_gone(self, peer: int) -> bool:
        """Whether a process is not there any more. The kernel is asked now and then: it takes longer than a look at a board."""
        self._num_looks += 1
        if self._num_looks % _LOOKS:
            return False
        return not _is_there(self._peers[peer])

    def _is_any_gone(self) -> bool:
        return any([self._is_gone(peer) for peer in self._others])

    def leave(self) -> None:
        """Say that this rank will read nothing more."""
        self._board.leave()

    def is_all_read(self) -> bool:
        """Whether peers have read all that this rank brought."""
        return all([self.has_been_read(sequence) for sequence in list(self._unread)])


_ALL: WeakSet[HostComm] = WeakSet()
_HOLDING: set[HostComm] = set()
"""Those that hold something which peers have not read, also if nobody else needs them any more."""
_POLITE: set[int] = set()
"""Processes that say farewell when they end."""


def farewell() -> None:
    """Peers may still read what this process brought: it must not end before, unless they end as well."""
    for comm in list(_ALL):
        comm.leave()
    error = sys.exc_info()[1]
    is_failing = error is not None and not (isinstance(error, SystemExit) and not error.code)
    if is_failing or hasattr(sys, "last_type"):
        return  # Ended by an error: peers will hear of it.
    end = time.monotonic() + _FAREWELL_SECONDS
    for comm in list(_HOLDING):
        while not comm.has_failed and not comm.is_all_read() and time.monotonic() < end:
            time.sleep(0.0005)


def _say_farewell_at_the_end() -> None:
    """Not by atexit, which processes of multiprocessing pass over, and children that were forked from a rank do not."""
    if os.getpid() not in _POLITE:
        _POLITE.add(os.getpid())
        Finalize(None, farewell, exitpriority=0)


def host_comms(lanes: Sequence[TorchComm], deadline: timedelta) -> list[HostComm] | None:
    """The same lanes through each other's memory, or None where ranks cannot read each other. Called by all ranks."""
    _let_go()
    _say_farewell_at_the_end()
    first = lanes[0]
    boards = _own_boards(len(lanes))
    cross_memory.allow_reading()
    mine = [BoardFacts(os.getpid(), board.file, board.address, board.nonce) for board in boards]
    told = gather_bytes(first, json.dumps(mine).encode(), label="boards")
    peers = _open_boards([json.loads(text) for text in told])
    can_read = peers is not None
    verdicts = gather_bytes(first, b"y" if can_read else b"n", label="whether ranks can read each other's memory")
    if peers is None or any(verdict != b"y" for verdict in verdicts):
        return None
    return [HostComm(lane, board, row, deadline) for lane, board, row in zip(lanes, boards, peers, strict=True)]


def _own_boards(num_lanes: int) -> list[Board]:
    """One for each lane; none where the system has no such memory."""
    if not cross_memory.is_available():
        return []
    try:
        return [Board() for _ in range(num_lanes)]
    except OSError:
        return []


def _open_boards(told: Sequence[Sequence[Sequence[int]]]) -> list[list[PeerBoard]] | None:
    """All ranks' boards, lane by lane, or None if a rank has none or cannot be read. In another container, a process's number means
    another one."""
    try:
        by_rank = [[PeerBoard(BoardFacts(*facts)) for facts in rank] for rank in told]
    except OSError:
        return None
    if not all(by_rank) or not all(_is_there(board) for rank in by_rank for board in rank):
        return None
    return [list(lane) for lane in zip(*by_rank, strict=True)]


def _let_go() -> None:
    """Forget lanes that are not used any more and whose last collective was read by now: each keeps threads and sockets."""
    for comm in list(_HOLDING):
        comm.is_all_read()


def _is_there(peer: PeerBoard) -> bool:
    """Whether a process is the rank it is taken for, and may be read."""
    try:
        return peer.is_there()
    except OSError:
        return False
