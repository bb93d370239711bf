"""Autocast means bfloat16, with torch's operator lists for accelerators."""

from __future__ import annotations

import concurrent.futures
import threading

import pytest
import torch


def test_products_are_bfloat16_and_reductions_float32():
    a = torch.randn(4, 4, device="neuron", requires_grad=True)
    with torch.autocast("neuron"):
        product = a @ a
        assert product.dtype == torch.bfloat16
        assert torch.nn.functional.linear(a, a).dtype == torch.bfloat16
        assert torch.nn.functional.softmax(product, -1).dtype == torch.float32
        assert torch.nn.functional.layer_norm(product, (4,)).dtype == torch.float32
        assert torch.nn.functional.embedding(torch.tensor([0], device="neuron"), a).dtype == torch.float32
        with torch.autocast("neuron", enabled=False):
            assert (a @ a).dtype == torch.float32
    product.sum().backward()
    assert a.grad.dtype == torch.float32
    with torch.autocast("neuron", dtype=torch.float16):
        assert (a @ a).dtype == torch.float16
    with torch.neuron.amp.autocast():
        assert (a @ a).dtype == torch.bfloat16


def test_a_probability_loss_is_refused_under_autocast():
    p = torch.rand(2, device="neuron")
    with torch.autocast("neuron"), pytest.raises(RuntimeError, match="unsafe to autocast"):
        torch.nn.functional.binary_cross_entropy(p, p)


def test_a_thread_of_its_own_autocasts_to_bfloat16_too():
    seen = []

    def work() -> None:
        a = torch.randn(2, 2, device="neuron")
        with torch.autocast("neuron"):
            seen.append((a @ a).dtype)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [torch.bfloat16]


def test_module_functions_agree_with_torchs():
    assert torch.neuron.get_autocast_dtype() == torch.bfloat16
    assert not torch.neuron.is_autocast_enabled()
    with torch.autocast("neuron"):
        assert torch.neuron.is_autocast_enabled()
    assert torch.bfloat16 in torch.neuron.get_amp_supported_dtype()
    assert torch.amp.is_autocast_available("neuron")


def test_gradient_scaling_steps():
    layer = torch.nn.Linear(2, 2).to("neuron")
    optimizer = torch.optim.SGD(layer.parameters(), 0.1)
    scaler = torch.neuron.amp.GradScaler()
    before = layer.weight.detach().clone()
    scaler.scale(layer(torch.ones(1, 2, device="neuron")).sum()).backward()
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    torch.testing.assert_close(layer.weight, before - 0.1)


@pytest.mark.parametrize(
    ("compute", "expected"),
    [
        (lambda x: x.sum(), torch.float32),
        (lambda x: x.cumsum(0), torch.float32),
        (lambda x: torch.norm(x), torch.float32),
        (lambda x: torch.norm(x, dim=0), torch.float32),
        (lambda x: x.exp() + x.float().rsqrt(), torch.float32),
        (lambda x: torch.addcmul(x, x, x.float()), torch.float32),
        (lambda x: torch.nn.functional.scaled_dot_product_attention(x[None], x.float()[None], x[None]), torch.bfloat16),
        (lambda x: torch.einsum("ij,jk->ik", x.float(), x), torch.bfloat16),
        (lambda x: x.double().exp(), torch.float64),
        (lambda x: x + x, torch.bfloat16),
    ],
)
def test_each_policy_gives_its_type(compute, expected):
    with torch.autocast("neuron"):
        assert compute(torch.rand(4, 4, dtype=torch.bfloat16, device="neuron")).dtype == expected


def test_a_weight_is_cast_once_in_a_block():
    weight = torch.randn(4, 4, device="neuron", requires_grad=True)
    x = torch.randn(2, 4, device="neuron")
    with torch.autocast("neuron"):
        torch.nn.functional.linear(x, weight)
        held = torch.neuron.memory_allocated()
        for _ in range(3):
            torch.nn.functional.linear(x, weight)
        assert torch.neuron.memory_allocated() == held


def in_a_thread(work):
    """What `work` returns, or raises, in a thread that has done nothing else."""
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        return pool.submit(work).result()


def test_bfloat16_is_the_type_from_a_threads_first_moment():
    assert in_a_thread(lambda: torch.get_autocast_dtype("neuron")) == torch.bfloat16
    assert in_a_thread(lambda: torch.autocast("neuron").fast_dtype) == torch.bfloat16
    assert in_a_thread(torch.neuron.get_autocast_dtype) == torch.bfloat16
    assert in_a_thread(lambda: torch.get_autocast_dtype("cpu")) == torch.bfloat16
    assert in_a_thread(lambda: torch.get_autocast_dtype("cuda")) == torch.float16


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_type_that_a_thread_sets_stays_whatever_runs_there(dtype):
    def work():
        torch.set_autocast_dtype("neuron", dtype)
        a = torch.ones(2, 2, device="neuron")
        with torch.autocast("neuron"):
            product = a @ a
        with torch.autocast("neuron", dtype=torch.bfloat16):
            a @ a
        return product.dtype, torch.get_autocast_dtype("neuron")

    assert in_a_thread(work) == (dtype, dtype)
    assert torch.get_autocast_dtype("neuron") == torch.bfloat16


def test_a_compiled_function_may_ask_for_the_type():
    @torch.compile(backend="eager", fullgraph=True)
    def work(x):
        with torch.autocast("neuron"):
            product = x @ x
        return product.to(torch.get_autocast_dtype("neuron"))

    assert work(torch.ones(2, 2, device="neuron")).dtype == torch.bfloat16
