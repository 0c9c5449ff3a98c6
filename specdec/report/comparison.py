"""The study's published figures beside this run's, quantity by quantity: the rows of ``comparison.csv``."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import pandas as pd

from specdec import findings, profile_findings, results
from specdec.published import Study
from specdec.report import causes
from specdec.report.collection import Collection
from specdec.results import COMPARISON

ENGINES = ("published", "fast")


def compare_with_study(collection: Collection, study: Study) -> pd.DataFrame:
    """Return one row per quantity: what the study published and what each engine gave here, NaN where there is none."""
    rows = [*_outcome(collection, study), *_times(collection, study), *_by_gamma(collection, study)]
    rows += [*_verification(collection, study), *_sync(collection, study)]
    rows += [*_by_prompt(collection, study), *_by_temperature(collection, study)]
    return pd.DataFrame(rows, columns=list(COMPARISON.columns))


def _row(quantity: str, study: float, here: Mapping[str, float]) -> dict:
    return {"quantity": quantity, "study": study} | {engine: here.get(engine, math.nan) for engine in ENGINES}


def _outcome(collection: Collection, study: Study) -> list[dict]:
    counts = {engine: findings.count_helpful(rows) for engine, rows in collection.summaries.items()}
    counts = {engine: count for engine, count in counts.items() if count is not None}
    qualities = {
        engine: findings.prediction_quality(rows, "predicted_speedup") for engine, rows in collection.summaries.items()
    }
    qualities = {engine: quality for engine, quality in qualities.items() if quality is not None}
    correlations = {e: math.nan if q.correlation is None else q.correlation for e, q in qualities.items()}
    errors = {engine: quality.mean_absolute_error for engine, quality in qualities.items()}
    by_rate = "prediction from a row's own acceptance rate"
    return [
        _row("configurations", study.summary_value("configurations"), {e: c.total for e, c in counts.items()}),
        _row("helpful configurations", study.summary_value("helpful"), {e: c.helpful for e, c in counts.items()}),
        _row("best speedup", study.summary_value("best_speedup"), {e: c.best for e, c in counts.items()}),
        _row("mean speedup", study.summary_value("mean_speedup"), {e: c.mean for e, c in counts.items()}),
        _row(f"{by_rate}: correlation", study.summary_value("prediction_correlation"), correlations),
        _row(f"{by_rate}: mean absolute error", study.summary_value("prediction_mae"), errors),
    ]


def _times(collection: Collection, study: Study) -> list[dict]:
    facts = collection.facts
    models = pd.DataFrame(columns=["engine", "role", "measured_ms"]) if facts is None else facts.models
    ms = {role: models[models.role == role].set_index("engine").measured_ms.to_dict() for role in ("draft", "target")}
    draft, target = study.model("draft"), study.model("target")
    ratios = {} if facts is None else dict(facts.cost_ratios)
    by_bytes, by_layers = (
        {} if facts is None else dict.fromkeys(collection.summaries, ratio(facts))
        for ratio in (causes.bytes_ratio, causes.layers_ratio)
    )
    return [
        _row("draft, ms a token", draft.ms_per_token, ms["draft"]),
        _row("target, ms a token", target.ms_per_token, ms["target"]),
        _row("cost ratio c", study.cost_ratio, ratios),
        _row("c by bytes of weights", target.weight_bytes / draft.weight_bytes, by_bytes),
        _row("c by layers", target.layers / draft.layers, by_layers),
    ]


def _by_gamma(collection: Collection, study: Study) -> list[dict]:
    rows = []
    speedups = study.speedups.set_index("gamma")
    rates = study.rates_by_gamma.set_index("gamma").acceptance_rate
    own = {engine: rows_.groupby("gamma") for engine, rows_ in collection.summaries.items()}
    acceptance = {
        engine: findings.alpha_by_gamma(collection.runs[collection.runs.engine == engine])
        for engine in collection.summaries
    }
    for gamma in study.gammas:
        for quantity, published, column in (
            ("measured speedup", speedups.measured_speedup[gamma], "speedup"),
            ("speedup predicted by acceptance rate", speedups.predicted_speedup[gamma], "predicted_speedup"),
            ("speedup predicted by alpha", math.nan, "predicted_speedup_alpha"),
        ):
            means = {engine: groups[column].mean().get(gamma, math.nan) for engine, groups in own.items()}
            rows.append(_row(f"{quantity}, gamma {gamma}", published, means))
        for quantity, published in (("acceptance_rate", rates[gamma]), ("alpha", math.nan)):
            pooled = {engine: table[quantity].get(gamma, math.nan) for engine, table in acceptance.items()}
            rows.append(_row(f"{quantity.replace('_', ' ')}, gamma {gamma}", published, pooled))
    return rows


def _verification(collection: Collection, study: Study) -> list[dict]:
    """How much longer the target takes over a step's tokens than over one; the study did not measure it."""
    rows = []
    for gamma in study.gammas:
        costs = {engine: collection.step_costs.get((engine, gamma)) for engine in ENGINES}
        ratios = {
            engine: cost.target_time(gamma + 1) / cost.t_target for engine, cost in costs.items() if cost is not None
        }
        rows.append(_row(f"target over {gamma + 1} tokens / over one", math.nan, ratios))
    return rows


def _sync(collection: Collection, study: Study) -> list[dict]:
    breakdown = collection.rows(results.BREAKDOWN)
    medians = profile_findings.phase_medians(breakdown) if len(breakdown) else None
    rows = []
    for row in study.sync.itertuples():
        here: dict[str, dict[str, float]] = {"sync_ms": {}, "sync_share": {}}
        for engine in ENGINES:
            if medians is not None and (engine, row.gamma) in medians.index:
                for column, values in here.items():
                    values[engine] = medians.loc[(engine, row.gamma), column]
        rows.append(_row(f"sync, ms a step, gamma {row.gamma}", row.sync_ms, here["sync_ms"]))
        rows.append(_row(f"sync, share of a step, gamma {row.gamma}", row.share_of_step, here["sync_share"]))
    return rows


def _by_prompt(collection: Collection, study: Study) -> list[dict]:
    means = {engine: rows.groupby("prompt").acceptance_rate.mean() for engine, rows in collection.summaries.items()}
    return [
        _row(
            f"acceptance rate, {row.prompt}",
            row.acceptance_rate,
            {engine: by_prompt.get(row.prompt, math.nan) for engine, by_prompt in means.items()},
        )
        for row in study.rates.itertuples()
    ]


def _by_temperature(collection: Collection, study: Study) -> list[dict]:
    """Phase 3 measures acceptance on engine `fast` alone; drawn exact match is what the study counted."""
    here = collection.rows(results.BY_TEMPERATURE)
    rows = []
    for row in study.temperatures.itertuples():
        own = here[np.isclose(here.temperature.astype(float), row.temperature)]
        for quantity, published, column in (
            ("exact match, accepted / proposed", row.acceptance_rate, "match_rate"),
            ("rejection sampling, accepted / tried", math.nan, "alpha_sampled"),
        ):
            mean = {"fast": own[column].mean()} if len(own) else {}
            rows.append(_row(f"{quantity}, T {row.temperature:g}", published, mean))
    return rows
