"""The rows of a step dealt to processes and micro-batches by what they cost: the same steps, and processes that have as much to do."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from itertools import islice
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from accelerate.data_loader import BatchSamplerShard
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import BatchSampler

from tests.tiny_tokenizer import tiny_tokenizer
from tests.trainers.preference_runs import METHODS as PREFERENCES
from tests.trainers.preference_runs import model_for, rows_for, trainer_for
from tests.trainers.tiny_runs import losses, token_rows
from trellium import SFTConfig, SFTTrainer
from trellium.trainers.dealing import Dealing, deal_out

METHODS = ("sft", "dpo", "kto", "reward")
RANKS = 2


def run(method: str, folder: Path, *, balance: bool, resume: str | None = None, **options) -> dict:
    """The logged losses; and for each micro-batch of this process the tokens of its rows, and how many of them were forwarded."""
    config_class, trainer_class = {"sft": (SFTConfig, SFTTrainer), **PREFERENCES}[method]
    args = config_class(
        **{
            "output_dir": str(folder),
            "use_cpu": True,
            "disable_tqdm": True,
            "report_to": "none",
            "logging_steps": 1,
            "save_strategy": "no",
            "learning_rate": 1e-2,
            "per_device_train_batch_size": 3,
            "gradient_accumulation_steps": 2,
            "num_train_epochs": 1,
            "gradient_checkpointing": False,
            "balance_batches": balance,
            **options,
        }
    )
    # 22 rows, 12 a step: the second step is of a whole round, and of another that is filled up with the first two rows.
    rows = token_rows(22, longest=40) if method == "sft" else rows_for(method, 22)
    trainer = trainer_class(model_for(method), args=args, train_dataset=rows, processing_class=tiny_tokenizer())
    seen: dict[str, list[int]] = {"data_tokens": [], "real_tokens": []}
    step = trainer.training_step

    def watched(model, inputs, count):
        for name, values in seen.items():
            values.append(int(inputs[name].sum()))
        return step(model, inputs, count)

    trainer.training_step = watched
    trainer.train(resume_from_checkpoint=resume)
    return {"losses": losses(trainer), **seen}


def run_rank(folder: Path, rank: int, port: str) -> None:
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(RANKS), MASTER_ADDR="127.0.0.1", MASTER_PORT=port
    )
    found = {}
    for method in METHODS:
        for way in ("order", "balanced"):
            epochs = {"num_train_epochs": 2} if method == "sft" else {}
            found[f"{method} {way}"] = run(
                method, folder / f"{method}-{way}", balance=way == "balanced", ddp_backend="gloo", **epochs
            )
    saved = {"ddp_backend": "gloo", "num_train_epochs": 2, "save_strategy": "steps", "save_steps": 3}
    whole = folder / "whole"
    found["whole"] = run("sft", whole, balance=True, **saved)
    found["resumed"] = run("sft", whole, balance=True, resume=str(whole / "checkpoint-3"), **saved)
    (folder / f"{rank}.json").write_text(json.dumps(found))


@pytest.fixture(scope="module")
def ranks(tmp_path_factory) -> list[dict]:
    folder = tmp_path_factory.mktemp("ranks")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    root = Path(__file__).parents[2]
    environment = {**os.environ, "PYTHONPATH": f"{root / 'src'}:{root}", "OMP_NUM_THREADS": "1", "TRELLIUM_NEURON": "0"}
    processes = [
        subprocess.Popen(
            [sys.executable, __file__, str(folder), str(rank), port], env=environment, stderr=subprocess.PIPE, text=True
        )
        for rank in range(RANKS)
    ]
    for process in processes:
        _, errors = process.communicate(timeout=300)
        assert process.returncode == 0, errors
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(RANKS)]


@pytest.mark.parametrize("method", METHODS)
def test_balanced_batches_give_the_losses_of_batches_in_order(ranks, method):
    order, balanced = ranks[0][f"{method} order"], ranks[0][f"{method} balanced"]
    assert len(order["losses"]) >= 2
    assert balanced["losses"] == pytest.approx(order["losses"], rel=2e-5)


@pytest.mark.parametrize("method", METHODS)
def test_the_rows_of_a_step_are_the_same_and_the_busiest_process_has_less_to_do(ranks, method):
    def by_step(way: str, tokens: str) -> np.ndarray:
        return np.asarray([rank[f"{method} {way}"][tokens] for rank in ranks]).reshape(RANKS, -1, 2).sum(axis=2)

    assert by_step("balanced", "data_tokens").sum(0).tolist() == by_step("order", "data_tokens").sum(0).tolist()
    busiest = {way: by_step(way, "real_tokens").max(0).sum() for way in ("order", "balanced")}
    assert busiest["balanced"] < busiest["order"]


def test_a_resumed_run_goes_on_with_the_rows_that_the_whole_one_had(ranks):
    for rank in ranks:
        whole, resumed = rank["whole"], rank["resumed"]
        assert whole["losses"] == pytest.approx(rank["sft balanced"]["losses"], rel=1e-6)
        assert resumed["data_tokens"] == whole["data_tokens"][-2:]
    assert ranks[0]["resumed"]["losses"] == pytest.approx(ranks[0]["whole"]["losses"], rel=1e-6)


@settings(max_examples=200, deadline=None)
@given(
    rows=st.integers(1, 60),
    batch=st.integers(1, 4),
    ranks=st.integers(1, 4),
    micro_batches=st.integers(1, 3),
    drop_last=st.booleans(),
    even_batches=st.booleans(),
)
def test_every_step_has_the_rows_it_had_in_order_whatever_is_left_at_the_end(
    rows, batch, ranks, micro_batches, drop_last, even_batches
):
    random = np.random.default_rng(rows)
    order, costs = random.permutation(rows).tolist(), random.integers(1, 100, rows).astype(float)

    def steps(dealt: bool) -> list[list[int]]:
        of_ranks = []
        for rank in range(ranks):
            batches = BatchSampler(order, batch, drop_last)
            if ranks > 1:
                batches = BatchSamplerShard(batches, ranks, rank, even_batches=even_batches)
            if dealt:
                deal_out(SimpleNamespace(batch_sampler=batches), costs, Dealing(ranks, micro_batches, 0.0))
            read = list(batches)
            assert len(read) == len(batches)
            of_ranks.append(read)
        longest = max(map(len, of_ranks))
        return [
            sorted(row for read in of_ranks for one in islice(read, at, at + micro_batches) for row in one)
            for at in range(0, longest, micro_batches)
        ]

    assert steps(dealt=True) == steps(dealt=False)


@pytest.mark.parametrize("method", METHODS)
def test_micro_batches_of_one_process_are_dealt_out_too(tmp_path, method):
    order, balanced = (run(method, tmp_path / str(balance), balance=balance) for balance in (False, True))
    assert balanced["losses"] == pytest.approx(order["losses"], rel=2e-5)
    longest = {
        name: np.reshape(found["real_tokens"][:6], (3, 2)).max(1).sum()
        for name, found in (("o", order), ("b", balanced))
    }
    assert longest["b"] == longest["o"] if method == "kto" else longest["b"] < longest["o"]


def test_rows_stay_in_order_where_the_loss_depends_on_who_is_with_whom(tmp_path):
    several = {"gradient_accumulation_steps": 2}
    assert trainer_for("dpo", tmp_path, **several).dealing == Dealing(1, 2, pytest.approx(0.02, abs=0.02))
    assert trainer_for("dpo", tmp_path, loss_type=["sigmoid", "aot"], **several).dealing is None
    assert trainer_for("dpo", tmp_path, layout="padded", **several).dealing is None
    assert trainer_for("dpo", tmp_path).dealing is None
    assert trainer_for("kto", tmp_path, **several).dealing is None
    assert trainer_for("kto", tmp_path, loss_type="apo_zero_unpaired", **several).dealing is not None
    mixture = model_for("dpo", "qwen3_moe")
    assert trainer_for("dpo", tmp_path, mixture, router_aux_loss_coef=0.1, **several).dealing is None
    assert trainer_for("dpo", tmp_path, mixture, router_aux_loss_coef=0.0, **several).dealing is not None


if __name__ == "__main__":
    run_rank(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
