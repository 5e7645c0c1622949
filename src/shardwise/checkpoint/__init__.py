"""Checkpoints: files that any number of ranks can write and any other can read. No pickle is written or read."""
