"""What runs have written down, read back, worked out and shown."""
