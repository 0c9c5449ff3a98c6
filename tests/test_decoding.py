"""The decoding loop: the target's own tokens, whatever proposes, and counts that add up."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from conftest import make_model

from specdec.engine import timing
from specdec.engine.decoding import autoregressive_generate, speculative_generate
from specdec.engine.drafting import Draft, ModelDraft
from specdec.engine.engines import ENGINES
from specdec.engine.forward import NonFiniteLogitsError
from specdec.engine.verification import Proposal
from specdec.prompts import PROMPTS

BOTH_ENGINES = pytest.mark.parametrize("engine", sorted(ENGINES))
GAMMAS = (1, 2, 4, 8)


class ScriptedDraft(Draft):
    """Knows the target's text and proposes it, but a wrong token wherever ``is_right`` (of the place) says so."""

    def __init__(self, text: list[int], prompt_tokens: int, is_right) -> None:
        self.text, self.prompt_tokens, self.is_right = text, prompt_tokens, is_right
        self.asked: list[int] = []

    def propose(self, text: list[int], count: int) -> Proposal:
        self.asked.append(count)
        first = len(text) - self.prompt_tokens
        places = range(first, first + count)
        tokens = [self.text[place] if self.is_right(place) else (self.text[place] + 1) % 300 for place in places]
        return Proposal.chain(torch.tensor(tokens, dtype=torch.long))


def encode(pair, text: str) -> torch.Tensor:
    return pair.tokenizer(text, return_tensors="pt").input_ids


def greedy_by_transformers(model, input_ids: torch.Tensor, count: int) -> list[int]:
    output = model.generate(input_ids, max_new_tokens=count, do_sample=False, eos_token_id=None, pad_token_id=0)
    return output[0, input_ids.shape[1] :].tolist()


def test_the_baseline_gives_the_tokens_of_transformers_greedy_generate(target, prompt):
    expected = greedy_by_transformers(target, prompt, 64)
    assert len(set(expected)) > 30, "a text that repeats itself would hide faults"
    for engine in ENGINES:
        assert autoregressive_generate(target, prompt, 64, engine=engine).tokens == expected


@BOTH_ENGINES
@pytest.mark.parametrize("gamma", GAMMAS)
def test_a_draft_that_disagrees_changes_no_token(draft, target, prompt, engine, gamma):
    baseline = autoregressive_generate(target, prompt, 64, engine=engine)
    generation = speculative_generate(draft, target, prompt, 64, gamma, engine=engine)
    assert generation.tokens == baseline.tokens


@pytest.mark.parametrize("name", [prompt.name for prompt in PROMPTS])
def test_on_the_embedded_pair_all_paths_give_transformers_tokens(tiny_pair, name):
    input_ids = encode(tiny_pair, next(prompt.text for prompt in PROMPTS if prompt.name == name))
    expected = greedy_by_transformers(tiny_pair.target, input_ids, 24)
    for engine in ENGINES:
        assert autoregressive_generate(tiny_pair.target, input_ids, 24, engine=engine).tokens == expected
        for gamma in GAMMAS:
            generation = speculative_generate(tiny_pair.draft, tiny_pair.target, input_ids, 24, gamma, engine=engine)
            assert generation.tokens == expected
            assert 0 < generation.alpha < 1, "all accepted or all rejected would test one path only"


@BOTH_ENGINES
@pytest.mark.parametrize("gamma", range(1, 9))
def test_the_target_as_its_own_draft_is_always_accepted(target, prompt, engine, gamma):
    generation = speculative_generate(target, target, prompt, 64, gamma, engine=engine)
    assert generation.acceptance_rate == 1.0
    assert generation.alpha == 1.0
    assert len(generation.accepted) == math.ceil((64 - 1) / (gamma + 1))


@BOTH_ENGINES
def test_a_draft_that_is_always_wrong_is_never_accepted(target, prompt, engine):
    baseline = autoregressive_generate(target, prompt, 64, engine=engine).tokens
    wrong = ScriptedDraft(baseline, prompt.shape[1], lambda place: False)
    generation = speculative_generate(wrong, target, prompt, 64, 4, engine=engine)
    assert generation.tokens == baseline
    assert generation.acceptance_rate == 0.0
    assert generation.alpha == 0.0
    assert len(generation.accepted) == 63


def test_acceptance_counts_proposed_tokens_only_not_the_bonus(target, prompt):
    baseline = autoregressive_generate(target, prompt, 41).tokens
    every_other = ScriptedDraft(baseline, prompt.shape[1], lambda place: place % 2 == 1)
    # each step starts at an odd place: one right, one wrong, so 1 of 2 accepted and 2 tokens committed
    generation = speculative_generate(every_other, target, prompt, 41, 2)
    assert generation.tokens == baseline
    assert generation.proposed == [2] * 19 + [1]  # the last step has two tokens left and proposes one less
    assert generation.accepted == [1] * 20
    assert generation.acceptance_rate == 20 / 39
    assert generation.alpha == 20 / 39
    assert generation.tokens_per_step == 2.0


def test_two_rates_differ_where_tokens_after_a_rejection_were_never_tried(target, prompt):
    baseline = autoregressive_generate(target, prompt, 50).tokens
    first_only = ScriptedDraft(baseline, prompt.shape[1], lambda place: place % 2 == 1)
    generation = speculative_generate(first_only, target, prompt, 50, 7)
    tried = sum(generation.accepted) + sum(a < p for a, p in zip(generation.accepted, generation.proposed))
    assert generation.alpha == sum(generation.accepted) / tried > 0.49
    assert generation.acceptance_rate == sum(generation.accepted) / sum(generation.proposed) < 0.25


def test_gamma_zero_is_plain_decoding_and_never_asks_the_draft(target, prompt):
    baseline = autoregressive_generate(target, prompt, 20)
    unused = ScriptedDraft(baseline.tokens, prompt.shape[1], lambda place: True)
    generation = speculative_generate(unused, target, prompt, 20, 0)
    assert generation.tokens == baseline.tokens
    assert unused.asked == []
    assert generation.proposed == [0] * 19
    assert generation.acceptance_rate is None
    assert generation.alpha is None


@BOTH_ENGINES
@pytest.mark.parametrize("budget", [0, 1, 2, 3, 7, 8, 9, 10])
def test_the_budget_is_exact(target, prompt, engine, budget):
    baseline = autoregressive_generate(target, prompt, 16).tokens
    generation = speculative_generate(target, target, prompt, budget, 8, engine=engine)
    assert generation.tokens == baseline[:budget]


def test_a_budget_of_zero_runs_no_forward(target, prompt, monkeypatch):
    monkeypatch.setattr(type(target), "forward", lambda *args, **kwargs: pytest.fail("a forward ran"))
    assert speculative_generate(target, target, prompt, 0, 8).tokens == []


@BOTH_ENGINES
@pytest.mark.parametrize("schedule", [4, lambda history: len(history.accepted) % 3])
def test_new_tokens_are_the_prefill_token_plus_accepted_plus_steps(tiny_pair, engine, schedule):
    input_ids = encode(tiny_pair, PROMPTS[0].text)
    generation = speculative_generate(tiny_pair.draft, tiny_pair.target, input_ids, 40, schedule, engine=engine)
    assert len(generation.tokens) == 40 == 1 + sum(generation.accepted) + len(generation.accepted)
    assert generation.tokens == autoregressive_generate(tiny_pair.target, input_ids, 40).tokens
    assert all(a <= p for a, p in zip(generation.accepted, generation.proposed))


@BOTH_ENGINES
@pytest.mark.parametrize("place", range(10))
def test_output_ends_right_after_an_eos_wherever_it_stands_in_the_block(target, prompt, engine, place):
    baseline = autoregressive_generate(target, prompt, 40).tokens
    first = baseline.index(baseline[place])
    generation = speculative_generate(target, target, prompt, 40, 8, engine=engine, eos_token_id=baseline[place])
    assert generation.tokens == baseline[: first + 1]
    assert len(generation.tokens) == 1 + sum(generation.accepted) + len(generation.accepted)
    assert generation.acceptance_rate in (1.0, None), "what was proposed after the end is not counted"
    plain = autoregressive_generate(target, prompt, 40, engine=engine, eos_token_id={baseline[place], 299})
    assert plain.tokens == generation.tokens


def test_an_eos_that_is_a_correction_ends_the_output_too(target, prompt):
    baseline = autoregressive_generate(target, prompt, 40).tokens
    wrong = ScriptedDraft(baseline, prompt.shape[1], lambda place: place != 5)
    generation = speculative_generate(wrong, target, prompt, 40, 8, eos_token_id=baseline[5])
    assert generation.tokens == baseline[:6]
    assert generation.proposed == [8]
    assert generation.accepted == [4]


@BOTH_ENGINES
def test_the_draft_cache_holds_committed_tokens_only_and_never_falls_behind(tiny_pair, engine, monkeypatch):
    lags = []
    original = ModelDraft.sync

    def watched(self, text, proposed, path):
        yield from original(self, text, proposed, path)
        lags.append(len(text) - 1 - self.cached.cache.length)

    monkeypatch.setattr(ModelDraft, "sync", watched)
    input_ids = encode(tiny_pair, PROMPTS[4].text)
    generation = speculative_generate(tiny_pair.draft, tiny_pair.target, input_ids, 200, 4, engine=engine)
    full = [a == p for a, p in zip(generation.accepted, generation.proposed)][:-1]
    assert any(full)
    assert not all(full)
    # published re-runs the draft, so it is level; fast leaves the last of a fully accepted block to the next pass
    assert lags == [int(engine == "fast" and all_accepted) for all_accepted in full]


def test_both_engines_accept_the_same_tokens_to_the_end_of_a_long_text(tiny_pair):
    input_ids = encode(tiny_pair, PROMPTS[4].text)
    runs = [
        speculative_generate(tiny_pair.draft, tiny_pair.target, input_ids, 200, 4, engine=engine) for engine in ENGINES
    ]
    assert runs[0].accepted == runs[1].accepted
    assert runs[0].tokens == runs[1].tokens


def test_published_reforwards_the_draft_once_per_step_but_not_after_the_last(target, prompt, monkeypatch):
    widths = []
    original = type(target).forward

    def counted(self, token_ids, *args, **kwargs):
        widths.append(token_ids.shape[1])
        return original(self, token_ids, *args, **kwargs)

    monkeypatch.setattr(type(target), "forward", counted)
    draft = make_model(layers=3, hidden=64, seed=0)  # the target's weights, so all is accepted
    speculative_generate(draft, target, prompt, 10, 2, engine="published")
    # both prefills, then per step: two draft passes, the target's, and the sync over the step's 3 tokens
    assert widths == [20, 20] + [1, 1, 3, 3] * 2 + [1, 1, 3]
    widths.clear()
    speculative_generate(draft, target, prompt, 10, 2, engine="fast")
    assert widths == [20, 20] + [1, 1, 3] + [2, 1, 3] * 2  # no sync; the first pass catches up
    widths.clear()
    speculative_generate(draft, target, prompt, 6, lambda history: len(history.accepted) % 2, engine="published")
    # steps that propose nothing feed the target alone; the next draft pass reads the token that came meanwhile
    assert widths == [20, 20] + [1] + [2, 2, 2] + [1] + [1]


@BOTH_ENGINES
def test_no_position_beyond_the_context_is_ever_fed(engine, monkeypatch):
    model = make_model(layers=2, hidden=64, seed=0, positions=64)
    input_ids = torch.randint(1, 300, (1, 58), generator=torch.Generator().manual_seed(3))
    ends = []
    original = type(model).forward

    def watched(self, token_ids, mask, positions, cache, **kwargs):
        ends.append(cache.get_seq_length() + token_ids.shape[1])
        return original(self, token_ids, mask, positions, cache, **kwargs)

    monkeypatch.setattr(type(model), "forward", watched)
    baseline = autoregressive_generate(model, input_ids, 6, engine=engine)
    generation = speculative_generate(model, model, input_ids, 6, 8, engine=engine)
    assert generation.tokens == baseline.tokens
    assert len(generation.tokens) == 6
    assert max(ends) < 64


@pytest.mark.parametrize("prompt_tokens, new_tokens", [(58, 7), (70, 1)])
def test_a_request_beyond_the_context_is_refused_with_its_numbers(prompt_tokens, new_tokens):
    model = make_model(layers=1, hidden=32, seed=0, positions=64)
    input_ids = torch.ones(1, prompt_tokens, dtype=torch.long)
    with pytest.raises(ValueError, match=f"{prompt_tokens} prompt tokens .* {new_tokens} new tokens exceed the 64"):
        speculative_generate(model, model, input_ids, new_tokens, 8)


@pytest.mark.parametrize("gamma", [-1, 1.5, "4", None, True])
def test_a_gamma_that_is_no_count_is_refused(target, prompt, gamma):
    with pytest.raises(ValueError, match="gamma must be an integer >= 0"):
        speculative_generate(target, target, prompt, 4, gamma)


@pytest.mark.parametrize(
    "changed, message",
    [
        ({"max_new_tokens": -1}, "max_new_tokens must be >= 0"),
        ({"input_ids": torch.ones(2, 3, dtype=torch.long)}, r"shape \(1, n\)"),
        ({"input_ids": torch.ones(1, 0, dtype=torch.long)}, r"shape \(1, n\)"),
        ({"temperature": 0.5}, "temperature 0.5 draws tokens and needs a torch.Generator"),
        ({"temperature": -0.5}, "temperature must be a finite number >= 0"),
        ({"temperature": math.nan}, "temperature must be a finite number >= 0"),
        ({"temperature": math.inf}, "temperature must be a finite number >= 0"),
        ({"engine": "warp"}, "unknown engine 'warp'; known: published, fast"),
    ],
)
def test_arguments_outside_the_contract_are_refused(target, prompt, changed, message):
    arguments = {"input_ids": prompt, "max_new_tokens": 4, "gamma": 2} | changed
    with pytest.raises(ValueError, match=message):
        speculative_generate(target, target, **arguments)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("who", ["draft", "target"])
def test_logits_that_are_not_finite_stop_the_run_and_name_the_model(prompt, who, bad):
    models = {name: make_model(layers=1, hidden=32, seed=0) for name in ("draft", "target")}
    for name, model in models.items():
        model.display_name = f"the {name}"
    head, calls = models[who].lm_head, itertools.count()

    def spoil(hidden):
        logits = torch.nn.functional.linear(hidden, head.weight)
        return logits if next(calls) == 0 else logits.index_fill(-1, torch.tensor([7]), bad)  # the prefill is sound

    head.forward = spoil
    with pytest.raises(NonFiniteLogitsError, match=f"the {who} gave NaN or infinite logits in step 1"):
        speculative_generate(models["draft"], models["target"], prompt, 8, 2)


@BOTH_ENGINES
def test_equal_logits_go_to_the_lowest_id(prompt, engine):
    model = make_model(layers=1, hidden=32, seed=0)
    model.lm_head.forward = lambda hidden: torch.zeros(*hidden.shape[:2], 300).index_fill(
        -1, torch.tensor([11, 7, 250]), 1.0
    )
    assert speculative_generate(model, model, prompt, 6, 2, engine=engine).tokens == [7] * 6


def test_greedy_decoding_draws_nothing(draft, target, prompt):
    generator = torch.Generator().manual_seed(5)
    before, own_before = torch.get_rng_state(), generator.get_state()
    speculative_generate(draft, target, prompt, 8, 2, generator=generator)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(generator.get_state(), own_before)


@BOTH_ENGINES
def test_phases_add_up_to_the_steps_and_steps_to_the_decode_time(draft, target, prompt, engine):
    clock = timing.PhaseClock()
    generation = speculative_generate(draft, target, prompt, 32, 2, engine=engine, clock=clock)
    assert len(generation.step_seconds) == len(generation.accepted)
    for step in generation.step_seconds:
        assert step["step"] == pytest.approx(sum(step.get(name, 0.0) for name in (*timing.PHASES, "other")))
        assert min(step.values()) >= 0
    decode = generation.wall_time - generation.prefill_time
    assert 0.5 * decode < generation.phase_seconds["step"] <= decode
    assert "sync" not in generation.step_seconds[-1], "nothing is synced after the last step"


def test_every_clock_edge_waits_for_the_device(draft, target, prompt, monkeypatch):
    waited = []
    monkeypatch.setattr(timing, "synchronize", waited.append)
    generation = speculative_generate(draft, target, prompt, 16, 2)
    assert waited == [draft.device, target.device] * 3  # start, end of prefill, end
    waited.clear()
    clocked = speculative_generate(draft, target, prompt, 16, 2, clock=timing.PhaseClock())
    phases = sum(len([name for name in step if name in timing.PHASES]) for step in clocked.step_seconds)
    edges = 3 + 2 * len(generation.accepted) + 2 * phases
    assert waited == [draft.device, target.device] * edges
