"""The two engines: the same tokens, with and without the study's avoidable costs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from specdec.engine.kv_cache import KVCache, preallocated_cache, stock_cache


@dataclass(frozen=True)
class Engine:
    """How caches are stored, and how the draft is brought in line with the committed text after a step."""

    name: str
    new_cache: Callable[[torch.nn.Module, int], KVCache]
    reforward: bool  # run the draft again over the step's first token and the accepted ones, as the study does


ENGINES = {
    "published": Engine("published", stock_cache, reforward=True),
    "fast": Engine("fast", preallocated_cache, reforward=False),
}


def get_engine(name: str) -> Engine:
    """Return the engine called ``name``; ValueError names the known ones."""
    if name not in ENGINES:
        raise ValueError(f"unknown engine {name!r}; known: {', '.join(ENGINES)}")
    return ENGINES[name]
