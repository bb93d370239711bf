"""A core's index from whatever users write for a device: nothing, an integer, a string or a `torch.device`."""

from __future__ import annotations

from typing import TypeAlias

import torch

from trellium.neuron import _C

DeviceLike: TypeAlias = torch.device | str | int | None


def _get_device_index(device: DeviceLike = None, optional: bool = False, allow_cpu: bool = False) -> int:
    """The index `device` means; torch's serialization calls it by this name.

    Args:
        device: `None` and a device without an index mean the current one.
        optional: whether `None` is allowed.
        allow_cpu: a CPU device gives -1 instead of an error.

    Raises:
        ValueError: not a neuron device, or `None` where one is needed.
    """
    if isinstance(device, int) and not isinstance(device, bool):
        return device
    if device is None:
        if not optional:
            raise ValueError("expected a neuron device with an index, got None")
        return _C.current_device()
    parsed = torch.device(device)
    if parsed.type == "cpu" and allow_cpu:
        return -1
    if parsed.type != "neuron":
        raise ValueError(f"expected a neuron device, got {parsed}")
    return _C.current_device() if parsed.index is None else parsed.index


def valid_index(device: DeviceLike = None) -> int:
    """As above, `None` allowed, and refused if there is no such core.

    Raises:
        ValueError: in the vendor's words, "Invalid device id: N. Valid range is 0 to M".
    """
    index = _get_device_index(device, optional=True)
    if not 0 <= index < _C.device_count():
        raise ValueError(f"Invalid device id: {index}. Valid range is 0 to {_C.device_count() - 1}")
    return index
