"""What leaves this process or torch: generators copied and pickled, tensors sent to another process, tensors given to another library.

- A generator is copied and pickled with its state, as the CPU's is. Torch's own way asks every device but the CPU for an offset, which the
  CPU's Mersenne twister has not.
- A core's memory belongs to one process, so a tensor cannot be sent to another, and says so at once. A queue pickles in a thread of
  its own, where an error would be printed and the receiver wait for ever (a DataLoader's worker hangs its parent so): there, what is sent is
  the error, and it is raised where it is received.
- DLPack knows the device as kDLExtDev, without a copy. Torch's `__dlpack_device__` looks for a device called "privateuse1", which one
  that was renamed is not.
"""

from __future__ import annotations

import copyreg
import functools
import threading
from multiprocessing.reduction import ForkingPickler
from typing import Any, NoReturn

import torch
from torch import Generator, Tensor, UntypedStorage

_REFUSAL = (
    "A neuron tensor cannot be sent between processes: the memory of a core belongs to the process that uses it. Send a CPU tensor (.cpu()), "
    "and move it to neuron where it is received; in a DataLoader, let the dataset and collate_fn give CPU tensors and move the batch."
)


def install() -> None:
    """Teach torch and multiprocessing all three, once a process."""
    copyreg.pickle(Generator, _reduce_generator)
    ForkingPickler.register(UntypedStorage, _reduce_storage)  # of which every tensor's own reduction makes use
    _name_the_dlpack_device()


def _reduce_generator(generator: Generator) -> Any:
    if generator.device.type != "neuron":
        return generator.__reduce__()
    return _rebuilt_generator, (str(generator.device), generator.get_state())


def _rebuilt_generator(device: str, state: Tensor) -> Generator:
    return Generator(device).set_state(state)


def _reduce_storage(storage: UntypedStorage) -> Any:
    if storage.device.type != "neuron":
        return torch.multiprocessing.reductions.reduce_storage(storage)
    if threading.current_thread().name == "QueueFeederThread":
        return _refuse, ()
    _refuse()


def _refuse() -> NoReturn:
    raise RuntimeError(_REFUSAL)


def _name_the_dlpack_device() -> None:
    torchs = Tensor.__dlpack_device__

    @functools.wraps(torchs)
    def dlpack_device(self: Tensor) -> Any:
        if self.device.type != "neuron":
            return torchs(self)
        from torch.utils.dlpack import DLDeviceType

        return DLDeviceType.kDLExtDev, self.device.index

    Tensor.__dlpack_device__ = dlpack_device  # type: ignore[method-assign]
