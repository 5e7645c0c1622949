"""Shardwise: train PyTorch models that do not fit, with the loop that you already have."""

from shardwise.api.shard import Sharded, shard
from shardwise.api.state import GradScaler, clip_grad_norm_, gathered, no_sync, share, unshard
from shardwise.api.verify import Difference, Verdict, verify
from shardwise.core.errors import (
    CheckpointError,
    DesyncError,
    NonFiniteError,
    NotGatheredError,
    PlanError,
    RankLostError,
    ShardwiseError,
    UsageError,
)
from shardwise.core.plan import Plan

__all__ = [
    "CheckpointError",
    "DesyncError",
    "Difference",
    "GradScaler",
    "NonFiniteError",
    "NotGatheredError",
    "Plan",
    "PlanError",
    "RankLostError",
    "Sharded",
    "ShardwiseError",
    "UsageError",
    "Verdict",
    "clip_grad_norm_",
    "gathered",
    "no_sync",
    "shard",
    "share",
    "unshard",
    "verify",
]
__version__ = "0.1.0"
