"""Smaller key/value caches: quantised entries, a sliding window, layers without a cache, a prefix kept for later.

Each is a way to make a cache, to be used as an engine's ``new_cache``. In a draft's cache what is lost costs acceptance
alone, since the target checks every token; in the target's it can change the text.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import nn

from specdec.engine.kv_cache import KVCache, PreallocatedLayer, layer_buffers, preallocated_cache

CacheMaker = Callable[[nn.Module, int], KVCache]


class QuantizedLayer(PreallocatedLayer):
    """Keys and values in 8 or 4 bits each, with float16 scales for every token and head.

    8 bits: x = code * scale, scale = max |x| / 127. 4 bits: x = low + code * scale, scale = (max - min) / 15, two codes
    a byte. Codes, scales and lows lie side by side by token, so that cutting back or moving entries takes all along.
    """

    def __init__(self, capacity: int, bits: int) -> None:
        super().__init__(capacity)
        self.bits = bits

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        self.dtype, self.device = key_states.dtype, key_states.device
        self.key_parts, self.value_parts = (self._empty(states) for states in (key_states, value_states))
        self.is_initialized = True

    def _empty(self, states: torch.Tensor) -> list[torch.Tensor]:
        batch, heads, _, width = states.shape
        shape = (batch, heads, self.capacity)
        codes = states.new_zeros(*shape, width if self.bits == 8 else width // 2, dtype=torch.uint8)
        scales = [states.new_zeros(*shape, 1, dtype=torch.float16) for _ in range(1 if self.bits == 8 else 2)]
        return [codes.view(torch.int8) if self.bits == 8 else codes, *scales]

    def buffers(self) -> list[torch.Tensor]:
        return [*self.key_parts, *self.value_parts]

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args, **kwargs):
        """Append quantised; returns the valid keys and values, (batch, heads, length, head_dim), dequantised."""
        end = self.end_with(key_states, value_states)
        both = []
        for parts, states in ((self.key_parts, key_states), (self.value_parts, value_states)):
            for part, new in zip(parts, quantize(states, self.bits), strict=True):
                part[:, :, self.length : end] = new
            both.append(dequantize([part[:, :, :end] for part in parts], self.bits).to(self.dtype))
        self.length = end
        return tuple(both)


def quantize(x: torch.Tensor, bits: int) -> list[torch.Tensor]:
    """Return codes and float16 scales (for 4 bits also lows) of ``x``, (..., width) with an even width."""
    if bits == 8:
        scale = (x.abs().amax(-1, keepdim=True) / 127).half()
        codes = (x / scale.float().clamp_min(1e-7)).round().clamp(-127, 127)
        return [codes.to(torch.int8), scale]
    low = x.amin(-1, keepdim=True).half()
    scale = ((x.amax(-1, keepdim=True) - low) / 15).half()
    codes = ((x - low.float()) / scale.float().clamp_min(1e-7)).round().clamp(0, 15).to(torch.uint8)
    return [codes[..., ::2] | codes[..., 1::2] << 4, scale, low]


def dequantize(parts: list[torch.Tensor], bits: int) -> torch.Tensor:
    """Return what :func:`quantize` was given, up to rounding, in float32."""
    if bits == 8:
        codes, scale = parts
        return codes.float() * scale.float()
    packed, scale, low = parts
    codes = torch.stack([packed & 15, packed >> 4], dim=-1).flatten(-2)
    return codes.float() * scale.float() + low.float()


class WindowLayer(PreallocatedLayer):
    """Keeps the first ``sinks`` tokens and at least the last ``window`` (Xiao et al. 2024); ``length`` counts all seen.

    Entries keep the positions they were computed at. Between ``window`` and twice as many recent tokens are held, so
    that a rollback of up to ``window`` tokens finds what it needs and eviction is rare.
    """

    def __init__(self, sinks: int, window: int) -> None:
        super().__init__(sinks + 2 * window)
        self.sinks, self.window = sinks, window
        self.stored = 0

    def make_room(self, tokens: int) -> None:
        """Evict the oldest recent entries if ``tokens`` more would not fit."""
        if self.stored + tokens > self.capacity:
            kept = max(self.window - tokens, 0)
            start = self.stored - kept
            for buffer in (self.keys, self.values):
                buffer[:, :, self.sinks : self.sinks + kept] = buffer[:, :, start : self.stored].clone()
            self.stored = self.sinks + kept

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args, **kwargs):
        """Append in place; returns the keys and values that are held, (batch, heads, stored, head_dim)."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        tokens = key_states.shape[-2]
        end = self.stored + tokens
        self.keys[:, :, self.stored : end] = key_states
        self.values[:, :, self.stored : end] = value_states
        self.stored, self.length = end, self.length + tokens
        return self.keys[:, :, :end], self.values[:, :, :end]

    def crop(self, tokens_to_remove: int) -> None:
        super().crop(tokens_to_remove)
        self.stored -= abs(tokens_to_remove)


class OwnTokenLayer(PreallocatedLayer):
    """Keeps nothing: each token attends to itself alone. Works for one token at a time."""

    def __init__(self) -> None:
        super().__init__(capacity=0)
        self.is_initialized = True

    def buffers(self) -> list[torch.Tensor]:
        return []

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args, **kwargs):
        self.length += key_states.shape[-2]
        return key_states, value_states


def quantized_cache(bits: int) -> CacheMaker:
    """Return the maker of caches whose entries take ``bits`` (8 or 4) each."""
    return lambda model, capacity: KVCache([QuantizedLayer(capacity, bits) for _ in _layers(model)])


def window_cache(sinks: int, window: int) -> CacheMaker:
    """Return the maker of caches that hold the first ``sinks`` tokens and the last ``window`` to twice as many."""
    return lambda model, capacity: KVCache([WindowLayer(sinks, window) for _ in _layers(model)], widest=window)


def upper_layers_cache(skipped: int) -> CacheMaker:
    """Return the maker of caches whose lowest ``skipped`` layers keep nothing; fed one token at a time."""

    def make(model: nn.Module, capacity: int) -> KVCache:
        kept = len(_layers(model)) - skipped
        layers = [OwnTokenLayer() for _ in range(skipped)] + [PreallocatedLayer(capacity) for _ in range(kept)]
        return KVCache(layers, widest=1 if skipped else None)

    return make


def _layers(model: nn.Module) -> range:
    return range(model.config.num_hidden_layers)


def entry_bytes(cache: KVCache) -> int:
    """Return the bytes of all entries that ``cache`` holds now, scales included."""
    total = 0
    for layer in cache.layers.layers:
        held = getattr(layer, "stored", layer.get_seq_length())
        total += sum(buffer[:, :, :held].nelement() * buffer.element_size() for buffer in layer_buffers(layer))
    return total


@dataclass
class PrefixStore:
    """Keeps the caches of past prompts, so that a request with the same beginning need not prefill it again.

    Use :meth:`new_cache_for` as an engine's ``new_cache`` and :meth:`remember` once a request is done.
    """

    prompts: list[tuple[list[int], dict[int, KVCache]]] = field(default_factory=list)
    shared_tokens: int = 0  # of the newest request's prompt, that were taken over

    def new_cache_for(self, input_ids: torch.Tensor) -> CacheMaker:
        """Return the maker of caches for a request with this prompt, (1, n), filled with what is known of it."""
        ids = input_ids[0].tolist()
        self.current: dict[int, KVCache] = {}
        self.shared_tokens = 0

        def make(model: nn.Module, capacity: int) -> KVCache:
            cache = preallocated_cache(model, capacity)
            shared, source = max(
                ((common_prefix(ids, known), caches.get(id(model))) for known, caches in self.prompts),
                key=lambda found: found[0] if found[1] else 0,
                default=(0, None),
            )
            if source is not None:
                self.shared_tokens = min(shared, len(ids) - 1)  # the last token's logits are needed
                _copy_entries(source, cache, self.shared_tokens)
            self.current[id(model)] = cache
            return cache

        return make

    def remember(self, input_ids: torch.Tensor) -> None:
        """Keep the caches of the request that was just run with this prompt."""
        self.prompts.append((input_ids[0].tolist(), self.current))


def common_prefix(first: list[int], second: list[int]) -> int:
    """Return how many tokens both begin with."""
    count = 0
    for a, b in zip(first, second, strict=False):
        if a != b:
            break
        count += 1
    return count


def _copy_entries(source: KVCache, cache: KVCache, tokens: int) -> None:
    for old, new in zip(source.layers.layers, cache.layers.layers, strict=True):
        new.update(old.keys[:, :, :tokens], old.values[:, :, :tokens])
