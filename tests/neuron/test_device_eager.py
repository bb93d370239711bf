"""Operators on the device are the CPU's, on the same numbers, with the errors of any accelerator."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
import torch.nn.functional as F

NEURON = torch.device("neuron", 0)


def on_both(make, *, grad: bool = True):
    """Run `make(x)` on both devices from the same numbers; the results and the gradients of x, on the CPU."""
    base = torch.randn(6, 8, generator=torch.Generator().manual_seed(0))
    sides = []
    for device in ("cpu", NEURON):
        torch.manual_seed(0)
        x = base.clone().to(device).requires_grad_(grad)
        result = make(x)
        if grad:
            result.square().sum().backward()
        sides.append((result.detach().cpu(), x.grad.cpu() if grad else None))
    return sides


@pytest.mark.parametrize(
    "make",
    [
        lambda x: x @ x.T,
        lambda x: F.softmax(x, -1) * 2 - 1,
        lambda x: F.layer_norm(x, (8,)),
        lambda x: F.conv1d(x[None], x[:, :, None].transpose(0, 1).expand(-1, 6, -1)[:2]),
        lambda x: F.scaled_dot_product_attention(x[None, None], x[None, None], x[None, None], is_causal=True),
        lambda x: F.dropout(x, 0.3),
        lambda x: F.dropout(x, 0.3, inplace=False) + F.alpha_dropout(x, 0.2),
        lambda x: torch.stack(x.split(2)).cumsum(0),
        lambda x: torch.sgn(x) * x,
        lambda x: x[torch.tensor([0, 2], device=x.device)].sort(-1).values,
        lambda x: F.embedding(torch.tensor([1, 1, 0], device=x.device), x),
        lambda x: F.cross_entropy(x, torch.arange(6, device=x.device)),
        lambda x: torch.where(x > 0, x, x.exp()).logsumexp(-1),
        lambda x: F.max_pool1d(x[None], 2) + F.interpolate(x[None], scale_factor=0.5),
        lambda x: torch.einsum("ij,kj->ik", x, x).tril(),
    ],
)
def test_forward_and_backward_are_the_cpus_bit_for_bit(make):
    (host, host_grad), (device, device_grad) = on_both(make)
    assert torch.equal(host, device)
    assert torch.equal(host_grad, device_grad)


@pytest.mark.parametrize("cell", [torch.nn.LSTM, torch.nn.GRU, torch.nn.RNN])
def test_recurrent_layers_run_and_agree(cell):
    torch.manual_seed(0)
    layer = cell(4, 5, num_layers=2)
    x = torch.randn(3, 2, 4)
    moved = copy.deepcopy(layer).to(NEURON)
    host, device = layer(x)[0], moved(x.to(NEURON))[0]
    host.sum().backward()
    device.sum().backward()
    torch.testing.assert_close(device.cpu(), host)
    torch.testing.assert_close(moved.weight_ih_l0.grad.cpu(), layer.weight_ih_l0.grad)


def test_a_view_shares_its_base_and_an_alias_copies_nothing():
    x = torch.zeros(4, 4, device=NEURON)
    x.unfold(0, 2, 2)[0, 0, 0] = 7
    torch.view_as_real(torch.zeros(2, dtype=torch.cfloat, device=NEURON)).fill_(1)
    pointer = x.data_ptr()
    x.add_(1)
    assert x.data_ptr() == pointer
    assert x[0, 0].item() == 8
    parts = x.chunk(2)
    parts[1].zero_()
    assert x[2:].sum().item() == 0


def test_in_place_and_out_return_the_tensor_itself():
    x = torch.ones(3, device=NEURON)
    assert x.mul_(2) is x
    out = torch.empty(3, device=NEURON)
    assert torch.add(x, x, out=out) is out
    assert x.resize_(5) is x
    assert x.shape == (5,)


def test_set_moves_a_tensor_onto_other_memory():
    source = torch.ones(10, device=NEURON)
    target = torch.empty(0, device=NEURON)
    target.set_(source)
    assert target.sum().item() == 10
    target.set_(source.untyped_storage(), 2, (3,), (1,)).fill_(5)
    assert source.sum().item() == 22
    assert target.set_().numel() == 0
    source.data = torch.zeros(3, device=NEURON)
    assert source.shape == (3,)


def test_conjugates_and_inference_tensors_keep_their_nature():
    z = torch.randn(3, 3, dtype=torch.cfloat)
    moved = z.to(NEURON)
    torch.testing.assert_close((moved.conj() @ moved).cpu(), z.conj() @ z)
    torch.testing.assert_close(moved.conj().imag.cpu(), z.conj().imag)
    with torch.inference_mode():
        x = torch.ones(2, 2, device=NEURON)
        y = (x @ x).view(4)[1:]
        y.add_(1)
    assert y.is_inference()
    assert x.unfold(0, 1, 1).is_inference()


def test_function_transforms_work():
    x = torch.randn(3, device=NEURON)
    assert torch.func.vmap(torch.func.grad(lambda v: (v * v).sum()))(x[:, None]).device == NEURON
    torch.testing.assert_close(torch.func.hessian(lambda v: (v**3).sum())(x), torch.diag(6 * x))


# ---- where tensors are


@pytest.mark.parametrize(
    "mix",
    [
        lambda: torch.mm(torch.ones(2, 2, device=NEURON), torch.ones(2, 2)),
        lambda: torch.ones(2, device=NEURON) + torch.ones(2),
        lambda: torch.ones(2).add_(torch.ones(2, device=NEURON)),
        lambda: torch.cat([torch.ones(2, device=NEURON), torch.ones(2)]),
        lambda: torch.ones(2, device="neuron:0") * torch.ones(2, device="neuron:1"),
        lambda: torch._foreach_add([torch.ones(2, device="neuron:0"), torch.ones(2, device="neuron:1")], 1.0),
        lambda: F.embedding(torch.tensor([0], device="neuron:1"), torch.ones(2, 2, device="neuron:0")),
        lambda: F.linear(torch.ones(2, 2, device=NEURON), torch.ones(2, 2)),
    ],
)
def test_operands_on_two_devices_are_refused_as_on_cuda(mix):
    with pytest.raises(
        RuntimeError, match="Expected all tensors to be on the same device, but found at least two devices"
    ):
        mix()


def test_host_scalars_and_host_indices_may_stand_beside_device_tensors():
    x = torch.arange(4.0, device=NEURON)
    assert (x * torch.tensor(2.0)).tolist() == [0, 2, 4, 6]
    assert x[torch.tensor([0, 3])].tolist() == [0, 3]
    x[torch.tensor([True, False, False, True])] = torch.tensor(9.0)
    assert x.tolist() == [9, 1, 2, 9]


def test_copies_cross_devices_and_cores():
    x = torch.arange(3.0)
    a = x.to("neuron:1", non_blocking=True)
    b = a.to("neuron:2")
    assert b.cpu().tolist() == [0, 1, 2]
    x.copy_(b + 1)
    assert x.tolist() == [1, 2, 3]
    assert a.neuron(2).device == b.device
    assert (a.is_neuron, x.is_neuron) == (True, False)
    assert torch.nn.Linear(2, 2).neuron().weight.device.type == "neuron"
    assert torch.ones(1).to(1).device == torch.device("neuron:1"), "an integer is an index of the accelerator"


def test_a_core_that_is_not_there_is_refused_in_the_vendors_words():
    with pytest.raises(RuntimeError, match=r"Invalid device id: 99. Valid range is 0 to \d+"):
        torch.empty(1, device="neuron:99")
    with pytest.raises(ValueError, match=r"Invalid device id: 99. Valid range is 0 to \d+"):
        torch.neuron.set_device(99)


def test_device_tensors_do_not_become_numpy_silently():
    with pytest.raises(TypeError, match="can't convert neuron:0 device type tensor to numpy"):
        torch.ones(1, device=NEURON).numpy()
    assert repr(torch.ones(1, device=NEURON)) == "tensor([1.], device='neuron:0')"


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.sparse_coo_tensor([[0], [0]], [1.0], (2, 2), device=NEURON),
        lambda: torch.eye(2).to_sparse().to(NEURON),
        lambda: torch.eye(2, device=NEURON).to_sparse(),
        lambda: torch.eye(2).to_sparse_csr().to(NEURON) @ torch.ones(2, 2, device=NEURON),
        lambda: torch.quantize_per_tensor(torch.ones(2, device=NEURON), 1.0, 0, torch.qint8),
        lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]).to(NEURON),
    ],
)
def test_layouts_the_device_does_not_hold_are_refused_with_the_way_out(make):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(NotImplementedError, match=r"dense strided tensors only.*(dense|CPU)"):
            make()


# ---- the operators that are not the CPU's


def test_integers_can_be_counted_into_bins():
    experts = torch.tensor([0, 1, 1, 3, 7], device=NEURON, dtype=torch.int32)
    counts = torch.histc(experts, bins=8, min=0, max=7)
    assert counts.tolist() == [1, 2, 0, 1, 0, 0, 0, 1]
    assert counts.dtype == torch.int32
    assert torch.histc(experts.float(), bins=8, min=0, max=7).tolist() == counts.tolist()
    assert torch.histc(experts, bins=2).tolist() == [4, 1]
    assert torch.histc(torch.tensor([5, 5], device=NEURON), bins=2).tolist() == [0, 2]
    out = torch.empty(0, dtype=torch.int32, device=NEURON)
    assert torch.histc(experts, bins=8, min=0, max=7, out=out) is out
    assert out.tolist() == counts.tolist()


def test_zero_gradients_without_memory_are_made_real():
    x = torch.randn(3, device=NEURON, requires_grad=True)
    torch.sgn(x).sum().backward()
    assert x.grad.tolist() == [0, 0, 0]


def test_attention_takes_the_cpus_flash_kernel():
    from torch.utils._python_dispatch import TorchDispatchMode

    class Names(TorchDispatchMode):
        def __init__(self):
            super().__init__()
            self.seen = []

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            self.seen.append(str(function))
            return function(*args, **(kwargs or {}))

    q = torch.randn(1, 2, 8, 16, device=NEURON, requires_grad=True)
    with Names() as names:
        F.scaled_dot_product_attention(q, q, q, is_causal=True).sum().backward()
    assert "aten._scaled_dot_product_flash_attention_for_cpu.default" in names.seen
    assert "aten._scaled_dot_product_flash_attention_for_cpu_backward.default" in names.seen


def test_custom_operators_defined_later_reach_their_cpu_kernel():
    @torch.library.custom_op("trellium_test::plus_one", mutates_args=(), device_types="cpu")
    def plus_one(x: torch.Tensor) -> torch.Tensor:
        assert x.device.type == "cpu"
        return x + 1

    @torch.library.custom_op("trellium_test::add_into", mutates_args=("x",), device_types="cpu")
    def add_into(x: torch.Tensor, y: torch.Tensor | None) -> None:
        x.add_(1 if y is None else y)

    x = torch.zeros(2, device=NEURON)
    assert plus_one(x).device == NEURON
    add_into(x, None)
    add_into(x, torch.ones(2, device=NEURON))
    assert x.tolist() == [2, 2]


def test_uninitialised_memory_is_filled_when_determinism_is_asked_for():
    torch.use_deterministic_algorithms(True)
    try:
        assert torch.empty(2, device=NEURON).isnan().all()
        assert (torch.empty(2, dtype=torch.int32, device=NEURON) == torch.iinfo(torch.int32).max).all()
        assert torch.empty_strided((2,), (1,), device=NEURON).isnan().all()
    finally:
        torch.use_deterministic_algorithms(False)


# ---- modules


class Tied(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = torch.nn.Embedding(5, 4)
        self.head = torch.nn.Linear(4, 5, bias=False)
        self.head.weight = self.embedding.weight


def test_tied_weights_stay_tied_wherever_the_module_goes():
    model = Tied().to(NEURON)
    assert model.head.weight is model.embedding.weight
    model.to("neuron:1")
    assert model.head.weight is model.embedding.weight
    assert model.cpu().head.weight is model.embedding.weight
    assert model.neuron().head.weight is model.embedding.weight


def test_an_optimizer_made_before_the_move_trains_the_moved_parameters():
    layer = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(layer.parameters(), 0.1)
    layer.to(NEURON)
    before = layer.weight.detach().clone()
    layer(torch.ones(1, 2, device=NEURON)).sum().backward()
    optimizer.step()
    assert not torch.equal(layer.weight, before)


@pytest.mark.parametrize("form", [{}, {"foreach": False}, {"foreach": True}, {"fused": True}])
def test_adamw_steps_are_the_cpus_bit_for_bit(form):
    weights = []
    for device in ("cpu", NEURON):
        torch.manual_seed(0)
        layer = torch.nn.Linear(4, 4).to(device)
        optimizer = torch.optim.AdamW(layer.parameters(), **form)
        for _ in range(3):
            layer(torch.ones(1, 4, device=device)).square().sum().backward()
            torch.nn.utils.clip_grad_norm_(layer.parameters(), 1.0)
            optimizer.step()
        weights.append(layer.weight.detach().cpu())
    assert torch.equal(*weights)


def test_checkpointed_dropout_gives_the_gradients_of_the_plain_run():
    from torch.utils.checkpoint import checkpoint

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Dropout(0.5), torch.nn.Linear(16, 16)).to(NEURON)
    x = torch.randn(4, 16, device=NEURON)
    gradients = []
    for reentrant in (None, True, False):
        model.zero_grad()
        torch.manual_seed(0)
        given = x.clone().requires_grad_()
        result = model(given) if reentrant is None else checkpoint(model, given, use_reentrant=reentrant)
        result.sum().backward()
        gradients.append(model[0].weight.grad.clone())
    assert torch.equal(gradients[0], gradients[1])
    assert torch.equal(gradients[0], gradients[2])


def test_default_device_makes_everything_on_the_device():
    torch.set_default_device("neuron")
    try:
        assert torch.ones(2).device.type == "neuron"
        assert torch.nn.Linear(2, 2).weight.device.type == "neuron"
        assert torch.randperm(4).device.type == "neuron"
    finally:
        torch.set_default_device(None)
