"""The disk tier's store: one file for each process, with places in it that are read and written beside the computation."""

from __future__ import annotations

import threading
import weakref
from pathlib import Path

import torch

from shardwise.core.errors import UsageError
from shardwise.stores.direct_io import Piece
from shardwise.stores.disk_file import DiskFile
from shardwise.stores.leftovers import check_name
from shardwise.stores.ranges import FreeRanges, round_up
from shardwise.stores.store import Slot, Ticket
from shardwise.stores.workers import Transfer, Workers


class DiskStore:
    """Bytes in one new file, which goes with the store, and at the latest with the process.

    What processes left there that were killed is removed when a store is made in the same folder. A process that is forked
    cannot use the store, and does not remove it.

    Args:
        folder: Made, for this user alone, if it is not there.
        name: Part of the file's name, for people: say, of the run and the rank.
        num_workers: Threads that read and write: so many pieces are on their way at once. Each needs 1 MiB of its own for
            memory that is not lined up with the file.
        direct: Whether bytes go past the page cache, where the file system allows it.
        is_passing: Whether the folder, if it is made here, goes with the last file in it.

    Raises:
        OffloadError: No file can be made there.
    """

    def __init__(self, folder: Path, *, name: str, num_workers: int = 2, direct: bool = True, is_passing: bool = False) -> None:
        check_name(name)
        if num_workers < 1:
            raise UsageError(f"A store needs at least one worker but num_workers is {num_workers}.")
        self._file = DiskFile(folder, name, direct=direct, is_passing=is_passing)
        self._workers = Workers(self._file)
        self._close = weakref.finalize(self, self._workers.close)  # Called at exit, too.
        self._lock = threading.Lock()
        self._slots: set[Slot] = set()
        self._free = FreeRanges()
        self._workers.start(num_workers)

    @property
    def path(self) -> Path:
        """The file."""
        return self._file.path

    @property
    def is_direct(self) -> bool:
        """Whether bytes go past the page cache."""
        return self._file.is_direct

    @property
    def file_bytes(self) -> int:
        """What the file takes on the disk: the most that was ever reserved at once, and what fell between."""
        return self._file.num_bytes

    @property
    def free_bytes(self) -> int:
        """What of the file nobody has reserved."""
        return self._free.free_bytes

    @property
    def live_bytes(self) -> int:
        """What is reserved, in whole blocks."""
        return self.file_bytes - self.free_bytes

    @property
    def largest_free_bytes(self) -> int:
        """The most that can be reserved without a larger file: far less than `free_bytes` where that is scattered."""
        return self._free.largest_bytes

    def reserve(self, num_bytes: int, label: str) -> Slot:
        """A place for so many bytes, which hold anything before they are written. The file grows if there is none.

        Args:
            label: What is kept there, as errors call it: "optimizer state 'exp_avg' of unit 'blocks.0'".

        Raises:
            OffloadError: The disk is full.
        """
        if num_bytes < 0:
            raise UsageError(f"A place for {label} cannot have {num_bytes} bytes.")
        self._file.check_open()
        room_bytes = round_up(num_bytes)
        with self._lock:
            offset = self._free.take(room_bytes)
            if offset is None:
                end = self._file.num_bytes
                missing_bytes = room_bytes - self._free.ending_at(end)
                self._file.grow(missing_bytes, label)
                self._free.give(end, missing_bytes)
                offset = self._free.take(room_bytes)
            slot = Slot(offset or 0, num_bytes, label)
            self._slots.add(slot)
        return slot

    def free(self, slot: Slot) -> None:
        """Nobody needs its bytes any more: another slot may have the place. What is under way there comes to its end first."""
        self._file.check_open()
        with self._lock:
            self._check_slot(slot)
            self._slots.remove(slot)
            room_bytes = round_up(slot.num_bytes)
            self._workers.forget(slot.offset, slot.offset + room_bytes)
            self._free.give(slot.offset, room_bytes)

    def read(self, slot: Slot, target: torch.Tensor, *, at: int = 0) -> Ticket:
        """Fill a contiguous tensor on the CPU with what lies in a slot, from byte ``at`` of it on.

        What was asked to be written there before is what it gets. Nothing is copied if the tensor is lined up with the slot
        (as those of `Staging` are, unless ``at`` is odd) or the page cache is in between.
        """
        return self._submit(slot, target, at, is_write=False)

    def write(self, slot: Slot, source: torch.Tensor, *, at: int = 0) -> Ticket:
        """Put the bytes of a contiguous tensor on the CPU into a slot, from byte ``at`` of it on.

        What was asked to be read there before gets what was there.
        """
        return self._submit(slot, source, at, is_write=True)

    def _submit(self, slot: Slot, tensor: torch.Tensor, at: int, *, is_write: bool) -> Ticket:
        self._file.check_open()
        self._check_slot(slot)
        _check_tensor(slot, tensor, at)
        ticket = Ticket(tensor)
        if not tensor.nbytes:
            ticket.finish()
            return ticket
        ends_slot = at + tensor.nbytes == slot.num_bytes
        whole = Piece(slot.offset + at, tensor.data_ptr(), tensor.nbytes, ends_slot)
        self._workers.submit(Transfer(whole, is_write, slot.label, ticket))
        return ticket

    def _check_slot(self, slot: Slot) -> None:
        if slot not in self._slots:
            raise UsageError(
                f"The place of {slot.label} was freed, or is of another store than {self.path}: reserve one first."
            )

    def close(self) -> None:
        """Delete the file, and stop the threads. What is still under way fails. A second call does nothing."""
        self._close()


def _check_tensor(slot: Slot, tensor: torch.Tensor, at: int) -> None:
    if tensor.device.type != "cpu" or tensor.layout is not torch.strided or not tensor.is_contiguous():
        raise UsageError(
            f"Expected a contiguous tensor on the CPU for {slot.label} but got one of shape {tuple(tensor.shape)}, strides "
            f"{tensor.stride()} and device {tensor.device}. Copy it into one first."
        )
    if at < 0 or at + tensor.nbytes > slot.num_bytes:
        raise UsageError(
            f"{tensor.nbytes} bytes from byte {at} on were to be moved for {slot.label}, but its place has {slot.num_bytes}."
        )
