"""`torch.compile(backend="neuron")`: results equal to the CPU's eager ones, and what the real compiler refuses, refused.

Graphs are tiny on purpose: each kernel is a call of the C++ compiler.
"""

from __future__ import annotations

import copy
import logging
import os

import pytest
import torch
from torch import nn

if not (hasattr(torch, "neuron") and torch.neuron.is_available()):
    pytest.skip("needs the emulated device", allow_module_level=True)

import torch._dynamo
from torch._dynamo.exc import BackendCompilerFailed, FailOnRecompileLimitHit
from torch.utils.checkpoint import checkpoint


@pytest.fixture(autouse=True)
def fresh(tmp_path_factory, monkeypatch):
    """One cache for the whole session, Dynamo's memory for one test."""
    monkeypatch.setenv("TRELLIUM_HOME", str(tmp_path_factory.getbasetemp() / "trellium_home"))
    torch._dynamo.reset()
    torch.neuron.reset_dynamo_metrics()
    yield
    torch._dynamo.reset()


def compiled(function, **settings):
    return torch.compile(function, backend="neuron", **settings)


def copies(values, device, *, train):
    moved = []
    for value in values:
        if isinstance(value, torch.Tensor):
            value = value.detach().clone().to(device)
            value.requires_grad_(train and value.is_floating_point())
        moved.append(value)
    return moved


def same_as_eager(function, *inputs, train=False, settings=None):
    """Run compiled on neuron and eagerly on the CPU; results, gradients and inputs afterwards must be equal. Gives the compiled results."""
    outcomes = []
    for device, call in (("neuron", compiled(function, **(settings or {}))), ("cpu", function)):
        arguments = copies(inputs, device, train=train)
        results = call(*arguments)
        tensors = [result for result in torch.utils._pytree.tree_leaves(results) if isinstance(result, torch.Tensor)]
        if train:
            sum(tensor.sum() for tensor in tensors if tensor.requires_grad).backward()
        gradients = [value.grad for value in arguments if isinstance(value, torch.Tensor)]
        outcomes.append((results, tensors, gradients, arguments))
    (results, *ours), (_, *theirs) = outcomes
    for mine, reference in zip(ours, theirs, strict=True):
        for a, b in zip(mine, reference, strict=True):
            if isinstance(b, torch.Tensor):
                torch.testing.assert_close(a.detach().cpu(), b.detach())
            else:
                assert a == b
    return results


# ---- the same numbers


def test_a_function_is_inferred_and_trained_on_the_device():
    result = same_as_eager(lambda x, w: torch.tanh(x @ w), torch.randn(4, 8), torch.randn(8, 3), train=True)
    assert result.device == torch.device("neuron", 0)
    metrics = torch.neuron.get_dynamo_metrics()
    assert (metrics["graphs"], metrics["cache_misses"] + metrics["cache_hits"], metrics["fallbacks"]) == (1, 1, 0)


def test_a_module_with_tied_weights_trains_as_one():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding = nn.Embedding(5, 4)
            self.head = nn.Linear(4, 5, bias=False)
            self.head.weight = self.embedding.weight

        def forward(self, ids):
            return self.head(self.embedding(ids)).sum()

    torch.manual_seed(0)
    reference = Tied()
    module = copy.deepcopy(reference).to("neuron")
    ids = torch.tensor([[0, 3, 3]])
    compiled(module)(ids.to("neuron")).backward()
    reference(ids).backward()
    assert module.head.weight is module.embedding.weight
    torch.testing.assert_close(module.head.weight.grad.cpu(), reference.head.weight.grad)


def test_an_input_is_changed_in_place():
    def accumulate(total, x):
        total.add_(x)
        return total @ x

    same_as_eager(accumulate, torch.randn(3, 3), torch.randn(3, 3))


def test_results_that_are_inputs_or_views_of_them_share_their_memory():
    def function(x, y):
        return x, x.view(-1)[2:], x.t(), x @ y

    x, y = (torch.randn(3, 3, device="neuron") for _ in range(2))
    same, tail, transposed, product = compiled(function)(x, y)
    torch.testing.assert_close(product.cpu(), x.cpu() @ y.cpu())
    assert same is x
    x.zero_()
    assert tail.abs().sum().item() == 0
    assert transposed.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()


def test_a_constant_of_the_code_is_carried_into_the_graph_and_the_cache():
    def function(x):
        return x @ torch.tensor([[1.0], [2.0]], device=x.device)

    x = torch.randn(3, 2)
    same_as_eager(function, x)
    torch._dynamo.reset()
    same_as_eager(function, x)
    assert torch.neuron.get_dynamo_metrics()["cache_hits"] == 1


def test_graphs_of_two_cores_stay_on_their_cores():
    if torch.neuron.device_count() < 2:
        pytest.skip("needs two cores")
    x = torch.randn(3, 3, device="neuron:1")
    product, zeros, moved = compiled(lambda x: (x @ x, x.new_zeros(2), x.to("neuron:0")))(x)
    assert [result.device.index for result in (product, zeros, moved)] == [1, 1, 0]
    torch.testing.assert_close(product.cpu(), x.cpu() @ x.cpu())
    x.zero_()
    assert moved.abs().sum().item() > 0


def test_a_part_of_an_input_is_changed_in_place():
    def function(x):
        x[:, 0].zero_()
        return x @ x

    same_as_eager(function, torch.randn(3, 3))


def test_running_statistics_are_updated_by_a_compiled_step():
    torch.manual_seed(0)
    reference = nn.BatchNorm1d(4)
    module = copy.deepcopy(reference).to("neuron")
    x = torch.randn(5, 4)
    compiled(module)(x.to("neuron")).square().sum().backward()
    reference(x).square().sum().backward()
    torch.testing.assert_close(module.running_mean.cpu(), reference.running_mean)
    torch.testing.assert_close(module.weight.grad.cpu(), reference.weight.grad)


def test_attention_with_symbols_is_refused_as_any_other():
    q = torch.randn(1, 2, 8, 4, device="neuron")
    with raised() as caught:
        compiled(lambda q: nn.functional.scaled_dot_product_attention(q, q, q), dynamic=True)(q)
    assert "static shapes only" in str(caught.value)


def test_a_graph_may_have_no_operator_at_all():
    same_as_eager(lambda x: (x, 3, x), torch.randn(2))
    same_as_eager(lambda x: x.view(4), torch.randn(2, 2), train=True)


def test_a_graph_break_leaves_two_graphs_and_the_same_numbers():
    def broken(x, w):
        hidden = x @ w
        torch._dynamo.graph_break()
        return hidden @ w

    same_as_eager(broken, torch.randn(3, 3), torch.randn(3, 3), train=True)
    assert torch.neuron.get_dynamo_metrics()["graphs"] == 2


def test_results_move_between_host_and_device_by_copy():
    def function(x, host):
        return x.to("cpu"), host.to("neuron"), x @ x

    x, host = torch.randn(3, 3, device="neuron"), torch.randn(2)
    on_host, on_device, _ = compiled(function)(x, host)
    assert (on_host.device.type, on_device.device.type) == ("cpu", "neuron")
    torch.testing.assert_close(on_host, x.cpu())
    torch.testing.assert_close(on_device.cpu(), host)
    expected = host.clone()
    x.zero_()
    host.zero_()
    assert on_host.abs().sum().item() > 0
    torch.testing.assert_close(on_device.cpu(), expected)


def test_a_custom_operator_is_one_node_with_its_own_backward():
    @torch.library.custom_op("trellium_test::cube", mutates_args=())
    def cube(x: torch.Tensor) -> torch.Tensor:
        return x * x * x

    cube.register_fake(lambda x: torch.empty_like(x))
    cube.register_autograd(
        lambda ctx, grad: 3 * ctx.saved_tensors[0] ** 2 * grad,
        setup_context=lambda ctx, inputs, output: ctx.save_for_backward(inputs[0]),
    )
    same_as_eager(lambda x, w: cube(x @ w), torch.randn(3, 3), torch.randn(3, 3), train=True)


def test_autocast_casts_as_it_does_eagerly_on_the_device():
    def function(x, w):
        with torch.autocast("neuron", dtype=torch.bfloat16):
            return x @ w

    x, w = (torch.randn(4, 4, device="neuron") for _ in range(2))
    result = compiled(function)(x, w)
    assert result.dtype == torch.bfloat16
    torch.testing.assert_close(result.cpu(), function(x, w).cpu())


def test_a_checkpointed_region_has_the_gradients_of_a_plain_one():
    def block(x, w):
        return torch.tanh(x @ w)

    same_as_eager(
        lambda x, w: checkpoint(block, x, w, use_reentrant=False), torch.randn(3, 3), torch.randn(3, 3), train=True
    )


def test_dropout_obeys_the_device_s_seed_and_its_mask_is_the_backward_s():
    call = compiled(lambda x: nn.functional.dropout(x, 0.5))
    x = torch.ones(64, device="neuron", requires_grad=True)
    on_host = torch.get_rng_state()
    torch.neuron.manual_seed(7)
    first = call(x)
    second = call(x)
    torch.neuron.manual_seed(7)
    again = call(x)
    assert torch.equal(torch.get_rng_state(), on_host)
    assert torch.equal(first.cpu(), again.cpu())
    assert not torch.equal(first.cpu(), second.cpu())
    assert 0 < int((first == 0).sum()) < 64
    again.sum().backward()
    assert torch.equal((x.grad == 0).cpu(), (again == 0).cpu())


def test_counting_tokens_of_experts_is_compiled():
    def function(ids):
        return torch.histc(ids, bins=4, min=0, max=3)

    ids = torch.tensor([0, 3, 3, 1, 9], dtype=torch.int32, device="neuron")
    assert compiled(function)(ids).tolist() == function(ids).tolist() == [1, 1, 0, 2]


def test_compiled_results_are_counted_on_their_core():
    before = torch.neuron.memory_allocated()
    x = torch.randn(256, 256, device="neuron")
    result = compiled(lambda x: x @ x)(x)
    assert torch.neuron.memory_allocated() - before == 2 * 256 * 256 * 4
    del result
    assert torch.neuron.memory_allocated() - before == 256 * 256 * 4


# ---- what is refused


def raised(error_type=BackendCompilerFailed):
    return pytest.raises(error_type)


@pytest.mark.parametrize("how", ["dynamic=True", "mark_dynamic"])
def test_a_dynamic_dimension_is_refused_with_the_rule_and_the_fix(how):
    x = torch.randn(4, 4, device="neuron")
    if how == "mark_dynamic":
        torch._dynamo.mark_dynamic(x, 0)
    with raised() as caught:
        compiled(lambda x: x @ x.t(), dynamic=True if how == "dynamic=True" else None)(x)
    told = str(caught.value)
    assert "static shapes only" in told
    assert "dynamic=False" in told
    assert "pad_to_multiple_of=128" in told


def test_a_second_shape_is_a_second_graph_not_a_symbol():
    call = compiled(lambda x: x @ x.t())
    for rows in (2, 3, 4):
        assert call(torch.randn(rows, 4, device="neuron")).shape == (rows, rows)
    assert torch.neuron.get_dynamo_metrics()["graphs"] == 3


def test_a_mode_is_ignored_with_a_warning():
    x = torch.randn(2, 2, device="neuron")
    with pytest.warns(UserWarning, match="max-autotune"):
        compiled(lambda x: x @ x, mode="max-autotune")(x)


def test_an_unknown_option_is_refused_with_the_known_ones():
    with raised() as caught:
        compiled(lambda x: x @ x, options={"optlevel": 2})(torch.randn(2, 2, device="neuron"))
    assert "optlevel" in str(caught.value)
    assert "fallback_execution" in str(caught.value)


def test_an_input_on_the_cpu_is_taken_unless_the_environment_forbids_it(monkeypatch):
    def function(x, scale):
        return (x @ x) @ scale.to(x.device)

    x, scale = torch.randn(2, 2, device="neuron"), torch.randn(2, 2)
    torch.testing.assert_close(compiled(function)(x, scale).cpu(), (x.cpu() @ x.cpu()) @ scale)
    torch._dynamo.reset()
    monkeypatch.setenv("TORCH_NEURONX_DYNAMO_DISABLE_CPU_AUTOCOPY", "1")
    with raised() as caught:
        compiled(function)(x, scale)
    assert "Input tensor at index 1 is on cpu device" in str(caught.value)


@pytest.fixture
def no_lowering(monkeypatch):
    """A compiler that takes no graph."""
    from trellium.neuron import graphs

    def refuse(*_, **__):
        raise NotImplementedError("no lowering for this")

    monkeypatch.setattr(graphs, "compile_fx_inner", refuse)


def test_a_graph_that_does_not_compile_is_an_error_with_frame_and_shapes(no_lowering):
    def unlucky(x):
        return x @ x

    with raised() as caught:
        compiled(unlucky)(torch.randn(5, 5, device="neuron"))
    told = str(caught.value)
    assert "test_graphs.py" in told
    assert "unlucky" in told
    assert "5x5" in told
    assert "no lowering for this" in told
    assert "TORCH_NEURONX_DISABLE_FALLBACK_EXECUTION" in told
    assert torch.neuron.get_dynamo_metrics()["failures"] == 1


@pytest.mark.parametrize("how", ["option", "environment"])
def test_it_runs_operator_by_operator_where_that_was_asked_for_and_says_so(how, no_lowering, monkeypatch, caplog):
    if how == "environment":
        monkeypatch.setenv("TORCH_NEURONX_DISABLE_FALLBACK_EXECUTION", "0")
    settings = {"options": {"fallback_execution": True}} if how == "option" else {}
    x = torch.randn(5, 5, device="neuron")
    with caplog.at_level(logging.WARNING, "trellium.neuron.graphs"):
        result = compiled(lambda x: x @ x, **settings)(x)
    torch.testing.assert_close(result.cpu(), x.cpu() @ x.cpu())
    assert "5x5" in caplog.text
    assert "operator by operator" in caplog.text
    assert torch.neuron.get_dynamo_metrics()["fallbacks"] == 1


def test_past_the_recompile_limit_it_is_an_error_and_not_eager(caplog):
    call = compiled(lambda x: x @ x.t())
    call(torch.randn(1, 4, device="neuron"))
    call(torch.randn(2, 4, device="neuron"))
    with (
        torch._dynamo.config.patch(recompile_limit=2),
        caplog.at_level(logging.WARNING, "torch._dynamo"),
        pytest.raises(FailOnRecompileLimitHit) as caught,
    ):
        call(torch.randn(37, 4, device="neuron"))
    told = str(caught.value)
    assert f"<lambda> ({__file__}:" in told
    assert "recompile_limit = 2" in told
    assert "x [37, 4]" in told
    assert "expected 1, actual 37" in told or "expected 2, actual 37" in told
    assert "pad_to_multiple_of" in told
    assert "TRELLIUM_NEURON_RECOMPILE_LIMIT=N" in told
    assert "recompile_limit (2)" in caplog.text
    assert "37" in caplog.text


def test_importing_torch_imports_no_compiler():
    import subprocess
    import sys

    done = subprocess.run(
        [sys.executable, "-c", "import sys, torch; print('torch._dynamo' in sys.modules, torch.neuron.get_dynamo_metrics()['graphs'])"],
        capture_output=True,
        text=True,
        check=True,
        env=os.environ.copy(),
    )  # fmt: skip
    assert done.stdout.split() == ["False", "0"]


@pytest.mark.parametrize(("before", "named", "after"), [(8, None, 64), (4, None, 4), (200, None, 200), (8, "12", 12)])
def test_the_recompile_limit_fits_a_device_with_a_graph_for_each_shape(before, named, after, monkeypatch):
    from trellium.neuron import compile_settings

    monkeypatch.setattr(compile_settings, "_settled", False)
    if named is not None:
        monkeypatch.setenv("TRELLIUM_NEURON_RECOMPILE_LIMIT", named)
    with torch._dynamo.config.patch(
        recompile_limit=before, automatic_dynamic_shapes=True, fail_on_recompile_limit_hit=False
    ):
        compile_settings.settle()
        assert torch._dynamo.config.recompile_limit == after
        assert torch._dynamo.config.automatic_dynamic_shapes is False
        assert torch._dynamo.config.fail_on_recompile_limit_hit is True


def test_zero_leaves_dynamo_s_settings_alone_and_a_word_is_refused(monkeypatch):
    from trellium.neuron import compile_settings

    monkeypatch.setattr(compile_settings, "_settled", False)
    monkeypatch.setenv("TRELLIUM_NEURON_RECOMPILE_LIMIT", "0")
    with torch._dynamo.config.patch(automatic_dynamic_shapes=True):
        compile_settings.settle()
        assert torch._dynamo.config.automatic_dynamic_shapes is True
    monkeypatch.setattr(compile_settings, "_settled", False)
    monkeypatch.setenv("TRELLIUM_NEURON_RECOMPILE_LIMIT", "many")
    with pytest.raises(ValueError, match="whole number"):
        compile_settings.settle()


@pytest.mark.parametrize("settings", [{}, {"backend": "inductor"}], ids=["nothing", "inductor"])
def test_without_a_backend_a_graph_on_the_device_goes_to_the_devices(settings):
    x = torch.randn(3, 7, device="neuron")
    torch.testing.assert_close(torch.compile(lambda x: (x * 3).tanh(), **settings)(x).cpu(), (x.cpu() * 3).tanh())
    made = torch.compile(lambda: torch.ones(3, 7, device="neuron") * 5, **settings)()
    assert (made.device.type, made.sum().item()) == ("neuron", 105)
    assert torch.neuron.get_dynamo_metrics()["graphs"] == 2


def test_without_a_backend_dynamic_shapes_are_refused_and_inductors_options_are_named():
    x = torch.randn(3, 7, device="neuron")
    with pytest.raises(BackendCompilerFailed, match="static shapes only"):
        torch.compile(lambda x: x * 2, dynamic=True)(x)
    with pytest.warns(UserWarning, match="max_autotune.* mean nothing"):
        torch.compile(lambda x: x * 2, options={"max_autotune": True}, dynamic=False)(x)


def test_without_a_backend_a_graph_on_the_host_is_inductors():
    assert torch.compile(lambda x: x * 2, mode="default")(torch.ones(3)).tolist() == [2, 2, 2]
    assert torch.neuron.get_dynamo_metrics()["graphs"] == 0


def test_the_vendors_variable_dumps_what_dynamo_saw_and_what_was_compiled(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_NEURONX_DEBUG_DIR", str(tmp_path))
    monkeypatch.setenv("RANK", "3")
    x = torch.randn(3, 5, device="neuron", requires_grad=True)
    call = compiled(lambda x: x.tanh() * 11, options={"model_name": "my model"})
    call(x).sum().backward()
    folder = tmp_path / "fx_graphs" / "proc_3"
    texts = {path.stem.rpartition("_")[2]: path.read_text() for path in folder.iterdir()}
    assert set(texts) == {"dynamo", "forward", "backward"}
    assert "tanh" in texts["dynamo"]
    assert "[3, 5]" in texts["forward"]
    assert any(path.name.startswith("my_model_") for path in folder.iterdir())
    monkeypatch.delenv("TORCH_NEURONX_DEBUG_DIR")
    call(torch.randn(4, 5, device="neuron", requires_grad=True))
    assert len(list(folder.iterdir())) == 3
