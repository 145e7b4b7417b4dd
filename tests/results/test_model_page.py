from __future__ import annotations

from nni_petridish.results.model_page import _cells
from search_spaces import VisionSpace


def test_a_page_tells_the_width_of_a_widened_model() -> None:
    space = VisionSpace((1, 8, 8), 10, cells_per_stage=1, filters=4, stages=2)
    seed = space.seed()
    assert _cells(seed) == ["cell normal: as in the seed", "cell reduce: as in the seed"]
    assert _cells(space.widened(seed, 1.5))[0] == "width: 1.5 times the filters of the space"
