"""`trellium dpo`, `kto` and `reward` as their user meets them: each trains, resumes, stops, explains itself and names what is wrong."""

from __future__ import annotations

import importlib
import json
import os
import signal
from pathlib import Path

import pytest
import torch
from transformers import TrainerCallback

from trellium.cli import main
from trellium.cli.early_checks import option_names
from trellium.cli.training_options import option_parser
from trellium.trainers.base import BaseTrainer

COMMANDS = ("dpo", "kto", "reward")
METRICS = {"dpo": "rewards/margins", "kto": "kl", "reward": "accuracy"}


def rows(command: str, count: int = 12) -> list[dict]:
    if command == "kto":
        return [
            {"prompt": f"Say {at}", "completion": " the fox" * (1 + at % 3), "label": at % 2 == 0}
            for at in range(count)
        ]
    return [{"prompt": f"Say {at}", "chosen": " the fox" * (1 + at % 3), "rejected": " a dog"} for at in range(count)]


def write(path: Path, lines: list[dict]) -> None:
    path.write_text("\n".join(map(json.dumps, lines)))


@pytest.fixture(params=COMMANDS)
def command(request, tmp_path, monkeypatch) -> str:
    """A command, in a folder with rows for it."""
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "rows.jsonl", rows(request.param))
    return request.param


def options(model: Path, **more: object) -> list[str]:
    given = {
        "model_name_or_path": model,
        "dataset_name": "rows.jsonl",
        "max_steps": 2,
        "output_dir": "out",
        "use_cpu": "true",
        "disable_tqdm": "true",
        "per_device_train_batch_size": 4,
        "logging_steps": 1,
        **more,
    }
    return [part for name, value in given.items() if value is not None for part in (f"--{name}", *str(value).split())]


def history(folder: Path) -> list[dict]:
    return json.loads((folder / "trainer_state.json").read_text())["log_history"]


@pytest.mark.parametrize("device", ["cpu", "neuron"])
def test_a_run_trains_saves_and_sums_up_what_the_method_measures(command, saved_model, capsys, device):
    if device == "neuron" and not hasattr(torch, "neuron"):
        pytest.skip("no neuron device")
    given = options(saved_model, use_cpu="true" if device == "cpu" else None, save_steps=2)
    assert main([command, *given]) == 0
    said = capsys.readouterr().out
    assert METRICS[command] in said
    assert ("NeuronCore" in said) == (device == "neuron")
    assert Path("out/model.safetensors").is_file()
    logged = history(Path("out/checkpoint-2"))
    assert [entry["step"] for entry in logged if METRICS[command] in entry] == [1, 2]


def test_an_adapter_is_trained_and_saved_with_what_the_method_needs(command, saved_model):
    assert main([command, *options(saved_model, use_peft="true", lora_r=2, learning_rate=1e-2)]) == 0
    adapter = json.loads(Path("out/adapter_config.json").read_text())
    assert adapter["r"] == 2
    assert adapter["task_type"] == ("SEQ_CLS" if command == "reward" else "CAUSAL_LM")
    assert ("score" in (adapter["modules_to_save"] or ())) == (command == "reward")
    assert not Path("out/model.safetensors").exists()


def test_a_config_file_gives_options_and_flags_win(command, saved_model):
    Path("c.yaml").write_text("\n".join(f"{name}: {value}" for name, value in {
        "model_name_or_path": saved_model, "dataset_name": "rows.jsonl", "use_cpu": True, "max-steps": 7, "learning_rate": "1e-3",
        "per_device_train_batch_size": 4, "disable_tqdm": True, "output_dir": "out", "save_steps": 1,
    }.items()))  # fmt: skip
    assert main([command, "--config", "c.yaml", "--max_steps", "1"]) == 0
    assert [path.name for path in Path("out").glob("checkpoint-*")] == ["checkpoint-1"]


def test_a_run_that_is_resumed_ends_where_one_that_was_not_does(command, saved_model):
    same = {"save_steps": 2, "learning_rate": 1e-2, "lr_scheduler_type": "constant"}
    assert main([command, *options(saved_model, max_steps=4, output_dir="whole", **same)]) == 0
    assert main([command, *options(saved_model, max_steps=2, **same)]) == 0
    assert main([command, *options(saved_model, max_steps=4, resume_from_checkpoint="last", **same)]) == 0
    resumed, whole = (history(Path(folder) / "checkpoint-4") for folder in ("out", "whole"))
    losses = [[entry["loss"] for entry in run if "loss" in entry] for run in (resumed, whole)]
    assert len(losses[0]) == 4
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


class Press(TrainerCallback):
    """Presses Ctrl-C in the third step."""

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == 2:
            signal.raise_signal(signal.SIGINT)


def test_ctrl_c_ends_the_run_and_gives_the_command_that_goes_on(command, saved_model, capsys, monkeypatch):
    begins = BaseTrainer.run_begins
    monkeypatch.setattr(BaseTrainer, "run_begins", lambda self: (self.add_callback(Press()), begins(self))[1])
    assert main([command, *options(saved_model, max_steps=9, save_steps=1)]) == 130
    said = capsys.readouterr().out
    assert "Stopped after step 3 of 9" in said
    assert f"trellium {command} " in said
    assert f"--resume_from_checkpoint {os.path.join('out', 'checkpoint-3')}" in said


def test_the_help_begins_with_what_the_method_is_and_its_own_options(command, capsys):
    assert main([command, "--help"]) == 0
    said = capsys.readouterr().out
    own = "\n  --center_rewards_coefficient" if command == "reward" else "\n  --beta"
    assert said.index("A row is") < said.index("examples:") < said.index("the method:") < said.index(own)
    assert said.index(own) < said.index("the run:") < said.index("--learning_rate") < said.index("the data:")
    assert "--deepspeed" not in said


def test_the_names_checked_early_are_those_of_the_parser(command):
    method = importlib.import_module(f"trellium.cli.{command}").METHOD
    parser = option_parser(method.load("config"), method.defaults)
    assert {action.dest for action in parser._actions} <= option_names(method.sources)


def bad_row(command: str, **values: object) -> list[dict]:
    """Three rows, of which the second has these values."""
    good = [{**row, "margin": 0.5} if "margin" in values else row for row in rows(command, 3)]
    return [good[0], {**good[1], **values}, good[2]]


BAD_ROWS = {
    "dpo": [({"chosen": 7}, "chosen"), ({"rejected": None}, "rejected"), ({"prompt": ["a"]}, "prompt")],
    "kto": [({"completion": 7}, "completion"), ({"label": "good"}, "label"), ({"prompt": ["a"]}, "prompt")],
    "reward": [({"chosen": 7}, "chosen"), ({"rejected": None}, "rejected"), ({"margin": "much"}, "margin")],
}


@pytest.mark.parametrize("case", range(3))
def test_a_row_that_is_wrong_is_told_by_file_and_line(command, saved_model, capsys, case):
    values, named = BAD_ROWS[command][case]
    write(Path("rows.jsonl"), bad_row(command, **values))
    assert main([command, *options(saved_model)]) == 2
    said = capsys.readouterr().err
    assert "rows.jsonl:2" in said
    assert named in said
    assert "Traceback" not in said


def test_rows_of_another_method_are_told_with_the_columns_that_are_needed(command, saved_model, capsys):
    Path("rows.jsonl").write_text('{"text": "the fox"}')
    assert main([command, *options(saved_model)]) == 2
    said = capsys.readouterr().err
    assert "text" in said
    assert ("label" if command == "kto" else "rejected") in said


BAD_OPTIONS = {
    "no data": ({"dataset_name": None}, "no rows to train on"),
    "missing data": ({"dataset_name": "row.jsonl"}, "In that folder there is rows.jsonl"),
    "missing model": ({"model_name_or_path": "./nowhere"}, "no folder ./nowhere"),
    "unknown option": ({"max_lenght": 3}, "Did you mean 'max_length'"),
    "option of SFT": ({"packing": "true"}, "'packing'"),
    "wrong checkpoint": ({"resume_from_checkpoint": "out/checkpoint-9"}, "is not a checkpoint"),
    "adapter of another kind": ({"lora_task_type": "SEQ_2_SEQ_LM"}, "lora_task_type must be"),
    "held-out split": ({"eval_strategy": "steps"}, "'test'"),
}


@pytest.mark.parametrize("case", BAD_OPTIONS)
def test_options_that_cannot_be_are_told_with_the_way_out(command, saved_model, capsys, case):
    more, says = BAD_OPTIONS[case]
    assert main([command, *options(saved_model, **more)]) == 2
    said = capsys.readouterr().err
    assert says in said
    assert "Traceback" not in said


@pytest.mark.parametrize(
    ("command", "more", "says"),
    [
        ("dpo", {"loss_type": "sigmod"}, "sigmod"),
        ("dpo", {"loss_type": "sigmoid sft", "loss_weights": "1.0"}, "loss_weights"),
        ("dpo", {"beta": "0"}, "beta must be above 0"),
        ("kto", {"loss_type": "sigmoid"}, "apo_zero_unpaired"),
        ("kto", {"desirable_weight": "-1"}, "desirable_weight"),
        ("reward", {"center_rewards_coefficient": "-1"}, "center_rewards_coefficient must be"),
    ],
    indirect=["command"],
)
def test_options_of_a_method_that_cannot_be_are_told(command, saved_model, capsys, more, says):
    assert main([command, *options(saved_model, **more)]) == 2
    assert says in capsys.readouterr().err


@pytest.mark.parametrize("command", ["dpo"], indirect=True)
def test_several_losses_are_added_by_their_weights(command, saved_model):
    first = {}
    for name, weights in {"sigmoid": None, "sft": None, "sigmoid sft": "1.0 0.5"}.items():
        given = options(saved_model, loss_type=name, loss_weights=weights, max_steps=1, save_steps=1, output_dir="out")
        assert main([command, *given]) == 0
        first[name] = history(Path("out/checkpoint-1"))[0]["loss"]
    assert first["sigmoid sft"] == pytest.approx(first["sigmoid"] + 0.5 * first["sft"], rel=1e-3)


@pytest.mark.parametrize("command", ["dpo", "kto"], indirect=True)
def test_a_reference_that_is_asked_before_the_run_gives_the_same_losses(command, saved_model):
    losses = []
    for before in ("false", "true"):
        given = options(saved_model, precompute_ref_log_probs=before, learning_rate=1e-2, save_steps=2)
        assert main([command, *given]) == 0
        losses.append([entry["loss"] for entry in history(Path("out/checkpoint-2")) if "loss" in entry])
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
