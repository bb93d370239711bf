"""Keep activations in the host's memory between the forward and the backward pass.

Autograd's saved tensors are copied to the host as they are saved and back when the backward pass asks for them. Left on the device are the weights and what
shares their memory, tensors under a kibibyte, which are not worth a copy, and the gradient of the output head, which is made in the forward pass and read first
in the backward. A tensor that several operators saved is copied once, and comes back once while any of them holds it. With gradient checkpointing only the inputs
of blocks are saved, so only they move.

Cost: every byte that is saved crosses to the host and back once a step, on the stream that computes: on a GPU through pinned memory, which the host must have as much
of. It pays where memory is what limits a run. The numbers of a step do not change by a bit.
"""

from __future__ import annotations

import weakref
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.weak import TensorWeakRef

SMALLEST_BYTES = 1024
"""What is smaller stays on the device."""


def offloaded_activations(model: nn.Module, *, exact_strides: bool = False) -> AbstractContextManager[Any]:
    """A context in which what autograd saves on an accelerator is kept on the host. Both passes of a step belong in one.

    Args:
        model: whose weights stay where they are.
        exact_strides: leave views with gaps on the device, because they come back without them: compiled graphs read tensors by their strides.
    """
    offload = _Offload(model, exact_strides)
    return torch.autograd.graph.saved_tensors_hooks(offload.pack, _unpack)


class _OnHost:
    """A saved tensor on the host."""

    __slots__ = ("__weakref__", "_back", "_device", "_host", "_storage")

    def __init__(self, tensor: Tensor, host: Tensor, storage: StorageWeakRef) -> None:
        self._host = host.copy_(tensor, non_blocking=host.is_pinned())
        self._device = tensor.device
        self._storage = storage  # while this lives, no other storage can be known by its number
        self._back: TensorWeakRef | None = None

    def on_device(self) -> Tensor:
        tensor = None if self._back is None else self._back()
        if tensor is None:
            tensor = self._host.to(self._device, non_blocking=True)
            self._back = TensorWeakRef(tensor)
        return tensor


class _Offload:
    def __init__(self, model: nn.Module, exact_strides: bool) -> None:
        weights = (*model.parameters(), *model.buffers())
        self._weights = {weight.untyped_storage().data_ptr() for weight in weights}
        base: Any = model.module if hasattr(model, "module") else model
        head = base.get_output_embeddings() if hasattr(base, "get_output_embeddings") else None
        self._head_shape = None if head is None else head.weight.shape
        self._exact_strides = exact_strides
        self._moved: weakref.WeakValueDictionary[tuple, _OnHost] = weakref.WeakValueDictionary()

    def pack(self, tensor: Tensor) -> Tensor | _OnHost:
        if not self._moves(tensor):
            return tensor
        storage = StorageWeakRef(tensor.untyped_storage())
        key = (storage.cdata, tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype, tensor._version)
        moved = self._moved.get(key)
        if moved is None:
            host = torch.empty_like(tensor, device="cpu", pin_memory=tensor.device.type == "cuda")
            if self._exact_strides and host.stride() != tensor.stride():
                return tensor
            self._moved[key] = moved = _OnHost(tensor.detach(), host, storage)
        return moved

    def _moves(self, tensor: Tensor) -> bool:
        return (
            tensor.device.type != "cpu"
            and type(tensor) in (Tensor, nn.Parameter)
            and tensor.nbytes >= SMALLEST_BYTES
            and tensor.shape != self._head_shape
            and tensor.untyped_storage().data_ptr() not in self._weights
        )


def _unpack(saved: Tensor | _OnHost) -> Tensor:
    return saved.on_device() if isinstance(saved, _OnHost) else saved
