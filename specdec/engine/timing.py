"""Clock edges that wait for the device, and a clock that splits a decoding step into its phases."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

import torch

PHASES = ("draft", "target", "verify", "sync")  # what a decoding step consists of; the rest of a step is "other"


def synchronize(device: torch.device) -> None:
    """Wait until ``device`` has finished all queued work; a CPU has no queue."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()


def now(devices: tuple[torch.device, ...]) -> float:
    """Seconds on the performance counter once every device in ``devices`` is idle."""
    for device in devices:
        synchronize(device)
    return time.perf_counter()


def ratio(above: float, below: float) -> float | None:
    """Return above / below of two times; None where the clock was too coarse to see ``below`` pass."""
    return above / below if below else None


class PhaseClock:
    """Seconds per phase of every decoding step; each edge waits for the devices, which costs a little itself.

    Pass one to a generate function and read ``Generation.step_seconds``: one dict a step with the phases that ran,
    ``step`` (the whole step) and ``other`` (what no phase covers), so that the phases add up to the step.
    """

    def __init__(self) -> None:
        self.begin(())

    def begin(self, devices: tuple[torch.device, ...]) -> None:
        """Forget earlier steps; from now on wait for ``devices`` at each edge."""
        self.devices = devices
        self.steps: list[dict[str, float]] = []

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """Time one decoding step."""
        seconds: dict[str, float] = {}
        self.steps.append(seconds)
        started = now(self.devices)
        yield
        seconds["step"] = now(self.devices) - started
        seconds["other"] = seconds["step"] - sum(seconds.get(phase, 0.0) for phase in PHASES)

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time one phase of the current step; a phase entered twice adds up."""
        started = now(self.devices)
        yield
        seconds = self.steps[-1]
        seconds[name] = seconds.get(name, 0.0) + now(self.devices) - started


class NoClock:
    """The clock of an uninstrumented run: no edges, no waiting."""

    steps: tuple[dict[str, float], ...] = ()
    _nothing = contextlib.nullcontext()

    def begin(self, devices: tuple[torch.device, ...]) -> None:
        pass

    def step(self) -> contextlib.nullcontext:
        return self._nothing

    def phase(self, name: str) -> contextlib.nullcontext:
        return self._nothing
