"""Judge growing by tables in which every architecture of a space was trained."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nni_petridish._support.lazy import attach

__getattr__, __dir__, __all__ = attach(
    __name__,
    {
        "TruthTable": ".tables",
        "judge_scores": ".work",
        "read_table": ".tables",
        "simulate": ".simulate",
    },
)

if TYPE_CHECKING:
    from nni_petridish.studies.judge.simulate import simulate
    from nni_petridish.studies.judge.tables import TruthTable, read_table
    from nni_petridish.studies.judge.work import judge_scores
