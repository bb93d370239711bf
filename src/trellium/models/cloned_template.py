"""Give a model and its tokenizer the chat template of another, with the tokens it writes."""

from __future__ import annotations

from typing import Any

from tokenizers import AddedToken
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from trellium.errors import ConfigError
from trellium.models.loading import load_tokenizer


def clone_chat_template(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    source_tokenizer_path: str,
    resize_to_multiple_of: int | None = 64,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase, list[int]]:
    """Let `model` speak the chat template of another tokenizer.

    The template, the added tokens that are missing, and the end token are taken from there; the embeddings grow by as many rows, drawn anew, which an adapter must train
    (`trainable_token_indices`, or `modules_to_save`). `chat_template_path` in a config takes a template whose tokens the model has already.

    Args:
        model, tokenizer: changed in place.
        source_tokenizer_path: a folder, or a name on the Hub.
        resize_to_multiple_of: round the number of embeddings up to this; the tokenizer gets `<extra_id_0>`… for those that are left over. None for no rounding.

    Returns:
        The model, the tokenizer, and the ids of the added tokens.

    Raises:
        ConfigError: the other tokenizer has no chat template.
        ModelError: there is no such tokenizer.
    """
    source = load_tokenizer(source_tokenizer_path)
    if not source.chat_template:
        raise ConfigError(
            f"the tokenizer of {source_tokenizer_path} has no chat template to clone. Name one of an instruct model."
        )
    tokenizer.chat_template = source.get_chat_template()
    known = tokenizer.get_vocab()
    added = [token for token in source.added_tokens_decoder.values() if str(token) not in known]
    tokenizer.add_tokens(added)
    tokenizer.eos_token = source.eos_token
    model.config.get_text_config().eos_token_id = tokenizer.eos_token_id
    if model.can_generate() and model.generation_config is not None:
        model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.resize_token_embeddings(len(tokenizer.get_vocab()), pad_to_multiple_of=resize_to_multiple_of)
    embeddings: Any = model.get_input_embeddings()
    left_over = embeddings.weight.shape[0] - len(tokenizer.get_vocab())
    fillers = (AddedToken(f"<extra_id_{index}>") for index in range(left_over + len(tokenizer.get_vocab())))
    while left_over > 0:
        filler = next(fillers)
        if tokenizer.add_tokens(filler):
            added.append(filler)
            left_over -= 1
    return model, tokenizer, tokenizer.convert_tokens_to_ids([str(token) for token in added])
