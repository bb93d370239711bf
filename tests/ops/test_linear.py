"""Linear layers multiplied by oneDNN give what `F.linear` gives, and leave the model what it was."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from trellium.models.linears import HostLinear, use_host_products
from trellium.models.tiny import tiny_model
from trellium.ops.linear import linear

SIZES = st.integers(1, 300)


@settings(max_examples=25, deadline=None)
@given(
    rows=st.integers(1, 200),
    inner=SIZES,
    outer=SIZES,
    bias=st.booleans(),
    frozen=st.booleans(),
    seed=st.integers(0, 99),
)
def test_values_and_gradients_are_those_of_f_linear(rows, inner, outer, bias, frozen, seed):
    torch.manual_seed(seed)
    leaves = [torch.randn(2, rows, inner), torch.randn(outer, inner) * inner**-0.5] + [torch.randn(outer)] * bias
    ways = {}
    for function in (linear, F.linear):
        wanted = [leaf.double() if function is F.linear else leaf.clone() for leaf in leaves]
        for place, leaf in enumerate(wanted):
            leaf.requires_grad_(not (frozen and place == 1))
        output = function(*wanted)
        (output.sin() * torch.arange(outer)).sum().backward()
        ways[function] = [output.detach(), *(leaf.grad for leaf in wanted if leaf.grad is not None)]
    for got, expected in zip(ways[linear], ways[F.linear], strict=True):
        assert got.shape == expected.shape
        assert (got.double() - expected).norm() <= 1e-5 * expected.norm()


@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_weights_gradient_lies_as_the_weight_does(place):
    out, inner = ((16, 512), (512, 16), (192, 576))[place]
    weight = nn.Parameter(torch.randn(out, inner))
    linear(torch.randn(128, inner), weight).sum().backward()
    assert weight.grad.stride() == weight.stride()


def test_it_is_differentiable_twice():
    torch.manual_seed(0)
    input, weight = torch.randn(40, 8, requires_grad=True), torch.randn(6, 8, requires_grad=True)

    def curvature(function):
        (first,) = torch.autograd.grad(function(input, weight).pow(3).sum(), input, create_graph=True)
        return torch.autograd.grad(first.square().sum(), (input, weight))

    for got, expected in zip(curvature(linear), curvature(F.linear), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-2)


def test_autocast_rounds_as_it_does_elsewhere():
    layer = nn.Linear(64, 32)
    input = torch.randn(50, 64)
    with torch.autocast("cpu", torch.bfloat16):
        expected = layer(input)
        assert torch.equal(use_host_products(layer)(input), expected)
    assert expected.dtype == torch.bfloat16


@pytest.mark.parametrize("switched_off", [False, True])
def test_odd_strides_and_a_switched_off_library_are_multiplied_as_ever(switched_off):
    torch.manual_seed(0)
    spread, weight = torch.randn(80, 2, 16)[:, 0, ::2], torch.randn(5, 8).expand(3, 5, 8)[1]
    with torch.backends.mkldnn.flags(enabled=not switched_off):
        torch.testing.assert_close(linear(spread, weight), F.linear(spread, weight))


def test_a_compiled_model_keeps_one_graph_and_its_gradients():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(24, 40), nn.GELU(), nn.Linear(40, 16, bias=False))
    plain = copy.deepcopy(model)
    input = torch.randn(2, 30, 24)
    compiled = torch.compile(use_host_products(model), backend="aot_eager", fullgraph=True)
    for one in (compiled, plain):
        one(input).square().mean().backward()
    for got, expected in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(got.grad, expected.grad)


def test_a_model_stays_one_that_others_know():
    model = tiny_model("qwen3")
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    ids = torch.randint(3, 50, (2, 40))
    expected = model(input_ids=ids).logits
    use_host_products(use_host_products(model))
    torch.testing.assert_close(model(input_ids=ids).logits, expected, rtol=1e-4, atol=1e-5)
    layers = [module for module in model.modules() if isinstance(module, nn.Linear)]
    assert layers
    assert all(type(layer) is HostLinear for layer in layers)
    assert model.state_dict().keys() == weights.keys()
    for copied in (copy.deepcopy(layers[0]), pickle.loads(pickle.dumps(layers[0]))):
        assert type(copied) is nn.Linear
        assert torch.equal(copied.weight, layers[0].weight)


def test_a_layer_whose_forward_was_replaced_is_left_alone():
    layer = nn.Linear(4, 4)
    layer.forward = lambda input: input + 1
    use_host_products(layer)
    assert type(layer) is nn.Linear
    assert torch.equal(layer(torch.ones(40, 4)), torch.full((40, 4), 2.0))
