"""Where bytes rest outside of memory, and the memory that they pass through. Knows nothing of units, optimizers or collectives."""
