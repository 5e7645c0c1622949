"""``shard``: one call that turns a plain model and its optimizer into sharded ones, in place."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from shardwise.api.arguments import as_list
from shardwise.api.checks import check_model, check_optimizers, check_tables, compare_ranks
from shardwise.api.pool_report import MemoryReport, report_of
from shardwise.core.errors import PlanError, UsageError
from shardwise.core.events import Totals
from shardwise.core.footprint import advice
from shardwise.core.ledger import Ledger, Tier
from shardwise.core.plan import Plan
from shardwise.core.records import Adaptation
from shardwise.core.schedule import Schedule
from shardwise.core.trace import Trace
from shardwise.core.tree import host_tree
from shardwise.core.unit import ROOT, Unit, find_units
from shardwise.devices import memory
from shardwise.runtime.adapt import adapt
from shardwise.runtime.attach import attach, check_devices
from shardwise.runtime.disk_setup import open_disk
from shardwise.runtime.engine import Engine, Setup
from shardwise.runtime.optimizer import adopt, check_optimizer, needs_whole_parameters, num_states_of
from shardwise.runtime.rehearsal import rehearse
from shardwise.wire.comm import Lanes
from shardwise.wire.lanes import torch_lanes
from shardwise.wire.local_comm import solo_lanes


class PrecisionPolicy(Protocol):
    """The fields of FSDP2's ``MixedPrecisionPolicy``."""

    param_dtype: torch.dtype | None
    reduce_dtype: torch.dtype | None
    output_dtype: torch.dtype | None
    cast_forward_inputs: bool


@dataclass(frozen=True)
class Sharded:
    """What ``shard`` returns: how a model is trained, for people and tools to look at."""

    engine: Engine

    @property
    def plan(self) -> Plan:
        """The plan in force, with all that was chosen by itself."""
        return self.engine.plan

    @property
    def units(self) -> tuple[Unit, ...]:
        """Parameters that travel together."""
        return self.engine.units

    @property
    def trace(self) -> Trace:
        """The order of moments of one step."""
        return self.engine.trace_of()

    @property
    def schedule(self) -> Schedule:
        """What is done at each moment; print it to see one step."""
        return self.engine.schedule_of()

    @property
    def ledger(self) -> Ledger:
        """Bytes held on this rank."""
        return self.engine.ledger

    @property
    def pool_report(self) -> MemoryReport:
        """What the memory that buffers are taken from holds, lends and wastes on this rank; print it to read it."""
        return report_of(self.engine)

    @property
    def num_updates(self) -> int:
        """Optimizer steps that were made, also those before a checkpoint that was loaded."""
        return self.engine.num_updates

    @property
    def num_pending_updates(self) -> int:
        """Updates that are made beside the next step, and not seen by it: 1 after a step under ``sync="delayed"``, else 0."""
        return self.engine.updates.num_pending

    @property
    def adaptations(self) -> tuple[Adaptation, ...]:
        """What was changed of the plan by itself (``adapt=True``), and why."""
        return tuple(self.engine.adaptations)

    @property
    def totals(self) -> Totals:
        """Collectives of this rank: how many, what they sent, and how long they were waited for."""
        return self.engine.executor.totals


def shard(  # noqa: PLR0913
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer] | None = None,
    *,
    stage: int | None = None,
    plan: Plan | None = None,
    mesh: Any = None,
    mp_policy: PrecisionPolicy | None = None,
    ignored_params: Iterable[nn.Parameter] = (),
    units: Sequence[type[nn.Module] | str] | None = None,
    example: Any = None,
    accounting: bool = True,
    lanes: Lanes | None = None,
    **changes: Any,
) -> Sharded:
    """Shard a model and its optimizer in place, over all ranks of the process group. All ranks call it alike.

    Args:
        model: Any module, on one device.
        optimizer: Its optimizer, or several; one that is made later over ``model.parameters()`` needs no further call.
        stage: ZeRO stage 0 to 3.
        plan: A whole plan, instead of or together with single fields.
        mesh: A 1-D ``DeviceMesh`` whose ranks share the model; all ranks, if None.
        mp_policy: FSDP2's ``MixedPrecisionPolicy``.
        ignored_params: Parameters that stay plain and are not synchronised.
        units: Module classes or names to make units of; found by themselves, if None.
        example: A batch (a tensor, a tuple of arguments or a dict of keywords): the model is run once on fake tensors of its
            form, so that trace and schedule are known before the first step; if None, the first step is recorded.
        accounting: Whether steps are measured; ``shardwise.record`` writes it down. It takes less than 1 % of a step.
        lanes: Collectives to use instead of those of ``torch.distributed``, for tests.
        changes: Further fields of the plan, such as ``prefetch=2`` or ``nonfinite="raise"``.

    Returns:
        A handle with the plan, units, trace, schedule and ledger.

    Raises:
        PlanError: The plan contradicts itself, the optimizer or the ranks.
        UsageError: The model is sharded already, or the optimizer is another model's.
        OffloadError: A rank's disk cannot be used: found before anything is changed, unless it fails while it is written to.

    >>> import torch, shardwise
    >>> model = torch.nn.Linear(4, 4)
    >>> optimizer = torch.optim.AdamW(model.parameters())
    >>> shardwise.shard(model, optimizer, stage=3).plan.stage
    3
    """
    optimizers = as_list(optimizer)
    check_model(model)
    ignored = set(ignored_params)
    check_optimizers(model, optimizers)
    plan = _make_plan(plan, stage, mp_policy, changes)
    named = units if units is not None else plan.units
    found = find_units(model, ignored=ignored, units=named, is_cast=plan.param_dtype is not None)
    if not found:
        raise UsageError("The model has no parameters to shard.")
    if units is not None:
        plan = plan.replace(units=tuple(unit.name for unit in found if unit.name))
    device = check_devices(model, found)
    if plan.adapt and not accounting:
        raise PlanError("adapt=True goes by what steps are seen to take: it needs accounting=True.")
    if device.type == "cpu":
        plan = plan.without(Tier.HOST)  # The host's memory is the device's.
    lanes = lanes or _find_lanes(mesh, device, plan)
    plan.fit(lanes.size)
    layout = _choose_layout(plan, optimizers)
    for each in optimizers:
        check_optimizer(each, plan, layout)
    tree = plan.tree if plan.tree is not None else host_tree(lanes.hosts)
    plan = plan.replace(tree=tree)
    check_tables(model, ignored, lanes)
    compare_ranks(model, found, plan, optimizers, lanes)
    setup = Setup(plan, lanes, tree, layout)
    if plan.uses_disk:
        setup = open_disk(setup, found, device, num_states_of(optimizers))
    rehearsal = None if example is None else rehearse(model, found, example)
    free_bytes, num_local = memory.free_host_bytes(), lanes.hosts.count(lanes.hosts[lanes.rank])
    share_bytes = None if free_bytes is None else free_bytes // num_local
    memory.advise(device, lambda size: advice(found, plan, lanes.size, size, num_states_of(optimizers), share_bytes))
    engine = attach(model, found, setup, device)
    engine.agreement.agree_on_disk()
    engine.meter.is_on = accounting
    if plan.adapt:
        adapt(engine)
    if rehearsal is not None:
        engine.use_trace(ROOT, rehearsal.trace)
        for module, unit in rehearsal.also_opened:
            engine.open_also_at(module, unit)
    for each in optimizers:
        adopt(each)
    return Sharded(engine)


def _make_plan(plan: Plan | None, stage: int | None, policy: PrecisionPolicy | None, changes: dict[str, Any]) -> Plan:
    fields = dict(changes)
    if stage is not None:
        fields["stage"] = stage
    if policy is not None:
        for key in ("param_dtype", "reduce_dtype", "output_dtype"):
            dtype = getattr(policy, key)
            fields[key] = None if dtype is None else str(dtype).removeprefix("torch.")
        fields["cast_forward_inputs"] = policy.cast_forward_inputs
    for key in ("param_dtype", "reduce_dtype", "output_dtype"):
        if isinstance(fields.get(key), torch.dtype):
            fields[key] = str(fields[key]).removeprefix("torch.")
    return (plan or Plan()).replace(**fields)


def _find_lanes(mesh: Any, device: torch.device, plan: Plan) -> Lanes:
    if mesh is not None and mesh.ndim != 1:
        raise PlanError(
            f"mesh must be one-dimensional but has {mesh.ndim} dimensions: {mesh}. Pass mesh['name'] for one of them."
        )
    if mesh is None and (not dist.is_available() or not dist.is_initialized()):
        return solo_lanes()
    group = None if mesh is None else mesh.get_group()
    if dist.get_world_size(group) == 1:
        return solo_lanes()
    return torch_lanes(group, device, plan.deadline, plan.path)


def _choose_layout(plan: Plan, optimizers: Sequence[Optimizer]) -> str:
    if plan.layout != "auto":
        return plan.layout
    if any(needs_whole_parameters(optimizer) for optimizer in optimizers):
        return "whole"
    return "weighted" if plan.weights is not None else "even"
