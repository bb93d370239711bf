"""The options of Kahneman-Tversky optimization, with TRL's names and defaults."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

from trellium.ops.unpaired import UnpairedOptions
from trellium.trainers.reference_config import ReferenceConfig

logger = logging.getLogger(__name__)


@dataclass
class KTOConfig(ReferenceConfig):
    """What `KTOTrainer` can be told. `BaseConfig` says which of TRL's options come later."""

    train_sampling_strategy: str = field(
        default="sequential",
        metadata={"help": "In which order rows come: sequential, random, or what transformers has more. Any will do."},
    )
    loss_type: str = field(
        default="kto",
        metadata={
            "help": "kto; or apo_zero_unpaired, for completions that are better than what the model says by itself."
        },
    )
    desirable_weight: float = field(default=1.0, metadata={"help": "The weight of completions marked good."})
    undesirable_weight: float = field(default=1.0, metadata={"help": "The weight of completions marked bad."})

    def __post_init__(self) -> None:
        super().__post_init__()
        self.unpaired = UnpairedOptions(self.loss_type, self.beta, self.desirable_weight, self.undesirable_weight)

    def warn_of_imbalance(self, good: int, bad: int) -> None:
        """Say which weights would balance `good` and `bad` rows, where their numbers differ and the weights do not make up for it.

        Source: Ethayarajh et al. 2024, eq. 8: the good rows' weight over that of the bad should lie in [1, 4/3].
        """
        if good == bad or not (good and bad):  # where one kind is missing no weight makes up for it
            return
        desirable, undesirable = self.desirable_weight, self.undesirable_weight
        # Of rounded recommendations, as they are written below.
        least, most = (round(bad * undesirable / good * bound, 2) for bound in (1, 4 / 3))
        fewest, highest = (round(good * desirable / bad * bound, 2) for bound in (3 / 4, 1))
        if least <= desirable <= most or fewest <= undesirable <= highest:
            return
        logger.warning(
            "train: %d good and %d bad rows, weighed %g and %g. For balance set desirable_weight between %g and %g, or undesirable_weight between %g and "
            "%g, one of the two.",
            *(good, bad, desirable, undesirable, least, most, fewest, highest),
        )
