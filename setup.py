"""Build the emulated `neuron` device, where that is possible.

Everything else of the project is in pyproject.toml. The extension is compiled against the torch that is installed (hence
`--no-build-isolation`), takes under a minute on two cores, and is bound to that torch: what it was built for is written beside it, and
checked before it is loaded. A machine without a C++ compiler, or a build that cannot see torch, gets the rest of Trellium; a compiler
that fails, fails the installation.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from setuptools import setup

PACKAGE = Path("src/trellium/neuron")


def cxx_compiler() -> str | None:
    """The C++ compiler torch's build would call, or None."""
    named = os.environ.get("CXX")
    candidates = [named.split()[0]] if named else ["c++", "g++", "clang++"]
    return next((found for name in candidates if (found := shutil.which(name))), None)


@contextlib.contextmanager
def one_build_at_a_time() -> Iterator[None]:
    """Two installations from one checkout would write the same object files."""
    Path("build").mkdir(exist_ok=True)
    with open("build/.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def extension() -> dict:
    """Arguments for `setup`: the extension and how to build it, or nothing and one line that says why."""
    try:
        import torch
        from torch.utils.cpp_extension import BuildExtension, CppExtension
    except ImportError:
        print(
            "trellium: torch is not visible to this build, so the emulated neuron device is left out. "
            "Install torch first, then: pip install --no-build-isolation trellium",
            file=sys.stderr,
        )
        return {}
    if cxx_compiler() is None:
        print(
            "trellium: no C++ compiler found (c++, g++, clang++ or $CXX), so the emulated neuron device is left out. "
            "Everything else is installed.",
            file=sys.stderr,
        )
        return {}

    class BuildDevice(BuildExtension):
        def initialize_options(self) -> None:
            super().initialize_options()
            # A folder that outlives this build, one per torch and Python: a second installation recompiles only what changed.
            self.build_temp = str(Path("build", f"neuron-{torch.__version__}-{sys.implementation.cache_tag}"))
            # setuptools skips an extension newer than its sources, which a source saved during a build is not; ninja knows better.
            self.force = True

        def run(self) -> None:
            with one_build_at_a_time():
                self.build()

        def build(self) -> None:
            super().run()
            built_for = {
                "torch": torch.__version__,
                "torch_git": torch.version.git_version,
                "python": sysconfig.get_config_var("SOABI"),
            }
            folder = PACKAGE if self.inplace else Path(self.build_lib, "trellium", "neuron")
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "_built_for.json").write_text(json.dumps(built_for, indent=2) + "\n")

        def copy_extensions_to_source(self) -> None:
            # Replaced, not overwritten: a running process has the old one mapped.
            for target in PACKAGE.glob("_C.*.so"):
                target.unlink()
            super().copy_extensions_to_source()

    return {
        "ext_modules": [
            CppExtension(
                "trellium.neuron._C",
                sorted(str(path) for path in (PACKAGE / "csrc").glob("*.cpp")),
                extra_compile_args=["-O2", "-g0", "-fvisibility=hidden"],
                depends=sorted(str(path) for path in (PACKAGE / "csrc").glob("*.h")),
            )
        ],
        "cmdclass": {"build_ext": BuildDevice},
    }


setup(**extension())
