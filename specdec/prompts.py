"""The eight benchmark prompts: the study's names and six categories, in our own wording.

They were fixed before the embedded pair was trained, and no 8-token window of them occurs in its training text
(``specdec/tiny_pair/train.py`` checks). Changing one therefore means training that pair again.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from specdec.errors import InputError

RESERVED = ("all",)  # stands for all prompts in Phase 3's rows
NAME = re.compile(r"[A-Za-z][\w-]*", re.ASCII)  # names become CSV cells
EXAMPLE = '{"prompt": "my_name", "category": "code", "text": "def f(x):"}'


@dataclass(frozen=True)
class Prompt:
    """One benchmark prompt: a unique name, its category and the text that is continued."""

    name: str
    category: str
    text: str


PROMPTS: tuple[Prompt, ...] = (
    Prompt(
        "code_python",
        "code",
        "def merge_sorted(left, right):\n"
        '    """Merge two sorted lists into one new sorted list."""\n'
        "    merged = []\n"
        "    i = 0\n"
        "    j = 0\n"
        "    while i < len(left) and j < len(right):\n",
    ),
    Prompt(
        "code_cpp",
        "code",
        "#include <cstddef>\n"
        "#include <vector>\n\n"
        "// Returns the position of the first element that is not less than the given value.\n"
        "template <typename T>\n"
        "std::size_t first_not_less(const std::vector<T>& items, const T& value) {\n",
    ),
    Prompt(
        "technical_systems",
        "technical",
        "An operating system gives every process a virtual address space of its own. When a process touches a page "
        "that is not in memory, the processor raises a page fault, and the kernel",
    ),
    Prompt(
        "technical_ai",
        "technical",
        "A neural network that models language reads a sequence of tokens and predicts the one that comes next. "
        "During training, the weights of every layer are adjusted so that",
    ),
    Prompt(
        "creative_story",
        "creative",
        "The old keeper of the lighthouse climbed the stairs one last time. Outside, the storm had already swallowed "
        "the harbour, and in the yellow light of his lamp he",
    ),
    Prompt(
        "factual_science",
        "factual",
        "On the top of a high mountain water boils at a lower temperature than it does at the level of the sea, "
        "because",
    ),
    Prompt(
        "conversational",
        "conversational",
        '"Good morning! I have tried to bake bread all week," said Anna, "but it never rises as it should. '
        'What am I doing wrong?"\n\n"That depends," said her neighbour. "First of all,',
    ),
    Prompt(
        "mathematical",
        "mathematical",
        "Theorem. For every positive integer n, the sum of the first n odd numbers is n squared.\n"
        "Proof. We use induction on n. If n = 1, the sum has only one term, which is 1, and",
    ),
)


def select_prompts(names: Sequence[str], prompt_file: str | None = None) -> list[Prompt]:
    """Return the prompts called ``names``, in that order; with a ``prompt_file`` all of its prompts instead.

    The file has one JSON object a line with ``prompt`` (letters, digits, ``_`` and ``-``), ``category`` and ``text``.
    Raises InputError for an unknown or repeated name, and for a file or line that can't be used.
    """
    if prompt_file is not None:
        return _read_prompt_file(Path(prompt_file))
    known = {prompt.name: prompt for prompt in PROMPTS}
    for name in names:
        if name not in known:
            raise InputError(f"unknown prompt {name!r}; known: {', '.join(known)}")
    return [known[name] for name in names]


def _read_prompt_file(path: Path) -> list[Prompt]:
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")  # not splitlines: JSON may hold other line ends
    except (OSError, ValueError) as error:
        raise InputError(f"prompt file {path} can't be read as UTF-8 text: {error}") from error
    prompts = [_read_prompt(line, f"{path}, line {place}") for place, line in enumerate(lines, 1) if line.strip()]
    if not prompts:
        raise InputError(f"prompt file {path} has no prompt; it takes a JSON object a line: {EXAMPLE}")
    names = [prompt.name for prompt in prompts]
    if len(set(names)) < len(names):
        twice = next(name for place, name in enumerate(names) if name in names[:place])
        raise InputError(f"prompt file {path} has two prompts of the name {twice!r}; each needs its own")
    return prompts


def _read_prompt(line: str, where: str) -> Prompt:
    try:
        entry = json.loads(line)
        prompt = Prompt(entry["prompt"], entry["category"], entry["text"])
        " ".join(map(str, entry.values())).encode()  # half a surrogate pair is no text
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise InputError(f"{where}: not a JSON object with prompt, category and text, as in {EXAMPLE}") from error
    if not all(isinstance(part, str) and part for part in (prompt.name, prompt.category, prompt.text)):
        raise InputError(f"{where}: prompt, category and text must be text, and not empty")
    for part in (prompt.name, prompt.category):
        if not NAME.fullmatch(part):
            raise InputError(f"{where}: {part!r} may have only letters, digits, _ and -, and must begin with a letter")
    if prompt.name in RESERVED:
        raise InputError(f"{where}: the name {prompt.name!r} stands for all prompts together; choose another")
    return prompt
