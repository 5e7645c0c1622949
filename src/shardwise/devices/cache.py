"""Where things are kept that can be made again: the compiled simulator, the measured machine."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from shardwise.core.errors import ShardwiseError


def cache_folder() -> Path:
    """The user's own, or a private one among temporary files where there is no home that can be written."""
    cache = Path.home() / ".cache" / "shardwise"
    try:
        cache.mkdir(parents=True, exist_ok=True)
        if os.access(cache, os.W_OK):
            return cache
    except OSError:
        pass
    cache = Path(tempfile.gettempdir()) / f"shardwise-{os.getuid()}"
    cache.mkdir(mode=0o700, exist_ok=True)
    if cache.stat().st_uid != os.getuid():
        raise ShardwiseError(
            f"{cache} belongs to somebody else, who could put a library there. Remove it, or make the home writable."
        )
    return cache
