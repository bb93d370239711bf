"""`torch.neuron`: the device's module, with the vendor's names.

Everything that waits returns at once: an operator has finished when its call returns, so streams order nothing that is not ordered already,
and events hold times of the host's clock.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch

from trellium.neuron import _C, amp, memory, random  # noqa: F401
from trellium.neuron import device_utils as utils  # noqa: F401
from trellium.neuron import indices as _utils  # noqa: F401  (torch.serialization looks for `_utils._get_device_index`)
from trellium.neuron.amp import get_amp_supported_dtype  # noqa: F401
from trellium.neuron.compile_metrics import get_dynamo_metrics, reset_dynamo_metrics  # noqa: F401
from trellium.neuron.contract import (  # noqa: F401
    clear_op_tracking,
    get_compilation_cache_counters,
    get_executed_ops,
    get_fallback_ops,
)
from trellium.neuron.graph_labels import graphs_labelled, has_graphs  # noqa: F401
from trellium.neuron.indices import DeviceLike, _get_device_index, valid_index
from trellium.neuron.instances import current_instance
from trellium.neuron.memory import (  # noqa: F401
    OutOfMemoryError,
    empty_cache,
    max_memory_allocated,
    max_memory_reserved,
    mem_get_info,
    memory_allocated,
    memory_reserved,
    memory_snapshot,
    memory_stats,
    memory_summary,
    reset_accumulated_memory_stats,
    reset_max_memory_allocated,
    reset_peak_memory_stats,
)
from trellium.neuron.random import (  # noqa: F401
    fork_rng,
    get_rng_state,
    get_rng_state_all,
    initial_seed,
    manual_seed,
    manual_seed_all,
    seed,
    seed_all,
    set_rng_state,
    set_rng_state_all,
)

random._make_default_generators()
default_generators = random.default_generators

Stream = torch.Stream
Event = torch.Event

# `torch.utils.checkpoint` keeps a device's random state only for a module that says so; without it, recomputed dropout differs, silently.
_initialized = True


@dataclass(frozen=True)
class DeviceProperties:
    """What a core is. `name` says that it is emulated; `total_memory` is in bytes."""

    name: str
    total_memory: int
    core_name: str
    instance_type: str


# ---- devices


def is_available() -> bool:
    """Whether there is a core to use."""
    return _C.device_count() > 0


def device_count() -> int:
    """How many cores this process sees; one is one logical NeuronCore."""
    return _C.device_count()


def current_device() -> int:
    """The index of this thread's current core: LOCAL_RANK under torchrun, else 0, until it is set."""
    return _C.current_device()


def set_device(device: DeviceLike) -> None:
    """Make a core this thread's current one; a negative index changes nothing.

    Raises:
        ValueError: "Invalid device id: N. Valid range is 0 to M".
    """
    index = _get_device_index(device, optional=True)
    if index >= 0:
        _C.exchange_device(valid_index(index))


class device:
    """Make a core current inside a `with` statement."""

    def __init__(self, device: DeviceLike) -> None:
        self.idx = _get_device_index(device, optional=True)
        self.prev_idx = -1

    def __enter__(self) -> None:
        self.prev_idx = current_device()
        set_device(self.idx)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        set_device(self.prev_idx)


class device_of(device):
    """Make the core of a tensor or storage current inside a `with` statement; one that is elsewhere changes nothing."""

    def __init__(self, obj: Any) -> None:
        super().__init__(obj.device.index if obj.device.type == "neuron" else -1)


def get_device_properties(device: DeviceLike = None) -> DeviceProperties:
    """Name and memory of a core."""
    valid_index(device)
    instance = current_instance()
    return DeviceProperties(
        name=f"{instance.core_name} of {instance.instance_type} (emulated by Trellium)",
        total_memory=_C.capacity(),
        core_name=instance.core_name,
        instance_type=instance.instance_type,
    )


def get_device_name(device: DeviceLike = None) -> str:
    """The name of a core; it says that it is emulated."""
    return get_device_properties(device).name


def get_device_capability(device: DeviceLike = None) -> dict[str, Any]:
    """What `torch.accelerator.get_device_capability` gives: the dtypes whose operators run."""
    return torch.accelerator.get_device_capability(valid_index(device))


def is_bf16_supported(including_emulation: bool = True) -> bool:
    """True: bfloat16 is the device's own type. Without emulation: whether the host that computes here has kernels for it, as in `torch.cuda`.

    A host without them takes four to forty times as long as in float32.
    """
    return including_emulation or (
        torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    )


def is_neuron_runtime_initialized() -> bool:
    """Whether this process has put anything on a core."""
    return _C.in_use()


def is_initialized() -> bool:
    """The same, by torch's name."""
    return _C.in_use()


def init() -> None:
    """Nothing is left to initialise; here so that portable code runs."""


def _is_in_bad_fork() -> bool:
    """Whether this process was forked from one that had used the device."""
    return _C.in_bad_fork()


def _is_compiled() -> bool:
    return True


def can_device_access_peer(device: DeviceLike, peer_device: DeviceLike) -> bool:
    """Cores of one host reach each other's memory."""
    return valid_index(device) != valid_index(peer_device)


# ---- streams


def synchronize(device: DeviceLike = None) -> None:
    """Wait for a core's work: it is done."""
    valid_index(device)


def current_stream(device: DeviceLike = None) -> torch.Stream:
    """This thread's current stream of a core."""
    return torch.accelerator.current_stream(valid_index(device))


def default_stream(device: DeviceLike = None) -> torch.Stream:
    """A core's default stream."""
    return torch.Stream(stream_id=0, device_index=valid_index(device), device_type=_device_type())


def set_stream(stream: torch.Stream) -> None:
    """Make a stream the current one of its core, and its core the current one."""
    torch.accelerator.set_stream(stream)


@contextlib.contextmanager
def stream(stream: torch.Stream | None) -> Iterator[torch.Stream | None]:
    """Make a stream current inside a `with` statement; None changes nothing."""
    if stream is None:
        yield None
        return
    with device(stream.device):
        before = current_stream(stream.device)
        core = current_device()
        set_stream(stream)
        try:
            yield stream
        finally:
            set_stream(before)
            set_device(core)


StreamContext = stream


def _device_type() -> int:
    return int(torch._C._autograd.DeviceType.PrivateUse1)


# ---- autocast, under the names of torch's other device modules


def is_autocast_enabled() -> bool:
    """Whether autocast is on for this device, in this thread."""
    return torch.is_autocast_enabled("neuron")


def set_autocast_enabled(enabled: bool) -> None:
    """Turn autocast on or off for this device, in this thread."""
    torch.set_autocast_enabled("neuron", enabled)


def get_autocast_dtype() -> torch.dtype:
    """The type autocast casts to when none is named: bfloat16."""
    return torch.get_autocast_dtype("neuron")


def set_autocast_dtype(dtype: torch.dtype) -> None:
    """Choose the type autocast casts to when none is named, in this thread."""
    torch.set_autocast_dtype("neuron", dtype)


__all__ = [
    name for name in dir() if not name.startswith("_") and name not in {"annotations", "contextlib", "dataclass"}
]
