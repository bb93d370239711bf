"""transformers' Trainer, TRL 1.16's SFTTrainer and `generate` with a static cache, compiled for the device without a change of theirs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCENARIOS = ("transformers_trainer", "trl_sft", "generate")


@pytest.mark.peers
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_a_peer_s_compiled_run_has_the_numbers_of_its_eager_one(scenario: str, tmp_path: Path) -> None:
    if scenario.startswith("trl"):
        pytest.importorskip("trl", reason="install the bench extra")
    done = subprocess.run(
        [sys.executable, "-m", "tests.peers.compiled_scenarios", scenario],
        cwd=ROOT,
        env=os.environ
        | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "TORCH_NEURONX_NEFF_CACHE_DIR": str(tmp_path / "graphs")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    told = json.loads(done.stdout.strip().splitlines()[-1])
    assert told["compiled"] == pytest.approx(told["eager"], rel=1e-3)
    assert len(told["compiled"]) >= 4
    assert told["counted"]["graphs"] >= 1
    assert told["counted"]["fallbacks"] == told["counted"]["failures"] == 0
    # TRL's chunked loss has one call that Dynamo does not trace (`out=` with a strided tensor); the graphs around it are compiled.
    assert told["ledger"]["eager_frames"] == (1 if scenario == "trl_sft" else 0)
