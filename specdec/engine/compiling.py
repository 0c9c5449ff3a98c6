"""Compiling a pair's forwards: whether this run repays it, doing it, and falling back where it can't be done."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from statistics import median

import torch
from torch import nn

from specdec.engine.compiled_steps import CompiledSteps
from specdec.engine.engines import get_engine
from specdec.engine.forward import usable_vocab
from specdec.engine.kernels import PackedLinear, describe_kernels, plan_packing
from specdec.engine.kv_cache import preallocated_cache
from specdec.engine.pair import Pair

CAPACITY_MULTIPLE = 64  # tokens; rounds up, so that requests of about one length share their graphs
SECONDS_PER_GRAPH, SECONDS_PER_LAYER = 5.0, 2.5  # cold, two CPU cores: 8 to 28 s at 2 and 8 layers, 49 to 69 at 24
TIMED_PASSES = 5  # to see what compiling can save; the median counts
GRAPH_LIMIT = 64  # graphs per model kept by torch, whose own limit of 8 is made for accidental recompiling
TOLERANCE = 1e-3  # largest difference to the eager logits, relative to the largest logit (float32)
HALF_TOLERANCE = 5e-2  # the same for half precision


@dataclass(frozen=True)
class Wanted:
    """What a run will ask of the ``fast`` engine: its gammas, the longest text, about how many forwards of a model."""

    gammas: Sequence[int]
    tokens: int
    forwards: int


def prepare_fast_kernels(
    pair: Pair, mode: str, wanted: Wanted, say: Callable[[str], None], earlier: Mapping[str, dict] | None = None
) -> dict[str, dict]:
    """Pack both models' linear layers and compile their forwards as ``mode`` (auto, on or off) says.

    Both decisions follow from timings, so two starts may decide differently: what ``earlier``, another call's result,
    decided is taken over. Returns per model what came of it, in words (``outcome``) and for a later call. ``say``
    gets a line per model and, while compiling, a line per width.
    """
    widths = {"draft": (1, 2), "target": (1, *(gamma + 1 for gamma in wanted.gammas))}
    decided: dict[str, dict] = {}
    for who, model in (("draft", pair.draft), ("target", pair.target)):
        forget_compiled_steps(model)
        before = (earlier or {}).get(who)
        if before is not None:
            plan_packing(model, before["rows"])
        get_engine("fast").prepare(model)
        if mode == "auto" and before is not None:
            reason = None if before["compiled"] else "as decided before, in this folder"
        else:
            reason = _why_not(model, mode, wanted, len(set(widths[who])))
        if reason is None:
            say(f"compiling {who}, {len(set(widths[who]))} widths")
            reason = compile_steps(model, usable_vocab(model), widths[who], wanted.tokens, say)
        compiled = "compiled" if reason is None else f"not compiled ({reason})"
        outcome = f"{describe_kernels(model)}, {compiled}"
        decided[who] = {"outcome": outcome, "compiled": reason is None, "rows": model.packing.plans}
        say(f"fast    {who}: {outcome}")
    return decided


def _why_not(model: nn.Module, mode: str, wanted: Wanted, graphs: int) -> str | None:
    """Return in one line why ``model`` is not to be compiled; None if it is."""
    if mode == "off":
        return "--compile off"
    if mode == "on":
        return None
    if model.device.type != "cpu":
        return "compiled steps are opt-in on a GPU (--compile on) until tests/gpu_check.py has passed on one"
    saved = wanted.forwards * _seconds_besides_products(model)
    cost = graphs * (SECONDS_PER_GRAPH + model.config.num_hidden_layers * SECONDS_PER_LAYER)
    return None if saved > cost else f"it would save at most {saved:.0f} s here and take about {cost:.0f} s"


@torch.inference_mode()
def _seconds_besides_products(model: nn.Module) -> float:
    """Return what one token's forward takes beyond its matrix products: the most that compiling can save of it."""
    cached = get_engine("fast").open(model, CAPACITY_MULTIPLE)
    token = torch.zeros(1, dtype=torch.long, device=model.device)
    layers = [module for module in model.modules() if isinstance(module, (nn.Linear, PackedLinear))]
    inputs = [torch.zeros(1, 1, layer.in_features, dtype=model.dtype) for layer in layers]

    def seconds(work: Callable[[], object]) -> float:
        started = time.perf_counter()
        work()
        return time.perf_counter() - started

    whole = [seconds(lambda: cached.feed(token)) for _ in range(1 + TIMED_PASSES)]
    products = [
        seconds(lambda: [layer(x) for layer, x in zip(layers, inputs, strict=True)]) for _ in range(1 + TIMED_PASSES)
    ]
    return max(median(whole[1:]) - median(products[1:]), 0.0)


@torch.inference_mode()
def compile_steps(
    model: nn.Module, vocab: int, widths: Sequence[int], capacity: int, say: Callable[[str], None] = lambda line: None
) -> str | None:
    """Compile ``model``'s forward over each of ``widths`` tokens, for caches of at least ``capacity`` tokens.

    ``say`` gets a line per graph. Returns None, or in one line why the model stays uncompiled: no compiler, a model
    that can't be traced whole, or logits that differ from the eager ones.
    """
    capacity = -(-(capacity + max(widths)) // CAPACITY_MULTIPLE) * CAPACITY_MULTIPLE
    torch._dynamo.config.recompile_limit = GRAPH_LIMIT
    steps = None
    for width in sorted(set(widths)):
        started = time.perf_counter()
        try:
            steps = steps or CompiledSteps(model, vocab, capacity)
            difference = _try_width(steps, width)
        except Exception as error:  # whatever the compiler reports: the eager path is there
            return f"torch.compile failed ({type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]})"
        if difference > (TOLERANCE if model.dtype == torch.float32 else HALF_TOLERANCE):
            return f"compiled logits differ from the eager ones by {difference:.1e} of the largest"
        say(f"  {width} tokens a forward: {time.perf_counter() - started:.1f} s")
    model.compiled_steps = steps
    return None


def _try_width(steps: CompiledSteps, width: int) -> float:
    """Compile one width and run it twice; returns the largest difference to the eager logits, relative to those."""
    cache = preallocated_cache(steps.model, steps.capacity)
    prompt = torch.zeros(1, 2, dtype=torch.long, device=steps.model.device)
    steps.model(prompt, None, None, cache.layers, use_cache=True)
    block = torch.arange(width, device=steps.model.device).unsqueeze(0) % steps.vocab
    eager = steps.model(block, None, None, cache.layers, use_cache=True).logits[..., : steps.vocab]
    largest = 0.0
    steps.widths.append(width)
    for _ in range(2):  # the second run would compile again if anything but the values changed
        cache.rollback(2)
        logits, _ = steps.run(block, width, cache, torch.zeros((), device=steps.model.device))
        largest = max(largest, ((logits - eager).abs().max() / eager.abs().max()).item())
    return largest


def forget_compiled_steps(model: nn.Module) -> None:
    """Let ``model`` run eagerly again."""
    with suppress(AttributeError):
        del model.compiled_steps
