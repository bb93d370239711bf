"""Which device a command uses is said, and one that was asked for and is not there is an error."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from trellium import neuron
from trellium.cli import main
from trellium.cli.devices import device_sentence, refuse_a_missing_neuron
from trellium.errors import ConfigError


@pytest.fixture
def no_neuron(monkeypatch):
    monkeypatch.setattr(neuron, "_reason", "NEURON_RT_VISIBLE_CORES=99 names a core that is not there.")
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    for name in ("TRELLIUM_NEURON", "TORCH_DEVICE_BACKEND_AUTOLOAD"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    "variable", ["NEURON_RT_VISIBLE_CORES", "NEURON_LOGICAL_NC_CONFIG", "TRELLIUM_NEURON_INSTANCE"]
)
def test_a_neuron_that_was_asked_for_and_is_not_there_is_an_error(no_neuron, monkeypatch, variable):
    refuse_a_missing_neuron()
    monkeypatch.setenv(variable, "99")
    with pytest.raises(ConfigError, match=f"{variable}=99.*names a core that is not there.*--use_cpu true"):
        refuse_a_missing_neuron()
    monkeypatch.setenv("TRELLIUM_NEURON", "0")
    refuse_a_missing_neuron()


def test_the_cpu_unasked_says_why_there_is_no_neuron(no_neuron):
    assert "names a core that is not there" in device_sentence("cpu")
    assert device_sentence("cpu", asked=True) == "cpu"


def test_a_refused_variable_ends_the_command(tmp_path, saved_model):
    (tmp_path / "rows.jsonl").write_text('{"text": "some text"}\n')
    words = ["sft", "--model_name_or_path", str(saved_model), "--dataset_name", "rows.jsonl", "--max_steps", "1"]
    done = subprocess.run(
        [sys.executable, "-m", "trellium", *words],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "NEURON_RT_VISIBLE_CORES": "0-99"},
    )
    assert done.returncode == 2, done.stderr
    assert "NEURON_RT_VISIBLE_CORES=0-99" in done.stderr
    assert "--use_cpu true" in done.stderr
    assert not (tmp_path / "runs").exists()


def test_a_run_says_first_what_it_is_going_to_do(tmp_path, monkeypatch, saved_model, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.jsonl").write_text('{"text": "some text"}\n' * 5)
    words = (
        f"--model_name_or_path {saved_model} --dataset_name rows.jsonl --use_cpu true --max_steps 2 --output_dir out"
    )
    words += " --use_peft true --lora_target_modules all-linear --per_device_train_batch_size 2"
    assert main(["sft", *words.split()]) == 0
    said = "".join(capsys.readouterr().out.split())  # wherever the lines are broken
    assert said.startswith("Loading")
    plan = said[: said.index("'train_runtime'")]
    for part in (
        "devicecpu",
        "dtypefloat32",
        "parameterstrained",
        "5rows",
        "steps2,2rowseach",
        "eager",
        "out,acheckpoint",
    ):
        assert part in plan, part


def test_the_demo_trains_on_no_cpu_unasked_either(no_neuron, monkeypatch, capsys):
    monkeypatch.setenv("NEURON_RT_VISIBLE_CORES", "99")
    assert main(["demo"]) == 2
    assert "train on the CPU with --device cpu" in capsys.readouterr().err
