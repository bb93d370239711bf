"""What two processes train and evaluate, compiled in one region or block by block, and eagerly: run by torchrun with a folder and the names of runs, prints a line
of JSON a run.

DPO compares with a given reference, so that a second model is compiled beside the policy. The held-out rows are no whole number of batches, and fewer
than the processes take at a time in the last; in one run they are fewer than processes, in one of a method that reduces in every batch.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch

from tests.trainers.preference_runs import logged, model_for, rows_for, trainer_for
from trellium.monitor import max_compiles


class EagerCalls:
    """Counts calls of a model that run operator by operator: what is traced once runs no more."""

    def __init__(self, *models: torch.nn.Module) -> None:
        self.count = 0
        for model in models:
            model.model.layers[0].mlp.register_forward_pre_hook(self._called)

    def _called(self, *_: Any) -> None:
        if not torch.compiler.is_compiling():
            self.count += 1


def run(folder: Path, *, held_out: int = 5, method: str = "dpo", **options: Any) -> dict[str, Any]:
    """Losses of a short run, and how the held-out set was then evaluated."""
    torch.compiler.reset()
    reference = model_for("dpo", "qwen3")
    trainer = trainer_for(
        method,
        folder,
        ref_model=reference,
        eval_dataset=rows_for(method, held_out, seed=3),
        layout="padded",
        optim="sgd",
        max_steps=2,
        **{"learning_rate": 0.02, "per_device_train_batch_size": 2, "per_device_eval_batch_size": 2, **options},
    )
    eager = EagerCalls(trainer.model, reference)
    trainer.train()
    eager.count = 0
    with max_compiles(64) as compilations:
        metrics = trainer.evaluate()
    return {
        "losses": logged(trainer),
        "eval_loss": metrics["eval_loss"],
        "margin": metrics["eval_rewards/margins"],
        "tokens": metrics["eval_num_tokens"],
        "graphs_of_evaluation": len(list(compilations)),
        "eager_calls_of_evaluation": eager.count,
        "processes": trainer.accelerator.num_processes,
    }


PLANNED = {"torch_compile": True, "torch_compile_backend": "eager", "shapes": ["32"], "strict_shapes": True}
RUNS: dict[str, dict[str, Any]] = {
    "eager": {},
    "a single row": {"held_out": 1},
    "kto": {"method": "kto", "learning_rate": 0.0},
    "model": {"compile_regions": "model", **PLANNED},
    "blocks": {"compile_regions": "blocks", **PLANNED},
}


def main(folder: Path, names: list[str]) -> None:
    """Do the runs of these names; where shapes are planned, evaluation is compiled before the first step."""
    for name in names:
        with torch._dynamo.config.patch(automatic_dynamic_shapes=False):
            found = run(folder / name, **RUNS[name])
        if torch.distributed.get_rank() == 0:
            print("FOUND", json.dumps({"name": name, **found}), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
