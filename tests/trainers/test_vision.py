"""Trainers of vision-language models: what they train is what each row alone trains with full logits, in every layout that images allow."""

from __future__ import annotations

import copy
import logging
from dataclasses import replace

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoModelForImageTextToText, AutoProcessor, ProcessorMixin

from tests.tiny_vision import (
    FAMILIES,
    compared_rows,
    completion_rows,
    judged_rows,
    message_rows,
    picture,
    tiny_processor,
    tiny_vision_model,
)
from tests.trainers.preference_runs import model_for
from tests.trainers.tiny_runs import losses
from trellium import DPOConfig, DPOTrainer, KTOConfig, KTOTrainer, RewardConfig, RewardTrainer, SFTConfig, SFTTrainer
from trellium.data.conversion import prepare_multimodal_messages
from trellium.data.images import ImageProcessor
from trellium.errors import ConfigError
from trellium.models.tiny import tiny_model

CLASSES = {
    "sft": (SFTConfig, SFTTrainer),
    "dpo": (DPOConfig, DPOTrainer),
    "kto": (KTOConfig, KTOTrainer),
    "reward": (RewardConfig, RewardTrainer),
}
ROWS = {"sft": message_rows, "dpo": compared_rows, "kto": judged_rows, "reward": compared_rows}
IN_TREES = ("llava", "idefics3", "qwen2_vl")
SLOW = pytest.mark.slow
NEURON = pytest.mark.skipif(not torch.accelerator.is_available(), reason="needs an accelerator, emulated or not")


def trainer_for(folder, family="llava", method="sft", model=None, **options):
    given = {
        name: options.pop(name)
        for name in ("train_dataset", "eval_dataset", "peft_config", "processing_class", "ref_model", "compute_metrics")
        if name in options
    }
    given.setdefault("train_dataset", ROWS[method](8))
    given.setdefault("processing_class", tiny_processor(family))
    config_class, trainer_class = CLASSES[method]
    config = config_class(
        **{
            "output_dir": str(folder),
            "use_cpu": True,
            "bf16": False,
            "disable_tqdm": True,
            "logging_steps": 1,
            "save_strategy": "no",
            "report_to": "none",
            "learning_rate": 1e-3,
            "per_device_train_batch_size": 4,
            "max_steps": 3,
            **options,
        }
    )
    return trainer_class(tiny_vision_model(family) if model is None else model, args=config, **given)


def batch_of(trainer):
    """All rows of the training set in their order."""
    kept = trainer._remove_unused_columns(trainer.train_dataset)
    return trainer._prepare_inputs(trainer.data_collator(list(kept)))


def alone(processor: ProcessorMixin, model, images, messages, prompt=None):
    """The log-probabilities of a conversation's tokens, or of those after a prompt, from its full logits; no other sequence is near."""

    def encoded(part, **options):
        made = prepare_multimodal_messages(part, images)
        return processor.apply_chat_template(
            [made],
            tokenize=True,
            return_dict=True,
            return_tensors="pt",
            processor_kwargs={"add_special_tokens": False},
            **options,
        )

    inputs = encoded(messages)
    start = 1 if prompt is None else encoded(prompt, add_generation_prompt=True)["input_ids"].shape[1]
    ids = inputs["input_ids"][0, start:]
    logprob = model(**inputs).logits[0, start - 1 : -1].log_softmax(-1)
    return logprob.gather(1, ids[:, None])[:, 0]


def assert_same_gradients(model, plain):
    """In float64, but for the norms of these models, which round to float32 wherever a token stands."""
    expected = dict(plain.named_parameters())
    seen = 0
    for name, parameter in model.named_parameters():
        gradient = expected[name].grad
        if parameter.grad is None:
            assert gradient is None or not gradient.any(), name
            continue
        seen += 1
        torch.testing.assert_close(
            parameter.grad, gradient, rtol=1e-4, atol=1e-6, msg=lambda told, name=name: f"{name}: {told}"
        )
    assert seen > 20


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("rows", [message_rows, completion_rows])
def test_loss_and_gradients_are_those_of_each_row_alone_with_full_logits(tmp_path, family, rows):
    """Rows with two images of unequal sizes, with one, and with none, in one batch."""
    model, rows = tiny_vision_model(family).double(), rows(6)
    plain = copy.deepcopy(model)
    trainer = trainer_for(tmp_path, family, model=model, train_dataset=rows, gradient_checkpointing=False)
    batch = batch_of(trainer)
    loss = trainer.compute_loss(trainer.model, batch)
    loss.backward()
    processor = tiny_processor(family)
    logprobs = [
        alone(processor, plain, row["images"], row["messages"])
        if "messages" in row
        else alone(processor, plain, row["images"], row["prompt"] + row["completion"], row["prompt"])
        for row in rows
    ]
    expected = -torch.cat(logprobs).mean()
    expected.backward()
    torch.testing.assert_close(loss, expected, rtol=1e-7, atol=0)
    assert_same_gradients(trainer.model, plain)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_pair_trains_as_its_two_sequences_alone(tmp_path, family):
    model, rows = tiny_vision_model(family).double(), compared_rows(6)
    plain = copy.deepcopy(model)
    trainer = trainer_for(tmp_path, family, "dpo", model=model, train_dataset=rows, gradient_checkpointing=False)
    loss = trainer.compute_loss(trainer.model, batch_of(trainer))
    loss.backward()
    processor = tiny_processor(family)
    margins = []
    for row in rows:
        chosen, rejected = (
            alone(processor, plain, row["images"], row["prompt"] + row[side], row["prompt"]).sum()
            for side in ("chosen", "rejected")
        )
        margins.append(0.1 * (chosen - rejected))
    margin = torch.stack(margins)
    expected = -torch.nn.functional.logsigmoid(margin - margin.detach()).mean()
    expected.backward()
    torch.testing.assert_close(loss, expected, rtol=1e-7, atol=0)
    assert_same_gradients(trainer.model, plain)


@pytest.mark.parametrize(
    ("family", "method"),
    [
        ("llava", "sft"),
        ("qwen2_vl", "dpo"),
        pytest.param("llava", "dpo", marks=SLOW),
        pytest.param("llava", "kto", marks=SLOW),
        pytest.param("idefics3", "dpo", marks=SLOW),
        pytest.param("qwen2_vl", "sft", marks=SLOW),
    ],
)
def test_layouts_and_accumulation_change_nothing(tmp_path, family, method):
    options = {"loss_type": "apo_zero_unpaired"} if method == "kto" else {}
    curves = {}
    for layout, steps in (("padded", 1), ("packed", 1), ("shared", 1), ("shared", 2)):
        trainer = trainer_for(
            tmp_path,
            family,
            method,
            layout=layout,
            per_device_train_batch_size=4 // steps,
            gradient_accumulation_steps=steps,
            optim="sgd",
            learning_rate=0.05,
            **options,
        )
        trainer.train()
        curves[layout, steps] = losses(trainer)
    expected = curves.pop(("padded", 1))
    for curve in curves.values():
        assert curve == pytest.approx(expected, rel=2e-5)


def images_in(batch):
    made = batch["model_inputs"]
    if "image_grid_thw" in made:
        return len(made["image_grid_thw"])
    pixels = made["pixel_values"].flatten(0, -4)  # rows with fewer images than others are filled up with black ones
    return int(pixels.flatten(1).any(1).sum())


@pytest.mark.parametrize("family", IN_TREES)
def test_a_pair_forwards_its_prompt_and_the_images_in_it_once(tmp_path, family):
    shared, padded = (batch_of(trainer_for(tmp_path, family, "dpo", layout=layout)) for layout in ("shared", "padded"))
    images = sum(len(row["images"]) for row in compared_rows(8))
    counts = [images_in(batch) for batch in (shared, padded)]
    assert counts == [images, 2 * images]
    assert int(shared["real_tokens"].sum()) < int(padded["real_tokens"].sum())


def test_rows_of_one_text_share_it_only_without_images(tmp_path):
    messages = [{"role": "user", "content": "what is it"}, {"role": "assistant", "content": "a cat"}]

    def tokens(*images):
        rows = Dataset.from_list([{"images": list(each), "messages": messages} for each in images])
        batch = batch_of(trainer_for(tmp_path, train_dataset=rows))
        return int(batch["sequence_tokens"]), int(batch["real_tokens"].sum())

    together, forwarded = tokens([picture(0)], [picture(1)])
    assert together == forwarded
    together, forwarded = tokens([picture(0)], [], [])
    [with_image], [without] = ([part] for part in (together - 2 * (together - 4) // 3, (together - 4) // 3))
    assert forwarded == with_image + without


def test_padding_is_never_made_of_a_token_of_an_image(tmp_path):
    """A text that begins with its image, in a batch with a longer one."""
    rows = Dataset.from_list(
        [{"image": picture(0), "text": "<image>"}, {"image": None, "text": "a longer text without any"}]
    )
    trainer = trainer_for(tmp_path, train_dataset=rows, layout="padded")
    batch = batch_of(trainer)
    assert int((batch["input_ids"] == trainer.processing_class.image_token_id).sum()) == 4
    trainer.train()
    assert all(torch.isfinite(torch.tensor(losses(trainer))))


def test_a_model_with_an_attention_of_images_gets_a_row_a_sequence(tmp_path, caplog):
    with caplog.at_level(logging.WARNING):
        trainer = trainer_for(tmp_path, "gemma3")
    assert trainer.data_collator.layout == "padded"
    assert "reads one sequence a row" in caplog.text
    with pytest.raises(ConfigError, match="layout='shared', but with images"):
        trainer_for(tmp_path, "gemma3", layout="shared")


@pytest.mark.parametrize("family", ["llava", "gemma3"])
def test_a_run_is_loaded_by_its_folder_with_its_processor(tmp_path, family):
    model = tiny_vision_model(family)
    model.save_pretrained(tmp_path / "model")
    tiny_processor(family).save_pretrained(tmp_path / "model")
    given = trainer_for(tmp_path / "given", family, model=model)
    trainer = SFTTrainer(str(tmp_path / "model"), args=copy.deepcopy(given.args), train_dataset=message_rows(8))
    assert isinstance(trainer.processing_class, ProcessorMixin)
    for each in (given, trainer):
        each.train()
    assert losses(trainer) == pytest.approx(losses(given), rel=1e-6)
    trainer.save_model(str(tmp_path / "out"))
    processor = AutoProcessor.from_pretrained(tmp_path / "out")
    assert processor.chat_template == trainer.processing_class.chat_template
    assert "AutoModelForImageTextToText" in (tmp_path / "out" / "README.md").read_text()
    saved = AutoModelForImageTextToText.from_pretrained(tmp_path / "out", dtype="float32")
    for name, parameter in saved.named_parameters():
        torch.testing.assert_close(parameter, dict(trainer.model.named_parameters())[name])


@pytest.mark.parametrize("method", ["dpo", pytest.param("kto", marks=SLOW)])
def test_a_reference_may_be_asked_of_images_before_the_run(tmp_path, method):
    rows = ROWS[method](8)
    curves = []
    for before in (False, True):
        trainer = trainer_for(tmp_path, "llava", method, train_dataset=rows, precompute_ref_log_probs=before)
        trainer.train()
        curves.append(losses(trainer))
    assert curves[1] == pytest.approx(curves[0], rel=1e-5)


def test_held_out_rows_with_images_are_evaluated_as_alone(tmp_path):
    held_out = message_rows(5)
    trainer = trainer_for(tmp_path, eval_dataset=held_out, per_device_eval_batch_size=2)
    metrics = trainer.evaluate()
    with torch.no_grad():
        logprobs = [
            alone(tiny_processor("llava"), tiny_vision_model("llava"), row["images"], row["messages"])
            for row in held_out
        ]
    assert metrics["eval_loss"] == pytest.approx(float(-torch.cat(logprobs).mean()), rel=1e-5)
    assert trainer.evaluate(held_out)["eval_loss"] == pytest.approx(metrics["eval_loss"], rel=1e-6)
    again = trainer.evaluate(trainer.eval_dataset)  # rows that are prepared already
    assert again["eval_loss"] == pytest.approx(metrics["eval_loss"], rel=1e-6)


def test_images_that_come_after_the_trainer_was_made_are_refused(tmp_path):
    trainer = trainer_for(tmp_path, train_dataset=message_rows(4).remove_columns("images"))
    with pytest.raises(ConfigError, match="the rows have images, and none of those"):
        trainer.evaluate(message_rows(4))


def test_rows_without_images_train_with_a_processor_as_with_its_tokenizer(tmp_path):
    rows = message_rows(6).remove_columns("images")
    processor = tiny_processor("llava")
    tokenizer = tiny_processor("llava").tokenizer
    tokenizer.chat_template = processor.chat_template
    curves = []
    for processing in (processor, tokenizer):
        trainer = trainer_for(tmp_path, train_dataset=rows, processing_class=processing)
        trainer.train()
        curves.append(losses(trainer))
    assert curves[0] == curves[1]


def test_an_adapter_is_trained_on_images(tmp_path):
    adapter = LoraConfig(r=2, target_modules=["q_proj", "v_proj"])
    trainer = trainer_for(tmp_path, peft_config=adapter, max_steps=6, learning_rate=0.02)
    trainer.train()
    assert losses(trainer)[-1] < losses(trainer)[0]
    vision = [
        name for name, parameter in trainer.model.named_parameters() if "vision" in name and parameter.requires_grad
    ]
    assert vision


def test_rows_with_images_are_read_as_a_stream(tmp_path):
    rows = message_rows(8)
    curves = []
    for each in (rows, rows.to_iterable_dataset()):
        trainer = trainer_for(tmp_path, train_dataset=each, train_sampling_strategy="sequential")
        trainer.train()
        curves.append(losses(trainer))
    assert curves[1] == pytest.approx(curves[0], rel=1e-6)


@pytest.mark.parametrize("family", ["llava", pytest.param("qwen2_vl", marks=SLOW)])
def test_token_shapes_are_planned_and_what_reads_images_is_not_compiled(tmp_path, family, caplog):
    torch.compiler.reset()
    options = {"pad_to_multiple_of": 16, "shapes": ["128", "384"], "gradient_checkpointing": False}
    eager = trainer_for(tmp_path, family, **options)
    eager.train()
    compiled = {"torch_compile": True, "torch_compile_backend": "aot_eager", "compile_regions": "blocks"}
    with caplog.at_level(logging.WARNING):
        trainer = trainer_for(tmp_path, family, strict_shapes=True, **options, **compiled)
        trainer.train()
    assert "What reads images is not compiled" in caplog.text
    assert trainer.plan is not None
    assert losses(trainer) == pytest.approx(losses(eager), rel=1e-5)
    torch.compiler.reset()


@NEURON
@pytest.mark.parametrize("family", ["llava", "qwen2_vl"])
def test_losses_on_an_accelerator_are_those_of_the_host(tmp_path, family):
    curves = []
    for use_cpu in (True, False):
        trainer = trainer_for(tmp_path, family, "dpo", use_cpu=use_cpu, pad_to_multiple_of=64)
        trainer.train()
        curves.append(losses(trainer))
    assert curves[1] == pytest.approx(curves[0], rel=1e-5)


class OtherKinds:
    """A processor that tells of tokens a third kind."""

    def __init__(self, processor):
        self._processor = processor

    def __getattr__(self, name):
        return getattr(self.__dict__["_processor"], name)

    def __call__(self, **arguments):
        made = self._processor(**arguments)
        made["token_type_ids"] = [[2] * len(types) for types in made["token_type_ids"]]
        return made


def test_a_processor_that_tells_more_of_tokens_than_text_or_image_is_refused(tmp_path):
    trainer = trainer_for(tmp_path, "gemma3")
    images = replace(trainer.data_collator.images, processor=ImageProcessor(OtherKinds(trainer.processing_class)))
    with pytest.raises(ConfigError, match="OtherKinds makes token_type_ids of the tokens of a text"):
        replace(trainer.data_collator, images=images)(list(trainer.train_dataset))


def test_what_cannot_be_with_images_is_refused_when_the_trainer_is_made(tmp_path):
    with pytest.raises(ConfigError, match="packing=True, but train has images"):
        trainer_for(tmp_path, packing=True)
    with pytest.raises(ConfigError, match="LlamaForCausalLM takes none"):
        trainer_for(tmp_path, model=tiny_model(vocab_size=448))
    with pytest.raises(ConfigError, match="processing_class is the tokenizer"):
        trainer_for(tmp_path, processing_class=tiny_processor("llava").tokenizer)
    with pytest.raises(ConfigError, match="reward models do not read"):
        trainer_for(tmp_path, method="reward", model=model_for("reward"))
    with pytest.raises(ConfigError, match="logits of rows without images"):
        trainer_for(tmp_path, compute_metrics=dict)
