"""The table of machines and the rules that choose cores."""

import subprocess
import sys

import pytest

from trellium.neuron.instances import GIB, INSTANCE_TYPES, InstanceError, current_instance, parse_core_list


def test_an_empty_environment_is_one_trn2_chip_of_four_cores_with_24_gib_each():
    instance = current_instance({})
    assert (instance.instance_type, instance.cores, instance.hbm_bytes_per_core) == ("trn2.3xlarge", 4, 24 * GIB)
    assert instance.visible_core_ids == (0, 1, 2, 3)
    assert (instance.target, instance.lnc, instance.core_name) == ("trn2", 2, "NeuronCore-v3")


@pytest.mark.parametrize(
    ("name", "cores", "gib"),
    [
        ("trn1.2xlarge", 2, 16),
        ("trn1.32xlarge", 32, 16),
        ("trn1n.32xlarge", 32, 16),
        ("trn2.48xlarge", 64, 24),
        ("trn2u.48xlarge", 64, 24),
        ("trn3", 4, 36),
        ("trn3-gen1", 64, 36),
        ("trn3-gen2", 16, 36),
    ],
)
def test_each_instance_has_its_cores_and_their_memory(name, cores, gib):
    instance = current_instance({"TRELLIUM_NEURON_INSTANCE": name})
    assert (instance.cores, instance.hbm_bytes_per_core) == (cores, gib * GIB)
    assert instance.hbm_bytes_per_chip == INSTANCE_TYPES[name].hbm_gib_per_chip * GIB


@pytest.mark.parametrize("variable", ["NEURON_LOGICAL_NC_CONFIG", "NEURON_RT_VIRTUAL_CORE_SIZE"])
def test_logical_cores_of_one_physical_core_are_twice_as_many_with_half_the_memory(variable):
    instance = current_instance({variable: "1"})
    assert (instance.cores, instance.hbm_bytes_per_core) == (8, 12 * GIB)


def test_devices_count_visible_cores_only_and_know_their_chip():
    instance = current_instance({"TRELLIUM_NEURON_INSTANCE": "trn2.48xlarge", "NEURON_RT_VISIBLE_CORES": "0,5,60-63"})
    assert instance.visible_core_ids == (0, 5, 60, 61, 62, 63)
    assert [instance.chip_of(index) for index in range(instance.cores)] == [0, 1, 15, 15, 15, 15]
    assert instance.total_cores == 64


def test_visible_cores_win_over_a_number_of_cores():
    assert current_instance({"NEURON_RT_NUM_CORES": "3"}).visible_core_ids == (0, 1, 2)
    both = {"NEURON_RT_NUM_CORES": "3", "NEURON_RT_VISIBLE_CORES": "2"}
    assert current_instance(both).visible_core_ids == (2,)


def test_the_torus_joins_chips_as_neuron_ls_prints_them():
    instance = current_instance({"TRELLIUM_NEURON_INSTANCE": "trn2.48xlarge"})
    assert instance.neighbours(0) == (12, 3, 4, 1)
    assert instance.neighbours(10) == (6, 9, 14, 11)
    assert all(chip in instance.neighbours(other) for chip in range(16) for other in instance.neighbours(chip))
    assert current_instance({}).neighbours(0) == ()


def test_a_target_alone_chooses_an_instance_of_that_target():
    assert current_instance({"NEURON_PLATFORM_TARGET_OVERRIDE": "trn3"}).target == "trn3"
    assert current_instance({"NEURON_PLATFORM_TARGET_OVERRIDE": "trn1"}).instance_type == "trn1.2xlarge"


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        ({"TRELLIUM_NEURON_INSTANCE": "p5.48xlarge"}, "p5.48xlarge.*Known: trn1.2xlarge"),
        ({"NEURON_PLATFORM_TARGET_OVERRIDE": "trn9"}, "trn9.*trn1, trn2, trn3"),
        ({"NEURON_PLATFORM_TARGET_OVERRIDE": "trn1", "TRELLIUM_NEURON_INSTANCE": "trn2.3xlarge"}, "trn1.*trn2.3xlarge"),
        ({"NEURON_LOGICAL_NC_CONFIG": "4"}, "NEURON_LOGICAL_NC_CONFIG is '4'.*1 or 2"),
        ({"NEURON_LOGICAL_NC_CONFIG": "2", "TRELLIUM_NEURON_INSTANCE": "trn1.2xlarge"}, "trn1.2xlarge.*made of 1"),
        ({"NEURON_LOGICAL_NC_CONFIG": "1", "NEURON_RT_VIRTUAL_CORE_SIZE": "2"}, "older name"),
        ({"NEURON_RT_NUM_CORES": "5"}, "not available - Requested:5 Available:4"),
        ({"NEURON_RT_NUM_CORES": "0"}, "from 1 to 4"),
        ({"NEURON_RT_NUM_CORES": "many"}, "'many'"),
        ({"NEURON_LOGICAL_NC_CONFIG": "1", "TRELLIUM_NEURON_INSTANCE": "trn2.48xlarge"}, "128 logical cores.*127"),
        ({"NEURON_RT_VISIBLE_CORES": "2-4"}, "Requested:2-4 Available:4"),
        ({"NEURON_RT_VISIBLE_CORES": "3-1"}, "backwards"),
        ({"NEURON_RT_VISIBLE_CORES": "0,1,1"}, "core 1 is named twice"),
        ({"NEURON_RT_VISIBLE_CORES": "0:3"}, '"0-3"'),
    ],
)
def test_what_cannot_be_is_an_error_that_names_the_variable_and_the_rule(environ, words):
    with pytest.raises(InstanceError, match=words):
        current_instance(environ)


def test_core_lists_read_as_the_runtime_reads_them():
    assert parse_core_list("0", 8) == (0,)
    assert parse_core_list("0-3", 8) == (0, 1, 2, 3)
    assert parse_core_list("0, 2, 5-7", 8) == (0, 2, 5, 6, 7)


def test_the_table_is_read_without_torch():
    code = (
        "import importlib.util, sys; from pathlib import Path; import trellium; "
        "path = Path(trellium.__file__).parent / 'neuron' / 'instances.py'; "
        "spec = importlib.util.spec_from_file_location('instances', path); module = importlib.util.module_from_spec(spec); "
        "sys.modules['instances'] = module; spec.loader.exec_module(module); module.current_instance({}); "
        "print('torch' in sys.modules)"
    )
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert printed.strip() == "False"
