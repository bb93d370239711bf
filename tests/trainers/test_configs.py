"""The options of the trainers: defaults, what is refused and how."""

from __future__ import annotations

import copy
import pickle

import pytest
from transformers import HfArgumentParser

from trellium import SFTConfig
from trellium.errors import ConfigError


def test_defaults_are_those_of_the_field(tmp_path):
    config = SFTConfig(output_dir=str(tmp_path), use_cpu=True)
    assert (config.learning_rate, config.logging_steps, config.max_length) == (2e-5, 10, 1024)
    assert config.gradient_checkpointing is config.activation_checkpointing is True
    assert config.pad_to_multiple_of is None
    assert config.bf16 is False
    assert config.completion_only_loss is None


def test_bfloat16_can_be_asked_for_on_a_machine_without_accelerator(tmp_path):
    assert SFTConfig(output_dir=str(tmp_path), use_cpu=True, bf16=True).bf16 is True


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"max_lenght": 3}, "Did you mean 'max_length'"),
        ({"loss_type": "l2"}, "nll, dft"),
        ({"max_length": 1}, "at least 2"),
        ({"truncation_mode": "middle"}, "keep_start, keep_end"),
        ({"pad_to_multiple_of": "some"}, "a number from 1, 'none' or 'auto'"),
        ({"label_smoothing_factor": 0.1, "loss_type": "dft"}, "label_smoothing_factor"),
        ({"use_liger_kernel": True}, "nothing for it to fuse"),
        ({"fp16": True, "bf16": True}, "exclude each other"),
        ({"dataset_kwargs": {"add_special_tokens": False}}, "add_special_tokens"),
        ({"model_init_kwargs": "bfloat16"}, "JSON object"),
    ],
)
def test_options_that_cannot_be_are_named(tmp_path, options, says):
    with pytest.raises(ConfigError, match=says):
        SFTConfig(output_dir=str(tmp_path), use_cpu=True, **options)


def test_flags_are_parsed_from_the_command_line(tmp_path):
    flags = [
        "--output_dir",
        str(tmp_path),
        "--use_cpu",
        "--pad_to_multiple_of",
        "64",
        "--dataset_kwargs",
        '{"skip_prepare_dataset": true}',
    ]
    (config,) = HfArgumentParser(SFTConfig).parse_args_into_dataclasses(flags)
    assert config.pad_to_multiple_of == 64
    assert config.skip_prepare_dataset
    (config,) = HfArgumentParser(SFTConfig).parse_args_into_dataclasses([*flags[:3], "--pad_to_multiple_of", "none"])
    assert config.pad_to_multiple_of is None


def test_configs_are_copied_and_pickled(tmp_path):
    config = SFTConfig(output_dir=str(tmp_path), use_cpu=True, max_length=7)
    assert pickle.loads(pickle.dumps(config)).max_length == copy.deepcopy(config).max_length == 7
