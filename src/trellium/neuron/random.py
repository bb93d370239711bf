"""Random numbers of the emulated cores.

Each core has a generator whose numbers are the CPU's for the same seed: `torch.randn(3, device="neuron")` after `torch.manual_seed(0)` is,
bit for bit, what the CPU would have drawn. (The vendor's public beta draws on the host too.)
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable

import torch
from torch import Generator, Tensor

from trellium.neuron import _C
from trellium.neuron.indices import DeviceLike, valid_index

default_generators: tuple[Generator, ...] = ()


def _make_default_generators() -> None:
    global default_generators
    default_generators = tuple(_C.default_generator(core) for core in range(_C.device_count()))


def manual_seed(seed: int) -> None:
    """Seed the current core's generator."""
    _C.default_generator(_C.current_device()).manual_seed(int(seed))


def manual_seed_all(seed: int) -> None:
    """Seed every core's generator; `torch.manual_seed` calls it."""
    for core in range(_C.device_count()):
        _C.default_generator(core).manual_seed(int(seed))


def seed() -> int:
    """Seed the current core's generator with a number nobody chose, and return it."""
    return _C.default_generator(_C.current_device()).seed()


def seed_all() -> None:
    """Seed every core's generator with one number nobody chose."""
    manual_seed_all(seed())


def initial_seed() -> int:
    """The seed of the current core's generator."""
    return _C.default_generator(_C.current_device()).initial_seed()


def get_rng_state(device: DeviceLike = "neuron") -> Tensor:
    """The state of a core's generator: a ByteTensor on the CPU."""
    return _C.default_generator(valid_index(device)).get_state()


def set_rng_state(new_state: Tensor, device: DeviceLike = "neuron") -> None:
    """Put a core's generator into a state taken earlier."""
    _C.default_generator(valid_index(device)).set_state(new_state.cpu())


def get_rng_state_all() -> list[Tensor]:
    """The state of every core's generator."""
    return [get_rng_state(core) for core in range(_C.device_count())]


def set_rng_state_all(new_states: Iterable[Tensor]) -> None:
    """Put the cores' generators into states taken earlier, the first core's first."""
    for core, state in enumerate(new_states):
        set_rng_state(state, core)


@contextlib.contextmanager
def fork_rng(devices: Iterable[DeviceLike] | None = None, enabled: bool = True):
    """`torch.random.fork_rng` for neuron cores; every core when none is named, without torch's warning about their number."""
    cores = range(_C.device_count()) if devices is None else [valid_index(device) for device in devices]
    with torch.random.fork_rng(list(cores), enabled, device_type="neuron"):
        yield
