"""What one rank holds of each flat buffer, as bytes: by the same rules of rest, form and precision as the engine, without tensors."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from shardwise.core.layout import Layout
from shardwise.core.ledger import Account, Kind, Tier
from shardwise.core.plan import Plan, StateKind
from shardwise.core.rest import Rest, rests_of
from shardwise.core.unit import FlatSpec, Unit
from shardwise.runtime.flat import Precision
from shardwise.runtime.form import Form


@dataclass(frozen=True)
class Place:
    """Where a rank stands: of how many, on a device that is the CPU or not, and how buffers are cut."""

    num_ranks: int
    rank: int = 0
    is_on_host: bool = False
    layout_kind: str = "even"

    @property
    def is_staged(self) -> bool:
        """Whether an exchange needs room for all ranks' parts: not in the memory of one host, nor with nobody to exchange with."""
        return self.num_ranks > 1 and not self.is_on_host


@dataclass(frozen=True)
class HeldFlat:
    """One flat buffer on one rank."""

    spec: FlatSpec
    layout: Layout
    precision: Precision
    rest: Rest
    form: Form
    bounds: tuple[int, int]
    sharded: frozenset[StateKind]
    rank: int
    host_tier: Tier
    """Whose memory the host's is: the device's own, if that is the CPU."""

    @property
    def own(self) -> int:
        """Elements that are updated here."""
        return self.bounds[1] - self.bounds[0]

    @property
    def part(self) -> int:
        """Elements whose gradients are summed here."""
        return self.layout.sizes[self.rank]

    @cached_property
    def segments(self) -> tuple[int, ...]:
        """Elements of each parameter that are updated here, without padding."""
        return tuple(piece.numel for piece in self.spec.segments(self.bounds) if piece.numel)

    @property
    def gathered_bytes(self) -> int:
        """Of the full values, where they are there only while they are used."""
        return self.layout.numel * self.precision.compute.itemsize if self.form.is_fetched else 0

    @property
    def local_bytes(self) -> int:
        """Of full gradients."""
        return self.layout.numel * self.precision.reduce.itemsize

    def padded_bytes(self, item_bytes: int) -> int:
        """What a gather takes besides, where ranks own different numbers of elements: rows of one length, and one more to send."""
        is_alone = StateKind.OPTIM not in self.sharded and self.form.is_fetched
        if self.layout.is_even or self.layout.num_ranks == 1 or self.host_tier is Tier.DEVICE or is_alone:
            return 0
        return (self.layout.num_ranks + 1) * max(self.layout.sizes) * item_bytes

    @property
    def is_kept_whole(self) -> bool:
        """Whether the buffer of full gradients goes on as that of reduced ones."""
        kind = StateKind.OPTIM if self.rest.grad is Tier.DISK else StateKind.GRAD
        return kind not in self.sharded or self.part == self.layout.numel

    @property
    def update_tier(self) -> Tier:
        """Whose memory the optimizer works in."""
        return Tier.DEVICE if self.rest.optim is Tier.DEVICE else self.host_tier

    @property
    def is_at_hand(self) -> bool:
        """Whether a buffer is updated where all of its state is."""
        tiers = {self.rest.master, self.rest.optim, self.rest.grad}
        return len(tiers) == 1 and Tier.DISK not in tiers and not self.form.has_copy

    def at_rest(self) -> Counter[Account]:
        """Bytes of its values, between steps."""
        master_bytes = self.own * self.precision.master.itemsize
        full_bytes = 0 if self.form.is_fetched else self.layout.numel * self.precision.compute.itemsize
        is_copied = self.form.has_copy or (bool(full_bytes) and not self.form.is_aliased)
        is_master = is_copied or self.precision.compute != self.precision.master
        held: Counter[Account] = Counter()
        held[self.rest.master, Kind.MASTER if is_master and self.rest.master is not Tier.DISK else Kind.PARAM] += master_bytes
        if self.form.has_copy:
            held[self.rest.param, Kind.PARAM] += self.own * self.precision.compute.itemsize
        held[Tier.DEVICE, Kind.PARAM] += full_bytes - (master_bytes if self.form.is_aliased else 0)
        if self.form.is_fetched:
            # What parameters point to meanwhile: a number for each form of them.
            held[Tier.DEVICE, Kind.PARAM] += len(self.spec.params) * self.precision.compute.itemsize
        return held


def held_flats(units: Sequence[Unit], plan: Plan, place: Place) -> dict[str, list[HeldFlat]]:
    """By unit, what a rank holds."""
    rests = rests_of(units, plan, is_on_host=place.is_on_host)
    return {unit.name: [_held(flat, rests[flat.name], plan, place) for flat in unit.flats] for unit in units}


def _held(flat: FlatSpec, rest: Rest, plan: Plan, place: Place) -> HeldFlat:
    layout = flat.layout(place.layout_kind, num_ranks=place.num_ranks, weights=plan.weights)
    is_cut = StateKind.OPTIM in plan.sharded
    precision = Precision.of(flat, plan)
    return HeldFlat(
        flat,
        layout,
        precision,
        rest,
        Form.of(flat, rest, precision, plan),
        layout.bounds(place.rank) if is_cut else (0, layout.numel),
        plan.sharded,
        place.rank,
        Tier.DEVICE if place.is_on_host else Tier.HOST,
    )


def all_flats(units: dict[str, list[HeldFlat]]) -> Iterator[HeldFlat]:
    """Unit by unit."""
    for flats in units.values():
        yield from flats
