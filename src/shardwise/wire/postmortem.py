"""What survivors say when a collective fails: who is missing, where everybody else was, in the words of the schedule.

Each rank that gives up writes where it was into the store of the process group, and reads what the others wrote.
"""

from __future__ import annotations

import json
import time
from datetime import timedelta
from typing import Any

from shardwise.core.errors import DesyncError, RankLostError, ShardwiseError

_GRACE_LIMIT_SECONDS = 10.0


class PostMortem:
    """The survivors' talk through the store of one process group."""

    def __init__(self, store: Any, rank: int, size: int, deadline: timedelta, key: str) -> None:
        self._store = store
        self._rank = rank
        self._size = size
        self._grace_seconds = min(_GRACE_LIMIT_SECONDS, max(2.0, deadline.total_seconds()))
        self._prefix = f"shardwise/postmortem/{key}"

    def explain(self, where: str, error: BaseException) -> ShardwiseError:
        """Turn the failure of a collective into an error that names ranks, unit and op."""
        try:
            reports = self._collect(where)
        except Exception as store_error:
            return RankLostError(
                f"Rank {self._rank} lost its peers in {where}: {_first_line(error)}. The store of the process group does not "
                f"answer either ({_first_line(store_error)}): the process that holds it, usually rank 0, is gone. Restart the job."
            )
        missing = [rank for rank in range(self._size) if rank not in reports]
        if missing:
            names = f"Rank {missing[0]}" if len(missing) == 1 else f"Ranks {', '.join(map(str, missing))}"
            return RankLostError(
                f"{names} did not take part in {where}: dead, stalled, or never called it. Waiting there: "
                f"ranks {', '.join(map(str, sorted(reports)))}. Cause on rank {self._rank}: {_first_line(error)}. "
                "Look at the log of the missing rank, and restart the job."
            )
        if len(set(reports.values())) > 1:
            places = "; ".join(f"rank {rank} was in {reports[rank]}" for rank in sorted(reports))
            return DesyncError(
                f"Ranks ran different collectives: {places}. Every rank must run the same modules in the same order."
            )
        return RankLostError(f"{where} failed on every rank: {_first_line(error)}.")

    def _collect(self, where: str) -> dict[int, str]:
        self._store.set(f"{self._prefix}/{self._rank}", json.dumps(where))
        limit = time.monotonic() + self._grace_seconds
        reports: dict[int, str] = {}
        while len(reports) < self._size:
            for rank in range(self._size):
                key = f"{self._prefix}/{rank}"
                if rank not in reports and self._store.check([key]):
                    reports[rank] = json.loads(self._store.get(key))
            if time.monotonic() > limit:
                break
            time.sleep(0.05)
        return reports


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
