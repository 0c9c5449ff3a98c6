"""Key/value caches of one request that can be cut back to the committed text.

Two stores behind one class: transformers' own, which re-allocates at every token, and one preallocated buffer per
layer with a length pointer, where appending writes in place and cutting back moves the pointer.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers.cache_utils import Cache, DynamicLayer


class PreallocatedLayer(DynamicLayer):
    """One layer's keys and values, each (batch, heads, capacity, head_dim), of which the first ``length`` are valid."""

    def __init__(self, capacity: int) -> None:
        super().__init__()
        self.capacity = capacity
        self.length = 0

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        self.dtype, self.device = key_states.dtype, key_states.device
        batch, heads, _, key_dim = key_states.shape
        # zeros: a compiled forward reads the masked entries too, and 0 times a stray NaN is NaN
        self.keys = key_states.new_zeros(batch, heads, self.capacity, key_dim)
        self.values = value_states.new_zeros(batch, heads, self.capacity, value_states.shape[-1])
        self.is_initialized = True

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args, **kwargs):
        """Append in place; returns views of the valid keys and values, (batch, heads, length, head_dim)."""
        end = self.end_with(key_states, value_states)
        self.keys[:, :, self.length : end] = key_states
        self.values[:, :, self.length : end] = value_states
        self.length = end
        return self.keys[:, :, :end], self.values[:, :, :end]

    def end_with(self, key_states: torch.Tensor, value_states: torch.Tensor) -> int:
        """Return the length with these entries appended; ValueError where they do not fit. Makes the buffers first."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        end = self.length + key_states.shape[-2]
        if end > self.capacity:
            raise ValueError(f"the cache holds {self.capacity} tokens, {end} were given")
        return end

    def get_seq_length(self) -> int:
        return self.length

    def get_max_length(self) -> int:
        return self.capacity

    def crop(self, tokens_to_remove: int) -> None:
        self.length -= abs(tokens_to_remove)


class KVCache:
    """The keys and values that one model keeps of one request, with the number of tokens they stand for."""

    def __init__(self, layers: list[DynamicLayer], widest: int | None = None) -> None:
        self.layers = Cache(layers=layers)
        self.widest = widest  # tokens that one forward may append; None for any number

    @property
    def length(self) -> int:
        """Tokens stored."""
        return self.layers.get_seq_length()

    @property
    def capacity(self) -> int | None:
        """Tokens that fit; None for a cache that grows."""
        return getattr(self.layers.layers[0], "capacity", None)

    def make_room(self, tokens: int) -> int | None:
        """Let layers that evict do so for ``tokens`` more; returns the entries then held, None where none evicts."""
        evicting = [layer for layer in self.layers.layers if hasattr(layer, "make_room")]
        for layer in evicting:
            layer.make_room(tokens)
        return evicting[0].stored if evicting else None

    def advance(self, tokens: int) -> None:
        """Count ``tokens`` more, whose entries were written in place by a compiled forward."""
        for layer in self.layers.layers:
            layer.length += tokens

    def rollback(self, length: int) -> None:
        """Forget all but the first ``length`` tokens; the result holds exactly max(0, min(length, stored))."""
        surplus = min(self.length - length, self.length)
        if surplus > 0:
            for layer in self.layers.layers:
                layer.crop(-surplus)  # a negative count is the one form that both ends of our transformers range take

    def keep(self, prefix: int, offsets: Sequence[int]) -> None:
        """Keep the first ``prefix`` tokens and then those ``offsets`` (ascending) places after them; forget the rest.

        A chain's accepted tokens are the offsets 0, 1, 2, ... and cost only a rollback; a tree's path is moved
        together first.
        """
        if list(offsets) != list(range(len(offsets))):
            for layer in self.layers.layers:
                _move(layer, torch.tensor([prefix + offset for offset in offsets]), prefix)
        self.rollback(prefix + len(offsets))


def _move(layer: DynamicLayer, source: torch.Tensor, start: int) -> None:
    """Copy the entries at ``source`` (LongTensor of places) to the places from ``start`` on."""
    end = start + source.numel()
    for buffer in layer_buffers(layer):
        buffer[:, :, start:end] = buffer[:, :, source]


def layer_buffers(layer: DynamicLayer) -> list[torch.Tensor]:
    """Return the tensors that hold a layer's entries, each (batch, heads, tokens, ...)."""
    return layer.buffers() if hasattr(layer, "buffers") else [layer.keys, layer.values]


def stock_cache(model: torch.nn.Module, capacity: int) -> KVCache:
    """Return transformers' own growing cache for ``model``; ``capacity`` is not used."""
    return KVCache([DynamicLayer() for _ in range(model.config.num_hidden_layers)])


def preallocated_cache(model: torch.nn.Module, capacity: int) -> KVCache:
    """Return a cache for ``model`` with room for ``capacity`` tokens, which it never re-allocates."""
    return KVCache([PreallocatedLayer(capacity) for _ in range(model.config.num_hidden_layers)])
