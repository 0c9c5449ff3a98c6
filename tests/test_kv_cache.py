"""Both caches can be cut to any length, and what stays is what a fresh forward would have stored."""

from __future__ import annotations

import pytest
import torch

from specdec.engine.forward import CachedModel
from specdec.engine.kv_cache import preallocated_cache, stock_cache

BOTH_CACHES = pytest.mark.parametrize("new_cache", [stock_cache, preallocated_cache])
TOKENS = torch.tensor([5, 9, 200, 31, 7])


@torch.inference_mode()
def feed(model, new_cache, *blocks) -> tuple[CachedModel, torch.Tensor]:
    cached = CachedModel(model, new_cache(model, 16), 300)
    for block in blocks:
        logits = cached.feed(block)
    return cached, logits


@BOTH_CACHES
@pytest.mark.parametrize("keep, length", [(-2, 0), (0, 0), (1, 1), (2, 2), (3, 3), (4, 3), (100, 3)])
@torch.inference_mode()
def test_rollback_leaves_exactly_the_length_asked_for_within_what_is_stored(target, new_cache, keep, length):
    cached, _ = feed(target, new_cache, TOKENS[:3])
    cached.cache.rollback(keep)
    assert cached.cache.length == length
    _, fresh = feed(target, new_cache, torch.cat([TOKENS[:length], TOKENS[3:]]))
    assert torch.allclose(cached.feed(TOKENS[3:]), fresh, atol=1e-4)
    assert cached.cache.length == length + 2


@BOTH_CACHES
@torch.inference_mode()
def test_keeping_the_first_tokens_of_a_block_is_a_rollback(target, new_cache):
    cached, _ = feed(target, new_cache, TOKENS)
    cached.cache.keep(2, [0, 1])
    assert cached.cache.length == 4
    _, fresh = feed(target, new_cache, TOKENS[:4], TOKENS[:1])
    assert torch.allclose(cached.feed(TOKENS[:1]), fresh, atol=1e-4)


@torch.inference_mode()
def test_keeping_a_path_moves_its_entries_together(target):
    cached, _ = feed(target, preallocated_cache, TOKENS)
    keys = [layer.keys.clone() for layer in cached.cache.layers.layers]
    cached.cache.keep(1, [1, 3])
    assert cached.cache.length == 3
    for layer, before in zip(cached.cache.layers.layers, keys):
        assert torch.equal(layer.keys[:, :, :3], before[:, :, [0, 2, 4]])


@torch.inference_mode()
def test_a_preallocated_cache_writes_in_place_and_says_when_it_is_full(target):
    cached, _ = feed(target, preallocated_cache, TOKENS)
    places = [layer.keys.data_ptr() for layer in cached.cache.layers.layers]
    for _ in range(11):
        cached.feed(TOKENS[:1])
    assert [layer.keys.data_ptr() for layer in cached.cache.layers.layers] == places
    with pytest.raises(ValueError, match="the cache holds 16 tokens, 17 were given"):
        cached.feed(TOKENS[:1])
