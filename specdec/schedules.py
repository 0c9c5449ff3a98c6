"""How many tokens to propose next: pure functions of one request's history.

A schedule is any callable that takes a :class:`History` and returns gamma (an int >= 0). The decoding loop and the
trace replay call it the same way, so that a schedule can be judged without running a model.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace


@dataclass
class History:
    """What one request has done so far: per step the tokens proposed and accepted. A new request starts a new one."""

    prompt_tokens: int
    proposed: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)

    @property
    def new_tokens(self) -> int:
        """Tokens committed after the prompt: the prefill's, the accepted ones, and one per step."""
        return 1 + sum(self.accepted) + len(self.accepted)

    @property
    def rejections(self) -> int:
        """Steps in which a proposed token was rejected."""
        return rejections(self.proposed, self.accepted)

    @property
    def tried(self) -> int:
        """Proposed tokens that were compared at all: those accepted and the first rejected one of each step."""
        return sum(self.accepted) + self.rejections


def rejections(proposed: Sequence[int], accepted: Sequence[int]) -> int:
    """Return in how many steps a proposed token was rejected, both (steps,)."""
    return sum(taken < asked for asked, taken in zip(proposed, accepted, strict=True))


Schedule = Callable[[History], int]


@dataclass(frozen=True)
class FixedGamma:
    """Propose the same number of tokens at every step; 0 is plain decoding."""

    gamma: int

    def __post_init__(self) -> None:
        if isinstance(self.gamma, bool) or not isinstance(self.gamma, int) or self.gamma < 0:
            raise ValueError(f"gamma must be an integer >= 0, got {self.gamma!r}")

    def __call__(self, history: History) -> int:
        return self.gamma


def as_schedule(gamma: int | Schedule) -> Schedule:
    """Return ``gamma`` itself if it is a schedule, else the fixed schedule of that many tokens."""
    return gamma if callable(gamma) else FixedGamma(gamma)


@dataclass(frozen=True)
class AdaptiveGamma:
    """The second document's rule: min(gamma_max, floor(1 / (1 - agreement))), from this request's history alone.

    Agreement is alpha so far, so 1 / (1 - agreement) = tried / rejections, computed in integers. ``gamma_max`` while
    nothing was rejected, half of it before anything was tried, and never 0.
    """

    gamma_max: int = 8

    def __call__(self, history: History) -> int:
        if not history.tried:
            return max(1, self.gamma_max // 2)
        if not history.rejections:
            return self.gamma_max
        return max(1, min(self.gamma_max, history.tried // history.rejections))


@dataclass(frozen=True)
class ForwardCosts:
    """What forwards cost at some cache lengths, in one unit of time.

    ``lengths``: ascending cache lengths. ``draft``: a draft forward over one token at each of them. ``target``: at each
    of them the target's forward over 1, 2, ... tokens. Between lengths costs are interpolated, outside they are the
    nearest one's.
    """

    lengths: tuple[int, ...]
    draft: tuple[float, ...]
    target: tuple[tuple[float, ...], ...]

    @property
    def gamma_max(self) -> int:
        """The largest gamma whose target forward was measured."""
        return min(len(costs) for costs in self.target) - 1

    def steps(self, length: int) -> list[float]:
        """Return what steps that propose 0, 1, ... gamma_max tokens cost with ``length`` tokens in the cache."""
        left, right, share = self._between(length)
        draft = self.draft[left] + share * (self.draft[right] - self.draft[left])
        target = zip(self.target[left], self.target[right], strict=False)
        return [gamma * draft + low + share * (high - low) for gamma, (low, high) in enumerate(target)]

    def step(self, gamma: int, length: int) -> float:
        """Return what a step that proposes ``gamma`` tokens costs with ``length`` tokens in the cache."""
        return self.steps(length)[gamma]

    def _between(self, length: int) -> tuple[int, int, float]:
        """Return the places of the lengths around ``length``, and how far it lies between them (0 to 1)."""
        right = bisect_left(self.lengths, length)
        if right in (0, len(self.lengths)):
            nearest = min(right, len(self.lengths) - 1)
            return nearest, nearest, 0.0
        low, high = self.lengths[right - 1], self.lengths[right]
        return right - 1, right, (length - low) / (high - low)


@dataclass(frozen=True)
class CostAwareGamma:
    """Propose as many tokens as give the most tokens per time, by this request's alpha so far and measured costs.

    gamma = argmax (1 + a + ... + a^gamma) / (gamma T_draft + T_target(gamma + 1)) with the costs at the present cache
    length. It may be 0, plain decoding; then one token is proposed every ``probe_every`` tokens, so that a request that
    becomes predictable is noticed. ``prior_alpha`` counts like ``prior_tried`` tokens tried before the request began.
    Later tokens count more: what was tried n tokens earlier weighs ``memory`` to the n.
    """

    costs: ForwardCosts
    prior_alpha: float = 0.5
    prior_tried: float = 5.0
    memory: float = 0.98
    probe_every: int = 16

    def __call__(self, history: History) -> int:
        best = self.best_gamma(self.alpha(history), history.prompt_tokens + history.new_tokens)
        return best or int(self._due_for_a_probe(history))

    def alpha(self, history: History) -> float:
        """Return the expected acceptance of the next proposed token."""
        accepted, tried = self.prior_alpha * self.prior_tried, self.prior_tried
        for proposed, taken in zip(history.proposed, history.accepted, strict=True):
            if proposed:
                now_tried = min(taken + 1, proposed)
                fading = self.memory**now_tried
                accepted, tried = accepted * fading + taken, tried * fading + now_tried
        return accepted / tried

    def best_gamma(self, alpha: float, length: int) -> int:
        """Return the gamma with the most expected tokens per time; the smallest of equals."""
        best, most, tokens, chance = 0, 0.0, 0.0, 1.0
        for gamma, cost in enumerate(self.costs.steps(length)):
            tokens += chance  # 1 + alpha + ... + alpha^gamma
            chance *= alpha
            if tokens / cost > most:
                best, most = gamma, tokens / cost
        return best

    def _due_for_a_probe(self, history: History) -> bool:
        since = 0
        for proposed, accepted in zip(reversed(history.proposed), reversed(history.accepted), strict=True):
            if proposed:
                break
            since += accepted + 1
        return since >= self.probe_every


@dataclass
class CompressionAwareGamma:
    """The cost-aware rule within the room that a cache has left, with agreement remembered per compression setting.

    ``room``: tokens that fit into the cache's memory and the model's context, prompt included. How often a draft is
    right depends on how its cache is compressed, so earlier requests with the same ``setting`` are the prior of a new
    one; ``seen`` is the one thing carried from request to request, and only between those of one setting.
    """

    rule: CostAwareGamma
    room: int
    setting: str
    seen: dict[str, list[History]] = field(default_factory=dict)
    most_prior_tried: float = 8.0  # however much was seen, a request's own tokens soon outweigh it

    def __call__(self, history: History) -> int:
        earlier = self.seen.setdefault(self.setting, [])
        if not any(history is known for known in earlier):
            earlier.append(history)
        left = self.room - history.prompt_tokens - history.new_tokens - 1
        return max(0, min(self._rule_for(history, earlier)(history), left))

    def _rule_for(self, history: History, earlier: list[History]) -> CostAwareGamma:
        others = [known for known in earlier if known is not history]
        tried, accepted = sum(known.tried for known in others), sum(sum(known.accepted) for known in others)
        if not tried:
            return self.rule
        return replace(self.rule, prior_alpha=accepted / tried, prior_tried=min(tried, self.most_prior_tried))
