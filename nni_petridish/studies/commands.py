"""Configuration files as the commands read them: the sections of studies included."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nni_petridish.running.config import SearchConfig


def read_config(path: Path) -> SearchConfig:
    """Read and check a configuration, the sections that a search passes over included."""
    from nni_petridish.running.config import SearchConfig, read_experiment
    from nni_petridish.studies.ablations.section import check_ablations
    from nni_petridish.studies.comparison.section import check_comparison
    from nni_petridish.studies.tuning.section import check_tuning

    search_space, arguments, base, experiment = read_experiment(path)
    config = SearchConfig.from_parts(search_space, arguments, base, experiment)
    check_tuning(arguments.get("tuning", {}))
    if "ablations" in arguments:
        check_ablations(arguments["ablations"])
    if "compare" in arguments:
        check_comparison(arguments["compare"])
    return config
