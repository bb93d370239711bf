"""Streams, events, pinned memory and the profiler: what portable code calls, it finds."""

from __future__ import annotations

import threading

import pytest
import torch
from torch.profiler import ProfilerActivity, profile


def test_events_measure_time_between_them():
    start, end = torch.neuron.Event(enable_timing=True), torch.neuron.Event(enable_timing=True)
    start.record()
    torch.ones(1000, device="neuron").sum()
    end.record()
    end.synchronize()
    end.wait()
    assert end.query()
    assert 0 < start.elapsed_time(end) < 10_000


def test_events_refuse_what_they_cannot_time():
    with pytest.raises(ValueError, match="must be recorded"):
        torch.neuron.Event(enable_timing=True).elapsed_time(torch.neuron.Event(enable_timing=True))
    a, b = torch.neuron.Event(), torch.neuron.Event()
    a.record()
    b.record()
    with pytest.raises(ValueError, match="enable_timing"):
        a.elapsed_time(b)


def test_a_stream_is_current_inside_its_block():
    stream = torch.neuron.Stream()
    with torch.neuron.stream(stream):
        assert torch.neuron.current_stream() == stream
        assert torch.accelerator.current_stream() == stream
    assert torch.neuron.current_stream() == torch.neuron.default_stream()
    with torch.neuron.stream(None) as nothing:
        assert nothing is None
    torch.neuron.set_stream(stream)
    assert torch.neuron.current_stream() == stream
    torch.neuron.set_stream(torch.neuron.default_stream())


def test_a_stream_of_another_core_brings_its_core():
    with torch.neuron.stream(torch.neuron.Stream("neuron:1")):
        assert torch.neuron.current_device() == 1
    assert torch.neuron.current_device() == 0


def test_streams_and_events_order_without_complaint():
    stream = torch.neuron.Stream()
    event = stream.record_event()
    stream.wait_event(event)
    stream.wait_stream(torch.neuron.current_stream())
    torch.ones(2, device="neuron").record_stream(stream)
    stream.synchronize()
    torch.neuron.synchronize()
    torch.accelerator.synchronize()
    assert stream.query()


def test_the_current_core_is_each_threads_own():
    seen = []
    with torch.neuron.device(2):
        thread = threading.Thread(target=lambda: seen.append(torch.neuron.current_device()))
        thread.start()
        thread.join()
        assert torch.neuron.current_device() == torch.accelerator.current_device_index() == 2
        assert torch.empty(1, device="neuron").device.index == 2
        with torch.neuron.device_of(torch.empty(1, device="neuron:1")):
            assert torch.neuron.current_device() == 1
    assert seen == [0]
    torch.accelerator.set_device_index(1)
    assert torch.neuron.current_device() == 1
    torch.neuron.set_device("neuron:0")
    assert torch.neuron.current_device() == 0


@pytest.mark.parametrize("given", ["explicit gradients", "a scalar loss"])
def test_backward_runs_on_the_thread_that_calls_it(given):
    where = []
    x = torch.ones(2, device="neuron", requires_grad=True)
    y = (x * 2).sum() if given == "a scalar loss" else x * 2
    y.register_hook(lambda gradient: where.append(threading.get_ident()))
    gradient = torch.ones_like(y)

    def work() -> None:
        where.append(threading.get_ident())
        if given == "a scalar loss":
            y.backward()
        else:
            torch.autograd.backward([y], [gradient])

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert where[0] == where[1]


def test_multithreaded_backward_can_still_be_asked_for(python):
    # In a process of its own: torch counts a process's devices at its first backward, and an unused device counts as none, so that programs
    # which only use the CPU can still fork after a backward.
    script = """
    import torch
    with torch.autograd.set_multithreading_enabled(True):
        x = torch.ones(2, device="neuron", requires_grad=True)
        (x * 2).sum().backward()
    print(x.grad.tolist())
    """
    assert python(script) == "[2.0, 2.0]"


def test_pinned_memory_is_known_as_such():
    pinned = torch.ones(4).pin_memory()
    assert pinned.is_pinned()
    assert pinned[1:].is_pinned()
    assert torch.empty(3, pin_memory=True).is_pinned()
    assert not torch.ones(4).is_pinned()
    assert pinned.to("neuron", non_blocking=True).sum().item() == 4
    with pytest.raises(RuntimeError, match="pinned"):
        torch.empty(2, device="neuron", pin_memory=True)
    batches = torch.utils.data.DataLoader(torch.arange(8.0), batch_size=4, pin_memory=True)
    assert all(batch.is_pinned() for batch in batches)
    torch.accelerator.memory.empty_host_cache()


@pytest.mark.filterwarnings("ignore")
def test_the_profiler_sees_operators_with_both_activities(tmp_path):
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.PrivateUse1], profile_memory=True) as recorded:
        (torch.ones(8, 8, device="neuron") @ torch.ones(8, 8, device="neuron")).sum()
    assert any(event.key == "aten::mm" for event in recorded.key_averages())
    recorded.export_chrome_trace(str(tmp_path / "trace.json"))
    with torch.autograd.profiler.profile(use_device="neuron") as recorded:
        torch.ones(8, device="neuron").sum()
    assert any(event.key == "aten::sum" for event in recorded.key_averages())
