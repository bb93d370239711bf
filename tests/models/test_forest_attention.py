"""Whole models on rows of trees against the same sequences in padded rows, each by itself: losses and gradients."""

from __future__ import annotations

import copy
import logging

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.overrides import TorchFunctionMode
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from tests.neuron import architectures
from tests.ops.forests import grow
from trellium.data.sequence import Sequence
from trellium.errors import ModelError
from trellium.forest.layout import trees
from trellium.models import attention as reading_module
from trellium.models.attention import forest_reading, forest_support, let_read_forests
from trellium.models.scoring import install_scores
from trellium.models.tiny import tiny_model
from trellium.monitor import max_compiles

KINDS = ("llama", "qwen3", "gemma3", "gpt_oss", "qwen3_moe", "gemma2")
NEURON = pytest.param(
    "neuron", marks=pytest.mark.skipif(not hasattr(torch, "neuron"), reason="no emulated device here")
)
# Groups, one inside another, the same twice, one token, a row of strangers. Windows of the tiny models are 8.
EXPERTS = {"gpt_oss", "qwen3_moe"}
PAD = 1
"""Not 0, the tiny models' padding token: its embedding is a row of zeros, of which Gemma 3n takes a square root whose slope is infinite."""

BATCH = (
    ((2, 3, 4, 5, 6, 7, 8), (2, 3, 4, 5, 6, 7, 9, 9, 9, 9, 9, 9), (2, 3, 4), (2, 3, 4), (5, 6)),
    ((7,), (9, 8, 7, 6, 5, 4, 3, 2, 9, 8, 7, 6, 5), (9, 8, 7, 6, 5, 4, 3, 2, 9, 2, 2)),
)


class InFloat64(TorchFunctionMode):
    """Norms, routers and rotary angles keep float32 inside whatever the weights are: here everything that asks for float32 gets float64."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        wide = {torch.float32: torch.float64}
        args = tuple(wide.get(value, value) if isinstance(value, torch.dtype) else value for value in args)
        kwargs = {
            name: wide.get(value, value) if isinstance(value, torch.dtype) else value
            for name, value in (kwargs or {}).items()
        }
        return (torch.Tensor.double if func is torch.Tensor.float else func)(*args, **kwargs)


def tree_batch(rows, *, length: int | None = None, multiple: int = 1, device="cpu") -> dict[str, Tensor]:
    """A forest of the rows' sequences, a token at a time; every token but the first of a sequence is trained, with a weight of its sequence's number."""
    laid, edges = [], []
    for row, sequences in enumerate(rows):
        places: dict[tuple[int, ...], int] = {}
        depths, tokens = [], []
        for prefix in sorted({sequence[: end + 1] for sequence in sequences for end in range(len(sequence))}):
            places[prefix] = len(tokens)
            depths.append(len(prefix) - 1)
            tokens.append(prefix[-1])
        laid.append((depths, tokens))
        for number, sequence in enumerate(sequences):
            edges += [(row, places[sequence[:end]], sequence[end], number + 1.0) for end in range(1, len(sequence))]
    length = length or -(-max(len(tokens) for _, tokens in laid) // multiple) * multiple
    pads = [list(range(length - len(tokens))) for _, tokens in laid]
    forest = grow(*[depths + pad for (depths, _), pad in zip(laid, pads, strict=True)])
    edges = edges or [(0, 0, 2, 0.0)]
    batch = {
        "input_ids": torch.tensor([tokens + [PAD] * len(pad) for (_, tokens), pad in zip(laid, pads, strict=True)]),
        "subtree_end": forest.subtree_end,
        "position_ids": forest.position_ids,
        "edge_position": torch.tensor([row * length + place for row, place, _, _ in edges]),
        "edge_target": torch.tensor([target for _, _, target, _ in edges]),
        "edge_weight": torch.tensor([weight for *_, weight in edges]),
    }
    return {name: tensor.to(device) for name, tensor in batch.items()}


def forest_loss(model, batch: dict[str, Tensor]) -> Tensor:
    logprob = model(**batch).logprob
    return -(logprob * batch["edge_weight"].to(logprob.dtype)).sum()


def padded_loss(model: PreTrainedModel, rows) -> Tensor:
    """The same, of separate padded rows with a mask, by the model's own forward and full logits."""
    sequences = [sequence for row in rows for sequence in row]
    weights = [number + 1.0 for row in rows for number in range(len(row))]
    length = max(len(sequence) for sequence in sequences)
    input_ids = torch.tensor([[*sequence, *[0] * (length - len(sequence))] for sequence in sequences])
    mask = torch.tensor([[1] * len(sequence) + [0] * (length - len(sequence)) for sequence in sequences])
    logits = model(input_ids=input_ids, attention_mask=mask, use_cache=False).logits
    logprob = logits[:, :-1].log_softmax(-1).gather(2, input_ids[:, 1:, None]).squeeze(2)
    return -(logprob * mask[:, 1:] * torch.tensor(weights)[:, None]).sum()


def small(kind: str, experts: str = "eager") -> PreTrainedModel:
    return tiny_model(kind, experts_implementation=experts, output_router_logits=False)


def reader(plain: PreTrainedModel) -> PreTrainedModel:
    model = install_scores(copy.deepcopy(plain))
    let_read_forests(model)
    return model


def gradients(model) -> dict[str, Tensor]:
    found = {
        name.replace("_orig_mod.", ""): parameter.grad.cpu()
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }
    model.zero_grad()
    return found


def assert_trains_alike(model, plain, batch, rows, tolerance: float) -> None:
    """Losses relative to the loss, gradients to their own largest entry, but at least a thousandth of the model's largest."""
    loss, expected = forest_loss(model, batch), padded_loss(plain, rows)
    assert float(abs(loss.detach().cpu() - expected.detach())) <= tolerance * max(float(abs(expected.detach())), 1.0)
    loss.backward()
    expected.backward()
    found, wanted = gradients(model), gradients(plain)
    largest = max((float(gradient.abs().max()) for gradient in wanted.values()), default=0.0)
    for name, gradient in wanted.items():
        got = found.get(name)
        deviation = float((gradient if got is None else got - gradient).abs().max())
        assert deviation <= tolerance * max(float(gradient.abs().max()), 1e-3 * largest, 1e-9), (name, deviation)


_BUILT: dict[str, tuple[PreTrainedModel, PreTrainedModel]] = {}


def built(kind: str) -> tuple[PreTrainedModel, PreTrainedModel]:
    """The float64 model and its forest reader, made once for all examples."""
    if kind not in _BUILT:
        plain = small(kind).double()
        _BUILT[kind] = (plain, reader(plain))
    return _BUILT[kind]


SEQUENCES = st.lists(st.integers(2, 3), min_size=1, max_size=14).map(tuple)  # two tokens: prefixes are shared


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=25, deadline=None)
@given(rows=st.lists(st.lists(SEQUENCES, min_size=1, max_size=5), min_size=1, max_size=2))
def test_any_trees_train_in_float64_as_their_sequences_in_padded_rows(kind, rows):
    plain, model = built(kind)
    with InFloat64():
        assert_trains_alike(model, plain, tree_batch(rows), rows, 1e-9)


@pytest.mark.parametrize("device", ["cpu", NEURON])
@pytest.mark.parametrize("kind", [*KINDS, "smollm3", "cohere", "granite", "phi"])
def test_trees_train_in_float32_as_padded_rows(kind, device):
    plain = small(kind)
    assert_trains_alike(reader(plain).to(device), plain, tree_batch(BATCH, multiple=8, device=device), BATCH, 1e-5)


def test_a_model_that_brings_its_own_attention_reads_a_dense_mask():
    architecture = next(each for each in architectures.ARCHITECTURES if each.model_type == "falcon")
    plain = architectures.build(architecture)
    model = reader(plain)
    assert forest_reading(model) == "dense"
    assert_trains_alike(model, plain, tree_batch(BATCH), BATCH, 1e-5)


def test_recomputed_layers_see_the_same_trees():
    plain = small("gemma3")
    model = reader(plain)
    model.gradient_checkpointing_enable()
    model.train()
    assert_trains_alike(model, plain, tree_batch(BATCH), BATCH, 1e-5)


def test_under_autocast_the_attention_runs_in_low_precision():
    model, batch = reader(small("qwen3")), tree_batch(BATCH)
    exact = forest_loss(model, batch)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        rounded = forest_loss(model, batch)
    assert not rounded.equal(exact)
    torch.testing.assert_close(rounded, exact, rtol=3e-2, atol=0)


def assert_one_graph_for_two_forests(kind: str, backend: str, device: str) -> None:
    torch.compiler.reset()
    other = (((2, 3, 4, 5, 6), (2, 3, 9, 9, 9), (3, 3)), ((4, 4, 4, 4), (4, 4, 4, 5, 5, 5, 5, 5)))
    plain = small(
        kind, experts="grouped_mm" if kind in EXPERTS else "eager"
    )  # a loop over experts would break the graph
    model = reader(plain).to(device)
    compiled = torch.compile(model, backend=backend, dynamic=False)
    edges = max(len(tree_batch(rows)["edge_target"]) for rows in (BATCH, other))
    with max_compiles(2):  # forward and backward
        for rows in (BATCH, other, BATCH):
            batch = tree_batch(rows, length=32, device=device)
            missing = edges - len(batch["edge_target"])
            for name in ("edge_position", "edge_target", "edge_weight"):
                batch[name] = torch.nn.functional.pad(batch[name], (0, missing))
            assert_trains_alike(compiled, plain, batch, rows, 1e-5)


def test_two_forests_of_one_shape_run_on_one_compiled_graph():
    assert_one_graph_for_two_forests("gemma3", "aot_eager", "cpu")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("backend", "device"), [("inductor", "cpu"), pytest.param("neuron", "neuron", marks=NEURON.marks)]
)
@pytest.mark.parametrize("kind", KINDS)
def test_compiled_models_train_on_trees_as_padded_rows(kind, backend, device):
    assert_one_graph_for_two_forests(kind, backend, device)


# ---- what else the model does stays as it was


@pytest.mark.parametrize("kind", ["qwen3", "gpt_oss", "gemma2", "gemma3"])
def test_generation_and_plain_calls_are_the_model_s_own_afterwards(kind, tmp_path):
    plain = small(kind).eval()
    model = reader(plain).eval()
    prompt = torch.tensor([[0, 0, 5, 9, 7], [4, 5, 6, 7, 8]])
    mask = torch.tensor([[0, 0, 1, 1, 1], [1] * 5])
    arguments = {
        "input_ids": prompt,
        "attention_mask": mask,
        "max_new_tokens": 12,
        "do_sample": False,
        "eos_token_id": None,
    }
    assert model.generate(**arguments).equal(plain.generate(**arguments))
    logits = plain(input_ids=prompt).logits
    torch.testing.assert_close(model(input_ids=prompt).logits, logits)
    model.save_pretrained(tmp_path)
    assert reading_module.IMPLEMENTATION not in (tmp_path / "config.json").read_text()
    torch.testing.assert_close(AutoModelForCausalLM.from_pretrained(tmp_path)(input_ids=prompt).logits, logits)


def test_a_copy_reads_as_the_original_and_twice_is_once():
    model = reader(small("qwen3"))
    implementation = model.config._attn_implementation
    assert forest_reading(copy.deepcopy(model)) == "operator"
    let_read_forests(model)
    assert model.config._attn_implementation == implementation == reading_module.IMPLEMENTATION


# ---- who reads


def test_the_configuration_says_who_reads_trees():
    def of(model_type, **fields):
        return forest_support(AutoConfig.for_model(model_type, **fields))

    assert of("qwen3").reading == "operator"
    assert of("qwen3").shares
    assert of("gpt_oss").reading == "operator"
    assert of("mamba2").reading == "chains"
    assert of("rwkv").reading == "chains"
    assert "linear_attention" in of("qwen3_next").reason
    assert "chunked_attention" in of("llama4_text").reason
    assert "attention_dropout=0.1" in of("qwen3", attention_dropout=0.1).reason
    dropout = of("opt", attention_dropout=0.0, dropout=0.1)
    assert (dropout.reading, dropout.shares) == ("operator", False)
    assert not of("qwen3_moe", output_router_logits=True).shares
    assert "not causal" in of("gemma3_text", use_bidirectional_attention=True).reason
    assert of("t5").reading == "chains"


def test_what_cannot_read_trees_says_so_once_and_refuses_them(caplog):
    reading_module._SAID.clear()
    with caplog.at_level(logging.INFO, logger="trellium.models.attention"):
        models = [reader(small("mamba2")) for _ in range(2)]
    assert [record.message for record in caplog.records] == [
        "Mamba2ForCausalLM: one sequence a row, because its layers of type linear_attention do not see by a mask."
    ]
    with pytest.raises(RuntimeError, match="single chains"):
        forest_loss(models[0], tree_batch(BATCH))


def test_a_layer_that_ignores_the_trees_is_found_by_measuring(monkeypatch):
    plain = small("llama")
    layer = plain.model.layers[1].self_attn
    forward = type(layer).forward

    def deaf(self, hidden_states, position_embeddings=None, attention_mask=None, **options):
        return forward(
            self, hidden_states, position_embeddings, None if self.layer_idx == 1 else attention_mask, **options
        )

    monkeypatch.setattr(type(layer), "forward", deaf)
    support = let_read_forests(plain)
    assert support.reading == "chains"
    assert "deviate by" in support.reason
    assert plain.config._attn_implementation == "sdpa"


def test_a_sliding_layer_that_does_not_say_its_window_is_refused(monkeypatch):
    plain = small("gemma3")
    plain.model.layers[0].self_attn.sliding_window = None
    assert "does not say its window" in let_read_forests(plain).reason


def test_attention_dropout_that_was_turned_on_later_is_refused():
    model = reader(small("qwen3")).train()
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.1
    with pytest.raises(ModelError, match="wants dropout"):
        forest_loss(model, tree_batch(BATCH))


def test_router_losses_count_the_tokens_of_packed_rows_once_and_no_padding():
    model = install_scores(tiny_model("qwen3_moe", output_router_logits=True))
    assert not let_read_forests(model).shares
    rows = [Sequence(np.arange(3 + length) % 60, np.ones(3 + length, dtype=bool)) for length in (4, 1, 6)]
    packed = trees(rows, [0, 0, 0], groups=range(3), multiple=8)
    padded = trees(rows, range(3))
    losses = [model(**batch.tensors(), score_outputs=("logprob",)).aux_loss for batch in (packed, padded)]
    torch.testing.assert_close(*losses)


@pytest.mark.slow
@pytest.mark.parametrize("architecture", architectures.ARCHITECTURES, ids=lambda each: each.model_type)
def test_every_architecture_reads_trees_right_or_not_at_all(architecture):
    plain = architectures.build(architecture)
    for name in reading_module._dropouts(plain.config.get_text_config()):
        setattr(plain.config.get_text_config(), name, 0.0)
    plain.eval()
    if plain.config.is_encoder_decoder:
        assert let_read_forests(plain).reading == "chains"
        return
    model = copy.deepcopy(plain)
    if let_read_forests(model).reading == "chains":
        return
    install_scores(model)
    assert_trains_alike(model, plain, tree_batch(BATCH), BATCH, 1e-4)
