"""`trellium neuron-ls`: the vendor's table and JSON, and the word that it is emulated."""

import json
import os
import subprocess
import sys

import pytest
import torch

from trellium.cli import main, neuron_ls
from trellium.neuron.instances import GIB, current_instance

needs_device = pytest.mark.skipif(
    not (hasattr(torch, "neuron") and torch.neuron.is_available()), reason="needs the emulated device"
)


def test_a_machine_of_sixteen_chips_lists_them_with_their_cores_and_neighbours():
    rows = neuron_ls.device_rows(current_instance({"TRELLIUM_NEURON_INSTANCE": "trn2.48xlarge"}))
    assert sum(row["nc_count"] for row in rows) == 64
    assert rows[0]["connected_to"] == [12, 3, 4, 1]
    assert rows[15]["neuroncore_ids"] == [60, 61, 62, 63]
    assert all(row["memory_size"] == 96 * GIB and row["emulated"] for row in rows)


def test_cores_hidden_from_the_process_are_still_the_machines():
    (row,) = neuron_ls.device_rows(current_instance({"NEURON_RT_VISIBLE_CORES": "1,3"}))
    assert (row["nc_count"], row["visible_neuroncore_ids"]) == (4, [1, 3])


@needs_device
def test_json_is_a_list_of_chips_with_the_vendors_keys(capsys):
    assert main(["neuron-ls", "--json"]) == 0
    (chip,) = json.loads(capsys.readouterr().out)
    assert (chip["neuron_device"], chip["nc_count"], chip["neuroncore_ids"]) == (0, 4, [0, 1, 2, 3])
    assert chip["logical_neuroncore_config"] == 2
    assert chip["emulated"] is True


@needs_device
def test_the_table_has_the_columns_users_know_and_says_emulated(capsys):
    assert main(["neuron-ls"]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("EMULATED")
    assert "instance-type: trn2.3xlarge" in printed
    assert "logical-neuroncore-config: 2" in printed
    for words in ("CORE IDS", "MEMORY", "CONNECTED", "BDF", "0-3", "96 GB"):
        assert words in printed


def test_without_a_device_it_exits_with_1_and_a_sentence():
    done = subprocess.run(
        [sys.executable, "-m", "trellium", "neuron-ls"],
        capture_output=True,
        text=True,
        env=os.environ | {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"},
    )
    assert done.returncode == 1
    assert done.stdout == ""
    assert "no emulated Neuron device here" in done.stderr
    assert "TORCH_DEVICE_BACKEND_AUTOLOAD" in done.stderr
