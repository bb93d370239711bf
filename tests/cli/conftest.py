"""A saved tiny model that the tests of this folder share."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.tiny_tokenizer import CHATML, tiny_tokenizer
from trellium.models.tiny import tiny_model


@pytest.fixture(scope="session")
def saved_model(tmp_path_factory) -> Path:
    """The folder of a tiny model with its tokenizer."""
    folder = tmp_path_factory.mktemp("model")
    tiny_model(vocab_size=400).save_pretrained(folder)
    tiny_tokenizer(CHATML).save_pretrained(folder)
    return folder
