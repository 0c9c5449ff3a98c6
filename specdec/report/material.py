"""What the report is written from, and how it shows numbers: tables and cells of Markdown."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import pandas as pd

from specdec.published import Study
from specdec.report import advice
from specdec.report.advice import Advice
from specdec.report.collection import Collection


@dataclass(frozen=True)
class Material:
    """All that the sections are made from. plots: name -> path relative to the report, only those that were drawn."""

    collection: Collection
    study: Study
    comparison: pd.DataFrame
    causes: pd.DataFrame
    plots: Mapping[str, str]
    note: str

    @cached_property
    def advices(self) -> list[Advice]:
        """Each engine's advice, the engine that ran last at the end: the one to use."""
        found = [advice.advise(engine, rows) for engine, rows in self.collection.summaries.items()]
        return [one for one in found if one is not None]


def table(columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> list[str]:
    """Return a Markdown table; numbers with two digits, "-" where there is none."""
    lines = ["| " + " | ".join(columns) + " |", "|" + " --- |" * len(columns)]
    return lines + ["| " + " | ".join(cell(value) for value in row) + " |" for row in rows]


def cell(value: Any, form: str = ".2f") -> str:
    """Return a value as the report shows it: a number in ``form``, "-" if there is none."""
    if value is None or value is pd.NA or (isinstance(value, float) and math.isnan(value)):
        return "-"
    if isinstance(value, float):
        return f"{value:{form}}"
    return str(value).replace("|", "\\|")


def plot_line(report: Material, name: str, what: str) -> list[str]:
    return [f"![{what}]({report.plots[name]})", ""] if name in report.plots else []
