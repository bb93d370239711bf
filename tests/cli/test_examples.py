"""The examples as their reader runs them, with a tiny model in the bundled one's place and fewer steps."""

from __future__ import annotations

import json
import runpy
from pathlib import Path

import pytest
from transformers import TrainingArguments

from trellium.cli import main
from trellium.models import loading

EXAMPLES = Path(__file__).parents[2] / "examples"
SCRIPTS = sorted(EXAMPLES.glob("*.py"))
CONFIGS = sorted(EXAMPLES.glob("*.yaml"))


@pytest.fixture
def tiny_bundled_model(saved_model, tmp_path, monkeypatch) -> None:
    """The bundled model is a tiny one, examples stand where they stand in the repository, and `runs` is somewhere else."""
    monkeypatch.setattr(loading, "bundled_model_folder", lambda: saved_model)
    (tmp_path / "examples").symlink_to(EXAMPLES)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")


def trained_adapters() -> list[Path]:
    return [path for path in Path("runs").rglob("adapter_config.json") if path.parent.parent.name == "runs"]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_a_script_trains_an_adapter(tiny_bundled_model, monkeypatch, script):
    prepare = TrainingArguments.__post_init__

    def shorten(self) -> None:
        self.max_steps = 2
        prepare(self)

    monkeypatch.setattr(TrainingArguments, "__post_init__", shorten)
    runpy.run_path(str(Path("examples") / script.name), run_name="__main__")
    assert len(trained_adapters()) == 1


@pytest.mark.parametrize("config", CONFIGS, ids=lambda path: path.name)
def test_a_config_trains_an_adapter_and_evaluates(tiny_bundled_model, monkeypatch, capsys, config):
    given = ["--max_steps", "2", "--eval_steps", "1", "--disable_tqdm", "true", "--per_device_train_batch_size", "2"]
    if config.stem == "sft":  # the bundled docstrings take a while to read
        monkeypatch.setattr("trellium.cli.training.load_rows", few_rows)
    assert main([config.stem, "--config", f"examples/{config.name}", *given]) == 0
    said = capsys.readouterr().out
    assert "held-out loss" in said
    assert len(trained_adapters()) == 1


def few_rows(*_, **__):
    from datasets import Dataset

    rows = Dataset.from_dict({"prompt": ["def f(x):"] * 8, "completion": ["    '''Return x.'''"] * 8})
    return "docstrings", rows, rows


def test_the_rows_of_the_examples_are_whole():
    pairs = [json.loads(line) for line in (EXAMPLES / "preferences.jsonl").read_text().splitlines()]
    judged = [json.loads(line) for line in (EXAMPLES / "labelled.jsonl").read_text().splitlines()]
    assert all(set(row) == {"prompt", "chosen", "rejected"} and row["chosen"] != row["rejected"] for row in pairs)
    assert all(set(row) == {"prompt", "completion", "label"} for row in judged)
    assert 0.3 < sum(row["label"] for row in judged) / len(judged) < 0.7
