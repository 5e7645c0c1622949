"""Where ranks come to agree: what each of them used and in which order, before anything is updated."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from shardwise.core.errors import DesyncError, OffloadError, ShardwiseError, UsageError
from shardwise.runtime.backward import Backward
from shardwise.runtime.executor import Executor
from shardwise.runtime.flat import ParamState
from shardwise.runtime.forward import Forward
from shardwise.runtime.reducer import Reducer
from shardwise.wire.comm import gather_bytes


@dataclass(frozen=True)
class Use:
    """What ranks told each other at the end of a backward."""

    ranks_of: list[tuple[ParamState, list[int]]]
    num_reductions: dict[str, int]
    is_same_trace: bool
    is_same_order: bool


class Agreement:
    """What the ranks of one model compare in each step."""

    def __init__(self, executor: Executor, reducer: Reducer, forward: Forward, backward: Backward) -> None:
        self._executor = executor
        self._reducer = reducer
        self._forward = forward
        self._backward = backward
        self._lanes = executor.lanes

    def compare_use(self) -> Use:
        """One small exchange: who used which parameters, how often units must be reduced, and what moments ranks saw."""
        reducer, units = self._reducer, self._executor.units
        params = [param for unit in units.values() for flat in unit.flats for param in flat.params]
        used = [state.index in state.flat.filled or id(state) in reducer.sent for state in params]
        goals = [reducer.num_issued[name] + reducer.has_pending(name) for name in units]
        entry = self._forward.last_entry
        moments = _hash((entry, self._forward.recorded.get(entry), self._backward.moments))
        strays = _hash((self._forward.strays, self._backward.strays))
        mine = torch.tensor([*used, *goals, *moments, *strays], dtype=torch.uint8)
        self._executor.gather_log.add("use")
        self._executor.meter.arrive()
        handle = self._lanes.gather.gather_small(mine, label="the use of parameters")
        self._executor.wait(handle, "use", "")
        self._executor.meter.tracer.sync()
        rows = mine[None].tolist() if handle.result is None else handle.result.tolist()
        at = len(params)
        return Use(
            [(state, [rank for rank, row in enumerate(rows) if row[place]]) for place, state in enumerate(params)],
            {name: max(row[at + place] for row in rows) for place, name in enumerate(units)},
            is_same_trace=len({tuple(row[-8:]) for row in rows}) == 1,
            is_same_order=len({tuple(row[-4:]) for row in rows}) == 1,
        )

    def refuse_differences(self, use: Use) -> None:
        """Ranks did different things: all of them drop this step's gradients and raise."""
        partly = [(state, ranks) for state, ranks in use.ranks_of if 0 < len(ranks) < self._lanes.size]
        if partly:
            self._reducer.abandon()
            self._raise_unused(*partly[0])
        if not use.is_same_order:
            self._reducer.abandon()
            strays = "\n".join([*self._forward.strays, *self._backward.strays]).encode()
            texts = gather_bytes(self._lanes.gather, strays, label="the order of units")
            rank, unit = next((rank, text.decode().split("\n")[0]) for rank, text in enumerate(texts) if text)
            raise DesyncError(
                f"Ranks ran the modules of the model in different orders: rank {rank} came to '{unit or '(root)'}' later than the "
                "others. No update was made. Run the same modules in the same order on every rank, or pass Plan(unused='zero')."
            )

    def _raise_unused(self, state: ParamState, ranks: Sequence[int]) -> None:
        missing = [rank for rank in range(self._lanes.size) if rank not in ranks]
        raise UsageError(
            f"Parameter '{state.spec.name}' got a gradient on ranks {list(ranks)} but not on ranks {missing}. Use it on every rank, "
            "or pass Plan(unused='zero') to count the missing gradients as zero. Gradients of this step were dropped."
        )

    def compare_order(self) -> None:
        """Refuse to go on if ranks ran their collectives in different orders: with equal sizes, numbers would be swapped.

        Also if the disk has failed one of them.
        """
        if self._lanes.size == 1:
            return self.agree_on_disk()
        logs = (self._executor.gather_log, self._executor.reduce_log)
        mine = torch.tensor([*(log.hash for log in logs), self._has_disk_failed()])
        handle = self._lanes.gather.gather_small(mine, label="the order of collectives")
        self._executor.wait(handle, "use", "")
        if handle.result is None:
            return None
        if bool(handle.result[:, -1].any()):
            self._stop_for_disk()
        if bool((handle.result == handle.result[0]).all()):
            return None
        payload = "\n".join(op for log in logs for op in log.latest).encode()
        texts = gather_bytes(self._lanes.gather, payload, label="the order of collectives")
        self._reducer.abandon()
        for log in logs:
            log.reset()
        raise DesyncError(_first_difference([text.decode().split("\n") for text in texts]))

    # The disk

    def _has_disk_failed(self) -> bool:
        disk = self._executor.disk
        if disk is not None:
            disk.check_writes()
        return disk is not None and disk.failure is not None

    def agree_on_disk(self) -> None:
        """Stop on all ranks if the disk has failed one of them. A collective, where the plan uses the disk.

        Raises:
            OffloadError: It has.
        """
        if self._executor.disk is None:
            return
        mine = torch.tensor([self._has_disk_failed()], dtype=torch.uint8)
        handle = self._lanes.gather.gather_small(mine, label="the state of the disk tier")
        self._executor.wait(handle, "use", "")
        if bool((mine if handle.result is None else handle.result).any()):
            self._stop_for_disk()

    def _stop_for_disk(self) -> None:
        """Drop this step's gradients, and tell all ranks what has failed."""
        disk = self._executor.disk
        if disk is None:
            raise ShardwiseError("A rank's disk tier has failed, but this rank has none.")
        texts = gather_bytes(self._lanes.gather, (disk.failure or "").encode(), label="the state of the disk tier")
        rank, text = next((rank, text.decode()) for rank, text in enumerate(texts) if text)
        told = text if text.startswith("Rank ") else f"Rank {rank}: {text}"
        disk.failure, disk.is_stopped = told, True
        self._reducer.abandon()
        for log in (self._executor.gather_log, self._executor.reduce_log):
            log.reset()
        for flat in self._executor.flats:
            for state in flat.params:
                state.segment.grad = None
        if not self._executor.plan.keeps_state_on_disk:
            disk.forgive()  # Activations alone are lost, and the next step makes new ones.
        raise OffloadError(told)


def _hash(value: object) -> bytes:
    return zlib.crc32(repr(value).encode()).to_bytes(4, "little")


def _first_difference(logs: Sequence[Sequence[str]]) -> str:
    for place in range(max(len(log) for log in logs)):
        ops = [log[place] if place < len(log) else "nothing more" for log in logs]
        for rank, op in enumerate(ops):
            if op != ops[0]:
                return (
                    f"Ranks ran their collectives in different orders: at number {place} of this step rank 0 did '{ops[0]}' but "
                    f"rank {rank} did '{op}'. Values may have been swapped, so no update was made. Run the same modules in the "
                    "same order on every rank."
                )
    raise ShardwiseError("The hashes of the ranks' collectives differ but their logs agree.")
