from __future__ import annotations

import pytest
import torch

from trellium.ops import head_products, products


def operands(layout: str) -> tuple[torch.Tensor, torch.Tensor]:
    """`[7, 5]` and `[5, 9]`, laid out in memory as the head's operators meet them, or as nobody should."""
    generator = torch.Generator().manual_seed(0)
    left, right = torch.randn(7, 5, generator=generator), torch.randn(5, 9, generator=generator)
    return {
        "rows": (left, right),
        "columns": (left.t().contiguous().t(), right.t().contiguous().t()),
        "cut": (torch.cat([left, left], 1)[:, 5:], torch.cat([right, right])[5:]),
        "steps": (left.repeat_interleave(2, 1)[:, ::2], right.repeat_interleave(2, 1)[:, ::2]),
        "one row many times": (left[:1].expand(7, 5), right),
        "nothing": (left[:0], right),
    }[layout]


@pytest.mark.parametrize("onednn", [True, False])
@pytest.mark.parametrize("layout", ["rows", "columns", "cut", "steps", "one row many times", "nothing"])
def test_products_are_those_of_torch(monkeypatch, layout, onednn):
    monkeypatch.setattr(torch.backends.mkldnn, "enabled", onednn)
    left, right = operands(layout)
    exact = left.double() @ right.double()
    out = head_products.multiply(left, right, torch.empty(exact.shape))
    torch.testing.assert_close(out.double(), exact, rtol=1e-5, atol=1e-6)
    total = torch.ones(exact.shape)
    head_products.add_product(total, left, right)
    torch.testing.assert_close(total.double(), exact + 1, rtol=1e-5, atol=1e-6)
    head_products.set_product(total, left, right)
    torch.testing.assert_close(total, out)


def test_whoever_turns_onednn_off_gets_torch_s_products(monkeypatch):
    left, right = operands("rows")
    assert products.is_onednn(left, right) == torch.backends.mkldnn.is_available()
    assert not products.is_onednn(left.double(), right.double())
    monkeypatch.setattr(torch.backends.mkldnn, "enabled", False)
    assert not products.is_onednn(left, right)


@pytest.mark.parametrize("native", [True, False])
def test_low_precision_is_summed_in_float32(monkeypatch, native):
    """Each product is rounded at most once, where the host has such products, and their sum never."""
    monkeypatch.setattr(head_products, "_HAS_BFLOAT16", native)
    left, right = (tensor.bfloat16() for tensor in operands("rows"))
    exact = left.float() @ right.float()
    place = torch.full((7, 9), torch.nan)
    head_products.set_product(place, left, right)
    torch.testing.assert_close(place, exact.bfloat16().float() if native else exact)
    head_products.add_product(total := torch.full((7, 9), 1e4), left, right)
    torch.testing.assert_close(total, place + 1e4)
