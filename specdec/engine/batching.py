"""Several requests at once: each decodes as it would alone, and forwards that wait for the same model run as one.

A forward reads every weight once, however many requests it serves. Requests differ in length, gamma and acceptance, so
each row of a batch has its own length: entries are written to each row's own places, and a mask hides what lies beyond.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from transformers.cache_utils import Cache, DynamicLayer

from specdec.engine.forward import Pass, Passes
from specdec.engine.kv_cache import KVCache, PreallocatedLayer
from specdec.engine.masks import additive_mask, is_chain

MOST_TOGETHER = 16  # tokens per request; wider passes, prefills mostly, run one by one


class SharedLayer:
    """One layer's keys and values of all requests, (requests, heads, capacity, head_dim)."""

    def __init__(self, requests: int) -> None:
        self.requests = requests
        self.keys: torch.Tensor | None = None
        self.values: torch.Tensor | None = None

    def allocate(self, key_states: torch.Tensor, value_states: torch.Tensor, capacity: int) -> None:
        """Make the buffers for entries like these, unless they are there."""
        if self.keys is None:
            _, heads, _, width = key_states.shape
            self.keys = key_states.new_zeros(self.requests, heads, capacity, width)
            self.values = value_states.new_zeros(self.requests, heads, capacity, value_states.shape[-1])


class RowLayer(PreallocatedLayer):
    """One request's part of a shared layer: a view, which works like a cache layer of its own."""

    def __init__(self, shared: SharedLayer, row: int, capacity: int) -> None:
        super().__init__(capacity)
        self.shared, self.row = shared, row

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        self.dtype, self.device = key_states.dtype, key_states.device
        self.shared.allocate(key_states, value_states, self.capacity)
        self.keys = self.shared.keys[self.row : self.row + 1]
        self.values = self.shared.values[self.row : self.row + 1]
        self.is_initialized = True


class SharedCaches:
    """Makes the caches of a batch; an engine's ``new_cache``. Each model's requests share one buffer per layer."""

    def __init__(self, requests: int, capacity: int) -> None:
        self.requests = requests
        self.capacity = capacity + MOST_TOGETHER  # what fills up a narrower request's block is written there too
        self.layers: dict[int, list[SharedLayer]] = {}
        self.taken: dict[int, int] = {}

    def __call__(self, model: nn.Module, capacity: int) -> KVCache:
        """Return the next request's cache for ``model``; ``capacity`` must be within that of the batch."""
        count = model.config.num_hidden_layers
        layers = self.layers.setdefault(id(model), [SharedLayer(self.requests) for _ in range(count)])
        row = self.taken.get(id(model), 0)
        self.taken[id(model)] = row + 1
        return KVCache([RowLayer(layer, row, self.capacity) for layer in layers])


class _TogetherLayer(DynamicLayer):
    """A shared layer during one forward: writes each row's entries to its own places."""

    def __init__(self, shared: SharedLayer, rows: torch.Tensor, places: torch.Tensor, longest: int) -> None:
        super().__init__()
        self.shared, self.rows, self.places, self.longest = shared, rows, places, longest
        self.is_initialized = True

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args, **kwargs):
        """Append in place; returns keys and values of the rows in this forward, (rows, heads, longest, head_dim)."""
        both = []
        for buffer, states in ((self.shared.keys, key_states), (self.shared.values, value_states)):
            buffer[self.rows.unsqueeze(-1), :, self.places] = states.transpose(1, 2)
            whole = len(self.rows) == len(buffer)
            both.append(buffer[:, :, : self.longest] if whole else buffer[self.rows, :, : self.longest])
        return tuple(both)

    def get_seq_length(self) -> int:
        return 0  # positions are given


def feed_together(passes: Sequence[Pass]) -> list[torch.Tensor]:
    """Run passes of several requests for one model as one forward; returns what each would have got alone.

    The passes come in the order of their rows.
    """
    model, device = passes[0].cached.model, passes[0].cached.device
    caches = [each.cached.cache for each in passes]
    widths = [each.token_ids.numel() for each in passes]
    width = max(widths)
    ids = torch.stack(
        [torch.cat([p.token_ids, p.token_ids[-1:].expand(width - n)]) for p, n in zip(passes, widths, strict=True)]
    )
    starts = torch.tensor([cache.length for cache in caches], device=device)
    rows = torch.tensor([cache.layers.layers[0].row for cache in caches], device=device)
    places = starts.unsqueeze(-1) + torch.arange(width, device=device)  # (rows, width)
    longest = max(cache.length for cache in caches) + width
    hidden = torch.arange(longest, device=device) > places.unsqueeze(-1)  # (rows, width, longest)
    limit = getattr(model.config, "max_position_embeddings", None) or longest
    layers = [_TogetherLayer(layer.shared, rows, places, longest) for layer in caches[0].layers.layers]
    mask = additive_mask(hidden, model.dtype).unsqueeze(1)
    output = model(ids, mask, places.clamp(max=limit - 1), Cache(layers=layers), use_cache=True)
    answers = []
    for each, count, logits in zip(passes, widths, output.logits, strict=True):
        each.cached.cache.advance(count)
        answers.append(each.cached.usable(logits[:count])[-each.logits_to_keep :])
    return answers


@torch.inference_mode()
def run_together(works: Sequence[Passes], target: nn.Module) -> list[Any]:
    """Run all ``works``, forwards for the same model as one; returns what each returns.

    The target's forward waits until every unfinished request asks for it, so that drafts of different length end in one
    target forward. A finished request is in no later forward.
    """
    results: dict[int, Any] = {}
    waiting: dict[int, Pass] = {}  # by request, in their order: an answered one keeps its place

    def advance(index: int, logits: torch.Tensor | None) -> None:
        try:
            waiting[index] = works[index].send(logits)
        except StopIteration as finished:
            waiting.pop(index, None)
            results[index] = finished.value

    for index in range(len(works)):
        advance(index, None)
    while waiting:
        drafting = [each.cached.model for each in waiting.values() if each.cached.model is not target]
        model = drafting[0] if drafting else target
        group = [index for index, each in waiting.items() if each.cached.model is model]
        together = [index for index in group if _can_join(waiting[index])]
        if len(together) > 1:
            answers = dict(zip(together, feed_together([waiting[index] for index in together]), strict=True))
        else:
            answers = {}
        for index in group:
            advance(index, answers[index] if index in answers else waiting[index].run())
    return [results[index] for index in range(len(works))]


def _can_join(each: Pass) -> bool:
    """Whether a pass is a narrow chain on a row that has been prefilled."""
    chain = each.parents is None or is_chain(each.parents)
    layer = each.cached.cache.layers.layers[0]
    return chain and isinstance(layer, RowLayer) and layer.length > 0 and each.token_ids.numel() <= MOST_TOGETHER
