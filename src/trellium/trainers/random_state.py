"""The accelerator's random numbers, saved and restored with a checkpoint.

`transformers.Trainer` does so for the devices it knows by name; a run on any other would resume with other dropout. Every accelerator module of PyTorch has
`get_rng_state` and `set_rng_state`, so no name is needed.
"""

from __future__ import annotations

from pathlib import Path

import torch

from trellium.errors import ConfigError


def _state_file(folder: str | Path, process_index: int) -> Path:
    return Path(folder) / f"accelerator_rng_state_{process_index}.pth"


def save_accelerator_random_state(folder: str | Path, device: torch.device, process_index: int) -> None:
    """Write the state of `device`'s generator into a checkpoint's folder; the host's is in the checkpoint already."""
    if device.type != "cpu":
        state = {"device_type": device.type, "state": torch.get_device_module(device).get_rng_state(device)}
        torch.save(state, _state_file(folder, process_index))


def load_accelerator_random_state(folder: str | Path, device: torch.device, process_index: int) -> None:
    """Restore what `save_accelerator_random_state` wrote, if the checkpoint comes from a device of the same type.

    Raises:
        ConfigError: the file is not one of ours.
    """
    file = _state_file(folder, process_index)
    if device.type == "cpu" or not file.is_file():
        return
    saved = torch.load(file, weights_only=True)
    if set(saved) != {"device_type", "state"}:
        raise ConfigError(f"{file} is not a saved random state. Remove it to resume with other random numbers.")
    if saved["device_type"] == device.type:
        torch.get_device_module(device).set_rng_state(saved["state"], device)
