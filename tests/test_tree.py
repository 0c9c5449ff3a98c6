"""Tree speculation: every node is scored as on its own path, and the text is the target's."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.stats
import torch
from stub_models import MarkovModel

from specdec.engine.decoding import speculative_generate
from specdec.engine.drafting import TreeDraft, tree_nodes
from specdec.engine.engines import ENGINES, get_engine
from specdec.engine.masks import tree_mask
from specdec.engine.pair import encode
from specdec.errors import InputError
from specdec.prompts import PROMPTS

BOTH_ENGINES = pytest.mark.parametrize("engine", sorted(ENGINES))
PARENTS = [-1, -1, 0, 0, 1, 1, 2, 3, 4, 5]  # the tree 2-2-1
PATHS = [[0], [1], [0, 2], [0, 3], [1, 4], [1, 5], [0, 2, 6], [0, 3, 7], [1, 4, 8], [1, 5, 9]]  # root to each node
RUNS = 10_000
FALSE_ALARM = 1e-4


@BOTH_ENGINES
@torch.inference_mode()
def test_each_nodes_logits_are_those_of_a_plain_forward_over_its_own_path(target, prompt, engine):
    nodes = torch.randint(1, 300, (10,), generator=torch.Generator().manual_seed(4))
    cached = get_engine(engine).open(target, 64)
    cached.feed(prompt[0])
    logits = cached.feed(nodes, logits_to_keep=0, parents=PARENTS)
    for node, path in enumerate(PATHS):
        plain = target(torch.cat([prompt[0], nodes[path]]).unsqueeze(0)).logits[0, -1]
        assert (logits[node] - plain).abs().max() < 1e-4


@torch.inference_mode()
def test_a_tree_fed_level_by_level_is_scored_as_one_fed_at_once(target, prompt):
    nodes = torch.randint(1, 300, (10,), generator=torch.Generator().manual_seed(4))
    whole, stepwise = (get_engine("fast").open(target, 64) for _ in range(2))
    for cached in (whole, stepwise):
        cached.feed(prompt[0])
    expected = whole.feed(nodes, logits_to_keep=0, parents=PARENTS)
    for first, last in ((0, 2), (2, 6), (6, 10)):
        logits = stepwise.feed(nodes[first:last], logits_to_keep=0, parents=PARENTS[:last])
        assert torch.allclose(logits, expected[first:last], atol=1e-4)


def test_positions_go_by_depth_and_a_node_sees_its_ancestors_only():
    mask, depths = tree_mask(PARENTS, 2, torch.float32, torch.device("cpu"))
    assert depths.tolist() == [0, 0, 1, 1, 1, 1, 2, 2, 2, 2]
    seen = [[place for place, value in enumerate(row) if value == 0] for row in mask[0, 0].tolist()]
    assert seen == [[0, 1, *(2 + node for node in path)] for path in PATHS]


@BOTH_ENGINES
def test_the_tree_gives_the_baselines_tokens_on_all_eight_prompts(tiny_pair, greedy_text, engine):
    for prompt in PROMPTS:
        input_ids = encode(tiny_pair, prompt)
        draft = TreeDraft(tiny_pair.draft, get_engine(engine), (2, 2, 1))
        generation = speculative_generate(draft, tiny_pair.target, input_ids, 32, 3, engine=engine)
        assert generation.tokens == greedy_text(prompt, engine)[:32]
        assert 0 < sum(generation.accepted) < sum(generation.proposed)


def test_a_tree_of_one_branch_is_the_chain(draft, target, prompt):
    chain = speculative_generate(draft, target, prompt, 40, 3, engine="fast")
    tree = speculative_generate(TreeDraft(draft, get_engine("fast"), (1, 1, 1)), target, prompt, 40, 3, engine="fast")
    assert (tree.tokens, tree.proposed, tree.accepted) == (chain.tokens, chain.proposed, chain.accepted)


def test_more_branches_accept_at_least_as_much_per_step(tiny_pair):
    def tokens_per_step(branching) -> float:
        steps = accepted = 0
        for prompt in PROMPTS:
            draft = TreeDraft(tiny_pair.draft, get_engine("fast"), branching)
            generation = speculative_generate(
                draft, tiny_pair.target, encode(tiny_pair, prompt), 32, len(branching), engine="fast"
            )
            steps, accepted = steps + len(generation.accepted), accepted + sum(generation.accepted)
        return 1 + accepted / steps

    assert tokens_per_step((3, 2, 1)) > tokens_per_step((2, 1, 1)) > tokens_per_step((1, 1, 1))


def test_the_drafts_cache_keeps_the_accepted_path_and_never_falls_behind(tiny_pair):
    lags = []

    class Watched(TreeDraft):
        def sync(self, text, proposed, path):
            super().sync(text, proposed, path)
            lags.append((len(text) - 1 - self.cached.cache.length, len(path) == proposed))

    draft = Watched(tiny_pair.draft, get_engine("fast"), (2, 2, 1))
    speculative_generate(draft, tiny_pair.target, encode(tiny_pair, PROMPTS[0]), 64, 3, engine="fast")
    assert {lag for lag, full in lags if not full} == {0}
    assert {lag for lag, full in lags if full} == {1}, "the last depth of a tree is never fed to the draft"


def test_sampling_along_a_tree_keeps_the_targets_distribution():
    generator = torch.Generator().manual_seed(5)
    rows = torch.randn(6, 6, generator=torch.Generator().manual_seed(6)) * 1.5
    target, draft = MarkovModel(rows), MarkovModel(rows.flip(0))
    counts = np.zeros((6, 6))
    for _ in range(RUNS):
        tree = TreeDraft(draft, get_engine("fast"), (2, 2))
        tokens = speculative_generate(
            tree, target, torch.tensor([[1, 2]]), 3, 2, engine="fast", temperature=0.9, generator=generator
        ).tokens
        counts[tokens[1], tokens[2]] += 1
    chances = (rows.double() / 0.9).softmax(-1).numpy()
    expected = np.einsum("a,ab,bc->bc", chances[2], chances, chances)
    assert scipy.stats.chisquare(counts.ravel(), expected.ravel() * RUNS).pvalue > FALSE_ALARM


def test_nodes_are_counted_and_an_empty_tree_is_refused(draft):
    assert [tree_nodes(branching) for branching in ((2, 2, 1), (1, 1), (3,))] == [10, 2, 3]
    for branching in ((), (2, 0)):
        with pytest.raises(InputError, match="branch"):
            TreeDraft(draft, get_engine("fast"), branching)
