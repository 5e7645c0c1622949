"""Where records go: the protocol of all listeners. Knows nothing of how records are made."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from shardwise.core.records import Header, StepRecord, StepTrace


class Sink(Protocol):
    """Takes the records of one rank. Called on the training thread: what takes long belongs elsewhere."""

    def start(self, header: Header) -> None:
        """Before the first step."""
        ...

    def step(self, record: StepRecord) -> None:
        """A step was committed."""
        ...

    def trace(self, trace: StepTrace) -> None:
        """A step was traced; its record has just come."""
        ...

    def note(self, values: Mapping[str, Any]) -> None:
        """Something that happens once, such as a leak that was found."""
        ...

    def close(self) -> None:
        """Nothing more comes."""
        ...


class Callback:
    """Base for listeners of users, such as one for W&B or MLflow: overwrite what you need.

    >>> class Printer(Callback):
    ...     def step(self, record):
    ...         print(record.step, record.values["loss"])
    """

    def start(self, header: Header) -> None:
        """Before the first step."""

    def step(self, record: StepRecord) -> None:
        """A step was committed."""

    def trace(self, trace: StepTrace) -> None:
        """A step was traced."""

    def note(self, values: Mapping[str, Any]) -> None:
        """Something that happens once."""

    def close(self) -> None:
        """Nothing more comes."""
