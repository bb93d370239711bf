"""What each emulated core holds, to the byte.

A storage counts from its creation to its end, at its exact size. Nothing is cached or rounded, so reserved equals allocated. Not counted:
scratch memory inside one operator, which the host's kernels need and the device's might not. An allocation that does not fit raises
`torch.OutOfMemoryError` before the host's memory is taken. Counts are this process's: two processes on one core do not see each other.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import torch
from torch import OutOfMemoryError  # noqa: F401  (torch.neuron.OutOfMemoryError, as torch.cuda has it)

from trellium.neuron import _C
from trellium.neuron.indices import DeviceLike, valid_index

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def memory_allocated(device: DeviceLike = None) -> int:
    """Bytes that live tensors hold on a core."""
    return _C.memory_allocated(valid_index(device))


def max_memory_allocated(device: DeviceLike = None) -> int:
    """The most bytes live tensors held at once on a core, since the start or the last `reset_peak_memory_stats`."""
    return _C.max_memory_allocated(valid_index(device))


def memory_reserved(device: DeviceLike = None) -> int:
    """Bytes taken from a core: what live tensors hold, since nothing is cached."""
    return memory_allocated(device)


def max_memory_reserved(device: DeviceLike = None) -> int:
    """The most bytes taken from a core at once."""
    return max_memory_allocated(device)


def memory_stats(device: DeviceLike = None) -> OrderedDict[str, Any]:
    """Counters by name, as `torch.accelerator.memory_stats`: current, peak, allocated and freed, of bytes and of allocations."""
    return torch.accelerator.memory.memory_stats(valid_index(device))


def reset_peak_memory_stats(device: DeviceLike = None) -> None:
    """Let the peaks begin again from what is held now."""
    _C.reset_peak_memory_stats(valid_index(device))


def reset_accumulated_memory_stats(device: DeviceLike = None) -> None:
    """Set the sums of all that was allocated and freed to zero."""
    _C.reset_accumulated_memory_stats(valid_index(device))


def reset_max_memory_allocated(device: DeviceLike = None) -> None:
    """The older name of `reset_peak_memory_stats`."""
    reset_peak_memory_stats(device)


def empty_cache() -> None:
    """Nothing is cached; here so that portable code runs."""


def mem_get_info(device: DeviceLike = None) -> tuple[int, int]:
    """Free and total bytes of a core."""
    total = _C.capacity()
    return total - memory_allocated(device), total


def memory_snapshot(device: DeviceLike = None, limit: int = 1000) -> list[dict[str, Any]]:
    """The largest live tensors of a core, largest first: `bytes`, `shape` and `dtype` as they were when the memory was taken.

    `dtype` is None and `shape` empty for memory that no tensor has described, such as a resized storage.
    """
    return [
        {"bytes": nbytes, "shape": list(shape), "dtype": dtype}
        for nbytes, shape, dtype in _C.largest_live_tensors(valid_index(device), limit)
    ]


def memory_summary(device: DeviceLike = None, abbreviated: bool = False) -> str:
    """A table of a core's memory, and its largest live tensors unless `abbreviated`."""
    index = valid_index(device)
    stats = memory_stats(index)
    rows = [
        ("Metric", "Current", "Peak", "Total allocated", "Total freed"),
        *(
            (label, *(show(stats[f"{name}.all.{column}"]) for column in ("current", "peak", "allocated", "freed")))
            for label, name, show in (
                ("Allocated memory", "allocated_bytes", _readable),
                ("Allocations", "allocation", str),
            )
        ),
    ]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = [
        f"neuron:{index} (emulated), {_readable(_C.capacity())}, out of memory {stats['num_ooms']} times",
        *("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows),
    ]
    if not abbreviated:
        lines.append("Largest live tensors:")
        lines += [
            f"  {_readable(entry['bytes']):>12}  {entry['dtype'] or ''} {entry['shape'] if entry['dtype'] else ''}".rstrip()
            for entry in memory_snapshot(index, 10)
        ]
    return "\n".join(lines)


def _readable(nbytes: int) -> str:
    value = float(nbytes)
    for unit in _UNITS:
        if value < 1024 or unit == _UNITS[-1]:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.2f} {unit}"
        value /= 1024
    raise AssertionError("unreachable")
