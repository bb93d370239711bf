"""Options that a library below objects to are messages with exit code 2, not tracebacks."""

from __future__ import annotations

import pytest

from tests.tiny_tokenizer import tiny_tokenizer
from trellium.cli import main
from trellium.models.tiny import tiny_model


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--learning_rate", "nan"], "learning_rate must be a number from 0"),
        (["--per_device_train_batch_size", "0"], "per_device_train_batch_size must be a number from 1"),
        (["--seed", "-1"], "seed must be a number from 0"),
        (["--report_to", "nonsense"], "nonsense is not supported"),
        (["--output_dir", "a_file"], "a_file"),
        (["--dtype", "float12"], "float12"),
    ],
    ids=lambda value: value[0].lstrip("-") if isinstance(value, list) else "",
)
def test_a_refused_option_is_a_message(tmp_path, monkeypatch, capsys, options, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a_file").write_text("not a folder")
    (tmp_path / "rows.jsonl").write_text('{"text": "some text"}\n')
    tokenizer = tiny_tokenizer()
    tokenizer.save_pretrained("model")
    tiny_model(vocab_size=len(tokenizer)).save_pretrained("model")
    given = ["sft", "--dataset_name", "rows.jsonl", "--model_name_or_path", "model", "--use_cpu", *options]
    assert main(given) == 2
    error = capsys.readouterr().err
    assert message in error
    assert "Traceback" not in error
