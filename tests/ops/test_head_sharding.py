from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.ops.test_head import full_log_probabilities, full_logits_scores, objective, problem
from trellium.ops import head_rows, head_tiles, losses
from trellium.ops.divergence import divergence
from trellium.ops.head import NLL_OUTPUTS, OUTPUTS, TokenScores, token_scores, weighted_nll
from trellium.ops.head_sharding import VocabularyShard

BOUNDS = [(0, 70), (70, 193)]
OPTIONS = [{}, {"softcap": 3.0, "temperature": 0.7}, {"logit_scale": 0.5}]
SMOOTHING = [0.0, 0.1, 0.3]
DIVERGENCES = [("jsd", 0.0), ("jsd", 0.5), ("total_variation", 0.5)]


def whole(dtype: torch.dtype = torch.float64):
    """The unsplit problem: a bias, the same best token twice in two parts, a token nobody says in each."""
    hidden, weight, target, bias, _ = problem(9, 5, BOUNDS[-1][1], with_bias=True, dtype=dtype)
    with torch.no_grad():
        weight[150] = weight[20]
        bias[150] = bias[20] = 9.0
        bias[3] = bias[100] = -1e4
    target[:4] = torch.tensor([20, 150, 69, 70])
    return hidden, weight, target, bias


def teacher_of(hidden: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Another model's hidden states and head."""
    return hidden.detach().flip(0) + 0.5, weight.detach().roll(1, 0)


def cut_differently() -> None:
    """So small that the ranks, left to themselves, would cut the edges into other blocks."""
    head_tiles.WORK_BYTES, head_tiles.VOCABULARY_TILE = 25_000, 64
    head_rows.FEWEST_ROWS, head_rows.PAYING_ROWS = 1, 0


def run_rank(rank: int, port: int) -> None:
    """What one rank finds, printed."""
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=len(BOUNDS)
    )
    start, stop = BOUNDS[rank]
    shard = VocabularyShard(start, torch.distributed.group.WORLD)
    reductions = []
    plain = torch.distributed.all_reduce

    def counted(tensor, *arguments, **options):
        reductions.append(tensor.numel())
        return plain(tensor, *arguments, **options)

    torch.distributed.all_reduce = counted
    found = []
    for case, options in enumerate(OPTIONS):
        if case == len(OPTIONS) - 1:
            cut_differently()
        hidden, weight, target, bias = whole()
        local = [weight.detach()[start:stop].requires_grad_(), bias.detach()[start:stop].requires_grad_()]
        reductions.clear()
        scores = token_scores(hidden, local[0], target, bias=local[1], outputs=OUTPUTS, shard=shard, **options)
        gradients = torch.autograd.grad(objective(scores), (hidden, *local))
        counts = list(reductions)
        smoothing = {"label_smoothing": SMOOTHING[len(found)]}
        loss, extra = weighted_nll(
            *(hidden, local[0], target, torch.arange(9.0)),
            **{"bias": local[1], "outputs": NLL_OUTPUTS, "shard": shard, **options, **smoothing},
        )
        fused = torch.autograd.grad(loss, (hidden, *local))
        kind, beta = DIVERGENCES[len(found)]
        teacher = teacher_of(hidden, weight)
        diverged, values = divergence(
            *(hidden, local[0], teacher[0], teacher[1][start:stop], torch.arange(9.0)),
            **{"kind": kind, "beta": beta, "student_bias": local[1], "shard": shard},
        )
        found.append(
            {
                "scores": {name: getattr(scores, name).tolist() for name in OUTPUTS},
                "extra": {name: getattr(extra, name).tolist() for name in NLL_OUTPUTS},
                "loss": loss.item(),
                "gradients": [gradient.tolist() for gradient in gradients],
                "fused": [gradient.tolist() for gradient in fused],
                "values": values.tolist(),
                "diverged": [part.tolist() for part in torch.autograd.grad(diverged, (hidden, *local))],
                "reductions": counts,
            }
        )
    print(json.dumps(found))
    torch.distributed.destroy_process_group()


@pytest.fixture(scope="module")
def ranks() -> list[list[dict]]:
    """What two processes with half a head each find."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "tests.ops.test_head_sharding"]
    root = Path(__file__).parents[2]
    processes = [
        subprocess.Popen(
            [*command, str(rank), str(port)],
            cwd=root,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", "TRELLIUM_NEURON": "0"},
        )
        for rank in range(len(BOUNDS))
    ]
    results = []
    for process in processes:
        out, error = process.communicate(timeout=120)
        assert process.returncode == 0, error
        results.append(json.loads(out.splitlines()[-1]))
    return results


def close(ours: list, theirs: torch.Tensor) -> None:
    torch.testing.assert_close(torch.tensor(ours, dtype=theirs.dtype), theirs.detach(), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("case", range(len(OPTIONS)))
def test_a_head_in_parts_scores_as_the_whole_one(ranks, case):
    hidden, weight, target, bias = whole()
    plain = full_logits_scores(hidden, weight, target, bias=bias, **OPTIONS[case])
    asked = TokenScores(logprob=plain.logprob, entropy=plain.entropy)
    expected = torch.autograd.grad(objective(asked), (hidden, weight, bias))
    for rank, (start, stop) in enumerate(BOUNDS):
        found = ranks[rank][case]
        for name in OUTPUTS:
            close(found["scores"][name], getattr(plain, name))
        for ours, theirs in zip(found["gradients"], parts_of(expected, start, stop), strict=True):
            close(ours, theirs)


@pytest.mark.parametrize("case", range(len(OPTIONS)))
def test_a_head_in_parts_gives_the_fused_loss_of_the_whole_one(ranks, case):
    hidden, weight, target, bias = whole()
    plain = full_logits_scores(hidden, weight, target, bias=bias, **OPTIONS[case])
    uniform = full_log_probabilities(hidden, weight, bias=bias, **OPTIONS[case]).mean(-1)
    smoothed = (1 - SMOOTHING[case]) * plain.logprob + SMOOTHING[case] * uniform
    loss = losses.nll(smoothed, torch.arange(9.0), 1)
    expected = torch.autograd.grad(loss, (hidden, weight, bias))
    for rank, (start, stop) in enumerate(BOUNDS):
        found = ranks[rank][case]
        close(found["loss"], loss)
        for name in NLL_OUTPUTS:
            close(found["extra"][name], getattr(plain, name))
        for ours, theirs in zip(found["fused"], parts_of(expected, start, stop), strict=True):
            close(ours, theirs)


@pytest.mark.parametrize("case", range(len(OPTIONS)))
def test_heads_in_parts_diverge_as_the_whole_ones(ranks, case):
    hidden, weight, _, bias = whole()
    kind, beta = DIVERGENCES[case]
    loss, values = divergence(
        hidden, weight, *teacher_of(hidden, weight), torch.arange(9.0), kind=kind, beta=beta, student_bias=bias
    )
    expected = torch.autograd.grad(loss, (hidden, weight, bias))
    for rank, (start, stop) in enumerate(BOUNDS):
        found = ranks[rank][case]
        close(found["values"], values)
        for ours, theirs in zip(found["diverged"], parts_of(expected, start, stop), strict=True):
            close(ours, theirs)


def parts_of(gradients: tuple[torch.Tensor, ...], start: int, stop: int) -> tuple[torch.Tensor, ...]:
    """A rank's part of the gradients of hidden, weight and bias."""
    return gradients[0], gradients[1][start:stop], gradients[2][start:stop]


def test_only_a_few_numbers_an_edge_are_exchanged(ranks):
    edges, width = 9, 5
    for rank in ranks:
        # one maximum, one vote for top-1, six sums; and the gradient of the hidden states
        assert rank[0]["reductions"] == [edges, edges, 6 * edges, edges * width]


if __name__ == "__main__":
    run_rank(int(sys.argv[1]), int(sys.argv[2]))
