from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.ops.test_head import full_logits_scores, objective, problem
from trellium.ops import losses
from trellium.ops.head import NLL_OUTPUTS, OUTPUTS, TokenScores, token_scores, weighted_nll
from trellium.ops.head_sharding import VocabularyShard

BOUNDS = [(0, 70), (70, 193)]
OPTIONS = [{}, {"softcap": 3.0, "temperature": 0.7}, {"logit_scale": 0.5}]


def whole(dtype: torch.dtype = torch.float64):
    """The unsplit problem: a bias, the same best token twice in two parts, a token nobody says in each."""
    hidden, weight, target, bias, _ = problem(9, 5, BOUNDS[-1][1], with_bias=True, dtype=dtype)
    with torch.no_grad():
        weight[150] = weight[20]
        bias[150] = bias[20] = 9.0
        bias[3] = bias[100] = -1e4
    target[:4] = torch.tensor([20, 150, 69, 70])
    return hidden, weight, target, bias


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
    for options in OPTIONS:
        hidden, weight, target, bias = whole()
        local = [weight.detach()[start:stop].requires_grad_(), bias.detach()[start:stop].requires_grad_()]
        reductions.clear()
        scores = token_scores(hidden, local[0], target, bias=local[1], outputs=OUTPUTS, shard=shard, **options)
        gradients = torch.autograd.grad(objective(scores), (hidden, *local))
        counts = list(reductions)
        loss, extra = weighted_nll(
            hidden, local[0], target, torch.arange(9.0), bias=local[1], outputs=NLL_OUTPUTS, shard=shard, **options
        )
        fused = torch.autograd.grad(loss, (hidden, *local))
        found.append(
            {
                "scores": {name: getattr(scores, name).tolist() for name in OUTPUTS},
                "extra": {name: getattr(extra, name).tolist() for name in NLL_OUTPUTS},
                "loss": loss.item(),
                "gradients": [gradient.tolist() for gradient in gradients],
                "fused": [gradient.tolist() for gradient in fused],
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
        for ours, theirs in zip(
            found["gradients"], (expected[0], expected[1][start:stop], expected[2][start:stop]), strict=True
        ):
            close(ours, theirs)


@pytest.mark.parametrize("case", range(len(OPTIONS)))
def test_a_head_in_parts_gives_the_fused_loss_of_the_whole_one(ranks, case):
    hidden, weight, target, bias = whole()
    plain = full_logits_scores(hidden, weight, target, bias=bias, **OPTIONS[case])
    loss = losses.nll(plain.logprob, torch.arange(9.0), 1)
    expected = torch.autograd.grad(loss, (hidden, weight, bias))
    for rank, (start, stop) in enumerate(BOUNDS):
        found = ranks[rank][case]
        close(found["loss"], loss)
        for name in NLL_OUTPUTS:
            close(found["extra"][name], getattr(plain, name))
        for ours, theirs in zip(
            found["fused"], (expected[0], expected[1][start:stop], expected[2][start:stop]), strict=True
        ):
            close(ours, theirs)


def test_only_a_few_numbers_an_edge_are_exchanged(ranks):
    edges, width = 9, 5
    for rank in ranks:
        # one maximum, one vote for top-1, six sums; and the gradient of the hidden states
        assert rank[0]["reductions"] == [edges, edges, 6 * edges, edges * width]


if __name__ == "__main__":
    run_rank(int(sys.argv[1]), int(sys.argv[2]))
