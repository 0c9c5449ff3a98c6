"""How many tokens to propose next: pure functions of one request's history.

A schedule is any callable that takes a :class:`History` and returns gamma (an int >= 0). The decoding loop and the
trace replay call it the same way, so that a schedule can be judged without running a model.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field


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
        return sum(accepted < proposed for proposed, accepted in zip(self.proposed, self.accepted, strict=True))

    @property
    def tried(self) -> int:
        """Proposed tokens that were compared at all: those accepted and the first rejected one of each step."""
        return sum(self.accepted) + self.rejections


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
