import pytest
import torch

from trellium.monitor import TooManyCompiles, max_compiles
from trellium.monitor.ledger import Change


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def make_step(backend="eager"):
    def step(tokens, mask):
        return (tokens * mask).sum()

    return torch.compile(step, backend=backend, dynamic=False)


def run(step, *lengths):
    for length in lengths:
        loss = step(torch.ones(2, length, requires_grad=True), torch.ones(2, 1))
    return loss


def test_a_block_within_its_limit_passes_and_gives_its_records():
    step = make_step()
    with max_compiles(2) as new:
        run(step, 8, 16, 8)
    assert [graph.inputs[0].shape for graph in new] == [(2, 8), (2, 16)]


def test_one_graph_too_many_names_the_argument_and_its_sizes():
    step = make_step()
    with pytest.raises(TooManyCompiles) as caught, max_compiles(1):
        run(step, 8, 13)
    error = caught.value
    assert error.change == Change("tokens", 1, 8, 13)
    assert error.frame.partition(":")[0] == __file__
    assert len(error.compilations) == 2
    message = str(error).splitlines()
    assert message[0].startswith(
        "2 graphs were compiled where at most 1 may be. One too many: tokens: dimension 1 was 8, is 13 ("
    )
    assert error.frame in message[0]
    assert "called at " + __file__ in message[0]
    assert len(message) == 3


def test_it_fails_as_an_assertion():
    with pytest.raises(AssertionError, match="the first graph of this frame"), max_compiles(0):
        run(make_step(), 8)


def test_a_forward_and_its_backward_are_one():
    step = make_step("aot_eager")
    with max_compiles(1) as new:
        run(step, 8).backward()
    assert len(new) == 2


def test_a_backward_whose_forward_came_before_is_one():
    loss = run(make_step("aot_eager"), 8)
    with pytest.raises(TooManyCompiles) as caught, max_compiles(0):
        loss.backward()
    assert caught.value.blamed.kind == "backward"


def test_a_warmed_up_block_compiles_nothing():
    step = make_step("aot_eager")
    run(step, 8).backward()
    with max_compiles(0):
        run(step, 8).backward()


def test_a_frame_given_up_at_the_recompile_limit_fails_however_few_graphs_there_were():
    step = make_step()
    with (
        torch._dynamo.config.patch(recompile_limit=2),
        pytest.raises(TooManyCompiles, match="runs eagerly: recompile_limit") as caught,
        max_compiles(5),
    ):
        run(step, 8, 9, 10, 11)
    assert caught.value.change == Change("tokens", 1, 9, 10)


def test_an_error_inside_the_block_is_not_hidden():
    def compile_and_fail():
        run(make_step(), 8)
        raise KeyError

    with pytest.raises(KeyError), max_compiles(0):
        compile_and_fail()


def test_it_decorates_functions():
    @max_compiles(0)
    def work():
        run(make_step(), 8)

    for _ in range(2):
        torch._dynamo.reset()
        with pytest.raises(TooManyCompiles):
            work()


def test_a_negative_limit_is_refused():
    with pytest.raises(ValueError, match="got -1"), max_compiles(-1):
        pass


def test_the_fixture_is_the_same_limit(request):
    limit = request.getfixturevalue("max_compiles")
    with pytest.raises(TooManyCompiles), limit(0):
        run(make_step(), 8)
