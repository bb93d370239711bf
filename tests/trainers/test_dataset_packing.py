"""Packing ahead of training."""

from __future__ import annotations

import pytest
from datasets import Dataset, DatasetDict

from tests.trainers.tiny_runs import losses, tiny_trainer, token_rows
from trellium import pack_dataset
from trellium.errors import ConfigError, DatasetError


def test_rows_packed_ahead_train_as_those_packed_by_the_trainer(tmp_path):
    rows = token_rows(24)
    packed = pack_dataset(rows, 24)
    assert len(packed) < len(rows)
    options = {"max_length": 24, "packing": True, "train_sampling_strategy": "sequential"}
    skip = {"skip_prepare_dataset": True}
    ahead = tiny_trainer(tmp_path, train_dataset=packed, dataset_kwargs=skip, **options)
    within = tiny_trainer(tmp_path, train_dataset=rows, **options)
    ahead.train()
    within.train()
    assert losses(ahead) == pytest.approx(losses(within), rel=1e-6)


def test_packing_makes_targets_where_there_are_none_and_packs_each_split():
    rows = Dataset.from_dict({"input_ids": [[1, 2, 3], [4, 5]], "attention_mask": [[1, 1, 1], [1, 1]]})
    packed = pack_dataset(DatasetDict(train=rows, test=rows), 5)
    assert packed["test"][:] == {
        "input_ids": [[1, 2, 3, 4, 5]],
        "labels": [[-100, 2, 3, -100, 5]],
        "seq_lengths": [[3, 2]],
    }


@pytest.mark.parametrize(
    ("columns", "arguments", "says"),
    [
        ({"input_ids": [[1, 2]]}, {"strategy": "ffd"}, "strategy must be one of bfd"),
        ({"input_ids": [[1, 2]]}, {"seq_length": 1}, "seq_length must be at least 2"),
        ({"input_ids": [[1, 2]]}, {"map_kwargs": {"num_proc": 2}}, "Leave it out"),
        ({"text": ["a"]}, {}, "Tokenize the rows first"),
        ({"input_ids": [[1, 2]], "completion_mask": [[0, 1]]}, {}, "completion_mask"),
    ],
)
def test_what_cannot_be_packed_is_told(columns, arguments, says):
    with pytest.raises((ConfigError, DatasetError), match=says):
        pack_dataset(Dataset.from_dict(columns), **{"seq_length": 8, **arguments})
