"""Rejection sampling leaves the target's distribution as it is.

The chi-square tests have fixed seeds; with other seeds each would fail a sound program with probability FALSE_ALARM.
"""

from __future__ import annotations

import numpy as np
import pytest
import scipy.stats
import torch
from stub_models import MarkovModel

from specdec.engine.decoding import autoregressive_generate, speculative_generate, speculative_generate_batch
from specdec.engine.verification import Proposal, Sampled, accept_sampled, distribution, draw, residual

FALSE_ALARM = 1e-4
RUNS = 100_000  # of the loop, over both gammas
VOCAB = 4
PROMPT = torch.tensor([[1]])


def table(seed: int) -> torch.Tensor:
    return torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(seed))


def chi_square_p(counts: np.ndarray, expected: np.ndarray) -> float:
    """Return the p-value of ``counts`` under ``expected``, cells that expect fewer than five put together."""
    counts, expected = np.asarray(counts, float).ravel(), np.asarray(expected, float).ravel()
    expected = expected * counts.sum() / expected.sum()
    rare = expected < 5
    if rare.any():
        counts = np.append(counts[~rare], counts[rare].sum())
        expected = np.append(expected[~rare], expected[rare].sum())
    return scipy.stats.chisquare(counts, expected).pvalue


# --- Pure functions --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "p, q, expected",
    [
        ([0.2, 0.3, 0.5], [0.2, 0.3, 0.5], [0.2, 0.3, 0.5]),  # nothing left: p itself
        ([0.0, 1.0, 0.0], [0.0, 1.0, 0.0], [0.0, 1.0, 0.0]),
        ([0.5, 0.5, 0.0], [1.0, 0.0, 0.0], [0.0, 1.0, 0.0]),
        ([0.1, 0.6, 0.3], [0.5, 0.4, 0.1], [0.0, 0.5, 0.5]),
        ([0.1, 0.6, 0.3], [0.0, 0.0, 0.0], [0.1, 0.6, 0.3]),
    ],
)
def test_the_residual_is_what_p_has_beyond_q(p, q, expected):
    assert torch.allclose(residual(torch.tensor(p), torch.tensor(q)), torch.tensor(expected))


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_residual_of_almost_nothing_is_still_a_distribution(dtype):
    p = torch.tensor([0.25, 0.25, 0.5], dtype=dtype)
    for difference in (1e-9, 1e-12, 1e-30, 0.0):
        q = p + torch.tensor([difference, -difference, 0.0], dtype=dtype)
        rest = residual(p, q)
        assert torch.isfinite(rest).all()
        assert rest.sum().item() == pytest.approx(1.0)


def test_a_draw_never_takes_a_token_of_probability_zero():
    row = torch.tensor([[0.0, 0.25, 0.0, 0.75, 0.0]])
    edges = torch.tensor([0.0, 0.2499999, 0.25, 0.9999999])
    assert [draw(row, edge.reshape(1)).item() for edge in edges] == [1, 1, 3, 3]


@pytest.mark.parametrize("temperature", [1e-6, 1e-30, 1e-45])
def test_a_tiny_temperature_is_the_greedy_choice(temperature):
    row = distribution(torch.tensor([[1.0, 3.0, 2.999]]), temperature)
    assert torch.equal(row, torch.tensor([[0.0, 1.0, 0.0]]))


def test_a_token_that_the_target_never_takes_is_always_rejected():
    p, q = torch.tensor([[0.0, 1.0], [0.5, 0.5]]), torch.tensor([[1.0, 0.0]])
    for uniform in (0.0, 0.5, 0.999):
        count, token = accept_sampled(torch.tensor([0]), p, q, torch.tensor([uniform, 0.3]))
        assert (count.item(), token.item()) == (0, 1)


def test_equal_distributions_accept_everything():
    p = torch.tensor([[0.3, 0.7]] * 4)
    uniform = torch.tensor([0.0, 0.5, 0.9999999, 0.2])
    count, _ = accept_sampled(torch.tensor([0, 1, 0]), p, p[:3], uniform)
    assert count.item() == 3


def test_a_chosen_token_counts_as_drawn_with_certainty():
    rule = Sampled(1.0, torch.Generator().manual_seed(0))
    logits = torch.log(torch.tensor([[0.25, 0.75], [0.5, 0.5]]))
    proposal = Proposal.chain(torch.tensor([0]))  # no distribution: accepted with probability p, else the other one
    tokens = [rule.verdict(proposal, rule.decide(proposal, logits).tolist()).tokens[0] for _ in range(4000)]
    assert chi_square_p(np.bincount(tokens), np.array([0.25, 0.75])) > FALSE_ALARM


# --- The loop --------------------------------------------------------------------------------------------------------


def joint_of_tokens_two_to_four(target: MarkovModel, temperature: float) -> np.ndarray:
    """Return P(token 2, token 3, token 4) of sampling from the target alone, (vocab, vocab, vocab)."""
    rows = distribution(target.table, temperature).double().numpy()
    first = rows[PROMPT[0, -1]]
    return np.einsum("a,ab,bc,cd->bcd", first, rows, rows, rows)


def counted(runs) -> np.ndarray:
    counts = np.zeros((VOCAB,) * 3)
    for tokens in runs:
        counts[tuple(tokens[1:])] += 1
    return counts


@pytest.mark.parametrize("gamma", [1, 2])
def test_the_loop_samples_the_targets_joint_distribution(gamma):
    target, draft = MarkovModel(table(seed=0)), MarkovModel(table(seed=1))
    generator = torch.Generator().manual_seed(gamma)
    runs = (
        speculative_generate(
            draft, target, PROMPT, 4, gamma, engine="fast", temperature=0.8, generator=generator
        ).tokens
        for _ in range(RUNS // 2)
    )
    assert chi_square_p(counted(runs), joint_of_tokens_two_to_four(target, 0.8)) > FALSE_ALARM


def test_plain_sampling_has_the_same_distribution():
    target, generator = MarkovModel(table(seed=0)), torch.Generator().manual_seed(3)
    runs = (
        autoregressive_generate(target, PROMPT, 4, engine="fast", temperature=0.8, generator=generator).tokens
        for _ in range(RUNS // 20)
    )
    assert chi_square_p(counted(runs), joint_of_tokens_two_to_four(target, 0.8)) > FALSE_ALARM


def test_the_chi_square_sees_a_small_shift():
    expected = joint_of_tokens_two_to_four(MarkovModel(table(seed=0)), 0.8)
    shifted = joint_of_tokens_two_to_four(MarkovModel(table(seed=0)), 0.85)
    counts = np.random.default_rng(0).multinomial(RUNS, shifted.ravel() / shifted.sum())
    assert chi_square_p(counts, expected) < FALSE_ALARM


def test_the_same_seed_gives_the_same_tokens_and_another_seed_others(draft, target, prompt):
    def sample(seed, engine):
        generator = torch.Generator().manual_seed(seed)
        return speculative_generate(
            draft, target, prompt, 20, 3, engine=engine, temperature=1.0, generator=generator
        ).tokens

    assert sample(1, "fast") == sample(1, "fast") == sample(1, "published")
    assert sample(1, "fast") != sample(2, "fast")


@pytest.mark.parametrize("engine", ["published", "fast"])
def test_counts_add_up_and_the_target_as_its_own_draft_is_accepted_when_sampling_too(target, prompt, engine):
    generator = torch.Generator().manual_seed(5)
    generation = speculative_generate(
        target, target, prompt, 40, 4, engine=engine, temperature=0.9, generator=generator
    )
    assert len(generation.tokens) == 40 == 1 + sum(generation.accepted) + len(generation.accepted)
    assert generation.acceptance_rate > 0.95  # p and q differ by rounding alone
    eos = generation.tokens[7]
    generator = torch.Generator().manual_seed(5)
    ended = speculative_generate(
        target, target, prompt, 40, 4, engine=engine, temperature=0.9, generator=generator, eos_token_id=eos
    )
    assert ended.tokens == generation.tokens[: generation.tokens.index(eos) + 1]


def test_a_tiny_temperature_gives_the_greedy_tokens(draft, target, prompt):
    generator = torch.Generator().manual_seed(0)
    cold = speculative_generate(draft, target, prompt, 30, 4, temperature=1e-6, generator=generator)
    assert cold.tokens == autoregressive_generate(target, prompt, 30).tokens


def test_sampling_leaves_the_global_generator_alone(draft, target, prompt):
    before = torch.get_rng_state()
    speculative_generate(draft, target, prompt, 8, 2, temperature=1.0, generator=torch.Generator().manual_seed(0))
    assert torch.equal(torch.get_rng_state(), before)


def test_all_stub_paths_are_reached():
    """The joint distribution means little if a path never ran: rejections, full acceptance, short last steps."""
    target, draft = MarkovModel(table(seed=0)), MarkovModel(table(seed=1))
    generator = torch.Generator().manual_seed(0)
    seen = set()
    for _ in range(300):
        run = speculative_generate(draft, target, PROMPT, 4, 2, temperature=0.8, generator=generator)
        seen |= set(zip(run.proposed, run.accepted))
    assert seen == {(2, 0), (2, 1), (2, 2), (1, 0), (1, 1), (0, 0)}


# --- The embedded pair -----------------------------------------------------------------------------------------------

PAIR_RUNS = 4_000
BATCH = 200  # requests decoded together
REFERENCE_RUNS = 6_000
LIKELIEST = 20  # values counted one by one; all others count as one


@torch.inference_mode()
def reference_tokens(model, input_ids: torch.Tensor, temperature: float) -> np.ndarray:
    """Return (REFERENCE_RUNS, 3) tokens drawn from the target alone, by whole forwards without a cache.

    Equal beginnings share a forward, so that each token is drawn from its exact distribution.
    """
    rng = np.random.default_rng(7)
    texts = np.empty((REFERENCE_RUNS, 0), dtype=np.int64)
    for _ in range(3):
        beginnings, belongs = np.unique(texts, axis=0, return_inverse=True)
        new = np.empty(REFERENCE_RUNS, dtype=np.int64)
        for first in range(0, len(beginnings), 512):
            block = torch.from_numpy(beginnings[first : first + 512])
            whole = torch.cat([input_ids.expand(len(block), -1), block], dim=1)
            rows = (model(whole, logits_to_keep=1).logits[:, -1].double() / temperature).softmax(-1).numpy()
            for place, row in enumerate(rows, start=first):
                members = np.flatnonzero(belongs.ravel() == place)
                new[members] = rng.choice(len(row), size=len(members), p=row / row.sum())
        texts = np.column_stack([texts, new])
    return texts


def test_on_the_embedded_pair_later_tokens_are_distributed_as_the_targets(tiny_pair):
    sampled = sampled_pair(tiny_pair)
    for place in (1, 2):
        tokens, reference = (np.asarray(runs)[:, place] for runs in sampled)
        values, counts = np.unique(reference, return_counts=True)
        likeliest = values[np.argsort(-counts)][:LIKELIEST]
        table = [[(drawn == value).sum() for value in likeliest] for drawn in (tokens, reference)]
        table = np.array([[*row, len(drawn) - sum(row)] for row, drawn in zip(table, (tokens, reference))])
        assert scipy.stats.chi2_contingency(table).pvalue > FALSE_ALARM


def sampled_pair(tiny_pair) -> tuple[list[list[int]], np.ndarray]:
    """Return three tokens of PAIR_RUNS speculative runs at gamma 2, in batches to save time, and of the reference.

    In a batch each request's steps are those of a run alone (``test_batch.py``), with draws of its own.
    """
    input_ids = tiny_pair.tokenizer("The old keeper", return_tensors="pt").input_ids
    generator = torch.Generator().manual_seed(11)
    runs = []
    for _ in range(PAIR_RUNS // BATCH):
        batch = speculative_generate_batch(
            tiny_pair.draft,
            tiny_pair.target,
            [input_ids] * BATCH,
            3,
            2,
            temperature=0.8,
            generators=[generator] * BATCH,
        )
        runs += [generation.tokens for generation in batch]
    return runs, reference_tokens(tiny_pair.target, input_ids, 0.8)
