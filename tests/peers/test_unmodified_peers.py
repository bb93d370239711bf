"""TRL 1.16, transformers, accelerate and PEFT run on the emulated device with no flag, and give the CPU's losses."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.peers.scenarios import SCENARIOS

ROOT = Path(__file__).parents[2]


def run(scenario: str, *, autoload: bool) -> dict:
    environment = os.environ | {
        "TORCH_DEVICE_BACKEND_AUTOLOAD": str(int(autoload)),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(
        [sys.executable, "-m", "tests.peers.scenarios", scenario],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.strip().splitlines()[-1])


@pytest.mark.peers
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_a_peer_runs_on_neuron_with_the_losses_of_the_cpu(scenario: str) -> None:
    if scenario.startswith("trl"):
        pytest.importorskip("trl", reason="install the bench extra")
    on_neuron = run(scenario, autoload=True)
    on_cpu = run(scenario, autoload=False)
    assert on_neuron["device"].startswith("neuron")
    assert on_cpu["device"] == "cpu"
    assert len(on_neuron["losses"]) >= 6
    assert on_neuron["losses"] == on_cpu["losses"]
    assert on_neuron["losses"][-1] < on_neuron["losses"][0]
