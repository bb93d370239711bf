"""Options of a training script from a YAML file and from flags, under the name that TRL's scripts know.

The keys of the file become flags that stand before the command line's, so one parser checks both and the command line wins.
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
import types
import typing
from collections.abc import Iterable, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

from transformers import HfArgumentParser
from transformers.hf_argparser import string_to_bool

from trellium.errors import ConfigError, unknown_name
from trellium.trainers.config_file import read_config_file, yaml_value
from trellium.trainers.known_options import NotYet


class TrlParser(HfArgumentParser):
    """A parser of dataclasses, as TRL's of the same name, which raises a `ConfigError` instead of leaving the program.

    Args:
        dataclass_types: one or several, e.g. `(ScriptArguments, SFTConfig, ModelConfig)`. A field that is a list of dataclasses is read by their `of`,
            from a string or from JSON.
        **kwargs: those of `argparse.ArgumentParser`.
    """

    def __init__(self, dataclass_types: type | Iterable[type] | None = None, **kwargs: Any) -> None:
        types_ = [dataclass_types] if isinstance(dataclass_types, type) else list(dataclass_types or ())
        super().__init__(types_, **{"allow_abbrev": False, **kwargs})
        for action in self._actions:
            if action.nargs == "+" and is_dataclass(action.type):
                action.type = functools.partial(_read_item, action.type)

    def error(self, message: str) -> Any:
        raise ConfigError(message)

    def parse_args_and_config(
        self,
        args: Sequence[str] | None = None,
        return_remaining_strings: bool = False,
        fail_with_unknown_args: bool = True,
    ) -> tuple[Any, ...]:
        """One instance of each dataclass, from flags and from the file that `--config` names, whose `env:` block is exported.

        Args:
            args: the flags; those of the process when not given.
            return_remaining_strings: append what was not understood to the result instead of refusing it.
            fail_with_unknown_args: without the former, refuse what was not understood rather than leaving it out.

        Raises:
            ConfigError: an option nobody knows (with the nearest known one), one of TRL's that is not here yet, or a value that cannot be.
        """
        flags, options, path = read_config_file(list(sys.argv[1:] if args is None else args))
        keep = return_remaining_strings or not fail_with_unknown_args
        *parsed, left = self._parse(flags, options, path, keep_unknown=keep)
        return (*parsed, left) if return_remaining_strings else tuple(parsed)

    def parse_options(self, flags: Sequence[str], options: dict[str, Any], path: str) -> tuple[Any, ...]:
        """One instance of each dataclass; arguments as `read_config_file` returns them, errors as in `parse_args_and_config`."""
        return tuple(self._parse(flags, options, path, keep_unknown=False)[:-1])

    @property
    def not_yet(self) -> dict[str, NotYet]:
        """The options of TRL that the dataclasses refuse."""
        return {name: entry for one in self.dataclass_types for name, entry in getattr(one, "not_yet", {}).items()}

    def _parse(self, flags: Sequence[str], options: dict[str, Any], path: str, *, keep_unknown: bool) -> list[Any]:
        known = {action.dest: action for action in self._actions}
        first: list[str] = []
        unknown: list[str] = []
        for name, value in options.items():
            if name not in known:
                if not keep_unknown:
                    self._refuse(name, value, f"{path}: ")
                unknown += [f"--{name}", *_as_flag_values(value)]
            elif value is None:
                self._set_none(name, path)
            else:
                boolean = known[name].type is string_to_bool
                first += [f"--{name}", *(_as_boolean(value) if boolean else _as_flag_values(value))]
        try:
            *parsed, left = self.parse_args_into_dataclasses(
                [*first, *flags], return_remaining_strings=True, look_for_args_file=False
            )
        except ConfigError:
            raise
        except (ValueError, NotImplementedError, ImportError, FileNotFoundError) as error:
            # What TrainingArguments finds wrong with a value, with a file it names, or with what is installed for it.
            raise ConfigError(" ".join(str(error).split())) from error
        if not keep_unknown:
            self._check_left(left)
        return [*parsed, [*unknown, *left]]

    def _set_none(self, name: str, path: str) -> None:
        for one in self.dataclass_types:
            hints = typing.get_type_hints(one)
            if name not in {entry.name for entry in fields(one)}:
                continue
            union = typing.get_origin(hints[name]) in (typing.Union, types.UnionType)
            if not union or type(None) not in typing.get_args(hints[name]):
                raise ConfigError(f"{path}: {name} must have a value, got null. Leave the key out for the default.")
        self.set_defaults(**{name: None})

    def _check_left(self, left: list[str]) -> None:
        """Raise for the first argument that the parser did not take."""
        left = list(left)
        while left:
            flag = left.pop(0)
            if not flag.startswith("--"):
                raise ConfigError(f"unexpected argument {flag!r}: options look like --max_steps 100")
            name, _, value = flag.removeprefix("--").partition("=")
            if not value and left and not left[0].startswith("--"):
                value = left.pop(0)
            self._refuse(name.replace("-", "_"), value or "true", "")

    def _refuse(self, name: str, value: Any, where: str) -> None:
        """Raise for an option that is not here, unless it asks for what happens anyway."""
        not_yet = self.not_yet
        if name not in not_yet:
            known = {action.dest for action in self._actions}
            raise ConfigError(f"{where}{unknown_name('there is no option', name, known)} --help lists them.")
        if not_yet[name].asks_for_more(yaml_value(value) if isinstance(value, str) else value):
            raise ConfigError(f"{where}{name}: {value} is not supported. {not_yet[name].instead}")


def _read_item(item_class: Any, text: str) -> Any:
    """An item of a list of dataclasses, with what is wrong with it as argparse lets it through."""
    try:
        return item_class.of(text)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _as_flag_values(value: Any) -> list[str]:
    items = value if isinstance(value, list) else [value]
    return [json.dumps(item) if isinstance(item, dict) else str(item) for item in items]


def _as_boolean(value: Any) -> list[str]:
    """YAML 1.1 read `on` and `off` as booleans, so files that say so are about."""
    return [{"on": "true", "off": "false"}.get(str(value).lower(), str(value))]
