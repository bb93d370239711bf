"""What a device can do: the one place, outside of the device itself, its commands and the planner, where device types are looked at.

Everybody else asks for a capability, so that a new device is one line here.
"""

from __future__ import annotations

import importlib.util
import inspect
from dataclasses import dataclass

import torch

_STATIC_SHAPES = frozenset({"neuron", "xla"})
_TRITON = frozenset({"cuda", "xpu"})


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a trainer may count on.

    Attributes:
        static_shapes: each new shape costs a compilation, so shapes are rounded and planned.
        has_triton: kernels written in Triton run.
        native_bfloat16: products in bfloat16 run on the hardware that computes, rather than being imitated at a fraction of float32's speed.
    """

    static_shapes: bool
    has_triton: bool
    native_bfloat16: bool


def capabilities(device: torch.device | str) -> Capabilities:
    """The capabilities of a device, from its type; cheap, initialises nothing."""
    kind = torch.device(device).type
    return Capabilities(
        static_shapes=kind in _STATIC_SHAPES,
        has_triton=kind in _TRITON and importlib.util.find_spec("triton") is not None,
        native_bfloat16=_native_bfloat16(kind),
    )


def _native_bfloat16(kind: str) -> bool:
    if kind == "cpu":
        return torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    if getattr(torch, kind, None) is None:
        return False
    supported = getattr(torch.get_device_module(kind), "is_bf16_supported", None)
    if supported is None:
        return True
    takes = inspect.signature(supported).parameters
    return bool(supported(including_emulation=False) if "including_emulation" in takes else supported())
