"""Trellium: post-training for language models on accelerators that compile ahead of time.

Names are loaded when first used, so that `import torch` can load the emulated device from this package in milliseconds.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

__version__ = "0.1.0"

_HOMES = {
    "SFTConfig": "trellium.trainers.sft_config",
    "SFTTrainer": "trellium.trainers.sft",
}

if TYPE_CHECKING:
    from trellium.trainers.sft import SFTTrainer
    from trellium.trainers.sft_config import SFTConfig

__all__ = ["SFTConfig", "SFTTrainer", "__version__"]


def __getattr__(name: str):
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'trellium' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
