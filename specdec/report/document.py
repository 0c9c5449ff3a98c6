"""The whole report, section by section; one that has nothing to rest on is left out."""

from __future__ import annotations

from specdec.report import answer, method, outlook, reasons
from specdec.report.material import Material

SECTIONS = (
    answer.head,
    answer.the_answer,
    reasons.why,
    reasons.acceptance,
    reasons.predictions,
    reasons.what_would_pay,
    outlook.techniques,
    outlook.recommendations,
    outlook.beside_the_study,
    method.how_measured,
    method.missing,
)


def write(report: Material) -> str:
    """Return the whole report in Markdown."""
    written = ["\n".join(section(report)).strip() for section in SECTIONS]
    return "\n\n".join(section for section in written if section) + "\n"
