"""What a run did, and what it cost: the compile ledger, throughput, metrics.

Names are loaded when first used: importing this package arms nothing and costs nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trellium.monitor.compile_limit import TooManyCompiles, max_compiles

__all__ = ["TooManyCompiles", "max_compiles"]


def __getattr__(name: str):
    if name in __all__:
        from trellium.monitor import compile_limit

        return getattr(compile_limit, name)
    raise AttributeError(f"module 'trellium.monitor' has no attribute {name!r}")
