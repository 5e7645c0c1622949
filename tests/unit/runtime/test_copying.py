"""Writes to what is being copied are found, from the call until the loop has waited or all is written down."""

import torch
from torch import nn

from shardwise.runtime.copying import Copying, guards_of


def test_writes_before_the_loop_has_waited_are_found_by_name() -> None:
    values, others = torch.zeros(8), torch.zeros(8)
    copying = Copying([("values", guards_of(values[:4])), ("others", guards_of(others))])
    copying.end()
    with torch.no_grad():
        nn.Parameter(values[4:]).add_(1.0)  # One line of numbers, of which another part is written to.
    assert copying.seal() == ["values"]
    others.add_(1.0)
    assert copying.seal() == ["values"]


def test_writes_after_the_loop_has_waited_do_not_matter() -> None:
    values = torch.zeros(8)
    copying = Copying([("values", guards_of(values))])
    copying.end()
    seconds = copying.wait()
    values.add_(1.0)
    assert copying.seal() == [] and copying.waited_seconds == seconds > 0.0


def test_tensors_whose_writes_are_not_counted_have_no_guards() -> None:
    with torch.inference_mode():
        made = torch.zeros(2)
    assert guards_of(torch.zeros(2), made) == ()
