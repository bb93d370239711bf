"""The device's tests need the device; a machine without it skips them with its own reason."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Callable

import pytest
import torch

from trellium.neuron import unavailable_reason

# What these files test does not need the extension.
_PLAIN = {"test_instances"}


@pytest.fixture(autouse=True)
def _device(request: pytest.FixtureRequest) -> None:
    reason = unavailable_reason()
    if reason is not None and request.module.__name__.rpartition(".")[2] not in _PLAIN:
        pytest.skip(f"no emulated device: {reason}")


@pytest.fixture(autouse=True)
def _compiler(request: pytest.FixtureRequest) -> None:
    if "test_graph" in request.module.__name__ and " " in torch.__file__:
        pytest.skip("torch's C++ builder does not take an environment in a path with a space")


@pytest.fixture
def python() -> Callable[..., str]:
    """Run a script in a Python of its own and give what it printed; `variables` are set in its environment, None removes one."""

    def run(script: str, *arguments: str, **variables: str | None) -> str:
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        for name, value in variables.items():
            environment.pop(name, None)
            if value is not None:
                environment[name] = value
        command = [sys.executable, "-W", "error::RuntimeWarning", *arguments, "-c", textwrap.dedent(script)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout.strip()

    return run
