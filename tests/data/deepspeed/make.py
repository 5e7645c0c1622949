"""Writes the checkpoints of this folder with DeepSpeed 0.19.8, on two ranks:

for rank in 0 1; do RANK=$rank WORLD_SIZE=2 python make.py STAGE FOLDER & done

``expected.safetensors`` is what DeepSpeed's own ``zero_to_fp32`` makes of it. Run by hand: no test needs DeepSpeed.
"""

import os
import sys

import torch
from torch import Tensor, nn


class Net(nn.Module):
    """Tied and frozen weights, buffers, sizes that two ranks do not divide."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.body = nn.Linear(6, 7)
        self.norm = nn.BatchNorm1d(7)
        self.frozen = nn.Linear(7, 6).requires_grad_(False)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.frozen(self.norm(self.body(self.embed(x))))).square().mean()


def main(stage: int, folder: str) -> None:
    import deepspeed
    import torch.distributed as dist
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
    from safetensors.torch import save_file

    os.environ |= {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29611",
        "LOCAL_RANK": os.environ["RANK"],
        "DS_ACCELERATOR": "cpu",
    }
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.AdamW([param for param in model.parameters() if param.requires_grad], lr=0.01)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "zero_force_ds_cpu_optimizer": False,
        "zero_allow_untested_optimizer": True,
    }
    deepspeed.init_distributed("gloo")
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    for step in range(3):
        draw = torch.Generator().manual_seed(step * 2 + dist.get_rank())
        engine.backward(engine(torch.randint(11, (8,), generator=draw)))
        engine.step()
    engine.save_checkpoint(folder)
    dist.barrier()
    if dist.get_rank() == 0:
        state = get_fp32_state_dict_from_zero_checkpoint(folder)
        save_file({name: tensor.contiguous().clone() for name, tensor in state.items()}, f"{folder}/expected.safetensors")


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
