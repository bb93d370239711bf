"""What Trellium raises when its user can mend the cause.

Every message says what came, the rule, and the way out; for data, the file and line or the row. The command line prints it without a
traceback and exits with `exit_code`. Anything else that is raised is a defect of ours and keeps its traceback.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class TrelliumError(Exception):
    """Base of the errors whose cause lies in what was given."""

    exit_code = 2


class ConfigError(TrelliumError, ValueError):
    """Options that cannot be, or cannot be together."""


class DatasetError(TrelliumError, ValueError):
    """A dataset, or a row of it, that cannot be trained on."""


class ModelError(TrelliumError, ValueError):
    """A model that cannot be found, read, or trained as asked."""


def unknown_name(what: str, name: str, known: Iterable[str]) -> str:
    """A sentence that says a name is unknown and which known one is nearest."""
    near = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f"{what} {name!r}." + (f" Did you mean {near[0]!r}?" if near else "")
