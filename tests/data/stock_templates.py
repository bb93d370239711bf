"""The chat templates that TRL brings, with tokenizers that know their special tokens."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerFast

from tests.tiny_tokenizer import tiny_tokenizer


def stock_tokenizers() -> Iterator[tuple[Path, PreTrainedTokenizerFast]]:
    """Each template that TRL brings, but the marked ones, with a tokenizer that knows its special tokens."""
    trl = pytest.importorskip("trl")
    for path in sorted((Path(trl.__file__).parent / "chat_templates").glob("*.jinja")):
        if path.stem.endswith("_training"):
            continue
        template = path.read_text()
        tokenizer = tiny_tokenizer(template)
        written = {
            token
            for token in re.findall(r"<[|｜]?[A-Za-z_▁]+[|｜]?>", template)
            if "|" in token or "｜" in token or "turn" in token
        }
        tokenizer.add_special_tokens({"bos_token": "<s>", "additional_special_tokens": sorted(written)})
        yield path, tokenizer
