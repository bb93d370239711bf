"""Compile a model's repeated block once, instead of the whole model at once.

A decoder is the same block many times over. Compiled as one graph, its compile time grows with its depth; compiled block by block, all
blocks of one kind share one graph, because their weights are that graph's arguments. What lies between the blocks (embedding, last norm, the head's
scores) runs operator by operator. On the emulated device, in a Qwen3 of 24 layers, that is 17 seconds of compiling where the whole model takes 97,
and 14 against 25 at 2 layers; a step takes the same time within 5 % at 2 and 8 layers, and a tenth less at 24 (`benchmarks/regions.py`).

Only calls without a key-value cache run compiled: a cache that grows by a token a call would be a new shape, and a new graph, each time.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache

from trellium.errors import ModelError


def repeated_blocks(model: nn.Module) -> list[nn.Module]:
    """The blocks of the outermost lists of several modules of one class in `model`, in the order they stand."""
    blocks: list[nn.Module] = []
    for child in model.children():
        if isinstance(child, nn.ModuleList) and len(child) > 1 and len({type(block) for block in child}) == 1:
            blocks.extend(child)
        else:
            blocks.extend(repeated_blocks(child))
    return blocks


def compile_blocks(model: nn.Module, **options: Any) -> int:
    """Let each repeated block of `model` run compiled; in place, so that names in checkpoints stay as they are.

    Args:
        model: any module; wrappers such as PEFT's are looked through. Before it is wrapped for several devices.
        options: of `torch.compile`.

    Returns:
        How many blocks were found.

    Raises:
        ModelError: none was.
    """
    blocks = repeated_blocks(model)
    if not blocks:
        raise ModelError(
            f"{type(model).__name__} has no repeated blocks to compile one by one. Compile the whole model: compile_regions='model'."
        )
    for block in blocks:
        compile_in_place(block, **options)
    return len(blocks)


def compile_in_place(module: nn.Module, **options: Any) -> None:
    """Let `module` run compiled wherever it is called, in training and evaluation, alone and inside of what it is wrapped in for several devices.

    Args:
        options: of `torch.compile`.
    """
    module.compile(**options)
    # What Module.compile leaves for Module.__call__; copies and pickles of the module drop it.
    module._compiled_call_impl = _one_way(module._compiled_call_impl, module._call_impl)


def _one_way(compiled: Any, plain: Any) -> Any:
    """Calls `compiled`, but with a cache `plain`; where gradients are off, with inputs that want none. For checkpointing the embeddings are made to
    want one even there, and what differs in that from block to block would be another graph."""

    def call(*args: Any, **kwargs: Any) -> Any:
        if any(isinstance(value, Cache) for value in (*args, *kwargs.values())):
            return plain(*args, **kwargs)
        if not torch.is_grad_enabled():
            args = tuple(map(_detached, args))
            kwargs = {name: _detached(value) for name, value in kwargs.items()}
        return compiled(*args, **kwargs)

    return call


def _detached(value: Any) -> Any:
    return value.detach() if isinstance(value, Tensor) else value
