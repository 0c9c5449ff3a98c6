"""Compressed caches hold what they say, can be cut back, and in the draft change no token."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from specdec.engine import kv_techniques
from specdec.engine.decoding import autoregressive_generate, speculative_generate
from specdec.engine.drafting import ModelDraft, TreeDraft
from specdec.engine.engines import get_engine
from specdec.engine.kv_cache import preallocated_cache
from specdec.engine.kv_compression import (
    PrefixStore,
    common_prefix,
    dequantize,
    entry_bytes,
    quantize,
    quantized_cache,
    upper_layers_cache,
    window_cache,
)
from specdec.engine.pair import encode
from specdec.prompts import PROMPTS
from specdec.schedules import CompressionAwareGamma, CostAwareGamma, ForwardCosts, History

MAKERS = {
    "int8": quantized_cache(8),
    "int4": quantized_cache(4),
    "window": window_cache(4, 16),
    "lower layers": upper_layers_cache(1),
}
COSTS = ForwardCosts(lengths=(64,), draft=(1.0,), target=(tuple(4.0 + 0.2 * k for k in range(9)),))


def with_cache(maker):
    return replace(get_engine("fast"), new_cache=maker)


@pytest.mark.parametrize("bits, relative", [(8, 0.006), (4, 0.08)])
def test_quantised_values_come_back_within_half_a_step(bits, relative):
    x = torch.randn(1, 2, 50, 32, generator=torch.Generator().manual_seed(0)) * 3
    error = (dequantize(quantize(x, bits), bits) - x).abs()
    spread = x.amax(-1, keepdim=True) - x.amin(-1, keepdim=True)
    assert (error <= relative * spread).all()


def test_equal_values_and_zeros_are_quantised_without_nan():
    for value in (0.0, 2.5, -1.0):
        x = torch.full((1, 1, 1, 8), value)
        for bits in (8, 4):
            assert torch.allclose(dequantize(quantize(x, bits), bits), x, atol=0.02)


@pytest.mark.parametrize("bits, most", [(8, 0.30), (4, 0.18)])
def test_quantised_caches_take_their_share_of_the_bytes_scales_included(tiny_pair, bits, most):
    sizes = []
    for maker in (preallocated_cache, quantized_cache(bits)):
        cached = with_cache(maker).open(tiny_pair.target, 64)
        with torch.inference_mode():
            cached.feed(torch.arange(40))
        sizes.append(entry_bytes(cached.cache))
    config = tiny_pair.target.config
    per_token = (
        2 * config.num_hidden_layers * config.num_key_value_heads * (config.hidden_size // config.num_attention_heads)
    )
    assert sizes[0] == 40 * 4 * per_token
    assert sizes[1] <= most * sizes[0]


@pytest.mark.parametrize("name", sorted(MAKERS))
@torch.inference_mode()
def test_a_cache_cut_back_continues_like_one_that_never_went_further(target, prompt, name):
    straight, back = (with_cache(MAKERS[name]).open(target, 64) for _ in range(2))
    for cached in (straight, back):
        cached.feed(prompt[0, :12])
    back.feed(prompt[0, 12:17] * 3 % 300)  # entries of other sizes, so that a stale scale would show
    back.cache.rollback(12)
    assert back.cache.length == straight.cache.length == 12
    assert torch.allclose(back.feed(prompt[0, 17:]), straight.feed(prompt[0, 17:]), atol=1e-4)


@pytest.mark.parametrize("bits", [8, 4])
@torch.inference_mode()
def test_moving_a_trees_path_takes_codes_and_scales_along(target, prompt, bits):
    tree, chain = (with_cache(quantized_cache(bits)).open(target, 64) for _ in range(2))
    nodes = torch.tensor([7, 250, 31, 120])
    for cached in (tree, chain):
        cached.feed(prompt[0])
    tree.feed(nodes, logits_to_keep=0, parents=[-1, -1, 1, 2])
    tree.cache.keep(20, [1, 2])
    chain.feed(nodes[1:3])
    assert torch.allclose(tree.feed(nodes[:1]), chain.feed(nodes[:1]), atol=0.02)


@pytest.mark.parametrize("name", sorted(MAKERS))
def test_in_the_draft_a_compressed_cache_changes_no_token(tiny_pair, greedy_text, name):
    for prompt in PROMPTS:
        input_ids = encode(tiny_pair, prompt)
        draft = ModelDraft(tiny_pair.draft, with_cache(MAKERS[name]))
        generation = speculative_generate(draft, tiny_pair.target, input_ids, 24, 3, engine="fast")
        assert generation.tokens == greedy_text(prompt)[:24]
        assert sum(generation.accepted) > 0


def test_a_quantised_draft_works_in_a_tree(tiny_pair):
    input_ids = encode(tiny_pair, PROMPTS[0])
    draft = TreeDraft(tiny_pair.draft, with_cache(quantized_cache(8)))
    generation = speculative_generate(draft, tiny_pair.target, input_ids, 32, 3, engine="fast")
    assert generation.tokens == autoregressive_generate(tiny_pair.target, input_ids, 32, engine="fast").tokens


@torch.inference_mode()
def test_a_window_holds_the_sinks_and_the_latest_tokens(target):
    cached = with_cache(window_cache(2, 8)).open(target, 100)
    ids = torch.randint(1, 300, (60,), generator=torch.Generator().manual_seed(1))
    first = cached.feed(ids[:1])
    assert first.shape == (1, 300)
    sinks = None
    for token in ids[1:]:
        cached.feed(token.unsqueeze(0))
        layer = cached.cache.layers.layers[0]
        assert layer.stored <= 2 + 16
        if cached.cache.length > 10:
            assert layer.stored >= 2 + 8
        if cached.cache.length == 2:
            sinks = layer.keys[:, :, :2].clone()
    assert cached.cache.length == 60
    assert torch.equal(layer.keys[:, :, :2], sinks)


@torch.inference_mode()
def test_within_the_window_nothing_is_lost(target, prompt):
    plain, window = (with_cache(maker).open(target, 64) for maker in (preallocated_cache, window_cache(4, 16)))
    for cached in (plain, window):
        cached.feed(prompt[0])
    token = prompt[0, :1]
    assert torch.allclose(plain.feed(token), window.feed(token), atol=1e-4)


@torch.inference_mode()
def test_a_layer_without_a_cache_attends_to_the_token_itself(target, prompt):
    cached = with_cache(upper_layers_cache(3)).open(target, 64)  # all three layers
    cached.feed(prompt[0])
    alone = target(prompt[:, 3:4], position_ids=torch.tensor([[20]])).logits[0]
    assert torch.allclose(cached.feed(prompt[0, 3:4]), alone, atol=1e-4)
    assert entry_bytes(cached.cache) == 0


def test_the_second_request_with_a_prefix_prefills_only_what_follows_it(tiny_pair):
    prefix = torch.randint(5, 4000, (200,), generator=torch.Generator().manual_seed(2))
    requests = [torch.cat([prefix, encode(tiny_pair, PROMPTS[place])[0]]).unsqueeze(0) for place in (0, 1)]
    expected = [autoregressive_generate(tiny_pair.target, ids, 24, engine="fast").tokens for ids in requests]
    widths: list[int] = []
    hooks = [
        model.register_forward_pre_hook(lambda module, inputs: widths.append(inputs[0].shape[1]))
        for model in (tiny_pair.draft, tiny_pair.target)
    ]
    store = PrefixStore()
    fed = []
    for input_ids, tokens in zip(requests, expected):
        widths.clear()
        engine = with_cache(store.new_cache_for(input_ids))
        assert speculative_generate(tiny_pair.draft, tiny_pair.target, input_ids, 24, 3, engine=engine).tokens == tokens
        store.remember(input_ids)
        fed.append(widths[:2])
    for hook in hooks:
        hook.remove()
    assert fed[0] == [requests[0].shape[1]] * 2
    assert fed[1] == [requests[1].shape[1] - 200] * 2
    assert store.shared_tokens == 200


def test_a_request_equal_to_one_before_still_computes_its_last_token(tiny_pair):
    input_ids = encode(tiny_pair, PROMPTS[0])
    store = PrefixStore()
    runs = []
    for _ in range(2):
        engine = with_cache(store.new_cache_for(input_ids))
        runs.append(speculative_generate(tiny_pair.draft, tiny_pair.target, input_ids, 16, 3, engine=engine).tokens)
        store.remember(input_ids)
    assert runs[0] == runs[1]
    assert store.shared_tokens == input_ids.shape[1] - 1
    assert common_prefix([1, 2, 3], [1, 2, 4]) == 2


def history(proposed: int, accepted: int, prompt_tokens: int = 10) -> History:
    return History(prompt_tokens, [proposed], [accepted])


def test_the_compression_aware_rule_stays_within_the_room_that_is_left():
    rule = CompressionAwareGamma(CostAwareGamma(COSTS, prior_alpha=0.95), room=20, setting="int8")
    assert rule(History(5)) > 3
    assert rule(History(16)) == 2
    assert rule(History(18)) == 0
    assert rule(History(25)) == 0


def test_agreement_is_remembered_by_setting_and_by_nothing_else():
    seen: dict[str, list[History]] = {}
    rules = {name: CompressionAwareGamma(CostAwareGamma(COSTS), 1000, name, seen) for name in ("int8", "int4")}
    fresh = rules["int8"](History(10))
    for _ in range(4):
        rules["int8"](history(8, 8))
        rules["int4"](history(8, 0))
    assert rules["int8"](History(10)) > fresh > rules["int4"](History(10))


def test_each_technique_is_measured_on_real_tensors(tiny_pair):
    inputs = [encode(tiny_pair, PROMPTS[0])]
    texts = kv_techniques.greedy_texts(tiny_pair, inputs, 16)
    rows = {
        technique: kv_techniques.measure(tiny_pair, inputs, texts, "target", technique)
        for technique in kv_techniques.TECHNIQUES
    }
    assert rows["none"]["tokens_equal_share"] == 1
    assert rows["int8"]["bytes_per_token"] < 0.3 * rows["none"]["bytes_per_token"]
    skipped = kv_techniques.measure(tiny_pair, inputs, texts, "draft", kv_techniques.SKIPPED)
    assert skipped["tokens_equal_share"] == 1
    first, second = kv_techniques.measure_prefix(tiny_pair, inputs * 2, 16)
    assert first["tokens_equal_share"] == second["tokens_equal_share"] == 1
    assert "request 1: 0 of" in first["note"]
    assert "request 2: 0 of" not in second["note"]
