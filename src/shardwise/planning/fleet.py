"""Fleets: how many of which accelerators. Knows neither models nor links between the parts."""

from __future__ import annotations

import re
from dataclasses import dataclass

from shardwise.core.errors import UsageError
from shardwise.planning.catalogue import Accelerator, Catalogue

_FORM = "Expected accelerators and how many of each, such as 'a100-80gb:8' or 'a100-80gb:2 + t4:4',"


@dataclass(frozen=True)
class Group:
    """Accelerators of one kind."""

    accelerator: Accelerator
    count: int


@dataclass(frozen=True)
class Fleet:
    """Groups of accelerators; ranks are numbered in their order."""

    groups: tuple[Group, ...]

    @property
    def num_ranks(self) -> int:
        """One for each accelerator."""
        return sum(group.count for group in self.groups)

    @property
    def least_memory_bytes(self) -> int:
        """What the smallest accelerator has: equal shares must fit there."""
        return min(group.accelerator.memory_bytes for group in self.groups)


def parse_fleet(text: str, catalogue: Catalogue) -> Fleet:
    """Read a fleet.

    Raises:
        UsageError: It is not of this form, or names an accelerator twice or one that the catalogue does not have.

    >>> from shardwise.planning.catalogue import load_catalogue
    >>> fleet = parse_fleet("a100-80gb:2 + t4:4", load_catalogue())
    >>> fleet.num_ranks, [group.accelerator.name for group in fleet.groups]
    (6, ['A100-SXM-80GB', 'T4-16GB'])
    """
    groups: dict[str, Group] = {}
    for part in text.split("+"):
        match = re.fullmatch(r"\s*([^\s:]+)\s*:\s*([0-9]{1,9})\s*", part, re.ASCII)
        if match is None:
            raise UsageError(f"{_FORM} but got {part.strip()!r}{_in_whole(part, text)}.{_on_count(part)}")
        accelerator, count = catalogue.find(match.group(1)), int(match.group(2))
        if count < 1:
            raise UsageError(f"{_FORM} 1 or more, but got {part.strip()!r}{_in_whole(part, text)}.")
        if accelerator.name in groups:
            total = groups[accelerator.name].count + count
            raise UsageError(
                f"{text.strip()!r} has {accelerator.name} twice. Write {match.group(1)}:{total} if these are all of one group."
            )
        groups[accelerator.name] = Group(accelerator, count)
    return Fleet(tuple(groups.values()))


def _in_whole(part: str, text: str) -> str:
    return "" if part.strip() == text.strip() else f" in {text.strip()!r}"


def _on_count(part: str) -> str:
    name = part.strip()
    return f" Say how many: '{name}:1' is one." if name and ":" not in name and " " not in name else ""
