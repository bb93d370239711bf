"""`trellium cache`: the compiled graphs on disk, which let a second process, or another machine of the same kind, start warm.

`info` says where they are, how many, how large, and how often each was loaded. `export` writes them into one file and `import` reads such a
file on another machine: a graph is used where the CPU's instructions, the compiler, torch and the number of threads are those it was
compiled with, and compiled again elsewhere.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

_EXAMPLES = """\
examples:
  trellium cache info
  trellium cache info --json
  trellium cache export graphs.bin        then, on another machine: trellium cache import graphs.bin
  trellium cache clear

Graphs and archives are Python pickles: import only what you trust.
"""


def register(subparsers) -> None:
    """Add this command's parser."""
    parser = subparsers.add_parser(
        "cache",
        help="the compiled graphs on disk: info, export, import, clear",
        description="The compiled graphs on disk, which let a second process start warm.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    actions = parser.add_subparsers(dest="action", metavar="action", required=True)
    info = actions.add_parser("info", help="where the graphs are, how many, how large, how often loaded")
    info.add_argument("--json", action="store_true", help="print JSON")
    export = actions.add_parser("export", help="write all graphs into one file")
    export.add_argument("archive", type=Path)
    load = actions.add_parser("import", help="take the graphs of such a file")
    load.add_argument("archive", type=Path)
    actions.add_parser("clear", help="remove all graphs")


def run(args: argparse.Namespace) -> int:
    """Do the action; 1 when there is nothing to export.

    Raises:
        ConfigError: an archive that cannot be read or written.
    """
    from trellium.errors import ConfigError
    from trellium.neuron import graph_cache

    try:
        if args.action == "info":
            _print_info(as_json=args.json)
        elif args.action == "export":
            count = graph_cache.export_entries(args.archive) if graph_cache.entries() else 0
            if count == 0:
                print(f"nothing to export: {graph_cache.store_folder()} holds no graphs.")
                return 1
            print(f"{count} graphs written to {args.archive} ({_size(args.archive.stat().st_size)}).")
        elif args.action == "import":
            print(f"{graph_cache.import_entries(args.archive)} graphs taken into {graph_cache.store_folder()}.")
        else:
            print(f"{graph_cache.clear()} graphs removed from {graph_cache.store_folder()}.")
    except OSError as error:
        raise ConfigError(f"{error.filename or args.archive}: {error.strerror or error}.") from error
    except graph_cache.CacheError as error:
        raise ConfigError(str(error)) from error
    return 0


def _print_info(*, as_json: bool) -> None:
    from trellium.neuron import graph_cache

    known = graph_cache.entries()
    nbytes, hits = sum(entry.nbytes for entry in known), sum(entry.hits for entry in known)
    most_bytes = graph_cache.bound(*graph_cache.SIZE_BOUND) * 2**20
    most_entries = graph_cache.bound(*graph_cache.ENTRY_BOUND)
    if as_json:
        told = {
            "folder": str(graph_cache.store_folder()),
            "disabled": graph_cache.is_disabled(),
            "entries": len(known),
            "bytes": nbytes,
            "hits": hits,
            "bound_bytes": most_bytes,
            "bound_entries": most_entries,
            "graphs": [{"name": e.name, "bytes": e.nbytes, "hits": e.hits, "used": e.used} for e in reversed(known)],
        }
        print(json.dumps(told, indent=2))
        return
    print(f"folder   {graph_cache.store_folder()}" + (" (disabled)" if graph_cache.is_disabled() else ""))
    print(f"entries  {len(known)}" + (f" of at most {most_entries}" if most_entries else ""))
    print(f"bytes    {nbytes} ({_size(nbytes)}" + (f" of at most {_size(most_bytes)})" if most_bytes else ")"))
    print(f"hits     {hits}")
    if known:
        import datetime

        print(f"\n{'last used':16}  {'bytes':>10}  {'hits':>5}  graph")
        for entry in reversed(known):
            when = datetime.datetime.fromtimestamp(entry.used).strftime("%Y-%m-%d %H:%M")
            print(f"{when}  {entry.nbytes:>10}  {entry.hits:>5}  {entry.name[:40]}")


def _size(nbytes: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if nbytes < 1024:
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1024
    return f"{nbytes:.1f} GiB"
