"""How the device comes, in what processes it lives, and when it steps aside. Each test starts a Python of its own."""

from __future__ import annotations

import importlib.machinery
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from trellium.neuron import presence

FORK = """
import os, sys, torch

def child(work):
    pid = os.fork()
    if pid == 0:
        try:
            work()
        except BaseException as error:
            print(f"{type(error).__name__}: {error}", file=sys.stderr)
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

def backward(device):
    x = torch.ones(2, device=device, requires_grad=True)
    (x * 2).sum().backward()
    assert x.grad.tolist() == [2, 2]
"""


def test_import_torch_alone_brings_it_and_little_else(python):
    out = python(
        """
        import sys, torch
        assert torch.ones(2, device="neuron").sum().item() == 2
        heavy = {"transformers", "accelerate", "datasets", "peft", "rich", "trellium.trainers", "trellium.ops", "torch._dynamo"}
        print(sorted(heavy & set(sys.modules)))
        """
    )
    assert out == "[]"


def test_asking_for_the_reason_first_brings_torch_and_the_device(python):
    python(
        "import trellium.neuron; assert trellium.neuron.unavailable_reason() is None and trellium.neuron.is_emulated()"
    )


def test_without_autoload_it_stays_away_until_it_is_called(python):
    python(
        FORK
        + """
import trellium.neuron

def another_backend():
    torch.utils.rename_privateuse1_backend("another")
    assert "'another' has it already" in trellium.neuron.load()

assert not hasattr(torch, "neuron")
assert "TORCH_DEVICE_BACKEND_AUTOLOAD=0" in trellium.neuron.unavailable_reason()
assert child(another_backend) == 0
assert trellium.neuron.load() is None
assert torch.ones(2, device="neuron").sum().item() == 2
""",
        TORCH_DEVICE_BACKEND_AUTOLOAD="0",
    )


def test_it_steps_aside_for_the_vendor(python, tmp_path):
    (tmp_path / "torch_neuronx").mkdir()
    (tmp_path / "torch_neuronx" / "__init__.py").write_text("real = True\n")
    python(
        """
        import torch, trellium.neuron
        assert not hasattr(torch, "neuron")
        assert "vendor's torch_neuronx is installed" in trellium.neuron.unavailable_reason(), trellium.neuron.unavailable_reason()
        import torch_neuronx
        assert torch_neuronx.real
        assert torch.accelerator.current_accelerator() is None
        """,
        PYTHONPATH=str(tmp_path),
    )


def test_a_wrong_build_is_refused_with_a_reason(tmp_path, monkeypatch):
    monkeypatch.setattr(presence, "__file__", str(tmp_path / "presence.py"))
    reason = presence._extension_mismatch()
    assert "no C++ compiler" in reason
    assert "pip install" in reason
    (tmp_path / f"_C{importlib.machinery.EXTENSION_SUFFIXES[0]}").touch()
    assert "not known which torch" in presence._extension_mismatch()
    (tmp_path / "_built_for.json").write_text(json.dumps({"torch": "2.12.0", "torch_git": "x", "python": "y"}))
    reason = presence._extension_mismatch()
    assert f"built for torch 2.12.0, here {torch.__version__}" in reason
    assert "pip install" in reason


def test_a_machine_that_cannot_be_leaves_torch_working(python):
    python(
        """
        import torch, trellium.neuron
        assert not hasattr(torch, "neuron")
        assert "trn9" in trellium.neuron.unavailable_reason()
        assert torch.ones(2).sum().item() == 2
        """,
        TRELLIUM_NEURON_INSTANCE="trn9.large",
    )


def test_fork_before_use_is_fine_and_after_use_is_refused_with_advice(python):
    python(
        FORK
        + """
# Before: the CPU's autograd in parent and child too, which a device's engine threads would have broken.
torch.neuron.set_device(0)
torch.manual_seed(0)
backward("cpu")
assert child(lambda: backward("cpu")) == 0
assert child(lambda: backward("neuron")) == 0

held = torch.ones(1000, device="neuron")

def refused():
    global held
    assert torch.neuron._is_in_bad_fork()
    for use in (lambda: torch.ones(1, device="neuron"), lambda: held + 1, lambda: held.cpu(), lambda: held.sum().item()):
        try:
            use()
        except RuntimeError as error:
            assert "Cannot re-initialize neuron in forked subprocess" in str(error) and "'spawn' start method" in str(error)
        else:
            raise AssertionError("not refused")
    torch.manual_seed(1)          # must not touch the device
    held = None                   # freeing must not hang
    assert torch.neuron.device_count() > 0
    backward_of_the_host = torch.ones(2).sum()

assert child(refused) == 0
assert held.sum().item() == 1000 and not torch.neuron._is_in_bad_fork()

# Workers that read on the host are fine, though forked after use.
data = torch.utils.data.DataLoader(torch.arange(8.0), batch_size=4, num_workers=1, multiprocessing_context="fork")
assert [batch.to("neuron").sum().item() for batch in data] == [6, 22]
"""
    )


def test_spawned_processes_have_the_device(tmp_path):
    script = tmp_path / "spawn.py"
    script.write_text(
        """
import importlib.util, multiprocessing, torch

def work(queue):
    assert importlib.util.find_spec("torch_neuronx") is not None
    queue.put(torch.ones(3, device="neuron").sum().item())

if __name__ == "__main__":
    torch.ones(1, device="neuron")
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    process = context.Process(target=work, args=(queue,))
    process.start()
    assert queue.get(timeout=100) == 3
    process.join()
    assert process.exitcode == 0
"""
    )
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_a_process_of_torchrun_works_on_the_core_of_its_rank(python):
    python(
        FORK
        + """
import threading

def no_such_core():
    os.environ["LOCAL_RANK"] = "7"
    try:
        torch.neuron.current_device()
    except RuntimeError as error:
        assert "Logical Neuron Core(s) not available" in str(error) and "LOCAL_RANK is 7" in str(error)
    else:
        raise AssertionError("not refused")

assert child(no_such_core) == 0
seen = [torch.neuron.current_device(), torch.ones(1, device="neuron").device.index]
thread = threading.Thread(target=lambda: seen.append(torch.neuron.current_device()))
thread.start(); thread.join()
assert seen == [2, 2, 2], seen
""",
        LOCAL_RANK="2",
    )


def test_torchrun_with_one_process_runs(tmp_path):
    script = tmp_path / "rank.py"
    script.write_text("import torch; assert torch.ones(2, device='neuron').device.index == 0; print('done')\n")
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=1", str(script)],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert "done" in done.stdout


def test_names_taken_before_torch_are_reached(python, tmp_path):
    python(
        f"""
        from safetensors import safe_open
        import safetensors.torch as taken
        import torch
        taken.save_file({{"a": torch.arange(3.0)}}, {str(tmp_path / "x.safetensors")!r})
        with safe_open({str(tmp_path / "x.safetensors")!r}, framework="pt", device="neuron:1") as file:
            assert str(file.get_tensor("a").device) == "neuron:1"
        assert str(taken.load_file({str(tmp_path / "x.safetensors")!r}, device="neuron")["a"].device) == "neuron:0"
        """
    )


def test_a_host_without_the_memory_says_so_in_the_same_error(python):
    python(
        """
        import resource, torch
        torch.ones(1, device="neuron")
        resource.setrlimit(resource.RLIMIT_AS, (8 * 2**30, resource.RLIM_INFINITY))
        small = torch.ones(50_000, 1, device="neuron")
        for ask in (lambda: torch.empty(20 * 2**30, dtype=torch.uint8, device="neuron"), lambda: small @ small.T):
            before = torch.neuron.memory_allocated()
            try:
                ask()
            except torch.OutOfMemoryError as error:
                assert " out of memory." in str(error) and "the host that emulates it" in str(error), error
            else:
                raise AssertionError("not refused")
            assert torch.neuron.memory_allocated() == before
        """
    )


def test_no_compiler_leaves_the_device_out_and_a_failing_one_fails(tmp_path):
    project = Path(__file__).parents[2]
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(project / name, tmp_path / name)
    shutil.copytree(project / "src/trellium/neuron/csrc", tmp_path / "src/trellium/neuron/csrc")
    shutil.copy(project / "src/trellium/__init__.py", tmp_path / "src/trellium/__init__.py")

    def build(compiler: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "setup.py", "-q", "build_ext"],
            cwd=tmp_path,
            env={**os.environ, "CXX": compiler},
            capture_output=True,
            text=True,
            timeout=120,
        )

    without = build("no-such-compiler")
    assert without.returncode == 0
    assert without.stderr.count("no C++ compiler found") == 1
    assert build("false").returncode != 0
    assert not list(tmp_path.rglob("_C.*.so"))


BACKWARDS = """
import threading, torch

torch.ones(2, requires_grad=True).sum().backward()   # the engine counts devices, once: none is in use

def thread(work):
    caught = []
    def run():
        try:
            work()
        except BaseException as error:
            caught.append(error)
    it = threading.Thread(target=run); it.start(); it.join()
    assert not caught, caught

def graphs():
    x = torch.ones(2, device="neuron", requires_grad=True)
    y = torch.ones(2, requires_grad=True)
    yield x, (x * 2).sum(), torch.ones((), device="neuron")          # neuron throughout
    yield x, (x.cpu() * 2).sum(), torch.ones(())                     # from the CPU to the device
    yield y, (y.to("neuron") * 2).sum(), torch.ones((), device="neuron")
    yield x, torch.utils.checkpoint.checkpoint(lambda x: (x * 2).sum(), x, use_reentrant=True), torch.ones((), device="neuron")
"""


@pytest.mark.parametrize("asked", ["pass", "torch.autograd.set_multithreading_enabled(True)"])
def test_a_thread_may_begin_with_a_backward_though_the_engine_began_without_the_device(python, asked):
    python(
        BACKWARDS
        + f"""
import torch.utils.checkpoint
for leaf, loss, one in graphs():
    def work():
        {asked}
        loss.backward(one)
    thread(work)
    assert leaf.grad.tolist() == [2, 2]
    leaf.grad = None
for leaf, loss, one in graphs():
    {asked}
    loss.backward(one)
    assert leaf.grad.tolist() == [2, 2]
    leaf.grad = None
"""
    )


def test_every_node_of_the_device_runs_on_the_thread_that_called_backward(python):
    python(
        BACKWARDS
        + """
class Where(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()
    @staticmethod
    def backward(ctx, gradient):
        seen.append(threading.get_ident())
        return gradient

x = torch.ones(2, device="neuron", requires_grad=True)
with torch.autograd.set_multithreading_enabled(True):
    seen = []
    Where.apply(x).sum().backward()
assert seen == [threading.get_ident()]
"""
    )


def test_a_neuron_tensor_is_not_sent_to_another_process_and_nobody_waits_for_it(tmp_path):
    script = tmp_path / "send.py"
    script.write_text(
        """
import multiprocessing, torch

class OnTheDevice(torch.utils.data.Dataset):
    def __len__(self):
        return 2
    def __getitem__(self, index):
        return torch.ones(3, device="neuron")

def refused(send):
    try:
        send()
    except RuntimeError as error:
        assert "cannot be sent between processes" in str(error) and ".cpu()" in str(error), error
    else:
        raise AssertionError("not refused")

if __name__ == "__main__":
    tensor = torch.ones(3, device="neuron")
    loader = torch.utils.data.DataLoader(OnTheDevice(), num_workers=1, multiprocessing_context="spawn", timeout=60)
    refused(lambda: list(loader))
    one, other = multiprocessing.Pipe()
    for sent in (tensor, torch.nn.Parameter(tensor), {"storage": tensor.untyped_storage()}):
        refused(lambda: one.send(sent))
    one.send(tensor.cpu())
    assert other.recv().tolist() == [1, 1, 1]
"""
    )
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
