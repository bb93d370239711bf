"""A model takes over the chat template of another, with the tokens it writes."""

from __future__ import annotations

import pytest
import torch

from tests.tiny_tokenizer import CHATML, LLAMA3, tiny_tokenizer
from trellium import clone_chat_template
from trellium.errors import ConfigError
from trellium.models.tiny import tiny_model


@pytest.fixture
def source(tmp_path):
    tokenizer = tiny_tokenizer(CHATML)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|new|>", "<|newer|>"]})
    tokenizer.save_pretrained(tmp_path / "source")
    return str(tmp_path / "source")


def target():
    tokenizer = tiny_tokenizer(LLAMA3)
    torch.manual_seed(0)
    return tiny_model(vocab_size=len(tokenizer)), tokenizer


@pytest.mark.parametrize("multiple", [64, None])
def test_template_tokens_and_end_come_over(source, multiple):
    model, tokenizer = target()
    before, kept = len(tokenizer), model.get_input_embeddings().weight.detach().clone()
    found, changed, added = clone_chat_template(model, tokenizer, source, resize_to_multiple_of=multiple)
    assert found is model
    assert changed is tokenizer
    assert (tokenizer.chat_template, tokenizer.eos_token) == (CHATML, "<|im_end|>")
    assert model.config.eos_token_id == model.generation_config.eos_token_id == tokenizer.eos_token_id
    rows = -(-(before + 2) // multiple) * multiple if multiple else before + 2
    assert model.get_input_embeddings().weight.shape[0] == len(tokenizer) == rows
    assert added == list(range(before, rows))
    assert tokenizer.convert_ids_to_tokens(added[:2]) == ["<|new|>", "<|newer|>"]
    assert torch.equal(model.get_input_embeddings().weight[:before], kept)


def test_a_tokenizer_without_a_template_is_refused(tmp_path):
    tiny_tokenizer().save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="no chat template to clone"):
        clone_chat_template(*target(), str(tmp_path))


@pytest.mark.peers
def test_what_comes_over_is_what_comes_over_with_trl(source):
    trl = pytest.importorskip("trl", reason="install the bench extra")
    results = [clone(*target(), source) for clone in (clone_chat_template, trl.clone_chat_template)]
    (ours, mine, added), (theirs, other, also) = results
    assert added == also
    assert mine.get_vocab() == other.get_vocab()
    assert ours.get_input_embeddings().weight.shape == theirs.get_input_embeddings().weight.shape
    assert mine.chat_template == other.chat_template
