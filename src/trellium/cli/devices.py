"""On which device a command computes, and a sentence that says so honestly."""

from __future__ import annotations

import os

from trellium.errors import ConfigError

_NEURON_VARIABLES = (
    "NEURON_RT_VISIBLE_CORES",
    "NEURON_RT_NUM_CORES",
    "NEURON_LOGICAL_NC_CONFIG",
    "NEURON_PLATFORM_TARGET_OVERRIDE",
    "TRELLIUM_NEURON_INSTANCE",
)
"""Variables that somebody sets only for a `neuron` device."""


def refuse_a_missing_neuron(cpu_flag: str = "--use_cpu true") -> None:
    """Raise where the environment asks for the `neuron` device and it is not there, rather than train on the CPU; `cpu_flag` does that.

    Raises:
        ConfigError: names the variables, why there is no device, and the way out.
    """
    import torch

    from trellium import neuron

    off = os.environ.get("TRELLIUM_NEURON") == "0" or os.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD") == "0"
    asked = [f"{name}={os.environ[name]}" for name in _NEURON_VARIABLES if os.environ.get(name)]
    asked += ["TRELLIUM_NEURON=1"] if os.environ.get("TRELLIUM_NEURON") == "1" else []
    reason = neuron.unavailable_reason()
    if asked and reason and not off and not torch.accelerator.is_available():
        raise ConfigError(
            f"the environment asks for the neuron device ({', '.join(asked)}), and it is not there: {reason} "
            f"Mend or unset that, or train on the CPU with {cpu_flag}."
        )


def device_sentence(device: str, *, asked: bool = False) -> str:
    """What computes, whether it is emulated, and, on the CPU unasked, why there is no `neuron`.

    Args:
        device: `neuron:0`, `cpu` …
        asked: the user chose the CPU.
    """
    import torch

    from trellium import neuron

    kind = device.partition(":")[0]
    if kind == "neuron" and neuron.is_emulated():
        name = torch.get_device_module("neuron").get_device_name(0)
        return f"{name}. It computes on this machine's CPU; times are the host's."
    if kind == "cpu" and not asked:
        return f"cpu. The neuron device is not here: {neuron.unavailable_reason()}"
    return device
