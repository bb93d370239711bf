"""What two processes train and evaluate, compiled in one region or block by block, and eagerly: run by torchrun, prints a line of JSON a run.

DPO compares with a given reference, so that a second model is compiled beside the policy. The held-out rows are not a whole number of batches.
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


def run(folder: Path, **options: Any) -> dict[str, Any]:
    """Losses of a short run, and how the held-out set was then evaluated."""
    torch.compiler.reset()
    reference = model_for("dpo", "qwen3")
    trainer = trainer_for(
        "dpo",
        folder,
        ref_model=reference,
        eval_dataset=rows_for("dpo", 5, seed=3),
        layout="padded",
        optim="sgd",
        learning_rate=0.02,
        max_steps=2,
        per_device_train_batch_size=2,
        per_device_eval_batch_size=2,
        **options,
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
        "graphs_of_evaluation": len(list(compilations)),
        "eager_calls_of_evaluation": eager.count,
        "processes": trainer.accelerator.num_processes,
    }


def main(folder: Path) -> None:
    """Run eagerly, then compiled by both regions; the shapes are planned, so evaluation is compiled before the first step."""
    planned = {"torch_compile": True, "torch_compile_backend": "eager", "shapes": ["32"], "strict_shapes": True}
    for name, options in (
        ("eager", {}),
        ("model", {"compile_regions": "model", **planned}),
        ("blocks", {"compile_regions": "blocks", **planned}),
    ):
        with torch._dynamo.config.patch(automatic_dynamic_shapes=False):
            found = run(folder / name, **options)
        if torch.distributed.get_rank() == 0:
            print("FOUND", json.dumps({"name": name, **found}), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
