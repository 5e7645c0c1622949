"""Norms of gradients that several backwards brought to parameters of one unit."""

import pytest
import torch
from torch import nn

import shardwise


class _Either(nn.Module):
    """Two parameters in one unit, of which a call uses one."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(4))

    def forward(self, x: torch.Tensor, is_first: bool) -> torch.Tensor:
        return (x * (self.first if is_first else self.second)).sum()


@pytest.mark.parametrize("stage", [0, 3])
def test_a_norm_counts_parameters_that_only_an_earlier_backward_used(stage: int) -> None:
    model = _Either()
    shardwise.shard(model, stage=stage)
    for is_first in (True, False):
        model(torch.ones(4), is_first).backward()
    assert float(nn.utils.clip_grad_norm_(model.parameters(), 1e9)) == pytest.approx(8**0.5)
