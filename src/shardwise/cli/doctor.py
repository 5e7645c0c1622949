"""``shardwise doctor``: measures this machine for the planner, and says what is wrong with the set-up and what to do about it."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import shardwise
from shardwise.cli.exits import ExitCode, exit_code_of
from shardwise.cli.jobs import Job, call_on_ranks
from shardwise.cli.parsing import Commands, Parser, add_command, add_ranks
from shardwise.cli.simulated import parse_devices, prepare
from shardwise.core.errors import ShardwiseError, UsageError

if TYPE_CHECKING:
    import torch

_EXAMPLE = """\
shardwise doctor                            (about half a minute)
shardwise doctor --ranks 4 --folder /mnt/nvme/offload
shardwise doctor --quick --json             (a few seconds; rough figures)
torchrun --nnodes 2 --nproc-per-node 2 ... -m shardwise doctor

exit codes:
  0 training can run, perhaps with warnings; 1 it cannot; 2 wrong use"""

_RANKS = 2
_FOLDER = "shardwise-offload"


def add_to(commands: Commands[Parser]) -> None:
    """Add the command to the parser of all commands."""
    summary = "measure this machine for the planner, and say what is wrong with the set-up"
    parser = add_command(commands, "doctor", execute, summary=summary, example=_EXAMPLE)
    add_ranks(parser, None, "2, one for each simulated device, or those that torchrun has started")
    folder = f"where offloaded state would go (default: ./{_FOLDER}, removed afterwards)"
    parser.add_argument("--folder", metavar="DIR", default=_FOLDER, help=folder)
    parser.add_argument("--simulate", metavar="NxSIZE", help="measure simulated accelerators, such as 2x8GiB, a rank for each")
    parser.add_argument("--quick", action="store_true", help="a few seconds: smaller sizes, rougher figures")
    parser.add_argument("--json", action="store_true", help="print everything as JSON; progress goes to standard error")
    output = "where the profile is written (default: in the user's cache folder, where the planner looks for it)"
    parser.add_argument("--output", metavar="PATH", help=output)


def execute(args: argparse.Namespace) -> int:
    """Run the command."""
    devices = None if args.simulate is None else parse_devices(args.simulate)
    if args.output is not None and Path(args.output).is_dir():
        raise UsageError(f"--output {args.output} is a folder. Give the path of a file.")
    arguments = {
        "folder": str(Path(args.folder).absolute()),
        "is_quick": args.quick,
        "simulate": args.simulate,
        "environment": _environment(),
    }
    if "RANK" in os.environ:
        return _join_ranks(args, arguments)
    if devices is not None:
        if args.ranks not in (None, devices.count):
            raise UsageError(
                f"--simulate {args.simulate} is a rank for each of {devices.count} devices, but --ranks is {args.ranks}."
            )
        prepare(sys.stderr)
    num_ranks = args.ranks or (_RANKS if devices is None else devices.count)
    job = Job("shardwise.cli.doctor:doctor_rank", arguments)
    with _cleaned(Path(arguments["folder"])):
        result = call_on_ranks(job, num_ranks, port=args.port, is_debug=args.debug)
    return _conclude(args, result)


def _environment() -> dict[str, str]:
    """What checks want to know, as the user has it: launchers set some of it."""
    from shardwise.planning.facts import MALLOC_SETTINGS

    return {name: os.environ[name] for name in ("OMP_NUM_THREADS", *MALLOC_SETTINGS) if name in os.environ}


@contextlib.contextmanager
def _cleaned(folder: Path) -> Iterator[None]:
    """Ranks that are ended by a signal leave their files behind."""
    from shardwise.stores.leftovers import remove_folder, remove_leftovers

    try:
        yield
    finally:
        if folder.is_dir():
            with contextlib.suppress(OSError):
                remove_leftovers(folder)
            remove_folder(folder)


def _join_ranks(args: argparse.Namespace, arguments: dict[str, Any]) -> int:
    """Measure with ranks that somebody else has started: on one host or on several."""
    if args.ranks is not None:
        raise UsageError(
            f"RANK is set: this is one of {os.environ.get('WORLD_SIZE', 'several')} ranks already. Leave out --ranks, or unset RANK."
        )
    import torch.distributed as dist

    from shardwise.wire.host_comm import farewell

    exit_code: int = ExitCode.FAILED
    try:
        dist.init_process_group("gloo")
        is_first = dist.get_rank() == 0
        result = doctor_rank(**arguments)
        dist.destroy_process_group()
        exit_code = _conclude(args, result) if is_first else _exit_code(result)
        farewell()
    except ShardwiseError as error:
        print(f"shardwise: rank {os.environ['RANK']}: {error}", file=sys.stderr)
        exit_code = exit_code_of(error)
    except Exception:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    # Not a return: after an error, threads that wait in a collective would keep the process alive; without one, a thread of gloo
    # that lets go of a tensor while the interpreter ends would abort it.
    os._exit(exit_code)


def doctor_rank(folder: str, is_quick: bool, simulate: str | None, environment: dict[str, str]) -> dict[str, Any]:
    """What every rank does: gather facts, check them, and measure if training can run at all."""
    import torch.distributed as dist

    from shardwise.cli.doctor_text import tell_on
    from shardwise.planning.checks import Severity, check_all
    from shardwise.planning.facts import gather_facts
    from shardwise.planning.measure import FULL, QUICK
    from shardwise.planning.measure_ranks import measure_all, open_world, share_facts

    device = _device(simulate)
    rank = dist.get_rank()
    world = open_world(device)
    tell = tell_on(sys.stderr, num_busy=world.lanes.hosts.count(world.lanes.hosts[rank])) if rank == 0 else _say_nothing
    facts = share_facts(gather_facts(Path(folder), environment, version=shardwise.__version__, rank=rank), world)
    findings = check_all(facts, world.links)
    result: dict[str, Any] = {
        "findings": [finding.to_dict() for finding in findings],
        "facts": [each.to_dict() for each in facts],
        "profile": None,
    }
    if not any(finding.severity is Severity.BROKEN for finding in findings):
        samples = measure_all(world, Path(folder), QUICK if is_quick else FULL, tell)
        result["profile"] = _profile(device, world.lanes.hosts, samples)
    world.release()
    return result


def _say_nothing(part: str, samples: list[Any]) -> None:
    """Rank 0 speaks for all."""


def _device(simulate: str | None) -> torch.device:
    """The device of this rank: the simulated one, the accelerator, or the CPU."""
    import torch

    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    if simulate is not None:
        from shardwise.devices import sim

        devices = parse_devices(simulate)
        sim.enable(devices.count, capacity_bytes=devices.capacity_bytes)
    if not torch.accelerator.is_available():
        return torch.device("cpu")
    index = local_rank % torch.accelerator.device_count()
    torch.accelerator.set_device_index(index)
    accelerator = torch.accelerator.current_accelerator()
    return torch.device("cpu" if accelerator is None else accelerator.type, index)


def _profile(device: torch.device, hosts: tuple[str, ...], samples: list[Any]) -> dict[str, Any]:
    from datetime import UTC, datetime

    import torch

    from shardwise.devices.memory import room_on, room_on_host
    from shardwise.planning.machine_file import MachineProfile, Rooms, identity_of, machine_from

    identity = identity_of(device.type)
    rooms = Rooms(room_on(device).capacity_bytes, room_on_host().capacity_bytes)
    machine = machine_from(samples, identity, rooms, hosts)
    now = datetime.now(UTC).replace(microsecond=0)
    return MachineProfile(machine, tuple(samples), identity, len(hosts), torch.get_num_threads(), now).to_dict()


def profile_path(device: str = "cpu") -> Path:
    """Where the profile of this machine is kept. Homes may be shared by machines: each has a file of its own."""
    from shardwise.devices.cache import cache_folder
    from shardwise.planning.machine_file import identity_of

    base = os.environ.get("XDG_CACHE_HOME", "")
    # As the specification of these folders says: one that is not absolute is not heeded.
    folder = Path(base) / "shardwise" if os.path.isabs(base) else cache_folder()
    return folder / f"machine-{identity_of(device).hash}.json"


def _conclude(args: argparse.Namespace, result: dict[str, Any]) -> int:
    """Store the profile, and say what was found."""
    from shardwise.cli.doctor_text import print_findings, print_machine
    from shardwise.planning.machine_file import MachineProfile, write_profile

    path = None
    if result["profile"] is not None:
        profile = MachineProfile.from_dict(result["profile"])
        path = profile_path(profile.identity.device) if args.output is None else Path(args.output)
        write_profile(path, profile)
    if args.json:
        print(json.dumps({**result, "path": None if path is None else str(path)}))
        return _exit_code(result)
    if path is not None:
        print_machine(profile)
    print_findings(result["findings"])
    print("Nothing was measured: mend what is broken first." if path is None else f"The profile is in {path}.")
    return _exit_code(result)


def _exit_code(result: dict[str, Any]) -> int:
    is_broken = any(finding["severity"] == "broken" for finding in result["findings"])
    return ExitCode.FAILED if is_broken else ExitCode.DONE
