"""Tensors of several devices in one operator: what CUDA allows is allowed, what it refuses is refused, by name."""

from __future__ import annotations

import pytest
import torch

CPU = torch.arange(4.0)
MIXED = "Expected all tensors to be on the same device"


def here(values, core=0):
    return torch.as_tensor(values).to(f"neuron:{core}")


def x():
    return here(torch.arange(4.0))


INDEX = torch.tensor([1, 2])
MASK = torch.tensor([False, True, True, False])


@pytest.mark.parametrize("index", [INDEX, MASK], ids=["index", "mask"])
def test_a_host_index_reads_and_writes_a_neuron_tensor(index):
    assert x()[index].tolist() == [1, 2]
    assert x().index_put((index,), torch.tensor(7.0)).tolist() == [0, 7, 7, 3]
    written = x()
    written[index] = 5
    assert written.tolist() == [0, 5, 5, 3]
    assert x()[here(index)].tolist() == [1, 2]


@pytest.mark.parametrize("index", [INDEX, MASK], ids=["index", "mask"])
@pytest.mark.parametrize(
    "use",
    [
        lambda tensor, index: tensor[index],
        lambda tensor, index: tensor[None, index],
        lambda tensor, index: tensor.clone().__setitem__(index, 1.0),
        lambda tensor, index: tensor.index_put((index,), torch.tensor(1.0)),
        lambda tensor, index: torch.tensor(1.0).expand(4)[index],
    ],
)
def test_a_neuron_index_into_a_host_tensor_is_refused(use, index):
    with pytest.raises(
        RuntimeError, match=r"indices should be either on cpu or on the same device as the indexed tensor \(cpu\)"
    ):
        use(CPU, here(index))


@pytest.mark.parametrize(
    "use",
    [
        lambda index: x()[index],
        lambda index: x().__setitem__(index, 1.0),
        lambda index: x().index_put((index,), torch.tensor(1.0)),
        lambda index: x()[here(INDEX)].index_put((here(INDEX) - 1,), here(torch.ones(2), 1)),
        lambda index: x().index_select(0, index),
        lambda index: x().gather(0, index),
        lambda index: x().take(index),
    ],
)
def test_an_index_on_another_core_is_refused(use):
    with pytest.raises(RuntimeError, match=MIXED + ".*neuron:0 and neuron:1"):
        use(here(INDEX, 1))


ONE_DEVICE = {
    "index_select": lambda t, i, m: t.index_select(0, i),
    "index_add": lambda t, i, m: t.index_add(0, i, t[:2]),
    "index_copy": lambda t, i, m: t.index_copy(0, i, t[:2]),
    "index_fill": lambda t, i, m: t.index_fill(0, i, 1.0),
    "gather": lambda t, i, m: t.gather(0, i),
    "scatter": lambda t, i, m: t.scatter(0, i, 1.0),
    "scatter_add": lambda t, i, m: t.scatter_add(0, i, t[:2]),
    "scatter_reduce": lambda t, i, m: t.scatter_reduce(0, i, t[:2], "sum"),
    "take": lambda t, i, m: t.take(i),
    "masked_fill": lambda t, i, m: t.masked_fill(m, 1.0),
    "masked_select": lambda t, i, m: t.masked_select(m),
    "masked_scatter": lambda t, i, m: t.masked_scatter(m, t),
    "put_": lambda t, i, m: t.clone().put_(i, t[:2]),
}


@pytest.mark.parametrize("use", ONE_DEVICE.values(), ids=ONE_DEVICE.keys())
def test_other_indices_and_masks_are_where_the_tensor_is(use):
    use(x(), here(INDEX), here(MASK))
    for tensor, index, mask in (
        (CPU, here(INDEX), here(MASK)),
        (x(), INDEX, MASK),
        (x(), here(INDEX, 1), here(MASK, 1)),
    ):
        with pytest.raises(RuntimeError, match=MIXED):
            use(tensor, index, mask)


@pytest.mark.parametrize(
    "use",
    [
        lambda t: t.index_select(0, torch.tensor(1)),
        lambda t: t.scatter(0, torch.tensor(1), 1.0),
        lambda t: t.masked_fill(torch.tensor(True), 0.0),
        lambda t: t.masked_select(torch.tensor(True)),
        lambda t: torch.take(t, torch.tensor(1)),
        lambda t: t.index_fill(0, torch.tensor(1), 1.0),
    ],
)
def test_an_index_or_mask_without_dimensions_is_no_number(use):
    with pytest.raises(RuntimeError, match=MIXED):
        use(x())


def test_a_host_tensor_without_dimensions_is_a_number_where_one_may_stand():
    number = torch.tensor(2.0)
    assert (x() * number).tolist() == [0, 2, 4, 6]
    assert x().masked_fill(here(MASK), number).tolist() == [0, 2, 2, 3]
    assert x().index_fill(0, here(INDEX), number).tolist() == [0, 2, 2, 3]
    assert torch.where(here(MASK), x(), number).tolist() == [2, 1, 2, 2]
    with pytest.raises(RuntimeError, match=MIXED):
        x().index_put((here(INDEX),), torch.ones(2))
    with pytest.raises(RuntimeError, match=MIXED):
        x() + CPU


def test_copies_cross_devices():
    target = x()
    target.copy_(CPU * 2)
    assert target.tolist() == [0, 2, 4, 6]
    target.copy_(here(CPU, 1))
    assert target.tolist() == [0, 1, 2, 3]
    target[1:] = CPU[1:] * 3
    assert target.tolist() == [0, 3, 6, 9]
    torch._foreach_copy_([target], [CPU])
    assert target.tolist() == [0, 1, 2, 3]
