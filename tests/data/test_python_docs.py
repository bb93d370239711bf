"""The bundled dataset: on a small made-up library for the rules, and once on the real one."""

from __future__ import annotations

import inspect
import json
import time

import pytest

from tests.tiny_tokenizer import CHATML, tiny_tokenizer
from trellium.data import python_docs as module
from trellium.data.files import load_dataset_from
from trellium.data.prepare import PrepareOptions, prepare_dataset
from trellium.data.python_docs import python_docs

LIBRARY = {
    "json/__init__.py": '"""The module json, as if."""\n\ndef dumps(obj: dict, *, indent: int = 2) -> str:\n    """Turn an object\n       into text.\n    """\n    def inner():\n        """Inside a function, so not a row."""\n',
    "json/decoder.py": 'class Decoder(ValueError):\n    """Decodes text into objects."""\n    def decode(self, s):\n        """Turn an object\n        into text."""\n    def _hidden(self):\n        """Private, so it is not a row."""\n',
    "json/broken.py": "def broken(:\n",
    "json/tests/test_it.py": '"""A test, so not a row at all."""\n',
    "heapq.py": '"""short"""\ndef push(heap, item):\n    """Push an item onto the heap."""\n',
    "foreign.py": '"""Not of the standard library at all."""\n',
}


def test_rows_are_the_public_docstrings_by_module_each_once(tmp_path):
    for name, source in LIBRARY.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source)
    found = list(module._docstrings(tmp_path))
    assert [(name, described, docstring) for name, described, docstring, _ in found] == [
        ("heapq.push", "function `heapq.push(heap, item)`", "Push an item onto the heap."),
        ("json", "module `json`", "The module json, as if."),
        ("json.dumps", "function `json.dumps(obj, *, indent=2)`", "Turn an object\ninto text."),
        ("json.decoder.Decoder", "class `json.decoder.Decoder(ValueError)`", "Decodes text into objects."),
        (
            "json.decoder.Decoder.decode",
            "function `json.decoder.Decoder.decode(self, s)`",
            "Turn an object\ninto text.",
        ),
    ]
    assert found[2][3] == "json/__init__.py:3"


@pytest.fixture(scope="module")
def shared_home(tmp_path_factory):
    return tmp_path_factory.mktemp("docs")


def test_thousands_of_rows_are_built_once_in_seconds_the_same_every_time(shared_home, monkeypatch):
    monkeypatch.setenv("TRELLIUM_HOME", str(shared_home / "one"))
    train, test = python_docs("train"), python_docs("test")
    assert len(train) > 2000
    assert 0.03 < len(test) / (len(train) + len(test)) < 0.07
    completions = [row[0]["content"] for row in train["completion"]] + [row[0]["content"] for row in test["completion"]]
    assert len(set(completions)) == len(completions)
    asked = {
        row[-1]["content"]: completion
        for row, completion in zip([*train["prompt"], *test["prompt"]], completions, strict=True)
    }
    assert asked["Write the docstring of the Python function `textwrap.dedent(text)`."] == inspect.getdoc(
        __import__("textwrap").dedent
    )

    monkeypatch.setattr(module, "_build", lambda root, folder: pytest.fail("built a second time"))
    start = time.perf_counter()
    assert python_docs("train")[:3] == train[:3]
    assert time.perf_counter() - start < 1
    assert load_dataset_from("python-docs", "test")[:] == test[:]


def test_the_forms_hold_the_same_rows(shared_home, monkeypatch):
    monkeypatch.setenv("TRELLIUM_HOME", str(shared_home / "one"))
    chat, messages, text = (python_docs("test", form) for form in ("chat", "messages", "text"))
    assert [p + c for p, c in zip(chat["prompt"], chat["completion"], strict=True)] == messages["messages"][:]
    assert [c[0]["content"] for c in chat["completion"]] == text["completion"][:]
    assert json.dumps(text[0]).count("The docstring of the Python") == 1


def test_the_rows_can_be_trained_on(shared_home, monkeypatch):
    monkeypatch.setenv("TRELLIUM_HOME", str(shared_home / "one"))
    rows = python_docs("test")
    tokenizer = tiny_tokenizer(CHATML)
    prepared = prepare_dataset(rows, tokenizer, PrepareOptions(max_length=512))
    learned = tokenizer.decode([label for label in prepared[0]["labels"] if label != -100])
    assert learned == rows[0]["completion"][0]["content"] + "<|im_end|>\n"


def test_an_interrupted_build_leaves_nothing_behind(shared_home, monkeypatch):
    monkeypatch.setenv("TRELLIUM_HOME", str(shared_home / "two"))

    def interrupted(root, folder):
        (folder / "half.arrow").touch()
        raise KeyboardInterrupt

    monkeypatch.setattr(module, "_build", interrupted)
    with pytest.raises(KeyboardInterrupt):
        python_docs("train")
    assert list((shared_home / "two" / "python-docs").iterdir()) == []
