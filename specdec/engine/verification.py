"""Which proposed tokens are accepted: pure functions of token ids."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Verdict:
    """The accepted nodes of a proposal, from the root down, and the tokens that follow from them.

    ``tokens`` are those of the nodes in ``path`` and, last, the target's own: a correction or a bonus token.
    """

    path: list[int]
    tokens: list[int]


def verify_greedy(tokens: Sequence[int], parents: Sequence[int], choices: Sequence[int]) -> Verdict:
    """Follow the target's greedy choices through a proposal (Leviathan et al. 2023, section 2, at temperature 0).

    ``tokens`` and ``parents`` (n each) describe the proposal: node i continues node ``parents[i]`` < i, or the newest
    committed token where that is -1. ``choices`` (n + 1) are the target's: first after the newest committed token,
    then after each node. In a chain this accepts the longest agreeing prefix.
    """
    path: list[int] = []
    here = -1
    for node, (token, parent) in enumerate(zip(tokens, parents, strict=True)):
        if parent == here and token == choices[here + 1]:
            path.append(node)
            here = node
    return Verdict(path, [tokens[node] for node in path] + [choices[here + 1]])
