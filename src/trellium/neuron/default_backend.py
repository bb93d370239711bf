"""`torch.compile` without a backend, on the device.

Torch's default is Inductor, which has no code generator for `neuron` and would end in a KeyError. The vendor's documentation says that the
backend may be chosen for the user where a Neuron device is, so a graph with neuron tensors goes to the backend `neuron`, whether nothing or
"inductor" was named; all other graphs go where they went. Options of Inductor's mean nothing there, and are named in a warning.
"""

from __future__ import annotations

import functools
import importlib
import warnings
from typing import Any

import torch


def install() -> None:
    """Look at every graph that Inductor is given by `torch.compile`, once a process."""
    wrapper = torch._TorchCompileInductorWrapper
    inductor = wrapper.__call__

    @functools.wraps(inductor)
    def chosen(self: Any, model_: Any, inputs_: Any, **settings: Any) -> Any:
        if not _is_neurons(model_, inputs_):
            return inductor(self, model_, inputs_, **settings)
        if ignored := {**self.config, **(settings.get("config_patches") or {})}:
            warnings.warn(
                f"torch.compile's mode or options set {', '.join(sorted(ignored))} for Inductor; the graph is compiled for neuron, where they "
                "mean nothing.",
                stacklevel=2,
            )
        return importlib.import_module("trellium.neuron.graphs").neuron_backend(model_, inputs_)

    wrapper.__call__ = chosen


def _is_neurons(graph: Any, inputs: Any) -> bool:
    """Whether a Dynamo graph holds a tensor of the device: an input, or one it makes."""
    made = (node.meta.get("example_value") for node in graph.graph.nodes)
    return any(isinstance(value, torch.Tensor) and value.device.type == "neuron" for value in (*inputs, *made))
