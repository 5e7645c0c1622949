"""What ``shardwise doctor`` writes for people: a line for each part while it measures, a table, and the findings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TextIO

from rich.console import Console
from rich.table import Table
from rich.text import Text

from shardwise.core.sizes import format_bytes
from shardwise.planning.machine_file import MachineProfile
from shardwise.planning.measure import Sample
from shardwise.planning.measure_ranks import Tell

_STYLES = {"broken": "bold red", "warning": "yellow", "hint": "cyan"}
_UNITS = {"matmul": ("GFLOP/s", 1e9)}
_RATE = ("GB/s", 1e9)


def tell_on(stream: TextIO, num_busy: int) -> Tell:
    """Writes a line for each part that is measured, as it is with ``num_busy`` ranks at once."""
    console = Console(file=stream, highlight=False, soft_wrap=True)

    def tell(part: str, samples: list[Sample]) -> None:
        busy = [sample for sample in samples if sample.num_busy == num_busy] or samples
        groups: dict[tuple[str, str], list[Sample]] = {}
        for sample in busy:
            groups.setdefault((sample.part, sample.variant), []).append(sample)
        is_named = len({name for name, _ in groups}) > 1
        told = [_brief(group, name if is_named else variant) for (name, variant), group in groups.items()]
        console.print(Text(f"{part}: {', '.join(told)}"))

    return tell


def _brief(samples: Sequence[Sample], label: str) -> str:
    """The largest of them stands for all."""
    sample = max(samples, key=lambda each: each.size)
    return f"{label.replace('_', ' ')} {format_rate(sample)} ± {sample.spread:.0%}"


def format_rate(sample: Sample) -> str:
    """A rate as people compare it; for kernels, what one takes.

    >>> format_rate(Sample("matmul", "float32", 1, 2e9, 0.02, 0.0)), format_rate(Sample("kernel", "plain", 1, 32, 64e-6, 0.0))
    ('100.0 GFLOP/s', '2.0 us')
    """
    if sample.part == "kernel":
        return f"{sample.seconds / sample.size * 1e6:.1f} us"
    unit, factor = _UNITS.get(sample.part, _RATE)
    return f"{sample.rate / factor:.{1 if sample.rate / factor >= 10 else 2}f} {unit}"


def print_machine(profile: MachineProfile) -> None:
    """Every size that was measured: one rank alone, and all of them at once."""
    identity = profile.identity
    table = Table(box=None, pad_edge=False, title_justify="left")
    table.title = (
        f"{identity.cpu_model}, {identity.num_cores} cores, {identity.device}, torch {identity.torch}: "
        f"{profile.num_ranks} rank(s), {profile.num_threads} thread(s) each"
    )
    for name in ("what", "how", "size", "one rank", "all at once", "spread"):
        table.add_column(name, justify="left" if name in ("what", "how") else "right", no_wrap=True)
    for (part, variant, size), found in _by_size(profile.samples).items():
        alone, busy = found.get(1), found[max(found)]
        table.add_row(
            part.replace("_", " "),
            variant,
            _format_size(part, size),
            "" if alone is None else format_rate(alone),
            "" if busy is alone else format_rate(busy),
            f"± {busy.spread:.0%}",
        )
    Console(highlight=False, soft_wrap=True).print(table)


def _by_size(samples: Sequence[Sample]) -> dict[tuple[str, str, float], dict[int, Sample]]:
    rows: dict[tuple[str, str, float], dict[int, Sample]] = {}
    for sample in samples:
        rows.setdefault((sample.part, sample.variant, sample.size), {})[sample.num_busy] = sample
    return rows


def _format_size(part: str, size: float) -> str:
    if part == "matmul":
        return f"{round((size / 2) ** (1 / 3))}^3"
    return f"{size:.0f}" if part == "kernel" else format_bytes(int(size))


def print_findings(findings: Sequence[Mapping[str, Any]]) -> None:
    """What was found and what to do, the worst first."""
    console = Console(highlight=False, soft_wrap=True)
    if not findings:
        console.print("Nothing is wrong with the set-up.")
    for finding in findings:
        line = Text(f"{finding['severity']}: ", style=_STYLES[finding["severity"]])
        console.print(line + Text(finding["found"], style="default"))
        console.print(Text(f"  remedy: {finding['remedy']}"))
