"""`trellium env`: what is installed, which accelerators a script will find, and what of them is emulated.

The thing to paste into a bug report. Versions are read from the packages' metadata, so that only torch is imported; it takes the time
of `import torch`. Values of environment variables are shown for a fixed list of names and prefixes, none of which carries a secret.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import itertools
import json
import os
import platform
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trellium import __version__

if TYPE_CHECKING:
    from trellium.neuron.instances import Instance

PACKAGES = ("torch", "transformers", "accelerate", "peft", "datasets", "trl", "safetensors", "torch-neuronx")

_VARIABLE_PREFIXES = ("TRELLIUM_", "NEURON_", "TORCH_NEURONX_")
_VARIABLES = frozenset(
    {
        "CUDA_VISIBLE_DEVICES",
        "HF_DEACTIVATE_ASYNC_LOAD",
        "HF_HOME",
        "HF_HUB_OFFLINE",
        "LOCAL_RANK",
        "OMP_NUM_THREADS",
        "RANK",
        "TORCH_DEVICE_BACKEND_AUTOLOAD",
        "WORLD_SIZE",
    }
)

_EXAMPLES = """\
examples:
  trellium env
  trellium env --json | python -m json.tool
"""


@dataclass(frozen=True)
class NeuronState:
    """Who serves torch's `neuron` device in this process.

    `provider`: "trellium" (emulated), "torch_neuronx" (the vendor's), or None. `instance` is the emulated machine, None otherwise.
    `reason`: why there is no emulated device; empty when there is one.
    """

    provider: str | None
    instance: Instance | None
    reason: str
    extension: str | None


@dataclass(frozen=True)
class Accelerator:
    """One device of torch: how a script names it, what it is, and its memory in bytes where torch tells."""

    device: str
    name: str
    memory_bytes: int | None
    emulated: bool


def register(subparsers) -> None:
    """Add this command's parser."""
    parser = subparsers.add_parser(
        "env",
        help="versions, accelerators, and what of them is emulated",
        description="Versions, accelerators, and what of them is emulated. Exit code 1 when torch finds no accelerator.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    """Print the environment; 1 when torch finds no accelerator."""
    variables = dict(os.environ)  # as they were given: the device sets some for its user when torch brings it
    neuron = neuron_state()
    facts = environment(neuron, variables)
    if args.json:
        print(json.dumps(facts, indent=2))
    else:
        _print(facts)
    if not facts["accelerators"]:
        print(
            f"trellium env: torch finds no accelerator here; it will use the CPU. Neuron: {neuron.reason}",
            file=sys.stderr,
        )
        return 1
    return 0


def environment(neuron: NeuronState, variables: Mapping[str, str]) -> dict[str, Any]:
    """Everything that the command prints, ready for JSON; `variables` are those of the environment."""
    return {
        "trellium": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": {name: _version(name) for name in PACKAGES},
        "accelerators": [asdict(accelerator) for accelerator in accelerators(neuron)],
        "neuron": {
            "provider": neuron.provider,
            "emulated": neuron.instance is not None,
            "reason": neuron.reason,
            "extension": neuron.extension,
            "instance": None if neuron.instance is None else asdict(neuron.instance) | {"cores": neuron.instance.cores},
        },
        "environment": {
            name: value
            for name, value in sorted(variables.items())
            if name in _VARIABLES or name.startswith(_VARIABLE_PREFIXES)
        },
    }


def accelerators(neuron: NeuronState) -> list[Accelerator]:
    """The devices, other than the CPU, that torch can use in this process."""
    import torch

    found: list[Accelerator] = []
    for kind in ("neuron", "cuda", "xpu", "mps"):
        module = getattr(torch, kind, None)
        if module is None or not module.is_available():
            continue
        for index in range(module.device_count()):
            properties = module.get_device_properties(index) if hasattr(module, "get_device_properties") else None
            name = module.get_device_name(index) if hasattr(module, "get_device_name") else kind
            memory = getattr(properties, "total_memory", None)
            emulated = kind == "neuron" and neuron.provider == "trellium"
            found.append(Accelerator(f"{kind}:{index}", name, memory, emulated))
    return found


def neuron_state() -> NeuronState:
    """Who serves `neuron` in this process, and if it is not the emulation, why."""
    import torch

    import trellium.neuron
    from trellium.neuron.instances import current_instance

    reason = trellium.neuron.unavailable_reason()
    extension = next((str(path) for path in sorted(Path(trellium.neuron.__file__).parent.glob("_C.*.so"))), None)
    if reason is None:
        return NeuronState("trellium", current_instance(), "", extension)
    vendor = hasattr(torch, "neuron") and torch.neuron.is_available()
    return NeuronState("torch_neuronx" if vendor else None, None, reason, extension)


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _print(facts: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False)
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    table.add_row("trellium", facts["trellium"])
    table.add_row("python", facts["python"])
    table.add_row("platform", facts["platform"])
    for name, version in facts["packages"].items():
        table.add_row(name, version or "not installed")
    console.print(table)

    console.print("\n[bold]Accelerators[/bold]")
    for line in _accelerator_lines(facts["accelerators"]) or ["none: torch will use the CPU"]:
        console.print(f"  {line}", soft_wrap=True)

    neuron = facts["neuron"]
    console.print("\n[bold]Neuron[/bold]")
    for line in _neuron_lines(neuron):
        console.print(f"  {line}", soft_wrap=True)

    if facts["environment"]:
        console.print("\n[bold]Environment variables that matter here[/bold]")
        for name, value in facts["environment"].items():
            console.print(f"  {name}={value}", markup=False, soft_wrap=True)


def _accelerator_lines(accelerators: list[dict[str, Any]]) -> list[str]:
    """One line for each run of devices that differ in their number only."""
    lines = []
    for _, run in itertools.groupby(
        accelerators, key=lambda one: (one["device"].split(":")[0], one["name"], one["memory_bytes"])
    ):
        devices = list(run)
        first, last = devices[0], devices[-1]
        named = first["device"] if len(devices) == 1 else f"{first['device']} to {last['device']}"
        size = "" if first["memory_bytes"] is None else f", {first['memory_bytes'] / 1024**3:.0f} GiB"
        each = " each" if size and len(devices) > 1 else ""
        lines.append(f"{named}  {first['name']}{size}{each}{', EMULATED' if first['emulated'] else ''}")
    return lines


def _neuron_lines(neuron: dict[str, Any]) -> list[str]:
    if neuron["emulated"]:
        instance = neuron["instance"]
        return [
            f"EMULATED by Trellium on this host's CPU and memory, as {instance['instance_type']}: {instance['cores']} cores",
            "numbers are the CPU's; times are this host's; what would run on a chip is an estimate (docs/device.md)",
            f"extension: {neuron['extension']}",
        ]
    if neuron["provider"]:
        return [f"served by the vendor's {neuron['provider']}; Trellium's emulation stepped aside", neuron["reason"]]
    return [f"not available: {neuron['reason']}"]
