"""What `transformers.Trainer` leaves out when it takes up a checkpoint: weights saved under other names, and an accelerator's random numbers."""

from __future__ import annotations

from pathlib import Path

from torch import nn
from transformers import Trainer

from trellium.models.loading import load_model
from trellium.trainers.adapters import is_adapted
from trellium.trainers.checkpoint_checks import missing_tensors
from trellium.trainers.random_state import load_accelerator_random_state, save_accelerator_random_state


class ResumingTrainer(Trainer):
    """`transformers.Trainer`, with nothing of a checkpoint passed by.

    Some models are saved under other tensor names than they have (experts, which are one tensor in the model and one each in the file); those `Trainer`
    would leave as they are, with a line in the log. Such a checkpoint is read as a model is; that takes the memory of a second one for the moment.
    """

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        if not self._load_renamed(Path(resume_from_checkpoint), self.model if model is None else model):
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_best_model(self) -> None:
        best = self.state.best_model_checkpoint
        if best is None or not self._load_renamed(Path(best), self.model):
            super()._load_best_model()

    def _load_renamed(self, folder: Path, model: nn.Module) -> bool:
        """Take up the weights of a checkpoint that has them under other names; whether it is one."""
        parallel = self.is_deepspeed_enabled or self.is_fsdp_enabled
        if parallel or is_adapted(model) or not missing_tensors(folder, model):
            return False
        trust = self.args.trust_remote_code
        saved = load_model(folder, dtype=next(model.parameters()).dtype, trust_remote_code=trust)
        model.load_state_dict(saved.state_dict())
        return True

    def _save_rng_state(self, output_dir: str) -> None:
        super()._save_rng_state(output_dir)
        save_accelerator_random_state(output_dir, self.args.device, self.args.process_index)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        super()._load_rng_state(checkpoint)
        if checkpoint is not None:
            load_accelerator_random_state(checkpoint, self.args.device, self.args.process_index)
