"""``shardwise completion``: what a shell needs to complete commands and options, made from the parser itself."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Callable
from dataclasses import dataclass

from shardwise.cli.exits import ExitCode
from shardwise.cli.parsing import Commands, Parser, add_command
from shardwise.recipes.catalog import recipe_names

_EXAMPLE = """\
source <(shardwise completion bash)                     (bash: in ~/.bashrc)
source <(shardwise completion zsh)                      (zsh: in ~/.zshrc, after compinit)
shardwise completion fish > ~/.config/fish/completions/shardwise.fish"""

FILES = "FILES"
"""Stands for a path, which shells complete by themselves."""
_FILE_METAVARS = ("PATH", "FILE", "DIR", "SCRIPT")


@dataclass(frozen=True)
class Option:
    """One option: its names, what it is for, and what may follow it."""

    names: tuple[str, ...]
    text: str
    takes_value: bool
    values: tuple[str, ...]


@dataclass(frozen=True)
class Command:
    """One command: its options, and what may stand without an option."""

    name: str
    text: str
    options: tuple[Option, ...]
    values: tuple[str, ...]


def add_to(commands: Commands[Parser]) -> None:
    """Add the command to the parser of all commands."""
    parser = add_command(
        commands, "completion", execute, summary="print a script that completes commands in a shell", example=_EXAMPLE
    )
    parser.add_argument("shell", choices=list(WRITERS), help="which shell")


def execute(args: argparse.Namespace) -> int:
    """Run the command."""
    from shardwise.cli.main import build_parser

    print(WRITERS[args.shell](read_commands(build_parser())))
    return ExitCode.DONE


def read_commands(parser: argparse.ArgumentParser) -> list[Command]:
    """What a parser knows: its commands, and first, without a name, what stands before any of them."""
    found = [_read(parser, "", "")]
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            texts = {choice.dest: choice.help or "" for choice in action._choices_actions}
            found += [_read(inner, name, texts.get(name, "")) for name, inner in action.choices.items()]
    return found


def _read(parser: argparse.ArgumentParser, name: str, text: str) -> Command:
    options, values = [], list[str]()
    for action in parser._actions:
        if action.option_strings:
            options.append(Option(tuple(action.option_strings), action.help or "", action.nargs != 0, _values(action)))
        elif not isinstance(action, argparse._SubParsersAction):
            values += _values(action)
    return Command(name, text, tuple(options), tuple(values))


def _values(action: argparse.Action) -> tuple[str, ...]:
    if action.choices is not None:
        return tuple(str(choice) for choice in action.choices)
    if action.metavar == "RECIPE":
        return (*recipe_names(), FILES)
    return (FILES,) if action.metavar in _FILE_METAVARS else ()


def write_bash(commands: list[Command]) -> str:
    """A function for bash's ``complete``."""
    names = " ".join(command.name for command in commands if command.name)
    cases = "\n".join(_bash_case(command) for command in commands if command.name)
    return f"""\
_shardwise() {{
  local word="${{COMP_WORDS[COMP_CWORD]}}" before="${{COMP_WORDS[COMP_CWORD-1]}}" command="" options="{_names(commands[0])}"
  local values="{names}" each
  for each in "${{COMP_WORDS[@]:1:COMP_CWORD-1}}"; do
    case "$each" in -*) ;; *) command="$each"; break ;; esac
  done
  case "$command" in
{cases}
  esac
  COMPREPLY=()
  case "$word" in
    -*) COMPREPLY=($(compgen -W "$options" -- "$word")) ;;
    *)
      case " $values " in *" {FILES} "*) COMPREPLY=($(compgen -f -- "$word")) ;; esac
      COMPREPLY+=($(compgen -W "${{values//{FILES}/}}" -- "$word")) ;;
  esac
}}
complete -o filenames -F _shardwise shardwise"""


def _bash_case(command: Command) -> str:
    lines = [f'    {command.name}) options="{_names(command)}"; values="{" ".join(command.values)}"', '      case "$before" in']
    for option in command.options:
        if option.takes_value:
            lines.append(f'        {"|".join(option.names)}) values="{" ".join(option.values)}" ;;')
    return "\n".join([*lines, "      esac ;;"])


def _names(command: Command) -> str:
    return " ".join(name for option in command.options for name in option.names)


def write_zsh(commands: list[Command]) -> str:
    """A function for zsh's ``compdef``."""
    names = " ".join(shlex.quote(f"{command.name}:{command.text}") for command in commands if command.name)
    cases = "\n".join(f"    {command.name}) _arguments {_zsh_specs(command)} ;;" for command in commands if command.name)
    return f"""\
#compdef shardwise
_shardwise() {{
  local -a names=({names})
  local line state
  _arguments -C {_zsh_specs(commands[0])} '1: :->command' '*:: :->rest'
  case $state in
    command) _describe 'command' names ;;
    rest) case $line[1] in
{cases}
    esac ;;
  esac
}}
compdef _shardwise shardwise"""


def _zsh_specs(command: Command) -> str:
    specs = []
    for option in command.options:
        text = option.text.replace("[", "(").replace("]", ")").replace(":", ";")
        value = f":value:{_zsh_values(option.values)}" if option.takes_value else ""
        specs += [shlex.quote(f"{name}[{text}]{value}") for name in option.names]
    if command.values:
        specs.append(shlex.quote(f"*:value:{_zsh_values(command.values)}"))
    return " ".join(specs)


def _zsh_values(values: tuple[str, ...]) -> str:
    words = " ".join(value for value in values if value != FILES)
    if FILES not in values:
        return f"({words})"
    return f"{{_values value {words}; _files}}" if words else "_files"


def write_fish(commands: list[Command]) -> str:
    """Lines of fish's ``complete``."""
    lines = ["complete -c shardwise -f"]
    for command in commands:
        where = f"-n '__fish_seen_subcommand_from {command.name}'" if command.name else "-n __fish_use_subcommand"
        if command.name:
            lines.append(f"complete -c shardwise -n __fish_use_subcommand -a {command.name} -d {shlex.quote(command.text)}")
        lines += [f"complete -c shardwise {where} {_fish_option(option)}" for option in command.options]
        words = " ".join(value for value in command.values if value != FILES)
        if words:
            lines.append(f"complete -c shardwise {where} -a {shlex.quote(words)}")
        if FILES in command.values:
            lines.append(f"complete -c shardwise {where} -F")
    return "\n".join(lines)


def _fish_option(option: Option) -> str:
    parts = [f"-l {name[2:]}" if name.startswith("--") else f"-s {name[1:]}" for name in option.names]
    if option.takes_value:
        words = " ".join(value for value in option.values if value != FILES)
        parts.append("-r -F" if FILES in option.values else f"-x -a {shlex.quote(words)}" if words else "-x")
    return " ".join([*parts, f"-d {shlex.quote(option.text)}"])


WRITERS: dict[str, Callable[[list[Command]], str]] = {"bash": write_bash, "zsh": write_zsh, "fish": write_fish}
