"""The errors that users can catch. Each says what was expected, what was found and what to do."""

from __future__ import annotations


class ShardwiseError(Exception):
    """Base of every error that Shardwise raises by itself."""


class UsageError(ShardwiseError, ValueError):
    """The call cannot be carried out as it was written; nothing was changed."""


class UsageTypeError(ShardwiseError, TypeError):
    """An argument is of a type that Shardwise cannot work with; nothing was changed."""


class PlanError(UsageError):
    """A plan is contradictory, or does not fit the model, the optimizer or the ranks."""


class NotGatheredError(ShardwiseError, RuntimeError):
    """The values of a sharded parameter or gradient were read where they are not present."""


class DesyncError(ShardwiseError, RuntimeError):
    """Ranks ran different collectives, or the same ones in another order."""


class RankLostError(ShardwiseError, RuntimeError):
    """A rank died or did not arrive at a collective before the deadline."""


class UpdateError(ShardwiseError, RuntimeError):
    """An update that was made beside a step has failed: the state is lost until a checkpoint is loaded."""


class NonFiniteError(ShardwiseError, ArithmeticError):
    """Gradients hold inf or nan and the plan does not allow the step to go on."""


class CheckpointError(ShardwiseError, RuntimeError):
    """A checkpoint is incomplete, damaged or of another model."""


class PathError(CheckpointError, UsageError):
    """A path cannot be followed: a folder may not be looked into or written to, or a file is in its way."""


class OffloadError(ShardwiseError, OSError):
    """State could not be brought to another tier, or back from it."""
