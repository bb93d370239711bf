"""What a user of a device with static shapes must otherwise remember, set for them and said in one line.

- `torch._dynamo.config.automatic_dynamic_shapes = False`: else Dynamo makes symbols of the dimensions that changed, which do not compile.
- `torch._dynamo.config.recompile_limit = 64`, if it was torch's 8: each shape is a graph, so a frame may need many. Any other limit is kept,
  such as that of a run that has planned its shapes.
- `torch._dynamo.config.fail_on_recompile_limit_hit = True`: past the limit Dynamo would run every further shape operator by operator, and
  say nothing more. On the device that is slower than compiling by orders of magnitude, so it is an error, which names the frame and the
  shape. TRELLIUM_NEURON_RECOMPILE_LIMIT=N sets another limit; 0 leaves all of Dynamo's settings as they are.
- `HF_DEACTIVATE_ASYNC_LOAD=1`, when the device is loaded: transformers' asynchronous loader hangs on the real one.

Dynamo's are process-wide, and are set when the first graph is compiled for `neuron`, not at `import torch`: a process that compiles nothing
for it keeps torch's own.
"""

from __future__ import annotations

import logging
import os
import sys
from typing import Any

logger = logging.getLogger(__name__)

RECOMPILE_LIMIT = 64
_TORCHS_LIMIT = 8
_settled = False


def settle() -> None:
    """Set Dynamo's, once a process."""
    global _settled
    if _settled:
        return
    _settled = True
    named = os.environ.get("TRELLIUM_NEURON_RECOMPILE_LIMIT", "").strip()
    if named and not named.isdecimal():
        raise ValueError(
            f"TRELLIUM_NEURON_RECOMPILE_LIMIT={named!r}: a whole number, or 0 to leave Dynamo's settings alone."
        )
    if named and int(named) == 0:
        return
    from torch._dynamo import config

    config.automatic_dynamic_shapes = False
    if named:
        config.recompile_limit = int(named)
    elif config.recompile_limit == _TORCHS_LIMIT:
        config.recompile_limit = RECOMPILE_LIMIT
    config.accumulated_recompile_limit = max(config.accumulated_recompile_limit, 4 * config.recompile_limit)
    config.fail_on_recompile_limit_hit = not config.suppress_errors  # Dynamo refuses both together
    _name_what_ran_out()
    if os.environ.get("LOCAL_RANK", "0") == "0":
        logger.warning(
            "neuron compiles static shapes: torch._dynamo.config.automatic_dynamic_shapes=False, recompile_limit=%d, past which "
            "it is an error instead of eager execution; HF_DEACTIVATE_ASYNC_LOAD=%s.",
            config.recompile_limit,
            os.environ.get("HF_DEACTIVATE_ASYNC_LOAD", "unset"),
        )


def _name_what_ran_out() -> None:
    """Make Dynamo's error say which frame ran out of recompilations, at what limit, called with what, and the way out.

    Dynamo raises it with a text of its own, from the function that has all of that in its local variables.
    """
    from torch._dynamo import convert_frame, exc

    class RecompileLimitError(exc.FailOnRecompileLimitHit):
        def __init__(self, *torchs: object) -> None:
            there = sys._getframe(1).f_locals
            super().__init__(
                _told(there) if {"code", "limit_type", "frame"} <= there.keys() else " ".join(map(str, torchs))
            )

    convert_frame.FailOnRecompileLimitHit = RecompileLimitError  # type: ignore[misc]


def _told(there: dict[str, Any]) -> str:
    from torch import Tensor
    from torch._dynamo import config

    code, limit_type = there["code"], there["limit_type"]
    arguments = getattr(there["frame"], "f_locals", {})
    shapes = [f"{name} {list(value.shape)}" for name, value in arguments.items() if isinstance(value, Tensor)]
    reason = there.get("recompile_reason")
    return (
        f"{code.co_name} ({code.co_filename}:{code.co_firstlineno}) has been compiled as often as torch._dynamo.config.{limit_type} = "
        f"{getattr(config, limit_type)} allows, and this call needs another graph"
        + (f": called with {', '.join(shapes)}" if shapes else "")
        + (f"; the last graph did not fit because {reason}" if reason else "")
        + ". Each set of shapes is a graph of its own. Pad to fewer shapes (pad_to_multiple_of), or allow more graphs: "
        "TRELLIUM_NEURON_RECOMPILE_LIMIT=N, or that setting before the first graph."
    )
