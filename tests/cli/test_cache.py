"""`trellium cache`: what it says, and what it does with an empty folder, a bad file and a bad setting."""

import json

import pytest

from trellium.cli import main
from trellium.neuron import graph_cache


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_NEURONX_NEFF_CACHE_DIR", str(tmp_path / "store"))
    return tmp_path / "store"


def fill(folder, count=2):
    for i in range(count):
        graph_cache.write(folder / f"{i:012x}-agraph.graph", b"content" * 100)
    graph_cache.note_hit(folder / f"{0:012x}-agraph.graph")


def test_info_shows_entries_bytes_and_hits(folder, capsys):
    fill(folder)
    assert main(["cache", "info"]) == 0
    printed = capsys.readouterr().out
    nbytes = sum(entry.nbytes for entry in graph_cache.entries())
    assert str(folder) in printed
    assert "entries  2" in printed
    assert f"bytes    {nbytes}" in printed
    assert "hits     1" in printed
    assert "000000000001-agraph" in printed


def test_info_as_json(folder, capsys):
    fill(folder)
    assert main(["cache", "info", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["entries"], told["hits"], told["disabled"]) == (2, 1, False)
    assert sorted(graph["hits"] for graph in told["graphs"]) == [0, 1]


def test_info_of_a_folder_that_is_not_there_is_empty(folder, capsys):
    assert main(["cache", "info"]) == 0
    assert "entries  0" in capsys.readouterr().out


def test_graphs_go_into_an_archive_and_out_of_it(folder, tmp_path, monkeypatch, capsys):
    fill(folder)
    archive = tmp_path / "new" / "graphs.bin"
    assert main(["cache", "export", str(archive)]) == 0
    monkeypatch.setenv("TORCH_NEURONX_NEFF_CACHE_DIR", str(tmp_path / "elsewhere"))
    assert main(["cache", "import", str(archive)]) == 0
    assert "2 graphs taken" in capsys.readouterr().out
    for entry in graph_cache.entries():
        assert graph_cache.read(entry.path) == b"content" * 100
    assert main(["cache", "clear"]) == 0
    assert "2 graphs removed" in capsys.readouterr().out
    assert graph_cache.entries() == []


def test_nothing_to_export_is_said_and_no_file_is_made(folder, tmp_path, capsys):
    assert main(["cache", "export", str(tmp_path / "graphs.bin")]) == 1
    assert "nothing to export" in capsys.readouterr().out
    assert not (tmp_path / "graphs.bin").exists()


@pytest.mark.parametrize("content", [None, b"no archive"])
def test_a_missing_or_foreign_file_is_refused_with_its_name(folder, tmp_path, content, capsys):
    path = tmp_path / "graphs.bin"
    if content is not None:
        path.write_bytes(content)
    assert main(["cache", "import", str(path)]) == 2
    told = capsys.readouterr().err
    assert str(path) in told
    assert "Traceback" not in told


def test_a_bound_that_is_no_number_is_refused(folder, monkeypatch, capsys):
    monkeypatch.setenv("NEURON_COMPILATION_CACHE_MAX_ENTRIES", "many")
    assert main(["cache", "info"]) == 2
    assert "NEURON_COMPILATION_CACHE_MAX_ENTRIES='many'" in capsys.readouterr().err
