"""Every test has caches of its own, and no progress bars."""

from __future__ import annotations

import datasets
import pytest


@pytest.fixture(autouse=True)
def own_caches(tmp_path_factory, monkeypatch):
    home = tmp_path_factory.mktemp("home")
    monkeypatch.setenv("TRELLIUM_HOME", str(home / "trellium"))
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", home / "datasets")
    datasets.disable_progress_bars()
    yield
    datasets.enable_progress_bars()
