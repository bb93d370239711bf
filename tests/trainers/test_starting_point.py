"""What a run starts from: chat templates by path."""

from __future__ import annotations

import pytest

from tests.tiny_tokenizer import CHATML, LLAMA3, tiny_tokenizer
from tests.trainers.tiny_runs import tiny_trainer
from trellium.errors import ConfigError


def test_a_chat_template_is_taken_from_a_file_or_from_another_model(tmp_path):
    (tmp_path / "chat.jinja").write_text(CHATML)
    trainer = tiny_trainer(tmp_path, chat_template_path=str(tmp_path / "chat.jinja"))
    assert trainer.processing_class.chat_template == CHATML
    other = tiny_tokenizer(LLAMA3)
    other.save_pretrained(tmp_path / "other")
    assert tiny_trainer(tmp_path, chat_template_path=str(tmp_path / "other")).processing_class.chat_template == LLAMA3


def test_a_chat_template_that_cannot_be_taken_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="there is no file"):
        tiny_trainer(tmp_path, chat_template_path=str(tmp_path / "none.jinja"))
    other = tiny_tokenizer("{{ messages }}<|new|>")
    other.add_special_tokens({"additional_special_tokens": ["<|new|>"]})
    other.save_pretrained(tmp_path / "other")
    with pytest.raises(ConfigError, match=r"writes <\|new\|>, which this tokenizer does not have"):
        tiny_trainer(tmp_path, chat_template_path=str(tmp_path / "other"))
    tiny_tokenizer().save_pretrained(tmp_path / "plain")
    with pytest.raises(ConfigError, match="has no chat template"):
        tiny_trainer(tmp_path, chat_template_path=str(tmp_path / "plain"))
