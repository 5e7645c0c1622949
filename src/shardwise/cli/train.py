"""``shardwise train``: a ready job, from a recipe."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from typing import Any

import torch.distributed as dist
from rich.console import Console

from shardwise.cli.exits import ExitCode
from shardwise.cli.jobs import Job, call_on_ranks
from shardwise.cli.parsing import Commands, Parser, add_command, add_ranks, whole_number
from shardwise.recipes.train import TrainConfig, TrainResult, train

_EXAMPLE = """\
shardwise train
shardwise train --stage 2 --ranks 4 --steps 500 --seed 1"""


def add_to(commands: Commands[Parser]) -> None:
    """Add the command to the parser of all commands."""
    default = TrainConfig()
    summary = "train a small byte-level GPT on the source of Python's standard library"
    parser = add_command(commands, "train", execute, summary=summary, example=_EXAMPLE)
    parser.add_argument("--stage", type=int, choices=range(4), default=default.stage, help="ZeRO stage (default: %(default)s)")
    add_ranks(parser)
    parser.add_argument(
        "--steps", type=whole_number(1), default=default.steps, metavar="N", help="steps (default: %(default)s)"
    )
    parser.add_argument(
        "--seed", type=whole_number(0), default=default.seed, metavar="N", help="weights and batches (default: %(default)s)"
    )
    parser.add_argument("--json", action="store_true", help="print the result as JSON; progress goes to standard error")


def execute(args: argparse.Namespace) -> int:
    """Run the command."""
    settings = {"stage": args.stage, "steps": args.steps, "seed": args.seed}
    job = Job("shardwise.cli.train:train_rank", {"settings": settings, "is_json": args.json})
    console = Console(stderr=args.json)
    console.print(f"Starting {args.ranks} rank{'s' if args.ranks > 1 else ''} ...", style="dim", highlight=False)
    try:
        result = TrainResult(**call_on_ranks(job, args.ranks, is_debug=args.debug))
    finally:
        # A rank that was killed leaves its progress bar without the cursor.
        console.show_cursor(True)
    print(json.dumps(asdict(result)) if args.json else result)
    return ExitCode.DONE


def train_rank(settings: dict[str, Any], is_json: bool) -> dict[str, Any]:
    """What every rank does."""
    console = Console(stderr=is_json) if dist.get_rank() == 0 else None
    return asdict(train(TrainConfig(**settings), console))
