"""The graphs on disk: a second process starts warm, a damaged entry is compiled again and said, two processes compile once."""

from __future__ import annotations

import fcntl
import json
import logging
import os
import pickle
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest
import torch

if not (hasattr(torch, "neuron") and torch.neuron.is_available()):
    pytest.skip("needs the emulated device", allow_module_level=True)

import torch._dynamo

from trellium.neuron import graph_cache


@pytest.fixture
def folder(tmp_path, tmp_path_factory, monkeypatch):
    """A store of one test; its host-local part is the session's, which has the proof of the CPU's instructions."""
    monkeypatch.setenv("TRELLIUM_HOME", str(tmp_path_factory.getbasetemp() / "trellium_home"))
    monkeypatch.setenv("TORCH_NEURONX_NEFF_CACHE_DIR", str(tmp_path / "store"))
    torch._dynamo.reset()
    torch.neuron.reset_dynamo_metrics()
    yield tmp_path / "store"
    torch._dynamo.reset()


def product(x):
    return x @ x


def run():
    """Compile and run one small graph as a new process would, and give what was counted."""
    torch._dynamo.reset()
    torch.neuron.reset_dynamo_metrics()
    x = torch.arange(9.0).reshape(3, 3).to("neuron")
    result = torch.compile(product, backend="neuron")(x)
    assert torch.equal(result.cpu(), x.cpu() @ x.cpu())
    return torch.neuron.get_dynamo_metrics()


def test_the_second_compilation_is_loaded_and_counted(folder):
    assert (run()["cache_misses"], len(graph_cache.entries())) == (1, 1)
    assert run()["cache_hits"] == 1
    (entry,) = graph_cache.entries()
    assert (entry.hits, entry.nbytes) == (1, entry.path.stat().st_size)


def test_an_entry_that_is_corrupted_is_compiled_again_and_said(folder, caplog):
    run()
    (entry,) = graph_cache.entries()
    data = bytearray(entry.path.read_bytes())
    data[len(data) // 2] ^= 1
    entry.path.write_bytes(data)
    with caplog.at_level(logging.WARNING, "trellium.neuron.graph_cache"):
        metrics = run()
    assert (metrics["corrupt_entries"], metrics["cache_misses"]) == (1, 1)
    assert "damaged" in caplog.text
    assert "checksum" in caplog.text
    assert run()["cache_hits"] == 1


@pytest.mark.parametrize("content", [b"", b"not an entry", graph_cache.MARK, b"x" * 5000])
def test_whatever_stands_in_an_entry_s_place_is_replaced(folder, content, caplog):
    run()
    (entry,) = graph_cache.entries()
    entry.path.write_bytes(content)
    assert run()["corrupt_entries"] == 1
    assert run()["cache_hits"] == 1


def test_an_entry_with_a_right_checksum_and_a_wrong_content_is_replaced(folder, caplog):
    run()
    (entry,) = graph_cache.entries()
    graph_cache.write(entry.path, pickle.dumps({"not": "a graph"}))
    with caplog.at_level(logging.WARNING, "trellium.neuron.graph_cache"):
        assert run()["corrupt_entries"] == 1
    assert "damaged" in caplog.text
    run()
    assert run()["cache_hits"] == 1


def test_a_graph_whose_code_does_not_load_is_compiled_again_and_said(folder, caplog, monkeypatch):
    run()
    from trellium.neuron import graphs

    def refuse(*_):
        raise OSError("no space left on device")

    monkeypatch.setattr(graphs.FxGraphCache, "cache_hit_post_compile", refuse)
    with caplog.at_level(logging.WARNING, "trellium.neuron.graph_cache"):
        run()
    assert "no space left" in caplog.text


def test_the_cache_can_be_turned_off(folder, monkeypatch):
    monkeypatch.setenv("TORCH_NEURONX_DISABLE_NEFF_CACHE", "1")
    run()
    run()
    assert graph_cache.entries() == []


def test_flags_and_versions_are_part_of_the_name(folder, monkeypatch):
    run()
    monkeypatch.setenv("NEURON_CC_FLAGS", "--optlevel=2")
    assert run()["cache_misses"] == 1
    monkeypatch.setattr(torch, "__version__", "2.99")
    assert run()["cache_misses"] == 1
    assert len(graph_cache.entries()) == 3


def test_an_operator_s_backward_is_part_of_the_name(folder, tmp_path):
    source = """
import torch

@torch.library.custom_op("trellium_test::scaled", mutates_args=())
def scaled(x: torch.Tensor) -> torch.Tensor:
    return x.clone()

scaled.register_fake(lambda x: torch.empty_like(x))
scaled.register_autograd(lambda ctx, grad: grad @ grad * FACTOR, setup_context=lambda ctx, inputs, output: None)
"""
    x = torch.eye(2, device="neuron", requires_grad=True)
    gradients = []
    for factor in ("1", "2", "2"):
        file = tmp_path / f"operator_{factor}.py"
        file.write_text(source.replace("FACTOR", factor))
        names: dict = {}
        exec(compile(file.read_text(), str(file), "exec"), names)
        torch._dynamo.reset()
        torch.compile(lambda x, op=names["scaled"]: op(x), backend="neuron")(x).backward(torch.eye(2, device="neuron"))
        gradients.append(x.grad[0, 0].item())
        x.grad = None
    assert gradients == [1, 2, 2]
    metrics = torch.neuron.get_dynamo_metrics()
    assert (metrics["cache_misses"], metrics["cache_hits"]) == (2, 1)


def test_an_autograd_function_is_kept_with_its_formula(folder):
    def function_of(power):
        class Power(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                ctx.save_for_backward(x)
                return x @ x

            @staticmethod
            def backward(ctx, grad):
                (x,) = ctx.saved_tensors
                return grad @ x if power == 1 else grad @ x @ x

        return Power

    x = (3 * torch.eye(2)).to("neuron").requires_grad_()
    gradients = []
    for power in (1, 2, 2):
        torch._dynamo.reset()
        function = function_of(power)
        torch.compile(lambda x, f=function: f.apply(x), backend="neuron")(x).backward(torch.eye(2, device="neuron"))
        gradients.append(x.grad[0, 0].item())
        x.grad = None
    assert gradients == [3, 9, 9]
    metrics = torch.neuron.get_dynamo_metrics()
    assert (metrics["cache_misses"], metrics["cache_hits"], metrics["cache_bypasses"]) == (2, 1, 0)


def make_entries(folder, count):
    for i in range(count):
        path = folder / f"{i}.graph"
        graph_cache.write(path, b"x" * 2**20)
        os.utime(path, (i, i))


def test_past_the_size_bound_the_longest_unused_go(folder, monkeypatch):
    make_entries(folder, 10)
    graph_cache.note_hit(folder / "0.graph")  # the oldest, and now the latest used
    monkeypatch.setenv("NEURON_COMPILATION_CACHE_MAX_SIZE_MB", "9")
    assert graph_cache.keep_within_bounds(folder / "9.graph") == 3
    assert {entry.name for entry in graph_cache.entries()} == {"0", "4", "5", "6", "7", "8", "9"}
    assert graph_cache.keep_within_bounds(folder / "9.graph") == 0


def test_past_the_number_of_entries_the_longest_unused_go(folder, monkeypatch):
    make_entries(folder, 6)
    monkeypatch.setenv("NEURON_COMPILATION_CACHE_MAX_ENTRIES", "5")
    graph_cache.keep_within_bounds(folder / "5.graph")
    assert {entry.name for entry in graph_cache.entries()} == {"2", "3", "4", "5"}


def test_a_bound_that_is_no_number_is_refused(monkeypatch):
    monkeypatch.setenv("NEURON_COMPILATION_CACHE_MAX_SIZE_MB", "10 GB")
    with pytest.raises(graph_cache.CacheError, match="whole number"):
        graph_cache.bound("NEURON_COMPILATION_CACHE_MAX_SIZE_MB", 1)


def test_a_folder_that_cannot_be_written_costs_only_the_next_process(folder, caplog):
    folder.parent.mkdir(exist_ok=True)
    folder.write_text("a file where the folder should be")
    with caplog.at_level(logging.WARNING, "trellium.neuron.graph_cache"):
        run()
    assert "could not be kept" in caplog.text


# ---- other processes

SCRIPT = """
    import json, logging, sys, time, torch
    logging.basicConfig(level=logging.INFO)
    from trellium.neuron import graph_cache
    {before}
    def function(x, w):
        return {result}
    x, w = (torch.arange(9.0).reshape(3, 3).to("neuron").requires_grad_() for _ in range(2))
    torch.compile(function, backend="neuron")(x, w).sum().backward()
    print(json.dumps(torch.neuron.get_dynamo_metrics() | {{"gradient": w.grad.sum().item()}}))
"""


def start(before="pass", result="x @ w"):
    script = textwrap.dedent(SCRIPT).format(before=before, result=result)
    return subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def outcome(process):
    printed, told = process.communicate(timeout=300)
    assert process.returncode == 0, told
    return json.loads(printed.splitlines()[-1]), told


def test_who_meets_a_graph_that_is_being_compiled_waits_and_loads_it(folder):
    run()
    (entry,) = graph_cache.entries()
    content = graph_cache.read(entry.path)
    graph_cache.clear()
    outcomes = []
    with open(graph_cache.local_folder() / "locks" / entry.name, "ab") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        other = threading.Thread(target=lambda: outcomes.append(run()))
        other.start()
        other.join(timeout=2)
        assert other.is_alive()
        graph_cache.write(entry.path, content)
    other.join(timeout=60)
    assert (outcomes[0]["cache_hits"], outcomes[0]["cache_misses"]) == (1, 0)


def test_a_process_killed_while_it_writes_leaves_nothing_that_is_used(folder, caplog):
    run()
    (entry,) = graph_cache.entries()
    graph_cache.clear()
    script = """
        import os, pathlib, sys, time
        from trellium.neuron import graph_cache
        os.fsync = lambda _: (print("writing", flush=True), time.sleep(600))
        graph_cache.write(pathlib.Path(sys.argv[1]), b"half of it")
    """
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script), str(entry.path)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout.readline().strip() == "writing"
    process.send_signal(signal.SIGKILL)
    process.wait()
    (left,) = folder.iterdir()
    assert ".part-" in left.name
    with caplog.at_level(logging.WARNING, "trellium.neuron.graph_cache"):
        assert run()["cache_misses"] == 1
    assert "a process died while it wrote" in caplog.text
    assert [path.suffix for path in folder.iterdir()] == [".graph"]


@pytest.mark.slow
def test_two_processes_compile_the_same_graph_once(folder):
    both = [outcome(process)[0] for process in (start(), start())]
    assert sorted((one["cache_misses"], one["cache_hits"]) for one in both) == [(0, 1), (1, 0)]
    assert both[0]["gradient"] == both[1]["gradient"]


@pytest.mark.slow
def test_a_warm_process_calls_no_compiler(folder):
    result = "torch.tanh(x @ w).cos()"
    cold, _ = outcome(start(result=result))
    warm, _ = outcome(start("import torch._inductor.cpp_builder as b; b._run_compile_cmd = None", result))
    assert (cold["cache_misses"], warm["cache_hits"], warm["cache_misses"]) == (1, 1, 0)
    assert warm["gradient"] == cold["gradient"]


@pytest.mark.slow
def test_a_training_process_killed_while_it_writes_is_followed_by_a_right_one(folder):
    process = start("import os; os.fsync = lambda _: (print('writing', flush=True), time.sleep(600))")
    assert process.stdout.readline().strip() == "writing"
    process.send_signal(signal.SIGKILL)
    process.wait()
    (left,) = folder.iterdir()
    assert ".part-" in left.name
    after, told = outcome(start())
    assert (after["cache_misses"], after["cache_hits"]) == (1, 0)
    assert "a process died while it wrote" in told
    assert [path.suffix for path in folder.iterdir()] == [".graph"]


def test_what_a_killed_process_left_in_scratch_is_removed(tmp_path):
    left = tmp_path / "scratch" / "1-killed"
    left.mkdir(parents=True)
    (left / "owner").touch()
    living = tmp_path / "scratch" / "2-living"
    living.mkdir()
    holder = subprocess.Popen(["flock", str(living / "owner"), "sleep", "60"])
    while not (living / "owner").exists():
        time.sleep(0.01)
    time.sleep(0.2)
    try:
        subprocess.run(
            [sys.executable, "-c", "from trellium.neuron import graph_cache; print(graph_cache.scratch_folder())"],
            check=True,
            env=os.environ | {"TORCH_NEURONX_NEFF_LOCAL_CACHE_DIR": str(tmp_path)},
        )
        assert [path.name for path in (tmp_path / "scratch").iterdir()] == ["2-living"]
    finally:
        holder.kill()
        holder.wait()


def test_an_archive_carries_the_graphs_to_another_folder(folder, tmp_path, monkeypatch):
    run()
    archive = tmp_path / "graphs.bin"
    assert graph_cache.export_entries(archive) == 1
    monkeypatch.setenv("TORCH_NEURONX_NEFF_CACHE_DIR", str(tmp_path / "elsewhere"))
    assert graph_cache.import_entries(archive) == 1
    assert run()["cache_hits"] == 1


def test_the_archive_is_one_of_torch_compiler_s(folder, tmp_path, monkeypatch):
    run()
    archive = tmp_path / "graphs.bin"
    graph_cache.export_entries(archive)
    monkeypatch.setenv("TORCH_NEURONX_NEFF_CACHE_DIR", str(tmp_path / "elsewhere"))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "torch_s"))
    info = torch.compiler.load_cache_artifacts(archive.read_bytes())
    assert len(info.aot_autograd_artifacts) == 1
    assert run()["cache_hits"] == 1


@pytest.mark.parametrize("content", [b"", b"no archive at all"])
def test_a_file_that_is_no_archive_is_refused(content, tmp_path):
    path = tmp_path / "x"
    path.write_bytes(content)
    with pytest.raises(graph_cache.CacheError, match="not an archive"):
        graph_cache.import_entries(path)


def test_clearing_removes_entries_and_counts(folder):
    run()
    run()
    (folder / "mine.txt").write_text("not the cache's")
    assert graph_cache.clear() == 1
    assert [path.name for path in folder.iterdir()] == ["mine.txt"]


def test_the_ledger_sees_cold_and_warm(folder):
    from trellium.monitor import ledger

    ledger.start()
    with ledger.watch() as new:
        run()
        run()
    assert [compilation.warmth for compilation in new] == ["cold", "warm"]
    assert Path(new[0].frame.split(":")[0]).name == "test_graph_cache.py"


def test_a_label_holds_while_all_its_graphs_are_in_the_cache(folder):
    assert not torch.neuron.has_graphs("a product")
    with torch.neuron.graphs_labelled("a product"):
        run()
    assert torch.neuron.has_graphs("a product")
    assert not torch.neuron.has_graphs("another")
    with torch.neuron.graphs_labelled("another"):
        pass  # nothing was asked for, so nothing is known
    assert not torch.neuron.has_graphs("another")
    with torch.neuron.graphs_labelled("another"):
        run()  # loaded
    assert torch.neuron.has_graphs("another")
    (entry,) = graph_cache.entries()
    graph_cache.remove(entry.path)
    assert not torch.neuron.has_graphs("a product")


def test_a_label_of_graphs_that_failed_or_cannot_be_kept_does_not_hold(folder, monkeypatch):

    def broken_off():
        with torch.neuron.graphs_labelled("broken off"):
            run()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        broken_off()
    assert not torch.neuron.has_graphs("broken off")
    graph_cache.clear()
    monkeypatch.setattr(graph_cache, "write", lambda *_: (_ for _ in ()).throw(OSError("full")))
    with torch.neuron.graphs_labelled("not kept"):
        run()
    assert not torch.neuron.has_graphs("not kept")


def test_labels_are_cleared_with_their_graphs_and_a_damaged_one_says_nothing(folder):
    with torch.neuron.graphs_labelled("a product"):
        run()
    (label,) = folder.glob("*.label")
    label.write_bytes(b"not a label")
    assert not torch.neuron.has_graphs("a product")
    assert graph_cache.clear() == 1
    assert not list(folder.glob("*.label"))
