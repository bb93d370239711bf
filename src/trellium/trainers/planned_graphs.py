"""Which planned graphs the device's cache has already, so that a plan takes them for what they cost: a load.

What decides a graph is hashed once traced; before that it is known by a label: the model's configuration and parameters, how it is compiled and run, and
the shape. A label that holds though the code has changed since costs the seconds that it promised to save, nothing else. Devices without such a cache
(`has_graphs` and `graphs_labelled` of their module) have none. Cost: a hash of the parameters' names, and a small file read for each shape in question.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import nn

from trellium.forest.batch import Shape
from trellium.trainers.base_config import BaseConfig


@dataclass(frozen=True)
class PlannedGraphs:
    """The graphs of a run, by shape.

    Attributes:
        program: a hash of all that decides them but their shape.
        device: where they run.
        blocks: whether they are of the repeated block, which knows rows and their length, but not how many edges are scored.
    """

    program: str
    device: torch.device
    blocks: bool

    @classmethod
    def of(cls, args: BaseConfig, model: nn.Module, *, layout: str, method: str) -> PlannedGraphs | None:
        """Those of training `model`; None where nothing is compiled, or what is compiled cannot be asked for."""
        module = torch.get_device_module(args.device)
        if not args.torch_compile or not hasattr(module, "has_graphs"):
            return None
        config = model.config.to_dict()  # type: ignore[union-attr, operator]
        parameters = [
            (name, tuple(one.shape), str(one.dtype), one.requires_grad) for name, one in model.named_parameters()
        ]
        blocks = args.compiles_blocks(model)
        how: tuple[Any, ...] = (
            method,
            layout,
            blocks,
            args.torch_compile_backend,
            args.torch_compile_mode,
            str(args.device),
        )
        how += (args.bf16, args.fp16, args.gradient_checkpointing, args.gradient_checkpointing_kwargs)
        program = json.dumps(
            [transformers.__version__, type(model).__name__, config, parameters, how], sort_keys=True, default=str
        )
        return cls(hashlib.sha256(program.encode()).hexdigest(), args.device, blocks)

    def cached(self, *, evaluation: bool) -> Callable[[Shape], bool]:
        """Whether the graphs of a shape are in the cache."""
        module = torch.get_device_module(self.device)
        return lambda shape: module.has_graphs(self._label(shape, evaluation))

    def labelled(self, shape: Shape, *, evaluation: bool) -> contextlib.AbstractContextManager[None]:
        """What is compiled inside are the graphs of a shape."""
        return torch.get_device_module(self.device).graphs_labelled(self._label(shape, evaluation))

    def _label(self, shape: Shape, evaluation: bool) -> str:
        sizes = f"{shape.rows}x{shape.length}" if self.blocks else str(shape)
        return f"{self.program} {'evaluation' if evaluation else 'training'} {sizes}"
