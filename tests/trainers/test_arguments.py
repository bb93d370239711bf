"""Arguments that a trainer cannot take are refused when it is made, each with the reason and the way out."""

from __future__ import annotations

import pytest
from datasets import Dataset, DatasetDict
from peft import LoraConfig
from transformers import DataCollatorForSeq2Seq, default_data_collator

from tests.tiny_tokenizer import tiny_tokenizer
from tests.trainers.tiny_runs import VOCABULARY, tiny_trainer, token_rows
from trellium import SFTConfig, SFTTrainer
from trellium.errors import ConfigError, DatasetError
from trellium.forest.collate import ForestCollator
from trellium.models.tiny import tiny_model


def sft(folder, **arguments) -> SFTTrainer:
    config = SFTConfig(output_dir=str(folder), use_cpu=True, max_steps=1, disable_tqdm=True, save_strategy="no")
    given = {"train_dataset": token_rows(4), "processing_class": tiny_tokenizer(), **arguments}
    return SFTTrainer(tiny_model(vocab_size=VOCABULARY), config, **given)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("tokenizer", "It is called 'processing_class'"),
        ("max_length", "args=SFTConfig\\(max_length=…\\)"),
        ("dataset_text_field", "args=SFTConfig"),
        ("nonsense", "SFTTrainer has no argument 'nonsense'.$"),
    ],
)
def test_an_argument_of_another_name_or_place_is_told_where_it_belongs(tmp_path, name, says):
    with pytest.raises(TypeError, match=says):
        sft(tmp_path, **{name: 3})


@pytest.mark.parametrize(
    ("collator", "says"),
    [
        (DataCollatorForSeq2Seq(tiny_tokenizer()), "DataCollatorForSeq2Seq of transformers"),
        (default_data_collator, "default_data_collator of transformers"),
        (lambda rows: {"input_ids": rows[0]["input_ids"]}, "batch lacks position_ids, subtree_end"),
        (lambda rows: rows, "batch lacks input_ids"),
    ],
    ids=["class", "function", "own", "no mapping"],
)
def test_a_collator_of_other_batches_is_refused_when_the_trainer_is_made(tmp_path, collator, says):
    with pytest.raises(ConfigError, match=says):
        sft(tmp_path, data_collator=collator)


def test_a_collator_around_ours_trains(tmp_path):
    trainer = sft(tmp_path, data_collator=lambda rows: ForestCollator(0)(rows[:1]))
    trainer.train()
    assert trainer.state.global_step == 1


def test_a_training_set_that_is_a_mapping_is_told_to_be_one_of_it(tmp_path):
    for several in (DatasetDict({"train": token_rows(2)}), {"train": token_rows(2), "test": token_rows(2)}):
        with pytest.raises(DatasetError, match=r"a mapping of 'train'.*Choose one: train_dataset=dataset\['train'\]"):
            sft(tmp_path, train_dataset=several)


def test_training_without_a_training_set_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="give the trainer a train_dataset"):
        sft(tmp_path, train_dataset=None).train()


def test_predict_prepares_raw_rows_as_evaluate_does(tmp_path):
    raw = Dataset.from_list([{"text": "to be or not"}, {"text": "that is the question"}])
    trainer = tiny_trainer(tmp_path, tiny_model(vocab_size=400))
    predicted = trainer.predict(raw)
    assert predicted.predictions is None
    assert predicted.metrics["test_loss"] == trainer.evaluate(raw)["eval_loss"]
    with pytest.raises(DatasetError, match="got list"):
        trainer.predict([{"text": "a"}])


def test_the_tokens_of_an_evaluation_are_its_own(tmp_path):
    rows, held_out = token_rows(12), token_rows(3, seed=5)
    trainer = tiny_trainer(tmp_path, train_dataset=rows, eval_dataset=held_out)
    trainer.train()
    tokens = sum(len(row["input_ids"]) for row in held_out)
    assert [trainer.evaluate()["eval_num_tokens"] for _ in range(2)] == [tokens, tokens]


def test_a_module_to_save_that_is_not_there_is_named(tmp_path):
    lora = LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM", modules_to_save=["embed_token"])
    with pytest.raises(ConfigError, match=r"nothing called 'embed_token'. Did you mean 'embed_tokens'"):
        sft(tmp_path, peft_config=lora)


def test_making_an_adapter_warns_of_nothing(tmp_path, recwarn):
    sft(tmp_path, peft_config=LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM"))
    assert not [warning for warning in recwarn if issubclass(warning.category, FutureWarning)]


@pytest.mark.parametrize("kind", ["gpt2", "opt"])
def test_a_row_longer_than_the_table_of_positions_is_refused_before_training(tmp_path, kind):
    model = tiny_model("gpt2", vocab_size=VOCABULARY, n_positions=16) if kind == "gpt2" else small_opt()
    rows = Dataset.from_list([{"input_ids": [5] * 16}, {"input_ids": [5] * 17}])
    with pytest.raises(
        DatasetError, match=r"row 1 .*has 17 tokens, but the model has a table of 16 positions. Set max_length"
    ):
        tiny_trainer(tmp_path, model, train_dataset=rows)
    tiny_trainer(tmp_path, model, train_dataset=rows, max_length=16, max_steps=1).train()


def test_padding_counts_as_positions(tmp_path):
    model = tiny_model("gpt2", vocab_size=VOCABULARY, n_positions=20)
    rows = Dataset.from_list([{"input_ids": [5] * 18}])
    with pytest.raises(DatasetError, match="table of 16 positions"):
        tiny_trainer(tmp_path, model, train_dataset=rows, pad_to_multiple_of=16)
    with pytest.raises(ConfigError, match="multiple of 32, but the model has a table of 20"):
        tiny_trainer(tmp_path, model, train_dataset=rows, pad_to_multiple_of=32)


def small_opt():
    from transformers import OPTConfig, OPTForCausalLM

    return OPTForCausalLM(
        OPTConfig(
            vocab_size=VOCABULARY,
            hidden_size=16,
            word_embed_proj_dim=16,
            ffn_dim=16,
            num_hidden_layers=1,
            num_attention_heads=2,
            max_position_embeddings=16,
        )
    )


@pytest.mark.parametrize("streamed", [False, True], ids=["dataset", "stream"])
def test_a_token_beyond_the_vocabulary_is_named_by_file_and_line(tmp_path, streamed):
    rows = Dataset.from_list(
        [{"input_ids": [5, token], "_source": f"rows.jsonl:{n}"} for n, token in ((3, 6), (7, 64))]
    )
    with pytest.raises(DatasetError, match=r"rows\.jsonl:7: holds the token 64, but the model's vocabulary has 64"):
        tiny_trainer(tmp_path, train_dataset=rows.to_iterable_dataset() if streamed else rows, max_steps=2).train()
