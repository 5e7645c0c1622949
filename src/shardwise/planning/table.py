"""Reads tables of hardware: comma-separated lines with comments, whose mistakes are named with file and line. Knows no accelerator."""

from __future__ import annotations

import csv
import difflib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from shardwise.core.errors import UsageError

_COMMENT = "#"


@dataclass(frozen=True)
class Row:
    """The cells of a line that are not empty, by column, and where the line is."""

    place: str
    cells: dict[str, str]

    def error(self, text: str) -> UsageError:
        """A mistake in this line."""
        return UsageError(f"{self.place}: {text}")

    def number(self, column: str, factor: int = 1) -> float | None:
        """A number above 0 in units of ``factor``, or None where the cell is empty."""
        text = self.cells.get(column)
        if text is None:
            return None
        try:
            number = float(text) * factor if text.isascii() and "_" not in text else math.nan
        except ValueError:
            number = math.nan
        if not math.isfinite(number) or number <= 0:
            raise self.error(f"{column} must be a number above 0, without a unit, but is {text!r}.")
        return number

    def whole_number(self, column: str, factor: int = 1) -> int | None:
        """The same, in whole units."""
        number = self.number(column, factor)
        if number is None:
            return None
        if number < 1 or (factor == 1 and number != int(number)):
            raise self.error(f"{column} must be a whole number, 1 or more, but is {self.cells[column]!r}.")
        return round(number)


def read_rows(path: Path, columns: Sequence[str]) -> list[Row]:
    """Read a table.

    Args:
        path: A file in UTF-8.
        columns: Those that may be in it.

    Raises:
        UsageError: The file cannot be read, or a line of it is wrong.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(
            f"The table of hardware {path} cannot be read: {error}. Give a text file of comma-separated lines."
        ) from error
    return list(_rows(str(path), text, columns))


def _rows(path: str, text: str, columns: Sequence[str]) -> Iterator[Row]:
    header: list[str] | None = None
    for line_number, line in enumerate(text.split("\n"), start=1):
        if not line.strip() or line.lstrip().startswith(_COMMENT):
            continue
        place = f"{path}, line {line_number}"
        try:
            cells = [cell.strip() for cell in next(csv.reader([line], strict=True))]
        except csv.Error as error:
            raise UsageError(f"{place}: the line cannot be split at its commas: {error}.") from error
        if header is None:
            header = _checked_header(place, cells, columns)
            continue
        if len(cells) != len(header):
            raise UsageError(f"{place}: expected {len(header)} cells, as there are columns, but found {len(cells)}.")
        yield Row(place, {column: cell for column, cell in zip(header, cells, strict=True) if cell})
    if header is None:
        raise UsageError(
            f"{path}: expected a line of column names, such as name,memory_gb, but found no line that is no comment."
        )


def _checked_header(place: str, header: list[str], columns: Sequence[str]) -> list[str]:
    for column in header:
        if column not in columns:
            close = difflib.get_close_matches(column, columns, n=1)
            hint = f"Did you mean {close[0]!r}?" if close else f"There are {', '.join(columns)}."
            raise UsageError(f"{place}: there is no column {column!r}. {hint}")
        if header.count(column) > 1:
            raise UsageError(f"{place}: the column {column!r} is there twice. Keep one.")
    if "name" not in header:
        raise UsageError(f"{place}: the first line names the columns, and 'name' must be one of them.")
    return header
