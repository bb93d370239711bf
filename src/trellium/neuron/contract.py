"""What a run asked of the device, held against what is publicly known of the real one.

Every operator that reaches the device is counted: which ones the vendor's device would hand to the host, how many programs it would have
compiled (one per distinct operator, dtypes and sizes), how often 64-bit values were computed that the device narrows to 32 bits. The
counting is C++ (`csrc/contract.cpp`) and costs 0.06 to 0.13 us an operator (0.18 for one with four tensors; measured where an add takes 2.6 us), so it is on by default.

Nothing here has met a chip. The table below is an **estimate from public documentation, not from a device**: each entry says why, and on
what grade of evidence:

- `tests`: asserted by the test suite of the vendor's public beta;
- `docs`: the vendor's documentation or an error code of its compiler;
- `report`: somebody's published account of running on a chip;
- `inferred`: nothing public says that it lowers, and its kind does not.

What the table does not name is taken to run on the device; an operator outside `aten` is taken to run on the host, since it has a kernel
for the device only if its author wrote one.

Environment: `TRELLIUM_NEURON_TRACK=0` turns the counting off. `TRELLIUM_NEURON_STRICT=1` raises on a host fallback or a lost value, as
`strict()` does; `TRELLIUM_NEURON_MAX_COMPILATIONS=n` raises when a run would compile more than n programs.
"""

from __future__ import annotations

import importlib
import os
import sys
import sysconfig
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

DEVICE, HOST, DATA_DEPENDENT, UNTESTED = range(4)

SOURCE = "estimated from public documentation, not from a device"


@dataclass(frozen=True)
class Rule:
    """What is known of some operators: `verdict`, the reason, and the grade of evidence for it.

    `operators`: names with or without overload; in-place forms follow their plain form; a final `*` takes all that begin so, and a
    longer name wins over a shorter one.
    """

    verdict: int
    reason: str
    evidence: str
    operators: tuple[str, ...]


def _rule(verdict: int, evidence: str, reason: str, operators: str) -> Rule:
    return Rule(verdict, reason, evidence, tuple(f"aten::{name}" for name in operators.split()))


RULES: tuple[Rule, ...] = (
    _rule(HOST, "report", "FFTs compute in complex numbers, which the device has not", "_fft_* fft_* stft istft"),
    _rule(
        HOST,
        "report",
        "the public beta has no random numbers on the device (dropout excepted); later releases may",
        "uniform normal normal_functional random bernoulli multinomial exponential cauchy log_normal geometric poisson binomial "
        "randperm rand rand_like randn randn_like randint randint_like _standard_gamma _sample_dirichlet rrelu_with_noise",
    ),
    _rule(
        HOST,
        "docs",
        "the compiler rejects a general sort (NCC_EVRF029); topk runs on the device",
        "sort msort kthvalue median nanmedian mode",
    ),
    _rule(
        HOST,
        "report",
        "the size of its result depends on data, which does not lower",
        "_unique _unique2 unique_dim unique_consecutive unique_dim_consecutive bincount",
    ),
    _rule(HOST, "tests", "the public beta has no kernel for it", "histogram* _histogramdd_*"),
    _rule(
        HOST,
        "inferred",
        "a matrix decomposition or solve; nothing public says that it lowers",
        "linalg_cholesky* _linalg_eigh linalg_eig _linalg_eigvals linalg_eigvals* _linalg_svd linalg_qr geqrf linalg_lu* lu_unpack "
        "linalg_ldl* linalg_inv_ex _linalg_solve_ex _linalg_det _linalg_slogdet linalg_lstsq linalg_householder_product ormqr "
        "triangular_solve linalg_solve_triangular cholesky cholesky_inverse cholesky_solve linalg_matrix_exp",
    ),
    _rule(
        HOST,
        "inferred",
        "sparse layouts; nothing public says that they are supported",
        "_sparse_* sparse_* _coalesce to_sparse* _to_sparse* to_dense _to_dense hspmm sspaddmm",
    ),
    _rule(
        HOST,
        "inferred",
        "the host's quantized kernels have no counterpart on the device",
        "quantize_per_* dequantize quantized_* _weight_int4pack_mm* _weight_int8pack_mm* _convert_weight_to_int4pack*",
    ),
    _rule(HOST, "report", "the public beta has no scaled 8-bit matrix product", "_scaled_mm*"),
    _rule(HOST, "inferred", "a loop over time on the host; nothing public says that it lowers", "_ctc_loss* ctc_loss*"),
    _rule(
        DATA_DEPENDENT,
        "tests",
        "runs on the device in eager mode, but the host waits for the size of its result, each size compiles its users again, and it "
        "cannot stand in a compiled graph",
        "nonzero nonzero_numpy masked_select repeat_interleave.Tensor",
    ),
    _rule(UNTESTED, "inferred", "nothing public says whether it lowers", "histc"),
    _rule(
        UNTESTED,
        "report",
        "not in the vendor's public test suite",
        "native_group_norm* upsample_* _upsample_* pixel_shuffle pixel_unshuffle baddbmm roll conv3d slow_conv3d* slow_conv_transpose*",
    ),
    _rule(
        DEVICE,
        "tests",
        "runs on the device in the public beta's tests",
        "topk nonzero_static cumsum flip index_select index_add index_copy scatter_add native_dropout linalg_vector_norm masked_fill "
        "_fused_rms_norm _grouped_mm",
    ),
)

# What the vendor calls a kernel that has another name on the host, so that reports read alike.
_SHOWN_AS = {
    "aten::_scaled_dot_product_flash_attention_for_cpu": "aten::_scaled_dot_product_fused_attention_overrideable",
    "aten::_scaled_dot_product_flash_attention_for_cpu_backward": (
        "aten::_scaled_dot_product_fused_attention_overrideable_backward"
    ),
}

COMPLEX_REASON = "complex numbers are not supported by the device (NCC_EVRF004)"
MASK_REASON = "a boolean index: the size of the result depends on data"
CUSTOM_REASON = "a custom operator has no kernel on the device unless its author wrote one"


class ContractError(RuntimeError):
    """Under `strict`: the program asked for what the real device would not do as written.

    The message names the operator, its arguments' dtypes and sizes, and the line of the user's that called it.
    """


@dataclass(frozen=True)
class OperatorReport:
    """What was counted of one operator.

    `verdict`: what the table says of it, `DEVICE`, `HOST`, `DATA_DEPENDENT` or `UNTESTED`; single calls may differ (complex numbers).
    `where`: the user's line that first called an operator the host would run or that lost values; empty elsewhere.
    `signatures`: up to eight of the programs it would have compiled.
    """

    name: str
    verdict: int
    calls: int
    host_calls: int = 0
    data_dependent_calls: int = 0
    compilations: int = 0
    float64_calls: int = 0
    int64_calls: int = 0
    lost_calls: int = 0
    reason: str = ""
    evidence: str = ""
    where: str = ""
    signatures: tuple[str, ...] = ()


@dataclass(frozen=True)
class ContractReport:
    """What a process asked of the device since counting began or was cleared; an estimate for the real one.

    Attributes:
        operators: everything executed, most calls first.
        in_memory_hits: operators that would have found their program compiled.
        compilations: distinct programs: operator, dtypes, sizes, static arguments.
        source: what the estimate rests on.
    """

    operators: tuple[OperatorReport, ...]
    in_memory_hits: int
    compilations: int
    source: str = field(default=SOURCE)

    @property
    def calls(self) -> int:
        return sum(op.calls for op in self.operators)

    @property
    def host(self) -> tuple[OperatorReport, ...]:
        """Operators the device would send to the host, most calls first."""
        return tuple(sorted((op for op in self.operators if op.host_calls), key=lambda op: -op.host_calls))

    @property
    def data_dependent(self) -> tuple[OperatorReport, ...]:
        """Operators whose result's size is known only once they ran."""
        return tuple(op for op in self.operators if op.data_dependent_calls)

    @property
    def untested(self) -> tuple[OperatorReport, ...]:
        """Operators counted as the device's of which nothing public says that it runs them."""
        return tuple(op for op in self.operators if op.verdict == UNTESTED)

    @property
    def lost(self) -> tuple[OperatorReport, ...]:
        """Operators given values that 32 bits do not hold; found only when values are checked."""
        return tuple(op for op in self.operators if op.lost_calls)

    @property
    def float64_calls(self) -> int:
        return sum(op.float64_calls for op in self.operators)

    @property
    def int64_calls(self) -> int:
        return sum(op.int64_calls for op in self.operators)

    def __str__(self) -> str:
        lines = [
            f"operators executed: {self.calls:,} calls of {len(self.operators)} kinds",
            f"programs the device would have compiled in eager mode: {self.compilations:,} (reused {self.in_memory_hits:,} times)",
            f"64-bit operands, computed in 32 bits: float64 in {self.float64_calls:,} calls, int64 in {self.int64_calls:,}",
        ]
        for title, group, count in (
            ("would run on the host", self.host, "host_calls"),
            ("size of the result depends on data", self.data_dependent, "data_dependent_calls"),
            ("counted as the device's, untested there", self.untested, "calls"),
            ("values that 32 bits do not hold", self.lost, "lost_calls"),
        ):
            lines.append(f"{title}: {len(group) or 'none'}")
            for op in group:
                where = f"; first at {op.where}" if op.where else ""
                lines.append(f"  {getattr(op, count):>8,} x {op.name}: {op.reason} [{op.evidence}]{where}")
        lines.append(f"({self.source})")
        return "\n".join(lines)


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
    snapshot = _extension().contract_snapshot()
    merged: dict[str, OperatorReport] = {}
    for row in snapshot["ops"]:
        op = _operator_report(row)
        merged[op.name] = _sum(merged[op.name], op) if op.name in merged else op
    operators = tuple(sorted(merged.values(), key=lambda op: (-op.calls, op.name)))
    return ContractReport(operators, in_memory_hits=snapshot["hits"], compilations=snapshot["misses"])


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


_settings = _Settings(tracking=False)
_first_lines: dict[str, str] = {}
_loaded: Any = None  # the extension, from `install` on


class _Changed:
    """Settings changed by a plain call stay; used in a `with` statement, the former ones come back at its end."""

    def __init__(self, settings: _Settings) -> None:
        self._before = _settings
        _apply(settings)

    def __enter__(self) -> None:
        return None

    def __exit__(self, *exception: object) -> None:
        _apply(self._before)


def track(on: bool = True, *, values: bool = False) -> _Changed:
    """Count operators, or stop counting; a call, or a `with` statement that restores what was before.

    Args:
        on: whether to count.
        values: also look at 64-bit values for those that 32 bits do not hold, and at integer products for those that float32 does not
            hold exactly. Costs a pass over every 64-bit operand.
    """
    return _Changed(_Settings(tracking=on, check_values=on and values))


def strict(*, fallback: bool = True, values: bool = True, max_compilations: int | None = None) -> _Changed:
    """Raise `ContractError` where the real device would not do what was written; a call, or a `with` statement.

    Args:
        fallback: raise before an operator that the device would hand to the host.
        values: raise before an operator given int64 or float64 values that 32 bits do not hold, or an integer matrix product that
            float32 may not hold exactly. Costs a pass over every 64-bit operand.
        max_compilations: raise when the process would have compiled more programs than this, counted since `reset()`.

    Raises:
        ValueError: a negative number of compilations.
    """
    if max_compilations is not None and max_compilations < 0:
        raise ValueError(f"max_compilations is {max_compilations}; it must be 0 or more, or None for no limit.")
    return _Changed(
        _Settings(strict_host=fallback, check_values=values, strict_values=values, max_compilations=max_compilations)
    )


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
    extension.contract_set_table([(name, rule.verdict) for rule in RULES for name in rule.operators], _SHOWN_AS)
    extension.contract_set_listener(_told)
    _loaded = extension
    strictly = _flag(environ, "TRELLIUM_NEURON_STRICT", default=False)
    limit = environ.get("TRELLIUM_NEURON_MAX_COMPILATIONS", "").strip()
    if limit and not limit.isdecimal():
        raise ValueError(f"TRELLIUM_NEURON_MAX_COMPILATIONS is {limit!r}; it must be a whole number.")
    _apply(
        _Settings(
            tracking=_flag(environ, "TRELLIUM_NEURON_TRACK", default=True) or strictly or bool(limit),
            strict_host=strictly,
            check_values=strictly,
            strict_values=strictly,
            max_compilations=int(limit) if limit else None,
        )
    )


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


def _apply(settings: _Settings) -> None:
    global _settings
    limit = -1 if settings.max_compilations is None else settings.max_compilations
    _extension().contract_configure(
        settings.tracking, settings.strict_host, settings.check_values, settings.strict_values, limit
    )
    _settings = settings


def _rows() -> list[dict]:
    return _extension().contract_snapshot()["ops"]


def _told(kind: str, operator: str, signature: str, detail: str) -> None:
    """The extension found the first host fallback of an operator, or a breach; under `strict` it is an error."""
    where = user_line()
    called = f"{operator}({signature})" + (f" at {where}" if where else "")
    if kind == "host":
        _first_lines.setdefault(operator, where)
        if _settings.strict_host:
            reason, evidence = (COMPLEX_REASON, "docs") if detail == "complex" else _reason(operator)
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


def _reason(operator: str) -> tuple[str, str]:
    """Why the table says of `operator` what it says, and on what evidence."""
    base = operator.split(".")[0]
    for name in (operator, base, base[:-1] if base.endswith("_") and not base.endswith("__") else base):
        for rule in RULES:
            if name in rule.operators:
                return rule.reason, rule.evidence
    prefixes = [
        (name, rule) for rule in RULES for name in rule.operators if name.endswith("*") and base.startswith(name[:-1])
    ]
    if prefixes:
        rule = max(prefixes, key=lambda pair: len(pair[0]))[1]
        return rule.reason, rule.evidence
    return ("", "") if base.startswith("aten::") else (CUSTOM_REASON, "inferred")


def _operator_report(row: dict) -> OperatorReport:
    reason, evidence = _reason(row["name"])
    if row["verdict"] == DEVICE:
        reason, evidence = "", ""
        if row["host_calls"]:
            reason, evidence = COMPLEX_REASON, "docs"
        elif row["data_dependent_calls"]:
            reason, evidence = MASK_REASON, "report"
        elif row["lost_calls"]:
            reason, evidence = "computed in 32 bits on the device", "report"
    return OperatorReport(
        name=row["name"],
        verdict=row["verdict"],
        calls=row["calls"],
        host_calls=row["host_calls"],
        data_dependent_calls=row["data_dependent_calls"],
        compilations=row["compilations"],
        float64_calls=row["float64_calls"],
        int64_calls=row["int64_calls"],
        lost_calls=row["lost_calls"],
        reason=reason,
        evidence=evidence,
        where=_first_lines.get(row["name"], ""),
        signatures=tuple(row["signatures"]),
    )


def _sum(one: OperatorReport, other: OperatorReport) -> OperatorReport:
    counts = (
        "calls",
        "host_calls",
        "data_dependent_calls",
        "compilations",
        "float64_calls",
        "int64_calls",
        "lost_calls",
    )
    values = {name: getattr(one, name) + getattr(other, name) for name in counts}
    text = {name: getattr(one, name) or getattr(other, name) for name in ("reason", "evidence", "where")}
    return OperatorReport(
        name=one.name, verdict=one.verdict, signatures=one.signatures + other.signatures, **values, **text
    )
