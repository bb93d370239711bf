"""What a device can do: the one place, outside of the device itself, its commands and the planner, where device types are looked at.

Everybody else asks for a capability, so that a new device is one line here.
"""

from __future__ import annotations

import importlib.util
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
    """

    static_shapes: bool
    has_triton: bool


def capabilities(device: torch.device | str) -> Capabilities:
    """The capabilities of a device, from its type; cheap, initialises nothing."""
    kind = torch.device(device).type
    return Capabilities(
        static_shapes=kind in _STATIC_SHAPES,
        has_triton=kind in _TRITON and importlib.util.find_spec("triton") is not None,
    )
