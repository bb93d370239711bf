"""A prompt and the completions that answer it, in tokens: where the completions begin, and what is left of them under `max_length`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from trellium.data.pipeline import EncodedRow
from trellium.data.report import Fate
from trellium.data.rows import common_prefix_length
from trellium.data.token_checks import TokenLimits


@dataclass(frozen=True)
class Branches:
    """A prompt and the completions that follow it.

    Attributes:
        prompt: what all sequences begin with.
        completions: what each goes on with.
        merged: whether tokens of the prompt alone were other ones together with a completion.
    """

    prompt: list[int]
    completions: tuple[list[int], ...]
    merged: bool = False

    @classmethod
    def split(cls, prompt: list[int], wholes: Sequence[list[int]]) -> Branches:
        """From the tokens of a prompt alone, and of each whole sequence: the completions begin where the first of these leaves the prompt."""
        start = min(common_prefix_length(prompt, whole) for whole in wholes)
        return cls(prompt[:start], tuple(whole[start:] for whole in wholes), merged=start < len(prompt))

    @property
    def sequences(self) -> list[list[int]]:
        """The prompt with each completion."""
        return [self.prompt + completion for completion in self.completions]

    @property
    def tokens(self) -> int:
        """Of all sequences."""
        return sum(map(len, self.completions)) + len(self.prompt) * len(self.completions)

    @property
    def trained(self) -> int:
        """Tokens of the completions that something predicts: without a prompt the first of each has nothing before it."""
        return sum(max(0, len(completion) - (not self.prompt)) for completion in self.completions)

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence."""
        return len(self.prompt) + max(map(len, self.completions))

    @property
    def trainable(self) -> bool:
        """Whether every completion has a token that something predicts."""
        return min(map(len, self.completions)) > (0 if self.prompt else 1)

    def cut(self, max_length: int | None, mode: str) -> Branches:
        """The same with no sequence longer than `max_length`.

        With `keep_start` each sequence loses its end. With `keep_end` the prompt loses its beginning, as much as the longest sequence needs, so that
        all completions still answer the same prompt; a completion that is longer alone keeps its end.
        """
        if max_length is None or self.longest <= max_length:
            return self
        if mode == "keep_start":
            prompt = self.prompt[:max_length]
            return Branches(prompt, tuple(each[: max_length - len(prompt)] for each in self.completions), self.merged)
        beyond = self.longest - max_length
        return Branches(self.prompt[beyond:], tuple(each[-max_length:] for each in self.completions), self.merged)

    def encoded(
        self,
        values: dict[str, Any],
        whole: Branches,
        limits: TokenLimits,
        where: str,
        origin: int,
        *,
        image_cut: bool = False,
    ) -> EncodedRow:
        """The row whose columns are `values`, where these branches are what was left of the `whole` ones; `image_cut` of an image only a part.

        Raises:
            DatasetError: a sequence beyond the model's limits; says `where`.
        """
        for sequence in self.sequences:
            limits.check(sequence, where)
        if not all(whole.completions):
            fate = Fate.NO_COMPLETION
        elif not whole.trainable:
            fate = Fate.TOO_SHORT
        elif image_cut:
            fate = Fate.IMAGE_CUT
        else:
            fate = Fate.KEPT if self.trainable else Fate.TRUNCATED_AWAY
        cut = whole.tokens - self.tokens
        return EncodedRow(values, fate, self.tokens, self.trained, self.longest, cut, origin, merged=self.merged)
