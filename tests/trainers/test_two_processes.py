"""Two processes that average their gradients: compiled and eager runs are the same run, and evaluation runs what was compiled for it."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

LAUNCH = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "-m")


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """What `two_processes` found, by the name of the run."""
    command = [*LAUNCH, "tests.trainers.two_processes", str(tmp_path_factory.mktemp("two"))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    found = [json.loads(line.removeprefix("FOUND ")) for line in done.stdout.splitlines() if line.startswith("FOUND ")]
    return {run["name"]: run for run in found}


@pytest.mark.parametrize("region", ["model", "blocks"])
def test_evaluation_runs_what_was_compiled_before_the_first_step(runs, region):
    compiled, eager = runs[region], runs["eager"]
    assert compiled["processes"] == eager["processes"] == 2
    assert eager["eager_calls_of_evaluation"] > 0
    assert compiled["eager_calls_of_evaluation"] == 0
    assert compiled["graphs_of_evaluation"] == 0
    for name in ("losses", "eval_loss", "margin"):
        assert compiled[name] == pytest.approx(eager[name], rel=1e-5), name
