"""Predicted peak memory of one rank, by tier and kind: the real schedule walked with a ledger, and a profile's activations beside it.

Nothing is run. What is held when follows the engine's own rules (``residence.py``, ``reductions.py``, ``held.py``); a test holds them
against what simulated devices count. Where something cannot be known, more is predicted rather than less.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from shardwise.core.errors import UsageError
from shardwise.core.footprint import LOADS_AT_ONCE
from shardwise.core.layout import ALIGNMENT
from shardwise.core.ledger import Account, Kind, Ledger, Tier
from shardwise.core.plan import Plan, StateKind
from shardwise.core.rest import rests_of
from shardwise.core.schedule import build_schedule
from shardwise.planning.held import HeldFlat, Place, all_flats, held_flats
from shardwise.planning.lending import Lending
from shardwise.planning.profile import Beat, Cause, Profile, beats_of
from shardwise.planning.reductions import Reductions
from shardwise.planning.residence import Residence
from shardwise.planning.updates import UpdateCost, update_cost
from shardwise.runtime.disk_setup import need_of_flats
from shardwise.runtime.exact import CHUNK, accumulation_dtype
from shardwise.runtime.saved_places import PIECE_BYTES

_NUM_STEPS = 2
"""The first lets the host's pool of memory come to what it is in all later ones."""
_DIGEST_COPIES = 7
"""Numbers for each block that sums are drawn up with at once."""
_FORWARD = (Cause.OPEN, Cause.CLOSE)


@dataclass(frozen=True)
class Loop:
    """How a training loop goes about a step.

    Args:
        accumulation: Micro-batches of a step.
        is_synced: Whether each of them is reduced; else those before the last run inside ``no_sync``.
        optimizer: An optimizer, its name, or what `update_cost` has found.
    """

    accumulation: int = 1
    is_synced: bool = False
    optimizer: object = "adamw"

    @property
    def cost(self) -> UpdateCost:
        """What its updates take."""
        return self.optimizer if isinstance(self.optimizer, UpdateCost) else update_cost(self.optimizer)  # type: ignore[arg-type]


@dataclass(frozen=True)
class MemoryPrediction:
    """The most bytes that one rank holds in a step: by tier, with the inputs; and of each kind, which need not be at one time."""

    peak_bytes: Mapping[Tier, int] = field(hash=False)
    peak_moment: Mapping[Tier, str] = field(hash=False)
    """Where in a step that is."""
    by_account: Mapping[Account, int] = field(hash=False)
    at_peak: Mapping[Kind, int] = field(hash=False)
    """What the device holds at its peak."""
    input_bytes: int
    """One micro-batch, on the device."""
    late_bytes: int = 0
    """What may come on top on the device: a collective lets go of its buffers a little after it has ended."""

    @property
    def device_bytes(self) -> int:
        """The most that is held on the device."""
        return self.peak_bytes.get(Tier.DEVICE, 0)

    def fits(self, capacity_bytes: int) -> bool:
        """Whether a device that gives so many bytes to tensors is enough, also where a collective is late."""
        return self.device_bytes + self.late_bytes <= capacity_bytes


def predict_memory(profile: Profile, plan: Plan, place: Place | int, loop: Loop | None = None) -> MemoryPrediction:
    """Walk a step of a plan, from the second on, when the optimizer has its state.

    Args:
        profile: Of the model, in the plan's precision, units and use of activations.
        plan: What is sharded, where state rests, and all else.
        place: The rank that is looked at and how many there are; a number alone is that of ranks, of which rank 0 is looked at, each
            with an accelerator of its own.
        loop: One batch a step and AdamW, if None.

    Raises:
        UsageError: A number is out of range.
    """
    place = Place(place) if isinstance(place, int) else place
    loop = loop or Loop()
    if loop.accumulation < 1:
        raise UsageError(f"A step has 1 micro-batch or more, but accumulation is {loop.accumulation}.")
    if not 0 <= place.rank < place.num_ranks:
        raise UsageError(f"rank must be from 0 to {place.num_ranks - 1} but is {place.rank}.")
    plan.fit(place.num_ranks)
    walk = _Walk(profile, plan.without(Tier.HOST) if place.is_on_host else plan, place, loop)
    for _ in range(_NUM_STEPS):
        walk.step()
    return walk.prediction


class _Walk:
    """One rank through steps."""

    def __init__(self, profile: Profile, plan: Plan, place: Place, loop: Loop) -> None:
        self._profile = profile
        self._plan = plan
        self._place = place
        self._loop = loop
        self._cost = loop.cost
        self._beats = beats_of(profile)
        self._flats = held_flats(profile.units, plan, place)
        self._schedule = build_schedule(profile.units, plan, profile.trace)
        self._ledger = Ledger()
        self._lending = Lending(self._ledger, is_on_host=place.is_on_host, is_scarce=plan.tier(StateKind.GRAD) is Tier.DISK)
        self._reductions = Reductions(self._flats, plan, place, self._ledger, self._lending)
        self._residence = Residence(self._flats, plan, self._schedule, self._lending)
        self._goals = Counter(beat.unit for beat in self._beats if beat.cause is Cause.GRAD)
        self._moment = "at rest"
        self._most: dict[Tier, int] = {}
        self._moments: dict[Tier, str] = {}
        self._at_peak: dict[Kind, int] = {}
        self._ledger.watch = self._look
        self._rest()

    def _look(self, account: Account, live_bytes: int) -> None:
        tier = account[0]
        now = self._ledger.live_on(tier)
        if now > self._most.get(tier, 0):
            self._most[tier], self._moments[tier] = now, self._moment
            if tier is Tier.DEVICE:
                self._at_peak = {kind: held for kind in Kind if (held := self._ledger.live(kind))}

    def _rest(self) -> None:
        """Book what is held between steps."""
        self._ledger.add(Kind.BUFFER, self._profile.buffer_bytes)
        for flat in all_flats(self._flats):
            for (tier, kind), num_bytes in flat.at_rest().items():
                self._ledger.add(kind, num_bytes, tier)
            if flat.spec.trainable:
                is_on_disk = flat.rest.optim is Tier.DISK
                numel = flat.own if is_on_disk else sum(flat.segments)
                state_bytes = round(self._cost.num_states * numel * flat.precision.master.itemsize)
                state_bytes += self._cost.counter_bytes * len(flat.segments)
                self._ledger.add(Kind.OPTIM, state_bytes, Tier.DISK if is_on_disk else flat.update_tier)
        if self._plan.uses_disk:
            self._ledger.add(Kind.STAGING, self._staging_bytes(), Tier.DEVICE if self._place.is_on_host else Tier.HOST)

    def _staging_bytes(self) -> int:
        """The memory between disk and computation, as much as may be taken of it."""
        rests = rests_of(self._profile.units, self._plan, is_on_host=self._place.is_on_host)
        num_states = round(self._cost.num_states)
        need = need_of_flats(self._profile.units, self._plan, rests, self._place.layout_kind, self._place.num_ranks, num_states)
        piece_bytes = PIECE_BYTES if self._plan.activations == Tier.DISK.value else 0
        return self._plan.staging_bytes or LOADS_AT_ONCE * max(need.load_bytes, piece_bytes)

    @property
    def prediction(self) -> MemoryPrediction:
        """The peaks of the last step."""
        ledger, input_bytes = self._ledger, self._profile.input_bytes
        peaks = {tier: ledger.peak_on_since_mark(tier) for tier in Tier}
        peaks[Tier.DEVICE] += input_bytes
        by_account = {account: ledger.peak_since_mark(account[1], account[0]) for account in ledger.accounts}
        by_account = {account: num_bytes for account, num_bytes in by_account.items() if num_bytes}
        return MemoryPrediction(
            peaks, dict(self._moments), by_account, dict(self._at_peak), input_bytes, self._reductions.largest_bytes
        )

    # A step

    def step(self) -> None:
        """Forward and backward of all micro-batches, and the update."""
        self._ledger.mark()
        self._most = {tier: self._ledger.live_on(tier) for tier in Tier}
        for number in range(self._loop.accumulation):
            self._run(is_synced=self._loop.is_synced or number == self._loop.accumulation - 1)
        self._ledger.set(Kind.ACTIVATION, 0)
        self._update()
        self._reductions.clear()
        self._lending.end_step()

    def _run(self, *, is_synced: bool) -> None:
        """One micro-batch."""
        last = max((at for at, beat in enumerate(self._beats) if beat.cause in _FORWARD), default=-1)
        self._residence.begin_forward()
        state = _Pass(self._profile, self._goals)
        for at, beat in enumerate(self._beats):
            self._moment = f"{beat.cause.value}: '{beat.param or beat.unit or '(root)'}'"
            if at == last + 1:
                self._residence.begin_backward()
                self._reductions.begin(self._schedule.reduced_units if is_synced else ())
            self._ledger.set(Kind.ACTIVATION, beat.start_bytes)
            self._come(beat, state, is_synced=is_synced)
            if at == last:
                self._residence.end_forward()
            self._compute(beat)
        self._moment = "the end of the backward"
        self._residence.end_backward()
        self._ledger.set(Kind.ACTIVATION, 0)
        if is_synced:
            self._reductions.finish_order(self._residence, self._pass_by)
            self._reductions.complete_all(self._residence)
            self._draw_digest()

    def _come(self, beat: Beat, state: _Pass, *, is_synced: bool) -> None:
        """What the engine does when it is told."""
        residence = self._residence
        if beat.cause is Cause.OPEN:
            residence.open(beat.unit)
        elif beat.cause is Cause.CLOSE:
            residence.close(beat.unit)
        elif beat.cause is Cause.DIFFERENTIATE:
            residence.differentiate(beat.unit)
        elif beat.cause is Cause.DIFFERENTIATED:
            residence.differentiated(beat.unit)
        elif beat.cause is Cause.AGAIN:
            residence.again(beat.unit)
        else:
            self._reductions.accumulate(beat, residence, self._pass_by)
            if state.take(beat):
                residence.finish_round(beat.unit)
            if state.is_complete(beat.unit) and is_synced:
                self._ledger.set(Kind.ACTIVATION, beat.start_bytes - beat.grad_bytes)  # The gradient is gone by then.
                self._reductions.mark_ready(beat.unit, residence, self._pass_by)

    def _compute(self, beat: Beat) -> None:
        """Until the next beat."""
        self._ledger.set(Kind.ACTIVATION, beat.span.peak_bytes)
        self._ledger.set(Kind.ACTIVATION, beat.span.live_bytes)
        if beat.away_bytes or self._ledger.live(Kind.ACTIVATION, self._away_tier):
            self._ledger.set(Kind.ACTIVATION, beat.away_bytes, self._away_tier)

    @property
    def _away_tier(self) -> Tier:
        return Tier.DISK if self._plan.activations == Tier.DISK.value else Tier.HOST

    def _pass_by(self, num_bytes: int) -> None:
        """Memory that is taken on the device and given back at once."""
        self._ledger.add(Kind.ACTIVATION, num_bytes)
        self._ledger.add(Kind.ACTIVATION, -num_bytes)

    # The end of a step

    def _draw_digest(self) -> None:
        """Sums of squares of the reduced gradients, where these rest."""
        blocks_bytes = 0
        for flat in all_flats(self._flats):
            if not flat.spec.trainable or flat.rest.grad is not Tier.DEVICE:
                continue
            dtype = accumulation_dtype(flat.precision.reduce)
            chunk_bytes = min(flat.part, CHUNK) * dtype.itemsize
            blocks_bytes += flat.part // ALIGNMENT * dtype.itemsize
            self._pass_by(blocks_bytes + chunk_bytes * (1 + (dtype != flat.precision.reduce)))
        self._pass_by(_DIGEST_COPIES * blocks_bytes)

    def _update(self) -> None:
        self._moment = "the update"
        trained = [flat for flat in all_flats(self._flats) if flat.spec.trainable]
        at_hand = [flat for flat in trained if flat.is_at_hand]
        copied: Counter[Tier] = Counter()
        for flat in at_hand:
            copied[flat.update_tier] += _cast_bytes(flat)
        for tier, num_bytes in copied.items():
            self._ledger.add(Kind.ACTIVATION, num_bytes, tier)
        self._work(at_hand)
        for flat in trained:
            if not flat.is_at_hand:
                self._take_turn(flat)
        for tier, num_bytes in copied.items():
            self._ledger.add(Kind.ACTIVATION, -num_bytes, tier)
        if StateKind.OPTIM in self._plan.sharded:  # Updated parameters are gathered, all at once.
            resident = [flat for flat in trained if not flat.form.is_fetched]
            self._pass_by(sum(flat.padded_bytes(flat.precision.compute.itemsize) for flat in resident))

    def _take_turn(self, flat: HeldFlat) -> None:
        """Bring what rests elsewhere, update it, and put it back."""
        tier, loans = flat.update_tier, []
        if flat.rest.master not in (tier, Tier.DISK) or (flat.rest.master is Tier.DISK and tier is not flat.host_tier):
            loans.append(self._lending.take(flat.own * flat.precision.master.itemsize, Kind.MASTER, tier))
        if flat.rest.grad not in (tier, Tier.DISK) or (flat.rest.grad is Tier.DISK and tier is not flat.host_tier):
            loans.append(self._lending.take(flat.own * flat.precision.reduce.itemsize, Kind.GRAD, tier))
        cast_bytes = _cast_bytes(flat)
        self._ledger.add(Kind.ACTIVATION, cast_bytes, tier)
        self._work([flat])
        self._ledger.add(Kind.ACTIVATION, -cast_bytes, tier)
        for loan in loans:
            if loan.kind is Kind.GRAD:
                self._lending.linger(loan)
            else:
                self._lending.give(loan)

    def _work(self, flats: Sequence[HeldFlat]) -> None:
        """The temporary numbers of an update of some buffers together."""
        for tier in Tier:
            mine = [flat for flat in flats if flat.update_tier is tier]
            if mine:
                is_accelerated = tier is Tier.DEVICE and not self._place.is_on_host
                scratch = self._cost.on_device if is_accelerated else self._cost.on_host
                numel = scratch.num_elements([size for flat in mine for size in flat.segments])
                num_bytes = numel * max(flat.precision.master.itemsize for flat in mine)
                self._ledger.add(Kind.ACTIVATION, num_bytes, tier)
                self._ledger.add(Kind.ACTIVATION, -num_bytes, tier)


class _Pass:
    """Which gradients of a backward have come."""

    def __init__(self, profile: Profile, goals: Counter[str]) -> None:
        self._goals = goals
        self._trained = {unit.name: {param.name for param in unit.params if param.trainable} for unit in profile.units}
        self._missing: dict[str, set[str]] = {}
        self._num_grads: Counter[str] = Counter()

    def take(self, beat: Beat) -> bool:
        """Note a gradient; returns whether every parameter of the unit has brought one."""
        missing = self._missing.get(beat.unit)
        if not missing:
            missing = self._missing[beat.unit] = set(self._trained[beat.unit])
        self._num_grads[beat.unit] += 1
        missing.discard(beat.param)
        return not missing

    def is_complete(self, unit: str) -> bool:
        """Whether no more gradients of a unit come."""
        return self._num_grads[unit] == self._goals[unit]


def _cast_bytes(flat: HeldFlat) -> int:
    """Copies of gradients in the dtype of what they update."""
    is_cast = flat.precision.reduce != flat.precision.master
    return sum(flat.segments) * flat.precision.master.itemsize if is_cast else 0
