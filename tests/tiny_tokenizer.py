"""A byte-level tokenizer of a few hundred tokens, trained in a moment, and the gist of four families of chat templates.

The templates are written for the tests, after what the families write for plain conversations; none is a copy.
"""

from __future__ import annotations

import functools

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

CHATML = (
    "{% for message in messages %}"
    "{% if loop.first and message.role != 'system' %}<|im_start|>system\nYou are helpful.<|im_end|>\n{% endif %}"
    "<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""As SmolLM2's and Qwen2.5's: a default system prompt, a line break after the end of turn."""

CHATML_MARKED = CHATML.replace(
    "<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n",
    "{% if message.role == 'assistant' %}<|im_start|>assistant\n{% generation %}{{ message.content }}<|im_end|>{% endgeneration %}{{ '\n' }}"
    "{% else %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endif %}",
)
"""The same text, with the marks by which transformers knows what the assistant wrote."""

LLAMA3 = (
    "{% for message in messages %}"
    "{% if loop.first %}{{ bos_token }}{% endif %}"
    "<|start_header_id|>{{ message.role }}<|end_header_id|>\n\n{{ message.content | trim }}<|eot_id|>"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
"""Trimmed contents, no line break after the end of turn."""

GEMMA = (
    "{{ bos_token }}"
    "{% if messages and messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for message in messages %}"
    "{% if (message.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
    "<start_of_turn>{{ 'model' if message.role == 'assistant' else message.role }}\n{{ message.content | trim }}<end_of_turn>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
"""Another name for the assistant, no system prompt, roles that must alternate."""

MISTRAL = (
    "{{ bos_token }}"
    "{% set ns = namespace(system='') %}"
    "{% set users = messages | selectattr('role', 'equalto', 'user') | list %}"
    "{% for message in messages %}"
    "{% if message.role == 'system' %}{% set ns.system = message.content + '\n\n' %}"
    "{% elif message.role == 'user' %}[INST] {{ (ns.system if message == users[-1] else '') + message.content }} [/INST]"
    "{% else %} {{ message.content }}{{ eos_token }}{% endif %}"
    "{% endfor %}"
)
"""No generation prompt; the system prompt moves to the last user message, so a conversation's beginning is rewritten as it grows."""

QWEN3 = (
    "{% set ns = namespace(last=-1) %}"
    "{% for message in messages %}{% if message.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{% for message in messages %}"
    "{% if message.role == 'assistant' %}"
    "{% set answer = message.content.split('</think>')[-1].lstrip('\n') %}"
    "{% set thought = message.content.split('</think>')[0].split('<think>')[-1].strip('\n') if '</think>' in message.content else '' %}"
    "<|im_start|>assistant\n"
    "{% if loop.index0 > ns.last %}<think>\n{{ thought }}\n</think>\n\n{% endif %}{{ answer }}<|im_end|>\n"
    "{% else %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
"""Reasoning, which is taken out of every turn before the last question: history is rewritten."""

SPECIAL_TOKENS = [
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|begin_of_text|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eot_id|>",
    "<bos>",
    "<start_of_turn>",
    "<end_of_turn>",
    "<s>",
    "</s>",
]
_ENDS = {
    CHATML: "<|im_end|>",
    CHATML_MARKED: "<|im_end|>",
    QWEN3: "<|im_end|>",
    LLAMA3: "<|eot_id|>",
    GEMMA: "<end_of_turn>",
    MISTRAL: "</s>",
}
_BEGINS = {LLAMA3: "<|begin_of_text|>", GEMMA: "<bos>", MISTRAL: "<s>"}
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
"""Words, numbers, signs and line breaks, split as the tokenizers of the last years do."""
_CORPUS = [
    "The quick brown fox jumps over the lazy dog. Return the value of the argument, or raise an error if there is none.",
    "user assistant system model hello there how are you today I am fine thank you and what about the weather",
    "def function(self, name, value=None): return self.name == value\n\n    # a comment with    spaces\n\n\n",
]


@functools.cache
def _backend(adds_bos: bool, adds_eos: bool) -> str:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_WORDS), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_CORPUS, trainer)
    if adds_bos or adds_eos:
        single = ("<s> " if adds_bos else "") + "$A" + (" </s>" if adds_eos else "")
        tokenizer.post_processor = processors.TemplateProcessing(
            single=single, special_tokens=[(token, tokenizer.token_to_id(token)) for token in ("<s>", "</s>")]
        )
    return tokenizer.to_str()


def tiny_tokenizer(
    chat_template: str | None = None, *, adds_bos: bool = False, adds_eos: bool = False
) -> PreTrainedTokenizerFast:
    """A fresh tokenizer of about 400 tokens that knows every byte.

    Args:
        chat_template: of the tokenizer; for the ones above, the fitting begin and end tokens come with it.
        adds_bos: it puts `<s>` before a text, as Llama's does.
        adds_eos: it puts `</s>` after a text.
    """
    plain = adds_bos or adds_eos
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(_backend(adds_bos, adds_eos)),
        eos_token="</s>" if plain else _ENDS.get(chat_template or "", "<|endoftext|>"),
        bos_token="<s>" if plain else _BEGINS.get(chat_template or ""),
        pad_token="<|endoftext|>",
        additional_special_tokens=SPECIAL_TOKENS,
    )
    tokenizer.chat_template = chat_template
    return tokenizer
