"""`torch.neuron` has what the vendor's users and the Hugging Face libraries call, and says that it is emulated."""

from __future__ import annotations

import importlib
import importlib.util
import inspect

import pytest
import torch

import trellium.neuron


def test_torch_takes_it_for_the_accelerator():
    assert torch.accelerator.is_available()
    assert torch.accelerator.current_accelerator() == torch.device("neuron")
    assert torch.accelerator.device_count() == torch.neuron.device_count() > 1
    assert torch.get_device_module("neuron") is torch.neuron
    assert importlib.import_module("torch.neuron") is torch.neuron
    assert trellium.neuron.is_emulated()
    assert trellium.neuron.unavailable_reason() is None
    assert trellium.neuron.load() is None


VENDORS_NAMES = """
is_available device_count current_device set_device device get_device_properties get_device_name get_device_capability
is_neuron_runtime_initialized synchronize Stream Event current_stream default_stream set_stream stream StreamContext
memory_allocated max_memory_allocated memory_reserved max_memory_reserved memory_stats memory_summary reset_peak_memory_stats
reset_accumulated_memory_stats empty_cache mem_get_info get_executed_ops get_fallback_ops clear_op_tracking
is_bf16_supported manual_seed manual_seed_all get_rng_state set_rng_state get_rng_state_all set_rng_state_all
default_generators amp utils random memory OutOfMemoryError _is_in_bad_fork _initialized
"""


def test_the_vendors_names_are_there():
    assert [name for name in VENDORS_NAMES.split() if not hasattr(torch.neuron, name)] == []


def test_names_and_memory_of_a_core_say_emulated():
    properties = torch.neuron.get_device_properties(0)
    assert "emulated" in properties.name
    assert "emulated" in torch.neuron.get_device_name()
    assert properties.total_memory == 24 * 2**30
    assert torch.neuron.is_bf16_supported()
    assert torch.bfloat16 in torch.neuron.get_device_capability()["supported_dtypes"]
    assert torch.neuron.utils.get_platform_target() == "trn2"
    with pytest.raises(ValueError, match="Invalid device id"):
        torch.neuron.get_device_properties(99)


def test_the_emulated_torch_neuronx_mirrors_the_device_and_hides_nothing():
    spec = importlib.util.find_spec("torch_neuronx")
    assert "emulated" in spec.origin
    torch_neuronx = importlib.import_module("torch_neuronx")
    assert "EMULATED" in torch_neuronx.__doc__
    assert not hasattr(torch_neuronx, "__file__")
    assert torch_neuronx.device_count() == torch.neuron.device_count()
    assert torch_neuronx.get_fallback_ops is torch.neuron.get_fallback_ops
    assert importlib.import_module("torch_neuronx.utils") is torch.neuron.utils
    assert importlib.util.find_spec("torch_neuronx.xla_impl") is None
    with pytest.raises(AttributeError, match="Trellium's, not the vendor's"):
        torch_neuronx.trace  # noqa: B018
    inspect.getmodule(test_names_and_memory_of_a_core_say_emulated)  # walks sys.modules; an odd module breaks it


def test_transformers_and_accelerate_find_it(tmp_path):
    from accelerate.utils import is_neuron_available
    from transformers import TrainingArguments
    from transformers.utils import is_torch_bf16_gpu_available, is_torch_neuron_available

    assert is_torch_neuron_available()
    assert is_torch_neuron_available(check_device=True)
    assert is_neuron_available(check_device=True)
    assert is_torch_bf16_gpu_available()
    arguments = TrainingArguments(output_dir=str(tmp_path), bf16=True, report_to=[])
    assert arguments.device == torch.device("neuron:0")
