"""What `transformers.Trainer` leaves out: of a checkpoint, weights saved under other names and an accelerator's random numbers; of an option that cannot
be, the name.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import nn
from transformers import Trainer

from trellium.errors import ConfigError
from trellium.models.loading import load_model
from trellium.trainers.adapters import is_adapted
from trellium.trainers.checkpoint_checks import missing_tensors
from trellium.trainers.random_state import load_accelerator_random_state, save_accelerator_random_state

logger = logging.getLogger(__name__)


@contextlib.contextmanager
def refused_by_transformers(what: str, *also: type[Exception]) -> Iterator[None]:
    """Inside, something is made of options alone: what is found wrong with it, by a ValueError, an ImportError or one of `also`, are the options.

    Raises:
        ConfigError: in place of the objection, with its text.
    """
    objections: tuple[type[Exception], ...] = (ValueError, ImportError, *also)
    try:
        yield
    except objections as error:
        raise ConfigError(f"{what} cannot be used: {' '.join(str(error).split())}") from error


class ResumingTrainer(Trainer):
    """`transformers.Trainer`, with nothing of a checkpoint passed by.

    Some models are saved under other tensor names than they have (experts, which are one tensor in the model and one each in the file); those `Trainer`
    would leave as they are, with a line in the log. Such a checkpoint is read as a model is; that takes the memory of a second one for the moment.
    """

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """As in `transformers.Trainer`; options it cannot be made of are a `ConfigError`."""
        with refused_by_transformers(f"optim={_word(self.args.optim)} with these options", TypeError):
            return super().create_optimizer(model)

    def create_scheduler(
        self, num_training_steps: int, optimizer: torch.optim.Optimizer | None = None
    ) -> torch.optim.lr_scheduler.LRScheduler:
        """As in `transformers.Trainer`; options it cannot be made of are a `ConfigError`."""
        with refused_by_transformers(
            f"lr_scheduler_type={_word(self.args.lr_scheduler_type)} with these options", TypeError
        ):
            return super().create_scheduler(num_training_steps, optimizer)

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
            if not any(Path(checkpoint).glob("rng_state*.pth")):
                logger.warning(
                    "%s has no random state (rng_state.pth): the run goes on with other random numbers.", checkpoint
                )
            load_accelerator_random_state(checkpoint, self.args.device, self.args.process_index)


def _word(option: object) -> str:
    """An option as its user writes it, for one that transformers has made a member of an enumeration."""
    return str(getattr(option, "value", option))
