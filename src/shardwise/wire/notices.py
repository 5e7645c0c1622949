"""Short texts that ranks leave for each other, from any thread and in no order: not a collective, so that nobody waits for it."""

from __future__ import annotations

from typing import Any, Protocol


class Notices(Protocol):
    """A board that all ranks of one engine see."""

    def post(self, key: str, text: bytes) -> None:
        """Leave a text."""
        ...

    def read(self, key: str) -> bytes | None:
        """A text, if it is there."""
        ...

    def drop(self, key: str) -> None:
        """Take a text away."""
        ...


class LocalNotices:
    """The board of a rank that is alone."""

    def __init__(self) -> None:
        self._texts: dict[str, bytes] = {}

    def post(self, key: str, text: bytes) -> None:
        """Leave a text."""
        self._texts[key] = text

    def read(self, key: str) -> bytes | None:
        """A text, if it is there."""
        return self._texts.get(key)

    def drop(self, key: str) -> None:
        """Take a text away."""
        self._texts.pop(key, None)


class StoreNotices:
    """A board in the store of a process group. Nothing here waits for a key: that would keep the store from other threads."""

    def __init__(self, store: Any, group: str) -> None:
        self._store = store
        self._prefix = f"shardwise/notices/{group}"

    def post(self, key: str, text: bytes) -> None:
        """Leave a text."""
        self._store.set(f"{self._prefix}/{key}", text)

    def read(self, key: str) -> bytes | None:
        """A text, if it is there."""
        name = f"{self._prefix}/{key}"
        return bytes(self._store.get(name)) if self._store.check([name]) else None

    def drop(self, key: str) -> None:
        """Take a text away."""
        self._store.delete_key(f"{self._prefix}/{key}")
