"""`trellium neuron-ls`: the Neuron devices of this machine, in the table that users of the vendor's `neuron-ls` know.

Only for the emulated device: where the vendor's own runs, its own `neuron-ls` is the one to ask, and this says so. In the vendor's words a
*device* is a chip; torch's devices are the logical cores, whose numbers stand under NEURON CORE IDS.

`--json` prints what the vendor's `-j` prints, a list with one object a chip (`neuron_device`, `nc_count`, `neuroncore_ids`, `memory_size`,
`connected_to`, ...), each with `"emulated": true`.
"""

from __future__ import annotations

import argparse
import json
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trellium.neuron.instances import Instance

_EXAMPLES = """\
examples:
  trellium neuron-ls
  trellium neuron-ls --json
  TRELLIUM_NEURON_INSTANCE=trn2.48xlarge trellium neuron-ls     a machine of 16 chips and 64 cores
  NEURON_LOGICAL_NC_CONFIG=1 trellium neuron-ls                 8 cores of 12 GiB instead of 4 of 24
"""


def register(subparsers) -> None:
    """Add this command's parser."""
    parser = subparsers.add_parser(
        "neuron-ls",
        help="the Neuron devices of this machine and their cores",
        description="The Neuron devices of this machine and their cores, in the vendor's table. Says EMULATED where they are.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "-j", "--json", "--json-output", action="store_true", dest="json", help="print JSON, one object a chip"
    )


def run(args: argparse.Namespace) -> int:
    """Print the table; 1 when there is no emulated device to list."""
    from trellium.cli.env import neuron_state

    state = neuron_state()
    if state.instance is None:
        print(f"trellium neuron-ls: no emulated Neuron device here: {state.reason}", file=sys.stderr)
        return 1
    rows = device_rows(state.instance)
    if args.json:
        print(json.dumps(rows, indent=2))
    else:
        _print_table(state.instance, rows)
    return 0


def device_rows(instance: Instance) -> list[dict]:
    """One object a chip, with the vendor's keys; `bdf` is null, since an emulated chip sits on no bus."""
    visible = set(instance.visible_core_ids)
    return [
        {
            "neuron_device": chip,
            "bdf": None,
            "connected_to": list(instance.neighbours(chip)) or None,
            "nc_count": instance.cores_per_chip,
            "neuroncore_ids": list(instance.core_ids_of_chip(chip)),
            "visible_neuroncore_ids": [core for core in instance.core_ids_of_chip(chip) if core in visible],
            "logical_neuroncore_config": instance.lnc,
            "memory_size": instance.hbm_bytes_per_chip,
            "neuron_processes": [],
            "instance_type": instance.instance_type,
            "emulated": True,
        }
        for chip in range(instance.chips)
    ]


def _print_table(instance: Instance, rows: list[dict]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False)
    console.print("[bold]EMULATED[/bold] by Trellium in this host's memory: no Neuron hardware is used.")
    console.print(f"instance-type: {instance.instance_type}" + (f" ({instance.note})" if instance.note else ""))
    console.print("instance-id: none (emulated)")
    console.print(f"logical-neuroncore-config: {instance.lnc}")
    if instance.cores < instance.total_cores:
        shown = ", ".join(str(core) for core in instance.visible_core_ids)
        console.print(f"visible to this process: cores {shown} ({instance.cores} of {instance.total_cores})")
    table = Table(box=box.ASCII2)
    for column in (
        "NEURON\nDEVICE",
        "NEURON\nCORES",
        "NEURON\nCORE IDS",
        "NEURON\nMEMORY",
        "CONNECTED\nDEVICES",
        "PCI\nBDF",
        "CPU\nAFFINITY",
        "NUMA\nNODE",
    ):
        table.add_column(column)
    for row in rows:
        table.add_row(
            str(row["neuron_device"]),
            str(row["nc_count"]),
            f"{row['neuroncore_ids'][0]}-{row['neuroncore_ids'][-1]}",
            f"{row['memory_size'] // 1024**3} GB",
            ", ".join(str(chip) for chip in row["connected_to"] or ()),
            "-",
            "-",
            "-",
        )
    console.print(table)
