"""Requests decoded together get the tokens of their own single runs, in fewer forwards."""

from __future__ import annotations

import pytest
import torch

from specdec.engine import batching
from specdec.engine.decoding import speculative_generate, speculative_generate_batch
from specdec.engine.drafting import EarlyExitDraft, PromptLookupDraft, TreeDraft
from specdec.engine.engines import get_engine
from specdec.engine.pair import encode
from specdec.errors import InputError
from specdec.prompts import PROMPTS
from specdec.schedules import AdaptiveGamma


@pytest.fixture
def inputs(tiny_pair) -> list[torch.Tensor]:
    """The eight prompts, all of different lengths."""
    encoded = [encode(tiny_pair, prompt)[:, : 30 + 2 * place] for place, prompt in enumerate(PROMPTS)]
    assert len({ids.shape[1] for ids in encoded}) > 4
    return encoded


@pytest.mark.parametrize("gamma", [0, 3, AdaptiveGamma(6)], ids=["plain", "fixed", "adaptive"])
def test_each_request_gets_the_tokens_and_steps_of_its_own_single_run(tiny_pair, inputs, gamma):
    together = speculative_generate_batch(tiny_pair.draft, tiny_pair.target, inputs, 40, gamma)
    for input_ids, generation in zip(inputs, together):
        alone = speculative_generate(tiny_pair.draft, tiny_pair.target, input_ids, 40, gamma, engine="fast")
        assert (generation.tokens, generation.proposed, generation.accepted) == (
            alone.tokens,
            alone.proposed,
            alone.accepted,
        )


def test_each_request_may_have_its_own_gamma(tiny_pair, inputs):
    gammas = [0, 1, 2, 3, 4, 5, 6, 8]
    together = speculative_generate_batch(tiny_pair.draft, tiny_pair.target, inputs, 32, gammas)
    for input_ids, gamma, generation in zip(inputs, gammas, together):
        alone = speculative_generate(tiny_pair.draft, tiny_pair.target, input_ids, 32, gamma, engine="fast")
        assert (generation.tokens, generation.accepted) == (alone.tokens, alone.accepted)


@pytest.mark.parametrize(
    "draft",
    [PromptLookupDraft(), EarlyExitDraft(2), pytest.param("tree", id="tree")],
    ids=["lookup", "early exit", "tree"],
)
def test_any_draft_can_be_batched(tiny_pair, inputs, draft):
    def new_draft():
        return TreeDraft(tiny_pair.draft, get_engine("fast")) if draft == "tree" else draft

    together = speculative_generate_batch(new_draft(), tiny_pair.target, inputs[:3], 24, 3)
    for input_ids, generation in zip(inputs, together):
        alone = speculative_generate(new_draft(), tiny_pair.target, input_ids, 24, 3, engine="fast")
        assert (generation.tokens, generation.accepted) == (alone.tokens, alone.accepted)


def test_one_target_forward_serves_every_unfinished_request_and_no_finished_one(tiny_pair, inputs, monkeypatch):
    sizes = []
    original = batching.feed_together

    def counted(passes):
        if passes[0].cached.model is tiny_pair.target:
            sizes.append(len(passes))
        return original(passes)

    monkeypatch.setattr(batching, "feed_together", counted)
    together = speculative_generate_batch(tiny_pair.draft, tiny_pair.target, inputs, 40, 3)
    steps = sorted((len(generation.accepted) for generation in together), reverse=True)
    assert len(set(steps)) > 2, "requests that all end together would show nothing"
    expected = [sum(count > step for count in steps) for step in range(steps[0])]
    assert sizes == [size for size in expected if size > 1]


def test_a_finished_request_drafts_no_more(tiny_pair, inputs, monkeypatch):
    live = []
    original = batching.feed_together

    def watched(passes):
        live.extend(each.cached.cache.length + each.token_ids.numel() for each in passes)
        return original(passes)

    monkeypatch.setattr(batching, "feed_together", watched)
    speculative_generate_batch(tiny_pair.draft, tiny_pair.target, inputs[:2], 12, [0, 4])
    longest = max(ids.shape[1] for ids in inputs[:2]) + 12
    assert max(live) < longest


def test_sampled_requests_draw_from_their_own_generators(tiny_pair, inputs):
    def generators():
        return [torch.Generator().manual_seed(seed) for seed in (1, 2, 3)]

    options = {"temperature": 0.8}
    together = speculative_generate_batch(
        tiny_pair.draft, tiny_pair.target, inputs[:3], 16, 2, generators=generators(), **options
    )
    for input_ids, generator, generation in zip(inputs, generators(), together):
        alone = speculative_generate(
            tiny_pair.draft, tiny_pair.target, input_ids, 16, 2, engine="fast", generator=generator, **options
        )
        assert generation.tokens == alone.tokens


def test_a_batch_of_eight_takes_far_fewer_forwards_than_eight_runs(tiny_pair, inputs):
    calls = []
    hook = tiny_pair.target.register_forward_pre_hook(lambda *args: calls.append(1))
    speculative_generate_batch(tiny_pair.draft, tiny_pair.target, inputs, 40, 3)
    together = len(calls)
    calls.clear()
    for input_ids in inputs:
        speculative_generate(tiny_pair.draft, tiny_pair.target, input_ids, 40, 3, engine="fast")
    hook.remove()
    assert together < 0.3 * len(calls)


def test_end_of_text_ends_one_request_and_not_the_others(tiny_pair, inputs):
    plain = speculative_generate_batch(tiny_pair.draft, tiny_pair.target, inputs[:3], 30, 3)
    eos = next(token for token in plain[0].tokens[3:] if token not in plain[1].tokens + plain[2].tokens)
    ended = speculative_generate_batch(tiny_pair.draft, tiny_pair.target, inputs[:3], 30, 3, eos_token_id=eos)
    assert ended[0].tokens == plain[0].tokens[: plain[0].tokens.index(eos) + 1]
    assert [each.tokens for each in ended[1:]] == [each.tokens for each in plain[1:]]


def test_no_requests_and_no_tokens_give_nothing(tiny_pair, inputs):
    assert speculative_generate_batch(tiny_pair.draft, tiny_pair.target, [], 8, 2) == []
    assert [
        each.tokens for each in speculative_generate_batch(tiny_pair.draft, tiny_pair.target, inputs[:2], 0, 2)
    ] == [
        [],
        [],
    ]


def test_a_count_of_gammas_that_does_not_fit_is_refused(tiny_pair, inputs):
    with pytest.raises(InputError, match="3 prompts need as many gammas"):
        speculative_generate_batch(tiny_pair.draft, tiny_pair.target, inputs[:3], 8, [1, 2])
