from __future__ import annotations

import threading

import pytest

from nni_petridish.errors import Interrupted, StorageError
from nni_petridish.running import patience
from nni_petridish.running.patience import Outage, outlast


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patience, "FIRST_SECONDS", 0.01)


class FullDisk:
    """An action that fails a number of times."""

    def __init__(self, failures: int) -> None:
        self.left = failures

    def __call__(self) -> str:
        if self.left:
            self.left -= 1
            raise StorageError("Cannot write x: No space left on device; free some.")
        return "written"


def test_an_outage_is_outlasted_and_told_in_one_line(caplog: pytest.LogCaptureFixture) -> None:
    assert outlast(FullDisk(4), lambda: False, None) == "written"
    assert [record.getMessage().partition(":")[0] for record in caplog.records] == [
        "Cannot write x",
        "The disk is back; the search goes on.",
    ]
    caplog.clear()
    assert outlast(FullDisk(0), lambda: False, None) == "written"
    assert not caplog.records


def test_a_request_to_stop_and_the_limit_end_the_waiting() -> None:
    stop = threading.Event()
    threading.Timer(0.1, stop.set).start()
    with pytest.raises(Interrupted, match="waiting for a disk: Cannot write x"):
        outlast(FullDisk(10**9), stop.is_set, None)
    with pytest.raises(StorageError, match=r"free some; it was waited for 0 s\.$"):
        outlast(FullDisk(10**9), lambda: False, 0.05)
    with pytest.raises(StorageError, match="waited for 0 s"):
        outlast(FullDisk(1), lambda: False, 0.0)


def test_pauses_double_up_to_a_minute_and_are_counted_as_waiting() -> None:
    outage, error = Outage(1000.0), StorageError("Cannot write x.")
    pauses: list[float] = []
    while sum(pauses) < 1000.0:
        pauses.append(outage.met(error))
    assert pauses[:4] == [0.01, 0.02, 0.04, 0.08]
    assert max(pauses) == patience.LONGEST_SECONDS
    with pytest.raises(StorageError, match="it was waited for 1000 s"):
        outage.met(error)
