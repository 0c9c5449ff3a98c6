"""A model's forward over a fixed number of tokens, compiled once by torch.compile and replayed.

All shapes are static: the cache is a buffer of fixed capacity, the place of the new tokens is a tensor, and a block
narrower than a compiled width is filled up; what the filling writes lies beyond the cache's length and is overwritten.
"""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType, MethodType

import torch
from torch import nn
from transformers.cache_utils import Cache, DynamicLayer

from specdec.engine.kv_cache import KVCache
from specdec.engine.masks import additive_mask


class _WholeLayer(DynamicLayer):
    """A layer's cache inside a graph: writes at given places, attends to the whole buffer, masked."""

    def __init__(self, keys: torch.Tensor, values: torch.Tensor, places: torch.Tensor) -> None:
        super().__init__()
        self.keys, self.values, self.places = keys, values, places
        self.is_initialized = True

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args, **kwargs):
        self.keys.index_copy_(2, self.places, key_states)
        self.values.index_copy_(2, self.places, value_states)
        return self.keys, self.values

    def get_seq_length(self) -> int:
        return 0  # positions are given


def _with_own_code(method: MethodType) -> MethodType:
    """Return ``method`` with a code object of its own: torch keeps graphs by code object, and two models share none."""
    function = method.__func__
    copy = FunctionType(function.__code__.replace(), function.__globals__, function.__name__)
    return MethodType(copy, method.__self__)


class CompiledSteps:
    """The compiled forwards of one model: ``widths`` tokens of one request, on caches of exactly ``capacity``."""

    def __init__(self, model: nn.Module, vocab: int, capacity: int) -> None:
        self.model = model
        self.vocab = vocab
        self.capacity = capacity
        self.widths: list[int] = []
        self.positions = getattr(model.config, "max_position_embeddings", None) or capacity
        self._forward = self._compiled()

    def _compiled(self) -> Callable:
        # Nothing but tensors changes between calls, and guards on all of a model's attributes cost up to 0.2 ms a call.
        options = {"guard_filter_fn": torch.compiler.keep_tensor_guards_unsafe}
        if self.model.device.type == "cuda":
            options["triton.cudagraphs"] = True
        return torch.compile(_with_own_code(self._step), fullgraph=True, dynamic=False, options=options)

    def width_for(self, cache: KVCache, tokens: int) -> int | None:
        """Return the narrowest compiled width that takes ``tokens`` more, or None if none does."""
        if cache.length == 0 or cache.capacity != self.capacity:
            return None
        fitting = (width for width in self.widths if tokens <= width <= self.capacity - cache.length)
        return min(fitting, default=None)

    def run(self, token_ids: torch.Tensor, width: int, cache: KVCache, logit_sum: torch.Tensor):
        """Append (1, k) ids to ``cache``; returns logits, (1, k, vocab), and ``logit_sum`` with theirs added."""
        given = token_ids.shape[1]
        block = torch.cat([token_ids, token_ids[:, -1:].expand(1, width - given)], dim=1)
        start = torch.tensor(cache.length, device=self.model.device)
        keys = [layer.keys for layer in cache.layers.layers]
        values = [layer.values for layer in cache.layers.layers]
        logits, logit_sum = self._forward(block, start, keys, values, logit_sum)
        cache.advance(given)
        return logits[:, :given], logit_sum

    def _step(self, token_ids, start, keys, values, logit_sum):
        width = token_ids.shape[1]
        places = start + torch.arange(width, device=token_ids.device)
        all_places = torch.arange(self.capacity, device=token_ids.device)
        mask = additive_mask(all_places > places.unsqueeze(-1), self.model.dtype)  # (width, capacity)
        layers = [_WholeLayer(k, v, places) for k, v in zip(keys, values, strict=True)]
        positions = places.clamp(max=self.positions - 1).unsqueeze(0)  # only filling lies beyond
        output = self.model(token_ids, mask[None, None], positions, Cache(layers=layers), use_cache=True)
        logits = output.logits[..., : self.vocab]
        return logits, logit_sum + logits.sum(dtype=torch.float32)
