"""`torch.neuron.amp`: autocast and gradient scaling under the names that device modules have.

Autocast means bfloat16 on this device. Torch keeps the type per thread, every thread begins with float16 for a device that is not torch's
own, and nothing tells a device that a thread has begun. So torch's two functions that read and set the type, through which `torch.autocast`
goes too, are wrapped (`install`): the first of them that a thread calls for `neuron` makes it bfloat16 there. It costs about 0.1 us.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from trellium.neuron import _C


class autocast(torch.autocast):
    """`torch.autocast("neuron", ...)`: bfloat16 unless told otherwise, with torch's operator lists for accelerators."""

    def __init__(
        self, enabled: bool = True, dtype: torch.dtype = torch.bfloat16, cache_enabled: bool | None = None
    ) -> None:
        super().__init__("neuron", dtype=dtype, enabled=enabled, cache_enabled=cache_enabled)


class GradScaler(torch.amp.GradScaler):
    """`torch.amp.GradScaler("neuron", ...)`; float16 needs it, bfloat16 does not."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__("neuron", *args, **kwargs)


def get_amp_supported_dtype() -> list[torch.dtype]:
    """The types autocast may cast to."""
    return [torch.bfloat16, torch.float16]


def install() -> None:
    """Make bfloat16 what every thread begins with, once a process."""
    for name in ("get_autocast_dtype", "set_autocast_dtype"):
        settled = _settled(getattr(torch, name))
        setattr(torch, name, settled)
        setattr(torch._C, name, settled)  # where Dynamo looks for it


def _settled(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def settled(device_type: str, *arguments: Any) -> Any:
        if device_type == "neuron":
            _C.settle_autocast()
        return function(device_type, *arguments)

    return settled
