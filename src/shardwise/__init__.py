"""Shardwise: train PyTorch models that do not fit, with the loop that you already have.

Names are imported when they are first used, so that the command line can answer without torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from shardwise.api.checkpoints import Loaded, Saving, load, save
    from shardwise.api.moving import move
    from shardwise.api.recording import Recording, record
    from shardwise.api.shard import Sharded, shard
    from shardwise.api.state import GradScaler, clip_grad_norm_, gathered, no_sync, share, unshard
    from shardwise.api.verify import Difference, Verdict, verify
    from shardwise.core.errors import (
        CheckpointError,
        DesyncError,
        NonFiniteError,
        NotGatheredError,
        OffloadError,
        PlanError,
        RankLostError,
        ShardwiseError,
        UpdateError,
        UsageError,
    )
    from shardwise.core.plan import GRAD, OPTIM, PARAM, Plan

__all__ = [
    "GRAD",
    "OPTIM",
    "PARAM",
    "CheckpointError",
    "DesyncError",
    "Difference",
    "GradScaler",
    "Loaded",
    "NonFiniteError",
    "NotGatheredError",
    "OffloadError",
    "Plan",
    "PlanError",
    "RankLostError",
    "Recording",
    "Saving",
    "Sharded",
    "ShardwiseError",
    "UpdateError",
    "UsageError",
    "Verdict",
    "clip_grad_norm_",
    "gathered",
    "load",
    "move",
    "no_sync",
    "record",
    "save",
    "shard",
    "share",
    "unshard",
    "verify",
]
__version__ = "0.1.0"

_MODULES = {
    "shardwise.api.checkpoints": ("Loaded", "Saving", "load", "save"),
    "shardwise.api.moving": ("move",),
    "shardwise.api.recording": ("Recording", "record"),
    "shardwise.api.shard": ("Sharded", "shard"),
    "shardwise.api.state": ("GradScaler", "clip_grad_norm_", "gathered", "no_sync", "share", "unshard"),
    "shardwise.api.verify": ("Difference", "Verdict", "verify"),
    "shardwise.core.plan": ("GRAD", "OPTIM", "PARAM", "Plan"),
}
_HOME = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module 'shardwise' has no attribute {name!r}")
    value: object = getattr(importlib.import_module(_HOME.get(name, "shardwise.core.errors")), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
