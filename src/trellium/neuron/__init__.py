"""The emulated `neuron` device.

`import torch` loads it, through the `torch.backends` entry point: PrivateUse1 takes the name `neuron`, and `torch.neuron` appears with the
vendor's names. Storage is host memory counted against the memory of each emulated core; every operator runs the CPU's kernel on an alias,
without a copy (`csrc/kernels.cpp`). It takes about 30 ms of `import torch` and nothing afterwards.

It steps aside, silently, where something better is there (`unavailable_reason()` then says what): the vendor's own `torch_neuronx`,
another backend on PrivateUse1, or a GPU, whose place as `torch.accelerator` it would take. `TORCH_DEVICE_BACKEND_AUTOLOAD=0` is respected;
`load()` loads it by hand.

This package imports nothing else of Trellium's.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trellium.neuron.contract import ContractError, report, reset, strict, track

__all__ = ["ContractError", "is_emulated", "load", "report", "reset", "strict", "track", "unavailable_reason"]

_NOT_LOADED = (
    "the device was not loaded: TORCH_DEVICE_BACKEND_AUTOLOAD=0 is set, or torch was imported before Trellium was installed. "
    "trellium.neuron.load() loads it now."
)
_reason: str | None = _NOT_LOADED


def load() -> str | None:
    """Make `torch.neuron` the emulated device, unless there is a reason not to; again is harmless.

    Returns:
        None when the device is there, else the reason why not, a sentence.
    """
    global _reason
    if _reason is _NOT_LOADED:
        from trellium.neuron import presence

        _reason = presence.reason_to_step_aside() or presence.take_the_name()
    return _reason


def unavailable_reason() -> str | None:
    """Why the emulated device is not there, with the way to get it; None when it is. Imports torch, which brings the device."""
    importlib.import_module("torch")
    return _reason


def is_emulated() -> bool:
    """Whether `torch.neuron` is this emulation. Imports torch, which brings the device."""
    return unavailable_reason() is None


def _autoload() -> None:
    """The `torch.backends` entry point: called while `import torch` is still running."""
    load()


def __getattr__(name: str) -> Any:
    if name in ("ContractError", "report", "reset", "strict", "track"):
        return getattr(importlib.import_module("trellium.neuron.contract"), name)
    raise AttributeError(f"module 'trellium.neuron' has no attribute {name!r}")
