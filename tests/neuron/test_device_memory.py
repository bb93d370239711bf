"""Every byte of a core is accounted for, and a tensor that does not fit is refused before the host's memory is taken."""

from __future__ import annotations

import gc
import os
import threading

import pytest
import torch

CORE = 3  # no other test uses it
GIB = 2**30


@pytest.fixture(autouse=True)
def _fresh_core():
    gc.collect()
    torch.neuron.reset_peak_memory_stats(CORE)
    torch.neuron.reset_accumulated_memory_stats(CORE)


def test_a_tensor_counts_its_exact_bytes_until_it_dies():
    before = torch.neuron.memory_allocated(CORE)
    tensor = torch.empty(10, 3, dtype=torch.bfloat16, device=f"neuron:{CORE}")
    assert torch.neuron.memory_allocated(CORE) - before == 60
    view = tensor[1:]
    del tensor
    assert torch.neuron.memory_allocated(CORE) - before == 60, "a view keeps its storage"
    del view
    assert torch.neuron.memory_allocated(CORE) == before


def test_results_of_operators_count_as_created_tensors_do():
    a = torch.ones(100, device=f"neuron:{CORE}")
    before = torch.neuron.memory_allocated(CORE)
    b = a + 1
    assert torch.neuron.memory_allocated(CORE) - before == 400
    a.add_(b)
    c = a.view(10, 10).t()
    assert torch.neuron.memory_allocated(CORE) - before == 400, "in place and views take nothing"
    del b, c


def test_peak_stays_until_it_is_reset():
    base = torch.neuron.memory_allocated(CORE)
    torch.empty(1000, device=f"neuron:{CORE}")
    assert torch.neuron.max_memory_allocated(CORE) == base + 4000
    torch.neuron.reset_peak_memory_stats(CORE)
    assert torch.neuron.max_memory_allocated(CORE) == base


def test_every_way_to_ask_gives_the_same_numbers():
    tensor = torch.empty(1000, device=f"neuron:{CORE}")
    allocated = torch.neuron.memory_allocated(CORE)
    assert allocated == torch.accelerator.memory.memory_allocated(CORE)
    assert allocated == torch.neuron.memory_stats(CORE)["allocated_bytes.all.current"]
    assert allocated == torch.neuron.memory_reserved(CORE) == torch.accelerator.memory.memory_reserved(CORE)
    assert torch.neuron.max_memory_allocated(CORE) == torch.accelerator.memory.max_memory_allocated(CORE)
    free, total = torch.neuron.mem_get_info(CORE)
    assert (free, total) == tuple(torch.accelerator.memory.get_memory_info(CORE))
    assert total == torch.neuron.get_device_properties(CORE).total_memory == free + allocated
    torch.accelerator.memory.reset_peak_memory_stats(CORE)
    torch.accelerator.memory.reset_accumulated_memory_stats(CORE)
    torch.accelerator.memory.empty_cache()
    torch.neuron.empty_cache()
    assert torch.neuron.memory_stats(CORE)["allocated_bytes.all.allocated"] == 0
    del tensor


def test_summary_names_the_largest_live_tensors():
    tensor = torch.empty(123, 45, dtype=torch.float16, device=f"neuron:{CORE}")
    summary = torch.neuron.memory_summary(CORE)
    assert f"neuron:{CORE} (emulated)" in summary
    assert "[123, 45]" in summary
    assert "[123, 45]" not in torch.neuron.memory_summary(CORE, abbreviated=True)
    assert {"bytes": 123 * 45 * 2, "shape": [123, 45]}.items() <= torch.neuron.memory_snapshot(CORE)[0].items()
    del tensor


def test_out_of_memory_names_core_sizes_and_the_largest_tensors():
    held = torch.empty(300, 1000, device=f"neuron:{CORE}")
    total = torch.neuron.mem_get_info(CORE)[1]
    with pytest.raises(torch.OutOfMemoryError) as error:
        torch.empty(total, dtype=torch.uint8, device=f"neuron:{CORE}")
    text = str(error.value)
    for part in (
        f"neuron:{CORE} out of memory",
        f"{total} bytes",
        "in use",
        "float32 [300, 1000]",
        "24.00 GiB",
        "emulated",
    ):
        assert part in text, part
    assert torch.neuron.memory_stats(CORE)["num_ooms"] == 1
    del held


def test_a_refused_allocation_takes_no_host_memory_and_leaves_the_counts():
    def resident_kib() -> int:
        with open("/proc/self/statm") as statm:
            return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") // 1024

    before, resident = torch.neuron.memory_allocated(CORE), resident_kib()
    with pytest.raises(torch.OutOfMemoryError):
        torch.zeros(30 * GIB, dtype=torch.uint8, device=f"neuron:{CORE}")
    assert torch.neuron.memory_allocated(CORE) == before
    assert resident_kib() - resident < 100_000


def test_a_result_too_large_is_refused_inside_the_operator_that_would_make_it():
    column = torch.ones(100_000, 1, device=f"neuron:{CORE}")
    before = torch.neuron.memory_allocated(CORE)
    with pytest.raises(torch.OutOfMemoryError, match="inside an operator"):
        column @ column.T  # 37 GiB
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(0, device=f"neuron:{CORE}").resize_(10 * GIB)
    with pytest.raises(torch.OutOfMemoryError):
        column.untyped_storage().resize_(30 * GIB)
    assert torch.neuron.memory_allocated(CORE) == before


def test_growing_and_emptying_a_storage_is_counted():
    before = torch.neuron.memory_allocated(CORE)
    tensor = torch.arange(4.0, device=f"neuron:{CORE}")
    tensor.untyped_storage().resize_(0)
    assert torch.neuron.memory_allocated(CORE) == before
    tensor.untyped_storage().resize_(16)
    assert torch.neuron.memory_allocated(CORE) - before == 16
    assert tensor.fill_(2).sum().item() == 8
    out = torch.empty(0, device=f"neuron:{CORE}")
    torch.add(tensor, 1, out=out)
    assert torch.neuron.memory_allocated(CORE) - before == 32
    assert out.tolist() == [3.0] * 4


def test_memory_foreign_to_the_allocator_is_adopted():
    host = torch.arange(8, dtype=torch.uint8)
    before = torch.neuron.memory_allocated()
    legacy = torch._C._construct_storage_from_data_pointer(
        host.data_ptr(), torch.device("neuron", torch.neuron.current_device()), 8
    )
    tensor = torch.empty(0, dtype=torch.uint8, device="neuron").set_(legacy)
    assert (tensor + 1).tolist() == [1, 2, 3, 4, 5, 6, 7, 8]
    assert torch.neuron.memory_allocated() - before >= 8
    assert torch.empty(0, dtype=torch.uint8, device="neuron").set_(legacy).tolist() == list(range(8))


def test_threads_do_not_lose_bytes():
    before = torch.neuron.memory_allocated(CORE)

    def work() -> None:
        kept = [torch.ones(7, device=f"neuron:{CORE}") for _ in range(50)]
        for _ in range(50):
            kept[0] = kept[0] + 1

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert torch.neuron.memory_allocated(CORE) == before


@pytest.mark.filterwarnings("ignore:An output with one or more elements was resized")
@pytest.mark.parametrize(
    "grow",
    [
        lambda x: x.set_(x.untyped_storage(), 0, (2**40,)),
        lambda x: x.set_(torch.ones(4, device="neuron").untyped_storage(), 2, (2**20, 2**20), (2**20, 1)),
        lambda x: x.resize_(2**40),
        lambda x: x.untyped_storage().resize_(2**45),
        lambda x: torch.add(torch.ones((), device="neuron").expand(2**38, 4), 1, out=x),
    ],
    ids=["set_ own storage", "set_ another", "resize_", "storage", "out="],
)
def test_a_tensor_that_could_not_grow_is_what_it_was(grow):
    x = torch.arange(4.0, device="neuron")
    held = torch.neuron.memory_allocated()
    geometry = (x.shape, x.stride(), x.storage_offset(), x.untyped_storage().nbytes(), x.data_ptr())
    with pytest.raises(torch.OutOfMemoryError):
        grow(x)
    assert (x.shape, x.stride(), x.storage_offset(), x.untyped_storage().nbytes(), x.data_ptr()) == geometry
    assert x.tolist() == [0, 1, 2, 3]
    assert torch.neuron.memory_allocated() == held
