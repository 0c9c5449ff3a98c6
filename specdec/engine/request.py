"""One request: what was asked for, and how far it has come."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import torch

from specdec.engine.verification import Rule
from specdec.schedules import History


@dataclass
class Request:
    """The prompt, the budget, how tokens are chosen; ``text`` is the prompt and all committed tokens."""

    input_ids: torch.Tensor  # (1, n)
    max_new_tokens: int
    rule: Rule
    eos_token_id: int | Collection[int] | None = None

    def __post_init__(self) -> None:
        self.text: list[int] = self.input_ids[0].tolist()
        self.history = History(prompt_tokens=len(self.text))
        eos = self.eos_token_id
        self.eos_ids = frozenset([eos] if isinstance(eos, int) else eos or ())

    @property
    def capacity(self) -> int:
        """The most tokens that a cache must hold."""
        return self.history.prompt_tokens + self.max_new_tokens

    @property
    def new_tokens(self) -> list[int]:
        return self.text[self.history.prompt_tokens :]

    @property
    def remaining(self) -> int:
        """Tokens still to come: 0 once the budget is spent or the newest token is an EOS."""
        return 0 if self.text[-1] in self.eos_ids else self.capacity - len(self.text)

    def commit(self, tokens: list[int], proposed: int) -> None:
        """Take a step's accepted tokens and the target's own token after them, at most up to the first EOS.

        An accepted EOS ends the step in place of the target's own token; what was proposed from it on is not counted.
        """
        for place, token in enumerate(tokens[:-1]):
            if token in self.eos_ids:
                tokens, proposed = tokens[: place + 1], place
                break
        self.text.extend(tokens)
        self.history.proposed.append(proposed)
        self.history.accepted.append(len(tokens) - 1)
