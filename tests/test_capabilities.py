from __future__ import annotations

import torch

from trellium.capabilities import Capabilities, capabilities


def test_shapes_are_static_where_programs_are_compiled_ahead_of_time():
    assert capabilities("cpu") == Capabilities(
        static_shapes=False, has_triton=False, native_bfloat16=torch.ops.mkldnn._is_mkldnn_bf16_supported()
    )
    assert not capabilities(torch.device("cuda:0")).static_shapes
    assert capabilities("xla").static_shapes


def test_an_emulated_device_has_bfloat16_natively_only_where_its_host_does():
    if hasattr(torch, "neuron"):
        assert torch.neuron.is_bf16_supported()
        assert capabilities("neuron").native_bfloat16 == capabilities("cpu").native_bfloat16
