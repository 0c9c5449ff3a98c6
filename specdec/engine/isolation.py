"""One forward pass at a time: how long it takes by width, cache length, batch and engine, with nothing around it."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from specdec.engine.engines import get_engine
from specdec.engine.forward import CachedModel, usable_vocab
from specdec.engine.timing import now

WARM_UP_PASSES = 3  # of each shape, not stored


@dataclass(frozen=True)
class Shape:
    """A forward over ``tokens`` new tokens of each of ``batch`` requests that hold ``cache_length`` tokens already."""

    tokens: int = 1
    cache_length: int = 64
    batch: int = 1


@torch.inference_mode()
def time_passes(model: torch.nn.Module, engine: str, shape: Shape, repetitions: int) -> list[float]:
    """Return the seconds of each of ``repetitions`` forwards of ``shape``; the cache is rolled back after each.

    Token ids are arbitrary: what a forward costs does not depend on them.
    """
    vocab = usable_vocab(model)
    cache = get_engine(engine).new_cache(model, shape.cache_length + shape.tokens)
    cached = CachedModel(model, cache, vocab)
    generator = torch.Generator().manual_seed(0)
    held, new = (
        torch.randint(vocab, (shape.batch, count), generator=generator).to(model.device)
        for count in (shape.cache_length, shape.tokens)
    )
    cached.feed_batch(held)
    times = []
    for _ in range(WARM_UP_PASSES + repetitions):
        started = now((model.device,))
        cached.feed_batch(new, logits_to_keep=0)
        times.append(now((model.device,)) - started)
        cache.rollback(shape.cache_length)
    return times[WARM_UP_PASSES:]
