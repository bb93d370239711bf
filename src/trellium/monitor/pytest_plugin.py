"""The fixture `max_compiles`, registered with pytest by the installation.

Importing it arms the ledger and imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

import pytest

from trellium.monitor.compile_limit import max_compiles as _max_compiles
from trellium.monitor.ledger import Watch


@pytest.fixture
def max_compiles() -> Callable[[int], AbstractContextManager[Watch]]:
    """`with max_compiles(n):` fails the test if more than `n` graphs are compiled inside, and names the argument whose shape was new."""
    return _max_compiles
