"""How long the same greedy tokens take: transformers' own generation, and both engines of this suite.

Every round runs all six ways one after another, so that a slow moment of the machine meets all of them; ratios are
taken within a round. The models are converted in place between the engines, untimed. On a quiet machine:

    python tests/benchmarks/bench_decoding.py
    python tests/benchmarks/bench_decoding.py --draft D.gguf --target T.gguf --rounds 3 --max-new-tokens 48
"""

from __future__ import annotations

import sys
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

from specdec.engine.compiling import Wanted, prepare_fast_kernels
from specdec.engine.decoding import autoregressive_generate, speculative_generate
from specdec.engine.engines import get_engine
from specdec.engine.pair import Pair, encode, load_pair
from specdec.engine.sources import quiet_transformers
from specdec.errors import MeasurementError
from specdec.prompts import select_prompts

WAYS = ("greedy", "assisted", "published baseline", "published", "fast baseline", "fast")
RATIOS = (  # what is compared with what
    ("fast", "assisted"),
    ("fast", "greedy"),
    ("fast baseline", "greedy"),
    ("fast", "fast baseline"),
    ("published", "published baseline"),
    ("assisted", "greedy"),
)
WARM_UP_TOKENS = 8  # after each change of kernels, not timed


def main() -> int:
    """Run the benchmark and print one table per prompt."""
    args = _arguments()
    if args.threads:
        torch.set_num_threads(args.threads)
    pair = load_pair(args.pair, draft=args.draft, target=args.target, dtype="float32")
    _like_the_loop(pair, args.gamma)
    prompts = select_prompts(tuple(args.prompts.split(",")), None)
    inputs = {prompt.name: encode(pair, prompt) for prompt in prompts}
    longest = max(ids.shape[1] for ids in inputs.values()) + args.max_new_tokens
    prepare_fast_kernels(pair, args.compile, Wanted((args.gamma,), longest, 0), print)
    print(f"pair    {pair.label}; gamma {args.gamma}, {args.max_new_tokens} tokens, {args.rounds} rounds\n")
    for name, input_ids in inputs.items():
        _check_widths(pair, input_ids, args)
        rounds = [_one_round(pair, input_ids, args) for _ in range(args.rounds)]
        _print(name, rounds, args.max_new_tokens)
    return 0


def _arguments() -> Namespace:
    parser = ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pair", default="tiny")
    parser.add_argument("--draft")
    parser.add_argument("--target")
    parser.add_argument("--prompts", default="code_python,creative_story")
    parser.add_argument("--gamma", type=int, default=4)
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--compile", choices=("on", "off"), default="off")
    parser.add_argument("--threads", type=int, default=0)
    return parser.parse_args()


def _like_the_loop(pair: Pair, gamma: int) -> None:
    """Make transformers propose ``gamma`` tokens in every step; it takes these from the draft's own config only."""
    config = pair.draft.generation_config
    config.num_assistant_tokens = gamma
    config.num_assistant_tokens_schedule = "constant"
    config.assistant_confidence_threshold = 0.0


def _generate(pair: Pair, input_ids: torch.Tensor, tokens: int, assisted: bool) -> list[int]:
    options = {"assistant_model": pair.draft} if assisted else {}
    options |= {"max_new_tokens": tokens, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    with quiet_transformers():
        output = pair.target.generate(input_ids, attention_mask=torch.ones_like(input_ids), **options)
    return output[0, input_ids.shape[1] :].tolist()


def _check_widths(pair: Pair, input_ids: torch.Tensor, args: Namespace) -> None:
    """Raise MeasurementError unless transformers' forwards take gamma + 1 tokens but in the first and last steps."""
    get_engine("published").prepare(pair.target)
    get_engine("published").prepare(pair.draft)
    widths: list[int] = []

    def record(module, positional, named) -> None:
        widths.append((named.get("input_ids") if "input_ids" in named else positional[0]).shape[1])

    hook = pair.target.register_forward_pre_hook(record, with_kwargs=True)
    _generate(pair, input_ids, args.max_new_tokens, assisted=True)
    hook.remove()
    if set(widths[1 : -args.gamma]) - {args.gamma + 1}:  # the last ones shrink with the budget
        raise MeasurementError(f"assisted generation's forwards took {widths} tokens, not {args.gamma + 1} each")


def _one_round(pair: Pair, input_ids: torch.Tensor, args: Namespace) -> dict[str, float]:
    """Return the seconds of each way; MeasurementError if any gives other tokens."""
    tokens: dict[str, list[int]] = {}
    seconds: dict[str, float] = {}
    for engine, ways in (("published", WAYS[:4]), ("fast", WAYS[4:])):
        for model in (pair.draft, pair.target):
            get_engine(engine).prepare(model)
        run = _runner(pair, input_ids, engine, args.gamma)
        for way in ways:
            run(way, WARM_UP_TOKENS)
        for way in ways:
            started = time.perf_counter()
            tokens[way] = run(way, args.max_new_tokens)
            seconds[way] = time.perf_counter() - started
    different = [way for way in WAYS if tokens[way] != tokens["greedy"]]
    if different:
        raise MeasurementError(f"not the greedy tokens: {', '.join(different)}")
    return seconds


def _runner(pair: Pair, input_ids: torch.Tensor, engine: str, gamma: int) -> Callable[[str, int], list[int]]:
    def run(way: str, count: int) -> list[int]:
        if way in ("greedy", "assisted"):
            return _generate(pair, input_ids, count, assisted=way == "assisted")
        if way.endswith("baseline"):
            return autoregressive_generate(pair.target, input_ids, count, engine=engine).tokens
        return speculative_generate(pair.draft, pair.target, input_ids, count, gamma, engine=engine).tokens

    return run


def _print(name: str, rounds: list[dict[str, float]], tokens: int) -> None:
    print(name)
    for way in WAYS:
        times = sorted(seconds[way] for seconds in rounds)
        print(
            f"  {way:19} {median(times):8.3f} s ({times[0]:.3f}-{times[-1]:.3f}), "
            f"{tokens / median(times):7.1f} tokens/s"
        )
    for numerator, denominator in RATIOS:
        ratios = sorted(seconds[numerator] / seconds[denominator] for seconds in rounds)
        print(f"  {numerator + ' / ' + denominator:32} {median(ratios):.2f} ({ratios[0]:.2f}-{ratios[-1]:.2f})")
    print(flush=True)


if __name__ == "__main__":
    sys.exit(main())
