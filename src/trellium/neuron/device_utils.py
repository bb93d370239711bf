"""`torch.neuron.utils`, as far as an emulation can answer."""

from __future__ import annotations

from trellium.neuron.instances import current_instance


def get_platform_target() -> str:
    """The family of chips: `trn1`, `trn2` or `trn3`."""
    return current_instance().target
