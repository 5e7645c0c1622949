"""Gradients on their way through a step, as bytes: full, under way, and reduced. The engine's rules, without tensors."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from shardwise.core.ledger import Kind, Ledger, Tier
from shardwise.core.plan import Plan, StateKind
from shardwise.planning.held import HeldFlat, Place
from shardwise.planning.lending import Lending, Loan
from shardwise.planning.profile import Beat
from shardwise.planning.residence import Residence
from shardwise.runtime.reduce import EXCHANGE_LIMIT
from shardwise.runtime.reducer import MOST_IN_FLIGHT

_HALVING = 1.75
"""Parts of a buffer that recursive halving takes at most: what is sent and received in its first round, the sums, and what its second
round sends."""

Passing = Callable[[int], None]
"""Told of bytes that are taken on the device and given back at once."""


@dataclass(eq=False)
class _Local:
    """Full gradients of one flat buffer: in memory that was lent, or in that of a gradient itself."""

    loan: Loan
    filled: set[str] = field(default_factory=set)


@dataclass(eq=False)
class _Underway:
    flat: HeldFlat
    local: Loan
    room: Loan | None


class Reductions:
    """Gradients of one rank."""

    def __init__(self, units: dict[str, list[HeldFlat]], plan: Plan, place: Place, ledger: Ledger, lending: Lending) -> None:
        self._units = {name: [flat for flat in flats if flat.spec.trainable] for name, flats in units.items()}
        self._flat_of = {param.name: flat for flats in units.values() for flat in flats for param in flat.spec.params}
        self._plan = plan
        self._place = place
        self._ledger = ledger
        self._lending = lending
        self._most_in_flight = MOST_IN_FLIGHT if place.is_on_host else 0
        self._locals: dict[str, _Local] = {}
        self._in_flight: deque[list[_Underway]] = deque()
        self._reduced: dict[str, Loan | None] = {}
        self._completed: list[tuple[HeldFlat, Loan | None]] = []
        self._regathers: list[Loan] = []
        """What gathers of reduced gradients take besides."""
        self._order: tuple[str, ...] = ()
        self._next = 0
        self._ready: set[str] = set()

    @property
    def largest_bytes(self) -> int:
        """What the reduction of one unit holds at most, with what others send. Nobody else is there to wait for, in a world of one."""
        if self._place.num_ranks == 1:
            return 0
        num_buffers = 2 if self._place.is_staged else 1
        return num_buffers * max((sum(flat.local_bytes for flat in flats) for flats in self._units.values()), default=0)

    def begin(self, order: Sequence[str]) -> None:
        """A backward begins whose units are reduced in an order."""
        self._order, self._next = tuple(order), 0
        self._ready.clear()

    def accumulate(self, beat: Beat, residence: Residence, passing: Passing) -> None:
        """A parameter has its gradient."""
        flat = self._flat_of[beat.param]
        local = self._locals.get(flat.spec.name)
        if local is None and not self._most_in_flight:
            self._complete_ready(residence, passing)
        if local is None:
            local = self._locals[flat.spec.name] = _Local(self._make_local(flat, beat))
        elif beat.param in local.filled:
            passing(self._term_bytes(flat, beat))
        local.filled.add(beat.param)

    def _make_local(self, flat: HeldFlat, beat: Beat) -> Loan:
        """Memory for full gradients: a gradient's own, where it fills the buffer and nobody keeps it."""
        is_all = len(flat.spec.params) == 1 and flat.spec.params[0].numel == flat.layout.numel
        is_taken = is_all and beat.is_own and beat.grad_bytes == flat.local_bytes
        if is_taken and StateKind.GRAD in self._plan.sharded and self._place.num_ranks > 1:
            # It is an activation no more, but its memory is not freed.
            self._ledger.add(Kind.ACTIVATION, -beat.grad_bytes)
            self._ledger.add(Kind.FULL_GRAD, beat.grad_bytes)
            return Loan(beat.grad_bytes, beat.grad_bytes, Kind.FULL_GRAD, Tier.DEVICE)
        return self._lending.take(flat.local_bytes, Kind.FULL_GRAD)

    def _term_bytes(self, flat: HeldFlat, beat: Beat) -> int:
        """What is made of a gradient before it is added: cast, and weighted."""
        numel = beat.grad_bytes // flat.precision.compute.itemsize
        num_copies = (flat.precision.reduce != flat.precision.compute) + (self._place.num_ranks > 1)
        return numel * flat.precision.reduce.itemsize * num_copies

    def mark_ready(self, unit: str, residence: Residence, passing: Passing) -> None:
        """All gradients of a unit are in."""
        self._ready.add(unit)
        while self._next < len(self._order) and self._order[self._next] in self._ready:
            self._issue_next(residence, passing)

    def finish_order(self, residence: Residence, passing: Passing) -> None:
        """The backward has ended."""
        while self._next < len(self._order):
            self._issue_next(residence, passing)

    def _issue_next(self, residence: Residence, passing: Passing) -> None:
        self._next += 1
        self._complete_ready(residence, passing)
        batch = []
        for flat in self._units[self._order[self._next - 1]]:
            held = self._locals.pop(flat.spec.name, None)
            local = held.loan if held is not None else self._lending.take(flat.local_bytes, Kind.FULL_GRAD)
            batch.append(_Underway(flat, local, self._room(flat, passing)))
        self._in_flight.append(batch)
        residence.is_reducing = not self._place.is_on_host

    def _room(self, flat: HeldFlat, passing: Passing) -> Loan | None:
        """Memory for what others send."""
        if not self._place.is_staged:
            return None
        if self._place.num_ranks > EXCHANGE_LIMIT:
            passing(round(_HALVING * flat.local_bytes))
            return self._lending.take(flat.part * flat.precision.reduce.itemsize, Kind.WIRE)  # The sum.
        return self._lending.take(self._place.num_ranks * flat.part * flat.precision.reduce.itemsize, Kind.WIRE)

    def _complete_ready(self, residence: Residence, passing: Passing) -> None:
        while len(self._in_flight) > self._most_in_flight:
            self._complete(self._in_flight.popleft())
        self._end_reducing(residence)

    def _end_reducing(self, residence: Residence) -> None:
        if residence.is_reducing and not self._in_flight:
            residence.is_reducing = False
            residence.gather_postponed()

    def _complete(self, batch: list[_Underway]) -> None:
        for item in batch:
            flat, part_bytes = item.flat, item.flat.part * item.flat.precision.reduce.itemsize
            early = None
            if self._place.is_on_host and not flat.is_kept_whole:
                early = self._lending.take(part_bytes, Kind.GRAD)
            if item.room is not None:
                self._lending.give(item.room)
            if flat.is_kept_whole:
                reduced = self._lending.rebook(item.local, Kind.GRAD)
            else:
                reduced = early or self._lending.take(part_bytes, Kind.GRAD)
                self._lending.give(item.local)
            is_early = StateKind.OPTIM in self._plan.sharded
            if not is_early:
                self._regathers.append(self._lending.take(flat.padded_bytes(flat.precision.reduce.itemsize), Kind.WIRE))
            self._completed.append((flat, self._bring_to_rest(flat, reduced) if is_early else reduced))

    def _bring_to_rest(self, flat: HeldFlat, reduced: Loan | None) -> Loan | None:
        if flat.rest.grad is Tier.DEVICE or reduced is None or reduced.tier is not Tier.DEVICE:
            return reduced
        if flat.rest.grad is Tier.DISK:
            self._ledger.add(Kind.GRAD, reduced.num_bytes, Tier.DISK)
            self._lending.give(reduced)
            return None
        away = self._lending.take(flat.own * flat.precision.reduce.itemsize, Kind.GRAD, flat.rest.grad)
        self._lending.give(reduced)
        return away

    def complete_all(self, residence: Residence) -> None:
        """Wait for all reductions, and let gradients come to rest, added to earlier ones."""
        while self._in_flight:
            self._complete(self._in_flight.popleft())
        self._end_reducing(residence)
        while self._regathers:
            self._lending.give(self._regathers.pop())
        completed = [(flat, self._bring_to_rest(flat, reduced)) for flat, reduced in self._completed]
        self._completed.clear()
        for flat, reduced in completed:
            before = self._reduced.get(flat.spec.name)
            self._reduced[flat.spec.name] = reduced
            if before is not None:
                self._lending.give(before)

    def clear(self) -> None:
        """Gradients are cleared."""
        for loan in self._reduced.values():
            if loan is not None:
                self._lending.give(loan)
        self._reduced.clear()
        self._ledger.set(Kind.GRAD, 0, Tier.DISK)
