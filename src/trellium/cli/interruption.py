"""Ctrl-C as a request: a run ends between two steps, where nothing is half done.

Python raises `KeyboardInterrupt` wherever the program happens to be. Inside a destructor, or a callback that a library makes from C++, the exception is
printed and forgotten and the run goes on; inside a save it leaves half a checkpoint. So while a run trains, the first press only sets a flag,
which is looked at where a step begins and ends; the second raises at once, wherever that is. Costs one look at an attribute a step.

With several processes every one gets the signal and would stop after a step of its own, waiting for the others for ever: there the signal is left as
it was.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any

from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

EXIT_CODE = 130
"""Of a run that Ctrl-C ended, as of any program that SIGINT ends."""

_NOTICE = b"\nStopping after this step; press Ctrl-C again to stop at once.\n"


class StopRequest(TrainerCallback):
    """Whether the user asked the run to stop, and the callback that does so.

    Attributes:
        asked: the signal came.
    """

    def __init__(self) -> None:
        self.asked = False

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> TrainerControl:
        """End the training after this step; a save that is due is still made, an evaluation is not."""
        if self.asked:
            control.should_training_stop = True
            control.should_evaluate = False
        return control

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        """Between two steps there is nothing to lose: stop here."""
        if self.asked:
            raise KeyboardInterrupt

    on_substep_end = on_step_begin
    on_prediction_step = on_step_begin

    def check(self, trainer: Trainer) -> None:
        """After training: raise `KeyboardInterrupt` if it ended because it was asked to, rather than with its last step."""
        if self.asked and trainer.state.global_step < trainer.state.max_steps:
            raise KeyboardInterrupt


@contextlib.contextmanager
def stop_on_interrupt(trainer: Trainer) -> Iterator[StopRequest]:
    """Inside, Ctrl-C lets `trainer` finish the step it is in; see above for the second press and for several processes.

    Yields:
        The request; call its `check` after `trainer.train()`.
    """
    stop = StopRequest()
    before = signal.getsignal(signal.SIGINT)
    alone = trainer.args.world_size == 1 and threading.current_thread() is threading.main_thread()
    if (
        not alone or before is signal.SIG_IGN
    ):  # a run in the background that ignores the terminal's Ctrl-C goes on doing so
        yield stop
        return

    def on_signal(number: int, frame: FrameType | None) -> None:
        if stop.asked:
            signal.default_int_handler(number, frame)
        stop.asked = True
        os.write(2, _NOTICE)  # a print here could meet another that it interrupted

    trainer.add_callback(stop)
    signal.signal(signal.SIGINT, on_signal)
    try:
        yield stop
    except RuntimeError as error:
        # The terminal signals the processes that load data as well; one of them that ends is the same request.
        if stop.asked and "DataLoader worker" in str(error):
            raise KeyboardInterrupt from error
        raise
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler if before is None else before)
        trainer.remove_callback(stop)
