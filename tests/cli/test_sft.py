"""`trellium sft` as its user meets it: configs, help, bad input, Ctrl-C."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from trellium.cli import main
from trellium.trainers.config_file import read_config_file


@pytest.fixture
def here(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    rows = [{"text": "the quick brown fox " * (1 + i % 3)} for i in range(12)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return tmp_path


def options(model: Path, **more: object) -> list[str]:
    given = {
        "model_name_or_path": model,
        "dataset_name": "rows.jsonl",
        "max_steps": 2,
        "output_dir": "out",
        "use_cpu": "true",
        "disable_tqdm": "true",
        "per_device_train_batch_size": 2,
        **more,
    }
    return [part for name, value in given.items() for part in (f"--{name}", str(value))]


def test_a_run_trains_saves_and_says_so(here, saved_model, capsys):
    assert main(["sft", *options(saved_model, logging_steps=1)]) == 0
    assert (here / "out" / "model.safetensors").is_file()
    assert "Run summary" in capsys.readouterr().out


def test_a_config_file_gives_options_and_flags_win(here, saved_model, capsys):
    (here / "c.yaml").write_text(
        f"model_name_or_path: {saved_model}\ndataset_name: rows.jsonl\nuse_cpu: true\nmax-steps: 5\nlearning_rate: 1e-3\n"
        "max_length: null\nuse_peft: true\nlora_target_modules: [q_proj, v_proj]\nlora_r: 2\noutput_dir: out\npacking: false\n"
        "model_init_kwargs: {dtype: float32}\ndisable_tqdm: true\n"
    )
    assert main(["sft", "--config", "c.yaml", "--max_steps", "1", "--logging_steps=1"]) == 0
    assert "1" in capsys.readouterr().out
    adapter = json.loads((here / "out" / "adapter_config.json").read_text())
    assert adapter["r"] == 2
    assert sorted(adapter["target_modules"]) == ["q_proj", "v_proj"]


def test_the_env_block_is_exported_before_torch_is_imported(here):
    (here / "c.yaml").write_text("env:\n  TRELLIUM_TEST_VARIABLE: 7\nmax_steps: 3\n")
    code = (
        "import sys, os; from trellium.trainers.config_file import read_config_file\n"
        "rest, keys, path = read_config_file(['--config', 'c.yaml', '--seed', '1'])\n"
        "assert os.environ['TRELLIUM_TEST_VARIABLE'] == '7' and 'torch' not in sys.modules\n"
        "assert (rest, keys, path) == (['--seed', '1'], {'max_steps': 3}, 'c.yaml')"
    )
    source = str(Path(__file__).parents[2] / "src")
    subprocess.run([sys.executable, "-c", code], check=True, env={**os.environ, "PYTHONPATH": source})


def test_evaluation_reads_the_test_split_of_a_folder(here, saved_model, capsys):
    folder = here / "data"
    folder.mkdir()
    for name in ("train", "test"):
        (folder / f"{name}.jsonl").write_text((here / "rows.jsonl").read_text())
    assert main(["sft", *options(saved_model, dataset_name="data", eval_strategy="steps", eval_steps=1)]) == 0
    assert "held-out loss" in capsys.readouterr().out


def test_resuming_from_the_last_checkpoint_goes_on(here, saved_model):
    assert main(["sft", *options(saved_model, save_steps=1, max_steps=1)]) == 0
    assert main(["sft", *options(saved_model, save_steps=1, max_steps=2, resume_from_checkpoint="last")]) == 0
    state = json.loads((here / "out" / "checkpoint-2" / "trainer_state.json").read_text())
    assert state["global_step"] == 2


def test_help_teaches_and_lists_ours_first(capsys):
    assert main(["sft", "--help"]) == 0
    text = capsys.readouterr().out
    assert text.index("examples:") < text.index("the method:") < text.index("the run:")
    assert "--completion_only_loss" in text
    assert "--deepspeed" not in text
    assert main(["sft", "--help-all"]) == 0
    assert "--deepspeed" in capsys.readouterr().out


def conversation(*roles: str) -> str:
    return json.dumps({"messages": [{"role": role, "content": "words"} for role in roles]})


BAD_DATA = {
    "bad JSON": ('{"text": "a"}\n{"text": "b"\n', {}, ["rows.jsonl:2"]),
    "wrong role": (conversation("user", "wizard"), {}, ["rows.jsonl:1", "wizard"]),
    "no role": ('{"messages": [{"content": "a"}]}', {}, ["rows.jsonl:1", "role"]),
    "no rows": ("", {}, ["rows.jsonl"]),
    "no known column": ('{"words": "a b c"}', {}, ["words", "text"]),
    "all masked": ('{"input_ids": [5, 6], "labels": [-100, -100]}', {}, ["rows.jsonl:1", "masked"]),
    "completion beyond max_length": (
        json.dumps({"prompt": "a long prompt " * 9, "completion": "answer"}),
        {"max_length": 4},
        ["max_length", "rows.jsonl:1"],
    ),
}


@pytest.mark.parametrize("case", BAD_DATA)
def test_bad_data_is_told_by_file_and_line_without_a_traceback(here, saved_model, capsys, case):
    content, more, says = BAD_DATA[case]
    (here / "rows.jsonl").write_text(content)
    assert main(["sft", *options(saved_model, **more)]) == 2
    told = capsys.readouterr().err
    assert "Traceback" not in told
    for part in says:
        assert part in told


def test_rows_longer_than_max_length_are_cut_and_counted(here, saved_model, caplog):
    assert main(["sft", *options(saved_model, max_length=8, max_steps=1)]) == 0
    assert "truncated" in caplog.text


def test_a_part_of_a_file_is_read_as_a_stream(here, saved_model, capsys):
    streamed = options(saved_model, dataset_streaming="true", dataset_train_split="train[:2]")
    assert main(["sft", *streamed, "--max_steps", "1"]) == 0
    assert main(["sft", *options(saved_model, dataset_train_split="train[:y]")]) == 2
    assert "is no part of its rows" in capsys.readouterr().err


BAD_OPTIONS = {
    "missing data": ({"dataset_name": "row.jsonl"}, ["row.jsonl: no such file", "rows.jsonl"]),
    "missing model": ({"model_name_or_path": "./nowhere"}, ["no folder ./nowhere", "smollm2-135m-instruct"]),
    "unknown option": ({"max_step": 3}, ["'max_step'", "'max_steps'"]),
    "option of TRL's": ({"ignore_bias_buffers": "true"}, ["ignore_bias_buffers", "not supported"]),
    "quantized base": ({"load_in_4bit": "true"}, ["load_in_4bit", "bfloat16"]),
    "not a number": ({"max_length": "abc"}, ["max_length", "abc"]),
    "bad loss": ({"loss_type": "l2"}, ["nll, dft"]),
    "no config": ({"config": "no.yaml"}, ["no.yaml"]),
    "nothing to resume": ({"resume_from_checkpoint": "last", "output_dir": "empty"}, ["nothing to resume from"]),
    "wrong checkpoint": ({"resume_from_checkpoint": "out/checkpoint-9"}, ["out/checkpoint-9 is not a checkpoint"]),
    "held-out split": ({"eval_strategy": "steps"}, ["'test'"]),
    "metric without evaluation": ({"load_best_model_at_end": "true"}, ["load_best_model_at_end"]),
}


@pytest.mark.parametrize("case", BAD_OPTIONS)
def test_bad_options_are_told_with_the_way_out_and_without_a_traceback(here, saved_model, capsys, case):
    more, says = BAD_OPTIONS[case]
    assert main(["sft", *options(saved_model, **more)]) == 2
    told = capsys.readouterr().err
    assert "Traceback" not in told
    for part in says:
        assert part in told


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("max_step: 3", "c.yaml: there is no option 'max_step'. Did you mean 'max_steps'?"),
        ("load_in_8bit: true", "c.yaml: load_in_8bit: True is not supported"),
        ("max_steps: [", "c.yaml:"),
        ("- max_steps", "mapping"),
        ("env: [A]", "env must map"),
        ("max_steps: many", "max_steps"),
    ],
)
def test_bad_config_files_are_told_by_key(here, saved_model, capsys, content, says):
    (here / "c.yaml").write_text(content)
    assert main(["sft", "--config", "c.yaml", *options(saved_model)[:2]]) == 2
    assert says in capsys.readouterr().err


def test_debug_shows_where_an_error_came_from(here, saved_model):
    with pytest.raises(Exception, match="no such file"):
        main(["sft", "--debug", *options(saved_model, dataset_name="row.jsonl")])


def test_config_without_a_file_is_an_error():
    from trellium.errors import ConfigError

    with pytest.raises(ConfigError, match="needs a YAML file"):
        read_config_file(["--config", "--max_steps", "3"])
