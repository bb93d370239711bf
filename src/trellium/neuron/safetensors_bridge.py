"""Let safetensors load onto the device by name.

safetensors checks a device string against a list in its compiled part, which `neuron` is not on; an integer passes, and means that index of
torch's accelerator. So `safe_open` is replaced by one that turns "neuron" and "neuron:1" into the integer. `load_file` and its like look
`safe_open` up when they run and are reached that way; modules that had taken the old name before `import torch` are found and given the
new one. Cost: importing safetensors' top level, about 1 ms of `import torch`.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any

import torch

from trellium.neuron.indices import _get_device_index


def install() -> None:
    """Replace `safetensors.safe_open` everywhere it is bound; nothing where safetensors is not installed."""
    try:
        safetensors = importlib.import_module("safetensors")
    except ImportError:  # nothing to bridge, and `import torch` is not the place to complain
        return
    original = safetensors.safe_open

    class _Replaced(type):
        def __call__(cls, filename: Any, framework: str, device: Any = "cpu", **options: Any) -> Any:
            return original(filename, framework, device=_translated(device), **options)

        def __instancecheck__(cls, instance: Any) -> bool:
            return isinstance(instance, original)

        def __subclasscheck__(cls, subclass: type) -> bool:
            return issubclass(subclass, original)

    class safe_open(metaclass=_Replaced):
        __doc__ = original.__doc__

    safe_open.__module__ = original.__module__
    safe_open.__qualname__ = "safe_open"
    for module in list(sys.modules.values()):
        # `__dict__`, not getattr: lazy modules must not be woken.
        if getattr(module, "__dict__", {}).get("safe_open") is original and module.__name__ != original.__module__:
            vars(module)["safe_open"] = safe_open


def _translated(device: Any) -> Any:
    """The integer for a neuron device; anything else as it came, for safetensors to judge."""
    if isinstance(device, torch.device) or (isinstance(device, str) and device.partition(":")[0] == "neuron"):
        parsed = torch.device(device)
        return _get_device_index(parsed) if parsed.type == "neuron" else str(parsed)
    return device
