"""Tensors leave the device and come back: pickles, copies, torch.save, safetensors."""

from __future__ import annotations

import copy
import io
import pickle

import numpy
import pytest
import safetensors
import safetensors.torch
import torch


def test_pickle_and_deepcopy_keep_values_and_core():
    tensor = torch.randn(3, device="neuron:1")
    for back in (pickle.loads(pickle.dumps(tensor)), copy.deepcopy(tensor)):
        assert back.device == tensor.device
        assert torch.equal(back, tensor)
    parameter = torch.nn.Parameter(tensor)
    assert isinstance(pickle.loads(pickle.dumps(parameter)), torch.nn.Parameter)
    layer = torch.nn.Linear(2, 2).to("neuron")
    assert torch.equal(copy.deepcopy(layer).weight, layer.weight)
    assert tensor.untyped_storage().clone().device == tensor.device


@pytest.mark.parametrize(
    ("location", "expected"),
    [
        (None, "neuron:1"),
        ("cpu", "cpu"),
        ("neuron", "neuron:0"),
        ("neuron:3", "neuron:3"),
        (torch.device("neuron", 2), "neuron:2"),
        ({"neuron:1": "neuron:2"}, "neuron:2"),
    ],
)
def test_load_maps_to_where_it_is_told_and_keeps_views_together(location, expected):
    tensor = torch.randn(3, device="neuron:1")
    file = io.BytesIO()
    torch.save({"whole": tensor, "view": tensor[1:]}, file)
    file.seek(0)
    back = torch.load(file, map_location=location)
    assert str(back["whole"].device) == expected
    assert torch.equal(back["whole"].cpu(), tensor.cpu())
    back["whole"].fill_(1)
    assert back["view"].tolist() == [1, 1], "one storage"


def test_legacy_files_and_memory_mapped_files_load(tmp_path):
    tensor = torch.randn(3, device="neuron:1")
    file = io.BytesIO()
    torch.save(tensor, file, _use_new_zipfile_serialization=False)
    file.seek(0)
    assert torch.equal(torch.load(file), tensor)
    torch.save(torch.ones(2), tmp_path / "plain.pt")
    assert torch.load(tmp_path / "plain.pt", mmap=True, map_location="neuron").tolist() == [1, 1]


def test_loading_onto_a_core_that_is_not_there_says_so():
    file = io.BytesIO()
    torch.save(torch.ones(2), file)
    file.seek(0)
    with pytest.raises(RuntimeError, match=r"device 99 but torch\.neuron\.device_count"):
        torch.load(file, map_location="neuron:99")


@pytest.fixture
def weights(tmp_path):
    path = tmp_path / "weights.safetensors"
    safetensors.torch.save_file({"a": torch.arange(4.0)}, path)
    return path


@pytest.mark.parametrize(
    ("device", "expected"),
    [
        ("neuron", "neuron:0"),
        ("neuron:1", "neuron:1"),
        (torch.device("neuron:2"), "neuron:2"),
        (0, "neuron:0"),
        ("cpu", "cpu"),
    ],
)
def test_safetensors_loads_onto_a_named_core(weights, device, expected):
    loaded = safetensors.torch.load_file(weights, device=device)
    assert str(loaded["a"].device) == expected
    with safetensors.safe_open(weights, framework="pt", device=device) as file:
        assert str(file.get_tensor("a").device) == expected
        assert file.get_slice("a")[1:].tolist() == [1, 2, 3]


def test_safetensors_takes_the_current_core_for_no_index(weights):
    with torch.neuron.device(1):
        assert safetensors.torch.load_file(weights, device="neuron")["a"].device.index == 1


def test_safetensors_still_judges_other_devices(weights):
    with pytest.raises(safetensors.SafetensorError, match="bogus"):
        safetensors.safe_open(weights, framework="pt", device="bogus")


def test_safetensors_saves_and_loads_modules_on_the_device(tmp_path):
    layer = torch.nn.Linear(2, 2).to("neuron")
    safetensors.torch.save_model(layer, str(tmp_path / "layer.safetensors"))
    other = torch.nn.Linear(2, 2).to("neuron")
    safetensors.torch.load_model(other, str(tmp_path / "layer.safetensors"), device="neuron")
    assert torch.equal(other.weight, layer.weight)


def test_accelerate_and_peft_load_onto_the_device(weights):
    import accelerate.utils.modeling
    import peft.utils.save_and_load

    loaded = accelerate.utils.modeling.load_state_dict(str(weights), device_map={"": "neuron:1"})
    assert str(loaded["a"].device) == "neuron:1"
    assert str(peft.utils.save_and_load.safe_load_file(weights, device="neuron")["a"].device) == "neuron:0"


@pytest.mark.parametrize(
    "copied", [copy.copy, copy.deepcopy, lambda it: pickle.loads(pickle.dumps(it))], ids=["copy", "deepcopy", "pickle"]
)
@pytest.mark.parametrize("device", ["neuron:1", "cpu"])
def test_a_generators_copy_goes_on_where_it_stands_and_alone(copied, device):
    generator = torch.Generator(device).manual_seed(3)
    torch.rand(5, generator=generator, device=device)
    twin = copied(generator)
    assert (twin.device, twin.initial_seed()) == (generator.device, 3)
    drawn = torch.rand(5, generator=generator, device=device)
    assert torch.equal(torch.rand(5, generator=twin, device=device), drawn)


def test_dlpack_gives_and_takes_the_memory_itself():
    tensor = torch.arange(6.0, device="neuron:1").view(2, 3)
    assert tuple(tensor.__dlpack_device__()) == (torch.utils.dlpack.DLDeviceType.kDLExtDev, 1)
    taken = torch.from_dlpack(tensor.t())
    assert (taken.device, taken.shape) == (tensor.device, (3, 2))
    taken.mul_(2)
    assert tensor.tolist() == [[0, 2, 4], [6, 8, 10]]
    assert torch.ones(1).__dlpack_device__()[0] == torch.utils.dlpack.DLDeviceType.kDLCPU
    with pytest.raises((RuntimeError, BufferError, ValueError), match=r"[Uu]nsupported|device"):
        numpy.from_dlpack(tensor)


@pytest.mark.parametrize(
    "layout", [torch.sparse_coo, torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc]
)
def test_a_sparse_tensor_is_refused_where_it_arrives_or_is_made(layout):
    block = {"blocksize": (2, 2)} if layout in (torch.sparse_bsr, torch.sparse_bsc) else {}
    sparse = torch.eye(4).to_sparse(layout=layout, **block)
    for make in (
        lambda: sparse.to("neuron"),
        lambda: torch.nn.ParameterDict({"a": torch.nn.Parameter(sparse)}).to("neuron"),
        lambda: torch.eye(4, device="neuron").to_sparse(layout=layout, **block),
    ):
        with pytest.raises(NotImplementedError, match="dense strided tensors only"):
            make()
    assert sparse.to(torch.float64).layout == layout, "the host's own casts are torch's"
    assert sparse.to_dense().to("neuron").sum().item() == 4


def test_a_compressed_sparse_tensor_is_not_made_of_neuron_parts():
    for device in ({}, {"device": "neuron"}):
        parts = [torch.tensor(values).to("cpu" if device else "neuron") for values in ([0, 1], [0], [1.0])]
        with pytest.raises(NotImplementedError, match="dense strided tensors only"):
            torch.sparse_csr_tensor(*parts, (1, 1), **device)
