"""What the machine says of this process follows what the process does."""

import torch

from shardwise.devices.memory import allocated_bytes, peak_resident_bytes, resident_bytes

CPU = torch.device("cpu")


def test_resident_peak_follows_what_is_touched() -> None:
    before = peak_resident_bytes()
    block = bytearray(b"x" * (before + 2**26))
    assert peak_resident_bytes() >= before + 2**25
    del block
    assert peak_resident_bytes() >= before + 2**25


def test_allocated_and_resident_bytes_follow_a_tensor() -> None:
    before = allocated_bytes(CPU)
    block = torch.ones(2**24)
    assert allocated_bytes(CPU) - before >= block.nbytes
    assert resident_bytes() >= block.nbytes
    del block
    assert allocated_bytes(CPU) - before < 2**20
