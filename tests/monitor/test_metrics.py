"""Metrics and rates against plain sums."""

from __future__ import annotations

import pytest
import torch

from trellium.monitor.metrics import MetricSink
from trellium.monitor.throughput import ThroughputMeter, peak_memory_by_device, peak_memory_bytes


def test_a_mean_is_the_ratio_of_sums_since_it_was_last_read():
    sink = MetricSink("cpu")
    sink.add_mean("entropy", torch.tensor(6.0), torch.tensor(2))
    sink.add_mean("entropy", torch.tensor(1.0), torch.tensor(5))
    assert sink.read()[0] == {"entropy": 1.0}
    assert sink.read() == ({}, {})


def test_a_mean_of_nothing_is_left_out():
    sink = MetricSink("cpu")
    sink.add_mean("accuracy", torch.tensor(0.0), torch.tensor(0))
    assert sink.read() == ({}, {})


def test_counts_go_on_over_readings_and_are_exact_beyond_what_float32_counts():
    sink = MetricSink("cpu")
    for _ in range(2):
        sink.add_count("tokens", torch.tensor(2**31 + 1))
    assert sink.read()[1] == {"tokens": 2**32 + 2}
    sink.add_count("tokens", torch.tensor(1))
    assert sink.counts() == {"tokens": 2**32 + 3}


def test_looking_at_counts_leaves_the_means():
    sink = MetricSink("cpu")
    sink.add_mean("loss", torch.tensor(4.0), torch.tensor(2))
    sink.add_count("tokens", torch.tensor(3))
    assert sink.counts() == {"tokens": 3}
    assert sink.read() == ({"loss": 2.0}, {"tokens": 3})


def test_one_reading_is_one_reduction_of_everything():
    sink = MetricSink("cpu")
    sink.add_mean("loss", torch.tensor(4.0), torch.tensor(2))
    sink.add_count("tokens", torch.tensor(5000))
    calls = []

    def double(sums):
        calls.append(sums.shape)
        return sums * 2

    assert sink.read(double) == ({"loss": 2.0}, {"tokens": 10000})
    assert calls == [(2, 2)]


def test_adding_waits_for_nothing(monkeypatch):
    sink = MetricSink("cpu")
    for name in ("item", "tolist", "cpu", "numpy"):
        monkeypatch.setattr(torch.Tensor, name, lambda *a, **k: pytest.fail("waited for the device"))
    for _ in range(3):
        sink.add_mean("loss", torch.ones(()), torch.ones(()))
        sink.add_count("tokens", torch.ones((), dtype=torch.int64))


def test_rates_leave_pauses_out():
    now = [0.0]
    meter = ThroughputMeter("cpu", clock=lambda: now[0])
    meter.forwarded(600)
    now[0] = 2.0
    with meter.paused():
        now[0] = 10.0
    now[0] = 12.0
    rates = meter.read(real=400, trained=100, processes=2)
    assert rates["tokens_per_second"] == 100.0
    assert rates["forwarded_tokens_per_second"] == 300.0
    assert rates["trained_tokens_per_second"] == 25.0
    now[0] = 13.0
    assert meter.read(real=7, trained=0)["tokens_per_second"] == 7.0


def test_peak_memory_of_the_host_is_what_the_process_had():
    assert peak_memory_bytes("cpu") > 10 * 2**20
    assert all(peak > 0 for peak in peak_memory_by_device().values())
