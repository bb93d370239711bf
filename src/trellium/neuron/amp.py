"""`torch.neuron.amp`: autocast and gradient scaling under the names that device modules have."""

from __future__ import annotations

from typing import Any

import torch


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
