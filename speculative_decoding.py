"""Phase 1: does speculative decoding help on this machine, with this pair?

Runs eight prompts at several gammas on a draft and a target: plain decoding of each alone, then speculative decoding,
with both engines. Every repeat of every configuration lands in results/speculative_runs.csv at once; medians,
predictions and the agreement trace follow from it.
"""

from __future__ import annotations

import json
import sys
import textwrap
from argparse import Namespace
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import pandas as pd
import torch
from tqdm import tqdm

from specdec import cli, findings, results, run
from specdec.engine import device as devices
from specdec.engine.acceptance import trace_agreement
from specdec.engine.compiling import Wanted, prepare_fast_kernels
from specdec.engine.decoding import (
    Generation,
    autoregressive_generate,
    check_request,
    speculative_generate,
    warm_up_tokens,
)
from specdec.engine.exactness import explain_mismatch
from specdec.engine.pair import ModelFacts, Pair, encode, eos_ids, pair_from_flags
from specdec.errors import InputError, MeasurementError
from specdec.prompts import PROMPTS as EIGHT_PROMPTS
from specdec.prompts import Prompt, select_prompts

__all__ = ["autoregressive_generate", "main", "speculative_generate"]

# --- What people change; each has a flag of the same name ------------------------------------------------------------
PAIR = "auto"  # qwen2 where CUDA works, else tiny
DRAFT = None  # with TARGET: any other pair
TARGET = None  # with DRAFT
RANDOM_WEIGHTS = False  # refused here: untrained models accept nothing but by chance
DEVICE = "auto"  # CUDA where it works, else the CPU
DRAFT_DEVICE = None  # where the target is
DTYPE = "auto"  # float16 on CUDA, else float32
THREADS = 0  # as many as torch takes
COMPILE = "auto"  # of the fast engine's forwards: where this run repays it
SEED = 0  # greedy decoding draws nothing; kept for the manifest
PROMPTS = tuple(prompt.name for prompt in EIGHT_PROMPTS)  # the study's eight
PROMPT_FILE = None  # in place of the eight
CHAT = False  # plain continuation, as in the study
GAMMAS = (1, 2, 4, 8)  # draft tokens per step, as in the study
REPEATS = 3  # per configuration; the median is reported
MAX_NEW_TOKENS = 64  # per run, as in the study
ENGINES = ("published", "fast")  # run as blocks, in this order
RESULTS_DIR = "results"  # below the current folder
PLOTS_DIR = "plots"  # this phase draws none
QUICK = {
    "PROMPTS": ("code_python", "creative_story"),  # one that a draft guesses well, one that it does not
    "REPEATS": 1,
    "MAX_NEW_TOKENS": 16,
    "RESULTS_DIR": "results/quick",
    "PLOTS_DIR": "plots/quick",
}
# ---------------------------------------------------------------------------------------------------------------------

PHASE = "phase1"
GENERATIONS = "generations.jsonl"
FLAGS = {
    **cli.PAIR_FLAGS,
    **cli.PROMPT_FLAGS,
    "REPEATS": cli.Flag(cli.integer(1), "repeats of each configuration"),
    "MAX_NEW_TOKENS": cli.Flag(cli.integer(1), "new tokens per run"),
    "ENGINES": cli.Flag(cli.several(cli.choice("published", "fast")), "engines to run, comma-separated"),
    **cli.FOLDER_FLAGS,
}
FILES = (
    results.RUNS.file,
    results.STEPS.file,
    results.TRACE.file,
    *(table.file for table in results.SUMMARIES.values()),
    GENERATIONS,
)
UNIT_KEY = ["engine", "prompt", "repeat"]
NOT_COMPARED_ON_RESUME = ("results_dir", "plots_dir", "resume", "quick")


@dataclass
class Benchmark:
    """One run of this phase: the pair, the encoded prompts, the flags, and the folder that takes the rows."""

    pair: Pair
    prompts: list[Prompt]
    args: Namespace
    folder: Path

    def __post_init__(self) -> None:
        self.inputs = {prompt.name: encode(self.pair, prompt, self.args.chat) for prompt in self.prompts}
        self.eos = eos_ids(self.pair)
        for input_ids in self.inputs.values():
            check_request([self.pair.draft, self.pair.target], input_ids, self.args.max_new_tokens)


@dataclass(frozen=True)
class Unit:
    """What is measured, and after an interruption redone, as a whole: one repeat of one prompt with one engine."""

    engine: str
    prompt: Prompt
    repeat: int

    @property
    def key(self) -> tuple[str, str, int]:
        return self.engine, self.prompt.name, self.repeat


def main(argv: list[str] | None = None) -> int:
    """Run Phase 1 and return its exit code."""
    return cli.run(lambda: _run(argv))


def _run(argv: list[str] | None) -> int:
    args = cli.parse(argv, __doc__, FLAGS, globals(), QUICK, resumable=True)
    if args.random_weights:
        raise InputError(
            "random weights accept nothing: Phase 1 needs trained ones; run phase3_profiling.py for timing"
        )
    prompts = select_prompts(args.prompts, args.prompt_file)
    folder = Path(args.results_dir)
    run.check_free(folder)
    run.check_writable(results_dir=args.results_dir)
    pair = pair_from_flags(args)
    benchmark = Benchmark(pair, prompts, args, folder)
    with run.lock(folder):
        measure(benchmark, argv)
    return cli.EXIT_OK


def measure(benchmark: Benchmark, argv: list[str] | None) -> None:
    """Measure what is not on disk yet, then derive the summaries, the trace and the findings."""
    args, pair = benchmark.args, benchmark.pair
    manifest = _open_run(benchmark, argv)
    print(f"pair    {pair.label}")
    manifest.write(ceilings=_print_ceilings(benchmark))
    done = _whole_units(benchmark)
    todo = [unit for unit in _units(benchmark) if unit.key not in done]
    with tqdm(total=len(todo) * (len(args.gammas) + 2), disable=None, unit="run", smoothing=0) as bar:
        for engine, of_engine in groupby(todo, key=lambda unit: unit.engine):
            bar.set_description(f"{engine}: warm-up")
            if engine == "fast":
                _prepare_fast(benchmark, manifest)
            _warm_up_widths(benchmark, engine)
            for prompt, of_prompt in groupby(of_engine, key=lambda unit: unit.prompt):
                _warm_up_prompt(benchmark, prompt, engine)
                for unit in of_prompt:
                    _measure_unit(benchmark, unit, bar)
                _write_summaries(benchmark)
                _print_rows(benchmark, engine, prompt)
    _write_summaries(benchmark)  # of a run that was cut after its last row, too
    _write_trace(benchmark)
    faults = _faults(benchmark)
    manifest.complete(device_after=devices.describe(pair.target.device), faults=faults)
    _print_findings(benchmark)
    if faults:
        raise MeasurementError(
            f"{len(faults)} runs did not give the target's own tokens, and their speeds are not stored: {faults[0]}; "
            "rounding can't explain it, so please report it, with the manifest"
        )


def _units(benchmark: Benchmark) -> Iterator[Unit]:
    for engine in benchmark.args.engines:
        for prompt in benchmark.prompts:
            for repeat in range(benchmark.args.repeats):
                yield Unit(engine, prompt, repeat)


def _prepare_fast(benchmark: Benchmark, manifest: run.Manifest) -> None:
    """Pack the models' layers and compile their forwards if that pays; the manifest says what was done."""
    args = benchmark.args
    runs = len(benchmark.prompts) * args.repeats * (len(args.gammas) + 1)
    longest = max(input_ids.shape[1] for input_ids in benchmark.inputs.values()) + args.max_new_tokens
    wanted = Wanted(args.gammas, longest, runs * args.max_new_tokens)
    earlier = run.decided_kernels(manifest.entries)
    manifest.write(fast_kernels=prepare_fast_kernels(benchmark.pair, args.compile, wanted, tqdm.write, earlier))


# --- Measuring -------------------------------------------------------------------------------------------------------


def _warm_up_widths(benchmark: Benchmark, engine: str) -> None:
    """Run every block width that a step or a sync can take, so that no first use of a shape is timed."""
    input_ids = next(iter(benchmark.inputs.values()))
    for gamma in range(1, max(benchmark.args.gammas) + 1):
        tokens = warm_up_tokens(gamma, benchmark.args.max_new_tokens)
        speculative_generate(benchmark.pair.draft, benchmark.pair.target, input_ids, tokens, gamma, engine=engine)


def _warm_up_prompt(benchmark: Benchmark, prompt: Prompt, engine: str) -> None:
    """Run the prompt's own shape, its prefill."""
    pair, input_ids = benchmark.pair, benchmark.inputs[prompt.name]
    speculative_generate(pair.draft, pair.target, input_ids, 1, 1, engine=engine)


def _measure_unit(benchmark: Benchmark, unit: Unit, bar: tqdm) -> None:
    """Time both models alone, then each gamma against that baseline, in an order that changes with the repeat."""
    pair, args = benchmark.pair, benchmark.args
    input_ids = benchmark.inputs[unit.prompt.name]

    def alone(who: str, model: torch.nn.Module) -> Generation:
        bar.set_description(f"{unit.engine} {unit.prompt.name} repeat {unit.repeat + 1}: {who} alone")
        generation = autoregressive_generate(model, input_ids, args.max_new_tokens, engine=unit.engine)
        _store_text(benchmark, unit, who, None, generation)
        bar.update()
        return generation

    baseline, draft = alone("baseline", pair.target), alone("draft", pair.draft)
    shift = unit.repeat % len(args.gammas)
    for order, gamma in enumerate(args.gammas[shift:] + args.gammas[:shift]):
        bar.set_description(f"{unit.engine} {unit.prompt.name} repeat {unit.repeat + 1}: gamma {gamma}")
        generation = speculative_generate(
            pair.draft, pair.target, input_ids, args.max_new_tokens, gamma, engine=unit.engine
        )
        row = _run_row(benchmark, unit, baseline, draft, generation)
        _store_run(benchmark, unit, row | {"gamma": gamma, "order": order}, generation)
        bar.update()


def _run_row(benchmark: Benchmark, unit: Unit, baseline: Generation, draft: Generation, generation: Generation) -> dict:
    input_ids = benchmark.inputs[unit.prompt.name]
    mismatch = explain_mismatch(benchmark.pair.target, input_ids, baseline, generation, unit.engine)
    fault = mismatch is not None and not mismatch.near_tie
    if fault:
        where = f"{unit.engine}, {unit.prompt.name}, repeat {unit.repeat + 1}"
        tqdm.write(f"fault: {where}: {mismatch}; its speed is not stored", file=sys.stderr)
    return {
        "prompt": unit.prompt.name,
        "category": unit.prompt.category,
        "engine": unit.engine,
        "repeat": unit.repeat,
        "prompt_tokens": input_ids.shape[1],
        "baseline_time_s": baseline.wall_time,
        "draft_time_s": draft.wall_time,
        "speculative_time_s": None if fault else generation.wall_time,
        "baseline_prefill_s": baseline.prefill_time,
        "draft_prefill_s": draft.prefill_time,
        "speculative_prefill_s": None if fault else generation.prefill_time,
        "new_tokens": len(generation.tokens),
        "steps": len(generation.accepted),
        "proposed": sum(generation.proposed),
        "accepted": sum(generation.accepted),
        "rejections": generation.rejections,
        "matches_baseline": mismatch is None,
        "near_tie": mismatch is not None and mismatch.near_tie,
        "first_mismatch": mismatch and mismatch.position,
        "mismatch_top2_gap": mismatch and mismatch.top2_gap,
        "eos_at": _eos_at(benchmark, baseline.tokens),
    }


def _eos_at(benchmark: Benchmark, tokens: list[int]) -> int | None:
    return next((place for place, token in enumerate(tokens) if token in benchmark.eos), None)


# --- Files -----------------------------------------------------------------------------------------------------------


def _open_run(benchmark: Benchmark, argv: list[str] | None) -> run.Manifest:
    """Begin a new run, moving an earlier one's files away, or take up the one in the folder."""
    constants = {name: value for name, value in vars(benchmark.args).items() if name not in NOT_COMPARED_ON_RESUME}
    entries = run.run_entries(argv, constants) | {
        "pair": benchmark.pair.manifest_entry(),
        "device": devices.describe(benchmark.pair.target.device),
    }
    manifest = run.open_run(benchmark.folder, PHASE, FILES, entries, benchmark.args.resume)
    if manifest.resumed:
        _drop_unfinished(benchmark)
    return manifest


def _store_run(benchmark: Benchmark, unit: Unit, row: dict, generation: Generation) -> None:
    """Write a run's steps first; its row in the runs table then says that they are whole."""
    shared = {name: row[name] for name in ("prompt", "engine", "gamma", "repeat")}
    steps = [
        shared | {"step": step, "proposed": proposed, "accepted": accepted}
        for step, (proposed, accepted) in enumerate(zip(generation.proposed, generation.accepted, strict=True))
    ]
    _store_text(benchmark, unit, "speculative", row["gamma"], generation)
    run.append_rows(benchmark.folder / results.STEPS.file, results.STEPS.columns, steps)
    run.append_rows(benchmark.folder / results.RUNS.file, results.RUNS.columns, [row])


def _store_text(benchmark: Benchmark, unit: Unit, kind: str, gamma: int | None, generation: Generation) -> None:
    if unit.repeat:
        return  # greedy repeats give the same text
    entry = {
        "engine": unit.engine,
        "prompt": unit.prompt.name,
        "kind": kind,
        "gamma": gamma,
        "eos_at": _eos_at(benchmark, generation.tokens),
        "text": benchmark.pair.tokenizer.decode(generation.tokens),
        "tokens": generation.tokens,
    }
    run.append_line(benchmark.folder / GENERATIONS, json.dumps(entry) + "\n")


def _read_texts(folder: Path) -> list[dict]:
    path = folder / GENERATIONS
    try:
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        return [json.loads(line) for line in lines]
    except ValueError as error:
        raise InputError(f"{path} is damaged ({error}); leave out --resume to measure anew") from error


def _whole_units(benchmark: Benchmark) -> set[tuple[str, str, int]]:
    """Return the keys of the units that are whole on disk: every gamma's row and steps, the first repeat's texts."""
    folder, gammas = benchmark.folder, set(benchmark.args.gammas)
    if not all((folder / table.file).exists() for table in (results.RUNS, results.STEPS)):
        return set()
    runs, steps = (results.read_table(folder, table) for table in (results.RUNS, results.STEPS))
    texts = Counter((entry["engine"], entry["prompt"]) for entry in _read_texts(folder))
    counted = steps.groupby([*UNIT_KEY, "gamma"]).size()
    keys = zip(*(runs[name] for name in (*UNIT_KEY, "gamma")), strict=True)
    there = [counted.get(key, 0) for key in keys]
    units = runs[runs.steps == there].groupby(UNIT_KEY).gamma
    return {key for key, of_unit in units if set(of_unit) == gammas and (key[2] or texts[key[:2]] == len(gammas) + 2)}


def _drop_unfinished(benchmark: Benchmark) -> None:
    """Remove what a killed run left of a unit that it did not finish."""
    folder = benchmark.folder
    for name in (results.RUNS.file, results.STEPS.file, GENERATIONS):
        run.drop_torn_line(folder / name)
    whole = _whole_units(benchmark)
    for table in (results.RUNS, results.STEPS):
        if (folder / table.file).exists():
            rows = results.read_table(folder, table)
            keys = list(zip(rows.engine, rows["prompt"], rows.repeat, strict=True))
            results.write_table(folder, table, rows[[key in whole for key in keys]])
    texts = [entry for entry in _read_texts(folder) if (entry["engine"], entry["prompt"], 0) in whole]
    results.write_whole(folder / GENERATIONS, "".join(json.dumps(entry) + "\n" for entry in texts))


def _faults(benchmark: Benchmark) -> list[str]:
    """Name every run on disk, this process's or an earlier one's, that differs from its baseline beyond a near tie."""
    runs = results.read_table(benchmark.folder, results.RUNS)
    wrong = runs[~runs.matches_baseline & ~runs.near_tie]
    return [
        f"{row.engine}, {row.prompt}, gamma {row.gamma}, repeat {row.repeat + 1}, from new token {row.first_mismatch}"
        for row in wrong.itertuples()
    ]


def _write_summaries(benchmark: Benchmark) -> None:
    runs = results.read_table(benchmark.folder, results.RUNS)
    for engine in runs.engine.unique():
        results.write_table(benchmark.folder, results.SUMMARIES[engine], results.summarise(runs, engine))


def _write_trace(benchmark: Benchmark) -> None:
    """Trace agreement over each prompt's baseline text."""
    texts = {entry["prompt"]: entry for entry in _read_texts(benchmark.folder) if entry["kind"] == "baseline"}
    rows = []
    for name, input_ids in benchmark.inputs.items():
        trace = trace_agreement(benchmark.pair, input_ids, texts[name]["tokens"], benchmark.args.engines[-1])
        rows += [{"prompt": name, **row} for row in trace]
    results.write_table(benchmark.folder, results.TRACE, pd.DataFrame(rows))


# --- What the terminal shows -----------------------------------------------------------------------------------------


def _print_ceilings(benchmark: Benchmark) -> dict:
    """Print device, ceiling and cost ratio before anything else is measured; returns the manifest's entry."""
    pair = benchmark.pair
    device = pair.target.device
    about = devices.describe(device)
    bandwidth = devices.read_bandwidth(device, devices.LARGE_BUFFER_BYTES)
    print(f"device  {about['name']}, {pair.target_facts.dtype}, reads {bandwidth / 1e9:.1f} GB/s")
    entry = {"read_bandwidth_bytes_per_s": bandwidth}
    for who, model, facts in (("draft", pair.draft, pair.draft_facts), ("target", pair.target, pair.target_facts)):
        entry[who] = _ceiling(model, facts, benchmark)
        share = entry[who]["ceiling_share"]
        print(
            f"{who:7} {entry[who]['measured_ms']:.2f} ms a token; reading its {facts.bytes_per_token / 1e6:.1f} MB of "
            f"weights alone takes {entry[who]['ceiling_ms']:.2f} ms"
            + (f" ({share:.0%} of the ceiling)" if share is not None else "; the clock is too coarse for a share")
        )
        if share is not None and share > 1:
            print(f"        over 100 %: the ceiling of {who} is too low, don't rely on it")
    roofline = pair.target_facts.bytes_per_token / pair.draft_facts.bytes_per_token
    measured = [entry[who]["measured_ms"] for who in ("target", "draft")]
    entry["cost_ratio"] = measured[0] / measured[1] if all(measured) else None
    shown = f"{entry['cost_ratio']:.2f}" if all(measured) else "not measured"
    print(f"cost ratio c = T_target / T_draft = {shown}; by bytes of weights {roofline:.2f}\n")
    return entry


def _ceiling(model: torch.nn.Module, facts: ModelFacts, benchmark: Benchmark) -> dict:
    """Return one model's time per token beside what reading its weights takes at this device's bandwidth."""
    ceiling = facts.bytes_per_token / devices.weights_bandwidth(model.device, facts.bytes_per_token)
    input_ids = next(iter(benchmark.inputs.values()))
    engine = benchmark.args.engines[0]
    tokens = min(8, benchmark.args.max_new_tokens)  # enough for a first look; the rows are measured properly
    times = [autoregressive_generate(model, input_ids, tokens, engine=engine) for _ in range(4)][1:]
    decode = sorted((time.wall_time - time.prefill_time) / max(tokens - 1, 1) for time in times)[1]
    return {
        "ceiling_ms": ceiling * 1e3,
        "measured_ms": decode * 1e3,
        "ceiling_share": ceiling / decode if decode else None,
    }


def _print_rows(benchmark: Benchmark, engine: str, prompt: Prompt) -> None:
    """Print the rows of a prompt whose repeats are all there."""
    table = results.read_table(benchmark.folder, results.SUMMARIES[engine])
    for row in table[table["prompt"] == prompt.name].itertuples():
        spread = "" if pd.isna(row.speedup_low) else f" ({row.speedup_low:.2f}-{row.speedup_high:.2f})"
        flags = [] if row.matches_baseline else ["near tie" if row.near_tie else "FAULT"]
        flags += ["noisy"] if row.noisy is True else []
        tqdm.write(
            f"{engine:9} {prompt.name:17} gamma {row.gamma}  speedup {_number(row.speedup)}{spread}  predicted "
            f"{_number(row.predicted_speedup)} by acceptance_rate {_number(row.acceptance_rate)}, "
            f"{_number(row.predicted_speedup_alpha)} by alpha {_number(row.alpha)}"
            + ("  " + ", ".join(flags) if flags else "")
        )


def _number(value: float) -> str:
    return "none" if pd.isna(value) else f"{value:.2f}"


def _print_findings(benchmark: Benchmark) -> None:
    runs = results.read_table(benchmark.folder, results.RUNS)
    print(f"\nPair: {benchmark.pair.label}")
    for engine in benchmark.args.engines:
        _print_engine(engine, results.read_table(benchmark.folder, results.SUMMARIES[engine]))
    _print_alpha(runs[runs.engine == benchmark.args.engines[0]])
    half = benchmark.args.max_new_tokens / 2
    for name, row in runs.drop_duplicates("prompt").set_index("prompt").iterrows():
        if not pd.isna(row.eos_at) and row.eos_at < half:
            print(f"{name}: the text ends at token {row.eos_at}, before half of the run; what follows is past its end")
    print(f"Files are in {benchmark.folder}; next: {cli.next_command(results.PHASE2, benchmark.args)}")


def _print_engine(engine: str, summary: pd.DataFrame) -> None:
    count = findings.count_helpful(summary)
    if count is None:
        print(f"\nEngine {engine}: no speedup was measured")
        return
    surely = "" if count.surely is None else f" ({count.surely} in every repeat)"
    print(
        f"\nEngine {engine}: helpful {count.helpful} of {count.total}{surely}, best {count.best:.2f} "
        f"({count.best_prompt}, gamma {count.best_gamma}), mean {count.mean:.2f}"
    )
    for column in ("gamma", "prompt"):
        means = summary.groupby(column, sort=False).speedup.mean()
        listed = ", ".join(f"{value} {_number(mean)}" for value, mean in means.items())
        print(f"  mean by {column}:\n" + textwrap.indent(textwrap.fill(listed, 100), " " * 4))
    for column, what in (("predicted_speedup", "acceptance_rate"), ("predicted_speedup_alpha", "alpha")):
        quality = findings.prediction_quality(summary, column)
        if quality:
            correlation = "none" if quality.correlation is None else f"{quality.correlation:.2f}"
            print(
                f"  Leviathan with {what}: correlation {correlation}, mean absolute error "
                f"{quality.mean_absolute_error:.3f}, same side of 1 in {quality.verdicts_agree} of {quality.rows}"
            )


def _print_alpha(runs: pd.DataFrame) -> None:
    table = findings.alpha_by_gamma(runs)
    if table.empty:
        return
    print("\nAcceptance, all prompts together:")
    for gamma, row in table.iterrows():
        print(
            f"  gamma {gamma}: acceptance_rate {row.acceptance_rate:.3f}, "
            f"alpha {row.alpha:.3f} (standard error {row.standard_error:.3f})"
        )
    lowest, highest = table.iloc[0], table.iloc[-1]
    error = (lowest.standard_error**2 + highest.standard_error**2) ** 0.5
    if len(table) > 1:
        print(
            f"  alpha at gamma {table.index[-1]} minus gamma {table.index[0]}: {highest.alpha - lowest.alpha:+.3f} "
            f"(standard error {error:.3f})"
        )


if __name__ == "__main__":
    sys.exit(main())
