"""Positions of images in rows of trees, against what the model gives each sequence alone."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForImageTextToText

from tests.tiny_vision import tiny_vision_model
from trellium.data.sequence import Sequence
from trellium.forest.layout import trees
from trellium.models.image_positions import knows_positions, tree_positions

IMAGE = 1


def sequences_of(draw: random.Random) -> tuple[list[list[int]], list[torch.Tensor]]:
    """Some answers to one prompt of words and images, and the grids of its images."""
    prompt, grids = [5], []
    for _ in range(draw.randint(0, 3)):
        height, width = draw.randint(1, 4), draw.randint(1, 4)
        prompt += [*[IMAGE] * (height * width), *[draw.randint(2, 9) for _ in range(draw.randint(1, 4))]]
        grids.append(torch.tensor([1, 2 * height, 2 * width]))
    answers = [[draw.randint(2, 9) for _ in range(draw.randint(0, 5))] for _ in range(draw.randint(1, 4))]
    return [prompt + answer for answer in answers], grids


@pytest.fixture(scope="module")
def backbone():
    return tiny_vision_model("qwen2_vl").model


@pytest.mark.parametrize("seed", range(20))
def test_every_sequence_of_a_tree_has_the_positions_that_it_has_alone(backbone, seed):
    draw = random.Random(seed)
    of_trees = [sequences_of(draw) for _ in range(3)]
    rows = [tree // 2 for tree, (sequences, _) in enumerate(of_trees) for _ in sequences]
    groups = [tree for tree, (sequences, _) in enumerate(of_trees) for _ in sequences]
    laid = [(Sequence(np.asarray(ids), np.ones(len(ids), bool)), grids) for ids_, grids in of_trees for ids in ids_]
    batch = trees([sequence for sequence, _ in laid], rows, groups=groups, multiple=8, term_fields={})
    real = torch.arange(batch.input_ids.shape[1]) < batch.real_tokens[:, None]
    types = ((batch.input_ids == IMAGE) & real).long()
    grids = [grid for _, of_tree in of_trees for grid in of_tree]
    made = tree_positions(backbone, batch.subtree_end, types, torch.stack(grids) if grids else None)
    length = batch.input_ids.shape[1]
    assert batch.terms is not None
    for (sequence, of_tree), last in zip(laid, batch.terms.last_position.tolist(), strict=True):
        row, end = divmod(last, length)
        path = [place for place in range(end + 1) if batch.subtree_end[row, place] > end]
        assert batch.input_ids[row, path].tolist() == sequence.input_ids.tolist()
        ids = torch.from_numpy(sequence.input_ids)[None]
        if of_tree:
            own, _ = backbone.get_rope_index(ids, (ids == IMAGE).long(), torch.stack(of_tree))
        else:
            own = torch.arange(ids.shape[1]).expand(3, 1, -1)
        assert torch.equal(made[:, row, path], own[:, 0])


@pytest.mark.parametrize("kind", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl", "glm4v"])
def test_models_that_only_place_images_are_known_by_asking_them(kind):
    config = AutoConfig.for_model(kind)
    with torch.device("meta"):
        model = AutoModelForImageTextToText.from_config(config)
    assert knows_positions(model.model)


def test_a_model_with_positions_of_another_kind_is_not_taken_for_one(backbone, monkeypatch):
    own = type(backbone).get_rope_index
    monkeypatch.setattr(type(backbone), "get_rope_index", lambda *args, **named: (2 * own(*args, **named)[0], None))
    assert not knows_positions(backbone)
    assert not knows_positions(tiny_vision_model("gemma3").model)
