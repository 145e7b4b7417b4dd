from __future__ import annotations

import json
import logging
import multiprocessing
import os
import random
import signal
import threading
import time
from pathlib import Path

import pytest

from nni_petridish.errors import GalleryError
from nni_petridish.gallery.journal import Journal, decode, encode

FORK = multiprocessing.get_context("fork")


def event(number: int, **more: object) -> dict[str, object]:
    return {"event": "fail", "id": f"g{number:05d}", "attempt": 1, "reason": "ä\n\u2028ö", **more}


@pytest.fixture
def journal(tmp_path: Path) -> Journal:
    return Journal(tmp_path / "journal.jsonl")


def test_what_was_appended_is_read_in_order_and_once(journal: Journal) -> None:
    assert journal.read_new() == []
    for k in range(5):
        journal.append(event(k))
    assert journal.read_new() == [event(k) for k in range(5)]
    assert journal.read_new() == []
    journal.append(event(5))
    assert journal.read_new() == [event(5)]
    assert journal.read_all() == [event(k) for k in range(6)]


def test_every_line_is_plain_json(journal: Journal) -> None:
    for k in range(3):
        journal.append(event(k))
    lines = journal.path.read_bytes().splitlines()
    assert [json.loads(line)["id"] for line in lines] == ["g00000", "g00001", "g00002"]


def test_a_line_changed_in_any_byte_is_not_believed() -> None:
    line = encode(event(1))
    assert decode(line) == event(1)
    for at in range(len(line)):
        assert decode(line[:at] + bytes([line[at] ^ 1]) + line[at + 1 :]) is None
        assert decode(line[:at]) is None


@pytest.mark.parametrize("size", [1, 10, 60, None])
def test_a_torn_last_line_is_left_alone_and_closed_by_the_next_writer(
    journal: Journal, caplog: pytest.LogCaptureFixture, size: int | None
) -> None:
    journal.append(event(0))
    with open(journal.path, "ab") as file:
        file.write(encode(event(1))[: size or -1])
    assert journal.read_new() == [event(0)]
    assert journal.read_new() == []
    assert caplog.records == []
    Journal(journal.path).append(event(2))
    assert journal.read_new() == [event(2)]
    assert "line 2 is damaged" in caplog.text
    assert journal.read_all() == [event(0), event(2)]


def test_a_line_that_lacks_only_its_newline_counts_once_it_is_closed(journal: Journal) -> None:
    journal.append(event(0))
    with open(journal.path, "ab") as file:
        file.write(encode(event(1)))
    assert journal.read_new() == [event(0)]
    journal.repair()
    journal.repair()
    assert journal.read_new() == [event(1)]
    assert journal.path.read_bytes().count(b"\n") == 2


def test_repairing_nothing_makes_nothing(journal: Journal) -> None:
    journal.repair()
    assert not journal.path.exists()


def test_a_damaged_line_in_the_middle_is_skipped_and_named(
    journal: Journal, caplog: pytest.LogCaptureFixture
) -> None:
    for k in range(4):
        journal.append(event(k))
    data = bytearray(journal.path.read_bytes())
    data[data.index(b"g00002") + 5] ^= 1
    journal.path.write_bytes(data)
    with caplog.at_level(logging.WARNING):
        assert journal.read_new() == [event(0), event(1), event(3)]
    assert [record.getMessage() for record in caplog.records] == [
        f"{journal.path}: line 3 is damaged and was skipped."
    ]
    journal.append(event(4))
    assert journal.read_new() == [event(4)]
    assert len(caplog.records) == 1


def test_a_journal_that_has_become_shorter_is_an_error(journal: Journal) -> None:
    journal.append(event(0))
    journal.append(event(1))
    journal.read_new()
    os.truncate(journal.path, 10)
    with pytest.raises(GalleryError, match="shorter"):
        journal.read_new()


@pytest.mark.parametrize("value", [float("nan"), {1, 2}])
def test_what_json_cannot_hold_is_refused_before_anything_is_written(
    journal: Journal, value: object
) -> None:
    with pytest.raises(GalleryError, match="JSON"):
        journal.append(event(0, value=value))
    assert not journal.path.exists()


def test_a_journal_that_cannot_be_written_is_named_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(GalleryError, match="No such file or directory"):
        Journal(tmp_path / "missing" / "journal.jsonl").append(event(0))


def test_a_reader_at_work_sees_every_line_of_all_threads_and_processes(journal: Journal) -> None:
    def write(writer: int) -> None:
        own = Journal(journal.path)
        for k in range(40):
            own.append(event(writer * 100 + k, filler="x" * random.Random(k).randint(0, 9000)))

    def write_in_threads(writer: int) -> None:
        threads = [threading.Thread(target=write, args=(2 * writer + t,)) for t in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    processes = [FORK.Process(target=write_in_threads, args=(w,)) for w in range(4)]
    for process in processes:
        process.start()
    seen: list[str] = []
    while any(process.is_alive() for process in processes):
        seen += [e["id"] for e in journal.read_new()]
    for process in processes:
        process.join()
        assert process.exitcode == 0
    seen += [e["id"] for e in journal.read_new()]
    assert sorted(seen) == [f"g{w * 100 + k:05d}" for w in range(8) for k in range(40)]
    # The lines of one writer stay in their order.
    for writer in range(8):
        own = [id for id in seen if int(id[1:]) // 100 == writer]
        assert own == sorted(own)


def test_killed_writers_lose_no_line_that_they_knew_to_be_written(
    journal: Journal, tmp_path: Path
) -> None:
    def write(writer: int, confirmed: Path) -> None:
        own = Journal(journal.path)
        descriptor = os.open(confirmed, os.O_WRONLY | os.O_CREAT)
        for k in range(100_000):
            own.append(event(writer * 100_000 + k))
            os.pwrite(descriptor, str(k).encode().rjust(8), 0)

    rng = random.Random(0)
    for writer in range(12):
        process = FORK.Process(target=write, args=(writer, tmp_path / str(writer)))
        process.start()
        time.sleep(rng.uniform(0.02, 0.15))
        assert process.pid is not None
        os.kill(process.pid, signal.SIGKILL)
        process.join()
    journal.append(event(99))
    seen = {e["id"] for e in journal.read_new()}
    for writer in range(12):
        confirmed = tmp_path / str(writer)
        last = int(confirmed.read_text() or -1) if confirmed.exists() else -1
        assert {f"g{writer * 100_000 + k:05d}" for k in range(last + 1)} <= seen
