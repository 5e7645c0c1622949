"""What is wrong with a set-up, and what to do about it: pure functions of facts. Measures nothing and asks nobody."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from enum import Enum
from typing import Any

from shardwise.core.sizes import format_bytes
from shardwise.planning.facts import COMPILERS, Facts

_MIB, _GIB = 2**20, 2**30
LEAST_RANK_BYTES = 256 * _MIB
"""What should be free for a rank that has started and has no model yet."""
LEAST_SHARED_BYTES = _GIB
"""Containers often get 64 MiB, which one worker of a data loader fills with a batch."""
LEAST_SHARED_RATE = 0.3e9
"""Bytes per second into fresh shared memory. Memory gives several times that, pages that are swapped or encrypted do not."""
LEAST_FILES, NEEDED_FILES = 1024, 128
"""Files and sockets of a process: what is comfortable, and without which ranks do not even meet."""
LEAST_TEMP_BYTES = 64 * _MIB
SWAP_BYTES = 64 * _MIB
"""Less than this is what the system puts away of programs that sleep."""


class Severity(Enum):
    """How bad it is."""

    BROKEN = "broken"
    """Training cannot run, or is wrong."""
    WARNING = "warning"
    """Training runs, slower or with less room than it could."""
    HINT = "hint"
    """Nothing is lost before a certain feature is used."""


@dataclass(frozen=True)
class Finding:
    """What was found, and what to do about it. ``name`` is for programs."""

    name: str
    severity: Severity
    found: str
    remedy: str

    def to_dict(self) -> dict[str, Any]:
        """As JSON takes it."""
        return {**asdict(self), "severity": self.severity.value}


@dataclass(frozen=True)
class Host:
    """The ranks of one machine. ``reads_peers`` is None where they have not tried to read each other's memory."""

    ranks: tuple[Facts, ...]
    reads_peers: bool | None = None

    @property
    def facts(self) -> Facts:
        """Of its first rank: of one machine, all say the same."""
        return self.ranks[0]


Check = Callable[[Host], Iterator[Finding]]


def check_all(ranks: Sequence[Facts], links: Sequence[str] = ()) -> list[Finding]:
    """All findings, the worst first.

    Args:
        ranks: What each rank found.
        links: What their collectives went over, if they have tried: for each lane, as ``Comm.link`` says it.
    """
    hosts: dict[str, list[Facts]] = {}
    for facts in ranks:
        hosts.setdefault(facts.host, []).append(facts)
    is_one = len(hosts) == 1
    reads_peers = "host memory" in links if links and is_one and len(ranks) > 1 else None
    findings = list(check_versions(ranks))
    for name, members in hosts.items():
        for check in CHECKS:
            findings += [
                each if is_one else Finding(each.name, each.severity, f"Host {name}: {each.found}", each.remedy)
                for each in check(Host(tuple(members), reads_peers))
            ]
    order = list(Severity)
    return sorted(findings, key=lambda finding: order.index(finding.severity))


def check_versions(ranks: Sequence[Facts]) -> Iterator[Finding]:
    """Ranks must compute the same: with one torch and one shardwise."""
    rows = (
        ("torch", Severity.BROKEN, [facts.torch for facts in ranks]),
        ("shardwise", Severity.BROKEN, [facts.shardwise for facts in ranks]),
        ("Python", Severity.WARNING, [facts.python for facts in ranks]),
        ("processor", Severity.HINT, [facts.cpu_model for facts in ranks]),
        ("kind of device", Severity.WARNING, [facts.device.partition(":")[0] for facts in ranks]),
    )
    for name, severity, values in rows:
        if len(set(values)) > 1:
            told = "; ".join(f"{value} on {_name_ranks(ranks, values, value)}" for value in dict.fromkeys(values))
            remedy = f"Install the same {name} on all hosts, in the environment that ranks are started from."
            if severity is Severity.HINT or name == "kind of device":
                remedy = "Give slower ranks smaller shares (Plan(weights=...)): all wait for the slowest."
            key = f"mismatched-{name.split()[0].lower()}"
            yield Finding(key, severity, f"Ranks do not have the same {name}: {told}.", remedy)


def _name_ranks(ranks: Sequence[Facts], values: Sequence[str], value: str) -> str:
    found = [facts for facts, each in zip(ranks, values, strict=True) if each == value]
    numbers = ", ".join(str(facts.rank) for facts in found[:8]) + (", ..." if len(found) > 8 else "")
    hosts = ", ".join(dict.fromkeys(facts.host for facts in found[:8]))
    return f"rank{'s' if len(found) > 1 else ''} {numbers} ({hosts})"


def check_threads(host: Host) -> Iterator[Finding]:
    """Ranks that share cores, or leave them idle."""
    facts, num_ranks = host.facts, len(host.ranks)
    num_threads = sum(rank.num_threads for rank in host.ranks)
    fair = max(1, facts.num_cores // num_ranks)
    if num_ranks > facts.num_cores:
        yield Finding(
            "more-ranks-than-cores",
            Severity.WARNING,
            f"{num_ranks} ranks share {facts.num_cores} cores: they take turns, and each collective waits for the last of them.",
            f"Use at most {facts.num_cores} ranks here, unless it is for a trial.",
        )
    elif num_threads > facts.num_cores:
        yield Finding(
            "threads-oversubscribed",
            Severity.WARNING,
            f"{num_ranks} ranks start {num_threads} threads for computing, but there are {facts.num_cores} cores.",
            f"Set OMP_NUM_THREADS={fair}.",
        )
    elif facts.omp_setting is None and fair > 1 and facts.device == "cpu":
        yield Finding(
            "threads-unset",
            Severity.WARNING,
            f"OMP_NUM_THREADS is not set, so each rank is started with {facts.num_threads} thread{_s(facts.num_threads)}: "
            f"{num_threads} of {facts.num_cores} cores compute.",
            f"Set OMP_NUM_THREADS={fair}.",
        )
    elif facts.omp_setting is None and facts.device == "cpu":
        yield Finding(
            "threads-unset",
            Severity.HINT,
            "OMP_NUM_THREADS is not set: `shardwise run` and torchrun give each rank one thread, but other launchers all cores.",
            f"Set OMP_NUM_THREADS={fair} where ranks are started in another way.",
        )


def check_cpu(host: Host) -> Iterator[Finding]:
    """Less processor than there seems to be."""
    facts = host.facts
    if facts.cpu_quota is not None and facts.cpu_quota < facts.num_cores:
        yield Finding(
            "cpu-quota",
            Severity.WARNING,
            f"The control group may use {facts.cpu_quota:g} cores' worth of time of {facts.num_cores} cores: "
            "threads are stopped in the middle of a step when it is used up.",
            f"Use at most {max(1, int(facts.cpu_quota))} threads in all, or raise the limit (for docker: --cpus).",
        )
    if facts.governor == "powersave":
        yield Finding(
            "cpu-governor",
            Severity.HINT,
            "The processor's governor is 'powersave', which may keep its frequency low: measured times will vary.",
            "cpupower frequency-set -g performance",
        )


def check_memory(host: Host) -> Iterator[Finding]:
    """Less memory than there seems to be, or memory that is on a disk."""
    facts, least = host.facts, len(host.ranks) * LEAST_RANK_BYTES
    if facts.free_memory_bytes and facts.free_memory_bytes < least:
        yield Finding(
            "little-memory",
            Severity.WARNING,
            f"{format_bytes(facts.free_memory_bytes)} of memory are free beside {len(host.ranks)} ranks without a model: "
            "with one, the system will kill some of them, or put memory on the disk.",
            "End other programs, or use fewer ranks.",
        )
    if facts.swap_used_bytes > SWAP_BYTES:
        yield Finding(
            "swap-in-use",
            Severity.WARNING,
            f"{format_bytes(facts.swap_used_bytes)} of memory are swapped out: a step that touches them waits for the disk.",
            "End what takes the memory, then `swapoff -a && swapon -a`; or offload to disk by plan, which reads ahead.",
        )
    if facts.group_limit_bytes is not None and facts.group_limit_bytes < facts.memory_bytes:
        yield Finding(
            "memory-limit",
            Severity.HINT,
            f"The control group may use {format_bytes(facts.group_limit_bytes)} of the machine's {format_bytes(facts.memory_bytes)}: "
            "processes that want more are killed without a word.",
            "Plan with that limit (memory_limit), or raise it (for docker: --memory).",
        )
    if facts.commit_room_bytes is not None and facts.commit_room_bytes < facts.free_memory_bytes:
        yield Finding(
            "strict-overcommit",
            Severity.WARNING,
            f"The system promises no more memory than it has (vm.overcommit_memory is 2): {format_bytes(facts.commit_room_bytes)} can "
            f"be allocated, although {format_bytes(facts.free_memory_bytes)} are free.",
            "sysctl vm.overcommit_memory=0",
        )


def check_shared_memory(host: Host) -> Iterator[Finding]:
    """/dev/shm, which data loaders pass batches through, and the folder for temporary files."""
    facts = host.facts
    if not facts.shared_bytes:
        text, remedy = "There is no /dev/shm: workers of data loaders cannot pass batches.", "mount -t tmpfs tmpfs /dev/shm"
        yield Finding("no-shared-memory", Severity.WARNING, text, remedy)
    elif facts.shared_free_bytes < LEAST_SHARED_BYTES:
        yield Finding(
            "small-shared-memory",
            Severity.WARNING,
            f"/dev/shm has {format_bytes(facts.shared_free_bytes)} free of {format_bytes(facts.shared_bytes)}: workers of data "
            "loaders die with a bus error when it is full.",
            "mount -o remount,size=8g /dev/shm (for docker: --shm-size=8g), or remove what lies there.",
        )
    elif facts.shared_write_rate < LEAST_SHARED_RATE:
        yield Finding(
            "slow-shared-memory",
            Severity.WARNING,
            f"/dev/shm takes {facts.shared_write_rate / 1e9:.2f} GB/s, where memory takes several.",
            "See that it is a tmpfs (`findmnt /dev/shm`), that nothing is swapped, and that the machine is idle.",
        )
    if facts.temp_free_bytes < LEAST_TEMP_BYTES:
        yield Finding(
            "no-temporary-room",
            Severity.BROKEN,
            f"The temporary folder, {facts.temp_folder}, has {format_bytes(facts.temp_free_bytes)} free; launchers write there.",
            "Remove what lies there, or set TMPDIR to a folder with room.",
        )


def check_links(host: Host) -> Iterator[Finding]:
    """Whether ranks of one host read each other's memory."""
    facts = host.facts
    is_denied = not facts.can_read_peers or host.reads_peers is False
    if not is_denied or facts.device != "cpu":
        return
    why = "the system, or the container's seccomp profile, does not allow it"
    remedy = (
        "For docker: --cap-add=SYS_PTRACE, or --security-opt seccomp=unconfined, and one container for all ranks of a host."
    )
    if facts.ptrace_scope is not None and facts.ptrace_scope > 1:
        why = f"kernel.yama.ptrace_scope is {facts.ptrace_scope}"
        remedy = "sysctl kernel.yama.ptrace_scope=1"
    yield Finding(
        "no-cross-memory",
        Severity.WARNING,
        f"Ranks of this host cannot read each other's memory ({why}): collectives go through sockets, at less than half the speed.",
        remedy,
    )


def check_disk(host: Host) -> Iterator[Finding]:
    """Where offloaded state would go."""
    facts = host.facts
    if facts.folder_error:
        text, remedy = (
            f"No offload file can be made in {facts.folder}: {facts.folder_error}",
            "Give another folder with --folder.",
        )
        yield Finding("folder-unusable", Severity.WARNING, text, remedy)
        return
    if not facts.is_direct:
        yield Finding(
            "no-direct-io",
            Severity.HINT,
            f"Files in {facts.folder} cannot be read past the page cache: offloaded state would take memory as well.",
            "Give --folder (disk_folder of a plan) on a local disk, such as ext4 or xfs; tmpfs and network folders have none.",
        )
    if facts.memory_bytes and facts.folder_free_bytes < facts.memory_bytes:
        yield Finding(
            "little-free-disk",
            Severity.HINT,
            f"{format_bytes(facts.folder_free_bytes)} are free in {facts.folder}, less than the machine has memory "
            f"({format_bytes(facts.memory_bytes)}): little of what does not fit there would fit on disk.",
            "Give --folder on a larger disk, or make room.",
        )


def check_limits(host: Host) -> Iterator[Finding]:
    """What the system allows a process."""
    facts = host.facts
    if facts.num_files is not None and facts.num_files < LEAST_FILES:
        is_broken = facts.num_files < NEEDED_FILES
        yield Finding(
            "few-files",
            Severity.BROKEN if is_broken else Severity.WARNING,
            f"A process may have {facts.num_files} files and sockets open; ranks need some for each peer and each worker of a loader.",
            f"ulimit -n {max(4096, LEAST_FILES)}",
        )


def check_simulator(host: Host) -> Iterator[Finding]:
    """What rehearsals on simulated accelerators need."""
    facts = host.facts
    if not facts.compiler or not facts.has_python_headers:
        what = f"no C++ compiler ({', '.join(COMPILERS)})" if not facts.compiler else "no header Python.h"
        package = "g++" if not facts.compiler else "python3-dev"
        text = f"There is {what}: the simulated accelerator (--simulate) cannot be compiled."
        yield Finding("no-compiler", Severity.HINT, text, f"Install one, such as the package {package}.")


def check_malloc(host: Host) -> Iterator[Finding]:
    """Settings that help to find bugs and cost time, or trade time for memory."""
    settings = host.facts.malloc_settings
    debugging = {
        name: value for name, value in settings.items() if name in ("MALLOC_CHECK_", "MALLOC_PERTURB_") and value != "0"
    }
    if debugging:
        told = " and ".join(f"{name}={value}" for name, value in debugging.items())
        text = f"{told} is set: every allocation is filled or checked, which makes steps slower."
        yield Finding("debug-malloc", Severity.WARNING, text, f"unset {' '.join(debugging)}")
    threshold = settings.get("MALLOC_MMAP_THRESHOLD_")
    if threshold is not None:
        yield Finding(
            "malloc-threshold",
            Severity.HINT,
            f"MALLOC_MMAP_THRESHOLD_={threshold} is set: blocks above it are fresh pages each time, which costs time and saves memory.",
            "Leave it if memory is scarce; else unset it. Profiles of both differ: run doctor again after a change.",
        )


CHECKS: tuple[Check, ...] = (
    check_threads,
    check_cpu,
    check_memory,
    check_shared_memory,
    check_links,
    check_disk,
    check_limits,
    check_simulator,
    check_malloc,
)
"""What is asked of each host. A new check is one function and one line."""


def _s(count: int) -> str:
    return "" if count == 1 else "s"
