"""Phase 3: where a step's time goes, and how acceptance moves.

Section 1 splits steps into draft, target, verify, sync and the rest; section 2 follows acceptance along the text and
along the block; section 3 along temperature, under the study's exact match and under rejection sampling; section 4
times single forwards by width, cache length and batch, beside the ceilings of the device; section 5 sets the techniques
of the second document side by side: who proposes, and how many; section 6 compresses the key/value cache.
"""

from __future__ import annotations

import contextlib
import sys
from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from tqdm import tqdm

from specdec import (
    claims,
    cli,
    evidence,
    plots,
    predictions,
    profile_findings,
    results,
    run,
    simulation,
)
from specdec.engine import device as devices
from specdec.engine import kv_techniques, strategies
from specdec.engine.acceptance import PairLogits, pair_logits, tried_positions
from specdec.engine.compiling import Wanted, prepare_fast_kernels
from specdec.engine.decoding import (
    Generation,
    autoregressive_generate,
    check_request,
    speculative_generate,
    warm_up_tokens,
)
from specdec.engine.drafting import ModelDraft
from specdec.engine.engines import get_engine
from specdec.engine.isolation import Held, time_passes
from specdec.engine.pair import Pair, encode, pair_from_flags
from specdec.engine.timing import PhaseClock, ratio
from specdec.engine.verification import Sampled
from specdec.errors import InputError
from specdec.prompts import PROMPTS as EIGHT_PROMPTS
from specdec.prompts import select_prompts

# --- What people change; each has a flag of the same name ------------------------------------------------------------
PAIR = "auto"  # qwen2 where CUDA works, else tiny
DRAFT = None  # with TARGET: any other pair
TARGET = None  # with DRAFT
RANDOM_WEIGHTS = False  # sections 1 and 4 only: timing needs no trained weights
DEVICE = "auto"  # CUDA where it works, else the CPU
DRAFT_DEVICE = None  # where the target is
DTYPE = "auto"  # float16 on CUDA, else float32
THREADS = 0  # as many as torch takes
COMPILE = "auto"  # of the fast engine's forwards: where this run repays it
SEED = 0  # of sampling and of random weights
PROMPTS = tuple(prompt.name for prompt in EIGHT_PROMPTS)  # the study's eight
PROMPT_FILE = None  # in place of the eight
CHAT = False  # plain continuation, as in the study
GAMMAS = (1, 2, 4, 8)  # draft tokens per step, as in the study
SECTIONS = (1, 2, 3, 4, 5, 6)
ENGINES = ("published", "fast")
STEPS = 20  # full steps per engine and gamma in section 1, as in the study
TEMPERATURES = (0.0, 0.3, 0.5, 0.7, 1.0, 1.5)  # of section 3, as in the study
MAX_NEW_TOKENS = 64  # per run, as in the study
RESULTS_DIR = "results"  # below the current folder; Phase 1's files there are used for the predictions
PLOTS_DIR = "plots"
QUICK = {
    "PROMPTS": ("code_python", "creative_story"),
    "STEPS": 5,
    "TEMPERATURES": (0.0, 0.7, 1.5),
    "MAX_NEW_TOKENS": 16,
    "RESULTS_DIR": "results/quick",
    "PLOTS_DIR": "plots/quick",
}
# --- What stays as it is ---------------------------------------------------------------------------------------------
MATCH_GAMMA = 4  # draft tokens per step at which the study drew its temperature rates
SAMPLING_SEEDS = 3  # runs per prompt and temperature
INSTRUMENTATION_PAIRS = 3  # runs with and without the clock, per engine
ISOLATED_REPETITIONS = 50  # single-token passes per engine and model, as in the study
SHAPE_REPETITIONS = 10  # passes of every other shape
QUICK_REPETITIONS = 5  # of either, with --quick
LEAST_WIDEST = 9  # tokens per target forward: 1 to as many, or to the largest gamma and one more
FEW_WIDTHS = (1, 5)  # at longer caches and larger batches: a token, and a step at gamma 4
CACHE_LENGTHS = (64, 256, 1024, 4096)  # tokens held, as far as the model allows
BATCHES = (1, 2, 4, 8, 16)  # requests per forward
MAX_TEMPERATURE = 100  # beyond it every token is as likely as any other
RANDOM_PROMPT_TOKENS = 48  # of a made-up prompt with random weights; about what the eight have
# ---------------------------------------------------------------------------------------------------------------------

PHASE = "phase3"
TIMING_SECTIONS = (1, 4)  # those that untrained weights can answer
ALL_PROMPTS = "all"  # stands for the prompt in rows of a batch
KV_UNITS = (
    *((where, technique) for where in ("draft", "target") for technique in kv_techniques.TECHNIQUES),
    ("draft", kv_techniques.SKIPPED),
    ("both", kv_techniques.PREFIX),
)
FLAGS = {
    **cli.PAIR_FLAGS,
    **cli.PROMPT_FLAGS,
    "SECTIONS": cli.Flag(cli.several(cli.integer(1, 6)), "sections to run, comma-separated"),
    "ENGINES": cli.Flag(cli.several(cli.choice("published", "fast")), "engines to run, comma-separated"),
    "STEPS": cli.Flag(cli.integer(1), "full steps per engine and gamma in section 1"),
    "TEMPERATURES": cli.Flag(
        cli.several(cli.number(0.0, MAX_TEMPERATURE)), "temperatures of section 3, comma-separated"
    ),
    "MAX_NEW_TOKENS": cli.Flag(cli.integer(2), "new tokens per run"),
    **cli.FOLDER_FLAGS,
}
TABLES = (
    results.BREAKDOWN,
    results.BY_POSITION,
    results.BY_TEMPERATURE,
    results.ISOLATED,
    results.VERIFY_COST,
    results.STRATEGIES,
    results.KV_COMPRESSION,
)
PLOTS = (
    "time_breakdown",
    "phase_distribution",
    "alpha_vs_position",
    "alpha_vs_temperature",
    "strategies",
    "kv_compression",
    "timing_analysis",
)
NOT_COMPARED_ON_RESUME = ("results_dir", "plots_dir", "resume", "quick", "sections")


@dataclass
class Profile:
    """One run of this phase: the pair, the encoded prompts, the flags, and the folder that takes the tables."""

    pair: Pair
    inputs: dict[str, torch.Tensor]
    args: Namespace
    folder: Path
    bar: tqdm

    def unit(self, table: results.Table, measure: Callable[[], list[dict]], **key: object) -> None:
        """Measure the rows of ``table`` that belong to ``key``, unless they are there already, and store them whole."""
        self.bar.set_description(f"{table.file}: " + " ".join(map(str, key.values())))
        rows = results.stored_rows(self.folder, table)
        if rows.empty or not np.logical_and.reduce([rows[name] == value for name, value in key.items()]).any():
            new = pd.DataFrame([key | row for row in measure()], columns=list(table.columns))
            results.write_table(self.folder, table, new if rows.empty else pd.concat([rows, new]))
        self.bar.update()


def main(argv: list[str] | None = None) -> int:
    """Run Phase 3 and return its exit code."""
    return cli.run(lambda: _run(argv))


def _run(argv: list[str] | None) -> int:
    args = cli.parse(argv, __doc__, FLAGS, globals(), QUICK, resumable=True)
    prompts = select_prompts(args.prompts, args.prompt_file)
    folder = Path(args.results_dir)
    run.check_free(folder)
    run.check_writable(results_dir=args.results_dir, plots_dir=args.plots_dir)
    pair = pair_from_flags(args)
    inputs = _inputs(pair, prompts, args)
    for input_ids in inputs.values():
        check_request([pair.draft, pair.target], input_ids, args.max_new_tokens)
    _check_phase1(folder, pair)
    with run.lock(folder), tqdm(disable=None, unit="part", total=_parts(args, pair, len(inputs))) as bar:
        _profile(Profile(pair, inputs, args, folder, bar), argv)
    return cli.EXIT_OK


def _check_phase1(folder: Path, pair: Pair) -> None:
    """Raise InputError where the folder holds a Phase 1 run of another pair or machine; an unreadable one may stay."""
    phase1 = _readable_phase1(folder)
    own = {"pair": pair.manifest_entry(), "device": devices.describe(pair.target.device)}
    if phase1 and (changed := run.differences(run.whose(phase1), run.whose(own))):
        raise InputError(
            f"the Phase 1 run in {folder} is of another pair, device or dtype ({changed[0]}); give this phase the same "
            "flags, or choose another --results-dir"
        )


def _readable_phase1(folder: Path) -> dict | None:
    with contextlib.suppress(InputError):
        return run.read_manifest(folder, "phase1")
    return None


def _inputs(pair: Pair, prompts: list, args: Namespace) -> dict[str, torch.Tensor]:
    """Return each prompt's ids, (1, n); with random weights one made-up prompt, since there is no tokenizer."""
    if pair.tokenizer is not None:
        return {prompt.name: encode(pair, prompt, args.chat) for prompt in prompts}
    generator = torch.Generator().manual_seed(args.seed)
    shape = (1, RANDOM_PROMPT_TOKENS)
    return {"random_tokens": torch.randint(pair.target.usable_vocab, shape, generator=generator)}


def _parts(args: Namespace, pair: Pair, prompts: int) -> int:
    engines = len(args.engines)
    parts = {
        1: engines * (len(args.gammas) + 1),
        2: prompts,
        3: prompts,
        4: 4 * engines,
        5: prompts + 1,
        6: len(KV_UNITS),
    }
    return sum(parts[section] for section in args.sections if pair.tokenizer is not None or section in TIMING_SECTIONS)


def _profile(profile: Profile, argv: list[str] | None) -> None:
    manifest = _open_run(profile, argv)
    device = profile.pair.target.device
    print(f"pair    {profile.pair.label}")
    ceilings = _ceilings(profile.pair)
    manifest.write(ceilings=ceilings)
    if "fast" in profile.args.engines:
        _prepare_fast(profile, manifest)
    skipped = []
    for section in profile.args.sections:
        if profile.pair.tokenizer is None and section not in TIMING_SECTIONS:
            skipped.append(section)
            tqdm.write(f"\nSection {section} is skipped: untrained models accept tokens by chance alone.")
        elif section == 4:
            section4_isolated_timing(profile, ceilings)
        else:
            SECTION_FUNCTIONS[section](profile)
    profile.bar.close()
    _check_claims(profile)
    _predict(profile, manifest)
    drawn = plots.profile_plots(partial(results.stored_rows, profile.folder), profile.pair.label)
    files = plots.save_all(drawn, Path(profile.args.plots_dir))
    manifest.complete(device_after=devices.describe(device), skipped_sections=skipped, plots=files)
    print(f"\nTables are in {profile.folder}, plots in {profile.args.plots_dir}: {', '.join(files)}")
    print(f"next: {cli.next_command(results.REPORT, profile.args)}")


def _prepare_fast(profile: Profile, manifest: run.Manifest) -> None:
    """Pack and compile as Phase 1 did, or as this run did before it was interrupted; else as timings say."""
    earlier = run.decided_kernels(manifest.entries, _readable_phase1(profile.folder))
    decided = prepare_fast_kernels(profile.pair, profile.args.compile, _wanted(profile), tqdm.write, earlier)
    manifest.write(fast_kernels=decided)


def _wanted(profile: Profile) -> Wanted:
    """Return what the sections will ask of the fast engine; section 3 runs it most."""
    args = profile.args
    longest = max(input_ids.shape[1] for input_ids in profile.inputs.values()) + args.max_new_tokens
    runs = len(args.gammas) + 1 + (len(args.temperatures) * (SAMPLING_SEEDS + 1) if 3 in args.sections else 0)
    return Wanted((*args.gammas, MATCH_GAMMA), longest, len(profile.inputs) * runs * args.max_new_tokens)


def _open_run(profile: Profile, argv: list[str] | None) -> run.Manifest:
    """Begin a new run, moving an earlier one's files away, or take up the one in the folder."""
    args = profile.args
    constants = {name: value for name, value in vars(args).items() if name not in NOT_COMPARED_ON_RESUME}
    entries = run.run_entries(argv, constants) | {
        "pair": profile.pair.manifest_entry(),
        "device": devices.describe(profile.pair.target.device),
    }
    files = [table.file for table in (*TABLES, results.CLAIMS)]
    manifest = run.open_run(profile.folder, PHASE, files, entries, args.resume)
    if not manifest.resumed:
        run.move_to_previous(Path(args.plots_dir), [f"{name}.png" for name in PLOTS])
    return manifest


def _say(lines: list[str]) -> None:
    tqdm.write("\n".join(lines))


def _ceilings(pair: Pair) -> dict:
    """Return each model's bytes, read bandwidth and arithmetic peak: what a forward can't be faster than."""
    entry = {}
    for who, model, facts in (("draft", pair.draft, pair.draft_facts), ("target", pair.target, pair.target_facts)):
        entry[who] = {
            "bytes_per_token": facts.bytes_per_token,
            "weights": facts.bytes_per_token // model.dtype.itemsize,
            "bandwidth_bytes_per_s": devices.weights_bandwidth(model.device, facts.bytes_per_token),
            "peak_operations_per_s": devices.compute_peak(model.device, model.dtype),
        }
        entry[who]["ceiling_ms"] = facts.bytes_per_token / entry[who]["bandwidth_bytes_per_s"] * 1e3
    return entry


# --- Section 1: where a step's time goes -----------------------------------------------------------------------------


def section1_time_breakdown(profile: Profile) -> None:
    """Split full steps into phases, at gamma 0 (plain decoding) and at each gamma, for each engine."""
    catch_up_ms = cache(partial(_catch_up_ms, profile))
    for engine in profile.args.engines:
        for gamma in (0, *profile.args.gammas):
            profile.unit(
                results.BREAKDOWN,
                lambda e=engine, g=gamma: _breakdown(profile, e, g, catch_up_ms(e) if g else 0.0),
                engine=engine,
                gamma=gamma,
            )
    _say(profile_findings.show_breakdown(results.stored_rows(profile.folder, results.BREAKDOWN)))
    for engine in profile.args.engines:
        cost = _instrumentation_cost(profile, engine)
        shown = (
            "not measured" if cost is None else "none beyond noise" if cost <= 0 else f"{cost:+.1%} (median of pairs)"
        )
        tqdm.write(f"  {engine}: time that the clock itself adds to a run: {shown}")


def _breakdown(profile: Profile, engine: str, gamma: int, catch_up_ms: float) -> list[dict]:
    """Return the phases of STEPS full steps, over as many prompts as it takes; one full step before warms up."""
    names = list(profile.inputs)
    few = warm_up_tokens(gamma, profile.args.max_new_tokens)
    _speculate(profile, engine, gamma, names[0], PhaseClock(), few)
    rows: list[dict] = []
    for attempt in range(profile.args.steps * len(names)):  # each run gives at least one step
        name = names[attempt % len(names)]
        generation = _speculate(profile, engine, gamma, name, PhaseClock())
        for row in _full_steps(generation, gamma, catch_up_ms):
            rows.append({"step": len(rows), "prompt": name} | row)
            if len(rows) == profile.args.steps:
                return rows
    return rows


def _speculate(
    profile: Profile,
    engine: str,
    gamma: int,
    name: str,
    clock: PhaseClock | None = None,
    new_tokens: int | None = None,
) -> Generation:
    """Run one prompt greedily, split into phases if a clock is given; ``new_tokens``: in place of the run's."""
    pair, tokens = profile.pair, new_tokens or profile.args.max_new_tokens
    return speculative_generate(
        pair.draft, pair.target, profile.inputs[name], tokens, gamma, engine=engine, clock=clock
    )


def _full_steps(generation: Generation, gamma: int, catch_up_ms: float) -> list[dict]:
    """Return the phases, in ms, of the steps that proposed ``gamma`` tokens and were not the last."""
    rows, behind = [], False
    for seconds, proposed, accepted in zip(
        generation.step_seconds[:-1], generation.proposed, generation.accepted, strict=False
    ):
        ms = {name: value * 1e3 for name, value in seconds.items()}
        catch_up = min(catch_up_ms, ms["draft"]) if behind else 0.0
        row = {f"{name}_ms": ms.get(name, 0.0) for name in ("target", "sync", "verify", "other", "step")}
        row |= {"draft_ms": ms["draft"] - catch_up, "catchup_ms": catch_up}
        if proposed == gamma:
            rows.append(row | {"proposed": proposed, "accepted": accepted})
        behind = accepted == proposed
    return rows


def _catch_up_ms(profile: Profile, engine: str) -> float:
    """Return what a draft pass over two tokens takes longer than over one, which catching up adds; 0 with a sync."""
    if get_engine(engine).reforward:
        return 0.0
    repetitions = _repetitions(profile, ISOLATED_REPETITIONS)
    times = time_passes(profile.pair.draft, engine, (1, 2), repetitions)
    return max(float(np.median(times[2]) - np.median(times[1])), 0.0) * 1e3


def _instrumentation_cost(profile: Profile, engine: str) -> float | None:
    """Return how much longer runs take with the clock: the median over pairs, in turn, less one; None if unseen."""
    name, gamma = next(iter(profile.inputs)), max(profile.args.gammas)
    ratios = []
    for _ in range(INSTRUMENTATION_PAIRS):
        clocked = _speculate(profile, engine, gamma, name, PhaseClock())
        plain = _speculate(profile, engine, gamma, name)
        ratios.append(ratio(clocked.wall_time, plain.wall_time))
    return None if None in ratios else float(np.median(ratios)) - 1


def _repetitions(profile: Profile, usual: int) -> int:
    return QUICK_REPETITIONS if profile.args.quick else usual


# --- Section 2: acceptance along the text and along the block --------------------------------------------------------


def section2_position(profile: Profile) -> None:
    """Follow acceptance along each prompt's greedy text: every step that each gamma takes over it."""
    for name in profile.inputs:
        profile.unit(results.BY_POSITION, lambda n=name: _steps_by_position(profile, n), prompt=name)
    _say(profile_findings.show_position(results.stored_rows(profile.folder, results.BY_POSITION)))


def _steps_by_position(profile: Profile, name: str) -> list[dict]:
    """Replay the prompt's agreement trace at each gamma, which for greedy decoding is what a run does."""
    tokens, logits = _greedy_text(profile, name)
    agrees = logits.match(0).numpy().astype(bool)
    rows = []
    for gamma in profile.args.gammas:
        history = simulation.replay(agrees, gamma, profile.inputs[name].shape[1], len(tokens))
        position = 1
        for step, (proposed, accepted) in enumerate(zip(history.proposed, history.accepted, strict=True)):
            counts = {"proposed": proposed, "accepted": accepted}
            rate = accepted / proposed if proposed else None
            rows.append({"gamma": gamma, "step": step, "position": position, **counts, "acceptance_rate": rate})
            position += accepted + 1
    return rows


def _greedy_text(profile: Profile, name: str) -> tuple[list[int], PairLogits]:
    """Return the target's greedy text and both models' logits along it."""
    input_ids = profile.inputs[name]
    engine = profile.args.engines[-1]
    tokens = autoregressive_generate(profile.pair.target, input_ids, profile.args.max_new_tokens, engine=engine).tokens
    return tokens, pair_logits(profile.pair, input_ids, tokens, engine)


# --- Section 3: acceptance along temperature -------------------------------------------------------------------------


def section3_temperature(profile: Profile) -> None:
    """Compare exact match, overlap and rejection sampling at each temperature, prompt by prompt."""
    for name in profile.inputs:
        profile.unit(results.BY_TEMPERATURE, lambda n=name: _by_temperature(profile, n), prompt=name)
    _say(profile_findings.show_temperature(results.stored_rows(profile.folder, results.BY_TEMPERATURE)))


def _by_temperature(profile: Profile, name: str) -> list[dict]:
    tokens, logits = _greedy_text(profile, name)
    logits = PairLogits(logits.draft[1:], logits.target[1:])  # the first token is the prefill's and never proposed
    greedy = logits.match(0).mean().item()
    rows = []
    for temperature in profile.args.temperatures:
        match = logits.match(temperature).mean().item()
        rows.append(
            {
                "temperature": temperature,
                "gamma": MATCH_GAMMA,
                "positions": len(tokens) - 1,
                "alpha_match": match,
                "match_rate": _match_rate(profile, name, temperature),
                "alpha_overlap": logits.overlap(temperature).mean().item(),
                "relative_to_greedy": match / greedy if greedy else None,
                **_sampled(profile, name, temperature),
            }
        )
    return rows


def _generator(profile: Profile, name: str, temperature: float, seed: int) -> torch.Generator:
    """Return a generator of its own for each draw, so that no result depends on which others were run."""
    key = [profile.args.seed, seed, list(profile.inputs).index(name), int(temperature * 1e6)]
    return torch.Generator().manual_seed(int(np.random.SeedSequence(key).generate_state(1)[0]))


def _match_rate(profile: Profile, name: str, temperature: float) -> float | None:
    """Return the acceptance rate of drawn draft tokens under greedy verification: the study's experiment."""
    pair, engine = profile.pair, profile.args.engines[-1]
    rule = Sampled(temperature, _generator(profile, name, temperature, seed=0)) if temperature else None
    draft = ModelDraft(pair.draft, get_engine(engine), rule)
    tokens = profile.args.max_new_tokens
    return speculative_generate(
        draft, pair.target, profile.inputs[name], tokens, MATCH_GAMMA, engine=engine
    ).acceptance_rate


def _sampled(profile: Profile, name: str, temperature: float) -> dict:
    """Return rejection sampling's alpha with its 95 % interval, and what the overlap expects at the tokens it tried."""
    pair, engine, input_ids = profile.pair, profile.args.engines[-1], profile.inputs[name]
    accepted, overlaps = [], []
    for seed in range(1, 1 + (SAMPLING_SEEDS if temperature else 1)):  # greedy runs are all the same
        generation = speculative_generate(
            pair.draft,
            pair.target,
            input_ids,
            profile.args.max_new_tokens,
            MATCH_GAMMA,
            engine=engine,
            temperature=temperature,
            generator=_generator(profile, name, temperature, seed),
        )
        places, taken = tried_positions(generation)
        overlap = pair_logits(pair, input_ids, generation.tokens, engine).overlap(temperature)
        accepted += taken
        overlaps += overlap[places].tolist()
    return profile_findings.sampled_alpha(np.array(accepted), np.array(overlaps))


# --- Section 4: single forwards --------------------------------------------------------------------------------------


def section4_isolated_timing(profile: Profile, ceilings: dict) -> None:
    """Time single forwards: one token many times over, then by width, cache length and batch."""
    models = {"draft": profile.pair.draft, "target": profile.pair.target}
    for engine in profile.args.engines:
        for name, model in models.items():
            profile.unit(
                results.ISOLATED, lambda m=model, e=engine: _isolated(profile, m, e), engine=engine, model=name
            )
        for name, model in models.items():
            profile.unit(
                results.VERIFY_COST,
                lambda n=name, m=model, e=engine: _by_shape(profile, m, e, ceilings[n]),
                engine=engine,
                model=name,
            )
    _say(profile_findings.show_isolated(results.stored_rows(profile.folder, results.ISOLATED), ceilings))
    _say(profile_findings.show_shapes(results.stored_rows(profile.folder, results.VERIFY_COST)))


def _isolated(profile: Profile, model: torch.nn.Module, engine: str) -> list[dict]:
    held = Held()
    times = time_passes(model, engine, (1,), _repetitions(profile, ISOLATED_REPETITIONS), held)[1]
    return [
        {"repetition": repetition, "cache_length": held.cache_length, "ms": seconds * 1e3}
        for repetition, seconds in enumerate(times)
    ]


def _by_shape(profile: Profile, model: torch.nn.Module, engine: str, ceiling: dict) -> list[dict]:
    """Return each shape's median time, and its ratio to one token as measured and as the ceilings allow."""
    rows = []
    for held, widths in _shapes(model, max(LEAST_WIDEST, *(gamma + 1 for gamma in profile.args.gammas))):
        times = time_passes(model, engine, widths, _repetitions(profile, SHAPE_REPETITIONS), held)
        one = float(np.median(times[1]))
        for width, passes in times.items():
            median = float(np.median(passes))
            rows.append(
                {
                    "tokens": width,
                    "cache_length": held.cache_length,
                    "batch": held.batch,
                    "ms": median * 1e3,
                    "spread": float(np.subtract(*np.percentile(passes, [75, 25])) / median),
                    "verify_ratio": median / one,
                    "roofline_ratio": _roofline(ceiling, width, held.batch),
                }
            )
    return rows


def _roofline(ceiling: dict, tokens: int, batch: int) -> float:
    return devices.roofline_verify_ratio(
        tokens,
        ceiling["bytes_per_token"],
        ceiling["weights"] * batch,
        ceiling["bandwidth_bytes_per_s"],
        ceiling["peak_operations_per_s"],
    )


def _shapes(model: torch.nn.Module, widest: int) -> list[tuple[Held, tuple[int, ...]]]:
    """Return what to hold and which widths to time there: all widths first, then longer caches and larger batches."""
    limit = getattr(model.config, "max_position_embeddings", None) or max(CACHE_LENGTHS)
    lengths = [Held(length) for length in CACHE_LENGTHS[1:] if length + max(FEW_WIDTHS) <= limit]
    batches = [Held(batch=batch) for batch in BATCHES[1:]]
    return [(Held(), tuple(range(1, widest + 1))), *((held, FEW_WIDTHS) for held in lengths + batches)]


# --- Section 5: who proposes, and how many ---------------------------------------------------------------------------


def section5_strategies(profile: Profile) -> None:
    """Measure every strategy on every prompt, and all prompts as one batch."""
    compared = cache(
        partial(strategies.strategies, profile.pair, profile.args.gammas)
    )  # measures costs when first asked
    for name in profile.inputs:
        profile.unit(results.STRATEGIES, lambda n=name: _strategy_rows(profile, compared, n), prompt=name)
    inputs = list(profile.inputs.values())
    profile.unit(
        results.STRATEGIES,
        lambda: strategies.measure_batch(profile.pair, inputs, profile.args.max_new_tokens),
        prompt=ALL_PROMPTS,
    )
    _say(profile_findings.show_strategies(claims.totals(results.stored_rows(profile.folder, results.STRATEGIES))))


def _strategy_rows(profile: Profile, compared: Callable[[], list[strategies.Strategy]], name: str) -> list[dict]:
    _, logits = _greedy_text(profile, name)
    agrees = logits.match(0).numpy().astype(bool)
    tokens = profile.args.max_new_tokens
    new_generator = partial(_generator, profile, name, temperature=0.0, seed=0)
    task = strategies.Task(profile.inputs[name], tokens, agrees, new_generator)
    return strategies.measure_all(profile.pair, compared(), task)


# --- Section 6: smaller key/value caches -----------------------------------------------------------------------------


def section6_kv_compression(profile: Profile) -> None:
    """Measure what each compression of the draft's and of the target's cache saves and costs."""
    inputs = list(profile.inputs.values())
    texts = cache(partial(kv_techniques.greedy_texts, profile.pair, inputs, profile.args.max_new_tokens))
    for where, technique in KV_UNITS:
        profile.unit(
            results.KV_COMPRESSION,
            lambda w=where, t=technique: _kv_rows(profile, texts, w, t),
            where=where,
            technique=technique,
        )
    _say(profile_findings.show_kv_compression(results.stored_rows(profile.folder, results.KV_COMPRESSION)))


def _kv_rows(profile: Profile, texts: Callable[[], list[list[int]]], where: str, technique: str) -> list[dict]:
    inputs = list(profile.inputs.values())
    if technique == kv_techniques.PREFIX:
        return kv_techniques.measure_prefix(profile.pair, inputs, profile.args.max_new_tokens)
    return [kv_techniques.measure(profile.pair, inputs, texts(), where, technique)]


SECTION_FUNCTIONS = {
    1: section1_time_breakdown,
    2: section2_position,
    3: section3_temperature,
    5: section5_strategies,
    6: section6_kv_compression,
}


# --- What follows from the tables ------------------------------------------------------------------------------------


def _predict(profile: Profile, manifest: run.Manifest) -> None:
    """Complete Phase 1's predictions with this phase's costs, or say why not; what was measured here stays."""
    try:
        _predict_from(profile, manifest)
    except InputError as error:
        print(f"\nNo predictions: {error}")


def _predict_from(profile: Profile, manifest: run.Manifest) -> None:
    phase1 = run.read_manifest(profile.folder, "phase1")
    if phase1 is None:
        raise InputError(f"there is no Phase 1 run in {profile.folder}; speculative_decoding.py makes one")
    constants = phase1.get("constants") or {}
    shared = {name: value for name, value in manifest.entries["constants"].items() if name in constants}
    if changed := run.differences(constants, shared):
        print("\nConstants that differ from those of Phase 1: " + "; ".join(changed))
    timed = [results.stored_rows(profile.folder, table) for table in (results.BREAKDOWN, results.VERIFY_COST)]
    costs = profile_findings.step_costs(*timed)
    if not costs:
        raise InputError("they need sections 1 and 4")
    facts = evidence.read_run(profile.folder)
    runs = results.read_table(profile.folder, results.RUNS)
    rows = predictions.predict_from_profile(facts.summary, runs, facts.traces, costs)
    results.write_table(profile.folder, results.PREDICTIONS, rows)
    print(f"\nPredictions against Phase 1's decode speedups, costs and acceptance from elsewhere; {profile.pair.label}")
    for line in profile_findings.show_predictions(rows):
        print(line)


def _check_claims(profile: Profile) -> None:
    """Check the second document's claims against whatever of sections 5 and 6 is there."""
    measured, compressed = (
        results.stored_rows(profile.folder, table) for table in (results.STRATEGIES, results.KV_COMPRESSION)
    )
    if len(measured) or len(compressed):
        claimed = claims.check_claims(measured, compressed)
        results.write_table(profile.folder, results.CLAIMS, claimed)
        _say(profile_findings.show_claims(claimed))


if __name__ == "__main__":
    sys.exit(main())
