"""Let a script say errors only."""

from __future__ import annotations

import logging


def init_zero_verbose() -> None:
    """Log errors only, through rich, and let warnings go to the log, where they are less than errors. Call it before anything else is imported."""
    from rich.logging import RichHandler

    logging.basicConfig(format="%(message)s", datefmt="[%X]", handlers=[RichHandler()], level=logging.ERROR)
    logging.captureWarnings(True)
