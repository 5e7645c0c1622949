"""How tensors and values of a training state are called in a checkpoint."""

from __future__ import annotations

from typing import Any

MODEL = "model/"
GRADIENT = "gradient/"
RANDOM = "random"
ENGINE = "engine"
EXTRA = "extra/"
MODULE = "module/"
ELEMENTS = {"!": "elements"}
"""Stands for a value of an optimizer that is a tensor of the parameter's form, and kept as one."""


def of_rank(rank: int, name: str) -> str:
    """What one rank has for itself."""
    return f"rank.{rank}/{name}"


def optimizer(index: int, what: str = "") -> str:
    """Something of one optimizer."""
    return f"optimizer.{index}/{what}"


def groups(index: int) -> str:
    """The groups of one optimizer."""
    return optimizer(index, "groups")


def is_groups(name: str) -> bool:
    """Whether a name is that of some optimizer's groups."""
    return name.startswith("optimizer.") and name.endswith("/groups") and name.count("/") == 1


def kinds(index: int) -> str:
    """Which optimizer it was: its kind, or those that it may have been."""
    return optimizer(index, "kinds")


def state(index: int, param: str) -> str:
    """What an optimizer holds for one parameter: values, and which of them are tensors of its form."""
    return optimizer(index, f"state/{param}")


def elements(index: int, param: str, key: str) -> str:
    """A tensor of a parameter's form that an optimizer holds for it."""
    return optimizer(index, f"{param}/{key}")


def is_elements(value: Any) -> bool:
    """Whether a value stands for such a tensor."""
    return bool(value == ELEMENTS)
