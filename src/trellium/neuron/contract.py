"""What a run asked of the device, held against what is publicly known of the real one.

Every operator that reaches the device is counted: which ones the vendor's device would hand to the host, how many programs it would have
compiled (one per distinct operator, dtypes and sizes), how often 64-bit values were computed that the device narrows to 32 bits. The
counting is C++ (`csrc/contract.cpp`) and costs 0.06 to 0.13 us an operator (0.18 for one with four tensors; measured where an add takes
2.6 us), so it is on by default. What a tensor's printed form computes is not counted.

Nothing here has met a chip: what is held against a run is a table of estimates (`contract_rules`).

`track` and `strict` hold for the process, every thread of it. A plain call holds until the next one; blocks (`with`) lie on top of it in the
order they were entered, each says only what it is about, and the latest that says something of a matter is heard: counting inside a strict
block stays strict. A block takes away its own part when it ends, whichever others began or ended meanwhile.

Environment: `TRELLIUM_NEURON_TRACK=0` turns the counting off. `TRELLIUM_NEURON_STRICT=1` raises on a host fallback or a lost value, as
`strict()` does; `TRELLIUM_NEURON_MAX_COMPILATIONS=n` raises when a run would compile more than n programs.
"""

from __future__ import annotations

import functools
import importlib
import os
import sys
import sysconfig
import threading
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import FrameType
from typing import Any

import torch

from trellium.neuron.contract_report import ContractReport, OperatorReport, report_of  # noqa: F401
from trellium.neuron.contract_rules import (  # noqa: F401
    COMPLEX_REASON,
    DATA_DEPENDENT,
    DEVICE,
    HOST,
    RULES,
    SHOWN_AS,
    SOURCE,
    UNTESTED,
    Rule,
    reason_for,
)


class ContractError(RuntimeError):
    """Under `strict`: the program asked for what the real device would not do as written.

    The message names the operator, its arguments' dtypes and sizes, and the line of the user's that called it.
    """


# ---- what the vendor's users know


def get_fallback_ops() -> list[str]:
    """Names of the operators that the real device would have run on the host, sorted, each once; an estimate."""
    return sorted({row["name"] for row in _rows() if row["host_calls"]})


def get_executed_ops() -> list[str]:
    """Names of the operators that would have run on the device itself, sorted, each once; an estimate."""
    return sorted({row["name"] for row in _rows() if row["calls"] > row["host_calls"]})


def clear_op_tracking() -> None:
    """Forget which operators ran. Programs already counted as compiled stay compiled, as in the vendor's cache."""
    _first_lines.clear()
    _extension().contract_clear(False)


def get_compilation_cache_counters() -> dict[str, int]:
    """The vendor's counters that mean something here; nothing is persistent, so every miss is a compilation."""
    snapshot = _extension().contract_snapshot()
    return {
        "CompilationCache.InMemoryHits": snapshot["hits"],
        "CompilationCache.InMemoryMisses": snapshot["misses"],
        "CompilationCache.TotalCompilations": snapshot["misses"],
    }


# ---- Trellium's own


def report() -> ContractReport:
    """Everything counted so far in this process."""
    return report_of(_extension().contract_snapshot(), _first_lines)


def reset() -> None:
    """Forget everything counted, compiled programs too."""
    _first_lines.clear()
    _extension().contract_clear(True)


@dataclass(frozen=True)
class _Settings:
    tracking: bool = True
    strict_host: bool = False
    check_values: bool = False
    strict_values: bool = False
    max_compilations: int | None = None


class Block:
    """What `track` and `strict` return: the call has taken effect, and lasts until the next one; as a `with` statement's, until the block ends.

    It can be used again, and inside itself.
    """

    def __init__(self, said: Mapping[str, Any]) -> None:
        self._said = said
        _extension()  # or say why there is none
        with _lock:
            if _calls[-1].block() is None:  # it can no longer become a block, so those before it are over
                del _calls[:-1]
            _calls.append(_Call(_Settings(**said), weakref.ref(self)))
            _apply()

    def __enter__(self) -> None:
        with _lock:
            _calls[:] = [call for call in _calls if call.block() is not self]
            _blocks.append(self)
            _apply()

    def __exit__(self, *exception: object) -> None:
        with _lock:
            last = max(place for place, block in enumerate(_blocks) if block is self)
            del _blocks[last]
            _apply()


@dataclass(frozen=True)
class _Call:
    """A call of `track` or `strict` that is not, or not yet, a block."""

    settings: _Settings
    block: Callable[[], Block | None]
    """What the call returned, if anybody still holds it."""


_lock = threading.RLock()
_calls = [_Call(_Settings(tracking=False), lambda: None)]
_blocks: list[Block] = []  # in the order they were entered
_settings = _calls[0].settings  # what holds now
_first_lines: dict[str, str] = {}
_loaded: Any = None  # the extension, from `install` on


def _apply() -> None:
    """Give the extension what holds now; the caller has the lock."""
    global _settings
    settings = _calls[-1].settings
    for block in _blocks:
        settings = replace(settings, **block._said)
    limit = -1 if settings.max_compilations is None else settings.max_compilations
    _extension().contract_configure(
        settings.tracking, settings.strict_host, settings.check_values, settings.strict_values, limit
    )
    _settings = settings


def track(on: bool = True, *, values: bool = False) -> Block:
    """Count operators, or stop counting: from this call on, or inside a `with` statement.

    Args:
        on: whether to count. Where nothing is counted, nothing is refused either.
        values: also look at 64-bit values for those that 32 bits do not hold, and at integer products for those that float32 does not
            hold exactly. Costs a pass over every 64-bit operand.
    """
    return Block({"tracking": on, "check_values": True} if on and values else {"tracking": on})


def strict(*, fallback: bool = True, values: bool = True, max_compilations: int | None = None) -> Block:
    """Raise `ContractError` where the real device would not do what was written: from this call on, or inside a `with` statement.

    Args:
        fallback: raise before an operator that the device would hand to the host.
        values: raise before an operator given int64 or float64 values that 32 bits do not hold, or an integer matrix product that
            float32 may not hold exactly. Costs a pass over every 64-bit operand.
        max_compilations: raise when the process would have compiled more programs than this, counted since `reset()`; None: no limit of
            its own.

    Raises:
        ValueError: a negative number of compilations.
    """
    if max_compilations is not None and max_compilations < 0:
        raise ValueError(f"max_compilations is {max_compilations}; it must be 0 or more, or None for no limit.")
    said: dict[str, Any] = {"tracking": True, "strict_host": fallback, "strict_values": values}
    if values:
        said["check_values"] = True
    if max_compilations is not None:
        said["max_compilations"] = max_compilations
    return Block(said)


def is_tracking() -> bool:
    """Whether operators are being counted."""
    return _settings.tracking


# ---- the seam to C++


def install(environ: Mapping[str, str] | None = None) -> None:
    """Give the table to the extension and turn on what the environment asks for. Called once, by the device, at `import torch`.

    Raises:
        ValueError: a variable holds what it may not.
    """
    global _loaded
    environ = os.environ if environ is None else environ
    extension = importlib.import_module("trellium.neuron._C")
    extension.contract_set_table([(name, rule.verdict) for rule in RULES for name in rule.operators], SHOWN_AS)
    extension.contract_set_listener(_told)
    _loaded = extension
    strictly = _flag(environ, "TRELLIUM_NEURON_STRICT", default=False)
    limit = environ.get("TRELLIUM_NEURON_MAX_COMPILATIONS", "").strip()
    if limit and not limit.isdecimal():
        raise ValueError(f"TRELLIUM_NEURON_MAX_COMPILATIONS is {limit!r}; it must be a whole number.")
    settings = _Settings(
        tracking=_flag(environ, "TRELLIUM_NEURON_TRACK", default=True) or strictly or bool(limit),
        strict_host=strictly,
        check_values=strictly,
        strict_values=strictly,
        max_compilations=int(limit) if limit else None,
    )
    with _lock:
        _calls[:] = [_Call(settings, lambda: None)]
        _apply()
    _leave_printing_out()


def _leave_printing_out() -> None:
    """Count nothing of what a tensor's printed form computes: looking at a run must not change its report."""
    printed = torch._tensor_str._str

    @functools.wraps(printed)
    def uncounted(self: torch.Tensor, **contents: Any) -> str:
        if self.device.type != "neuron":
            return printed(self, **contents)
        before = _extension().contract_aside(True)
        try:
            return printed(self, **contents)
        finally:
            _extension().contract_aside(before)

    torch._tensor_str._str = uncounted


def _flag(environ: Mapping[str, str], name: str, *, default: bool) -> bool:
    text = environ.get(name, "").strip()
    if text not in {"", "0", "1"}:
        raise ValueError(f"{name} is {text!r}; it may be 0 or 1.")
    return default if not text else text == "1"


def _extension() -> Any:
    """The C++ side, once the device is there.

    Raises:
        RuntimeError: there is no emulated device in this process; says why.
    """
    if _loaded is None:
        reason = importlib.import_module("trellium.neuron").unavailable_reason()
        raise RuntimeError(f"there is no emulated neuron device whose operators could be counted: {reason}")
    return _loaded


def _rows() -> list[dict]:
    return _extension().contract_snapshot()["ops"]


def _told(kind: str, operator: str, signature: str, detail: str) -> None:
    """The extension found the first host fallback of an operator, or a breach; under `strict` it is an error."""
    where = user_line()
    called = f"{operator}({signature})" + (f" at {where}" if where else "")
    if kind == "host":
        _first_lines.setdefault(operator, where)
        if _settings.strict_host:
            reason, evidence = (COMPLEX_REASON, "docs") if detail == "complex" else reason_for(operator)
            raise ContractError(
                f"{called} would run on the host, not on the Neuron device: {reason} [{evidence}; {SOURCE}]. "
                "Replace the operator, move it out of the step, or allow it with trellium.neuron.strict(fallback=False)."
            )
    elif kind == "values":
        _first_lines.setdefault(operator, where)
        if _settings.strict_values:
            raise ContractError(
                f"{called}: {detail}. Use smaller values, or compute this on the host; trellium.neuron.strict(values=False) allows it."
            )
    elif kind == "compilations" and _settings.max_compilations is not None:
        raise ContractError(
            f"{called} would be compiled as a new program, and {detail} were allowed (max_compilations). "
            "Keep shapes fixed (pad to a multiple), or allow more."
        )


_ELSEWHERE = tuple(
    os.path.normcase(os.path.realpath(folder)) + os.sep
    for folder in {sysconfig.get_path("stdlib"), os.path.dirname(os.path.dirname(os.path.abspath(__file__)))}
)
_PACKAGES = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")


def user_line() -> str:
    """`file:line in function` of the innermost frame outside installed packages, Python's library and Trellium; empty if there is none."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        library = any(part in file for part in _PACKAGES) or os.path.normcase(os.path.realpath(file)).startswith(
            _ELSEWHERE
        )
        if not library and not file.startswith("<frozen"):
            return f"{file}:{frame.f_lineno} in {frame.f_code.co_name}"
        frame = frame.f_back
    return ""
