"""Trouble seen in other suites, tried with every way to propose: what holds for a chain must hold for all of them.

Rows D1 to D14 have their own tests beside what they are about (stop and budget, positions, counts in
``test_decoding.py``, caches in ``test_kv_cache.py``, residuals in ``test_sampling.py``, trees in ``test_tree.py``,
rows on disk in ``test_phase1.py`` and ``test_interrupts.py``, ...); here is the rest of each row's kind.
"""

from __future__ import annotations

from functools import partial

import pytest
import torch
from conftest import make_model

from specdec.engine import timing
from specdec.engine.decoding import autoregressive_generate, speculative_generate, speculative_generate_batch
from specdec.engine.drafting import EarlyExitDraft, ModelDraft, PromptLookupDraft, TreeDraft
from specdec.engine.engines import get_engine
from specdec.engine.forward import NonFiniteLogitsError
from specdec.engine.isolation import WARM_UP_PASSES, time_passes
from specdec.engine.kv_compression import quantized_cache
from specdec.schedules import AdaptiveGamma

LAYERS, POSITIONS = 3, 64
PERFECT = {  # of a model with LAYERS layers that is its own draft: all but prompt lookup propose its very text
    "chain": lambda model: model,
    "chain, run again to sync": lambda model: ModelDraft(model, get_engine("published")),
    "tree": lambda model: TreeDraft(model, get_engine("fast"), (2, 2, 1)),
    "early exit": lambda model: EarlyExitDraft(LAYERS),
    "prompt lookup": lambda model: PromptLookupDraft(),
}
every_draft = pytest.mark.parametrize("new_draft", PERFECT.values(), ids=PERFECT)


@pytest.fixture(scope="module")
def model():
    return make_model(layers=LAYERS, hidden=64, seed=0, positions=POSITIONS)


@pytest.fixture(scope="module")
def ids() -> torch.Tensor:
    return torch.randint(1, 300, (1, 16), generator=torch.Generator().manual_seed(9))


@pytest.fixture(scope="module")
def text(model, ids) -> list[int]:
    """The model's own greedy text."""
    tokens = autoregressive_generate(model, ids, 32, engine="fast").tokens
    assert len(set(tokens)) > 20
    return tokens


# --- D1, D2: where a text ends ---------------------------------------------------------------------------------------


@every_draft
@pytest.mark.parametrize("place", [0, 1, 2, 3, 4, 5, 9])
def test_every_way_to_propose_ends_right_after_an_eos(model, ids, text, new_draft, place):
    end = text.index(text[place]) + 1
    for eos in (text[place], [299, text[place]]):
        generation = speculative_generate(new_draft(model), model, ids, 32, 3, engine="fast", eos_token_id=eos)
        assert generation.tokens == text[:end]
        assert len(generation.tokens) == 1 + sum(generation.accepted) + len(generation.accepted)


@every_draft
@pytest.mark.parametrize("budget", [0, 1, 2, 3, 7])
def test_every_way_to_propose_keeps_to_the_budget(model, ids, text, new_draft, budget):
    for gamma in (3, 8, AdaptiveGamma(8)):
        generation = speculative_generate(new_draft(model), model, ids, budget, gamma, engine="fast")
        assert generation.tokens == text[:budget]


@pytest.mark.parametrize("budget", [0, 1, 2, 3, 7])
def test_a_batch_keeps_to_the_budget_and_ends_each_request_at_its_own_eos(model, ids, text, budget):
    inputs = [ids, ids[:, :9], ids[:, 4:]]
    together = speculative_generate_batch(model, model, inputs, budget, 8, eos_token_id=text[2])
    for input_ids, generation in zip(inputs, together):
        alone = autoregressive_generate(model, input_ids, budget, engine="fast", eos_token_id=text[2])
        assert generation.tokens == alone.tokens


# --- D3, D12: caches and counts --------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["chain", "tree", "early exit"])
def test_a_perfect_draft_of_any_kind_is_accepted_to_the_last_token(model, ids, text, kind):
    generation = speculative_generate(PERFECT[kind](model), model, ids, 32, 3, engine="fast")
    assert generation.tokens == text
    assert generation.accepted == generation.proposed, "a drifting cache would show here first"
    assert (generation.acceptance_rate, generation.alpha) == (1.0, 1.0)


def test_a_draft_with_a_compressed_cache_holds_committed_tokens_only(model, ids, text, monkeypatch):
    lags = []
    sync = ModelDraft.sync

    def watched(self, text, proposed, path):
        yield from sync(self, text, proposed, path)
        lags.append(len(text) - 1 - self.cached.cache.length)

    monkeypatch.setattr(ModelDraft, "sync", watched)
    engine = get_engine("fast").__class__("fast", quantized_cache(8), fast_kernels=True, reforward=False)
    weak = make_model(layers=1, hidden=32, seed=4, positions=POSITIONS)
    assert speculative_generate(ModelDraft(weak, engine), model, ids, 32, 4, engine="fast").tokens == text
    assert set(lags) <= {0, 1}


# --- D7, D8: inputs at their limits ----------------------------------------------------------------------------------


@every_draft
def test_no_way_to_propose_feeds_a_position_beyond_the_context(model, new_draft, monkeypatch):
    ids = torch.randint(1, 300, (1, POSITIONS - 6), generator=torch.Generator().manual_seed(3))
    fed = []
    forward = type(model).forward

    def watched(self, token_ids, mask, positions, cache, **kwargs):
        last = cache.get_seq_length() + token_ids.shape[1] - 1 if positions is None else int(positions.max())
        fed.append(last)
        return forward(self, token_ids, mask, positions, cache, **kwargs)

    monkeypatch.setattr(type(model), "forward", watched)
    expected = autoregressive_generate(model, ids, 6, engine="fast").tokens
    assert speculative_generate(new_draft(model), model, ids, 6, 8, engine="fast").tokens == expected
    assert max(fed) < POSITIONS
    with pytest.raises(ValueError, match=f"{POSITIONS - 6} prompt tokens .* 7 new tokens exceed the {POSITIONS}"):
        speculative_generate(new_draft(model), model, ids, 7, 8, engine="fast")


@every_draft
def test_padding_ids_are_never_proposed_or_chosen(new_draft):
    model = make_model(layers=LAYERS, hidden=64, seed=2, vocab=320)
    model.get_output_embeddings().weight.data[300:] *= 50  # padding would win every choice
    model.usable_vocab = 300
    ids = torch.randint(1, 300, (1, 12), generator=torch.Generator().manual_seed(5))
    expected = autoregressive_generate(model, ids, 20, engine="fast").tokens
    assert max(expected) < 300
    assert speculative_generate(new_draft(model), model, ids, 20, 3, engine="fast").tokens == expected


@every_draft
def test_logits_that_are_not_finite_stop_every_way_to_propose(new_draft):
    model = make_model(layers=LAYERS, hidden=64, seed=2)
    model.lm_head.weight.data[7] = float("nan")
    with pytest.raises(NonFiniteLogitsError, match="NaN or infinite logits in the prefill"):
        speculative_generate(new_draft(model), model, torch.ones(1, 5, dtype=torch.long), 8, 3, engine="fast")
    with pytest.raises(NonFiniteLogitsError, match="NaN or infinite logits in the prefill"):
        speculative_generate_batch(model, model, [torch.ones(1, 5, dtype=torch.long)] * 2, 8, 3)


# --- D13: clock edges ------------------------------------------------------------------------------------------------


def test_isolated_passes_wait_for_the_device_before_start_and_stop(model, monkeypatch):
    events = []
    monkeypatch.setattr(timing, "synchronize", lambda device: events.append("wait"))
    forward = type(model).forward
    monkeypatch.setattr(
        type(model), "forward", lambda self, *args, **kwargs: events.append("run") or forward(self, *args, **kwargs)
    )
    time_passes(model, "fast", (1,), repetitions=2)
    assert events == ["run", *["wait", "run", "wait"] * (2 + WARM_UP_PASSES)]


# --- D9: what a schedule remembers -----------------------------------------------------------------------------------


def test_a_schedule_in_a_batch_knows_its_own_request_only(model, ids):
    weak = make_model(layers=1, hidden=32, seed=4, positions=POSITIONS)
    schedule = AdaptiveGamma(8)
    one = partial(speculative_generate, weak, model, gamma=schedule, engine="fast", max_new_tokens=24)
    inputs = [ids, ids[:, 3:], ids[:, :7]]
    alone = [one(input_ids=each).proposed for each in inputs]
    together = speculative_generate_batch(weak, model, inputs, 24, schedule)
    assert [generation.proposed for generation in together] == alone
