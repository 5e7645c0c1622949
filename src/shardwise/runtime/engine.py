"""One model on one rank: puts the parts of the runtime together."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from shardwise.core.errors import NonFiniteError, OffloadError, UsageError
from shardwise.core.ledger import Kind, Ledger, Tier
from shardwise.core.plan import Plan, StateKind
from shardwise.core.records import Adaptation, Process
from shardwise.core.schedule import Schedule, build_schedule
from shardwise.core.trace import Trace, assumed_trace
from shardwise.core.tree import Tree
from shardwise.core.unit import ROOT, Unit
from shardwise.devices import memory, torch_private
from shardwise.runtime import digest
from shardwise.runtime.activations import Room
from shardwise.runtime.agreement import Agreement
from shardwise.runtime.backward import Backward
from shardwise.runtime.delayed import Updates
from shardwise.runtime.executor import Executor, UnitState
from shardwise.runtime.flat import ParamState, remember, slice_of
from shardwise.runtime.forward import Forward
from shardwise.runtime.grads import GradFace
from shardwise.runtime.offload import DiskTier
from shardwise.runtime.opened import Opened
from shardwise.runtime.parameter import Face, not_gathered
from shardwise.runtime.recast import needs_recast, recast
from shardwise.runtime.recompute import RECOMPUTE, Recompute
from shardwise.runtime.reducer import Reducer
from shardwise.runtime.saved_places import OnDisk, OnHost
from shardwise.runtime.tensors import buffer_bytes
from shardwise.stores.disk import DiskStore
from shardwise.telemetry.meter import Meter, Place
from shardwise.wire.comm import Lanes

_log = logging.getLogger("shardwise")
NONFINITE_LIMIT = 10
"""Steps in a row that may be skipped because of inf or nan before training is stopped."""


@dataclass(frozen=True)
class Setup:
    """What an engine is built from: the plan, the ranks, and what the plan left to be chosen."""

    plan: Plan
    lanes: Lanes
    tree: Tree
    layout_kind: str
    store: DiskStore | None = None
    load_bytes: int = 0
    """What the largest update brings from disk."""


class Engine:
    """The runtime of one sharded model on one rank."""

    def __init__(
        self, model: nn.Module, units: Sequence[UnitState], setup: Setup, ledger: Ledger, disk: DiskTier | None = None
    ) -> None:
        plan, lanes = setup.plan, setup.lanes
        self.model = model
        self.layout_kind = setup.layout_kind
        self.plan = plan
        self.lanes = lanes
        self.ledger = ledger
        self.disk = disk
        self.read_ahead: Callable[[Plan], None] = _nothing
        """Called when a backward begins: what its update needs may be read from disk beside it."""
        self.modules = dict(model.named_modules())
        self.device = units[0].flats[0].device
        self.meter = Meter(lanes.rank, ledger, self._look_at_process, lambda: memory.allocated_bytes(self.device))
        self.meter.disk = disk
        self.executor = Executor(units, plan, lanes, self.meter, ledger, disk)
        self.pool = self.executor.pool
        self.reducer = Reducer(self.executor, setup.tree)
        self.activations = self._make_room(setup)
        self.forward = Forward(self)
        self.recompute = Recompute(self) if plan.activations == RECOMPUTE else None
        self.backward = Backward(self)
        self.agreement = Agreement(self.executor, self.reducer, self.forward, self.backward)
        self.updates = Updates(self)
        self.digest = digest.Digest()
        self.weight = 1.0 / lanes.size
        self.is_synced = True
        self.num_updates = 0
        self.num_nonfinite_steps = 0
        self.spent_grads: set[int] = set()
        """Parameters, by the identity of their state, whose gradients an update has used: they belong to no step under way."""
        self.handles: list[Any] = []
        self.closer: Callable[[], Any] = lanes.release
        self.opened: list[Opened] = []
        self.num_skipped_in_a_row = 0
        self.after_step: Callable[[], None] | None = None
        self.adaptations: list[Adaptation] = []
        self._nonfinite: frozenset[int] = frozenset()
        self._hooked: dict[int, int] = {}
        self._pinned: set[str] = set()
        self._also_opened: dict[str, list[str]] = {}
        self._traces: dict[str, Trace] = {}
        self._schedules: dict[str, Schedule] = {}

    def _make_room(self, setup: Setup) -> Room | None:
        """Where saved tensors rest, if not on the device."""
        if self.plan.activations == Tier.HOST.value:
            return Room(self.executor, self.modules.values(), OnHost(self.ledger))
        if self.plan.activations == Tier.DISK.value and self.disk is not None:
            spared_bytes = setup.load_bytes if self.plan.keeps_state_on_disk else 0
            return Room(self.executor, self.modules.values(), OnDisk(self.disk, self.device, spared_bytes))
        return None

    @property
    def units(self) -> tuple[Unit, ...]:
        """The units, in the order of their definition."""
        return tuple(state.unit for state in self.executor.units.values())

    @property
    def params(self) -> list[ParamState]:
        """All parameters, unit by unit."""
        return [param for flat in self.executor.flats for param in flat.params]

    def book_buffers(self) -> None:
        """Book what the model's buffers hold now: modules may put others in their place, of any size."""
        self.ledger.set(Kind.BUFFER, buffer_bytes(self.modules.values()))

    def _look_at_process(self) -> Process:
        self.book_buffers()
        allocated, resident = memory.allocated_bytes(self.device), memory.resident_bytes()
        return Process(allocated, resident, memory.peak_resident_bytes())

    # What happens at each moment

    def trace_of(self, entry: str = ROOT) -> Trace:
        """The order of moments of a step that enters the model at a module."""
        if entry not in self._traces:
            self._traces[entry] = assumed_trace(self.modules[entry], entry, [unit.name for unit in self.units])
        return self._traces[entry]

    def schedule_of(self, entry: str = ROOT) -> Schedule:
        """What a step does that enters the model at a module."""
        if entry not in self._schedules:
            self._schedules[entry] = build_schedule(self.units, self.plan, self.trace_of(entry))
        return self._schedules[entry]

    def use_trace(self, entry: str, trace: Trace) -> None:
        """Take another order of moments for an entry; all ranks do so together."""
        self._traces[entry] = trace
        self._schedules.pop(entry, None)

    def use_plan(self, plan: Plan) -> None:
        """Go on under another plan, of which state has come to rest where it says. All ranks do so together, between steps."""
        self.plan = self.executor.plan = plan
        self.forward.use_plan(plan)
        self.backward.use_plan(plan)
        self.reducer.forget_squares()
        self.pool.be_scarce(plan.tier(StateKind.GRAD) is Tier.DISK)
        self._schedules.clear()

    def use_disk(self, disk: DiskTier | None) -> None:
        """Have another disk tier, or none."""
        self.disk = self.executor.disk = disk
        self.meter.use_disk(disk)

    def opened_at(self, module: str) -> list[str]:
        """Units that are gathered around the calls of a module."""
        own = [module] if module in self.executor.units else []
        return own + self._also_opened.get(module, [])

    def open_also_at(self, module: str, unit: str) -> None:
        """Gather a unit around the calls of a module that reads its weights."""
        opened = self._also_opened.setdefault(module, [])
        if unit != module and unit not in opened:
            opened.append(unit)

    def begin_entry(self, module: nn.Module) -> None:
        """A call from outside begins."""
        if self.disk is not None and self.disk.is_stopped:
            self.disk.refuse_failed("The model cannot be called.")
        if self.backward.is_running and torch_private.graph_task() == -1:
            self.recover()
        self.updates.before_call(is_training=module.training)
        self.settle()
        for opened in self.opened:
            opened.collect()
        for opened in self.opened:
            opened.take_foreign()
            opened.store_own_part()
        self._hook_params()
        if self.recompute is not None:
            self.recompute.arrange()
        if self.activations is not None:
            self.activations.look_around()
        if self.plan.buffers != "local" and self.lanes.size > 1 and self.is_synced:
            self._sync_buffers(module)

    def end_inference(self) -> None:
        """A call from outside without gradients has ended: no later moment would tell that its values could not be read."""
        if self.disk is None or self.plan.tier(StateKind.PARAM) is not Tier.DISK:
            return
        if any(flat.is_fetched and not flat.is_fetched_alone for flat in self.executor.flats):
            self.executor.gather_log.add("disk")
            self.agreement.agree_on_disk()
        else:
            self.disk.refuse_failed("The model's outputs cannot be relied on.")

    def settle(self) -> None:
        """If the user has cast the model since the last step, follow."""
        if any(needs_recast(unit) for unit in self.executor.units.values()):
            self.updates.finish()
            self.executor.before_change()
            recast(self.executor, self.plan)

    def come_to_rest(self) -> None:
        """Let all updates be seen, and what is kept gathered go. A collective, where updates are delayed."""
        self.updates.settle()
        self.let_go()

    def let_go(self) -> None:
        """Take out of the modules what stays gathered for a backward that has not come, with what users have set on it."""
        if not self.backward.is_running:
            self.backward.release_all()
        self.settle()

    def replace(self, module: nn.Module, name: str, param: nn.Parameter) -> nn.Parameter | None:
        """A user puts another parameter into a module: take its values over, at all places that share it; what stands there stays."""
        state = next((s for s in self.params if any(m is module and n == name for m, n in s.places)), None)
        if state is None or param is state.compute or param is state.resting:
            return None
        if state.opened is None:
            self.write(state, param.detach())
        elif tuple(param.shape) != state.spec.shape:
            raise UsageError(
                f"'{state.spec.name}' has shape {state.spec.shape} but a tensor of {tuple(param.shape)} was put in its place. "
                "Call shardwise.unshard before changing the form of a model."
            )
        else:
            with torch.no_grad():
                state.opened.copy_(param)
        state.resting.requires_grad_(param.requires_grad)
        return state.resting

    def _hook_params(self) -> None:
        with torch_private.without_torch_function():
            for state in self.params:
                if state.resting.requires_grad:
                    self._hook(state)

    def _hook(self, state: ParamState) -> None:
        if id(state) not in self._hooked:
            if not state.compute.requires_grad:
                state.compute.requires_grad_(True)
            handle = state.compute.register_post_accumulate_grad_hook(_TakeGrad(self.backward, state))
            self._hooked[id(state)] = handle.id
            self.handles.append(handle)
        hooks: Any = state.compute._post_accumulate_grad_hooks
        if next(reversed(hooks)) != self._hooked[id(state)]:
            # After the users' own, which read the gradient. Autograd goes by the dict's own order: take out, put in.
            hooks[self._hooked[id(state)]] = hooks.pop(self._hooked[id(state)])

    def _sync_buffers(self, module: nn.Module) -> None:
        buffers = [buffer for buffer in module.buffers() if buffer.numel()]
        by_dtype: dict[torch.dtype, list[torch.Tensor]] = {}
        for buffer in buffers:
            by_dtype.setdefault(buffer.dtype, []).append(buffer)
        for dtype, group in by_dtype.items():
            packed = torch.cat([buffer.detach().flatten() for buffer in group])
            self.executor.gather_log.add("buffers")
            if self.plan.buffers == "broadcast" or not dtype.is_floating_point:
                handle = self.lanes.gather.broadcast(packed, 0, label="module buffers")
                self.executor.wait(handle, "buffers", "")
            else:
                handle = self.lanes.gather.gather_small(packed, label="module buffers")
                self.executor.wait(handle, "buffers", "")
                packed = packed if handle.result is None else handle.result.to(torch.float64).mean(0).to(dtype)
            with torch.no_grad():
                for buffer, values in zip(group, packed.split([buffer.numel() for buffer in group]), strict=True):
                    buffer.copy_(values.view(buffer.shape))

    def pin(self, unit: str) -> None:
        """Keep a unit gathered until the step has ended."""
        if unit not in self._pinned:
            self._pinned.add(unit)
            self.executor.acquire(unit)

    def recover(self) -> None:
        """After an exception in mid-step: bring everything to rest, and drop what was half done."""
        if self.recompute is not None:
            self.recompute.reset()
        self.forward.reset()
        self.backward.abandon()
        self.reducer.abandon()
        self._pinned.clear()
        self.executor.reset()
        self.executor.trim()

    # What stand-ins ask

    @property
    def is_computing(self) -> bool:
        """Whether a call of the model or a backward pass is under way."""
        return self.forward.is_open or torch_private.graph_task() != -1

    def read(self, state: ParamState) -> torch.Tensor:
        """The values of a parameter: gathered on demand inside a call, else only where no collective is needed."""
        unit = self.executor.units[state.flat.spec.unit]
        if self.forward.is_open:
            if unit.num_leases == 0:
                self.forward.read_on_demand(unit.unit.name)
            self.executor.show(unit.unit.name)
            return state.compute
        if torch_private.graph_task() != -1:
            self.backward.need(unit.unit.name)
            self.executor.show(unit.unit.name)
            return state.compute
        if state.opened is not None:
            return state.opened
        if state.flat.is_owned_whole:
            self.updates.finish()
            self.wait_until_copied()  # Who reads them in place may write to them.
            return state.spec.view(self._read_alone(state), shift=state.spec.offset)
        raise not_gathered(state)

    def _read_alone(self, state: ParamState) -> torch.Tensor:
        """Full values that this rank has by itself. Whoever asks for them must not go on without; and others are told."""
        try:
            return state.flat.read_part(state.spec.offset, state.spec.stop).to(self.device)
        except OffloadError as error:
            if self.disk is not None:
                self.disk.fail(error)
            raise

    def write(self, state: ParamState, values: torch.Tensor) -> None:
        """Overwrite a parameter; each rank keeps its own part, so that no collective is needed."""
        if tuple(values.shape) != state.spec.shape:
            raise UsageError(f"'{state.spec.name}' has shape {state.spec.shape} but got values of {tuple(values.shape)}.")
        self.updates.finish()
        self.executor.before_change()
        with torch.no_grad():
            if state.piece.numel:
                with state.flat.part_at_hand(state.piece) as target:
                    target.copy_(slice_of(values, state, target))
            if state.flat.full is not None:
                state.spec.view(state.flat.full).copy_(values)

    def wait_until_copied(self) -> None:
        """Until no save is copying values at rest: they are given to someone who may change them."""
        self.executor.wait_until_copied()

    def cast(self, state: ParamState, dtype: torch.dtype) -> None:
        """Show a parameter in another dtype. Its buffer follows at the next use, when the whole model has been cast."""
        face = Face(state, dtype)
        face.requires_grad_(state.resting.requires_grad)
        state.face = face
        remember(face, state)
        state.show(face)

    def grad_norm(self, state: ParamState, power: float) -> torch.Tensor:
        """The norm of one reduced gradient over all ranks; from the last digest, or a new one if gradients have changed."""
        if self.digest.is_stale:
            self.digest = digest.Digest()
        norm = self.digest.norm(state, power, self.executor)
        held = state.segment.grad
        if isinstance(held, GradFace) and held.factor is not None:
            norm *= abs(float(held.factor))
        return torch.tensor(norm, dtype=state.spec.dtype.to_real(), device=self.device)

    def grads_changed(self) -> None:
        """Norms must be computed anew when they are asked for."""
        self.digest.is_stale = True

    def has_nonfinite(self, state: ParamState) -> bool:
        """Whether the last backward brought inf or nan for a parameter, on any rank."""
        return id(state) in self._nonfinite

    # Where ranks come to agree

    def synchronize(self) -> None:
        """Reduce what backward passes have accumulated, on all ranks alike, and draw up the digest."""
        use = self.agreement.compare_use()
        for name, count in reversed(use.num_reductions.items()):
            while self.reducer.num_issued[name] < count:
                self.reducer.issue(name)
        self.reducer.complete_all()
        if self.plan.unused == "raise":
            self.agreement.refuse_differences(use)
        used_somewhere = {id(state) for state, ranks in use.ranks_of if ranks}
        squares = self.reducer.install(lambda state: id(state) in used_somewhere)
        self.agreement.compare_order()
        self.draw_digest(squares)
        self.reducer.is_steady = use.is_same_trace
        if use.is_same_trace:
            self._adopt_trace()
        self.executor.gather_log.reset()
        self.executor.reduce_log.reset()

    def draw_digest(self, squares: Mapping[int, torch.Tensor] = MappingProxyType({})) -> None:
        """Sum up the reduced gradients on all ranks, and note which are not finite. A collective."""
        self.digest = digest.Digest({2.0: digest.summarize(self.executor, 2.0, squares)})
        self._nonfinite = self.digest.by_power[2.0].nonfinite

    def _adopt_trace(self) -> None:
        """All ranks saw the same moments: take them as the order of the next steps."""
        entry = self.forward.last_entry
        forward = self.forward.recorded.get(entry, ())
        if self.plan.unused == "zero" and {m.unit for m in forward} != {m.unit for m in self.trace_of(entry).forward}:
            return
        trace = Trace(forward, self.backward.moments, "recorded")
        if trace != self.trace_of(entry):
            self.use_trace(entry, trace)

    # Updates

    def before_update(self) -> bool:
        """Bring gradients to their end before an update; returns whether it may go on, the same on all ranks."""
        self.meter.move(Place.UPDATE)
        self.executor.note_activations()
        if self.opened:
            raise UsageError("optimizer.step() cannot run inside `with shardwise.gathered(...)`. Leave the block first.")
        if self.backward.is_running:
            self.recover()
        self.updates.refuse_failed()
        if self.disk is not None:
            self.updates.wait()
        self.let_go()  # What was kept after a forward whose backward has not come would be stale.
        if any(self.reducer.has_pending(name) for name in self.executor.units):
            self.reducer.forget_cleared()
            self.synchronize()
        self.executor.before_change()
        suspects = self.params if self._nonfinite else ()
        bad = [state.spec.name for state in suspects if self.has_nonfinite(state) and state.segment.grad is not None]
        if not bad or self.plan.nonfinite == "keep":
            self.num_skipped_in_a_row = 0
            return True
        found = f"The gradient of '{bad[0]}' and of {len(bad) - 1} more holds inf or nan"
        if self.plan.nonfinite == "raise":
            raise NonFiniteError(f"{found}. No state was changed. Lower the learning rate, clip, or look at this batch.")
        self.num_nonfinite_steps += 1
        self.num_skipped_in_a_row += 1
        if self.num_skipped_in_a_row >= NONFINITE_LIMIT:
            raise NonFiniteError(f"{found}, for the {self.num_skipped_in_a_row}th step in a row. Training has diverged.")
        if self.lanes.rank == 0:
            _log.warning("%s: step skipped on all ranks (%d so far).", found, self.num_nonfinite_steps)
        return False

    def after_update(self, updated: Sequence[str], optim_bytes: Mapping[str, int], *, is_delayed: bool = False) -> None:
        """Values have changed, or are about to: refresh what is resident, and end the step."""
        for unit in self._pinned:
            self.executor.release(unit)
        self._pinned.clear()
        if self.disk is not None and not self.updates.num_pending:
            self.disk.forget_all_ahead()
            if self.plan.keeps_state_on_disk:
                self.agreement.agree_on_disk()
        self.num_updates += bool(updated) or is_delayed
        self.executor.refresh(updated)
        self.executor.trim()
        self.book_optimizer(optim_bytes)
        self.meter.commit()
        if self.after_step is not None:
            self.after_step()

    def book_optimizer(self, optim_bytes: Mapping[str, int]) -> None:
        """Note what the optimizer's state takes, by the type of the device that it is on."""
        for tier, kind in ((Tier.DEVICE, self.device.type), (Tier.HOST, "cpu")):
            if tier is Tier.DEVICE or self.device.type != "cpu":
                self.ledger.set(Kind.OPTIM, optim_bytes.get(kind, 0), tier)


def _nothing(plan: Plan) -> None:
    pass


class _TakeGrad:
    """A hook on a user's parameter. It keeps nothing alive: cycles through tensors are never freed."""

    def __init__(self, backward: Backward, state: ParamState) -> None:
        self._backward = weakref.ref(backward)
        self._state = weakref.ref(state)

    def __call__(self, param: torch.Tensor) -> None:
        backward, state = self._backward(), self._state()
        if backward is not None and state is not None:
            backward.take_grad(state)
