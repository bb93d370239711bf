"""What all tests share."""

from __future__ import annotations

import gc

import pytest


@pytest.fixture(autouse=True, scope="module")
def _what_is_imported_is_no_garbage():
    """Every run of `transformers.Trainer` collects garbage, and so would search the million objects of the imported libraries: two thirds of a tiny run."""
    gc.collect()
    gc.freeze()
