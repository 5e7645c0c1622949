"""Bytes that are recorded are those that go over a real network interface, between two hosts."""

import json
import os

import pytest

from shardwise.testing.hosts import HEADER_BYTES, can_have_hosts, finish_all, two_hosts

pytestmark = pytest.mark.dist
NUM_STEPS = 6

SCRIPT = f"""
import json, sys
from datetime import timedelta
from pathlib import Path
import torch
import torch.distributed as dist
from torch import nn
import shardwise
from shardwise.telemetry.sink import Callback

rank, address, link, stage, dtype = int(sys.argv[1]), sys.argv[2], sys.argv[3], int(sys.argv[4]), sys.argv[5]
torch.set_num_threads(1)
dist.init_process_group("gloo", init_method=f"tcp://{{address}}:29511", rank=rank, world_size=2, timeout=timedelta(seconds=60))

def counters():
    folder = Path("/sys/class/net") / link / "statistics"
    return [int((folder / name).read_text()) for name in ("tx_bytes", "tx_packets")]

torch.manual_seed(0)
model = nn.Sequential(*(nn.Linear(512, 512) for _ in range(8)))
optimizer = torch.optim.AdamW(model.parameters())
precision = {{}} if dtype == "fp32" else {{"param_dtype": "bfloat16", "reduce_dtype": "bfloat16"}}
shardwise.shard(model, optimizer, stage=stage, path="network", **precision)

class Sent(Callback):
    num_bytes = 0
    links = set()
    def step(self, record):
        self.num_bytes += record.wire_bytes
        self.links |= {{row.link for row in record.traffic}}

def step():
    model(torch.ones(4, 512)).float().square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()

sent = Sent()
with shardwise.record(model, sinks=[sent]) as recording:
    for _ in range(2):
        step()
    recording.flush()
    dist.barrier()
    sent.num_bytes = 0
    before = counters()
    for _ in range({NUM_STEPS}):
        step()
    after = counters()
dist.barrier()
print(json.dumps({{
    "recorded": sent.num_bytes,
    "bytes": after[0] - before[0],
    "packets": after[1] - before[1],
    "links": sorted(sent.links),
}}))
dist.destroy_process_group()
"""


@pytest.mark.parametrize(("stage", "dtype"), [(0, "fp32"), (3, "fp32"), (3, "bf16")])
def test_recorded_bytes_are_those_of_the_network_interface(stage: int, dtype: str) -> None:
    if not can_have_hosts():
        if os.environ.get("SHARDWISE_NEEDS_HOSTS"):
            pytest.fail("No network namespaces can be made, and SHARDWISE_NEEDS_HOSTS says that this test must run.")
        pytest.skip("Network namespaces need root and iproute2: bytes were not compared with those of an interface.")
    with two_hosts() as hosts:
        first = hosts[0].address
        processes = [host.start(SCRIPT, str(rank), first, host.link, str(stage), dtype) for rank, host in enumerate(hosts)]
        found = [json.loads(text) for text in finish_all(processes, 120)]
    for rank, row in enumerate(found):
        payload = row["bytes"] - HEADER_BYTES * row["packets"]
        place = f"rank {rank}: {row}, {payload} without headers"
        assert row["links"] == ["gloo"], place
        assert row["recorded"] == pytest.approx(payload, rel=0.02), place
