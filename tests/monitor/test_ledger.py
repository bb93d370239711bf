import dataclasses
import functools
import inspect
import json
import os
import subprocess
import sys
import threading
import time

import pytest
import torch
from torch import nn

from trellium.monitor import dynamo_hooks, ledger
from trellium.monitor.ledger import CacheCounts, Change, Input

HERE = os.path.abspath(__file__)


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def compiled(function, backend="eager", **options):
    return torch.compile(function, backend=backend, dynamic=False, **options)


class Scale(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.register_buffer("offset", torch.zeros(3))
        self.cache = torch.ones(3)

    def forward(self, hidden, batch=None, **extra):
        hidden = hidden * self.weight + self.offset + self.cache
        if batch is not None:
            hidden = hidden + batch["ids"]
        return hidden + extra["bias"] if extra else hidden


def test_a_graph_is_named_by_its_module_and_its_input_shapes():
    with ledger.watch() as new:
        compiled(Scale())(torch.ones(2, 3), batch={"ids": torch.ones(2, 3, dtype=torch.int32)}, bias=torch.ones(3))
    (graph,) = new
    assert graph.name == "Scale.forward[hidden 2x3, batch['ids'] 2x3, bias 3, self.cache 3]"
    assert graph.inputs == (
        Input("hidden", (2, 3), "float32"),
        Input("batch['ids']", (2, 3), "int32"),
        Input("bias", (3,), "float32"),
        Input("self.cache", (3,), "float32"),
    )
    line = Scale.forward.__code__.co_firstlineno
    assert graph.frame == f"{Scale.forward.__code__.co_filename}:{line}"
    assert graph.caller.startswith(f"{HERE}:")
    assert graph.backend == "eager"
    assert graph.nearest is None
    assert graph.changes == ()
    assert graph.recompile_reason is None
    assert 0 < graph.backend_seconds < graph.seconds
    assert abs(graph.wall_time - time.time()) < 60


def test_a_plain_function_and_a_module_of_torch_have_their_own_names():
    def double(x):
        return x * 2

    with ledger.watch() as new:
        compiled(double)(torch.ones(4))
        compiled(nn.Linear(3, 2))(torch.ones(5, 3))
    assert [graph.name.partition("[")[0] for graph in new] == [
        "test_a_plain_function_and_a_module_of_torch_have_their_own_names.double",
        "Linear.forward",
    ]


def test_a_decorated_forward_is_named_as_the_model_names_it():
    def decorated(forward):
        @functools.wraps(forward)
        def wrapper(*args, **kwargs):
            return forward(*args, **kwargs)

        return wrapper

    class Model(nn.Module):
        @decorated
        @decorated
        def forward(self, hidden, mask=None, **extra):
            return hidden + mask["full"] + extra["caches"][0].keys

    @dataclasses.dataclass
    class Cache:
        keys: torch.Tensor

    class Opaque:
        def __init__(self, keys):
            self.keys = keys

    with ledger.watch() as new:
        for cache in (Cache(torch.ones(1, 3)), Opaque(torch.ones(1, 3))):
            compiled(Model())(torch.ones(2, 3), mask={"full": torch.ones(3)}, caches=[cache])
    for graph in new:
        assert graph.name == "Model.forward[hidden 2x3, mask['full'] 3, caches[0].keys 1x3]"
        assert graph.frame == f"{HERE}:{inspect.unwrap(Model.forward).__code__.co_firstlineno}"
    assert new[1].changes == ()


def test_the_items_of_positional_arguments_have_their_parameters_names():
    with ledger.watch() as new:
        compiled(nn.Linear(3, 2))(torch.ones(5, 3))
    assert new[0].name == "Linear.forward[input 5x3]"


def test_the_argument_whose_size_is_new_is_named_against_the_nearest_graph():
    def add(left, right):
        return left.sum() + right.sum()

    add = compiled(add)
    with ledger.watch() as new:
        add(torch.ones(2, 8), torch.ones(4))
        add(torch.ones(2, 16), torch.ones(4))
        add(torch.ones(2, 17), torch.ones(4))
        add(torch.ones(2, 17), torch.ones(4, 1))
        add(torch.ones(2, 17, dtype=torch.float64), torch.ones(4, 1))
    assert [graph.changes for graph in new] == [
        (),
        (Change("left", 1, 8, 16),),
        (Change("left", 1, 16, 17),),
        (Change("right", None, (4,), (4, 1)),),
        (Change("left", None, "float32", "float64"),),
    ]
    assert [new[i].nearest for i in range(1, 5)] == [new[i].number for i in range(4)]
    assert "size mismatch at index 1" in new[1].recompile_reason
    assert str(new[1].changes[0]) == "left: dimension 1 was 8, is 16"


def test_a_recompilation_for_another_reason_than_shape_blames_no_input():
    def double(x):
        return x * 2

    double = compiled(double)
    with ledger.watch() as new:
        double(torch.ones(3))
        with torch.no_grad():
            double(torch.ones(3))
    assert new[1].changes == ()
    assert new[1].nearest == new[0].number
    assert "grad_mode" in new[1].recompile_reason


def test_a_symbolic_dimension_is_marked_and_never_called_new():
    def double(x, y):
        return x * 2, y + 1

    double = torch.compile(double, backend="eager", dynamic=True)
    with ledger.watch() as new:
        double(torch.ones(5), torch.ones(3, 3))
        double(torch.ones(7), torch.ones(3, 1))
    assert new[0].inputs[0] == Input("x", (5,), "float32", dynamic=(0,))
    assert new[0].name.endswith("[x 5*, y 3*x3*]")
    assert all(change.argument != "x" for change in new[1].changes)


def test_training_makes_a_forward_and_a_backward_of_the_same_name():
    model = compiled(Scale(), backend="aot_eager")
    with ledger.watch() as new:
        loss = model(torch.ones(2, 3)).sum()
        assert [graph.kind for graph in new] == ["forward"]
        loss.backward()
        model(torch.ones(2, 3)).sum().backward()
    assert [graph.kind for graph in new] == ["forward", "backward"]
    forward, backward = new
    assert backward.forward == forward.number
    assert backward.name == forward.name
    assert backward.inputs == forward.inputs
    assert backward.compile_id == forward.compile_id
    assert backward.seconds > 0


def test_backwards_compiled_later_and_in_another_thread_find_their_own_forward():
    def total(x):
        return (x * x).sum()

    total = compiled(total, backend="aot_eager")
    with ledger.watch() as new:
        losses = [total(torch.ones(size, requires_grad=True)) for size in (3, 4)]
        for loss in reversed(losses):
            thread = threading.Thread(target=loss.backward)
            thread.start()
            thread.join()
    assert [graph.kind for graph in new] == ["forward", "forward", "backward", "backward"]
    assert [new[2].forward, new[3].forward] == [new[1].number, new[0].number]
    assert new[3].inputs[0].shape == (3,)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_graph_that_needs_no_gradient_is_inference(backend):
    model = compiled(Scale(), backend=backend)
    with ledger.watch() as new, torch.no_grad():
        model(torch.ones(2, 3))
    assert [graph.kind for graph in new] == ["inference"]
    with ledger.watch() as new:
        model(torch.ones(2, 3))
    assert [graph.kind for graph in new] == ["forward"]


def test_a_graph_break_makes_two_graphs_and_says_why():
    def broken(x):
        x = x + 1
        torch._dynamo.graph_break()
        return x * 2

    with ledger.watch() as new:
        compiled(broken)(torch.ones(3))
    assert len(new) == 2
    assert "torch._dynamo.graph_break()" in new[0].graph_breaks[0]
    assert new[1].graph_breaks == ()
    line = broken.__code__.co_firstlineno + 2
    assert new[1].name.partition("[")[0].endswith(f"broken@{line}")
    assert new[1].frame == f"{broken.__code__.co_filename}:{line}"


def test_the_recompile_limit_leaves_a_frame_that_runs_eagerly_on_record(caplog):
    def double(x):
        return x * 2

    original = double.__code__
    double = compiled(double)
    with torch._dynamo.config.patch(recompile_limit=2), ledger.watch() as new:
        for size in (2, 4, 7, 8):
            assert torch.equal(double(torch.ones(size)), torch.full((size,), 2.0))
    assert len(new) == 2
    (given_up,) = new.eager_frames
    assert given_up.cause == "recompile_limit"
    assert given_up.limit == 2
    assert given_up.inputs == (Input("x", (7,), "float32"),)
    assert given_up.changes == (Change("x", 0, 4, 7),)
    assert given_up.frame == f"{HERE}:{original.co_firstlineno}"
    (said,) = [record.message for record in caplog.records if record.name == ledger.__name__]
    assert "runs eagerly: recompile_limit (2); x: dimension 0 was 4, is 7" in said


def test_the_recompile_limit_under_fullgraph_is_a_failure():
    def double(x):
        return x * 2

    double = compiled(double, fullgraph=True)
    with torch._dynamo.config.patch(recompile_limit=1), ledger.watch() as new:
        double(torch.ones(2))
        with pytest.raises(torch._dynamo.exc.FailOnRecompileLimitHit):
            double(torch.ones(3))
    assert new.eager_frames == ()
    assert [graph.failure is None for graph in new] == [True, False]
    assert new[1].changes == (Change("x", 0, 2, 3),)


def test_a_frame_that_dynamo_cannot_compile_is_on_record():
    def broken(x):
        for _ in range(2):
            torch._dynamo.graph_break()
            x = x + 1
        return x

    with ledger.watch() as new:
        compiled(broken)(torch.ones(3))
    assert len(new) == 0
    (given_up,) = new.eager_frames
    assert given_up.cause == "graph break"
    assert given_up.limit is None
    assert "graph_break" in given_up.reason


def failing_backend(graph, inputs):
    raise ValueError("no such device")


def test_an_interrupted_compilation_is_on_record():
    def interrupted(graph, inputs):
        raise KeyboardInterrupt

    with ledger.watch() as new, pytest.raises(KeyboardInterrupt):
        compiled(lambda x: x + 1, backend=interrupted)(torch.ones(3))
    assert [graph.failure for graph in new] == ["KeyboardInterrupt"]


def test_a_backend_that_fails_is_on_record():
    def double(x):
        return x * 2

    with ledger.watch() as new, pytest.raises(Exception, match="no such device"):
        compiled(double, backend=failing_backend)(torch.ones(3))
    (failed,) = new
    assert "no such device" in failed.failure
    assert failed.backend == "failing_backend"
    assert new.eager_frames == ()
    before = ledger.mark()
    assert ledger.summary(before) == (0, 0, 0, 0, 0, 0, 0)
    with torch._dynamo.config.patch(suppress_errors=True), ledger.watch() as new:
        compiled(lambda x: x + 1, backend=failing_backend)(torch.ones(3))
    assert len(new) == 1
    assert [frame.cause for frame in new.eager_frames] == ["failure"]
    assert ledger.summary(before)[:1] + ledger.summary(before)[5:] == (0, 1, 1)


def test_a_failed_graph_is_not_one_that_the_frame_has():
    def double(x):
        return x * 2

    with pytest.raises(Exception, match="no such device"):
        compiled(double, backend=failing_backend)(torch.ones(3))
    with ledger.watch() as new:
        compiled(double)(torch.ones(4))
    assert new[0].nearest is None


def test_graphs_from_before_a_reset_are_not_compared_with():
    def double(x):
        return x * 2

    fresh = []
    for sizes in ((2, 3), (4, 5, 6), (7, 8)):
        torch._dynamo.reset()
        with ledger.watch() as new:
            for size in sizes:
                compiled(double)(torch.ones(size))
        fresh.append([graph.changes[0].old if graph.changes else None for graph in new])
    assert fresh == [[None, 2], [None, 4, 5], [None, 7]]


def test_a_backward_that_fails_is_on_record_with_its_forward():
    from torch._dynamo.backends.common import aot_autograd

    def fail(graph, inputs):
        raise ValueError("no backward here")

    backend = aot_autograd(fw_compiler=lambda graph, inputs: graph.forward, bw_compiler=fail)
    with ledger.watch() as new:
        loss = compiled(lambda x: (x * x).sum(), backend=backend)(torch.ones(3, requires_grad=True))
        with pytest.raises(ValueError, match="no backward here"):
            loss.backward()
    assert [(graph.kind, graph.failure) for graph in new] == [
        ("forward", None),
        ("backward", "ValueError: no backward here"),
    ]
    assert new[1].forward == new[0].number


def test_compilations_of_several_threads_are_told_apart():
    def work(size):
        def total(x):
            return (x * x).sum()

        compiled(total, backend="aot_eager")(torch.ones(size, requires_grad=True)).backward()

    with ledger.watch() as new:
        threads = [threading.Thread(target=work, args=(size,)) for size in (2, 3, 5, 7)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    numbers = {graph.number: graph for graph in new}
    assert len(numbers) == len(new)
    backwards = [graph for graph in new if graph.kind == "backward"]
    assert sorted(graph.inputs[0].shape for graph in backwards) == sorted(
        numbers[graph.forward].inputs[0].shape for graph in backwards
    )
    assert {graph.inputs[0].shape for graph in new} == {(2,), (3,), (5,), (7,)}


def test_a_step_that_compiled_is_known_by_its_interval():
    def double(x):
        return x * 2

    double = compiled(double)
    times = [time.perf_counter()]
    for size in (2, 2, 3):
        double(torch.ones(size))
        times.append(time.perf_counter())
    assert [ledger.compiled_between(*times[i : i + 2]) for i in range(3)] == [True, False, True]
    assert ledger.compiled_between(times[0], times[3])
    assert not ledger.compiled_between(times[3], time.perf_counter())


def test_a_compilation_still_going_on_counts_for_its_interval():
    seen = []

    def watching(graph, inputs):
        now = time.perf_counter()
        seen.append((ledger.compiled_between(now - 1e-4, now), ledger.compiled_between(0.0, 1e-9)))
        return graph.forward

    compiled(lambda x: x + 1, backend=watching)(torch.ones(3))
    assert seen == [(True, False)]


def test_metrics_summary_and_report_agree():
    before = ledger.mark()
    model = compiled(Scale(), backend="aot_eager")
    for size in (2, 4):
        model(torch.ones(size, 3)).sum().backward()
    new = ledger.since(before)
    seconds = sum(graph.seconds for graph in new)
    assert ledger.summary(before) == (4, seconds, 4, 0, 0, 0, 0)
    assert ledger.metrics(before) == {
        "compile/graphs": 4,
        "compile/seconds": round(seconds, 3),
        "compile/cold": 4,
        "compile/warm": 0,
    }
    report = ledger.report(before)
    assert "hidden: dimension 0 was 2, is 4" in report
    assert "4 graphs in" in report
    assert report.count("backward") == 2


@pytest.mark.parametrize(
    ("counts", "with_aot", "warmth"),
    [
        (CacheCounts(), True, "cold"),
        (CacheCounts(aot_misses=1, fx_misses=1), True, "cold"),
        (CacheCounts(aot_hits=1), True, "warm"),
        (CacheCounts(aot_hits=1, fx_hits=2), True, "warm"),
        (CacheCounts(aot_misses=1, fx_hits=1), True, "partly"),
        (CacheCounts(fx_hits=1), True, "partly"),
        (CacheCounts(fx_hits=1), False, "warm"),
        (CacheCounts(fx_hits=1, fx_misses=1), False, "partly"),
        (CacheCounts(fx_misses=1), False, "cold"),
    ],
)
def test_warm_is_what_the_caches_answered(counts, with_aot, warmth):
    assert ledger._warmth(counts, with_aot=with_aot) == warmth


# Matrix products alone: Inductor calls ATen for them, so no C++ is compiled and the caches are used all the same.
TWO_PROCESSES = """
import json, os, shutil, sys
from trellium.monitor import ledger
assert "torch" not in sys.modules
import torch
assert "torch._dynamo" not in sys.modules

def train():
    def project(x, w):
        return x @ w
    torch._dynamo.reset()
    with ledger.watch() as new:
        torch.compile(project, dynamic=False)(torch.ones(4, 4), torch.ones(4, 4, requires_grad=True)).sum().backward()
    return [(graph.kind, graph.warmth, graph.failure) for graph in new]

rounds = [train()]
if sys.argv[1] == "second":
    shutil.rmtree(os.path.join(os.environ["TORCHINDUCTOR_CACHE_DIR"], "aotautograd"))
    rounds.append(train())
print(json.dumps(rounds))
"""


def test_a_second_process_is_warm_and_without_autograds_cache_partly(tmp_path):
    def run(which):
        done = subprocess.run(
            [sys.executable, "-c", TWO_PROCESSES, which],
            env={**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path), "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout.splitlines()[-1])

    assert run("first") == [[["forward", "cold", None], ["backward", "cold", None]]]
    assert run("second") == [
        [["forward", "warm", None], ["backward", "warm", None]],
        [["forward", "partly", None], ["backward", "warm", None]],
    ]


def test_torch_has_the_functions_and_numbers_that_the_ledger_reads():
    assert len(dynamo_hooks.known_functions()) == 4
    counted = {field.name for field in dataclasses.fields(torch._dynamo.utils.CompilationMetrics)}
    assert {key for keys in dynamo_hooks._METRIC_OF.values() for key in keys} <= counted | {
        "aotautograd_remote_cache_hit_count",
        "aotautograd_remote_cache_miss_count",
    }
    assert "recompile_reason" in counted
    assert isinstance(torch._dynamo.utils.get_metrics_context()._metrics, dict)


def test_another_torch_is_refused_with_both_signatures(monkeypatch):
    path = "torch._dynamo.output_graph:OutputGraph.call_user_compiler"
    monkeypatch.setitem(dynamo_hooks.KNOWN_PARAMETERS, path, ("self", "graph"))
    with pytest.raises(RuntimeError, match=r"call_user_compiler of this torch takes .*'gm'.* knows .*'graph'"):
        dynamo_hooks.known_functions()
