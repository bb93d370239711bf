"""Options that cannot be are messages with exit code 2, not tracebacks; slips are told before torch is imported."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import TrainingArguments

from trellium import ModelConfig, SFTConfig
from trellium.cli import main
from trellium.cli.early_checks import option_names
from trellium.cli.sft import METHOD
from trellium.cli.training_options import option_parser
from trellium.errors import ConfigError
from trellium.trainers.config_file import read_config_file, yaml_value

REFUSED = {
    "learning_rate": (["--learning_rate", "nan"], "learning_rate must be a number from 0"),
    "batch of none": (["--per_device_train_batch_size", "0"], "per_device_train_batch_size must be a number from 1"),
    "seed": (["--seed", "-1"], "seed must be a number from 0"),
    "report_to": (["--report_to", "tensorbord"], "Did you mean 'tensorboard'?"),
    "output_dir": (["--output_dir", "a_file"], "a_file is a file"),
    "below a file": (["--output_dir", "a_file/out"], "a_file is a file"),
    "dtype": (["--dtype", "float12"], "dtype must be one of float32"),
    "neftune": (["--neftune_noise_alpha", "-1"], "neftune_noise_alpha must be a number from 0"),
    "no epochs": (["--num_train_epochs", "0"], "num_train_epochs is 0 and max_steps is not set"),
    "no dataset": (["--dataset_name", ""], "dataset_name is empty"),
    "attention": (["--attn_implementation", "flash_attention_9"], "flash_attention_9"),
    "optimizer": (["--optim", "adamw9"], "adamw9"),
    "scheduler": (["--lr_scheduler_type", "sometimes"], "sometimes"),
    "rank": (["--use_peft", "true", "--lora_r", "0"], "PEFT cannot put this adapter"),
    "optimizer without its package": (["--optim", "adamw_bnb_8bit"], "optim=adamw_bnb_8bit with these options"),
    "optimizer's option": (["--adam_beta1", "2"], "Invalid beta parameter"),
    "scheduler's option": (["--lr_scheduler_kwargs", '{"nonsense": 3}'], "'nonsense'"),
    "scheduler without its option": (["--lr_scheduler_type", "cosine_with_min_lr"], "min_lr"),
    "not distributed": (["--fsdp", "full_shard"], "only works in distributed training"),
    "best by nothing": (["--save_strategy", "best"], "metric_for_best_model"),
    "compiler": (["--torch_compile_backend", "inductr"], "Did you mean 'inductor'?"),
    "file of options": (["--accelerator_config", "nowhere.json"], "nowhere.json"),
    "checkpointing": (["--gradient_checkpointing_kwargs", '{"use_rentrant": true}'], "Did you mean 'use_reentrant'?"),
    "processes": (["--dataset_num_proc", "0"], "dataset_num_proc must be at least 1"),
    "never logged": (["--logging_steps", "-1"], "logging_steps must be above 0"),
    "never saved": (["--save_steps", "0"], "save_steps must be above 0"),
    "decay": (["--weight_decay", "nan"], "weight_decay must be a number from 0"),
    "clipping": (["--max_grad_norm", "-1"], "max_grad_norm must be a number from 0"),
    "model's option": (["--model_init_kwargs", '{"nonsense": 1}'], "model_init_kwargs"),
    "parameter": (
        ["--use_peft", "true", "--lora_target_parameters", "qproj"],
        "target_parameters: the model has nothing",
    ),
    "module to save": (["--use_peft", "true", "--lora_modules_to_save", "lm_haed"], "'lm_haed'"),
}


@pytest.fixture
def here(tmp_path, monkeypatch, saved_model) -> list[str]:
    """The options of a run that would work, in a folder with its rows and a file that is no folder."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a_file").write_text("not a folder")
    (tmp_path / "rows.jsonl").write_text('{"text": "some text"}\n')
    return ["sft", "--dataset_name", "rows.jsonl", "--model_name_or_path", str(saved_model), "--use_cpu", "true"]


@pytest.mark.parametrize("case", REFUSED)
def test_a_refused_option_is_a_message(here, capsys, case):
    options, message = REFUSED[case]
    assert main([*here, *options]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert "Traceback" not in error


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("max_steps: 3\nseed: 1\nmax_steps: 5\n", "c.yaml:3: the key 'max_steps' stands here and in line 1"),
        ("model_init_kwargs:\n  a: 1\n  a: 2\n", "c.yaml:3: the key 'a' stands here and in line 2"),
        ("max_steps: 3\nmax-steps: 5\n", "max_steps is given twice"),
        ("weight_decay: null\n", "weight_decay must have a value, got null"),
        ("dataset_name: null\n", "dataset_name is empty"),
        ("use_peft: perhaps\n", "use_peft"),
    ],
)
def test_a_config_file_that_cannot_be_is_told_by_line_or_key(here, capsys, content, says):
    Path("c.yaml").write_text(content)
    named = [] if "dataset_name" in content else here[1:3]
    assert main(["sft", "--config", "c.yaml", *named, *here[3:]]) == 2
    assert says in capsys.readouterr().err


@pytest.mark.parametrize("word", ["no", "No", "off", "yes", "on", "epoch"])
def test_words_of_a_config_file_stay_words_where_a_word_is_wanted(tmp_path, word):
    assert yaml_value(word) == word
    file = tmp_path / "c.yaml"
    file.write_text(
        f"report_to: none\nsave_strategy: no\nmodel_revision: {word}\nuse_cpu: true\noutput_dir: {tmp_path}\n"
    )
    *_, model, config = option_parser(SFTConfig, METHOD.defaults).parse_options(
        *read_config_file(["--config", str(file)])
    )
    assert model.model_revision == word
    assert config.save_strategy == "no"


@pytest.mark.parametrize(
    ("word", "means"), [("no", False), ("off", False), ("yes", True), ("on", True), ("true", True)]
)
def test_words_of_a_config_file_are_booleans_where_one_is_wanted(tmp_path, word, means):
    file = tmp_path / "c.yaml"
    file.write_text(f"use_cpu: true\noutput_dir: {tmp_path}\nuse_peft: {word}\n")
    *_, model, _ = option_parser(SFTConfig, METHOD.defaults).parse_options(*read_config_file(["--config", str(file)]))
    assert model.use_peft is means


def test_numbers_with_an_exponent_are_numbers():
    assert yaml_value("{a: 1e-3, b: 2E5, c: -1.5e2, d: 3}") == {"a": 1e-3, "b": 2e5, "c": -150.0, "d": 3}


def test_the_env_block_exports_values_as_written(tmp_path, monkeypatch):
    monkeypatch.setenv("TRELLIUM_TEST_A", "")
    monkeypatch.setenv("TRELLIUM_TEST_B", "")
    file = tmp_path / "c.yaml"
    file.write_text("env:\n  TRELLIUM_TEST_A: false\n  TRELLIUM_TEST_B: no\n")
    read_config_file(["--config", str(file)])
    assert (os.environ["TRELLIUM_TEST_A"], os.environ["TRELLIUM_TEST_B"]) == ("false", "no")


SLIPS = [
    ["--max_step", "3"],
    ["--dataset_name", "row.jsonl"],
    ["--model_name_or_path", "./nowhere"],
    ["--config", "c.yml"],
    ["--dtype", "fp32"],
    ["--output_dir", "a_file"],
    ["--resume_from_checkpoint", "checkpoint-9"],
]


def test_slips_are_told_before_anything_heavy_is_imported(here):
    code = (
        "import sys; from trellium.cli import main\n"
        f"for slip in {SLIPS}:\n"
        "    assert main(['sft', *slip]) == 2, slip\n"
        "print(sorted({'torch', 'transformers', 'datasets', 'peft'} & set(sys.modules)))"
    )
    source = str(Path(__file__).parents[2] / "src")
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ, "PYTHONPATH": source}
    )
    assert done.stdout == "[]\n", done.stderr
    assert len(done.stderr.splitlines()) == len(SLIPS)


def test_the_names_read_from_sources_are_those_of_the_parser():
    parsed = {action.dest for action in option_parser(SFTConfig, METHOD.defaults)._actions}
    assert parsed <= option_names(METHOD.sources)
    extra = option_names(METHOD.sources) - parsed - set(option_parser(SFTConfig, METHOD.defaults).not_yet)
    assert all(hasattr(TrainingArguments, name) for name in extra)


def test_an_option_of_trl_may_ask_for_what_happens_anyway():
    ModelConfig(load_in_8bit=False)
    with pytest.raises(ConfigError, match="not supported yet"):
        ModelConfig(load_in_8bit=True)
