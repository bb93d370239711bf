"""Let a model's linear layers multiply by `trellium.ops.linear` on the host.

The class of each plain `nn.Linear` is replaced by a subclass that differs in `forward` only, so that PEFT, FSDP and everything else that asks for linear
layers finds them. A copy or a pickle of the layer is an `nn.Linear` again.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from trellium.ops.linear import linear


class HostLinear(nn.Linear):
    """`nn.Linear`, multiplied by `trellium.ops.linear`."""

    def forward(self, input: Tensor) -> Tensor:
        """`[…, in_features]` to `[…, out_features]`."""
        return linear(input, self.weight, self.bias)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return object.__new__, (nn.Linear,), self.__dict__


def use_host_products(model: nn.Module) -> nn.Module:
    """`model`, its linear layers multiplied by oneDNN where they lie on the host in float32; in place. Doing it twice does nothing more."""
    for module in model.modules():
        if type(module) is nn.Linear and "forward" not in module.__dict__:
            module.__class__ = HostLinear
    return model
