from __future__ import annotations

import torch

from trellium.capabilities import Capabilities, capabilities


def test_shapes_are_static_where_programs_are_compiled_ahead_of_time():
    assert capabilities("cpu") == Capabilities(static_shapes=False, has_triton=False)
    assert not capabilities(torch.device("cuda:0")).static_shapes
    assert capabilities("xla").static_shapes
