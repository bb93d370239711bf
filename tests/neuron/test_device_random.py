"""The device draws the CPU's numbers for the same seed, and from generators of its own."""

from __future__ import annotations

import pytest
import torch


@pytest.mark.parametrize(
    "draw",
    [
        lambda device: torch.randn(5, device=device),
        lambda device: torch.rand(3, 3, dtype=torch.bfloat16, device=device),
        lambda device: torch.randint(0, 100, (7,), device=device),
        lambda device: torch.randperm(10, device=device),
        lambda device: torch.empty(4, device=device).exponential_(),
        lambda device: torch.multinomial(torch.ones(6, device=device), 3),
        lambda device: torch.bernoulli(torch.full((9,), 0.5, device=device)),
        lambda device: torch.nn.functional.dropout(torch.ones(33, device=device), 0.1),
        lambda device: torch.nn.init.trunc_normal_(torch.empty(4, 4, device=device)),
    ],
)
def test_same_seed_same_numbers_as_the_cpu(draw):
    torch.manual_seed(7)
    host = draw("cpu")
    torch.manual_seed(7)
    assert torch.equal(draw("neuron").cpu(), host)


def test_drawing_on_the_device_does_not_move_the_cpus_generator():
    before = torch.get_rng_state()
    torch.rand(3, device="neuron")
    torch.nn.functional.dropout(torch.ones(3, device="neuron"), 0.5)
    torch.native_dropout(torch.ones(8, device="neuron"), 0.5, True)
    assert torch.equal(before, torch.get_rng_state())


def test_a_generator_of_ones_own():
    generator = torch.Generator("neuron:1").manual_seed(3)
    assert generator.device == torch.device("neuron:1")
    first = torch.rand(3, device="neuron:1", generator=generator)
    state = generator.get_state()
    second = torch.rand(3, device="neuron:1", generator=generator)
    generator.set_state(state)
    assert torch.equal(torch.rand(3, device="neuron:1", generator=generator), second)
    assert torch.equal(first.cpu(), torch.rand(3, generator=torch.Generator().manual_seed(3)))
    assert generator.initial_seed() == 3
    assert torch.equal(
        torch.rand(2, device="neuron:1", generator=generator.clone_state()).cpu(),
        torch.rand(2, device="neuron:1", generator=generator).cpu(),
    )


def test_a_generator_of_the_other_device_is_refused_as_on_cuda():
    with pytest.raises(RuntimeError, match="Expected a 'neuron' device type for generator but found 'cpu'"):
        torch.rand(2, device="neuron", generator=torch.Generator())
    with pytest.raises(RuntimeError, match="Expected a 'cpu' device type for generator but found 'neuron'"):
        torch.empty(2).normal_(generator=torch.Generator("neuron"))


def test_states_are_saved_and_restored_core_by_core():
    torch.neuron.manual_seed_all(5)
    states = torch.neuron.get_rng_state_all()
    assert len(states) == torch.neuron.device_count()
    first = [torch.rand(2, device=f"neuron:{core}").tolist() for core in (0, 1)]
    assert first[0] == first[1], "one seed for all"
    torch.neuron.set_rng_state_all(states)
    assert torch.rand(2, device="neuron:1").tolist() == first[1]
    state = torch.neuron.get_rng_state("neuron:1")
    expected = torch.rand(2, device="neuron:1")
    torch.neuron.set_rng_state(state, 1)
    assert torch.equal(torch.rand(2, device="neuron:1"), expected)


def test_manual_seed_touches_the_current_core_only():
    torch.neuron.manual_seed_all(1)
    with torch.neuron.device(1):
        torch.neuron.manual_seed(2)
        assert torch.neuron.initial_seed() == 2
    assert torch.neuron.initial_seed() == 1
    assert [generator.initial_seed() for generator in torch.neuron.default_generators[:2]] == [1, 2]


@pytest.mark.parametrize(
    "fork", [lambda: torch.random.fork_rng([0], device_type="neuron"), lambda: torch.neuron.fork_rng()]
)
def test_fork_rng_gives_the_numbers_back(fork):
    with fork():
        inside = torch.rand(2, device="neuron:0")
    assert torch.equal(torch.rand(2, device="neuron:0"), inside)
