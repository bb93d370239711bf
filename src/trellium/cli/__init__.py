"""The `trellium` command.

`main` builds its parser from a small table and imports a command's module only when that command is called, so `trellium --help` imports
neither torch nor transformers and answers in about a tenth of a second.

A command is one module with `register(subparsers)`, which adds the command's own parser, and `run(args) -> int`, which returns the exit
code; heavy imports stand inside `run`. A new command is one more line of `COMMANDS`; every command understands `--debug`.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from trellium import __version__
from trellium.errors import TrelliumError

EXIT_INTERRUPTED = 130


@dataclass(frozen=True)
class Command:
    """One line of `trellium --help`: the command's name, the module that does it, and what it does."""

    name: str
    module: str
    summary: str


COMMANDS: tuple[Command, ...] = (
    Command("demo", "trellium.cli.demo", "fine-tune a real model on an emulated core, and check the result"),
    Command("sft", "trellium.cli.sft", "fine-tune a language model on your examples"),
    Command("dpo", "trellium.cli.dpo", "teach a language model which of two answers is better"),
    Command("kto", "trellium.cli.kto", "teach a language model from answers marked good or bad"),
    Command("reward", "trellium.cli.reward", "train a model that says how good an answer is"),
    Command("cache", "trellium.cli.cache", "the compiled graphs on disk: info, export, import, clear"),
    Command("env", "trellium.cli.env", "versions, accelerators, and what of them is emulated"),
    Command("neuron-ls", "trellium.cli.neuron_ls", "the Neuron devices of this machine and their cores"),
)

_EXAMPLES = """\
examples:
  trellium env                              what is installed, and which accelerator a script will find
  trellium sft --help                       the options of supervised fine-tuning; --help-all for all
  trellium sft --config run.yaml            keys of the file are options; options on the command line win
  TRELLIUM_NEURON_INSTANCE=trn2.48xlarge trellium neuron-ls
                                            how a machine of 64 cores looks, emulated here

Exit codes: 0 done, 1 nothing to report or a defect of ours, 2 something to mend in what was given, 130 interrupted.
"""


def build_parser(only: Command | None = None) -> argparse.ArgumentParser:
    """The parser of the whole command, or, with `only`, one in which that command has its options too."""
    parser = argparse.ArgumentParser(
        prog="trellium",
        usage="trellium [-h] [--version] [--debug] command ...",
        description=_description(),
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"trellium {__version__}")
    _add_debug(parser, default=False)
    subparsers = parser.add_subparsers(prog="trellium", dest="command", metavar="command", help=argparse.SUPPRESS)
    for command in COMMANDS:
        if command is only:
            importlib.import_module(command.module).register(subparsers)
        else:
            subparsers.add_parser(command.name)
        _add_debug(subparsers.choices[command.name], default=argparse.SUPPRESS)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the exit code is returned, not raised.

    Args:
        argv: the words after `trellium`; those of the process when not given.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    command = _named(words)
    try:
        args = build_parser(command).parse_args(words)
    except SystemExit as stop:  # argparse leaves this way after --help, --version and a wrong option
        return stop.code if isinstance(stop.code, int) else 0
    if args.command is None:
        build_parser().print_help()
        return 0
    debug = "--debug" in words  # before the command or after it, and whatever the command's own parser makes of it
    chosen = next(known for known in COMMANDS if known.name == args.command)
    try:
        return int(importlib.import_module(chosen.module).run(args) or 0)
    except TrelliumError as error:
        if debug:
            raise
        print(f"trellium {chosen.name}: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        if debug:
            raise
        print(f"\ntrellium {chosen.name}: interrupted.", file=sys.stderr)
        return EXIT_INTERRUPTED
    except BrokenPipeError:  # the reader of our output left, as `| head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # so that the flush at exit has somewhere to go
        return 0


def _description() -> str:
    width = max(len(command.name) for command in COMMANDS)
    lines = [f"  {command.name:<{width}}  {command.summary}" for command in COMMANDS]
    return "\n".join(
        ["Post-training for language models on accelerators that compile ahead of time.", "", "commands:", *lines]
    )


def _named(words: Sequence[str]) -> Command | None:
    """The command that `words` call: the first word that is no option."""
    first = next((word for word in words if not word.startswith("-")), None)
    return next((command for command in COMMANDS if command.name == first), None)


def _add_debug(parser: argparse.ArgumentParser, *, default: object) -> None:
    parser.add_argument(
        "--debug",
        action="store_true",
        default=default,
        help="show the whole traceback of an error instead of its message",
    )
