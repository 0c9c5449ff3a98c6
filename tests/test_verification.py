"""Greedy verification accepts the path that the target itself would take."""

from __future__ import annotations

import pytest

from specdec.engine.verification import follow_choices

CHAIN = [-1, 0, 1]
TREE = [-1, -1, 0, 0, 1, 1, 3]  # two first tokens, two continuations each, one leaf under node 3


@pytest.mark.parametrize(
    "choices, accepted",
    [([9, 9, 9, 9], 0), ([1, 9, 3, 9], 1), ([1, 2, 9, 9], 2), ([1, 2, 3, 9], 3), ([9, 2, 3, 9], 0)],
)
def test_a_chain_is_accepted_up_to_its_first_disagreement(choices, accepted):
    verdict = follow_choices([1, 2, 3], CHAIN, choices)
    assert verdict.path == list(range(accepted))
    assert verdict.tokens == [1, 2, 3][:accepted] + [choices[accepted]]


@pytest.mark.parametrize(
    "choices, path",
    [
        ([9, 0, 0, 0, 0, 0, 0, 0], []),
        ([1, 9, 0, 0, 0, 0, 0, 0], [0]),
        ([1, 4, 0, 0, 7, 0, 0, 8], [0, 3, 6]),
        ([2, 0, 6, 0, 0, 0, 5, 0], [1, 5]),
        ([2, 3, 5, 0, 0, 9, 0, 0], [1, 4]),
        ([2, 0, 3, 0, 0, 0, 0, 0], [1]),  # token 3 is proposed, but on the other branch
    ],
)
def test_a_tree_is_followed_along_the_targets_choices(choices, path):
    tokens = [1, 2, 3, 4, 5, 6, 7]
    verdict = follow_choices(tokens, TREE, choices)
    assert verdict.path == path
    assert verdict.tokens[:-1] == [tokens[node] for node in path]
    assert verdict.tokens[-1] == choices[path[-1] + 1 if path else 0]


def test_an_empty_proposal_gives_the_targets_token():
    verdict = follow_choices([], [], [42])
    assert (verdict.path, verdict.tokens) == ([], [42])
