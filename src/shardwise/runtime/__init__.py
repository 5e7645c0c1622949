"""The one engine for all stages: parameters and their stand-ins, hooks, executor, reduction, digest, optimizer."""
