"""How fast a run goes and how much memory it took.

Three counts of tokens are kept apart, because only the first is what a user has: *real* tokens of the data, *forwarded* ones (with padding), and *trained*
ones (targets of the loss). Seconds spent in evaluation and saving are left out. The *steady* rate also leaves out the steps in which the ledger recorded a
compilation: by record, not by skipping the first few. Times are those of the host's clock: on an emulated device they say nothing of a chip.
"""

from __future__ import annotations

import contextlib
import resource
import sys
import time
from collections.abc import Iterator

import torch

from trellium.monitor import ledger


class ThroughputMeter:
    """A clock that can be paused, and tokens per second since it was last read.

    Args:
        device: the device that trains; names whose memory is reported.
        clock: seconds, as a function; replaced in tests.
    """

    def __init__(self, device: torch.device | str, clock=time.perf_counter) -> None:
        self._device = torch.device(device)
        self._clock = clock
        self._paused_seconds = 0.0
        self._step_began = clock()
        self.restart()

    def restart(self) -> None:
        """Forget everything up to now."""
        self._started = self._clock()
        self._paused_seconds = 0.0
        self._forwarded = 0
        self._steady_seconds = 0.0

    def step_begins(self) -> None:
        """An optimizer step begins."""
        self._step_began = self._clock()

    def step_ends(self) -> bool:
        """The step ends; whether it was steady, i.e. nothing was compiled in it by the ledger's record."""
        ended = self._clock()
        steady = not ledger.compiled_between(self._step_began, ended)
        if steady:
            self._steady_seconds += ended - self._step_began
        return steady

    def forwarded(self, tokens: int) -> None:
        """Count tokens that went through the model, padding included. Known on the host from the shape: waits for nothing."""
        self._forwarded += tokens

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """What happens inside is not training time."""
        began = self._clock()
        try:
            yield
        finally:
            self._paused_seconds += self._clock() - began

    def read(self, *, real: int, trained: int, steady: int = 0, processes: int = 1) -> dict[str, float]:
        """Rates since the last reading, which then starts anew, and peak memory since the process started.

        Args:
            real: tokens that are not padding, over all processes.
            steady: of these, the ones of steady steps.
            trained: targets of the loss, over all processes.
            processes: how many processes forwarded as many tokens as this one.

        Returns:
            `tokens_per_second`, `forwarded_tokens_per_second`, `trained_tokens_per_second`, `peak_memory_gib`, and, if a step was steady,
            `steady_tokens_per_second`.
        """
        seconds = max(self._clock() - self._started - self._paused_seconds, 1e-9)
        forwarded, steady_seconds = self._forwarded * processes, self._steady_seconds
        self.restart()
        steady_rate = {"steady_tokens_per_second": round(steady / steady_seconds, 2)} if steady_seconds else {}
        return {
            **steady_rate,
            "tokens_per_second": round(real / seconds, 2),
            "forwarded_tokens_per_second": round(forwarded / seconds, 2),
            "trained_tokens_per_second": round(trained / seconds, 2),
            "peak_memory_gib": round(peak_memory_bytes(self._device) / 2**30, 3),
        }


def peak_memory_bytes(device: torch.device | str) -> int:
    """The most memory ever in use on `device`; for the host the most this process ever had resident.

    Raises:
        RuntimeError: the device does not count its memory.
    """
    device = torch.device(device)
    if device.type == "cpu":
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024
    index = device.index if device.index is not None else torch.accelerator.current_device_index()
    module = torch.get_device_module(device)
    counter = getattr(module, "max_memory_allocated", None) or torch.accelerator.max_memory_allocated
    return int(counter(index))


def peak_memory_by_device() -> dict[str, int]:
    """Peak bytes of every accelerator that this process has used, by name (`neuron:0`); of the host where there is none."""
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None or not torch.accelerator.is_available():
        return {"cpu": peak_memory_bytes("cpu")}
    names = [f"{accelerator.type}:{index}" for index in range(torch.accelerator.device_count())]
    peaks = {name: peak_memory_bytes(name) for name in names}
    return {name: peak for name, peak in peaks.items() if peak > 0}
