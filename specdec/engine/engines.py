"""The two engines: the same tokens, with and without the study's avoidable costs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from specdec.engine.forward import CachedModel, usable_vocab
from specdec.engine.kernels import use_packed_linears
from specdec.engine.kv_cache import KVCache, preallocated_cache, stock_cache


@dataclass(frozen=True)
class Engine:
    """How caches are stored, which kernels run, and how the draft is brought in line after a step."""

    name: str
    new_cache: Callable[[torch.nn.Module, int], KVCache]
    fast_kernels: bool  # packed linears, and compiled steps where a model has them
    reforward: bool  # run the draft again over the step's first token and the accepted ones, as the study does

    def prepare(self, model: torch.nn.Module) -> None:
        """Convert ``model`` in place to this engine's kernels, if it has others; not part of any measurement."""
        use_packed_linears(model, self.fast_kernels)

    def open(self, model: torch.nn.Module, capacity: int, vocab: int | None = None) -> CachedModel:
        """Return ``model`` with an empty cache for ``capacity`` tokens; ids from ``vocab`` on are not used."""
        self.prepare(model)
        steps = getattr(model, "compiled_steps", None) if self.new_cache is preallocated_cache else None
        if steps is not None and capacity + max(steps.widths) <= steps.capacity:
            capacity = steps.capacity
        return CachedModel(model, self.new_cache(model, capacity), vocab or usable_vocab(model), steps)


ENGINES = {
    "published": Engine("published", stock_cache, fast_kernels=False, reforward=True),
    "fast": Engine("fast", preallocated_cache, fast_kernels=True, reforward=False),
}


def get_engine(name: str | Engine) -> Engine:
    """Return the engine called ``name``, or an engine that is given; ValueError names the known ones."""
    if isinstance(name, Engine):
        return name
    if name not in ENGINES:
        raise ValueError(f"unknown engine {name!r}; known: {', '.join(ENGINES)}")
    return ENGINES[name]
