"""Executes gathers and releases: which units are resident, for whom, in which buffers. The only place that records events."""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from functools import partial

import torch

from shardwise.core.errors import OffloadError, ShardwiseError
from shardwise.core.events import Event, Totals
from shardwise.core.ledger import Kind, Ledger, Tier
from shardwise.core.plan import Plan, StateKind
from shardwise.core.schedule import Entry, Verb
from shardwise.core.unit import Unit
from shardwise.devices import torch_private
from shardwise.devices.pool import Pool
from shardwise.runtime.copying import Copying
from shardwise.runtime.flat import FlatState, ParamState, lies_at
from shardwise.runtime.offload import DiskTier
from shardwise.runtime.parameter import bring_values, point_away, point_to
from shardwise.runtime.written import keep_written
from shardwise.telemetry.meter import Meter
from shardwise.wire.comm import Handle, Lanes, Receipt, Room, put_in_place

_LOG_LIMIT = 4096
_MOST_OFFERED = 64
"""Receipts of gathers that are kept before anyone asks whether the oldest were read."""
PASSED_LIMIT = 2
"""Units that stay gathered for a while after this rank has passed them over."""


class Residency(Enum):
    """Where the full parameters of a unit are. RELEASED -> GATHERING -> GATHERED -> RELEASED."""

    RELEASED = "released"
    GATHERING = "being gathered"
    GATHERED = "gathered"


@dataclass(eq=False)
class UnitState:
    """One unit on one rank. It stays gathered while anyone holds a lease; its parameters are shown if one of them needs that."""

    unit: Unit
    flats: list[FlatState]
    residency: Residency = Residency.RELEASED
    num_leases: int = 0
    is_shown: bool = False
    handles: list[Handle] = field(default_factory=list)
    receipts: list[Receipt] = field(default_factory=list)

    def move(self, expected: Residency, to: Residency) -> None:
        """Change residency, from the state it must be in."""
        if self.residency is not expected:
            raise ShardwiseError(f"Unit '{self.unit.label}' should be {expected.value} but is {self.residency.value}.")
        self.residency = to


class OpLog:
    """A rolling hash of the collectives of one lane, and the latest of them, to compare between ranks."""

    def __init__(self) -> None:
        self.hash = 0
        self.latest: deque[str] = deque(maxlen=_LOG_LIMIT)

    def add(self, op: str) -> None:
        """Note one collective."""
        self.hash = zlib.crc32(op.encode(), self.hash)
        self.latest.append(op)

    def reset(self) -> None:
        """Begin anew, when all ranks have agreed."""
        self.hash = 0
        self.latest.clear()


class Executor:
    """Gathers and releases units of one model on one rank."""

    def __init__(
        self,
        units: Iterable[UnitState],
        plan: Plan,
        lanes: Lanes,
        meter: Meter,
        ledger: Ledger,
        disk: DiskTier | None = None,
    ) -> None:
        self.units = {state.unit.name: state for state in units}
        self.plan = plan
        self.lanes = lanes
        self.meter = meter
        self.ledger = ledger
        self.disk = disk
        self.pool = Pool(ledger, self.flats[0].device, is_scarce=plan.tier(StateKind.GRAD) is Tier.DISK)
        self.totals = Totals()
        self.gather_log = OpLog()
        self.reduce_log = OpLog()
        self._kept: frozenset[str] = frozenset()
        self._passed: deque[str] = deque()
        self._lingering: list[tuple[Handle, torch.Tensor, Kind]] = []
        self._offered: deque[Receipt] = deque()
        self.is_lean = self.flats[0].device.type != "cpu"
        """Whether memory goes before time: on an accelerator, what is gathered ahead waits while a reduction holds memory."""
        self.is_reducing = False
        self.is_behind = False
        """Whether what is computed with does not have the last update yet."""
        self.copying: Copying | None = None
        """What a save copies of the values at rest and of the optimizer's state beside the steps."""
        self._postponed: list[str] = []
        self._foreign_bytes: int | None = None
        """What the allocator had given out beside the ledger before the first step: it is nobody's that is known here."""
        self._most_bytes = 0
        """What it had given out at most, when it was last looked at."""
        self.memory: dict[int, tuple[UnitState, FlatState]] = {}
        """To which unit a gathered buffer belongs, by the key of its storage."""

    def fetch(self, name: str) -> None:
        """Begin to read what of a unit rests on disk: it will be gathered soon."""
        state = self.units[name]
        if self.disk is not None and state.residency is Residency.RELEASED:
            for flat in state.flats:
                if flat.line is not None and flat.is_source_on_disk:
                    self.disk.ahead([flat.line])

    def gather(self, name: str) -> None:
        """Begin to gather a unit, unless it is there or on its way."""
        state = self.units[name]
        if state.residency is not Residency.RELEASED:
            return
        if self._postponed:
            self.gather_postponed()  # All ranks gather in one order.
            return self.gather(name)
        state.move(Residency.RELEASED, Residency.GATHERING)
        fetched = [flat for flat in state.flats if flat.is_fetched]
        if any(not flat.is_fetched_alone for flat in fetched):
            self.gather_log.add(f"gather {name}")
        for flat in fetched:
            handle = self.fill(flat, partial(self._find_room, state, flat), f"parameters of '{state.unit.label}'")
            state.handles.append(handle)
            state.receipts.append(handle.receipt)

    def _find_room(self, state: UnitState, flat: FlatState) -> torch.Tensor:
        """The buffer into which a flat is gathered."""
        if flat.full is None:
            flat.full = self._take(flat)
            self.memory[torch_private.storage_key(flat.full)] = (state, flat)
        return flat.full

    def fill(self, flat: FlatState, room: Room, label: str) -> Handle:
        """Begin to bring all ranks' shards into the full buffer of a flat."""
        if flat.is_aliased or (flat.line is not None and not flat.is_fetched):
            return self.lanes.gather.all_gather(room(), flat.layout.cuts, label=label)
        if flat.is_offered:
            handle = self.lanes.gather.gather_parts(flat.source, flat.layout.cuts, room, label=label)
            self._offered.append(handle.receipt)
            while len(self._offered) > _MOST_OFFERED and self._offered[0].is_read:
                self._offered.popleft()
            return handle
        with self._source_of(flat) as source:
            if flat.is_fetched_alone:
                room().copy_(source)
                return Handle("copy")
            if flat.is_fetched and self.lanes.size > 1 and not self.lanes.gather.is_staged:
                return self._offer_copy(flat, source, room, label)
            full = put_in_place(source, flat.layout.cuts, room, self.lanes.rank)
        return self.lanes.gather.all_gather(full, flat.layout.cuts, label=label)

    @contextmanager
    def _source_of(self, flat: FlatState) -> Iterator[torch.Tensor]:
        """The owned values of a flat in memory. Where they cannot be read, NaN: peers wait for them, and are told when all meet."""
        if self.disk is None or flat.line is None or flat.shard is not None:
            yield flat.source
            return
        try:
            if self.disk.failure is not None:
                raise OffloadError(self.disk.failure)
            load = self.disk.load([flat.line])
        except OffloadError as error:
            self.disk.fail(error)
            yield flat.master
            return
        try:
            yield load.view(flat.line)
        finally:
            load.drop()

    def _offer_copy(self, flat: FlatState, source: torch.Tensor, room: Room, label: str) -> Handle:
        """Let peers read a copy in the dtype of compute: in the gathered buffer, a forward may write before they have read."""
        copy = self.pool.take(source.numel(), flat.precision.compute, flat.device, Kind.WIRE)
        copy.copy_(source)
        handle = self.lanes.gather.gather_parts(copy, flat.layout.cuts, room, label=label)
        self.give_when_read(handle, copy, Kind.WIRE)
        return handle

    def acquire(self, name: str) -> None:
        """Hold a unit gathered, and its compute parameters in the modules."""
        self.hold(name)
        self.show(name)

    def hold(self, name: str) -> None:
        """Hold a unit gathered: its values are in their buffers, and none of its parameters is touched."""
        self.note_activations()
        self.gather(name)
        state = self.units[name]
        if state.residency is Residency.GATHERING:
            for handle in state.handles:
                self.wait(handle, "gather", name)
            state.handles.clear()
            state.move(Residency.GATHERING, Residency.GATHERED)
        state.num_leases += 1

    def show(self, name: str) -> None:
        """Let the compute parameters of a unit that is held have their values, and stand in the modules."""
        state = self.units[name]
        if state.is_shown:
            return
        state.is_shown = True
        with torch.inference_mode(False):  # Views that are made in inference could not be trained later.
            for flat in state.flats:
                if flat.is_fetched and flat.full is not None:
                    point_to(flat, flat.full)
        self._bring_back(state)
        with torch_private.without_torch_function():
            for flat in state.flats:
                for param in flat.params:
                    param.show_instead(param.resting, param.compute)

    def _bring_back(self, state: UnitState) -> None:
        """A module that casts its weights in its own forward has put a copy under them, which updates would not reach."""
        for flat in state.flats:
            if flat.full is not None and not flat.is_fetched and not flat.is_aliased:
                for param in flat.params:
                    if not lies_at(param.compute, flat.full, param.spec.offset):
                        bring_values(param, flat.full)

    def release(self, name: str) -> None:
        """Give one lease back; the last one frees the buffers."""
        state = self.units[name]
        if state.num_leases < 1:
            raise ShardwiseError(f"Unit '{state.unit.label}' was released more often than it was gathered.")
        state.num_leases -= 1
        self.drop(name)

    def keep(self, names: frozenset[str]) -> None:
        """Let the buffers of these units stay when the last lease ends, and of no others. They are looked at when next dropped."""
        self._kept = names

    def drop(self, name: str) -> None:
        """Take a unit that nobody holds out of the modules, and free its buffers unless they are kept."""
        state = self.units[name]
        if state.num_leases or state.residency is Residency.RELEASED:
            return
        self._hide(state)
        if name not in self._kept:
            self._free(name, state)

    def _hide(self, state: UnitState) -> None:
        if not state.is_shown:
            return
        state.is_shown = False
        with torch_private.without_torch_function():
            written = [
                param
                for flat in state.flats
                for param in flat.params
                if param.is_handed_out or param.compute._version != param.version
            ]
            if written:
                self._keep_written(state, written)
            for flat in state.flats:
                for param in flat.params:
                    param.show_instead(param.compute, param.resting)
                if flat.is_fetched and flat.full is not None:
                    point_away(flat)

    def _keep_written(self, state: UnitState, written: Sequence[ParamState]) -> None:
        """What a forward has written to its own weights belongs to them: each rank keeps its own part."""
        self.wait_until_copied()
        self.wait_until_read(state.receipts)  # Peers gather what was there before.
        with torch.no_grad():
            for param in written:
                keep_written(param, is_behind=self.is_behind)

    def _free(self, name: str, state: UnitState) -> None:
        for handle in state.handles:
            self.record("gather", name, handle, handle.cancel())
        state.handles.clear()
        state.receipts.clear()
        for flat in state.flats:
            if flat.is_fetched and flat.full is not None:
                self.memory.pop(torch_private.storage_key(flat.full), None)
                buffer, flat.full = flat.full, None
                self._give(flat, buffer)
        state.residency = Residency.RELEASED

    def _take(self, flat: FlatState) -> torch.Tensor:
        buffer, flat.reserved = flat.reserved, None
        if buffer is not None and buffer.dtype == flat.precision.compute:
            self.ledger.add(Kind.GATHERED, buffer.numel() * buffer.element_size())
            return buffer
        return self.pool.take(flat.layout.numel, flat.precision.compute, flat.device, Kind.GATHERED)

    def _give(self, flat: FlatState, buffer: torch.Tensor) -> None:
        """Hand a buffer back; if someone holds a view of it, it waits for this flat, so that the view is right when it is read."""
        if torch_private.is_shared(buffer):
            flat.reserved = buffer
            self.ledger.add(Kind.GATHERED, -buffer.numel() * buffer.element_size())
        else:
            self.pool.give(buffer, Kind.GATHERED)

    def give_when_read(self, handle: Handle, buffer: torch.Tensor, kind: Kind) -> None:
        """Hand a buffer back to the pool when the collective is over here and all peers have read what this rank offered of it."""
        self._lingering.append((handle, buffer, kind))
        del buffer
        self.sweep()

    def sweep(self) -> None:
        """Hand back what peers have read by now."""
        waiting, self._lingering = self._lingering, []
        while waiting:
            handle, buffer, kind = waiting.pop()
            if handle.is_over and handle.receipt.is_read:
                self.pool.give(buffer, kind)
            else:
                self._lingering.append((handle, buffer, kind))

    @property
    def flats(self) -> list[FlatState]:
        """All flat buffers, unit by unit: the same order on all ranks."""
        return [flat for unit in self.units.values() for flat in unit.flats]

    def before_change(self) -> None:
        """Values at rest are about to be changed: no peer may still be reading them, nor be about to, and no save be copying them."""
        self.wait_until_copied()
        self.keep(frozenset())
        if self.plan.fetches_params:
            self.drop_idle()  # Gathered ahead in a step that failed, or kept for a backward that did not come.
        offered, self._offered = self._offered, deque()
        self.wait_until_read(offered)
        if self.disk is not None:
            self.disk.forget_all_ahead(but=Kind.OPTIM)  # What updates need was read for them.

    def wait_until_copied(self) -> None:
        """Values at rest are about to be changed, or given to someone who may: a save may still be copying them."""
        copying = self.copying
        if copying is not None:
            self.meter.hold_up(copying.wait())
            self.copying = None

    def note_activations(self) -> None:
        """Book what the allocator of an accelerator has given out beyond what is booked: activations, and gradients on their way.

        Also what it had given out between the last look and this one, if that was more than ever before.
        """
        if not self.is_lean or not self.meter.is_on:
            return
        held = self.ledger.live_on(Tier.DEVICE) - self.ledger.live(Kind.ACTIVATION)
        now, most = torch_private.allocated_bytes(self.flats[0].device)
        if self._foreign_bytes is None:
            self._foreign_bytes = now - held
        elif most != self._most_bytes:
            self.ledger.set(Kind.ACTIVATION, max(0, most - held - self._foreign_bytes))
        self._most_bytes = most
        self.ledger.set(Kind.ACTIVATION, max(0, now - held - self._foreign_bytes))

    def trim(self) -> None:
        """Free what nobody needs: also what was shared when it was released, perhaps with a collective that was just ending."""
        self.sweep()
        if self.disk is not None:
            self.disk.sweep()
        self.pool.end_step()
        if self.is_lean:
            self.ledger.set(Kind.ACTIVATION, 0)
            self._most_bytes = torch_private.allocated_bytes(self.flats[0].device)[1]  # Of the update: none of these.
        for state in self.units.values():
            for flat in state.flats:
                if flat.reserved is not None and not torch_private.is_shared(flat.reserved):
                    flat.reserved = None

    def visit(self, entries: Sequence[Entry], arrived: Entry | None, spared: frozenset[str] = frozenset()) -> None:
        """Do the gathers of entries that this rank passed over, and begin those of the one it arrived at.

        The order of gathers is the schedule's: a rank that skips a unit takes part in its gather all the same. The last few are
        kept for a while: a rank that comes to them later needs no further gather, in which it would be alone. Those that are
        ``spared`` stay until all that is idle is dropped.
        """
        for entry in entries:
            self._begin_gathers(entry)
            self.gather(entry.moment.unit)
            if entry.moment.unit not in spared:
                self._passed.append(entry.moment.unit)
            while len(self._passed) > PASSED_LIMIT:
                self.drop(self._passed.popleft())
        if arrived is not None:
            self._begin_gathers(arrived)

    def _begin_gathers(self, entry: Entry) -> None:
        for op in entry.ops:
            if op.verb is Verb.GATHER:
                if self.is_reducing and op.unit != entry.moment.unit:
                    # One that is there needs no gather now, and must not get one later: other ranks make none.
                    if self.units[op.unit].residency is Residency.RELEASED and op.unit not in self._postponed:
                        self._postponed.append(op.unit)
                else:
                    self.gather(op.unit)
            elif op.verb is Verb.FETCH:
                self.fetch(op.unit)

    def gather_postponed(self) -> None:
        """Begin the gathers that waited for a reduction to end."""
        postponed, self._postponed = self._postponed, []
        for name in postponed:
            self.gather(name)

    def drop_idle(self) -> None:
        """Free units that were gathered ahead, or passed over, and not used."""
        if self._postponed:
            self.gather_postponed()
        self._passed.clear()
        for name in self.units:
            self.drop(name)

    def find(self, tensor: torch.Tensor) -> tuple[UnitState, FlatState] | None:
        """The unit in whose gathered buffer a tensor lies."""
        return self.memory.get(torch_private.storage_key(tensor)) if self.memory else None

    def refresh(self, names: Iterable[str], *, with_frozen: bool = False) -> None:
        """Bring updated shards into the full buffers that stay resident (stages 0 to 2)."""
        pending: list[tuple[str, Handle]] = []
        for name in names:
            for flat in self.units[name].flats:
                if flat.is_fetched:
                    continue
                if with_frozen or flat.spec.trainable or any(param.compute.requires_grad for param in flat.params):
                    pending.append((name, self._refill(name, flat)))
        for name, handle in pending:
            self.wait(handle, "gather", name)
        self.wait_until_read(handle.receipt for _, handle in pending)

    def _refill(self, name: str, flat: FlatState) -> Handle:
        if flat.is_owned_whole:
            if flat.full is not None and not flat.is_aliased and flat.line is None:
                flat.full.copy_(flat.master)
            return Handle("copy")
        self.wait_until_copied()  # The values at rest may be a part of the full buffer.
        self.gather_log.add(f"refresh {name}")
        state = self.units[name]
        return self.fill(flat, partial(self._find_room, state, flat), f"updated parameters of '{state.unit.label}'")

    def wait(self, handle: Handle, op: str, name: str) -> None:
        """Wait for a collective and record it."""
        self.record(op, name, handle, handle.wait())

    def record(self, op: str, name: str, handle: Handle, waited_seconds: float) -> None:
        """Count a collective that was waited for. A world of one issues none."""
        if not handle.num_messages:
            return
        event = Event(
            op,
            name,
            handle.link,
            handle.wire_bytes,
            handle.num_messages,
            handle.begin_seconds,
            handle.end_seconds,
            handle.moving_seconds,
            waited_seconds,
        )
        self.totals.record(event)
        self.meter.record(event)

    def wait_until_read(self, receipts: Iterable[Receipt]) -> None:
        """Wait until peers have read what they were offered."""
        begin = self.meter.clock()
        for receipt in receipts:
            receipt.wait()
        self.meter.wait(self.meter.clock() - begin)

    def reset(self) -> None:
        """After a failure: nobody holds anything any more."""
        self.keep(frozenset())
        for state in self.units.values():
            state.num_leases = 0
        self.drop_idle()
