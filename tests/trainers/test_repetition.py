"""A new method of training costs little, and what two of them need stands once."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

import pytest

import trellium.trainers

FOLDER = Path(trellium.trainers.__path__[0])
LINES = 6


def lines_of(path: Path) -> list[tuple[int, str]]:
    """The lines of a file that say something, with their numbers."""
    return [(number, line.strip()) for number, line in enumerate(path.read_text().splitlines(), 1) if line.strip()]


def test_no_block_of_six_lines_stands_twice_between_trainers():
    places = defaultdict(list)
    for path in sorted(FOLDER.glob("*.py")):
        lines = lines_of(path)
        for start in range(len(lines) - LINES + 1):
            block = tuple(line for _, line in lines[start : start + LINES])
            places[block].append(f"{path.name}:{lines[start][0]}")
    assert len(places) > 1000
    assert not {found[0]: found[1:] for found in places.values() if len(found) > 1}


@pytest.mark.parametrize("method", ["dpo", "kto", "reward"])
def test_a_method_is_at_most_150_lines(method):
    assert len((FOLDER / f"{method}.py").read_text().splitlines()) <= 150
