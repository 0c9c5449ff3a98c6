"""How tokens are chosen and which proposed ones are accepted: greedy match, or rejection sampling.

The functions are pure: tensors in, tensors or lists out. A :class:`Greedy` or :class:`Sampled` rule bundles those that
one request uses; the draft chooses by the same rule as the target.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from specdec.errors import InputError


@dataclass(frozen=True)
class Proposal:
    """A tree of proposed tokens: node i is ``tokens[i]`` and continues node ``parents[i]``.

    ``tokens``: (n,) LongTensor on the draft's device. ``parents``: n indices below their own; -1 is the newest
    committed token, so a chain has the parents -1, 0, 1, ... ``probabilities``: (n, vocab) float32, the distribution
    that each token was drawn from; None where it was not drawn but chosen.
    """

    tokens: torch.Tensor
    parents: list[int]
    probabilities: torch.Tensor | None = None

    @classmethod
    def chain(cls, tokens: torch.Tensor, probabilities: torch.Tensor | None = None) -> Proposal:
        """Return the proposal in which each token continues the one before it."""
        return cls(tokens, list(range(-1, tokens.numel() - 1)), probabilities)

    @property
    def depth(self) -> int:
        """Tokens on the longest path: the most that can be accepted."""
        depths: list[int] = []
        for parent in self.parents:
            depths.append(1 if parent < 0 else depths[parent] + 1)
        return max(depths, default=0)

    @classmethod
    def nothing(cls) -> Proposal:
        """Return the empty proposal."""
        return cls.chain(torch.empty(0, dtype=torch.long))


@dataclass(frozen=True)
class Verdict:
    """The accepted nodes of a proposal, from the root down, and the tokens that follow from them.

    ``tokens`` are those of the nodes in ``path`` and, last, the target's own: a correction or a bonus token.
    """

    path: list[int]
    tokens: list[int]


# --- Greedy ----------------------------------------------------------------------------------------------------------


def follow_choices(tokens: Sequence[int], parents: Sequence[int], choices: Sequence[int]) -> Verdict:
    """Follow the target's choices through a proposal (Leviathan et al. 2023, section 2, at temperature 0).

    ``tokens`` and ``parents`` (n each) describe the proposal as in :class:`Proposal`. ``choices`` (n + 1) are the
    target's: first after the newest committed token, then after each node. In a chain this accepts the longest
    agreeing prefix.
    """
    path: list[int] = []
    here = -1
    for node, (token, parent) in enumerate(zip(tokens, parents, strict=True)):
        if parent == here and token == choices[here + 1]:
            path.append(node)
            here = node
    return Verdict(path, [tokens[node] for node in path] + [choices[here + 1]])


class Greedy:
    """Temperature 0: the likeliest token, ties to the lowest id. Draws nothing."""

    def choose(self, logits: torch.Tensor) -> tuple[torch.Tensor, None]:
        """Return the token after each row of ``logits``, (rows,), and no distribution."""
        return logits.argmax(-1), None

    def decide(self, proposal: Proposal, logits: torch.Tensor) -> torch.Tensor:
        """Return on the device what :meth:`verdict` needs. ``logits``: (n + 1, vocab), the target's."""
        return torch.cat([proposal.tokens.to(logits.device), logits.argmax(-1)])

    def verdict(self, proposal: Proposal, decided: Sequence[int]) -> Verdict:
        """Return the verdict from what :meth:`decide` gave, now on the host."""
        count = len(proposal.parents)
        return follow_choices(decided[:count], proposal.parents, decided[count:])


# --- Rejection sampling ----------------------------------------------------------------------------------------------


def distribution(logits: torch.Tensor, temperature: float) -> torch.Tensor:
    """Return softmax(logits / temperature) in float32, (..., vocab); a tiny temperature gives the greedy choice."""
    logits = logits.float()
    least = torch.finfo(torch.float32).tiny  # a smaller divisor would be rounded to 0
    return ((logits - logits.amax(-1, keepdim=True)) / max(temperature, least)).softmax(-1)


def draw(probabilities: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """Return one token per row, (rows,), by inversion.

    ``probabilities``: (rows, vocab), need not be normalised. ``uniform``: (rows,) in [0, 1). A token of probability 0
    is never drawn.
    """
    wide = torch.float32 if probabilities.device.type == "mps" else torch.float64  # MPS has no float64
    cumulative = probabilities.cumsum(-1, dtype=wide)
    threshold = uniform.to(cumulative).unsqueeze(-1) * cumulative[:, -1:]
    return torch.searchsorted(cumulative, threshold, right=True).squeeze(-1)


def residual(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """Return norm(max(0, p - q)), (..., vocab), to draw from after a rejection (Leviathan et al. 2023, section 2.3).

    Where p equals q nothing is left, and p itself is returned: a rejection there is rounding alone.
    """
    left = (p - q).clamp_min(0)
    total = left.sum(-1, keepdim=True)
    return torch.where(total > 0, left / total.clamp_min(torch.finfo(left.dtype).tiny), p)


def accept_sampled(
    tokens: torch.Tensor, p: torch.Tensor, q: torch.Tensor, uniform: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Accept a chain's tokens with probability min(1, p / q) and draw the token after them (Chen et al. 2023, alg. 2).

    ``tokens``: (n,), drawn from the rows of ``q`` (n, vocab). ``p``: (n + 1, vocab). ``uniform``: (n + 1,) in [0, 1).
    Returns the accepted count, a scalar, and the next token, (1,): from the residual after a rejection, else from p.
    """
    places = tokens.unsqueeze(-1)
    # u < p / q without the division; equality must reject where p is 0
    accepted = uniform[:-1] * q.gather(-1, places).squeeze(-1) < p[:-1].gather(-1, places).squeeze(-1)
    count = accepted.long().cumprod(0).sum()
    after = count.unsqueeze(0)
    no_proposal = torch.zeros_like(p[:1])  # after full acceptance nothing was proposed: the residual is p
    row = residual(p.index_select(0, after), torch.cat([q, no_proposal]).index_select(0, after))
    return count, draw(row, uniform[-1:])


@dataclass(frozen=True)
class Sampled:
    """Temperature above 0: the output has the distribution of sampling from the target alone.

    ``generator`` may be on any device; uniform numbers are drawn there and moved.
    """

    temperature: float
    generator: torch.Generator

    def choose(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return a drawn token after each row of ``logits``, (rows,), and the distributions, (rows, vocab)."""
        probabilities = distribution(logits, self.temperature)
        return draw(probabilities, self._uniform(len(logits), logits.device)), probabilities

    def decide(self, proposal: Proposal, logits: torch.Tensor) -> torch.Tensor:
        """Return on the device what :meth:`verdict` needs. ``logits``: (n + 1, vocab), the target's."""
        p = distribution(logits, self.temperature)
        tokens = proposal.tokens.to(p.device)
        uniform = self._uniform(len(p), p.device)
        if proposal.probabilities is None:  # a draw from p that happens to be proposed is accepted: p exactly
            return torch.cat([tokens, draw(p, uniform)])
        count, token = accept_sampled(tokens, p, proposal.probabilities.to(p.device), uniform)
        return torch.cat([tokens, count.unsqueeze(0), token])

    def verdict(self, proposal: Proposal, decided: Sequence[int]) -> Verdict:
        """Return the verdict from what :meth:`decide` gave, now on the host."""
        if proposal.probabilities is None:
            nodes = len(proposal.parents)
            return follow_choices(decided[:nodes], proposal.parents, decided[nodes:])
        *tokens, count, token = decided
        return Verdict(list(range(count)), [*tokens[:count], token])

    def _uniform(self, count: int, device: torch.device) -> torch.Tensor:
        return torch.rand(count, generator=self.generator, device=self.generator.device).to(device)


Rule = Greedy | Sampled


def choose_rule(temperature: float, generator: torch.Generator | None) -> Rule:
    """Return the rule for a temperature >= 0. InputError for others, and for sampling without a generator."""
    if not 0 <= temperature < float("inf"):
        raise InputError(f"temperature must be a finite number >= 0, got {temperature}")
    if temperature == 0:
        return Greedy()
    if generator is None:
        raise InputError(f"temperature {temperature} draws tokens and needs a torch.Generator")
    return Sampled(temperature, generator)
