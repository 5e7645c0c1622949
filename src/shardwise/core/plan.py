"""The plan: what is sharded, in which precision, in which order. Frozen, validated, hashed; says nothing of how it is executed."""

from __future__ import annotations

import difflib
import hashlib
import json
import math
import tomllib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from datetime import timedelta
from enum import Enum
from pathlib import Path
from typing import Any

import torch

from shardwise.core.errors import PlanError
from shardwise.core.ledger import Tier
from shardwise.core.tree import Tree, check_tree, parse_tree


class StateKind(Enum):
    """Kinds of training state that can be sharded."""

    __hash__ = object.__hash__  # In C: enum's own is Python, and members are looked up all through a step.

    OPTIM = "optimizer state"
    GRAD = "gradients"
    PARAM = "parameters"

    @property
    def key(self) -> str:
        """Its name in plans."""
        return self.name.lower()


OPTIM, GRAD, PARAM = StateKind.OPTIM, StateKind.GRAD, StateKind.PARAM
_KINDS = {kind.key: kind for kind in StateKind}

SHARDED_AT_STAGE: dict[int, frozenset[StateKind]] = {
    0: frozenset(),
    1: frozenset({StateKind.OPTIM}),
    2: frozenset({StateKind.OPTIM, StateKind.GRAD}),
    3: frozenset({StateKind.OPTIM, StateKind.GRAD, StateKind.PARAM}),
}
"""A ZeRO stage is data."""

_CHOICES: dict[str, tuple[str, ...]] = {
    "layout": ("auto", "even", "weighted", "whole"),
    "buffers": ("broadcast", "average", "local"),
    "initial": ("rank0", "local"),
    "nonfinite": ("skip", "raise", "keep"),
    "unused": ("raise", "zero"),
    "path": ("auto", "network"),
    "activations": (Tier.DEVICE.value, Tier.HOST.value, Tier.DISK.value, "recompute"),
    "sync": ("exact", "delayed"),
}
_TIERS = {tier.value: tier for tier in Tier}


def choices_of(field: str) -> tuple[str, ...]:
    """What a field of a plan may be, if that is one of few words."""
    return _CHOICES[field]


_DTYPES = ("float16", "bfloat16", "float32", "float64")


@dataclass(frozen=True)
class Plan:
    """How a model is trained. All of it enters the hash, so that two runs with one hash do the same arithmetic.

    Args:
        stage: 0 (plain data parallelism) to 3 (parameters, gradients and optimizer state sharded).
        layout: How buffers are cut: ``even``, ``weighted`` (by ``weights``), ``whole`` (at parameter boundaries, for
            optimizers that need whole matrices), or ``auto``: whole where the optimizer needs it, weighted where there are
            weights, else even.
        weights: Relative share of each rank, for ``weighted``.
        prefetch: Units gathered ahead of the one that computes.
        tree: In which order the ranks' gradients are added, as nested pairs of ranks; inside hosts first, if None.
        param_dtype: Dtype of compute; the parameters' own, if None.
        reduce_dtype: Dtype in which gradients are accumulated and sent; that of compute, if None.
        output_dtype: Dtype to which floating-point outputs of the model are cast; none, if None.
        cast_forward_inputs: Whether floating-point inputs are cast to ``param_dtype``.
        reshard_after_forward: Whether stage 3 releases parameters between forward and backward.
        buffers: Before each training forward, module buffers are taken from rank 0, averaged, or left alone.
        initial: Initial weights are rank 0's, or each rank's own (which must then be equal).
        nonfinite: Gradients with inf or nan: skip the step, raise, or keep going.
        unused: A parameter used on some ranks only: raise, or count its missing gradients as zero.
        units: Names of the modules that are units; found by themselves, if None.
        deadline_seconds: How long a collective may take; the process group's timeout, if None.
        path: How bytes travel: ``auto``: between ranks of one host through their memory, where that is allowed; ``network``: through
            the process group in any case. The bits are the same.
        tiers: Where kinds of state rest: ``{shardwise.OPTIM: "host"}`` keeps the optimizer's state in the memory of the host,
            ``"disk"`` in a file; what is not named rests on the device. On the CPU, the host's memory is the device's. Parameters
            that rest elsewhere are kept in shards from stage 1 on, and brought unit by unit when they are used.
        fraction: The part of that state that rests there, by bytes; the rest stays on the device.
        folder: Where files of the disk tier are made, for this user alone; ``shardwise-offload`` in the current folder, if None.
        staging_bytes: The most memory through which bytes pass on their way to and from the disk; three times what the update of
            the largest flat buffer needs, if None: one at work, one read ahead, one written behind.
        activations: Where what the forward leaves for the backward rests until it is needed: on the ``device``, the ``host`` or the
            ``disk``; or ``recompute``: the forwards of blocks (units that have modules inside, but no other unit) leave their inputs
            alone, and are run again in the backward.
        adapt: Whether state is moved, and more or less gathered and read ahead, by what steps are seen to take: before a device
            runs out of memory, and back when there is room. The bits are the same.
        init_seed: Seed for models that are built on the meta device.
        sync: When an update is seen: ``exact``: by the next step; ``delayed``: it is made beside the next step, which computes with the
            weights from before it, and is seen by the one after that.
        delay_warmup: Updates that are exact before the first delayed one.

    >>> Plan(stage=3, prefetch=2).sharded == SHARDED_AT_STAGE[3]
    True
    >>> Plan.from_dict({"stage": 3, "prefetsch": 2})
    Traceback (most recent call last):
    shardwise.core.errors.PlanError: The plan has no key 'prefetsch'. Did you mean 'prefetch'?
    """

    stage: int = 0
    layout: str = "auto"
    weights: tuple[float, ...] | None = None
    prefetch: int = 1
    tree: Tree | None = None
    param_dtype: str | None = None
    reduce_dtype: str | None = None
    output_dtype: str | None = None
    cast_forward_inputs: bool = True
    reshard_after_forward: bool = True
    buffers: str = "broadcast"
    initial: str = "rank0"
    nonfinite: str = "skip"
    unused: str = "raise"
    units: tuple[str, ...] | None = None
    deadline_seconds: float | None = None
    path: str = "auto"
    tiers: Any = ()
    fraction: float = 1.0
    folder: str | None = None
    staging_bytes: int | None = None
    activations: str = Tier.DEVICE.value
    adapt: bool = False
    init_seed: int = 0
    sync: str = "exact"
    delay_warmup: int = 10

    def __post_init__(self) -> None:
        if not isinstance(self.stage, int) or isinstance(self.stage, bool) or self.stage not in SHARDED_AT_STAGE:
            raise PlanError(f"stage must be 0, 1, 2 or 3 but is {self.stage!r}.")
        for key, allowed in _CHOICES.items():
            if getattr(self, key) not in allowed:
                raise PlanError(f"{key} must be one of {', '.join(map(repr, allowed))} but is {getattr(self, key)!r}.")
        for key in ("param_dtype", "reduce_dtype", "output_dtype"):
            if getattr(self, key) not in (None, *_DTYPES):
                raise PlanError(f"{key} must be one of {', '.join(_DTYPES)} or None but is {getattr(self, key)!r}.")
        for key in ("cast_forward_inputs", "reshard_after_forward", "adapt"):
            if not isinstance(getattr(self, key), bool):
                raise PlanError(f"{key} must be true or false but is {getattr(self, key)!r}.")
        _check_types(self)
        _check_numbers(self)
        object.__setattr__(self, "deadline_seconds", None if self.deadline_seconds is None else float(self.deadline_seconds))
        object.__setattr__(self, "weights", None if self.weights is None else tuple(float(w) for w in self.weights))
        object.__setattr__(self, "units", None if self.units is None else tuple(self.units))
        object.__setattr__(self, "tiers", _parse_tiers(self.tiers))
        object.__setattr__(self, "fraction", float(self.fraction))
        object.__setattr__(self, "tree", None if self.tree is None else parse_tree(self.tree))
        _check_delay(self)

    @property
    def sharded(self) -> frozenset[StateKind]:
        """Kinds of state of which a rank keeps only its shard."""
        return SHARDED_AT_STAGE[self.stage]

    def tier(self, kind: StateKind) -> Tier:
        """Where a kind of state rests."""
        return _TIERS[dict(self.tiers).get(kind.key, Tier.DEVICE.value)]

    @property
    def is_delayed(self) -> bool:
        """Whether updates are made beside the next step."""
        return self.sync == "delayed"

    @property
    def uses_disk(self) -> bool:
        """Whether anything rests on disk."""
        return self.keeps_state_on_disk or self.activations == Tier.DISK.value

    @property
    def keeps_state_on_disk(self) -> bool:
        """Whether any state rests on disk, and not activations alone."""
        return any(name == Tier.DISK.value for _, name in self.tiers)

    @property
    def fetches_params(self) -> bool:
        """Whether full parameters are there only while they are used: others own parts of them, or they rest elsewhere."""
        return StateKind.PARAM in self.sharded or self.tier(StateKind.PARAM) is not Tier.DEVICE

    @property
    def deadline(self) -> timedelta | None:
        """How long a collective may take, if the plan says so."""
        return None if self.deadline_seconds is None else timedelta(seconds=self.deadline_seconds)

    @property
    def hash(self) -> str:
        """Twelve hexadecimal digits over all of the plan."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()[:12]

    def dtype(self, key: str) -> torch.dtype | None:
        """A dtype field as torch's object."""
        name = getattr(self, key)
        return None if name is None else getattr(torch, name)

    def fit(self, num_ranks: int) -> None:
        """Refuse a plan that was made for another number of ranks."""
        if self.weights is not None and len(self.weights) != num_ranks:
            raise PlanError(f"weights has {len(self.weights)} entries but there are {num_ranks} ranks. Give one for each rank.")
        if self.tree is not None:
            check_tree(self.tree, num_ranks)

    def replace(self, **changes: Any) -> Plan:
        """The same plan with some fields changed."""
        _check_keys(changes)
        return replace(self, **changes)

    def without(self, tier: Tier) -> Plan:
        """The same plan with what rests on a tier on the device instead."""
        tiers = {kind: name for kind, name in self.tiers if name != tier.value}
        return self.replace(tiers=tiers, activations=self.activations if self.activations != tier.value else Tier.DEVICE.value)

    def to_dict(self) -> dict[str, Any]:
        """All fields as plain values."""
        return {**asdict(self), "tiers": dict(self.tiers)}

    def to_json(self) -> str:
        """One line of JSON with sorted keys."""
        return json.dumps(self.to_dict(), sort_keys=True)

    def to_toml(self) -> str:
        """TOML text; fields that are None are left out."""
        return "".join(f"{key} = {_toml(value)}\n" for key, value in self.to_dict().items() if value is not None)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Plan:
        """Read a plan from plain values; unknown keys are refused with the nearest known name."""
        _check_keys(values)
        return cls(**values)

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """Read a plan from JSON text."""
        return cls.from_dict(_parse(json.loads, text, "JSON"))

    @classmethod
    def from_toml(cls, text: str) -> Plan:
        """Read a plan from TOML text."""
        return cls.from_dict(_parse(tomllib.loads, text, "TOML"))

    @classmethod
    def read(cls, path: str | Path) -> Plan:
        """Read a ``.toml`` or ``.json`` file."""
        text = Path(path).read_text(encoding="utf-8")
        return cls.from_json(text) if str(path).endswith(".json") else cls.from_toml(text)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _parse_tiers(tiers: Any) -> tuple[tuple[str, str], ...]:
    """Pairs of names, in one order; the device goes without saying."""
    if not isinstance(tiers, Mapping):
        tiers = dict(tiers)
    found = {}
    for kind, tier in tiers.items():
        key = kind.key if isinstance(kind, StateKind) else str(kind).lower()
        if key not in _KINDS:
            raise PlanError(f"tiers names a kind of state {kind!r}. There are {', '.join(_KINDS)}.")
        value = tier.value if isinstance(tier, Tier) else tier
        if value not in _TIERS:
            raise PlanError(f"tiers lets {_KINDS[key].value} rest on {tier!r}. Choose from {', '.join(map(repr, _TIERS))}.")
        if value != Tier.DEVICE.value:
            found[key] = value
    return tuple((key, found[key]) for key in _KINDS if key in found)


def _check_types(plan: Plan) -> None:
    weights, units = plan.weights, plan.units
    if weights is not None and (not isinstance(weights, (tuple, list)) or not all(_is_number(weight) for weight in weights)):
        raise PlanError(f"weights must be a list of numbers, one for each rank, but is {weights!r}.")
    if plan.deadline_seconds is not None and not _is_number(plan.deadline_seconds):
        raise PlanError(f"deadline_seconds must be a number but is {plan.deadline_seconds!r}.")
    if not isinstance(plan.tiers, (Mapping, tuple, list)):
        raise PlanError(f"tiers must say where kinds of state rest, such as {{'optim': 'host'}}, but is {plan.tiers!r}.")
    if not _is_number(plan.fraction):
        raise PlanError(f"fraction must be a number but is {plan.fraction!r}.")
    if plan.folder is not None and not isinstance(plan.folder, str):
        raise PlanError(f"folder must be the path of a folder, as text, but is {plan.folder!r}.")
    if units is not None and (not isinstance(units, (tuple, list)) or not all(isinstance(name, str) for name in units)):
        raise PlanError(f"units must be a list of module names but is {units!r}.")


def _check_numbers(plan: Plan) -> None:
    if not isinstance(plan.prefetch, int) or isinstance(plan.prefetch, bool) or plan.prefetch < 0:
        raise PlanError(f"prefetch must be a whole number of units, 0 or more, but is {plan.prefetch!r}.")
    if not isinstance(plan.init_seed, int) or isinstance(plan.init_seed, bool):
        raise PlanError(f"init_seed must be a whole number but is {plan.init_seed!r}.")
    staging_bytes = plan.staging_bytes
    if staging_bytes is not None and (
        not isinstance(staging_bytes, int) or isinstance(staging_bytes, bool) or staging_bytes < 1
    ):
        raise PlanError(f"staging_bytes must be a whole number of bytes, 1 or more, but is {staging_bytes!r}.")
    if not 0 <= plan.fraction <= 1:
        raise PlanError(f"fraction must be from 0 to 1 but is {plan.fraction!r}.")
    if plan.deadline_seconds is not None and not plan.deadline_seconds > 0:
        raise PlanError(f"deadline_seconds must be above 0 but is {plan.deadline_seconds!r}.")
    if plan.weights is not None and (not plan.weights or min(plan.weights) < 0 or sum(plan.weights) <= 0):
        raise PlanError(f"weights must be numbers of 0 or more with a sum above 0 but are {plan.weights!r}.")
    if plan.layout == "weighted" and plan.weights is None:
        raise PlanError("layout='weighted' needs weights, one for each rank.")
    if plan.layout in ("even", "whole") and plan.weights is not None:
        raise PlanError(f"layout={plan.layout!r} has no use for weights. Drop them, or use layout='weighted'.")


def _check_delay(plan: Plan) -> None:
    warmup = plan.delay_warmup
    if not isinstance(warmup, int) or isinstance(warmup, bool) or warmup < 0:
        raise PlanError(f"delay_warmup must be a whole number of updates, 0 or more, but is {warmup!r}.")
    on_disk = [kind for kind in (StateKind.GRAD, StateKind.PARAM) if plan.tier(kind) is Tier.DISK]
    if plan.is_delayed and on_disk:
        raise PlanError(
            f"sync='delayed' computes a step while the last one is updated, so {on_disk[0].value} must be in memory, but tiers lets "
            f"them rest on disk. Let {on_disk[0].value} rest on 'device' or 'host' ('optim' may rest on disk), or use sync='exact'."
        )
    if plan.is_delayed and plan.tier(StateKind.OPTIM) is Tier.DISK and plan.activations == Tier.DISK.value:
        raise PlanError(
            "sync='delayed' updates optimizer state on disk beside a step, which then cannot have its activations there as well. Use "
            "activations='host' or 'recompute', let 'optim' rest on 'host', or use sync='exact'."
        )
    if plan.is_delayed and plan.adapt:
        raise PlanError(
            "adapt=True goes by what an update takes within its step, but sync='delayed' makes it beside the next. Use one of both; "
            "shardwise.move moves state between steps with either."
        )


def _check_keys(values: Mapping[str, Any]) -> None:
    known = [field.name for field in fields(Plan)]
    for key in values:
        if key not in known:
            close = difflib.get_close_matches(key, known, n=1)
            hint = f"Did you mean {close[0]!r}?" if close else f"Known keys: {', '.join(known)}."
            raise PlanError(f"The plan has no key {key!r}. {hint}")


def _parse(loads: Any, text: str, form: str) -> Mapping[str, Any]:
    try:
        values = loads(text)
    except ValueError as error:
        raise PlanError(f"The plan is not valid {form}: {error}.") from error
    if not isinstance(values, Mapping):
        raise PlanError(f"A plan in {form} is a table of keys and values but this is a {type(values).__name__}.")
    return values


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key} = {_toml(item)}" for key, item in value.items()) + "}"
    if isinstance(value, (tuple, list)):
        return "[" + ", ".join(_toml(item) for item in value) + "]"
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007F")
