"""Two processes that average their gradients: compiled and eager runs are the same run, and evaluation runs what was compiled for it."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.trainers.two_processes import run

LAUNCH = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "-m")


def in_two_processes(folder, *names):
    """What `two_processes` found, by the name of the run."""
    done = subprocess.run(
        [*LAUNCH, "tests.trainers.two_processes", str(folder), *names], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found = [json.loads(line.removeprefix("FOUND ")) for line in done.stdout.splitlines() if line.startswith("FOUND ")]
    return {run["name"]: run for run in found}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    return in_two_processes(tmp_path_factory.mktemp("two"), "eager", "a single row", "kto")


@pytest.mark.slow
def test_evaluation_runs_what_was_compiled_before_the_first_step(tmp_path):
    """A model that is one region, and blocks; of the policy and of a reference that is another model."""
    found = in_two_processes(tmp_path, "eager", "model", "blocks")
    eager = found.pop("eager")
    assert eager["processes"] == 2
    assert eager["eager_calls_of_evaluation"] > 0
    for name, compiled in found.items():
        assert compiled["eager_calls_of_evaluation"] == compiled["graphs_of_evaluation"] == 0, name
        for value in ("losses", "eval_loss", "margin"):
            assert compiled[value] == pytest.approx(eager[value], rel=1e-5), (name, value)


@pytest.mark.parametrize(("name", "rows"), [("eager", 5), ("a single row", 1)])
def test_each_held_out_row_counts_once_whatever_the_number_of_processes(runs, tmp_path, name, rows):
    """Two processes of two rows see what one process of four does, although neither five rows nor one are a whole number of batches."""
    alone = run(tmp_path, held_out=rows, per_device_train_batch_size=4, per_device_eval_batch_size=4)
    for value in ("losses", "eval_loss", "margin", "tokens"):
        assert runs[name][value] == pytest.approx(alone[value], rel=1e-5), value


def test_processes_stay_in_step_where_every_batch_is_reduced(runs, tmp_path):
    """KTO's estimate of the divergence is one of all processes, also where one has no row left."""
    alone = run(tmp_path, method="kto", learning_rate=0.0, per_device_eval_batch_size=4)
    for value in ("eval_loss", "margin", "tokens"):
        assert runs["kto"][value] == pytest.approx(alone[value], rel=1e-5), value
