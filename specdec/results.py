"""The CSV files: their columns, reading them with checks, and the summary that is derived from the runs.

The scripts talk to each other only through these files.
"""

from __future__ import annotations

import io
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from specdec import theory
from specdec.errors import InputError

NOISY_SPREAD = 0.10  # spread / median of repeats above which a timing is called noisy
IMPOSSIBLE = 1.15  # decode speedup / tokens per step: a step takes about one target forward at least
FEW_REPEATS = 5  # with fewer, the spread is the range; from here on the interquartile range
FORMULA_STARTS = "=+-@\t\r"  # a spreadsheet would take text that begins so for a formula
PANDAS_DTYPES = {"text": "string", "integer": "Int64", "number": "float64", "flag": "boolean"}


@dataclass(frozen=True)
class Table:
    """One CSV file: its name, its columns with their kinds, and the script that writes it."""

    file: str
    columns: Mapping[str, str]
    made_by: str


def _columns(*groups: str) -> dict[str, str]:
    """Return {column: kind} from groups such as "integer: gamma repeat", in the order given."""
    split = (group.split(": ") for group in groups)
    return {column: kind for kind, names in split for column in names.split()}


PHASE1, PHASE2, PHASE3 = "speculative_decoding.py", "analysis_deep.py", "phase3_profiling.py"
REPORT = "final_report.py"
RUNS = Table(
    "speculative_runs.csv",
    _columns(
        "text: prompt category engine",
        "integer: gamma repeat order prompt_tokens",
        "number: baseline_time_s draft_time_s speculative_time_s",
        "number: baseline_prefill_s draft_prefill_s speculative_prefill_s",
        "integer: new_tokens steps proposed accepted rejections",
        "flag: matches_baseline near_tie",
        "integer: first_mismatch",
        "number: mismatch_top2_gap",
        "integer: eos_at",
    ),
    PHASE1,
)
STEPS = Table(
    "speculative_steps.csv",
    _columns("text: prompt engine", "integer: gamma repeat step proposed accepted"),
    PHASE1,
)
TRACE = Table(
    "agreement_trace.csv",
    _columns("text: prompt", "integer: position draft_token target_token", "flag: agrees", "number: top2_gap"),
    PHASE1,
)
_SUMMARY_COLUMNS = _columns(
    "text: prompt category",
    "integer: gamma",
    "text: engine",
    "integer: prompt_tokens new_tokens repeats",
    "number: baseline_time_s draft_time_s speculative_time_s acceptance_rate alpha tokens_per_step cost_ratio "
    "speedup speedup_low speedup_high decode_speedup predicted_speedup predicted_speedup_alpha",
    "flag: matches_baseline near_tie",
    "integer: first_mismatch eos_at",
    "flag: noisy",
)
SUMMARIES = {
    "published": Table("speculative_results.csv", _SUMMARY_COLUMNS, PHASE1),
    "fast": Table("speculative_results_fast.csv", _SUMMARY_COLUMNS, PHASE1),
}
PREDICTIONS = Table(
    "predictions.csv",
    _columns(
        "text: prompt engine",
        "integer: gamma",
        "number: measured leviathan_rate leviathan_alpha corrected full replay replay_free",
    ),
    PHASE2,
)
SIMULATION = Table(
    "simulation_results.csv",
    _columns(
        "text: scenario",
        "number: cost_ratio helpful_pct mean_speedup low high helpful_pct_all_gammas mean_all_gammas",
        "integer: trials",
    ),
    PHASE2,
)
REGIME_MAP = Table(
    "regime_map.csv",
    _columns("number: alpha cost_ratio", "integer: gamma", "number: speedup", "flag: helpful"),
    PHASE2,
)
BREAK_EVEN = Table("break_even.csv", _columns("number: alpha", "integer: gamma", "number: min_cost_ratio"), PHASE2)
BREAKDOWN = Table(
    "time_breakdown.csv",
    _columns(
        "text: engine",
        "integer: gamma step",
        "number: draft_ms target_ms sync_ms catchup_ms verify_ms other_ms step_ms",
        "integer: proposed accepted",
        "text: prompt",
    ),
    PHASE3,
)
BY_POSITION = Table(
    "alpha_vs_position.csv",
    _columns("text: prompt", "integer: gamma step position proposed accepted", "number: acceptance_rate"),
    PHASE3,
)
BY_TEMPERATURE = Table(
    "alpha_vs_temperature.csv",
    _columns(
        "text: prompt",
        "number: temperature",
        "integer: gamma positions",
        "number: alpha_match match_rate alpha_overlap alpha_sampled low high relative_to_greedy",
        "integer: tried accepted",
        "number: expected variance",
    ),
    PHASE3,
)
STRATEGIES = Table(
    "strategies.csv",
    _columns(
        "text: strategy prompt",
        "number: gamma_mean temperature acceptance_rate alpha tokens_per_step",
        "integer: steps",
        "number: time_s speedup",
        "flag: tokens_equal_baseline",
        "text: note",
        "integer: new_tokens proposed accepted tried",
        "number: baseline_time_s",
    ),
    PHASE3,
)
KV_COMPRESSION = Table(
    "kv_compression.csv",
    _columns(
        "text: technique where",
        "number: bytes_per_token cache_bytes alpha tokens_equal_share time_s",
        "text: note",
    ),
    PHASE3,
)
CLAIMS = Table("claims.csv", _columns("text: claim source measured verdict"), PHASE3)
ISOLATED = Table(
    "timing_isolation.csv",
    _columns("text: engine model", "integer: repetition cache_length", "number: ms"),
    PHASE3,
)
VERIFY_COST = Table(
    "verify_cost.csv",
    _columns(
        "text: engine model",
        "integer: tokens cache_length batch",
        "number: ms spread verify_ratio roofline_ratio",
    ),
    PHASE3,
)

CAUSES = Table(
    "causes.csv",
    _columns("text: engine", "integer: gamma", "text: cause", "number: ms share speedup speedup_without"),
    REPORT,
)
COMPARISON = Table("comparison.csv", _columns("text: quantity", "number: study published fast"), REPORT)


def format_cell(value: Any) -> str:
    """Return a value as a CSV cell: empty if absent (None, NaN, infinite), a number with seven digits, text quoted if
    need be, with an apostrophe before what a spreadsheet would compute (:func:`read_table` takes it away again).
    """
    if value is None or value is pd.NA:
        return ""
    if isinstance(value, float | np.floating):
        return f"{value:.7g}" if math.isfinite(value) else ""
    text = str(value)
    if isinstance(value, str) and value[:1] in ("'", *FORMULA_STARTS):
        text = "'" + text
    return '"' + text.replace('"', '""') + '"' if any(c in text for c in ',"\r\n') else text


def write_whole(path: Path, text: str) -> None:
    """Replace the file at once: readers see the old text or the new one."""
    part = path.with_name(path.name + ".part")
    try:
        with open(part, "w", encoding="utf-8", newline="") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
    except BaseException:  # a full disk, Ctrl-C
        part.unlink(missing_ok=True)
        raise


def write_table(folder: Path, table: Table, rows: pd.DataFrame) -> None:
    """Write ``rows`` as the whole file, replacing it at once."""
    lines = [",".join(table.columns)]
    lines += [
        ",".join(map(format_cell, row)) for row in rows[list(table.columns)].astype(object).itertuples(index=False)
    ]
    write_whole(folder / table.file, "\n".join(lines) + "\n")


def read_table(folder: Path, table: Table) -> pd.DataFrame:
    """Return the file's rows, each column in its kind; blanks are missing values.

    Raises InputError, naming the file and the script that makes it, if the file is missing, empty, torn, or lacks a
    column, or if a value is not of its column's kind.
    """
    path = folder / table.file
    remedy = f"run {table.made_by} to make it"
    try:
        text = path.read_bytes().decode("utf-8")  # as it is: a cell may hold any line end
    except FileNotFoundError:
        raise InputError(f"{path} is missing; {remedy}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path} can't be read ({error}); {remedy}") from error
    if not text.strip():
        raise InputError(f"{path} is empty; {remedy}")
    if not text.endswith("\n"):
        go_on = ", or go on with --resume" if table in (RUNS, STEPS) else ""  # all others are replaced whole
        raise InputError(f"{path} ends in the middle of a row; {remedy}{go_on}")
    try:
        frame = pd.read_csv(io.StringIO(text), dtype="string", keep_default_na=False)
    except (pd.errors.ParserError, ValueError) as error:
        raise InputError(f"{path} is not a CSV file ({str(error).strip()}); {remedy}") from error
    missing = [column for column in table.columns if column not in frame]
    if missing:
        raise InputError(f"{path} lacks the column {missing[0]}; {remedy}")
    for column, kind in table.columns.items():
        frame[column] = _typed(frame[column], kind, path)
    return frame[list(table.columns)]


def stored_rows(folder: Path, table: Table) -> pd.DataFrame:
    """Return the file's rows as ``read_table`` does, none if there is no such file."""
    if not (folder / table.file).exists():
        return pd.DataFrame(columns=list(table.columns))
    return read_table(folder, table)


def _typed(cells: pd.Series, kind: str, path: Path) -> pd.Series:
    if kind == "text":
        return cells.str.removeprefix("'")
    values = []
    for row, cell in enumerate(cells, 1):
        try:
            values.append(_value(cell, kind))
        except ValueError:
            raise InputError(f"{path} has {cell!r} in column {cells.name}, row {row}: not {kind}") from None
    return pd.Series(pd.array(values, dtype=PANDAS_DTYPES[kind]), name=cells.name)


def _value(cell: str, kind: str) -> bool | int | float | None:
    """Return a cell's value; None for a blank, NaN for a blank number. ValueError if it is not of its kind."""
    if not cell:
        return math.nan if kind == "number" else None
    if kind == "flag":
        if cell not in ("True", "False"):
            raise ValueError(cell)
        return cell == "True"
    if kind == "integer":
        return int(cell)
    value = float(cell)
    if not math.isfinite(value):
        raise ValueError(cell)
    return value


def summarise(runs: pd.DataFrame, engine: str) -> pd.DataFrame:
    """Return one row per prompt and gamma of ``engine``, in the order of the runs: medians over the repeats."""
    groups = runs[runs.engine == engine].groupby(["prompt", "gamma"], sort=False)
    rows = [_summary_row(group.reset_index(drop=True)) for _, group in groups]
    return pd.DataFrame(rows, columns=list(_SUMMARY_COLUMNS))


def _summary_row(runs: pd.DataFrame) -> dict[str, Any]:
    first = runs.iloc[0]
    gamma = int(first.gamma)
    decode = {who: runs[f"{who}_time_s"] - runs[f"{who}_prefill_s"] for who in ("baseline", "draft", "speculative")}
    speedups = _ratio(runs.baseline_time_s, runs.speculative_time_s).dropna()
    cost_ratio = _ratio(decode["baseline"], decode["draft"]).median() if first.new_tokens > 1 else math.nan
    proposed, accepted, rejections = (int(runs[name].sum()) for name in ("proposed", "accepted", "rejections"))
    rate = accepted / proposed if proposed else math.nan
    alpha = accepted / (accepted + rejections) if accepted + rejections else math.nan
    steps = int(runs.steps.sum())
    timings = [runs.baseline_time_s, runs.draft_time_s, runs.speculative_time_s]
    row = {
        **{name: first[name] for name in ("prompt", "category", "gamma", "engine", "prompt_tokens", "new_tokens")},
        "repeats": len(runs),
        **{name: runs[name].median() for name in ("baseline_time_s", "draft_time_s", "speculative_time_s")},
        "acceptance_rate": rate,
        "alpha": alpha,
        "tokens_per_step": (accepted + steps) / steps if steps else math.nan,
        "cost_ratio": cost_ratio,
        "speedup": speedups.median(),
        "speedup_low": speedups.min() if len(speedups) > 1 else math.nan,
        "speedup_high": speedups.max() if len(speedups) > 1 else math.nan,
        "decode_speedup": _ratio(decode["baseline"], decode["speculative"]).median() if steps else math.nan,
        "predicted_speedup": _predicted(rate, gamma, cost_ratio),
        "predicted_speedup_alpha": _predicted(alpha, gamma, cost_ratio),
        "matches_baseline": bool(runs.matches_baseline.all()),
        "near_tie": bool(runs.near_tie.any()),
        "first_mismatch": runs.first_mismatch.min(),
        "eos_at": first.eos_at,
        "noisy": None,
    }
    impossible = row["decode_speedup"] > IMPOSSIBLE * row["tokens_per_step"]
    if impossible or len(runs) > 1:
        row["noisy"] = bool(impossible) or any(is_noisy(times) for times in timings)
    return row


def _ratio(above: pd.Series, below: pd.Series) -> pd.Series:
    """Return above / below where the clock saw both take time; NaN elsewhere."""
    return (above / below).where((above > 0) & (below > 0))


def _predicted(alpha: float, gamma: int, cost_ratio: float) -> float:
    if math.isnan(alpha) or not cost_ratio > 0:
        return math.nan
    return float(theory.leviathan_speedup(alpha, gamma, cost_ratio))


def is_noisy(times: pd.Series) -> bool:
    """Return whether repeated timings spread by more than a tenth of their median."""
    times = times.dropna()
    if len(times) < 2:
        return False
    if len(times) < FEW_REPEATS:
        spread = times.max() - times.min()
    else:
        spread = times.quantile(0.75) - times.quantile(0.25)
    return bool(spread > NOISY_SPREAD * times.median())
