"""`trellium env`: what it tells of the machine, with the emulated device, without it, and with it misconfigured."""

import json
import os
import subprocess
import sys

import pytest
import torch

from trellium import __version__
from trellium.cli import main

needs_device = pytest.mark.skipif(
    not (hasattr(torch, "neuron") and torch.neuron.is_available()), reason="needs the emulated device"
)


def trellium(*words, **environment):
    """Run the command in a process of its own, since `import torch` reads the environment once."""
    return subprocess.run(
        [sys.executable, "-m", "trellium", *words], capture_output=True, text=True, env=os.environ | environment
    )


@needs_device
def test_json_lists_four_emulated_cores_the_versions_and_the_variables(capsys, monkeypatch):
    monkeypatch.setenv("NEURON_CC_FLAGS", "--optlevel 1")
    monkeypatch.setenv("HF_TOKEN", "a secret")
    assert main(["env", "--json"]) == 0
    printed = capsys.readouterr().out
    facts = json.loads(printed)
    assert facts["trellium"] == __version__
    assert facts["packages"]["torch"] == torch.__version__
    neurons = [accelerator for accelerator in facts["accelerators"] if accelerator["device"].startswith("neuron")]
    assert [accelerator["device"] for accelerator in neurons] == [f"neuron:{core}" for core in range(4)]
    assert all(accelerator["emulated"] and accelerator["memory_bytes"] == 24 * 1024**3 for accelerator in neurons)
    assert all("emulated" in accelerator["name"].lower() for accelerator in neurons)
    assert facts["neuron"]["provider"] == "trellium"
    assert facts["neuron"]["instance"]["instance_type"] == "trn2.3xlarge"
    assert facts["environment"]["NEURON_CC_FLAGS"] == "--optlevel 1"
    assert "a secret" not in printed


@needs_device
def test_the_text_says_emulated_in_capitals(capsys):
    assert main(["env"]) == 0
    printed = capsys.readouterr().out
    assert "EMULATED by Trellium" in printed
    assert "neuron:3" in printed


@needs_device
def test_another_instance_has_its_own_cores():
    done = trellium("env", "--json", TRELLIUM_NEURON_INSTANCE="trn2.48xlarge")
    assert len(json.loads(done.stdout)["accelerators"]) == 64


@needs_device
def test_a_device_that_cannot_be_is_absent_with_its_reason_and_exit_code_1():
    done = trellium("env", NEURON_RT_NUM_CORES="9")
    assert done.returncode == 1
    assert "Logical Neuron Core(s) not available - Requested:9 Available:4" in done.stderr
    assert "Traceback" not in done.stderr


def test_autoloading_turned_off_is_told():
    done = trellium("env", "--json", TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    assert done.returncode == 1
    facts = json.loads(done.stdout)
    assert facts["accelerators"] == []
    assert "TORCH_DEVICE_BACKEND_AUTOLOAD" in facts["neuron"]["reason"]


@needs_device
def test_only_variables_that_were_given_are_listed():
    given = {name: value for name, value in os.environ.items() if name != "HF_DEACTIVATE_ASYNC_LOAD"}
    command = [sys.executable, "-m", "trellium", "env", "--json"]
    for more in ({}, {"HF_DEACTIVATE_ASYNC_LOAD": "0"}):
        done = subprocess.run(command, capture_output=True, text=True, env={**given, **more}, check=True)
        assert ("HF_DEACTIVATE_ASYNC_LOAD" in json.loads(done.stdout)["environment"]) is bool(more)
