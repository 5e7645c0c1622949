"""Worlds inside one process: of one rank, and of several threads for tests. No sockets, no processes."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch

from shardwise.core.errors import DesyncError, RankLostError
from shardwise.wire.comm import Exchange, Handle, Lanes, Room, part_of, put_in_place

Result = TypeVar("Result")


class SoloComm:
    """A world of one rank: nothing moves, nothing is counted."""

    rank = 0
    size = 1
    link = ""
    is_staged = False

    def all_gather(self, buffer: torch.Tensor, cuts: Sequence[int], *, label: str) -> Handle:
        """The buffer is complete as it is."""
        return Handle("all_gather", result=buffer)

    def gather_parts(self, source: torch.Tensor, cuts: Sequence[int], room: Room, *, label: str) -> Handle:
        """This rank's part is the whole."""
        return self.all_gather(put_in_place(source, cuts, room, self.rank), cuts, label=label)

    def exchange(self, source: torch.Tensor, cuts: Sequence[int], *, room: torch.Tensor | None = None, label: str) -> Exchange:
        """One's own part is the whole."""
        return Exchange("exchange", _part=lambda rank, low, high: source[low:high])

    def swap(
        self, sends: Sequence[tuple[int, torch.Tensor]], receives: Sequence[tuple[int, torch.Tensor]], *, label: str
    ) -> Handle:
        """There is nobody to talk to."""
        return Handle("swap")

    def broadcast(self, buffer: torch.Tensor, source: int, *, label: str) -> Handle:
        """The buffer is rank 0's."""
        return Handle("broadcast", result=buffer)

    def gather_small(self, values: torch.Tensor, *, label: str) -> Handle:
        """A matrix of one row."""
        return Handle("gather_small", result=values[None])


def solo_lanes() -> Lanes:
    """The lanes of a world of one."""
    return Lanes(SoloComm(), SoloComm(), SoloComm(), ("local",))


@dataclass
class _Meeting:
    """One collective of one lane: what each rank brought, and who has finished reading."""

    label: str
    brought: dict[int, Any] = field(default_factory=dict)
    num_read: int = 0


class ThreadComm:
    """A rank of a world of threads. A collective is a meeting: a copy is brought at once, what all brought is read in ``wait``.

    So values are there after ``wait`` and not before, and lanes do not wait for each other, as between processes.
    """

    link = "in process"
    is_staged = True

    def __init__(self, rank: int, size: int, lane: _Lane) -> None:
        self.rank = rank
        self.size = size
        self._lane = lane
        self._sequence = 0
        self._num_letters: Counter[tuple[int, int]] = Counter()

    def _meet(self, label: str, brought: torch.Tensor, read: Callable[[dict[int, Any]], None]) -> Callable[[], None]:
        """Bring a copy, so that nobody waits here; what is returned waits for all and reads what they brought."""
        sequence, self._sequence = self._sequence, self._sequence + 1
        meeting = self._lane.bring(sequence, label, self.rank, brought.detach().clone())
        return lambda: self._lane.read(sequence, meeting, label, read)

    def gather_parts(self, source: torch.Tensor, cuts: Sequence[int], room: Room, *, label: str) -> Handle:
        """From a buffer that holds one's own part."""
        return self.all_gather(put_in_place(source, cuts, room, self.rank), cuts, label=label)

    def all_gather(self, buffer: torch.Tensor, cuts: Sequence[int], *, label: str) -> Handle:
        """Copy every other rank's slice."""

        def read(brought: dict[int, torch.Tensor]) -> None:
            for peer, theirs in brought.items():
                if peer != self.rank:
                    buffer[cuts[peer] : cuts[peer + 1]].copy_(theirs[cuts[peer] : cuts[peer + 1]])

        finish = self._meet(f"all_gather of {buffer.numel()} {buffer.dtype}: {label}", buffer, read)
        own = cuts[self.rank + 1] - cuts[self.rank]
        return Handle("all_gather", (cuts[-1] - own) * buffer.element_size(), self.size - 1, buffer, finish, link=self.link)

    def exchange(self, source: torch.Tensor, cuts: Sequence[int], *, room: torch.Tensor | None = None, label: str) -> Exchange:
        """Collect every rank's version of one's own slice."""
        start, stop = cuts[self.rank], cuts[self.rank + 1]
        own = stop - start
        parts = source.new_empty(self.size * own) if room is None else room

        def read(brought: dict[int, torch.Tensor]) -> None:
            for peer, theirs in brought.items():
                parts[peer * (stop - start) : (peer + 1) * (stop - start)].copy_(theirs[start:stop])

        finish = self._meet(f"exchange of {source.numel()} {source.dtype}: {label}", source, read)
        sent_bytes = (cuts[-1] - (stop - start)) * source.element_size()
        return Exchange("exchange", sent_bytes, self.size - 1, None, finish, _part=part_of(parts, own))

    def swap(
        self, sends: Sequence[tuple[int, torch.Tensor]], receives: Sequence[tuple[int, torch.Tensor]], *, label: str
    ) -> Handle:
        """Leave letters for the peers, and take theirs: only those who talk to each other meet."""
        for peer, tensor in sends:
            self._lane.post(self._next_letter(self.rank, peer), tensor.clone())
        expected = [(self._next_letter(peer, self.rank), target) for peer, target in receives]

        def finish() -> None:
            for letter, target in expected:
                target.copy_(self._lane.collect(letter, label))

        return Handle("swap", sum(t.numel() * t.element_size() for _, t in sends), len(sends), None, finish, link=self.link)

    def _next_letter(self, source: int, target: int) -> tuple[int, int, int]:
        self._num_letters[source, target] += 1
        return source, target, self._num_letters[source, target]

    def broadcast(self, buffer: torch.Tensor, source: int, *, label: str) -> Handle:
        """Copy the source's buffer."""

        def read(brought: dict[int, torch.Tensor]) -> None:
            if self.rank != source:
                buffer.copy_(brought[source])

        finish = self._meet(f"broadcast of {buffer.numel()} {buffer.dtype}: {label}", buffer, read)
        return Handle("broadcast", buffer.numel() * buffer.element_size(), 1, buffer, finish, link=self.link)

    def gather_small(self, values: torch.Tensor, *, label: str) -> Handle:
        """Stack all ranks' values."""
        rows = values.new_empty((self.size, *values.shape))

        def read(brought: dict[int, torch.Tensor]) -> None:
            for peer, theirs in brought.items():
                rows[peer].copy_(theirs)

        finish = self._meet(f"gather_small of {values.numel()} {values.dtype}: {label}", values, read)
        wire_bytes = values.numel() * values.element_size() * (self.size - 1)
        return Handle("gather_small", wire_bytes, self.size - 1, rows, finish, link=self.link)


class _Lane:
    """Meetings of one lane, by sequence number."""

    def __init__(self, size: int, timeout_seconds: float) -> None:
        self._size = size
        self._timeout_seconds = timeout_seconds
        self._meetings: dict[int, _Meeting] = {}
        self._changed = threading.Condition()
        self._failure: BaseException | None = None
        self._letters: dict[tuple[int, int, int], torch.Tensor] = {}

    def post(self, letter: tuple[int, int, int], tensor: torch.Tensor) -> None:
        """Leave a tensor for one peer; a letter is known by source, target and number."""
        with self._changed:
            self._letters[letter] = tensor
            self._changed.notify_all()

    def collect(self, letter: tuple[int, int, int], label: str) -> torch.Tensor:
        """Take the tensor that one peer left, waiting for it if need be."""
        with self._changed:
            self._changed.wait_for(lambda: letter in self._letters or self._failure is not None, self._timeout_seconds)
            if letter not in self._letters:
                raise RankLostError(f"Rank {letter[0]} did not take part in '{label}' ({self._failure or 'deadline'}).")
            return self._letters.pop(letter)

    def fail(self, error: BaseException) -> None:
        """Wake everybody: a rank of this world has failed."""
        with self._changed:
            self._failure = error
            self._changed.notify_all()

    def bring(self, sequence: int, label: str, rank: int, brought: torch.Tensor) -> _Meeting:
        """Come to a meeting with something, and go on at once."""
        with self._changed:
            meeting = self._meetings.setdefault(sequence, _Meeting(label))
            if meeting.label.partition(":")[0] != label.partition(":")[0]:
                error = DesyncError(f"Rank {rank} is at '{label}' where another rank is at '{meeting.label}'.")
                self._failure = error
                self._changed.notify_all()
                raise error
            meeting.brought[rank] = brought
            self._changed.notify_all()
            return meeting

    def read(self, sequence: int, meeting: _Meeting, label: str, read: Callable[[dict[int, Any]], None]) -> None:
        """Wait for all, and read what they brought; the last one clears up."""
        with self._changed:
            self._wait(lambda: len(meeting.brought) == self._size, meeting, label)
        with torch.no_grad():
            read(meeting.brought)
        with self._changed:
            meeting.num_read += 1
            if meeting.num_read == self._size:
                self._meetings.pop(sequence, None)

    def _wait(self, ready: Callable[[], bool], meeting: _Meeting, label: str) -> None:
        arrived = self._changed.wait_for(lambda: ready() or self._failure is not None, self._timeout_seconds)
        if ready():
            return
        if arrived:
            raise RankLostError(f"'{label}' was given up because another rank failed: {self._failure}")
        missing = sorted(set(range(self._size)) - set(meeting.brought))
        raise RankLostError(f"Ranks {missing} did not arrive at '{label}' within {self._timeout_seconds} s.")


class ThreadWorld:
    """A world of threads in one process.

    >>> def main(lanes):
    ...     rows = lanes.gather.gather_small(torch.tensor([lanes.rank]), label="ranks")
    ...     rows.wait()
    ...     return rows.result.flatten().tolist()
    >>> ThreadWorld(3).run(main)
    [[0, 1, 2], [0, 1, 2], [0, 1, 2]]
    """

    def __init__(self, size: int, *, timeout_seconds: float = 60.0) -> None:
        self.size = size
        self._timeout_seconds = timeout_seconds

    def run(self, main: Callable[[Lanes], Result]) -> list[Result]:
        """Run ``main`` as every rank; returns the results by rank, or raises the first error with its rank named."""
        lanes = [_Lane(self.size, self._timeout_seconds) for _ in range(3)]
        results: dict[int, Result] = {}
        errors: dict[int, BaseException] = {}

        def run_rank(rank: int) -> None:
            gather, reduce, regather = (ThreadComm(rank, self.size, lane) for lane in lanes)
            try:
                results[rank] = main(Lanes(gather, reduce, regather, ("local",) * self.size))
            except BaseException as error:
                errors[rank] = error
                for lane in lanes:
                    lane.fail(error)

        threads = [threading.Thread(target=run_rank, args=(rank,), daemon=True) for rank in range(self.size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            rank, error = next(iter(errors.items()))
            error.add_note(f"raised on rank {rank} of a world of {self.size} threads")
            raise error
        return [results[rank] for rank in range(self.size)]
