"""How large the rows of a prepared dataset are, and what they cost; counted without making Python numbers of their tokens."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pyarrow as pa
from datasets import Dataset
from torch import nn

from trellium.data.samples import RowSizes, list_lengths
from trellium.forest.collate import ForestCollator


def sizes_of(dataset: Dataset, collator: ForestCollator) -> RowSizes:
    """The sizes of every row."""
    return RowSizes.together([collator.read.sizes(table) for table in _tables(dataset, collator)])


def costs_of(dataset: Dataset, collator: ForestCollator, pair: float) -> np.ndarray:
    """`[n]` float64, what every row costs, in tokens: those it lays in a batch, and `pair` for each pair of a token and one it attends to.

    The pairs of packed rows are counted; those of other rows are at most the longest sequence's for each token, and taken to be as many.
    """
    sizes = sizes_of(dataset, collator)
    tokens = sizes.forest_tokens if collator.layout == "shared" else sizes.tokens
    if "seq_lengths" in collator.read.columns:
        pairs = np.concatenate([_pairs(table) for table in _tables(dataset, collator)])
    else:
        pairs = tokens * (sizes.longest + 1) / 2
    return tokens + pair * pairs


def pair_cost(model: nn.Module) -> float:
    """What a pair of a token and one it attends to costs, in tokens: two operations for each number of a query, and of a value; a token takes two for
    each parameter. 0 where the configuration does not say how many layers attend."""
    config = model.config.get_text_config()  # type: ignore[union-attr]
    heads = getattr(config, "num_attention_heads", None) or 0
    width = heads * (getattr(config, "head_dim", None) or 0) or getattr(config, "hidden_size", 0)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    return 2 * getattr(config, "num_hidden_layers", 0) * width / max(parameters, 1)


def _tables(dataset: Dataset, collator: ForestCollator) -> Iterator[pa.Table]:
    columns = dataset.select_columns(list(collator.read.columns)).with_format("arrow")
    yield from columns.iter(batch_size=10_000)


def _pairs(table: pa.Table) -> np.ndarray:
    lengths = np.asarray(table["seq_lengths"].combine_chunks().flatten(), dtype=np.int64)
    of_row = np.repeat(np.arange(len(table)), list_lengths(table, "seq_lengths"))
    return np.bincount(of_row, lengths * (lengths + 1) / 2, minlength=len(table))
