"""The command itself: help without torch, exit codes, messages without tracebacks."""

import subprocess
import sys
import types

import pytest

from trellium import __version__, cli
from trellium.errors import DatasetError


@pytest.fixture
def command(monkeypatch):
    """Put one command, `try-it`, in the place of the real ones; its `run` is set by the test."""
    module = types.ModuleType("trellium_try_it")
    module.register = lambda subparsers: subparsers.add_parser("try-it").add_argument("--rows", type=int, default=3)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(cli, "COMMANDS", (cli.Command("try-it", module.__name__, "try it"),))
    return module


def raises(error):
    def run(args):
        raise error

    return run


def test_help_answers_without_importing_torch():
    code = (
        "import sys; from trellium.cli import main; code = main(['--help']); "
        "print('heavy:', sorted({'torch', 'transformers', 'rich'} & set(sys.modules)), code)"
    )
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert printed.endswith("heavy: [] 0\n")
    assert all(command.name in printed and command.summary in printed for command in cli.COMMANDS)
    assert "examples:" in printed


def test_no_command_prints_the_help(capsys):
    assert cli.main([]) == 0
    assert "usage: trellium" in capsys.readouterr().out


def test_version_is_the_packages(capsys):
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"trellium {__version__}\n"


def test_an_unknown_command_or_option_exits_with_2_and_names_it(capsys):
    assert cli.main(["frobnicate"]) == 2
    assert "frobnicate" in capsys.readouterr().err
    assert cli.main(["env", "--frobnicate"]) == 2
    assert "--frobnicate" in capsys.readouterr().err


def test_a_commands_options_are_its_own_and_its_result_is_the_exit_code(command):
    command.run = lambda args: args.rows
    assert cli.main(["try-it", "--rows", "7"]) == 7
    command.run = lambda args: None
    assert cli.main(["try-it"]) == 0


def test_what_the_user_can_mend_is_a_message_and_exit_code_2(command, capsys):
    command.run = raises(DatasetError("rows.jsonl:3: no 'text'. Name the column."))
    assert cli.main(["try-it"]) == 2
    printed = capsys.readouterr()
    assert printed.err == "trellium try-it: rows.jsonl:3: no 'text'. Name the column.\n"
    assert printed.out == ""


@pytest.mark.parametrize("words", [["--debug", "try-it"], ["try-it", "--debug"]])
def test_debug_lets_the_traceback_through(command, words):
    command.run = raises(DatasetError("rows.jsonl:3"))
    with pytest.raises(DatasetError):
        cli.main(words)


def test_an_interrupt_is_one_line_and_exit_code_130(command, capsys):
    command.run = raises(KeyboardInterrupt())
    assert cli.main(["try-it"]) == 130
    assert capsys.readouterr().err.strip() == "trellium try-it: interrupted."


def test_a_defect_of_ours_keeps_its_traceback(command):
    command.run = raises(ZeroDivisionError())
    with pytest.raises(ZeroDivisionError):
        cli.main(["try-it"])


def test_a_reader_that_leaves_early_is_no_error():
    code = (
        "import sys, types; from trellium import cli; module = types.ModuleType('m'); sys.modules['m'] = module; "
        "module.register = lambda subparsers: subparsers.add_parser('m'); "
        "module.run = lambda args: [print('line') for _ in range(100000)] and 0; "
        "cli.COMMANDS = (cli.Command('m', 'm', 'm'),); sys.exit(cli.main(['m']))"
    )
    command = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    command.stdout.readline()
    command.stdout.close()
    assert command.stderr.read() == b""
    assert command.wait() == 0
