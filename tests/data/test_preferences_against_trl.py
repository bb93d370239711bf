"""What TRL 1.16 feeds its models of preferences and judged answers, we feed them: the tokens of every sequence, and which belong to completions."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from datasets import Dataset

from tests.tiny_tokenizer import CHATML, LLAMA3, QWEN3, tiny_tokenizer
from trellium.data.preferences import PreferenceOptions, prepare_preferences
from trellium.data.unpaired import UnpairedOptions, prepare_unpaired

pytestmark = pytest.mark.peers

USER = {"role": "user", "content": "hi there"}
GOOD, BAD = {"role": "assistant", "content": "hello you"}, {"role": "assistant", "content": "what"}
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
PAIRS = {
    "plain": [
        {"prompt": "def function(self):", "chosen": " return name", "rejected": " raise an error"},
        {"prompt": "the quick brown fox jumps over the lazy dog", "chosen": " yes", "rejected": " no"},
        {"prompt": "value ", "chosen": "of it", "rejected": "name"},
    ],
    "plain, implicit": [
        {"chosen": "the quick brown fox", "rejected": "the quick lazy dog"},
        {"chosen": "return the value", "rejected": "return the name"},
    ],
    "messages": [
        {"prompt": [USER], "chosen": [GOOD], "rejected": [BAD]},
        {"prompt": [USER, GOOD, USER], "chosen": [BAD], "rejected": [GOOD, USER, BAD]},
    ],
    "messages, implicit": [
        {"chosen": [USER, GOOD], "rejected": [USER, BAD]},
        {"chosen": [USER, GOOD, USER, GOOD], "rejected": [USER, GOOD, USER, BAD]},
    ],
    "messages with tools and options": [
        {
            "prompt": [USER],
            "chosen": [GOOD],
            "rejected": [BAD],
            "tools": [TOOL],
            "chat_template_kwargs": {"enable_thinking": False},
        }
    ],
}
TOKENIZERS = {
    "plain": [{}, {"adds_bos": True}],
    "messages": [{"chat_template": template} for template in (CHATML, LLAMA3, QWEN3)],
}


def prepared_by(trainer, dataset, config, tokenizer, **fields):
    owner = SimpleNamespace(_tokenizer=tokenizer, **fields)
    return trainer._prepare_dataset(owner, dataset, tokenizer, config, "train")


def arguments(tmp_path, **options):
    return {"output_dir": str(tmp_path), "use_cpu": True, "bf16": False, "report_to": "none", **options}


def collated(batch, prefix=""):
    """The sequences of a batch without their padding, each with the mask of its completion."""
    lengths = batch[f"{prefix}attention_mask"].sum(1).tolist()
    columns = (batch[f"{prefix}input_ids"].tolist(), batch[f"{prefix}completion_mask"].tolist())
    return [(ids[:n], mask[:n]) for ids, mask, n in zip(*columns, lengths, strict=True)]


def masked(prompt, completion):
    return prompt + completion, [0] * len(prompt) + [1] * len(completion)


@pytest.mark.parametrize(
    ("max_length", "mode"), [(None, "keep_start"), (14, "keep_start"), (9, "keep_start"), (100, "keep_end")]
)
@pytest.mark.parametrize("kind", PAIRS)
def test_a_pairs_sequences_and_completions_are_those_of_trls_dpo(kind, max_length, mode, tmp_path):
    from trl import DPOConfig, DPOTrainer
    from trl.trainer.dpo_trainer import DataCollatorForPreference

    config = DPOConfig(**arguments(tmp_path, max_length=max_length, truncation_mode=mode))
    for special in TOKENIZERS[kind.split(",")[0].split(" ")[0]]:
        tokenizer, dataset = tiny_tokenizer(**special), Dataset.from_list(PAIRS[kind])
        theirs = prepared_by(DPOTrainer, dataset, config, tokenizer)
        if not len(theirs):
            continue
        batch = DataCollatorForPreference(0, max_length=max_length, truncation_mode=mode)(list(theirs))
        ours = prepare_preferences(dataset, tokenizer, PreferenceOptions(max_length=max_length, truncation_mode=mode))
        assert ours.column_names == ["prompt_ids", "chosen_ids", "rejected_ids"]
        sides = [masked(row["prompt_ids"], row[side]) for side in ("chosen_ids", "rejected_ids") for row in ours]
        assert sides == collated(batch)


def test_the_two_sequences_of_a_pair_keep_one_prompt_where_trl_cuts_them_apart(tmp_path):
    """TRL's `keep_end` takes the last tokens of each sequence alone, so the shorter completion sees more of the prompt than the longer. Then the
    pair no longer compares two answers to one question, which the loss assumes (Rafailov et al. 2023, eq. 7). Here both see as much as the longer can."""
    from trl.trainer.dpo_trainer import DataCollatorForPreference

    row = {"prompt_ids": [1, 2, 3, 4, 5], "chosen_ids": [6, 7, 8], "rejected_ids": [9]}
    chosen, rejected = collated(DataCollatorForPreference(0, max_length=6, truncation_mode="keep_end")([row]))
    assert (chosen[0], rejected[0]) == ([3, 4, 5, 6, 7, 8], [1, 2, 3, 4, 5, 9])
    [ours] = prepare_preferences(
        Dataset.from_list([row]), tiny_tokenizer(), PreferenceOptions(max_length=6, truncation_mode="keep_end")
    )
    assert ours == {"prompt_ids": [3, 4, 5], "chosen_ids": [6, 7, 8], "rejected_ids": [9]}


@pytest.mark.parametrize("max_length", [None, 40, 20, 10])
@pytest.mark.parametrize("kind", PAIRS)
def test_whole_sequences_are_those_of_trls_reward_trainer(kind, max_length, tmp_path):
    from trl import RewardConfig, RewardTrainer

    config = RewardConfig(**arguments(tmp_path, max_length=max_length))
    for special in TOKENIZERS[kind.split(",")[0].split(" ")[0]]:
        rows = [{**row, "margin": 0.5 * place} for place, row in enumerate(PAIRS[kind])]
        tokenizer, dataset = tiny_tokenizer(**special), Dataset.from_list(rows)
        theirs = prepared_by(RewardTrainer, dataset, config, tokenizer)
        if not len(theirs):
            continue
        options = PreferenceOptions(max_length=max_length, whole_sequences=True, keep_columns=("margin",))
        ours = prepare_preferences(dataset, tokenizer, options)
        assert ours.column_names == ["chosen_ids", "rejected_ids", "margin"]
        assert list(ours) == list(theirs.select_columns(ours.column_names))


ANSWERS = {
    **PAIRS,
    "plain, judged": [
        {"prompt": "def function(self):", "completion": " return name", "label": True},
        {"prompt": "the quick brown fox jumps over the lazy dog", "completion": " yes and no", "label": False},
    ],
    "messages, judged": [
        {"prompt": [USER], "completion": [GOOD], "label": False},
        {"prompt": [USER, GOOD, USER], "completion": [BAD, USER, GOOD], "label": True},
    ],
}


@pytest.mark.parametrize("max_length", [None, 30, 14, 9])
@pytest.mark.parametrize("kind", ANSWERS)
def test_judged_answers_are_those_of_trls_kto(kind, max_length, tmp_path):
    from trl import KTOConfig, KTOTrainer
    from trl.trainer.kto_trainer import DataCollatorForUnpairedPreference

    config = KTOConfig(**arguments(tmp_path, max_length=max_length, per_device_train_batch_size=100))
    weights = {"desirable_weight": 1.0, "undesirable_weight": 1.0, "calculate_KL": True}
    for special in TOKENIZERS[kind.split(",")[0].split(" ")[0]]:
        tokenizer, dataset = tiny_tokenizer(**special), Dataset.from_list(ANSWERS[kind])
        theirs = prepared_by(KTOTrainer, dataset, config, tokenizer, **weights)
        if not len(theirs):
            continue
        ours = list(prepare_unpaired(dataset, tokenizer, UnpairedOptions(max_length=max_length)))
        batch = DataCollatorForUnpairedPreference(0, max_length=max_length)(list(theirs))
        assert [masked(row["prompt_ids"], row["completion_ids"]) for row in ours] == collated(batch)
        assert [row["label"] for row in ours] == batch["label"].tolist()
        # The same mismatched completions, but for the prompt: TRL takes that of the row before, we that of the next.
        turned = [*theirs["completion_ids"][1:], theirs["completion_ids"][0]]
        rooms = [None if max_length is None else max_length - len(row["prompt_ids"]) for row in ours]
        assert [row["kl_completion_ids"] for row in ours] == [
            each[:room] for each, room in zip(turned, rooms, strict=True)
        ]
