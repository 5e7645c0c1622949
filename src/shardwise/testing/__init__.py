"""Tools for testing distributed code: pools of worker processes and planted faults.

It stands above every other layer, and nothing in the package imports it. It knows nothing of sharding.
"""

from shardwise.testing.faults import Fault, InjectedFault, fail_at
from shardwise.testing.worker import Failure
from shardwise.testing.worlds import RankError, World

__all__ = ["Failure", "Fault", "InjectedFault", "RankError", "World", "fail_at"]
