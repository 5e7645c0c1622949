"""Updates that are made beside the next step, by a thread, and seen when that step is updated in turn.

Meanwhile the step computes with copies of the values from before. The thread changes values at rest and the optimizer's state
alone; what others see of them, and all that ranks do together, is done by those who call `Updates`.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import TYPE_CHECKING

import torch

from shardwise.core.errors import OffloadError, UpdateError, UsageError
from shardwise.runtime.double import Update
from shardwise.wire.comm import gather_bytes

if TYPE_CHECKING:
    from shardwise.runtime.engine import Engine


class Updates:
    """The updates of one model that were begun and have not been seen yet.

    They are seen at the next ``optimizer.step`` after a call with gradients: until then, all calls of a step compute with the same
    values.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._pending: list[Update] = []
        self._thread: ThreadPoolExecutor | None = None
        self._is_in_step = False
        """Whether the model was called with gradients since the last update."""
        self._num_open = 0
        """Such calls whose outputs have not been differentiated."""
        self._failure: str | None = None

    @property
    def num_pending(self) -> int:
        """Updates that those who compute do not see yet."""
        return len(self._pending)

    @property
    def is_due(self) -> bool:
        """Whether the next update is to be delayed."""
        engine = self._engine
        return engine.plan.is_delayed and engine.num_updates >= engine.plan.delay_warmup

    @property
    def is_beside(self) -> bool:
        """Whether an update is made beside the step that is under way, or its own will be: they read from disk by themselves."""
        return bool(self._pending) or self.is_due

    # Where the loop is

    def before_call(self, *, is_training: bool) -> None:
        """The model is called from outside. A call for its outputs alone, between two steps, sees all updates. A collective then."""
        if not self._is_in_step and not (is_training and torch.is_grad_enabled()):
            self.settle()
        self._is_in_step |= torch.is_grad_enabled()

    def after_call(self) -> None:
        """A call has returned what can be differentiated."""
        self._num_open += 1

    def before_backward(self) -> None:
        """What a call has returned is being differentiated."""
        self._num_open = max(0, self._num_open - 1)

    def before_update(self) -> None:
        """The ranks have agreed to update: what was made beside the step that ends with this is seen from now on. A collective."""
        is_in_step, self._is_in_step, self._num_open = self._is_in_step, False, 0
        if is_in_step:
            self.settle()

    # Updates

    def begin(self, update: Update, leader: Updates) -> None:
        """Make an update beside what comes next. One that concerns several models is run by the leader's thread."""
        self._pending.append(update)
        self._engine.executor.is_behind = True
        if leader is self:
            if self._thread is None:
                self._thread = ThreadPoolExecutor(1, thread_name_prefix="shardwise-update")
            update.lend_grads()
            self._thread.submit(update.run)

    def wait(self) -> None:
        """Until no update is under way. What is computed with stays as it is, and other ranks have no part in it."""
        for update in self._pending:
            update.ended.wait()

    def finish(self) -> None:
        """The same; and the values at rest and the optimizer's state can be read and written from then on.

        Raises:
            UpdateError: An update has failed on this rank. The others are told when all meet.
        """
        self.wait()
        failed = self._error()
        if failed is not None:
            raise UpdateError(_told(self._engine.lanes.rank, failed)) from failed
        for update in self._pending:
            update.bring_back()

    def settle(self) -> None:
        """Let all updates be seen, unless a call is still to be differentiated, which has seen other values. A collective.

        Raises:
            UpdateError: One has failed on some rank.
            OffloadError: The disk has.
        """
        self.refuse_failed()
        if not self._pending:
            return
        self.wait()
        self._agree()
        for update in self._pending:
            update.bring_back()
        if self._num_open:
            return
        pending = self._take()
        engine = self._engine
        if engine.disk is not None:
            engine.disk.forget_all_ahead()
            if engine.plan.keeps_state_on_disk:
                engine.agreement.agree_on_disk()
        engine.executor.before_change()
        units = set()
        for update in pending:
            for flat in update.flats:
                if flat.params[0].host is engine:
                    update.publish(flat)
                    units.add(flat.spec.unit)
        engine.executor.refresh([name for name in engine.executor.units if name in units])

    def _take(self) -> list[Update]:
        pending, self._pending = self._pending, []
        self._engine.executor.is_behind = False
        return pending

    def _error(self) -> BaseException | None:
        return next((update.error for update in self._pending if update.error is not None), None)

    def _agree(self) -> None:
        """Stop on all ranks if an update has failed on one."""
        engine, error = self._engine, self._error()
        mine = torch.tensor([error is not None], dtype=torch.uint8)
        engine.executor.gather_log.add("update")
        handle = engine.lanes.gather.gather_small(mine, label="the end of an update")
        engine.executor.wait(handle, "use", "")
        if not bool((mine if handle.result is None else handle.result).any()):
            return
        self._drop()
        told = "" if error is None else _told(engine.lanes.rank, error)
        texts = gather_bytes(engine.lanes.gather, told.encode(), label="the end of an update")
        self._failure = next(text for text in texts if text).decode()
        raise UpdateError(self._failure) from error

    def refuse_open(self, what: str) -> None:
        """Refuse what would let updates be seen between a call and its backward.

        Raises:
            UsageError: There is such a call.
        """
        if self._pending and self._num_open:
            raise UsageError(
                f"{what} while the model's outputs wait for their backward and sync='delayed' has an update under way: the backward "
                "would see other weights than the forward. Call backward first, or torch.no_grad() around calls that have none."
            )

    def refuse_failed(self) -> None:
        """Refuse to go on with the state of an update that failed.

        Raises:
            UpdateError: There is such a state.
        """
        if self._failure is not None:
            raise UpdateError(self._failure)

    def give_up(self) -> None:
        """State is going to be loaded: let all updates end, whatever came of them. A collective."""
        with suppress(UpdateError, OffloadError):  # On all ranks alike.
            self.settle()

    def forgive(self) -> None:
        """All state is about to be loaded anew."""
        self.wait()
        self._drop()
        self._failure = None

    def _drop(self) -> None:
        for update in self._take():
            update.drop()

    def close(self) -> None:
        """Let the thread go."""
        if self._thread is not None:
            self._thread.shutdown()
            self._thread = None


def _told(rank: int, error: BaseException) -> str:
    return (
        f"Rank {rank}: an update that was made beside a step failed: {type(error).__name__}: {error} "
        "Its state is lost. Load a checkpoint first, or start again from one."
    )
