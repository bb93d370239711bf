"""The package's names are TRL's, and a script of TRL's that changes its import is told about those that are not here."""

from __future__ import annotations

import importlib.util
import subprocess
import sys

import pytest

import trellium
from trellium.errors import ConfigError

NAMES_OF_TRL = [
    "BEMACallback",
    "DPOConfig",
    "DPOTrainer",
    "DatasetMixtureConfig",
    "DistillationConfig",
    "DistillationTrainer",
    "GRPOConfig",
    "GRPOTrainer",
    "KTOConfig",
    "KTOTrainer",
    "LogCompletionsCallback",
    "ModelConfig",
    "RLOOConfig",
    "RLOOTrainer",
    "RewardConfig",
    "RewardTrainer",
    "RichProgressCallback",
    "SFTConfig",
    "SFTTrainer",
    "ScriptArguments",
    "SyncRefModelCallback",
    "TrlParser",
    "WeaveCallback",
    "add_response_schema",
    "apply_chat_template",
    "clone_chat_template",
    "create_reference_model",
    "extract_prompt",
    "get_dataset",
    "get_peft_config",
    "get_quantization_config",
    "get_training_chat_template",
    "init_zero_verbose",
    "is_conversational",
    "is_conversational_from_value",
    "maybe_apply_chat_template",
    "maybe_convert_to_chatml",
    "maybe_extract_prompt",
    "maybe_unpair_preference_dataset",
    "pack_dataset",
    "prepare_multimodal_messages",
    "supports_tool_calling",
    "unpair_preference_dataset",
]
"""The public names of TRL 1.16."""


def test_every_public_name_is_there():
    assert [name for name in trellium.__all__ if getattr(trellium, name, None) is None] == []
    assert set(trellium.__all__) <= set(dir(trellium))


def test_a_name_of_trl_that_is_not_here_says_what_to_use():
    with pytest.raises(ImportError, match=r"trellium has no GRPOTrainer\. It is not here yet: take it from trl"):
        from trellium import GRPOTrainer  # noqa: F401
    with pytest.raises(ImportError, match="Quantized base models are not supported yet"):
        from trellium import get_quantization_config  # noqa: F401
    with pytest.raises(ImportError, match="set sync_ref_model=True in DPOConfig or KTOConfig"):
        from trellium import SyncRefModelCallback  # noqa: F401


def test_a_name_of_nobody_s_is_an_attribute_error():
    assert not hasattr(trellium, "Nonsense")
    with pytest.raises(AttributeError, match="'Nonsense'"):
        trellium.Nonsense  # noqa: B018


def test_the_package_is_imported_without_torch():
    code = "import sys, trellium; print(sorted({'torch', 'yaml', 'transformers'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "[]\n"


@pytest.mark.parametrize("name", NAMES_OF_TRL)
def test_a_public_name_of_trl_is_here_or_says_what_to_use(name):
    if name in trellium.__all__:
        assert getattr(trellium, name) is not None
        return
    with pytest.raises(ImportError, match=rf"trellium has no {name}\. \S+ .{{20,}}"):
        getattr(trellium, name)


@pytest.mark.peers
@pytest.mark.skipif(not importlib.util.find_spec("trl"), reason="needs the bench extra")
def test_the_list_of_trls_names_is_trls():
    import trl

    assert {name for names in trl._import_structure.values() for name in names} == set(NAMES_OF_TRL)


def test_a_script_of_a_reward_model_asks_for_the_adapter_of_one():
    model = trellium.ModelConfig(use_peft=True, lora_task_type="SEQ_CLS")
    assert trellium.get_peft_config(model).task_type == "SEQ_CLS"
    with pytest.raises(ConfigError, match="lora_task_type must be one of CAUSAL_LM, SEQ_CLS"):
        trellium.ModelConfig(lora_task_type="TOKEN_CLS")


def script_of_trl(arguments):
    """The beginning of every training script of TRL's."""
    from trellium import ModelConfig, ScriptArguments, SFTConfig, TrlParser, get_peft_config

    script, training, model = TrlParser((ScriptArguments, SFTConfig, ModelConfig)).parse_args_and_config(arguments)
    return script, training, model, get_peft_config(model)


def test_a_script_of_trl_reads_its_options_from_flags_and_a_file(tmp_path, monkeypatch):
    monkeypatch.setenv("TRELLIUM_TEST", "")
    file = tmp_path / "c.yaml"
    file.write_text(
        f"dataset_name: rows\nlora_r: 4\nmax_steps: 3\nuse_cpu: true\noutput_dir: {tmp_path}\nenv: {{TRELLIUM_TEST: a}}\n"
    )
    script, training, model, peft = script_of_trl(["--config", str(file), "--max_steps", "5", "--use_peft"])
    assert (script.dataset_name, training.max_steps, model.lora_r, peft.r) == ("rows", 5, 4, 4)
    assert (model.dtype, script.dataset_train_split) == ("float32", "train")
    *_, without = script_of_trl(["--output_dir", str(tmp_path), "--use_cpu"])
    assert without is None


def test_what_a_script_cannot_be_told_is_an_error_unless_it_wants_the_rest(tmp_path):
    from trellium import ModelConfig, ScriptArguments, TrlParser

    with pytest.raises(ConfigError, match="Did you mean 'lora_r'"):
        TrlParser((ScriptArguments, ModelConfig)).parse_args_and_config(["--lora_rr", "3"])
    *_, rest = TrlParser(ModelConfig).parse_args_and_config(["--mine", "3"], return_remaining_strings=True)
    assert rest == ["--mine", "3"]
    (model,) = TrlParser(ModelConfig).parse_args_and_config(["--mine", "3"], fail_with_unknown_args=False)
    assert model.lora_r == 16


@pytest.mark.parametrize("options", [{"load_in_4bit": True}, {"bnb_4bit_quant_type": "fp4"}])
def test_a_model_option_of_trl_that_is_not_here_is_refused_by_name(options):
    with pytest.raises(ConfigError, match=f"{next(iter(options))}=.* is not supported yet"):
        trellium.ModelConfig(**options)


def test_model_options_of_trl_may_ask_for_nothing_more():
    model = trellium.ModelConfig(load_in_4bit=False, lora_task_type="CAUSAL_LM", dtype="bfloat16")
    assert model.dtype == "bfloat16"
    with pytest.raises(ConfigError, match="dtype must be one of"):
        trellium.ModelConfig(dtype="int8")
