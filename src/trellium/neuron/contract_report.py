"""What was counted, put into words: the report of a run's operators."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from trellium.neuron.contract_rules import COMPLEX_REASON, DEVICE, MASK_REASON, SOURCE, UNTESTED, reason_for


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


def report_of(snapshot: Mapping[str, Any], first_lines: Mapping[str, str]) -> ContractReport:
    """The report of the extension's counters; `first_lines`: the user's line that first called an operator, by its name."""
    merged: dict[str, OperatorReport] = {}
    for row in snapshot["ops"]:
        op = _of_operator(row, first_lines.get(row["name"], ""))
        merged[op.name] = _sum(merged[op.name], op) if op.name in merged else op
    operators = tuple(sorted(merged.values(), key=lambda op: (-op.calls, op.name)))
    return ContractReport(operators, in_memory_hits=snapshot["hits"], compilations=snapshot["misses"])


def _of_operator(row: dict, where: str) -> OperatorReport:
    reason, evidence = reason_for(row["name"])
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
        where=where,
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
