from __future__ import annotations

import json
import logging
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from nni_petridish.errors import DamagedModelError, GalleryError
from nni_petridish.gallery import files
from nni_petridish.gallery.files import temporary_name
from nni_petridish.gallery.gallery import Gallery
from nni_petridish.gallery.recovery import recover
from nni_petridish.search.records import Growth, Outcome

FORK = multiprocessing.get_context("fork")
SPACE = {"name": "cells", "filters": 16}
SETTINGS = {"seed": 0, "l1": 0.001, "nested": {"i_max": 3}}


@pytest.fixture
def gallery(tmp_path: Path) -> Gallery:
    return Gallery.create(tmp_path / "gallery", SPACE, SETTINGS)


def name(number: int) -> str:
    return f"g{number:05d}"


def a_model(id: str, value: float = 1.0) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Return a model whose weights and documents contain the same number."""
    weights = {"a": torch.full((40, 50), value), "b.c": torch.full((3,), value)}
    return weights, {
        "genotype": {"value": value},
        "lineage": {**Growth(id, None, 5, 0.001, 3).to_dict(), "value": value},
        "metrics": Outcome(id, value / 1e6, 100, 10, 2, {"value": value}).to_dict(),
        "alphas": [],
    }


def assert_is_whole(gallery: Gallery, id: str) -> None:
    weights, documents = gallery.load_model(id)
    value = documents["genotype"]["value"]
    assert weights.keys() == {"a", "b.c"}
    assert all(bool((w == value).all()) for w in weights.values())
    assert documents["lineage"]["value"] == documents["metrics"]["metrics"]["value"] == value
    assert documents["alphas"] == []


def journaled(gallery: Gallery, kind: str = "model") -> list[str]:
    return [event["id"] for event in gallery.journal.read_all() if event["event"] == kind]


def temporary(gallery: Gallery) -> list[str]:
    return [p.name for p in (gallery.folder / "models").iterdir() if p.name.startswith(".")]


# Creating and opening.


def test_a_new_gallery_is_private_to_its_user(tmp_path: Path) -> None:
    gallery = Gallery.create(tmp_path / "deep" / "gallery", {}, {})
    assert gallery.folder.stat().st_mode & 0o777 == 0o700


def test_locks_and_journal_do_not_lead_out_of_the_gallery(tmp_path: Path) -> None:
    gallery = Gallery.create(tmp_path / "gallery", {}, {})
    outside = tmp_path / "outside"
    outside.write_text("precious")
    for name in ("coordinator.lock", "journal.lock", "journal.jsonl"):
        (gallery.folder / name).symlink_to(outside)
    with pytest.raises(GalleryError, match="Cannot open"):
        gallery.lock_coordinator()
    with pytest.raises(GalleryError, match="Cannot open"):
        gallery.journal.append({"event": "release"})
    (gallery.folder / "journal.lock").unlink()
    with pytest.raises(GalleryError, match="Cannot write"):
        gallery.journal.append({"event": "release"})
    assert outside.read_text() == "precious"


def test_a_gallery_is_made_once_and_opened_again(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "gallery"
    made = Gallery.create(folder, SPACE, SETTINGS)
    content = (folder / "gallery.json").read_bytes()
    for again in (Gallery.create(folder, SPACE, SETTINGS), Gallery(folder), made):
        assert (again.space, again.settings) == (SPACE, SETTINGS)
        assert again.model_ids() == []
    assert (folder / "gallery.json").read_bytes() == content


def test_a_gallery_of_another_search_is_refused_in_one_line_naming_what_differs(
    gallery: Gallery,
) -> None:
    with pytest.raises(GalleryError) as caught:
        Gallery.create(
            gallery.folder,
            {"name": "cells", "filters": 32},
            {"seed": 0, "l1": 0.001, "nested": {"i_max": 2}, "new": 1},
        )
    message = str(caught.value)
    assert "\n" not in message
    assert "space.filters is 16 there but 32 here" in message
    assert "settings.nested.i_max is 3 there but 2 here" in message
    assert "settings.new is None there but 1 here" in message
    assert "l1" not in message


def test_folders_that_are_no_gallery_are_refused_and_left_as_they_are(tmp_path: Path) -> None:
    with pytest.raises(GalleryError, match=r"gallery.json is missing"):
        Gallery(tmp_path / "nowhere")
    (tmp_path / "thesis.tex").write_text("important")
    with pytest.raises(GalleryError, match=r"not a gallery and not empty: it has thesis.tex"):
        Gallery.create(tmp_path, SPACE, SETTINGS)
    with pytest.raises(GalleryError, match="Cannot make a gallery"):
        Gallery.create(tmp_path / "thesis.tex" / "gallery", SPACE, SETTINGS)
    assert os.listdir(tmp_path) == ["thesis.tex"]


@pytest.mark.parametrize(
    ("content", "message"),
    [("{", "is damaged"), ('{"version": 99}', "must have version 1 but has 99"), ("3", "version")],
)
def test_a_description_that_cannot_be_read_is_an_error(
    gallery: Gallery, content: str, message: str
) -> None:
    (gallery.folder / "gallery.json").write_text(content)
    with pytest.raises(GalleryError, match=message):
        Gallery(gallery.folder)


def test_many_processes_that_make_a_gallery_at_once_agree_on_it(tmp_path: Path) -> None:
    def make(settings: dict[str, int]) -> None:
        try:
            Gallery.create(tmp_path / "gallery", SPACE, settings)
        except GalleryError:
            os._exit(7)

    processes = [FORK.Process(target=make, args=({"kind": k % 2},)) for k in range(8)]
    codes = run_all(processes)
    kind = Gallery(tmp_path / "gallery").settings["kind"]
    assert codes == [0 if k % 2 == kind else 7 for k in range(8)]


# Saving and loading.


def test_a_saved_model_is_loaded_bit_by_bit_as_it_was(gallery: Gallery) -> None:
    torch.manual_seed(0)
    base = torch.randn(4, 6)
    weights = {
        "image": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "whole": base,
        "shared": base,
        "part": base[:, ::2],
        "turned": base.t(),
        "counter": torch.tensor(7),
        "half": torch.randn(3, dtype=torch.float16),
        "odd": torch.tensor([float("nan"), float("inf"), -0.0]),
        "learned": torch.nn.Parameter(torch.randn(3)),
        "nothing": torch.empty(0, 3),
    }
    documents = a_model("g00000")[1]
    assert gallery.save_model("g00000", weights, documents)
    loaded, read = gallery.load_model("g00000")
    assert loaded.keys() == weights.keys()
    for key, tensor in weights.items():
        assert loaded[key].dtype == tensor.dtype
        torch.testing.assert_close(loaded[key], tensor.detach(), rtol=0, atol=0, equal_nan=True)
    assert read == documents
    assert gallery.load_documents("g00000") == documents


def test_a_saved_model_stands_in_the_journal_with_all_a_search_needs(gallery: Gallery) -> None:
    weights, documents = a_model("g00000", value=5.0)
    gallery.save_model("g00000", weights, documents)
    (event,) = gallery.journal.read_new()
    assert event["event"] == "model"
    assert Growth.from_dict(event["growth"]) == Growth("g00000", None, 5, 0.001, 3)
    assert Outcome.from_dict(event["outcome"]).to_dict() == documents["metrics"]
    assert gallery.model_ids() == ["g00000"]
    assert gallery.has_model("g00000")


def test_the_first_of_two_workers_wins(gallery: Gallery) -> None:
    assert gallery.save_model("g00001", *a_model("g00001", 1.0))
    assert not gallery.save_model("g00001", *a_model("g00001", 2.0))
    assert gallery.load_model("g00001")[1]["genotype"] == {"value": 1.0}
    assert temporary(gallery) == []


def test_the_second_worker_writes_the_line_that_the_first_could_not(gallery: Gallery) -> None:
    gallery.save_model("g00001", *a_model("g00001", 1.0))
    gallery.journal.path.unlink()  # as if it had died after the rename
    assert not gallery.save_model("g00001", *a_model("g00001", 2.0))
    (event,) = gallery.journal.read_all()
    assert event["outcome"]["metrics"] == {"value": 1.0}


def test_numbers_that_are_not_finite_do_not_cost_a_finished_model(gallery: Gallery) -> None:
    weights, documents = a_model("g00000")
    documents["metrics"]["error"] = float("inf")
    documents["alphas"] = [float("nan"), 1.0]
    assert gallery.save_model("g00000", weights, documents)
    assert gallery.load_documents("g00000")["alphas"] == [None, 1.0]
    assert gallery.journal.read_all()[0]["outcome"]["error"] is None


def remove(key: str) -> Callable[[dict[str, Any]], object]:
    return lambda documents: documents.pop(key)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (remove("metrics"), "needs the document 'metrics'"),
        (remove("lineage"), "needs the document 'lineage'"),
        (lambda d: d["metrics"].pop("error"), "lacks error"),
        (lambda d: d["metrics"].update(id="g00009"), "metrics of 'g00009'"),
        (lambda d: d["metrics"].update(parameters=None), "needs numbers"),
        (lambda d: d.update({"../evil": 1}), "name like 'genotype'"),
        (lambda d: d.update(checksums=1), "name like 'genotype'"),
        (lambda d: d.update(genotype=object()), "Expected numbers"),
    ],
)
def test_a_model_that_cannot_be_journaled_is_refused_and_leaves_nothing(
    gallery: Gallery, change: Callable[[dict[str, Any]], object], message: str
) -> None:
    weights, documents = a_model("g00000")
    change(documents)
    with pytest.raises(GalleryError, match=message):
        gallery.save_model("g00000", weights, documents)
    assert os.listdir(gallery.folder / "models") == []
    assert journaled(gallery) == []


@pytest.mark.parametrize("id", ["../g00000", "", "g", "g0/../../x", "seed"])
def test_an_id_is_never_a_path(gallery: Gallery, id: str) -> None:
    for call in (
        lambda: gallery.save_model(id, *a_model(id)),
        lambda: gallery.load_model(id),
        lambda: gallery.quarantine(id, "?"),
        lambda: gallery.work_folder(id, 1),
    ):
        with pytest.raises(GalleryError, match="named like"):
            call()


def test_a_missing_model_is_named(gallery: Gallery) -> None:
    with pytest.raises(GalleryError, match="no model g00003"):
        gallery.load_model("g00003")


# Damage.


def flip_a_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


FILES = ["weights.safetensors", "genotype.json", "metrics.json", "checksums.json"]


def test_a_model_that_cannot_be_read_just_now_is_not_called_damaged(gallery: Gallery) -> None:
    gallery.save_model("g00000", *a_model("g00000"))
    checksums = gallery.folder / "models" / "g00000" / "checksums.json"
    checksums.unlink()
    checksums.mkdir()  # reading it is an OSError
    with pytest.raises(GalleryError, match="Cannot read") as caught:
        gallery.load_model("g00000")
    assert not isinstance(caught.value, DamagedModelError)


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize(
    "harm", [flip_a_bit, Path.unlink, lambda p: os.truncate(p, p.stat().st_size // 2)]
)
def test_damage_in_any_file_is_noticed(
    gallery: Gallery, file: str, harm: Callable[[Path], None]
) -> None:
    gallery.save_model("g00000", *a_model("g00000"))
    harm(gallery.folder / "models" / "g00000" / file)
    with pytest.raises(DamagedModelError) as caught:
        gallery.load_model("g00000")
    assert "\n" not in str(caught.value)


def test_a_quarantined_model_is_out_of_the_way_with_one_warning(
    gallery: Gallery, caplog: pytest.LogCaptureFixture
) -> None:
    gallery.save_model("g00000", *a_model("g00000"))
    with caplog.at_level(logging.WARNING):
        assert gallery.quarantine("g00000", "bad checksum")
        assert not gallery.quarantine("g00000", "bad checksum")
    assert len(caplog.records) == 1
    assert "g00000" in caplog.text
    assert "bad checksum" in caplog.text
    assert gallery.model_ids() == []
    assert journaled(gallery, "quarantine") == ["g00000"]
    assert (gallery.folder / "quarantine" / "g00000" / "weights.safetensors").exists()
    # A late duplicate does not bring it back.
    assert not gallery.save_model("g00000", *a_model("g00000"))
    assert gallery.model_ids() == []


# Recovering.


def test_recovering_writes_the_line_of_a_model_that_has_none(gallery: Gallery) -> None:
    gallery.save_model("g00000", *a_model("g00000"))
    gallery.save_model("g00001", *a_model("g00001"))
    lines = gallery.journal.path.read_bytes().splitlines(keepends=True)
    gallery.journal.path.write_bytes(lines[0] + lines[1][:20])
    assert recover(gallery).journaled == ("g00001",)
    assert journaled(gallery) == ["g00000", "g00001"]
    nothing = recover(gallery)
    assert (nothing.journaled, nothing.quarantined, nothing.removed) == ((), (), ())


def test_recovering_quarantines_what_is_damaged_or_gone(gallery: Gallery) -> None:
    for k in range(3):
        gallery.save_model(name(k), *a_model(name(k)))
    lines = gallery.journal.path.read_bytes().splitlines(keepends=True)
    gallery.journal.path.write_bytes(b"".join(lines[:2]))
    flip_a_bit(gallery.folder / "models" / "g00002" / "metrics.json")
    # As if it had died between the move and the line.
    os.rename(gallery.folder / "models" / "g00001", gallery.folder / "quarantine" / "g00001")
    assert recover(gallery).quarantined == ("g00002", "g00001")
    assert sorted(journaled(gallery, "quarantine")) == ["g00001", "g00002"]
    assert gallery.model_ids() == ["g00000"]
    assert recover(gallery).quarantined == ()


def test_recovering_removes_leftovers_of_the_dead_only(
    gallery: Gallery, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = temporary_name(gallery.folder).name.rsplit("-", 3)[1]
    dead = FORK.Process(target=int)
    dead.start()
    dead.join()
    models = gallery.folder / "models"
    mine = f".tmp-g00000-{host}-{os.getpid()}-aa"
    of_others = [".tmp-g00000-other-1-bb", ".tmp-g00000-other-1-dd"]
    gone = f".tmp-g00000-{host}-{dead.pid}-cc"
    for folder in [mine, *of_others, ".tmp-strange", gone]:
        (models / folder).mkdir()
        (models / folder / "weights.safetensors").write_bytes(b"half")
    # Another machine's clock says nothing: this file may be a minute old.
    os.utime(models / of_others[0], (0, 0))
    (gallery.folder / "pictures").mkdir()
    picture = f".tmp-hull.svg-{host}-{dead.pid}-ee"
    (gallery.folder / "pictures" / picture).touch()
    assert sorted(recover(gallery).removed) == sorted([gone, picture])
    assert sorted(os.listdir(models)) == sorted([mine, *of_others, ".tmp-strange"])
    # What does not change for an hour of this process is abandoned.
    later = time.monotonic() + 3601
    monkeypatch.setattr(files.time, "monotonic", lambda: later)
    (models / of_others[1] / "weights.safetensors").write_bytes(b"half and more")
    assert sorted(gallery.sweep()) == sorted([mine, of_others[0]])
    assert sorted(os.listdir(models)) == sorted([of_others[1], ".tmp-strange"])


def test_a_work_folder_that_is_a_link_is_refused(gallery: Gallery, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (gallery.folder / "work" / "g00001-1").symlink_to(outside)
    with pytest.raises(GalleryError, match="is a link"):
        gallery.work_folder("g00001", 1)
    (outside / "mine").touch()
    gallery.remove_work("g00001")
    assert (outside / "mine").exists()


def test_work_folders_live_until_their_model_is_complete(gallery: Gallery) -> None:
    for id, attempt in (("g00000", 1), ("g00000", 2), ("g00001", 1), ("g00010", 1)):
        (gallery.work_folder(id, attempt) / "epoch.safetensors").write_bytes(b"...")
    assert gallery.work_folder("g00001", 1) == gallery.work_folder("g00001", 1)
    gallery.save_model("g00000", *a_model("g00000"))
    recover(gallery)
    assert sorted(os.listdir(gallery.folder / "work")) == ["g00001-1", "g00010-1"]
    gallery.remove_work("g00001")
    assert os.listdir(gallery.folder / "work") == ["g00010-1"]


# One search at a time.


def test_a_second_search_is_refused_naming_the_first(gallery: Gallery) -> None:
    claim = gallery.lock_coordinator()
    for other in (gallery, Gallery(gallery.folder)):
        with pytest.raises(GalleryError, match=f"process {os.getpid()} on"):
            other.lock_coordinator()

    def try_it() -> None:
        try:
            Gallery(gallery.folder).lock_coordinator()
        except GalleryError as error:
            os._exit(7 if f"process {os.getppid()} on" in str(error) else 8)

    assert run_all([FORK.Process(target=try_it)]) == [7]
    claim.release()
    assert run_all([FORK.Process(target=try_it)]) == [0]
    gallery.lock_coordinator().release()


def test_a_search_that_was_killed_blocks_nobody_even_if_its_children_live(
    gallery: Gallery,
) -> None:
    ready = FORK.Event()

    def hold() -> None:
        gallery.lock_coordinator()
        if os.fork() == 0:
            time.sleep(1.5)
            os._exit(0)
        ready.set()
        time.sleep(60)

    process = FORK.Process(target=hold)
    process.start()
    assert ready.wait(20)
    with pytest.raises(GalleryError, match=f"process {process.pid} on"):
        gallery.lock_coordinator()
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    gallery.lock_coordinator().release()


def test_a_gallery_and_its_documents_are_read_without_torch(gallery: Gallery) -> None:
    gallery.save_model("g00000", *a_model("g00000"))
    code = (
        "import sys; from nni_petridish.running.coordinator import Coordinator\n"
        "from nni_petridish.gallery.gallery import Gallery\n"
        "from nni_petridish.search.search import SearchSettings\n"
        "g = Gallery(sys.argv[1]); c = Coordinator(g, SearchSettings()); c.ask()\n"
        "print(c.search.best().id, g.load_documents('g00000')['genotype'], 'torch' in sys.modules)"
    )
    command = [sys.executable, "-c", code, str(gallery.folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "g00000 {'value': 1.0} False"


# Concurrent processes, and killed ones.


def run_all(processes: list[Any]) -> list[int | None]:
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    return [process.exitcode for process in processes]


def hammer(folder: Path, worker: int, seconds: float, result: Path) -> None:
    """Save models, some of which other processes save too, read all, and return the saved ids."""
    gallery = Gallery(folder)
    rng = random.Random(worker)
    saved = []
    end = time.monotonic() + seconds
    number = 0
    while time.monotonic() < end:
        number += rng.randint(1, 3)
        id = name(number if number % 3 == 0 else number * 8 + worker + 1_000_000)
        if gallery.save_model(id, *a_model(id, float(rng.randint(1, 1000)))):
            saved.append(id)
        for other in rng.sample(seen := gallery.model_ids(), min(3, len(seen))):
            assert_is_whole(gallery, other)
        gallery.journal.read_new()
    result.write_text(json.dumps(saved))


def hammer_with_8(gallery: Gallery, tmp_path: Path, seconds: float) -> None:
    torch.set_num_threads(1)
    results = [tmp_path / f"{worker}.json" for worker in range(8)]
    processes = [
        FORK.Process(target=hammer, args=(gallery.folder, worker, seconds, results[worker]))
        for worker in range(8)
    ]
    assert run_all(processes) == [0] * 8
    saved = [id for result in results for id in json.loads(result.read_text())]
    assert len(saved) == len(set(saved)) > 40
    assert set(gallery.model_ids()) == set(saved) == set(journaled(gallery))
    for id in saved:
        assert_is_whole(gallery, id)
    assert temporary(gallery) == []
    assert recover(gallery).journaled == ()


def test_8_processes_hammering_one_gallery_lose_nothing(gallery: Gallery, tmp_path: Path) -> None:
    hammer_with_8(gallery, tmp_path, seconds=5)


@pytest.mark.slow
def test_8_processes_hammering_one_gallery_for_a_minute_lose_nothing(
    gallery: Gallery, tmp_path: Path
) -> None:
    hammer_with_8(gallery, tmp_path, seconds=60)


def kill_writers(gallery: Gallery, tmp_path: Path, kills: int) -> None:
    torch.set_num_threads(1)
    rng = random.Random(4)

    def write(start: int, confirmed: Path) -> None:
        own = Gallery(gallery.folder)
        with open(confirmed, "a") as file:
            for number in range(start, start + 10_000):
                own.save_model(name(number), *a_model(name(number), float(number + 1)))
                file.write(f"{name(number)}\n")
                file.flush()

    confirmed = tmp_path / "confirmed"
    confirmed.touch()
    written = 0
    for kill in range(kills):
        process = FORK.Process(target=write, args=(kill * 10_000, confirmed))
        process.start()
        time.sleep(rng.uniform(0.01, 0.2))
        assert process.pid is not None
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        for id in gallery.model_ids():
            assert_is_whole(gallery, id)
        recover(gallery)
        assert temporary(gallery) == []
        assert Counter(journaled(gallery)) == Counter(gallery.model_ids())
        assert set(confirmed.read_text().split()) <= set(gallery.model_ids())
        if kill % 5 == 4:
            # Keep the listing short, the journal in line with it.
            confirmed.write_text("")
            # On a busy machine, no process may have written to the journal yet.
            gallery.journal.path.unlink(missing_ok=True)
            for id in gallery.model_ids():
                os.rename(gallery.folder / "models" / id, tmp_path / f"old-{id}")
                written += 1
    assert written


def test_writers_killed_at_any_moment_leave_complete_models_only(
    gallery: Gallery, tmp_path: Path
) -> None:
    kill_writers(gallery, tmp_path, kills=20)


@pytest.mark.slow
def test_a_hundred_and_fifty_killed_writers_leave_complete_models_only(
    gallery: Gallery, tmp_path: Path
) -> None:
    kill_writers(gallery, tmp_path, kills=150)
