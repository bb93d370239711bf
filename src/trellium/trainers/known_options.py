"""Options by name: those there are, those of TRL that are not here yet, and those nobody knows.

A dataclass whose metaclass is `KnownOptions` has its names checked before its constructor does, so that the answer to a wrong one can be more than
'unexpected keyword'. Imports nothing heavy, so a command can check its flags before torch is loaded.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from trellium.errors import ConfigError, unknown_name


@dataclass(frozen=True, slots=True)
class NotYet:
    """An option of TRL that is not here.

    Attributes:
        nothing: the value that asks for what happens anyway, which is TRL's default.
        instead: what to do instead of any other.
        also: other values that ask for nothing more.
    """

    nothing: Any
    instead: str
    also: tuple[Any, ...] = ()

    def asks_for_more(self, value: Any) -> bool:
        """Whether `value` asks for what is not here."""
        return value not in (self.nothing, *self.also)


class KnownOptions(type):
    """Of a dataclass with a `not_yet: ClassVar[dict[str, NotYet]]`: checks the names of the options it is made of."""

    def __call__(cls, *args: Any, **options: Any) -> Any:
        return super().__call__(*args, **known_options(cls, options))


def known_options(cls: Any, options: dict[str, Any]) -> dict[str, Any]:
    """`options` without those of `cls.not_yet` that ask for what happens anyway.

    Raises:
        ConfigError: an option of TRL's that is not here yet, or a name nobody knows.
    """
    names = {entry.name for entry in fields(cls) if entry.init}
    for name, value in options.items():
        if name in names:
            continue
        if name not in cls.not_yet:
            raise ConfigError(unknown_name(f"{cls.__name__} has no option", name, names))
        if cls.not_yet[name].asks_for_more(value):
            raise ConfigError(f"{name}={value!r} is not supported yet. {cls.not_yet[name].instead}")
    return {name: value for name, value in options.items() if name in names}
