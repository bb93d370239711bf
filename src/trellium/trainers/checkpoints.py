"""What a checkpoint of ours holds beside transformers' own files, and which one a run resumes from."""

from __future__ import annotations

import json
import logging
import re
from pathlib import Path
from typing import TYPE_CHECKING

from trellium.errors import ConfigError
from trellium.trainers.checkpoint_checks import STATE, damage

if TYPE_CHECKING:
    from torch import nn

logger = logging.getLogger(__name__)


def last_checkpoint(output_dir: str | Path) -> str | None:
    """The checkpoint of the most steps in a folder from which a run can go on, or None. Those that are not whole are passed by, which is logged."""
    for folder in _by_steps(output_dir):
        why = damage(folder)
        if why is None:
            return str(folder)
        logger.warning("%s %s. It is passed by.", folder, why)
    return None


def resume_choice(given: str | bool | None) -> str | bool | None:
    """What a flag or a file's key says of resuming: True for the last checkpoint, None for none, else a folder."""
    word = str(given).strip().lower()
    if word in ("last", "true", "yes", "on"):
        return True
    return None if given is None or word in ("", "false", "no", "off", "none", "null") else given


def resumable_checkpoint(given: str | bool | None, output_dir: str) -> str | None:
    """The folder to resume from: the one given, or the last whole one in `output_dir` if that is True; None to start anew.

    Raises:
        ConfigError: no such checkpoint, or one from which a run cannot go on; names those that there are.
    """
    if given is None or given is False:
        return None
    if given is True:
        last = last_checkpoint(output_dir)
        if last is None:
            damaged = ", ".join(folder.name for folder in _by_steps(output_dir))
            why = (
                f"none of {damaged} in {output_dir} is whole" if damaged else f"no checkpoint-* folder in {output_dir}"
            )
            raise ConfigError(f"nothing to resume from: {why}. Leave resume_from_checkpoint out to start anew.")
        return last
    folder = Path(given)
    if not folder.is_dir():
        here = ", ".join(folder.name for folder in reversed(_by_steps(output_dir)))
        raise ConfigError(
            f"{given} is not a checkpoint: there is no such folder. Of checkpoints, {output_dir} has {here or 'none'}."
        )
    damaged_by = damage(folder)
    if damaged_by is not None:
        whole = next(
            (str(other) for other in _by_steps(folder.parent) if other != folder and damage(other) is None), None
        )
        raise ConfigError(
            f"{given} is not a checkpoint to resume from: it {damaged_by}. "
            + (
                f"The last one beside it that is whole is {whole}."
                if whole
                else "There is no whole one beside it: start anew."
            )
        )
    return str(folder)


def _by_steps(output_dir: str | Path) -> list[Path]:
    """The checkpoints in a folder, that of the most steps first."""
    found = {
        int(match[1]): folder
        for folder in Path(output_dir).glob("checkpoint-*")
        if (match := re.fullmatch(r"checkpoint-(\d+)", folder.name)) and folder.is_dir()
    }
    return [found[step] for step in sorted(found, reverse=True)]


def warn_of_other_runs(output_dir: str, resumed: str | None) -> None:
    """Warn if `output_dir` has checkpoints that are not of the run that starts; `resumed` is the checkpoint it goes on from, if any."""
    if resumed is not None and Path(resumed).resolve().parent == Path(output_dir).resolve():
        return
    others = _by_steps(output_dir)[::-1]
    if others:
        logger.warning(
            "%s holds %s of an earlier run. This run overwrites those of the same step, and save_total_limit counts them in. "
            "Choose another output_dir to keep them apart, or go on from the last with resume_from_checkpoint.",
            output_dir,
            ", ".join(folder.name for folder in others[:3]) + (" …" if len(others) > 3 else ""),
        )


def begin_checkpoint(output_dir: str, step: int) -> None:
    """Make an older checkpoint of the same step unfit to resume from before it is overwritten: what makes one whole is written last."""
    (Path(output_dir) / f"checkpoint-{step}" / STATE).unlink(missing_ok=True)


def drop_pad_collision(model: nn.Module) -> None:
    """Take back a padding token that ends sequences as well.

    `transformers.Trainer` copies the tokenizer's padding token into the model's configuration. If it is the end of a sequence too, a saved model would
    stop where it should pad, and freeze the embedding of its end token when it is loaded.
    """
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    generation = getattr(base, "generation_config", None)
    for config in (base.config, base.config.get_text_config(), generation):
        ends = getattr(config, "eos_token_id", None)
        ends = ends if isinstance(ends, list) else [ends]
        if config is not None and getattr(config, "pad_token_id", None) in ends:
            config.pad_token_id = None


def write_model_card(folder: str | Path, method: str, base_model: str, *, adapter: bool, vision: bool = False) -> None:
    """A README.md for the saved model: what it came from, how it was trained, how to load it."""
    named = base_model if base_model and not Path(base_model).is_absolute() else Path(base_model).name
    front = {"library_name": "peft" if adapter else "transformers", "tags": ["trellium", method.lower()]}
    if named:
        front["base_model"] = named
    lines = ["---", *(f"{key}: {json.dumps(value)}" for key, value in front.items()), "---", ""]
    source = (
        f"[{named}](https://huggingface.co/{named})" if named.count("/") == 1 else named or "a model made in a program"
    )
    task = "SequenceClassification" if method == "reward" else "ImageTextToText" if vision else "CausalLM"
    loader = f"AutoModelFor{task}"
    if adapter:
        loader = "AutoPeftModel" if vision else f"AutoPeftModelFor{task}"
    lines += [
        f"Trained from {source} with the {method.upper()} trainer of Trellium.",
        "",
        "```python",
        f"from {'peft' if adapter else 'transformers'} import {loader}",
        "",
        f'model = {loader}.from_pretrained("path/to/this/folder")',
        "```",
        "",
    ]
    (Path(folder) / "README.md").write_text("\n".join(lines), encoding="utf-8")
