"""Give one model a second way to be called, beside its own.

`replace_forward` replaces the class of one instance by a subclass that differs in `forward` only: called with a certain keyword, that is another function;
called in any other way, the model's own. So DDP, accelerate, PEFT and FSDP wrap one forward call, and generation, saving, copying and pickling are the model's.
"""

from __future__ import annotations

import copyreg
import inspect
from collections.abc import Callable
from typing import Any

from transformers import PreTrainedModel

from trellium.errors import ModelError

SecondForward = Callable[..., Any]
"""`(model, the model's own class, **keywords)`; a function of a module, so that models can be pickled."""


class _Forwarding:
    """Marks the classes made by `_forwarding_class`."""


_CLASSES: dict[tuple[type[PreTrainedModel], SecondForward], type[PreTrainedModel]] = {}


def replace_forward(model: PreTrainedModel, keyword: str, function: SecondForward) -> None:
    """Let `model(…, keyword=…)` be `function(model, its own class, …, keyword=…)`; in place. Doing it twice does nothing more.

    Raises:
        ModelError: the instance's forward was already replaced by somebody else.
    """
    if isinstance(model, _Forwarding):
        return
    original = model.__dict__.pop("forward", None)
    if original is not None:
        if "_old_forward" not in model.__dict__:
            raise ModelError(
                f"the forward of this {type(model).__name__} was already replaced on the instance; install scores before wrapping or patching it"
            )
        model.__dict__["forward"] = original
    model.__class__ = _forwarding_class(type(model), keyword, function)
    if original is not None:  # accelerate's hooks call what stood in `forward` when they were added
        model._old_forward = type(model).forward.__get__(model)


def has_second_forward(model: PreTrainedModel) -> bool:
    """Whether `replace_forward` was called on it."""
    return isinstance(model, _Forwarding)


def _forwarding_class(base: type[PreTrainedModel], keyword: str, function: SecondForward) -> type[PreTrainedModel]:
    """The one subclass of `base` with that second forward."""
    if (base, function) not in _CLASSES:
        _CLASSES[base, function] = _make_class(base, keyword, function)
    return _CLASSES[base, function]


def _make_class(base: type[PreTrainedModel], keyword: str, function: SecondForward) -> type[PreTrainedModel]:
    """`base` with two forwards: the same name and module, because both are written into checkpoints and read by registries."""

    def forward(self: PreTrainedModel, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get(keyword) is None:
            return base.forward(self, *args, **kwargs)
        if args:
            raise TypeError("a scoring call takes keywords only")
        return function(self, base, **kwargs)

    # Trainer and generate() ask which arguments the model takes. Not functools.wraps: accelerate follows __wrapped__ to unwrap its own wrappers.
    forward.__signature__ = inspect.signature(base.forward)  # type: ignore[attr-defined]
    forward.__doc__ = base.forward.__doc__
    forward.__qualname__ = base.forward.__qualname__

    def __reduce_ex__(self: PreTrainedModel, protocol: Any) -> Any:
        # The class cannot be found by name; its base can.
        return _blank, (base, keyword, function), self.__dict__

    return type(
        base.__name__,
        (_Forwarding, base),
        {
            "forward": forward,
            "__reduce_ex__": __reduce_ex__,
            "__module__": base.__module__,
            "__qualname__": base.__qualname__,
            "__doc__": base.__doc__,
        },
    )


def _blank(base: type[PreTrainedModel], keyword: str, function: SecondForward) -> PreTrainedModel:
    return copyreg.__newobj__(_forwarding_class(base, keyword, function))  # type: ignore[attr-defined]
