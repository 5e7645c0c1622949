"""The simulated accelerator: what it counts, what it refuses, and that torch, DDP and FSDP2 work on it as on any device."""

import gc
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

import shardwise
from shardwise.core.errors import ShardwiseError, UsageError
from shardwise.devices import sim
from shardwise.devices.sim import build
from shardwise.testing import World

pytestmark = pytest.mark.dist
MEBIBYTE = 2**20


def _one(world: World, fn: Any, *args: Any) -> Any:
    return world.run(fn, *args, ranks=1)[0]


# ---------------------------------------------------------------- memory


def _count() -> list[int]:
    live = [sim.memory().live_bytes]
    tensor = torch.empty(1000, device="sim")
    live.append(sim.memory().live_bytes)
    view = tensor[10:20].t()
    product = tensor * 2
    live.append(sim.memory().live_bytes)
    del tensor, product
    live.append(sim.memory().live_bytes)
    del view
    live.append(sim.memory().live_bytes)
    return [now - live[0] for now in live]


def test_live_bytes_are_exact(sim_world: World) -> None:
    assert _one(sim_world, _count) == [0, 4000, 8000, 4000, 0]


def _count_results() -> dict[str, int]:
    """Bytes that results of kernels of all kinds take."""
    x = torch.arange(64.0, device="sim").view(8, 8)
    work = {
        "new": lambda: x @ x,
        "boolean": lambda: x > 3,
        "view": lambda: x.transpose(0, 1)[2:],
        "in place": lambda: x.add_(1),
        "list": lambda: torch.split(x, 2),
        "of unknown size": lambda: torch.nonzero(x > 1e9),
        "into another": lambda: torch.mul(x, 2, out=torch.empty(0, device="sim")),
        "two": x.sort,
    }
    found = {}
    for name, call in work.items():
        before = sim.memory().live_bytes
        result = call()
        found[name] = sim.memory().live_bytes - before
        del result
        assert sim.memory().live_bytes == before, name
    return found


def test_results_of_kernels_are_counted_and_let_go(sim_world: World) -> None:
    expected = {"new": 256, "boolean": 64, "view": 0, "in place": 0, "list": 0, "of unknown size": 0, "into another": 256}
    assert _one(sim_world, _count_results) == {**expected, "two": 256 + 512}


def _write_to_the_host() -> tuple[str, float]:
    """A tensor of the host is not written to by a kernel of the device, as on any accelerator; it stays as it was."""
    total = torch.zeros(())
    try:
        total += torch.ones((), device="sim")
    except RuntimeError as error:
        return str(error), float(total)
    return "", float(total)


def test_host_and_device_are_not_mixed(sim_world: World) -> None:
    message, total = _one(sim_world, _write_to_the_host)
    assert "same device" in message and total == 0.0


def _fill_up() -> tuple[str, int, int, bool]:
    sim.configure(0, capacity_bytes=sim.memory().live_bytes + MEBIBYTE)
    before = sim.memory()
    kept = torch.empty(MEBIBYTE // 2, dtype=torch.uint8, device="sim")
    message = ""
    try:
        torch.empty(MEBIBYTE, dtype=torch.uint8, device="sim")
    except torch.OutOfMemoryError as error:
        message = str(error)
    held = sim.memory().live_bytes - before.live_bytes
    refused = sim.memory().num_refusals - before.num_refusals
    del kept
    fits_again = torch.empty(MEBIBYTE, dtype=torch.uint8, device="sim").numel() == MEBIBYTE
    return message, held, refused, fits_again


def test_past_its_capacity_it_is_out_of_memory(sim_world: World) -> None:
    message, held, refused, fits_again = _one(sim_world, _fill_up)
    assert "sim:0 is out of memory: 1.0 MiB were asked for" in message
    assert "0.5 MiB are in use" in message or "are in use" in message
    assert (held, refused, fits_again) == (MEBIBYTE // 2, 1, True)


def _several() -> tuple[list[int], str]:
    before = [sim.memory(device).live_bytes for device in range(2)]
    first, second = torch.zeros(100, device="sim:0"), torch.zeros(200, device="sim:1")
    moved = first.to("sim:1")
    live = [sim.memory(device).live_bytes - before[device] for device in range(2)]
    try:
        first.add_(second[:100])
    except RuntimeError as error:
        return live, str(error)
    return live, f"{moved.device}"


def test_devices_have_memory_of_their_own(sim_world: World) -> None:
    live, _ = _one(sim_world, _several)
    assert live == [400, 1200]


def _copy() -> tuple[list[int], float]:
    sim.reset_traffic(0)
    host = torch.ones(MEBIBYTE, dtype=torch.float32)
    device = host.to("sim")
    narrow = host.to("sim", torch.bfloat16)
    device.cpu()
    device.clone()
    traffic = sim.traffic(0)
    sim.configure(0, bytes_per_second=40 * MEBIBYTE)
    begin = torch.Event(device="sim", enable_timing=True)
    end = torch.Event(device="sim", enable_timing=True)
    begin.record()
    host.to("sim")
    end.record()
    del narrow
    return [traffic.in_bytes, traffic.out_bytes], begin.elapsed_time(end) / 1000


def test_copies_are_counted_and_can_be_slowed(sim_world: World) -> None:
    (in_bytes, out_bytes), seconds = _one(sim_world, _copy)
    assert in_bytes == 4 * MEBIBYTE + 2 * MEBIBYTE  # A cast to fewer bits is made before the copy.
    assert out_bytes == 4 * MEBIBYTE
    assert seconds >= 0.1  # 4 MiB at 40 MiB/s.


def _pin() -> tuple[bool, bool, str]:
    pinned = torch.ones(10).pin_memory()
    sim.set_pinned_capacity(MEBIBYTE)
    try:
        torch.empty(MEBIBYTE, dtype=torch.float32).pin_memory()
    except RuntimeError as error:
        return pinned.is_pinned(), torch.ones(10).is_pinned(), str(error)
    finally:
        sim.set_pinned_capacity(0)
    return False, False, ""


def test_pinned_memory_can_run_out(sim_world: World) -> None:
    is_pinned, is_plain_pinned, message = _one(sim_world, _pin)
    assert is_pinned and not is_plain_pinned
    assert "No pinned memory is left" in message


# ---------------------------------------------------------------- torch on it


class Net(nn.Module):
    """Layers of many kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3, padding=1)
        self.batch_norm = nn.BatchNorm2d(4)
        self.tokens = nn.Embedding(11, 16)
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)
        self.mix = nn.Linear(16, 16)
        self.norm = nn.LayerNorm(16)
        self.drop = nn.Dropout(0.2)
        self.head = nn.Linear(16 + 64, 5)

    def forward(self, image: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        pixels = F.max_pool2d(F.relu(self.batch_norm(self.conv(image))), 2).flatten(1)
        x = self.tokens(tokens)
        x = x + self.attention(x, x, x, need_weights=False)[0]
        x = checkpoint(lambda y: self.drop(self.norm(y)), self.mix(x), use_reentrant=False)
        return self.head(torch.cat([pixels, x.mean(1)], 1))


def _train_net(device: str) -> list[float]:
    torch.manual_seed(3)
    net = Net().double().to(device)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for _ in range(4):
        image, tokens = torch.randn(3, 1, 8, 8, dtype=torch.float64), torch.randint(0, 11, (3, 6))
        target = torch.randint(0, 5, (3,))
        loss = F.cross_entropy(net(image.to(device), tokens.to(device)), target.to(device))
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_it_computes_what_the_cpu_computes(sim_world: World) -> None:
    # Not the same bits: torch takes other kernels for some layers. In float64 they agree far beyond what rounding explains away.
    assert _one(sim_world, _train_net, "sim") == pytest.approx(_one(sim_world, _train_net, "cpu"), rel=1e-12)


def _ask_for_what_is_missing() -> str:
    try:
        nn.GRU(4, 4).to("sim")(torch.ones(1, 1, 4, device="sim"))
    except NotImplementedError as error:
        return str(error)
    return ""


def test_a_kernel_that_the_cpu_has_not_is_named(sim_world: World) -> None:
    message = _one(sim_world, _ask_for_what_is_missing)
    assert message.startswith(
        "The simulated accelerator runs kernels of the CPU, which has none for aten::_thnn_fused_gru_cell"
    )


def _store(path: str) -> tuple[str, bool, int]:
    before = sim.memory().live_bytes
    tensor = torch.randn(6, device="sim")
    torch.save(tensor, path)
    loaded = torch.load(path)
    storage = torch.zeros(25, device="sim").untyped_storage()
    storage.resize_(0)
    return str(loaded.device), torch.equal(loaded, tensor), sim.memory().live_bytes - before


def test_tensors_are_saved_loaded_and_freed_in_place(sim_world: World, tmp_path: Path) -> None:
    assert _one(sim_world, _store, str(tmp_path / "tensor.pt")) == ("sim:0", True, 48)


# ---------------------------------------------------------------- collectives, DDP, FSDP2 and Shardwise on it


def _collect() -> dict[str, list[float]]:
    rank, size = dist.get_rank(), dist.get_world_size()
    mine = torch.full((2,), float(rank + 1), device="sim")
    total = mine.clone()
    dist.all_reduce(total)
    gathered = torch.empty(2 * size, device="sim")
    dist.all_gather_into_tensor(gathered, mine)
    part = torch.empty(2, device="sim")
    dist.reduce_scatter_tensor(part, torch.arange(2.0 * size, device="sim"))
    swapped = torch.empty(size, device="sim")
    dist.all_to_all_single(swapped, torch.arange(float(size), device="sim") + 10 * rank)
    first = mine.clone()
    dist.broadcast(first, 1)
    found = {"all-reduce": total, "all-gather": gathered, "reduce-scatter": part, "all-to-all": swapped, "broadcast": first}
    assert all(tensor.device == torch.device("sim", rank) for tensor in found.values())
    return {name: tensor.tolist() for name, tensor in found.items()}


def test_collectives_between_devices(sim_world: World) -> None:
    first, second = sim_world.run(_collect, ranks=2)
    assert first["all-reduce"] == second["all-reduce"] == [3.0, 3.0]
    assert first["all-gather"] == second["all-gather"] == [1.0, 1.0, 2.0, 2.0]
    assert (first["reduce-scatter"], second["reduce-scatter"]) == ([0.0, 2.0], [4.0, 6.0])
    assert (first["all-to-all"], second["all-to-all"]) == ([0.0, 10.0], [1.0, 11.0])
    assert first["broadcast"] == second["broadcast"] == [2.0, 2.0]


def _hold() -> list[int]:
    rank = dist.get_rank()
    dist.barrier()
    before, held = sim.memory(rank).live_bytes, []
    for _ in range(30):
        buffer = torch.ones(2 * MEBIBYTE, dtype=torch.uint8, device="sim")
        work = dist.all_gather_single(buffer, buffer[rank * MEBIBYTE : (rank + 1) * MEBIBYTE], async_op=True)
        work.wait()
        del buffer, work
        held.append(sim.memory(rank).live_bytes - before)
    return held


def test_memory_of_a_collective_is_free_when_nobody_has_it_any_more(sim_world: World) -> None:
    for held in sim_world.run(_hold, ranks=2):
        assert not any(held), held


def _count_peaks() -> tuple[int, int, int, int]:
    """Peaks above what there was, by the device and by torch, after torch's were reset and after the device's were."""
    gc.collect()
    sim.reset_peak()
    before = sim.memory().live_bytes
    torch.empty(2 * MEBIBYTE, dtype=torch.uint8, device="sim")
    torch.accelerator.reset_peak_memory_stats(0)
    torch.empty(MEBIBYTE, dtype=torch.uint8, device="sim")
    found = sim.memory().peak_bytes - before, torch.accelerator.max_memory_allocated(0) - before
    sim.reset_peak()
    return *found, sim.memory().peak_bytes - before, torch.accelerator.max_memory_allocated(0) - before


def test_the_peak_of_a_device_is_not_that_of_torchs_statistics(sim_world: World) -> None:
    assert _one(sim_world, _count_peaks) == (2 * MEBIBYTE, MEBIBYTE, 0, 0)


def _train(system: str) -> list[torch.Tensor]:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(24, 50), nn.GELU(), nn.Linear(50, 24)) for _ in range(3)]
    model: Any = nn.Sequential(nn.Embedding(31, 24), *blocks, nn.Linear(24, 31)).to("sim")
    plain = model
    if system == "ddp":
        model = nn.parallel.DistributedDataParallel(model)
    if system == "fsdp2":
        mesh = init_device_mesh("sim", (dist.get_world_size(),))
        for block in model[1:4]:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    if system.startswith("stage"):
        shardwise.shard(model, optimizer, stage=int(system[-1]))
    for step in range(4):
        torch.manual_seed(100 * step + dist.get_rank())
        tokens = torch.randint(0, 31, (4, 7)).to("sim")
        F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
    if system.startswith("stage"):
        shardwise.unshard(model, optimizer)
    params = [param.full_tensor() if system == "fsdp2" else param for param in plain.parameters()]
    return [param.detach().cpu() for param in params]


@pytest.fixture(scope="module")
def by_ddp(sim_world: World) -> list[torch.Tensor]:
    return sim_world.run(_train, "ddp", ranks=2)[0]  # type: ignore[no-any-return]


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_every_stage_has_the_bits_of_ddp(sim_world: World, by_ddp: list[torch.Tensor], stage: int) -> None:
    for result in sim_world.run(_train, f"stage{stage}", ranks=2):
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(result, by_ddp, strict=True))


def test_stages_agree_to_the_bit_on_three_devices(sim_world: World) -> None:
    results = [sim_world.run(_train, f"stage{stage}", ranks=3)[0] for stage in range(4)]
    for result in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(result, results[0], strict=True))


def test_fsdp2_runs_on_it(sim_world: World, by_ddp: list[torch.Tensor]) -> None:
    for ours, theirs in zip(sim_world.run(_train, "fsdp2", ranks=2)[0], by_ddp, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


# ---------------------------------------------------------------- how it is built


def test_without_a_compiler_it_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ShardwiseError, match=r"no C\+\+ compiler .*Install one"):
        build.library(print, tmp_path / "cache")
    assert not (tmp_path / "cache").exists()


def test_a_failing_compiler_is_quoted_and_nothing_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = tmp_path / "c++"
    compiler.write_text("#!/bin/sh\necho 'sim.h: it is too warm today' >&2\nexit 1\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    said: list[str] = []
    with pytest.raises(ShardwiseError, match="too warm today"):
        build.library(said.append, tmp_path / "cache")
    assert "about a minute" in said[0]
    assert not list((tmp_path / "cache").rglob("*.so"))


def test_wrong_numbers_are_refused_before_anything_is_compiled() -> None:
    for arguments in ({"num_devices": 0}, {"num_devices": 65}, {"capacity_bytes": -1}, {"bytes_per_second": -1.0}):
        with pytest.raises(UsageError):
            sim.enable(**arguments)
    assert not sim.is_enabled()
    assert sim.num_devices() == 0


def test_importing_shardwise_brings_no_device() -> None:
    code = "import torch, shardwise; print(torch.accelerator.is_available(), hasattr(torch, 'sim'))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]
