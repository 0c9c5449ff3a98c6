"""The report on how its numbers were made: runs, models, noise, and what is missing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from specdec import results
from specdec.report.collection import Collection
from specdec.report.material import Material

CONSTANTS = (
    "prompts",
    "gammas",
    "repeats",
    "max_new_tokens",
    "engines",
    "steps",
    "sections",
    "trials",
    "seed",
)  # constants


def how_measured(report: Material) -> list[str]:
    """Return runs, versions, models and noise."""
    lines = ["## How the numbers were made", ""]
    for phase, manifest in report.collection.manifests.items():
        lines.append(f"- **{phase}**: " + "; ".join(_run_words(manifest)) + ".")
    for role, entry in _models(report.collection).items():
        lines.append(
            f"- **{role}**: {entry.get('name')}, {entry.get('parameters', 0) / 1e6:.1f} M parameters, "
            f"{entry.get('layers')} layers, {entry.get('bytes_per_token', 0) / 1e6:.1f} MB read per token, "
            f"{entry.get('dtype')} on {entry.get('device')}, SHA-256 {str(entry.get('sha256'))[:12]}..."
        )
    return lines + _noise(report)


def _run_words(manifest: Mapping[str, Any]) -> list[str]:
    """Return what the manifest says of the run, in the order in which one asks."""
    constants, versions, device = (manifest.get(name) or {} for name in ("constants", "versions", "device"))
    parts = {
        "status": manifest.get("status"),
        "run": manifest.get("run_id"),
        "started": manifest.get("started"),
        "device": device.get("name"),
        "threads": device.get("threads"),
        "constants": ", ".join(f"{name} {_constant(constants[name])}" for name in CONSTANTS if name in constants),
        "versions": ", ".join(f"{name} {version}" for name, version in versions.items()),
        "commit": manifest.get("commit"),
    }
    return [f"{name} {value}" for name, value in parts.items() if value]


def _constant(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, list) else str(value)


def _models(collection: Collection) -> dict[str, Mapping[str, Any]]:
    pair = next((m["pair"] for m in collection.manifests.values() if m.get("pair")), {})
    return {role: pair[role] for role in ("draft", "target") if role in pair}


def _noise(report: Material) -> list[str]:
    lines = []
    for engine, rows in report.collection.summaries.items():
        flagged = rows.noisy.dropna()
        if len(flagged):
            lines.append(
                f"- **noise, engine {engine}**: {int(flagged.sum())} of {len(flagged)} rows have repeats that spread "
                f"by more than {results.NOISY_SPREAD:.0%} of their median."
            )
        else:
            lines.append(f"- **noise, engine {engine}**: one repeat, so no spread is known.")
    return lines


def missing(report: Material) -> list[str]:
    """Return what is not there and what makes it."""
    if not report.collection.missing:
        return []
    return ["## What is missing", "", *(f"- {line}" for line in report.collection.missing)]
