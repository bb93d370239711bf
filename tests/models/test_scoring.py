from __future__ import annotations

import copy
import inspect
import pickle
import random

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from peft import LoraConfig, PromptTuningConfig, get_peft_model
from torch import Tensor
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedModel

from trellium.errors import ModelError
from trellium.forest.collate import ForestCollator
from trellium.models.scoring import ScoreOutput, install_scores
from trellium.models.tiny import tiny_model
from trellium.ops import head_tiles, losses

VOCABULARY = 64
PARITY_KINDS = (
    "llama",
    "qwen3",
    "gemma2",
    "gemma3",
    "gpt2",
    "gpt_oss",
    "qwen3_moe",
    "cohere",
    "granite",
    "phi",
    "mamba2",
)


def rows(lengths: tuple[int, ...] = (13, 7, 19)) -> list[dict]:
    """Rows of random tokens, each fifth untrained; longer than the sliding window of the tiny models."""
    numbers = random.Random(0)
    result = []
    for length in lengths:
        tokens = [numbers.randrange(2, VOCABULARY) for _ in range(length)]
        result.append({"input_ids": tokens, "labels": [-100 if i % 5 == 0 else t for i, t in enumerate(tokens)]})
    return result


def batch_of(data: list[dict], multiple: int | None = None) -> dict[str, Tensor]:
    return ForestCollator(0, multiple)(data)


def loss_of(scores: ScoreOutput, batch: dict[str, Tensor], aux: float = 0.1) -> Tensor:
    loss = -(scores.logprob * batch["edge_weight"].to(scores.logprob.dtype)).sum()
    return loss if scores.aux_loss is None else loss + aux * scores.aux_loss


def plain_logprobs(logits: Tensor, labels: list[list[int]]) -> Tensor:
    """The log-probability of every label that is not -100, from full logits, row by row."""
    log_p = logits.log_softmax(-1)
    values = [
        log_p[row, place - 1, label]
        for row, row_labels in enumerate(labels)
        for place, label in enumerate(row_labels)
        if label != -100 and place > 0
    ]
    return torch.stack(values)


def padded_loss(model: PreTrainedModel, data: list[dict], aux: float = 0.1) -> Tensor:
    length = max(len(row["input_ids"]) for row in data)
    pads = [length - len(row["input_ids"]) for row in data]
    input_ids = torch.tensor([row["input_ids"] + [0] * pad for row, pad in zip(data, pads, strict=True)])
    mask = torch.tensor([[1] * (length - pad) + [0] * pad for pad in pads])
    output = model(input_ids=input_ids, attention_mask=mask, use_cache=False)
    loss = -plain_logprobs(output.logits, [row["labels"] for row in data]).sum()
    return loss if getattr(output, "aux_loss", None) is None else loss + aux * output.aux_loss


def alone_loss(model: PreTrainedModel, data: list[dict]) -> Tensor:
    """Each row by itself: no padding, no mask."""
    losses = []
    for row in data:
        logits = model(input_ids=torch.tensor([row["input_ids"]]), use_cache=False).logits
        losses.append(-plain_logprobs(logits, [row["labels"]]).sum())
    return torch.stack(losses).sum()


def assert_same_gradients(ours: PreTrainedModel, theirs: PreTrainedModel, tolerance: float) -> None:
    compared = 0
    for (name, parameter), other in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        assert (parameter.grad is None) == (other.grad is None), name
        if other.grad is not None:
            difference = (parameter.grad - other.grad).norm()
            assert difference <= tolerance * (other.grad.norm() + 1), f"{name}: {difference:.2e}"
            compared += bool(other.grad.any())
    assert compared > 3


@pytest.fixture
def small_tiles(monkeypatch):
    monkeypatch.setattr(head_tiles, "EDGE_TILE", 8)
    monkeypatch.setattr(head_tiles, "TILE_BYTES", 8 * 64 * 4)


@pytest.mark.parametrize("kind", PARITY_KINDS)
def test_loss_and_gradients_are_those_of_full_logits_on_padded_rows(kind, small_tiles):
    plain = tiny_model(kind)
    model = install_scores(copy.deepcopy(plain))
    data = rows()
    batch = batch_of(data, multiple=8)
    scores = model(**batch)
    assert (scores.aux_loss is not None) == (kind == "qwen3_moe")
    loss, expected = loss_of(scores, batch), padded_loss(plain, data)
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-5)
    loss.backward()
    expected.backward()
    assert_same_gradients(model, plain, 2e-5)


@pytest.mark.parametrize("kind", PARITY_KINDS)
def test_in_float64_each_row_scores_as_if_alone(kind):
    plain = tiny_model(kind, experts_implementation="eager", output_router_logits=False).double()
    model = install_scores(copy.deepcopy(plain))
    data = rows()
    batch = batch_of(data, multiple=8)
    loss, expected = loss_of(model(**batch), batch), alone_loss(plain, data)
    # Mamba-2, and the routers and norms of some, keep float32 inside, whatever the weights are.
    tolerance = 1e-11 if kind in ("llama", "qwen3", "gpt2", "phi", "granite") else 1e-5
    torch.testing.assert_close(loss, expected, rtol=tolerance, atol=tolerance, check_dtype=False)
    loss.backward()
    expected.backward()
    assert_same_gradients(model, plain, tolerance)


def test_scores_asked_for_come_and_no_others():
    model, batch = install_scores(tiny_model()), batch_of(rows())
    edges = len(batch["edge_position"])
    everything = model(**batch, score_outputs=("logprob", "entropy", "top1"))
    assert everything.logprob.shape == everything.entropy.shape == everything.top1.shape == (edges,)
    only = model(**batch, score_outputs=("entropy",))
    assert list(only) == ["entropy"]
    assert only.entropy.equal(everything.entropy)


def test_the_head_is_multiplied_by_trained_edges_only(monkeypatch):
    model, batch = install_scores(tiny_model()), batch_of(rows())
    monkeypatch.setattr(model.lm_head, "forward", lambda *_: pytest.fail("logits were made"))
    assert model(**batch).logprob.shape == batch["edge_position"].shape


def test_temperature_is_that_of_the_scored_distribution():
    model, batch = install_scores(tiny_model()), batch_of(rows((9,)))
    logits = model(input_ids=batch["input_ids"]).logits
    expected = plain_logprobs(logits / 0.5, [rows((9,))[0]["labels"]])
    torch.testing.assert_close(model(**batch, temperature=0.5).logprob, expected)


def test_tied_embeddings_receive_both_gradients():
    plain = tiny_model("llama", tie_word_embeddings=True)
    model = install_scores(copy.deepcopy(plain))
    assert model.lm_head.weight is model.model.embed_tokens.weight
    data = rows()
    batch = batch_of(data)
    loss_of(model(**batch), batch).backward()
    padded_loss(plain, data).backward()
    torch.testing.assert_close(model.lm_head.weight.grad, plain.lm_head.weight.grad, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("reentrant", [True, False])
def test_gradient_checkpointing_changes_nothing(reentrant):
    model, batch = install_scores(tiny_model()), batch_of(rows())
    checkpointed = copy.deepcopy(model)
    checkpointed.gradient_checkpointing_enable({"use_reentrant": reentrant})
    checkpointed.enable_input_require_grads()
    checkpointed.train()
    for one in (model, checkpointed):
        loss_of(one(**batch), batch).backward()
    assert_same_gradients(checkpointed, model, 1e-6)


@pytest.mark.parametrize("installed_first", [True, False])
def test_scores_pass_through_peft(installed_first):
    plain, model = tiny_model(), tiny_model()
    adapter = LoraConfig(target_modules=["q_proj", "down_proj"], init_lora_weights=False, task_type="CAUSAL_LM")
    torch.manual_seed(0)
    reference = get_peft_model(plain, adapter)
    torch.manual_seed(0)
    if installed_first:
        model = get_peft_model(install_scores(model), adapter)
    else:
        model = install_scores(get_peft_model(model, adapter))
    data = rows()
    batch = batch_of(data)
    loss, expected = loss_of(model(**batch), batch), padded_loss(reference, data)
    torch.testing.assert_close(loss, expected)
    loss.backward()
    expected.backward()
    assert_same_gradients(model, reference, 2e-5)


def test_a_head_inside_an_adapter_is_refused_by_name():
    batch = batch_of(rows())
    adapter = LoraConfig(target_modules=["q_proj", "lm_head"], task_type="CAUSAL_LM")
    model = get_peft_model(install_scores(tiny_model()), adapter)
    with pytest.raises(ModelError, match="output head of LlamaForCausalLM is inside an adapter"):
        model(**batch)
    with pytest.raises(ModelError, match="inside an adapter"):
        install_scores(get_peft_model(tiny_model(), adapter))


@pytest.mark.parametrize("fused", [None, "nll"])
@pytest.mark.parametrize(
    ("trained", "tied"), [({"modules_to_save": ["lm_head"]}, False), ({"trainable_token_indices": [3, 5, 9]}, True)]
)
def test_a_head_that_is_trained_whole_or_by_rows_has_the_loss_and_gradients_of_full_logits(trained, tied, fused):
    data, models = rows(), []
    for _ in range(2):
        torch.manual_seed(0)
        lora = LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM", **trained)
        models.append(get_peft_model(tiny_model(tie_word_embeddings=tied), lora))
        with torch.no_grad():
            for parameter in models[-1].parameters():
                if parameter.requires_grad:
                    parameter.add_(0.1 * torch.randn_like(parameter))
    model, reference = install_scores(models[0]), models[1]
    batch = batch_of(data)
    if fused:
        loss = model(**batch, score_outputs=(), fused_loss=fused).loss_sum
    else:
        loss = loss_of(model(**batch), batch)
    expected = padded_loss(reference, data)
    torch.testing.assert_close(loss, expected)
    loss.backward()
    expected.backward()
    assert_same_gradients(model, reference, 2e-5)
    with model.disable_adapter(), torch.no_grad():
        off = loss_of(model(**batch), batch)
    with reference.disable_adapter(), torch.no_grad():
        torch.testing.assert_close(off, padded_loss(reference, data))


def test_virtual_prompt_tokens_are_refused_by_name():
    adapter = PromptTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM")
    model = get_peft_model(install_scores(tiny_model()), adapter)
    with pytest.raises(ModelError, match="virtual tokens"):
        model(**batch_of(rows()))


def test_what_is_not_a_causal_language_model_is_refused_by_name():
    with pytest.raises(ModelError, match="LlamaModel has no backbone"):
        install_scores(AutoModel.from_config(tiny_model().config))
    with pytest.raises(ModelError, match="got Linear"):
        install_scores(torch.nn.Linear(2, 2))


def test_a_head_that_does_something_unknown_is_refused_by_name(monkeypatch):
    model = tiny_model()

    class Doubled(torch.nn.Linear):
        def forward(self, hidden):
            return 2 * super().forward(hidden)

    model.lm_head.__class__ = Doubled
    with pytest.raises(ModelError, match="logits of LlamaForCausalLM are not what"):
        install_scores(model)


def test_a_soft_cap_that_the_model_does_not_apply_is_refused():
    with pytest.raises(ModelError, match="soft cap 30"):
        install_scores(tiny_model("llama", final_logit_softcapping=30.0))


def test_packed_rows_are_refused_rather_than_scored_wrongly():
    model, batch = install_scores(tiny_model()), batch_of(rows((4, 9)))
    batch["subtree_end"][1] = torch.tensor([4, 4, 4, 4, 6, 6, 9, 9, 9])
    with pytest.raises(RuntimeError, match="single chains"):
        model(**batch)


def test_an_argument_that_scoring_would_not_honour_is_refused():
    model, batch = install_scores(tiny_model()), batch_of(rows())
    with pytest.raises(ModelError, match="does not take attention_mask, labels"):
        model(**batch, attention_mask=torch.ones_like(batch["input_ids"]), labels=batch["input_ids"])


def test_a_plain_call_generation_and_signature_are_the_model_s_own():
    plain = tiny_model()
    model = install_scores(copy.deepcopy(plain))
    prompt = torch.tensor([[5, 6, 7]])
    assert model(prompt).logits.equal(plain(prompt).logits)
    assert model(input_ids=prompt, labels=prompt).loss.equal(plain(input_ids=prompt, labels=prompt).loss)
    kwargs = {"max_new_tokens": 4, "do_sample": False, "attention_mask": torch.ones_like(prompt)}
    assert model.generate(prompt, **kwargs).equal(plain.generate(prompt, **kwargs))
    assert inspect.signature(model.forward) == inspect.signature(plain.forward)
    assert install_scores(model) is model
    assert type(model).__name__ == type(plain).__name__


def test_the_saved_checkpoint_is_the_model_s_own(tmp_path):
    plain = tiny_model()
    install_scores(copy.deepcopy(plain)).save_pretrained(tmp_path / "scored")
    plain.save_pretrained(tmp_path / "plain")
    for name in ("config.json", "model.safetensors"):
        assert (tmp_path / "scored" / name).read_bytes() == (tmp_path / "plain" / name).read_bytes()
    assert type(AutoModelForCausalLM.from_pretrained(tmp_path / "scored")) is type(plain)


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_scores_with_its_own_weights(duplicate):
    model, batch = install_scores(tiny_model("gpt2")), batch_of(rows())
    double = duplicate(model)
    expected = model(**batch).logprob
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert double(**batch).logprob.equal(expected)
    assert double.lm_head.weight is double.transformer.wte.weight
    assert isinstance(double, type(tiny_model("gpt2")))


def test_accelerate_s_autocast_wraps_and_unwraps_the_scoring_forward():
    AcceleratorState._reset_state(reset_partial_state=True)
    try:
        accelerator = Accelerator(mixed_precision="bf16", cpu=True)
        model, batch = install_scores(tiny_model()), batch_of(rows())
        exact = model(**batch).logprob
        wrapped = accelerator.prepare_model(model)
        rounded = wrapped(**batch).logprob
        assert rounded.dtype == torch.float32
        assert not rounded.equal(exact)
        assert (rounded - exact).abs().max() < 0.3
        unwrapped = accelerator.unwrap_model(wrapped, keep_fp32_wrapper=False)
        assert unwrapped(**batch).logprob.equal(exact)
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)


def test_scoring_is_one_graph():
    model, batch = install_scores(tiny_model("qwen3")), batch_of(rows())
    captured = torch.compile(model, backend="aot_eager", fullgraph=True, dynamic=False)
    loss = loss_of(captured(**batch, score_outputs=("logprob", "entropy")), batch)
    torch.testing.assert_close(loss, loss_of(model(**batch), batch))
    loss.backward()
    assert model.lm_head.weight.grad.any()


@pytest.mark.skipif(not torch.accelerator.is_available(), reason="no accelerator, not even an emulated one")
def test_on_the_accelerator_scores_and_gradients_are_the_cpu_s():
    device = torch.accelerator.current_accelerator()
    model, batch = install_scores(tiny_model("qwen3_moe")), batch_of(rows())
    moved = copy.deepcopy(model).to(device)
    on_device = {name: tensor.to(device) for name, tensor in batch.items()}
    outputs = ("logprob", "entropy", "top1")
    scores, moved_scores = model(**batch, score_outputs=outputs), moved(**on_device, score_outputs=outputs)
    assert moved_scores.logprob.device.type == device.type
    torch.testing.assert_close(moved_scores.logprob.cpu(), scores.logprob)
    torch.testing.assert_close(moved_scores.entropy.cpu(), scores.entropy)
    assert moved_scores.top1.cpu().equal(scores.top1)
    loss_of(scores, batch).backward()
    loss_of(moved_scores, on_device).backward()
    assert_same_gradients(moved.cpu(), model, 1e-5)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("mode", ["nll", "dft"])
def test_the_fused_loss_and_its_gradients_are_those_of_a_loss_of_the_scores(mode, tied, small_tiles):
    plain = install_scores(tiny_model("llama", tie_word_embeddings=tied))
    fused = copy.deepcopy(plain)
    batch = batch_of(rows())
    expected = getattr(losses, mode)(plain(**batch).logprob, batch["edge_weight"], 3)
    output = fused(**batch, fused_loss=mode, score_outputs=("entropy", "top1"))
    assert list(output) == ["entropy", "top1", "loss_sum"]
    assert not output.entropy.requires_grad
    torch.testing.assert_close(output.loss_sum / 3, expected)
    expected.backward()
    (output.loss_sum / 3).backward()
    assert_same_gradients(fused, plain, 2e-5)


@pytest.mark.parametrize(
    ("kind", "settings"), [("gemma2", {"final_logit_softcapping": 2.0}), ("granite", {"logits_scaling": 4.0})]
)
def test_the_fused_loss_honours_what_a_head_does(kind, settings):
    plain = tiny_model(kind, **settings)
    model = install_scores(copy.deepcopy(plain))
    data = rows()
    batch = batch_of(data, multiple=8)
    output = model(**batch, fused_loss="nll", score_outputs=())
    loss, expected = output.loss_sum, padded_loss(plain, data)
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-5)
    loss.backward()
    expected.backward()
    assert_same_gradients(model, plain, 2e-5)


@pytest.mark.parametrize("kind", ["llava", "gemma3"])
def test_the_text_head_of_a_vision_language_model_scores_its_text(kind):
    text = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    text |= {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}
    vision = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision |= {"image_size": 16, "patch_size": 8}
    settings = {"text_config": text, "vision_config": vision, "image_token_index": 60}
    if kind == "llava":
        text["model_type"], vision["model_type"] = "llama", "clip_vision_model"
    else:
        settings |= {"mm_tokens_per_image": 4}
    plain = AutoModelForImageTextToText.from_config(AutoConfig.for_model(kind, **settings)).eval()
    model = install_scores(copy.deepcopy(plain))
    data = rows()
    batch = batch_of(data)
    for fused in (None, "nll"):
        output = model(**batch, fused_loss=fused)
        loss = loss_of(output, batch) if fused is None else output.loss_sum
        torch.testing.assert_close(loss, padded_loss(plain, data), rtol=1e-5, atol=1e-5)
