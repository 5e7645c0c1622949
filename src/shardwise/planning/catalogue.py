"""The catalogue of hardware: what accelerators have by data sheets and published measurements, and users' own entries.

Knows no model and measures nothing. The figures are in ``hardware.csv``, whose comments say what each column means.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path

from shardwise.core.errors import UsageError
from shardwise.planning.table import Row, read_rows

_GIGA, _TERA = 10**9, 10**12
_BITS = 8
_PEAKS = {"bfloat16": "bf16_dense_tflops", "float16": "fp16_dense_tflops", "float8": "fp8_dense_tflops"}
COLUMNS = (
    *(
        "name",
        "aliases",
        "vendor",
        "memory_gb",
        "memory_type",
        "mem_bw_gbs",
        *_PEAKS.values(),
        "measured_max_bf16_matmul_tflops",
    ),
    *("scaleup_link", "scaleup_alltoall_uni_gbs", "scaleup_p2p_uni_gbs", "host_bus", "host_bus_uni_gbs_spec"),
    *("host_bus_uni_gbs_measured", "typical_scaleout_gbps_per_gpu", "typical_gpus_per_node", "price_usd_per_hour"),
    *("provenance", "notes"),
)
"""Columns of ``hardware.csv`` and of users' files."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._()-]*", re.ASCII)  # Free of what separates the parts of a fleet.
_MAX_NAMED = 5


@dataclass(frozen=True)
class Link:
    """A connection: what it is, and bytes a second in one direction, where known."""

    kind: str | None = None
    bytes_per_second: float | None = None
    pair_bytes_per_second: float | None = None
    """To one other alone."""
    measured_bytes_per_second: float | None = None


@dataclass(frozen=True)
class Accelerator:
    """One entry. What is None is not known."""

    name: str
    memory_bytes: int
    memory_bytes_per_second: float | None
    peak_flops: Mapping[str, float] = field(hash=False)
    """Operations a second at most, by dtype, without sparsity."""
    measured_flops: float | None
    """The most that was measured in a matrix product in bfloat16."""
    inside_node: Link
    """``kind`` is None or ``none`` where accelerators of a node have no link but the host's."""
    between_nodes: Link
    """For each accelerator, in a usual node."""
    to_host: Link
    num_per_node: int | None
    price_usd_per_hour: float | None
    place: str
    """The file and line that it was read from; of what overrides it, if that is so."""
    cells: Mapping[str, str] = field(hash=False, repr=False)
    """All that the table says, as text, with sources and notes."""

    def peak(self, dtype: str) -> float:
        """Operations a second at most in a dtype.

        Raises:
            UsageError: None is listed.
        """
        if dtype not in self.peak_flops:
            known = ", ".join(self.peak_flops) or "no dtype"
            notes = f" Its notes: {self.cells['notes']}." if "notes" in self.cells else ""
            raise UsageError(f"{self.name} has no peak for {dtype} in the catalogue; it has one for {known}.{notes}")
        return self.peak_flops[dtype]


class Catalogue:
    """Accelerators by name and alias, in any case.

    >>> load_catalogue().find("a100-80gb").name
    'A100-SXM-80GB'
    """

    def __init__(self, rows: Iterable[Row]) -> None:
        """Make entries of rows; a later row overrides the cells of an earlier one that it names."""
        self._by_key: dict[str, Accelerator] = {}
        self._keys: dict[str, str] = {}
        for row in rows:
            self._add(row)

    def __len__(self) -> int:
        return len(self._by_key)

    @property
    def entries(self) -> tuple[Accelerator, ...]:
        """All accelerators, in the order of the tables."""
        return tuple(self._by_key.values())

    def find(self, name: str) -> Accelerator:
        """Look an accelerator up.

        Raises:
            UsageError: There is none of that name; the nearest names are told.
        """
        key = self._keys.get(name.strip().lower())
        if key is None:
            raise UsageError(f"The catalogue has no accelerator {name.strip()!r}. {self._hint(name.strip().lower())}")
        return self._by_key[key]

    def _add(self, row: Row) -> None:
        name = row.cells.get("name", "")
        if not _NAME.fullmatch(name):
            raise row.error(f"name must be letters, digits, '.', '_', '-' and brackets, but is {name!r}.")
        key = self._keys.get(name.lower(), name.lower())
        known = self._by_key.get(key)
        cells = {**known.cells, **row.cells, "name": known.name} if known else dict(row.cells)
        self._by_key[key] = _accelerator(Row(row.place, cells))
        for alias in (key, *row.cells.get("aliases", "").lower().split()):
            if not _NAME.fullmatch(alias):
                raise row.error(f"aliases are letters, digits, '.', '_', '-' and brackets, but one is {alias!r}.")
            taken = self._keys.setdefault(alias, key)
            if taken != key:
                raise row.error(f"{alias!r} is a name of {self._by_key[taken].name} already ({self._by_key[taken].place}).")

    def _hint(self, name: str) -> str:
        """Entries whose names hold what was asked for, or look like it."""
        close = [key for key in self._keys if name and name in key] + difflib.get_close_matches(
            name, self._keys, n=_MAX_NAMED, cutoff=0.5
        )
        names = list(dict.fromkeys(self._by_key[self._keys[key]].name for key in close))[:_MAX_NAMED]
        if names:
            return f"Did you mean {' or '.join(names)}?"
        return f"It has {', '.join(entry.name for entry in self.entries)}; others can be added in a file."


def load_catalogue(own: str | Path | None = None) -> Catalogue:
    """The catalogue of the package, with a user's own entries added.

    Args:
        own: A file of entries, like ``hardware.csv``: they add to the catalogue's, or override the figures they give.

    Raises:
        UsageError: The file cannot be read, or a line of it is wrong; file and line are named.
    """
    with resources.as_file(resources.files("shardwise.planning").joinpath("hardware.csv")) as path:
        rows = _distinct(read_rows(path, COLUMNS))
    if own is not None:
        rows += _distinct(read_rows(Path(own), COLUMNS))
    return Catalogue(rows)


def _distinct(rows: list[Row]) -> list[Row]:
    """Refuse a name that one file has twice."""
    places: dict[str, str] = {}
    for row in rows:
        name = row.cells.get("name", "")
        first = places.setdefault(name.lower(), row.place)
        if first != row.place:
            raise row.error(f"{name!r} is there twice; it was at {first}. Keep one.")
    return rows


def _accelerator(row: Row) -> Accelerator:
    def giga(column: str) -> float | None:
        return row.number(column, _GIGA)

    memory_bytes = row.whole_number("memory_gb", _GIGA)
    if memory_bytes is None:
        raise row.error(f"{row.cells['name']} is new to the catalogue and needs memory_gb.")
    peaks = {dtype: row.number(column, _TERA) for dtype, column in _PEAKS.items()}
    between_nodes = giga("typical_scaleout_gbps_per_gpu")
    return Accelerator(
        name=row.cells["name"],
        memory_bytes=memory_bytes,
        memory_bytes_per_second=giga("mem_bw_gbs"),
        peak_flops={dtype: peak for dtype, peak in peaks.items() if peak is not None},
        measured_flops=row.number("measured_max_bf16_matmul_tflops", _TERA),
        inside_node=Link(row.cells.get("scaleup_link"), giga("scaleup_alltoall_uni_gbs"), giga("scaleup_p2p_uni_gbs")),
        between_nodes=Link(bytes_per_second=None if between_nodes is None else between_nodes / _BITS),
        to_host=Link(
            row.cells.get("host_bus"),
            giga("host_bus_uni_gbs_spec"),
            measured_bytes_per_second=giga("host_bus_uni_gbs_measured"),
        ),
        num_per_node=row.whole_number("typical_gpus_per_node"),
        price_usd_per_hour=row.number("price_usd_per_hour"),
        place=row.place,
        cells=row.cells,
    )
