"""One `SearchProcess` for all tests of a session: its start takes seconds."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.support.faults import SearchProcess


@pytest.fixture(scope="session")
def search_process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SearchProcess]:
    """A process that forks searches."""
    from tests.support.faults import SearchProcess

    with SearchProcess(tmp_path_factory.mktemp("process")) as process:
        yield process
