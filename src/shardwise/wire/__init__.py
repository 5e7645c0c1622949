"""Collectives: torch.distributed between processes, and a world of threads for tests."""
