"""Full values in users' hands: what ``gathered`` opens, and how what was written finds its way back."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import torch
from torch import nn

from shardwise.core.errors import UsageError
from shardwise.core.ledger import Kind
from shardwise.runtime.executor import Executor
from shardwise.runtime.flat import FlatState, ParamState, carry_attributes, lies_at, piece_shape
from shardwise.runtime.grads import GradFace, assign_grad


class Opened:
    """One flat buffer whose full values and gradients are plain parameters for a while."""

    def __init__(self, flat: FlatState, executor: Executor) -> None:
        self.flat = flat
        self._executor = executor
        is_at_hand = flat.is_owned_whole and flat.line is None and flat.shard is None and flat.master.device == flat.device
        self._is_borrowed = not (flat.is_aliased or is_at_hand)
        self.values = self._gather_values()
        self._checksum = checksum(self.values)
        self._foreign: list[tuple[ParamState, torch.Tensor]] = []
        grads = self._gather_grads()
        for state in flat.params:
            state.opened = nn.Parameter(state.spec.view(self.values), requires_grad=state.resting.requires_grad)
            carry_attributes(state.compute if state.face is None else state.face, state.opened)
            if grads is not None and isinstance(state.segment.grad, GradFace):
                state.opened.grad = state.spec.view(grads)
            state.show(state.opened)

    def _gather_values(self) -> torch.Tensor:
        flat = self.flat
        if flat.is_aliased and flat.full is not None:
            self._executor.wait_until_copied()
            return flat.full
        if not self._is_borrowed:
            self._executor.wait_until_copied()
            return flat.master
        values = self._executor.pool.take(flat.layout.numel, flat.precision.master, flat.device, Kind.GATHERED)
        own = values[slice(*flat.bounds)]
        if flat.line is not None:
            own.copy_(flat.master)  # The form, of what cannot be read: peers wait for it, and are told when all are open.
        with flat.attempt():
            own.copy_(flat.read_part(*flat.bounds))
        if not flat.is_owned_whole:
            self._gather(values, "values")
        return values

    def _gather_grads(self) -> torch.Tensor | None:
        """Full reduced gradients in the dtype of the parameters, or None if there are none."""
        flat = self.flat
        faces = [state.segment.grad for state in flat.params if isinstance(state.segment.grad, GradFace)]
        if not any(face.buffer is not None for face in faces):
            return None
        grads = torch.zeros(flat.layout.numel, dtype=flat.precision.master, device=flat.device)
        for face in faces:
            usable = face.usable()
            if usable is not None and face.state.piece.numel:
                face.state.piece.view(grads, shift=0).copy_(usable)
        if not flat.is_owned_whole:
            self._gather(grads, "gradients")
        return grads

    def _gather(self, buffer: torch.Tensor, what: str) -> None:
        self._executor.gather_log.add(f"open {what} {self.flat.spec.unit}")
        handle = self._executor.lanes.gather.all_gather(buffer, self.flat.layout.cuts, label=f"{what} of {self.flat.spec.name}")
        self._executor.wait(handle, "gather", self.flat.spec.unit)
        handle.receipt.wait()

    def collect(self) -> None:
        """Take in what was written in other ways: new memory under a parameter, or a new parameter in its place."""
        foreign = []
        for state in self.flat.params:
            shown = state.shown
            is_own = shown is state.compute or (shown is state.opened and lies_at(shown, self.values, state.spec.offset))
            if is_own:
                continue
            if tuple(shown.shape) != state.spec.shape:
                raise UsageError(
                    f"'{state.spec.name}' has shape {state.spec.shape} but a tensor of {tuple(shown.shape)} was put in its place. "
                    "Call shardwise.unshard before changing the form of a model."
                )
            foreign.append((state, shown.detach().clone()))
        self._foreign = foreign

    def take_foreign(self) -> None:
        """Write what was collected; after all buffers have collected, since memory may have been exchanged between them."""
        with torch.no_grad():
            for state, values in self._foreign:
                view = state.spec.view(self.values)
                view.copy_(values)
                if state.opened is not None:
                    state.opened.data = view

    @property
    def change(self) -> tuple[int, int]:
        """Checksums of the values when they were opened and now."""
        return self._checksum, checksum(self.values)

    def store_own_part(self) -> None:
        """Keep what was written: this rank's own part, and the copy that compute uses, where there is one."""
        flat = self.flat
        self._executor.before_change()
        with torch.no_grad():
            if self._is_borrowed and (flat.line is None or flat.line.tier.failure is None):
                with flat.attempt():
                    flat.write_part(self.values[slice(*flat.bounds)], flat.bounds[0])
            if flat.full is not None and not flat.is_aliased:
                flat.full.copy_(self.values)

    def close(self, writer: int | None) -> None:
        """Bring stand-ins back. If one rank alone has written, all take its values."""
        if writer is not None:
            label = f"values of {self.flat.spec.name} written on rank {writer}"
            handle = self._executor.lanes.gather.broadcast(self.values, writer, label=label)
            self._executor.wait(handle, "gather", self.flat.spec.unit)
        self.store_own_part()
        for state in self.flat.params:
            self._close_param(state)
        if self._is_borrowed:
            self._executor.pool.give(self.values, Kind.GATHERED)

    def _close_param(self, state: ParamState) -> None:
        opened, state.opened = state.opened, None
        state.show(state.resting)
        if opened is None:
            return
        carry_attributes(opened, state.resting)
        if opened.requires_grad != state.resting.requires_grad:
            state.resting.requires_grad_(opened.requires_grad)
        # Hold on to the form alone: a late reference to the opened parameter must not read a reused buffer.
        grad = opened.grad
        if self._is_borrowed:
            opened.data = (
                opened.data.new_full((), float("nan")).expand(state.spec.shape) if opened.is_floating_point() else opened.data
            )
        held = state.segment.grad
        if grad is None:
            if isinstance(held, GradFace):
                state.segment.grad = None
        elif isinstance(held, GradFace) and held.buffer is not None and state.piece.numel:
            line = grad.as_strided((state.spec.numel,), (1,)) if grad.stride() == state.spec.stride else None
            part = grad if state.piece.is_whole else _part(grad if line is None else line, state)
            part, usable = part.view(piece_shape(state.piece)), held.usable()
            if usable is None or not torch.equal(part, usable):
                held.buffer.factors.pop(state.index, None)
                reduced = held.reduced
                if reduced is not None:
                    reduced.copy_(part)
        elif held is None:
            assign_grad(state.compute, grad)


def _part(grad: torch.Tensor, state: ParamState) -> torch.Tensor:
    line = grad
    if grad.dim() != 1 or grad.numel() != state.spec.numel:
        ordered = torch.empty_strided(state.spec.shape, state.spec.stride, dtype=grad.dtype, device=grad.device)
        ordered.copy_(grad)
        line = ordered.as_strided((state.spec.numel,), (1,))
    return line[state.piece.start - state.spec.offset : state.piece.stop - state.spec.offset]


def close_all(opened: Sequence[Opened], executor: Executor) -> None:
    """Close buffers on all ranks. Ranks must have written the same, or one rank alone."""
    comm = executor.lanes.gather
    for item in opened:
        item.collect()
    for item in opened:
        item.take_foreign()
    mine = torch.tensor([part for item in opened for part in item.change], dtype=torch.int64)
    executor.gather_log.add("close")
    handle = comm.gather_small(mine, label="checksums of what was written")
    executor.wait(handle, "use", "")
    rows = [mine.tolist()] if handle.result is None else handle.result.tolist()
    conflict: tuple[FlatState, list[int]] | None = None
    for place, item in enumerate(opened):
        changed = [rank for rank, row in enumerate(rows) if row[2 * place] != row[2 * place + 1]]
        differ = len({row[2 * place + 1] for row in rows}) > 1
        if differ and len(changed) > 1 and conflict is None:
            conflict = (item.flat, changed)
        item.close(changed[0] if differ and changed else None)
    if conflict is not None:
        flat, ranks = conflict
        raise UsageError(
            f"Ranks {ranks} wrote different values to parameters of {flat.spec.name}, starting with '{flat.spec.params[0].name}'. "
            f"Rank {ranks[0]}'s were kept on all ranks. Write the same values on every rank, or on one rank alone."
        )


def checksum(values: torch.Tensor) -> int:
    """A number that changes when any bit of the values does."""
    return zlib.crc32(values.detach().view(torch.uint8).cpu().numpy())  # type: ignore[arg-type]
