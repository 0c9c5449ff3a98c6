"""One forward pass at a time: how long it takes by width, cache length, batch and engine, with nothing around it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from time import perf_counter

import torch

from specdec.engine.engines import Engine, get_engine
from specdec.engine.forward import CachedModel
from specdec.engine.timing import now
from specdec.errors import MeasurementError

WARM_UP_PASSES = 3  # of each shape, not stored
FEWEST_PASSES = 5  # of each shape that are stored, however slow the model
LONGEST_WARM_UP, LONGEST = 5.0, 30.0  # seconds after which no further round over all widths begins


@dataclass(frozen=True)
class Held:
    """What a model holds before the timed forward: ``cache_length`` tokens of each of ``batch`` requests."""

    cache_length: int = 64
    batch: int = 1


@torch.inference_mode()
def time_passes(
    model: torch.nn.Module, engine: str | Engine, widths: Sequence[int], repetitions: int, held: Held = Held()
) -> dict[int, list[float]]:
    """Return, for each width, the seconds of ``repetitions`` forwards over so many new tokens of each request.

    Where these take longer than LONGEST seconds in all there are fewer, but FEWEST_PASSES. The cache is rolled back
    after each forward, so that all start from the same state. Token ids are arbitrary: what a forward costs does not
    depend on them. MeasurementError where the clock sees no time pass.
    """
    cached = get_engine(engine).open(model, held.cache_length + max(widths))
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(cached.vocab, (held.batch, held.cache_length + max(widths)), generator=generator).to(
        model.device
    )
    cached.feed_batch(ids[:, : held.cache_length])

    def one_round() -> list[float]:  # widths in turn, so that a slow moment meets all of them
        rest = ids[:, held.cache_length :]
        return [_one_pass(cached, rest[:, :width], held.cache_length) for width in widths]

    _repeat(one_round, WARM_UP_PASSES, 1, LONGEST_WARM_UP)
    rounds = _repeat(one_round, repetitions, FEWEST_PASSES, LONGEST)
    times = {width: list(passes) for width, passes in zip(widths, zip(*rounds, strict=True), strict=True)}
    if not all(median(passes) for passes in times.values()):
        raise MeasurementError(f"this machine's clock is too coarse: a forward of {cached.name} took it no time")
    return times


def _repeat(one_round: Callable[[], list[float]], most: int, fewest: int, seconds: float) -> list[list[float]]:
    """Return what ``most`` calls gave, or at least ``fewest`` where they take longer than ``seconds``."""
    started, rounds = perf_counter(), []
    while len(rounds) < most and (len(rounds) < fewest or perf_counter() - started < seconds):
        rounds.append(one_round())
    return rounds


def _one_pass(cached: CachedModel, new: torch.Tensor, cache_length: int) -> float:
    started = now((cached.device,))
    cached.feed_batch(new, logits_to_keep=0)
    seconds = now((cached.device,)) - started
    cached.cache.rollback(cache_length)
    return seconds
