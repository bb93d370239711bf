"""Which machine the emulated device pretends to be.

A table of Trainium instances, read from public documentation, and the rules by which the vendor's environment variables choose among
their cores. Pure Python, no torch: the device reads it once, while `import torch` is still running; it takes microseconds.

A *device* of torch is one logical core. A chip has `physical_cores_per_chip` cores; `NEURON_LOGICAL_NC_CONFIG` says how many of them
make one logical core (1 or 2; 1 only on trn1), and the chip's memory is split evenly among its logical cores.

A setting that cannot be is an `InstanceError`. It must not break `import torch` for a script that never meant to use the device, so the
device then counts as absent, with the error's text as its reason.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

GIB = 1024**3

DEFAULT_INSTANCE = "trn2.3xlarge"

# torch counts the devices of a process in a signed byte.
MAX_DEVICES = 127


class InstanceError(ValueError):
    """The environment asks for a machine, or for cores, that cannot be."""


@dataclass(frozen=True)
class InstanceType:
    """What is publicly known of one kind of host.

    `topology` is how its chips are joined by NeuronLink: `none`, `torus4x4`, or `switch` (each with each).
    `evidence`: `docs` for a documented instance type; `inferred` where our notes had to fill something in, and `note` says what.
    """

    name: str
    target: str
    chips: int
    physical_cores_per_chip: int
    hbm_gib_per_chip: int
    vcpus: int | None
    host_memory_gib: int | None
    topology: str
    core_name: str
    logical_sizes: tuple[int, ...] = (1, 2)
    default_logical_size: int = 2
    evidence: str = "docs"
    note: str = ""


def _trn1(name: str, chips: int, vcpus: int, host_memory_gib: int) -> InstanceType:
    topology = "torus4x4" if chips == 16 else "none"
    return InstanceType(
        name, "trn1", chips, 2, 32, vcpus, host_memory_gib, topology, "NeuronCore-v2", (1,), default_logical_size=1
    )


def _trn2(name: str, chips: int, vcpus: int, host_memory_gib: int) -> InstanceType:
    topology = "torus4x4" if chips == 16 else "none"
    return InstanceType(name, "trn2", chips, 8, 96, vcpus, host_memory_gib, topology, "NeuronCore-v3")


def _trn3(name: str, chips: int, topology: str, note: str) -> InstanceType:
    return InstanceType(
        name, "trn3", chips, 8, 144, None, None, topology, "NeuronCore-v4", evidence="inferred", note=note
    )


INSTANCE_TYPES: dict[str, InstanceType] = {
    kind.name: kind
    for kind in (
        _trn1("trn1.2xlarge", 1, 8, 32),
        _trn1("trn1.32xlarge", 16, 128, 512),
        _trn1("trn1n.32xlarge", 16, 128, 512),
        _trn2("trn2.3xlarge", 1, 12, 128),
        _trn2("trn2.48xlarge", 16, 192, 2048),
        _trn2("trn2u.48xlarge", 16, 192, 2048),
        _trn3("trn3", 1, "none", "one Trainium3 chip by itself; not an instance type that can be rented"),
        _trn3(
            "trn3-gen1",
            16,
            "torus4x4",
            "one of the four hosts of a 64-chip Trn3 Gen1 UltraServer; 16 chips a host assumed",
        ),
        _trn3(
            "trn3-gen2",
            4,
            "switch",
            "one four-chip sled of the 144 chips of a Trn3 Gen2 UltraServer; one host a sled assumed",
        ),
    )
}

TARGETS = ("trn1", "trn2", "trn3")
_DEFAULT_FOR_TARGET = {"trn1": "trn1.2xlarge", "trn2": DEFAULT_INSTANCE, "trn3": "trn3"}

# The variables that choose; `trellium env` shows those that are set.
ENVIRONMENT_VARIABLES = (
    "TRELLIUM_NEURON_INSTANCE",
    "NEURON_PLATFORM_TARGET_OVERRIDE",
    "NEURON_LOGICAL_NC_CONFIG",
    "NEURON_RT_VIRTUAL_CORE_SIZE",
    "NEURON_RT_VISIBLE_CORES",
    "NEURON_RT_NUM_CORES",
)


@dataclass(frozen=True)
class Instance:
    """The machine this process sees.

    `cores` counts the *visible* logical cores, which are torch's devices: device `i` is the logical core `visible_core_ids[i]` of the
    machine, on chip `chip_of(i)`. `lnc` is how many physical cores make a logical one. `hbm_bytes_per_core` is one logical core's memory.
    """

    instance_type: str
    target: str
    chips: int
    lnc: int
    cores_per_chip: int
    visible_core_ids: tuple[int, ...]
    hbm_bytes_per_core: int
    core_name: str
    topology: str
    vcpus: int | None
    host_memory_gib: int | None
    evidence: str
    note: str

    @property
    def cores(self) -> int:
        return len(self.visible_core_ids)

    @property
    def total_cores(self) -> int:
        """Logical cores of the whole machine, visible or not."""
        return self.chips * self.cores_per_chip

    @property
    def hbm_bytes_per_chip(self) -> int:
        return self.hbm_bytes_per_core * self.cores_per_chip

    def chip_of(self, device_index: int) -> int:
        """The chip on which torch's device `device_index` lies."""
        return self.visible_core_ids[device_index] // self.cores_per_chip

    def core_ids_of_chip(self, chip: int) -> tuple[int, ...]:
        return tuple(range(chip * self.cores_per_chip, (chip + 1) * self.cores_per_chip))

    def neighbours(self, chip: int) -> tuple[int, ...]:
        """Chips joined to `chip` by NeuronLink, in the order of `neuron-ls`: up, left, down, right on the torus."""
        return connected_chips(self.topology, self.chips, chip)


def connected_chips(topology: str, chips: int, chip: int) -> tuple[int, ...]:
    """The chips joined directly to `chip`. On a 4x4 torus chip 0 has 12, 3, 4 and 1."""
    if topology == "torus4x4":
        row, column = divmod(chip, 4)
        return (
            (row - 1) % 4 * 4 + column,
            row * 4 + (column - 1) % 4,
            (row + 1) % 4 * 4 + column,
            row * 4 + (column + 1) % 4,
        )
    if topology == "switch":
        return tuple(other for other in range(chips) if other != chip)
    return ()


def current_instance(environ: Mapping[str, str] | None = None) -> Instance:
    """The machine that the environment names; `trn2.3xlarge` (4 cores of 24 GiB) when it names none.

    Args:
        environ: variables to read, `os.environ` when not given.

    Raises:
        InstanceError: an unknown name, a value that is no number, a logical core size the chip has not, a target that is not the
            instance's, more cores than there are, or more than torch can number. The text names the variable, what it held, and what it may hold.
    """
    environ = os.environ if environ is None else environ
    kind = _instance_type(environ)
    lnc = _logical_size(environ, kind)
    cores_per_chip = kind.physical_cores_per_chip // lnc
    return Instance(
        instance_type=kind.name,
        target=kind.target,
        chips=kind.chips,
        lnc=lnc,
        cores_per_chip=cores_per_chip,
        visible_core_ids=_visible_cores(environ, kind.chips * cores_per_chip),
        hbm_bytes_per_core=kind.hbm_gib_per_chip * GIB // cores_per_chip,
        core_name=kind.core_name,
        topology=kind.topology,
        vcpus=kind.vcpus,
        host_memory_gib=kind.host_memory_gib,
        evidence=kind.evidence,
        note=kind.note,
    )


def _value(environ: Mapping[str, str], name: str) -> str | None:
    value = environ.get(name, "").strip()
    return value or None


def _instance_type(environ: Mapping[str, str]) -> InstanceType:
    name = _value(environ, "TRELLIUM_NEURON_INSTANCE")
    target = _value(environ, "NEURON_PLATFORM_TARGET_OVERRIDE")
    if target is not None and target not in TARGETS:
        raise InstanceError(f"NEURON_PLATFORM_TARGET_OVERRIDE is {target!r}; it may be one of {', '.join(TARGETS)}.")
    if name is None:
        return INSTANCE_TYPES[_DEFAULT_FOR_TARGET[target] if target else DEFAULT_INSTANCE]
    if name not in INSTANCE_TYPES:
        raise InstanceError(
            f"TRELLIUM_NEURON_INSTANCE is {name!r}, which is no instance known here. Known: {', '.join(INSTANCE_TYPES)}."
        )
    kind = INSTANCE_TYPES[name]
    if target is not None and target != kind.target:
        raise InstanceError(
            f"NEURON_PLATFORM_TARGET_OVERRIDE is {target!r} but TRELLIUM_NEURON_INSTANCE is {name!r}, which is {kind.target!r}. "
            "Unset one of them, or let them agree."
        )
    return kind


def _logical_size(environ: Mapping[str, str], kind: InstanceType) -> int:
    values = {
        name: value
        for name in ("NEURON_LOGICAL_NC_CONFIG", "NEURON_RT_VIRTUAL_CORE_SIZE")
        if (value := _value(environ, name)) is not None
    }
    if not values:
        return kind.default_logical_size
    if len(set(values.values())) > 1:
        raise InstanceError(
            "NEURON_LOGICAL_NC_CONFIG is {!r} but NEURON_RT_VIRTUAL_CORE_SIZE, its older name, is {!r}. "
            "Keep only the first.".format(*values.values())
        )
    name, text = next(iter(values.items()))
    allowed = " or ".join(str(size) for size in kind.logical_sizes)
    if text not in {str(size) for size in kind.logical_sizes}:
        raise InstanceError(f"{name} is {text!r}; on {kind.name} a logical core is made of {allowed} physical core(s).")
    return int(text)


def _visible_cores(environ: Mapping[str, str], available: int) -> tuple[int, ...]:
    """`NEURON_RT_VISIBLE_CORES` wins over `NEURON_RT_NUM_CORES`, which takes cores from the first."""
    visible = _value(environ, "NEURON_RT_VISIBLE_CORES")
    if visible is not None:
        return parse_core_list(visible, available)
    count = _value(environ, "NEURON_RT_NUM_CORES")
    if count is None:
        if available > MAX_DEVICES:
            raise InstanceError(
                f"The machine has {available} logical cores, and torch can number {MAX_DEVICES} devices in one process at most. "
                'Choose some with NEURON_RT_VISIBLE_CORES="0-63".'
            )
        return tuple(range(available))
    if not count.isdecimal() or int(count) == 0:
        raise InstanceError(f"NEURON_RT_NUM_CORES is {count!r}; it must be a whole number from 1 to {available}.")
    if int(count) > available:
        raise InstanceError(
            f"Logical Neuron Core(s) not available - Requested:{int(count)} Available:{available} (NEURON_RT_NUM_CORES={count})."
        )
    return tuple(range(int(count)))


def parse_core_list(text: str, available: int) -> tuple[int, ...]:
    """Cores named as the runtime lets them be named: `"0"`, `"0-3"`, `"0,2,5-7"`; each once, in the order given.

    Raises:
        InstanceError: the text does not read so, a range runs backwards, a core comes twice, or the machine has not got it.
    """
    cores: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d+)\s*(?:-\s*(\d+)\s*)?", part)
        if match is None:
            raise InstanceError(
                f'NEURON_RT_VISIBLE_CORES is {text!r}; write cores as "0", ranges as "0-3", and lists as "0,2,5-7".'
            )
        first = int(match[1])
        last = int(match[2]) if match[2] else first
        if last < first:
            raise InstanceError(f"NEURON_RT_VISIBLE_CORES is {text!r}; the range {part.strip()!r} runs backwards.")
        if last >= available:
            raise InstanceError(
                f"Logical Neuron Core(s) not available - Requested:{part.strip()} Available:{available} "
                f"(cores 0 to {available - 1}; NEURON_RT_VISIBLE_CORES={text})."
            )
        cores.extend(range(first, last + 1))
    repeated = sorted({core for core in cores if cores.count(core) > 1})
    if repeated:
        raise InstanceError(f"NEURON_RT_VISIBLE_CORES is {text!r}; core {repeated[0]} is named twice.")
    return tuple(cores)
