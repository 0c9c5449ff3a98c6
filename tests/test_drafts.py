"""Whatever proposes, the tokens are the target's; and each draft proposes what it says."""

from __future__ import annotations

import pytest
import torch

from specdec.engine.acceptance import trace_agreement
from specdec.engine.decoding import autoregressive_generate, speculative_generate
from specdec.engine.drafting import EarlyExitDraft, ModelDraft, PromptLookupDraft
from specdec.engine.engines import ENGINES, get_engine
from specdec.engine.forward import first_layers
from specdec.engine.pair import encode
from specdec.errors import InputError
from specdec.prompts import PROMPTS
from specdec.schedules import AdaptiveGamma, CostAwareGamma, ForwardCosts
from specdec.simulation import replay

BOTH_ENGINES = pytest.mark.parametrize("engine", sorted(ENGINES))
COSTS = ForwardCosts(lengths=(64,), draft=(1.0,), target=(tuple(4.0 + 0.2 * k for k in range(9)),))


# --- The target's first layers ---------------------------------------------------------------------------------------


@BOTH_ENGINES
def test_early_exit_gives_the_baselines_tokens(tiny_pair, greedy_text, engine):
    target = tiny_pair.target
    for prompt in PROMPTS if engine == "fast" else PROMPTS[::4]:
        input_ids = encode(tiny_pair, prompt)
        generation = speculative_generate(EarlyExitDraft(2), target, input_ids, 96, 3, engine=engine)
        assert generation.tokens == greedy_text(prompt, engine)
        assert 0 < generation.alpha < 1, "all accepted or all rejected would test one path only"


def test_the_last_layer_as_exit_is_the_target_and_is_always_right(target, prompt):
    generation = speculative_generate(EarlyExitDraft(3), target, prompt, 40, 4, engine="fast")
    assert generation.alpha == 1


def test_the_draft_is_the_first_layers_with_the_targets_own_norm_and_head(target, prompt):
    lower = first_layers(target, 1)
    states = target.model.embed_tokens(prompt)
    positions = torch.arange(prompt.shape[1]).unsqueeze(0)
    mask = torch.full((prompt.shape[1],) * 2, float("-inf")).triu(1)[None, None]
    rotary = target.model.rotary_emb(states, positions)
    with torch.inference_mode():
        states = target.model.layers[0](states, attention_mask=mask, position_embeddings=rotary)
        states = states[0] if isinstance(states, tuple) else states
        expected = target.lm_head(target.model.norm(states))
        assert torch.allclose(lower(prompt).logits, expected, atol=1e-4)
    assert len(target.model.layers) == target.config.num_hidden_layers == 3, "the target itself is as it was"
    assert {id(weight) for weight in lower.parameters()} <= {id(weight) for weight in target.parameters()}


def test_proposing_adds_no_prefill_and_leaves_the_targets_cache_as_it_was(tiny_pair):
    lengths = []

    class Watched(EarlyExitDraft):
        def start(self, request, target):
            super().start(request, target)
            self.target = target

        def propose(self, text, count):
            proposal = yield from super().propose(text, count)
            lengths.append([layer.get_seq_length() for layer in self.target.cache.layers.layers])
            assert set(lengths[-1]) == {len(text) - 1}
            return proposal

    speculative_generate(Watched(2), tiny_pair.target, encode(tiny_pair, PROMPTS[0]), 24, 4, engine="fast")
    assert len(lengths) > 3


def test_sampling_with_an_early_exit_runs_and_draws_from_its_distribution(tiny_pair):
    options = {"engine": "fast", "temperature": 0.8}
    input_ids = encode(tiny_pair, PROMPTS[0])
    runs = [
        speculative_generate(
            EarlyExitDraft(2),
            tiny_pair.target,
            input_ids,
            32,
            3,
            generator=torch.Generator().manual_seed(seed),
            **options,
        ).tokens
        for seed in (1, 1, 2)
    ]
    assert runs[0] == runs[1] != runs[2]


@pytest.mark.parametrize("layers", [0, 4])
def test_an_exit_that_the_target_does_not_have_is_refused(target, prompt, layers):
    with pytest.raises(InputError, match="layer"):
        speculative_generate(EarlyExitDraft(layers), target, prompt, 8, 2)


# --- Earlier text ----------------------------------------------------------------------------------------------------


def proposed(text: list[int], count: int = 3, longest: int = 3, vocab: int = 100) -> list[int]:
    draft = PromptLookupDraft(longest)
    draft.vocab = vocab
    return draft.propose(text, count).tokens.tolist()


def test_prompt_lookup_continues_the_latest_place_of_the_longest_match():
    assert proposed([1, 2, 3, 7, 8, 9, 1, 2, 3]) == [7, 8, 9]
    assert proposed([1, 2, 3, 7, 5, 1, 2, 3, 8, 1, 2, 3]) == [8, 1, 2]
    assert proposed([4, 3, 7, 1, 2, 3, 8, 9, 3]) == [8, 9, 3], "the latest place of the one token that matches"
    assert proposed([9, 2, 3, 7, 5, 3, 6, 6, 2, 3]) == [7, 5, 3], "two tokens that match beat a later single one"
    assert proposed([5, 5]) == [5]
    assert proposed([1, 2, 3]) == []
    assert proposed([1]) == []


def test_prompt_lookup_proposes_no_more_than_asked_and_no_unusable_id():
    assert proposed([1, 2, 3, 4, 5, 1], count=2) == [2, 3]
    assert proposed([1, 2, 3, 4, 5, 1], count=0) == []
    assert proposed([1, 2, 99, 4, 1], vocab=99) == [2]


def test_prompt_lookup_gives_the_baselines_tokens_on_all_eight_prompts(tiny_pair, greedy_text):
    for prompt in PROMPTS:
        input_ids = encode(tiny_pair, prompt)
        generation = speculative_generate(PromptLookupDraft(), tiny_pair.target, input_ids, 48, 4, engine="fast")
        assert generation.tokens == greedy_text(prompt)[:48]


# --- Schedules in the loop -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("schedule", [AdaptiveGamma(8), CostAwareGamma(COSTS)], ids=["adaptive", "cost-aware"])
def test_the_trace_of_a_prompt_is_the_same_whatever_ran_before(tiny_pair, schedule):
    a, b = (encode(tiny_pair, PROMPTS[place]) for place in (0, 7))

    def trace(*requests) -> list[int]:
        for input_ids in requests:
            generation = speculative_generate(tiny_pair.draft, tiny_pair.target, input_ids, 48, schedule, engine="fast")
        return generation.proposed

    alone = trace(b)  # before anything else has run
    assert trace(a, b) == trace(b, a, b) == alone
    assert trace(a) != alone, "two prompts that go alike would show nothing"


@pytest.mark.parametrize("schedule", [AdaptiveGamma(8), CostAwareGamma(COSTS)], ids=["adaptive", "cost-aware"])
def test_schedules_give_the_baselines_tokens_on_all_eight_prompts(tiny_pair, greedy_text, schedule):
    for prompt in PROMPTS:
        input_ids = encode(tiny_pair, prompt)
        generation = speculative_generate(tiny_pair.draft, tiny_pair.target, input_ids, 48, schedule, engine="fast")
        assert generation.tokens == greedy_text(prompt)[:48]


def test_the_cost_aware_rule_comes_close_to_the_best_fixed_gamma_over_the_eight_prompts(tiny_pair):
    inputs = [encode(tiny_pair, prompt) for prompt in PROMPTS]
    texts = [autoregressive_generate(tiny_pair.target, ids, 64, engine="fast").tokens for ids in inputs]
    traces = [
        [row["agrees"] for row in trace_agreement(tiny_pair, ids, text, "fast")]
        for ids, text in zip(inputs, texts, strict=True)
    ]

    def cost(schedule) -> float:
        steps = [proposed for trace in traces for proposed in replay(trace, schedule, 20, 64).proposed]
        return sum(COSTS.step(proposed, 64) for proposed in steps)

    assert cost(CostAwareGamma(COSTS)) <= 1.05 * min(cost(gamma) for gamma in (1, 2, 4, 8))


def test_a_draft_that_proposes_less_than_asked_is_counted_by_what_it_proposed(draft, target, prompt):
    class Half(ModelDraft):
        def propose(self, text, count):
            return (yield from super().propose(text, count // 2))

    generation = speculative_generate(Half(draft, get_engine("fast")), target, prompt, 24, 4)
    assert set(generation.proposed) <= {0, 1, 2}
    assert generation.tokens == autoregressive_generate(target, prompt, 24).tokens
