"""What is counted of a run on `neuron`, and what `strict` refuses."""

import os
import subprocess
import sys
import threading

import pytest
import torch

contract = pytest.importorskip("trellium.neuron.contract")

if not (hasattr(torch, "neuron") and torch.neuron.is_available()):
    pytest.skip("needs the emulated device", allow_module_level=True)


@pytest.fixture(autouse=True)
def counting():
    contract.reset()
    with contract.track():
        yield
    contract.reset()


def neuron(*shape, dtype=torch.float32):
    return torch.zeros(*shape, dtype=dtype).to("neuron")


def compilations():
    return contract.get_compilation_cache_counters()["CompilationCache.TotalCompilations"]


def compiled_by(run):
    before = compilations()
    run()
    return compilations() - before


def operator(name):
    return next(op for op in contract.report().operators if op.name == name)


# ---- which operators ran


def test_operators_are_told_apart_by_where_the_device_would_run_them():
    x = neuron(4, 8)
    contract.clear_op_tracking()
    torch.relu(x)
    torch.sort(x)
    assert "aten::relu" in contract.get_executed_ops()
    assert [name for name in contract.get_fallback_ops() if name.startswith("aten::sort")]
    assert not set(contract.get_executed_ops()) & set(contract.get_fallback_ops())
    contract.clear_op_tracking()
    assert contract.get_executed_ops() == contract.get_fallback_ops() == []


def test_a_host_operator_is_reported_with_its_reason_its_evidence_and_the_users_line():
    x = neuron(4, 8)
    contract.reset()
    for _ in range(3):
        torch.sort(x)
    (sort,) = contract.report().host
    assert (sort.host_calls, sort.calls, sort.compilations) == (3, 3, 0)
    assert "NCC_EVRF029" in sort.reason
    assert sort.evidence == "docs"
    assert f"{__file__}:" in sort.where
    assert "estimated from public documentation, not from a device" in str(contract.report())


def test_topk_runs_on_the_device():
    torch.topk(neuron(4, 8), 2)
    assert contract.get_fallback_ops() == []


def test_complex_numbers_go_to_the_host():
    x = neuron(4, dtype=torch.complex64)
    contract.reset()
    x * x
    (product,) = contract.report().host
    assert product.name == "aten::mul.Tensor"
    assert "complex" in product.reason


def test_random_numbers_go_to_the_host_but_dropout_does_not():
    x = neuron(4, 8)
    contract.reset()
    torch.nn.functional.dropout(x, 0.5)
    torch.native_dropout(x, 0.5, True)
    assert operator("aten::native_dropout").calls == 2
    assert len(contract.report().operators) == 1  # what it is made of here is not the user's
    assert contract.get_fallback_ops() == []
    x.normal_()
    assert contract.get_fallback_ops() == ["aten::normal_"]


def test_results_sized_by_data_are_reported_but_are_no_fallback():
    x, mask = neuron(4, 8), neuron(4, 8, dtype=torch.bool)
    contract.reset()
    torch.nonzero(x)
    x[mask]
    x[neuron(2, dtype=torch.int64)]
    report = contract.report()
    assert {op.name: op.data_dependent_calls for op in report.data_dependent} == {
        "aten::nonzero": 1,
        "aten::index.Tensor": 1,
    }
    assert report.host == ()


def test_operators_of_which_nothing_is_known_are_listed_apart():
    x = neuron(4, 8)
    contract.reset()
    torch.roll(x, 1)
    torch.histc(x.int(), 4)
    report = contract.report()
    assert {op.name for op in report.untested} == {"aten::roll", "aten::histc"}
    assert report.host == ()


def test_a_custom_operator_without_a_kernel_for_the_device_goes_to_the_host():
    name = "trellium_test::twice"
    torch.library.define(name, "(Tensor x) -> Tensor")
    torch.library.impl(name, "cpu")(lambda x: x * 2)
    x = neuron(4)
    contract.reset()
    torch.ops.trellium_test.twice(x)
    (twice,) = contract.report().host
    assert twice.name == name
    assert "custom operator" in twice.reason


def test_every_name_of_the_table_is_an_operator_of_torch():
    names = torch._C._dispatch_get_all_op_names()
    known = {name.rstrip(".") for name in names} | {name.split(".")[0] for name in names}
    known |= {name[:-1] for name in known if name.endswith("_")}
    for rule in contract.RULES:
        for name in rule.operators:
            if name.endswith("*"):
                assert any(other.startswith(name[:-1]) for other in known), name
            else:
                assert name in known, name


# ---- how many programs it would have compiled


def test_a_program_is_compiled_once_for_each_operator_shape_and_dtype():
    x, y = neuron(4, 8), neuron(4, 8)
    assert compiled_by(lambda: x + y) == 1
    assert compiled_by(lambda: x + y) == 0
    assert compiled_by(lambda: x - y) == 1
    assert compiled_by(lambda: neuron(5, 8) + neuron(5, 8)) == 1
    assert compiled_by(lambda: x.bfloat16()) == 1  # a cast
    counters = contract.get_compilation_cache_counters()
    assert counters["CompilationCache.InMemoryHits"] == 1
    assert counters["CompilationCache.InMemoryMisses"] == counters["CompilationCache.TotalCompilations"]


def test_python_scalars_share_a_program_and_out_changes_nothing():
    x, out = neuron(4, 8), neuron(4, 8)
    assert compiled_by(lambda: x * 2.0) == 1
    assert compiled_by(lambda: x * 3.0) == 0
    torch.add(x, x, out=out)
    assert compiled_by(lambda: torch.add(x, x, out=neuron(4, 8))) == 0


def test_static_arguments_are_part_of_a_program():
    x = neuron(4, 8)
    assert compiled_by(lambda: x.sum(0)) == 1
    assert compiled_by(lambda: x.sum(1)) == 1
    assert compiled_by(lambda: x.sum(1)) == 0


def test_views_allocations_and_transfers_compile_nothing():
    x = neuron(4, 8)

    def run():
        x.view(8, 4).transpose(0, 1)[2:].unsqueeze(0).expand(3, -1, -1)
        torch.empty(7, 7, device="neuron")
        x.cpu().to("neuron")
        x[0, 0].item()

    assert compiled_by(run) == 0


def test_a_foreach_operator_is_one_program_for_each_shape_it_meets():
    tensors = [neuron(4), neuron(4), neuron(6)]
    assert compiled_by(lambda: torch._foreach_add_(tensors, 1.0)) == 2
    assert compiled_by(lambda: torch._foreach_add_(tensors, 2.0)) == 0
    assert operator("aten::_foreach_add_.Scalar").signatures == ("float32[4]", "float32[6]")


def test_a_cast_is_one_program_whether_it_waits_or_not():
    x = neuron(4, 8)
    assert compiled_by(lambda: x.to(torch.bfloat16)) == 1
    assert compiled_by(lambda: x.to(torch.bfloat16, non_blocking=True)) == 0


def test_a_report_names_the_programs_of_an_operator():
    neuron(4, 8) @ neuron(8, 2)
    assert operator("aten::mm").signatures == ("float32[4,8], float32[8,2]",)


# ---- 64-bit values


def test_64_bit_operands_are_counted_for_each_operator():
    wide, whole = neuron(4, dtype=torch.float64), neuron(4, dtype=torch.int64)
    contract.reset()
    wide + wide
    whole * whole
    report = contract.report()
    assert (report.float64_calls, report.int64_calls) == (1, 1)
    assert operator("aten::add.Tensor").float64_calls == 1
    assert report.lost == ()


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (torch.tensor([1, 2**40]), "from 1 to 1099511627776 do not fit int32"),
        (torch.tensor([1.0, 1e300], dtype=torch.float64), "overflow float32"),
    ],
)
def test_values_that_32_bits_do_not_hold_are_found_when_asked_for(value, words):
    x = value.to("neuron")
    contract.reset()
    x + x
    assert contract.report().lost == ()
    with contract.track(values=True):
        x + x
    assert [op.name for op in contract.report().lost] == ["aten::add.Tensor"]
    with contract.strict(), pytest.raises(contract.ContractError, match=words):
        x + x
    with contract.strict(), pytest.raises(contract.ContractError, match=words):
        value.to("neuron")


def test_infinities_and_ordinary_values_survive():
    with contract.strict():
        torch.tensor([float("inf"), float("nan"), 1e38], dtype=torch.float64).to("neuron") + 1
        torch.tensor([2**31 - 1, -(2**31)]).to("neuron").abs()
        torch.empty(5, dtype=torch.int64, device="neuron").fill_(3)
    assert contract.report().lost == ()


def test_an_integer_product_beyond_float32s_exact_range_is_refused_under_strict():
    small, large = neuron(4, 4, dtype=torch.int32) + 3, neuron(4, 4, dtype=torch.int32) + 5000
    with contract.strict():
        small @ small
        with pytest.raises(contract.ContractError, match=r"2\^24"):
            large @ large


# ---- strict


def test_strict_names_the_operator_its_shapes_and_the_users_line():
    x = neuron(4, 8)
    with contract.strict(), pytest.raises(contract.ContractError) as caught:
        torch.sort(x)
    message = str(caught.value)
    assert "aten::sort" in message
    assert "float32[4,8]" in message
    assert f"{__file__}:" in message
    assert "test_strict_names" in message
    torch.sort(x)  # and after the `with`, all is as before


def test_strict_reaches_the_backward_pass():
    class SortsBackward(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            return gradient.sort().values

    x = neuron(4, 8).requires_grad_()
    loss = SortsBackward.apply(x).sum()
    with contract.strict(), pytest.raises(contract.ContractError, match="aten::sort"):
        loss.backward()


def test_a_plain_call_of_strict_lasts_until_track_is_called():
    x = neuron(4, 8)
    contract.strict()
    try:
        with pytest.raises(contract.ContractError):
            torch.sort(x)
    finally:
        contract.track()
    torch.sort(x)


def test_strict_can_let_fallbacks_pass_and_limit_compilations():
    x, y = neuron(4, 8), neuron(3, 8)
    contract.reset()
    with contract.strict(fallback=False, max_compilations=1):
        torch.sort(x)
        torch.relu(x)
        torch.relu(x)
        with pytest.raises(contract.ContractError, match=r"relu\(float32\[3,8\]\).*1 were allowed"):
            torch.relu(y)
    with pytest.raises(ValueError, match="0 or more"):
        contract.strict(max_compilations=-1)


def test_nothing_is_counted_when_tracking_is_off():
    x = neuron(4, 8)
    contract.reset()
    with contract.track(False):
        assert not contract.is_tracking()
        torch.relu(x)
    assert contract.is_tracking()
    assert contract.report().operators == ()


# ---- blocks within, after and across one another


def is_strict():
    try:
        torch.sort(torch.zeros(3, device="neuron"))
    except contract.ContractError:
        return True
    return False


def test_counting_inside_a_strict_block_stays_strict():
    with contract.strict(max_compilations=10**6):
        with contract.track():
            assert is_strict()
        with contract.track(values=True), contract.strict(values=False):
            assert is_strict()
        with contract.track(False):
            assert not is_strict()
            with contract.strict():
                assert is_strict()
        with contract.strict(fallback=False):
            assert not is_strict()
        assert is_strict()
    assert not is_strict()
    with contract.track(), contract.strict():
        assert is_strict()
    assert not is_strict()


def test_a_block_inside_a_plain_call_leaves_the_call_standing():
    contract.strict()
    try:
        with contract.track(values=True):
            assert is_strict()
        assert is_strict()
    finally:
        contract.track()
    assert not is_strict()


def test_a_block_can_be_used_again_and_inside_itself():
    block = contract.strict()
    assert is_strict()
    for _ in range(2):
        with block:
            assert is_strict()
            with block:
                assert is_strict()
            assert is_strict()
        assert not is_strict()


def test_blocks_that_overlap_take_away_their_own_part_only():
    first, second = contract.strict(), contract.strict()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert is_strict()
    second.__exit__(None, None, None)
    assert not is_strict()

    def strictly():
        with contract.strict():
            yield

    one, other = strictly(), strictly()
    next(one), next(other)
    one.close()
    assert is_strict()
    other.close()
    assert not is_strict()


def test_threads_whose_blocks_overlap_leave_nothing_behind():
    begun, ended = threading.Event(), threading.Event()
    found = []

    def work():
        with contract.strict():
            begun.set()
            ended.wait(60)
            found.append(is_strict())

    thread = threading.Thread(target=work)
    with contract.strict():
        thread.start()
        begun.wait(60)
    ended.set()
    thread.join()
    assert found == [True]
    assert not is_strict()


def test_calls_without_number_keep_no_more_than_the_last():
    for _ in range(50):
        contract.track()
    assert len(contract._calls) <= 2


@pytest.mark.parametrize(
    "look", [repr, str, lambda x: f"{x}", lambda x: repr(torch.nn.Parameter(x)), lambda x: repr([x])]
)
def test_looking_at_a_tensor_changes_no_report_and_breaks_no_rule(look):
    x = neuron(40, 40) + 1.5
    contract.reset()
    with contract.strict():
        assert "1.5" in look(x)
    assert contract.report().operators == ()
    x + x
    assert [op.name for op in contract.report().operators] == ["aten::add.Tensor"]


# ---- threads, forks, the environment


def test_threads_lose_no_count():
    x = neuron(4)
    contract.reset()
    threads = [threading.Thread(target=lambda: [torch.relu(x) for _ in range(500)]) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert operator("aten::relu").calls == 4000
    assert compilations() == 1


def test_a_fork_while_others_count_leaves_the_child_a_usable_contract():
    x = neuron(4)
    stop = threading.Event()

    def busy():
        while not stop.is_set():
            torch.relu(x)

    thread = threading.Thread(target=busy)
    thread.start()
    try:
        for _ in range(5):
            child = os.fork()
            if child == 0:
                contract.report()
                os._exit(0)
            assert os.waitpid(child, 0)[1] == 0
    finally:
        stop.set()
        thread.join()


def run_script(tmp_path, body, **environment):
    script = tmp_path / "train.py"
    script.write_text(body)
    return subprocess.run(
        [sys.executable, str(script)],
        capture_output=True,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"} | environment,
    )


def test_the_environment_turns_strict_on_and_the_error_names_the_scripts_line(tmp_path):
    done = run_script(
        tmp_path, "import torch\nx = torch.zeros(3).to('neuron')\n\ntorch.sort(x)\n", TRELLIUM_NEURON_STRICT="1"
    )
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("trellium.neuron.contract.ContractError: aten::sort")
    assert f"{tmp_path / 'train.py'}:4" in last


def test_a_variable_that_holds_nonsense_leaves_torch_usable_and_says_why(tmp_path):
    done = run_script(
        tmp_path,
        "import torch\nprint(torch.ones(2).sum().item(), torch.accelerator.is_available())\n",
        TRELLIUM_NEURON_STRICT="si",
    )
    assert done.stdout == "2.0 False\n"


def test_without_the_device_the_contract_says_why_there_is_nothing_to_count(tmp_path):
    done = run_script(
        tmp_path, "import torch, trellium.neuron\ntrellium.neuron.report()\n", TORCH_DEVICE_BACKEND_AUTOLOAD="0"
    )
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("RuntimeError: there is no emulated neuron device")
    assert "TORCH_DEVICE_BACKEND_AUTOLOAD" in last
