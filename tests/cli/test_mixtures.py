"""A training command on a mixture of datasets."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from trellium.cli import main


@pytest.fixture
def here(tmp_path, monkeypatch) -> Path:
    """A folder with `a.jsonl` and `b.jsonl` of 8 and 20 rows."""
    monkeypatch.chdir(tmp_path)
    for name, count in (("a", 8), ("b", 20)):
        rows = [{"text": f"{name} the quick brown fox {at}"} for at in range(count)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return tmp_path


COMMAND = ["--max_steps", "1", "--use_cpu", "true", "--disable_tqdm", "true", "--output_dir", "out"]


@pytest.fixture
def command(here, saved_model) -> list[str]:
    return ["sft", "--model_name_or_path", str(saved_model), *COMMAND]


def test_a_command_trains_on_a_mixture_and_evaluates_what_it_holds_out(here, command, capsys):
    (here / "c.yaml").write_text(
        "datasets:\n  - {path: a.jsonl, fraction: 0.5}\n  - {path: b.jsonl, fraction: 0.5}\ntest_split_size: 4\neval_strategy: steps\neval_steps: 1\n"
    )
    assert main([*command, "--config", "c.yaml"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "a.jsonl + b.jsonl, 12 rows" in said
    assert "held-out loss" in said


BAD_COMMANDS = {
    "two ways": (["--dataset_name", "a.jsonl", "--datasets", "b.jsonl"], "give one of the two"),
    "missing": (["--datasets", "c.jsonl"], "c.jsonl: no such file"),
    "nothing held out": (["--datasets", "a.jsonl", "--eval_strategy", "steps"], "Set test_split_size"),
    "from a file": (["--config", "c.yaml"], "c.yaml: datasets: DatasetConfig has no option 'fractoin'"),
}


@pytest.mark.parametrize("case", BAD_COMMANDS)
def test_a_command_s_mixture_that_cannot_be_is_told(here, command, capsys, case):
    (here / "c.yaml").write_text("datasets:\n  - {path: a.jsonl, fractoin: 0.5}\n")
    flags, says = BAD_COMMANDS[case]
    assert main([*command, *flags]) == 2
    said = capsys.readouterr().err
    assert says in said
    assert "Traceback" not in said
