from __future__ import annotations

import json
import math
import random
import subprocess
import sys
import time
import tracemalloc
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from nni_petridish.errors import ConfigError, SearchError
from nni_petridish.search.events import EXHAUSTED, REFUSED, REJECTED, model_event
from nni_petridish.search.hull import lower_hull
from nni_petridish.search.records import CHOICES, growth_id
from nni_petridish.search.search import (
    Done,
    Event,
    Growth,
    Limits,
    Outcome,
    Search,
    SearchSettings,
    Wait,
)


def a_search(seeds: int = 1, seed: int = 0, tolerance: float = 0.0, **limits: Any) -> Search:
    return Search(
        SearchSettings(
            seed=seed,
            seeds=seeds,
            tolerance=tolerance,
            limits=Limits(**limits),
            seed_epochs=4,
            weak_epochs=2,
            final_epochs=3,
        )
    )


def an_outcome(id: str, error: float = 0.3, multiply_adds: int = 100, **more: Any) -> Outcome:
    return Outcome(id, error, multiply_adds, more.pop("parameters", 10), **more)


def ask_growth(search: Search, elapsed: float = 0.0) -> Growth:
    growth = search.ask(elapsed)
    assert isinstance(growth, Growth), growth
    return growth


def finish(search: Search, growth: Growth, **more: Any) -> None:
    assert search.tell(an_outcome(growth.id, **more))


def with_seed_model(**options: Any) -> Search:
    search = a_search(**options)
    finish(search, ask_growth(search), epochs=4)
    return search


# Asking.


def test_the_seed_comes_first_and_growths_wait_for_it() -> None:
    search = a_search()
    seed = ask_growth(search)
    assert (seed.id, seed.parent, seed.attempt) == ("g00000", None, 1)
    assert isinstance(search.ask(), Wait)
    finish(search, seed)
    assert ask_growth(search).parent == seed.id
    assert ask_growth(search).parent == seed.id


def test_growths_start_as_soon_as_one_of_several_seeds_is_ready() -> None:
    search = a_search(seeds=3)
    seeds = [ask_growth(search) for _ in range(3)]
    assert [growth.parent for growth in seeds] == [None] * 3
    assert isinstance(search.ask(), Wait)
    finish(search, seeds[1])
    assert ask_growth(search).parent == seeds[1].id


def test_the_hull_of_the_search_is_the_hull_of_its_models() -> None:
    rng = random.Random(5)
    search = a_search()
    finish(search, ask_growth(search), error=0.9, multiply_adds=50)
    for _ in range(200):
        finish(search, ask_growth(search), error=rng.random(), multiply_adds=rng.randint(60, 999))
    models = search.models()
    expected = lower_hull([(m.multiply_adds, m.error) for m in models])
    assert [m.id for m in search.hull()] == [models[i].id for i in expected]
    best = search.best()
    assert best is not None
    assert best.error == min(m.error for m in models)


def test_parents_are_on_the_hull_and_their_choices_are_counted() -> None:
    search = with_seed_model()
    rng = random.Random(7)
    chosen: Counter[str] = Counter()
    for _ in range(300):
        on_hull = {model.id for model in search.hull()}
        growth = ask_growth(search)
        assert growth.parent in on_hull
        chosen[str(growth.parent)] += 1
        finish(search, growth, error=rng.random(), multiply_adds=rng.randint(101, 999))
    assert len(chosen) > 2
    assert {id: search.times_chosen(id) for id in chosen} == dict(chosen)


def test_a_tolerance_makes_near_models_parents_too() -> None:
    for tolerance, expected in ((0.0, {"g00000"}), (0.1, {"g00000", "g00001"})):
        search = a_search(seeds=2, tolerance=tolerance)
        first, second = ask_growth(search), ask_growth(search)
        finish(search, first, error=0.30)
        finish(search, second, error=0.31)
        assert {ask_growth(search).parent for _ in range(60)} == expected


def test_equal_searches_ask_for_equal_growths_and_other_seeds_for_others() -> None:
    def story(seed: int) -> list[Growth]:
        search = with_seed_model(seed=seed)
        rng = random.Random(0)
        growths = []
        for _ in range(50):
            growths.append(ask_growth(search))
            finish(search, growths[-1], error=rng.random(), multiply_adds=rng.randint(101, 999))
        return growths

    assert story(1) == story(1)
    assert [g.seed for g in story(1)] != [g.seed for g in story(2)]


def test_no_two_growths_of_a_hundred_thousand_share_their_random_seed() -> None:
    search = a_search(seeds=100_000)
    seeds = {ask_growth(search).seed for _ in range(100_000)}
    assert len(seeds) == 100_000
    assert min(seeds) >= 0
    assert max(seeds) < 2**31


def test_a_chooser_sets_l1_and_i_max_of_growths_and_is_not_asked_in_a_replay() -> None:
    events: list[Event] = []
    asked: list[int] = []

    def chooser(number: int) -> tuple[float, int]:
        asked.append(number)
        return number / 10, number

    def commit(event: Event) -> None:
        events.append(event)
        search.apply(event)

    search = Search(SearchSettings(), chooser, commit)
    finish(search, ask_growth(search))
    growth = ask_growth(search)
    assert (growth.l1, growth.i_max) == (0.1, 1)
    assert search.fail(growth.id, "broken")
    assert (ask_growth(search).l1, ask_growth(search).i_max) == (0.1, 2)
    assert asked == [1, 2]
    assert Search.replay(search.settings, events).state() == search.state()
    assert asked == [1, 2]


@pytest.mark.parametrize("choice", [(-1.0, 3), (0.1, 0), (math.nan, 3), (0.1, 2.5)])
def test_what_a_chooser_chooses_is_checked(choice: tuple[float, int]) -> None:
    search = Search(SearchSettings(), lambda number: choice)
    finish(search, ask_growth(search))
    with pytest.raises(ConfigError, match="must be"):
        search.ask()


# Limits.


def test_max_models_counts_finished_and_running_models_with_seeds() -> None:
    search = with_seed_model(max_models=3)
    first, second = ask_growth(search), ask_growth(search)
    assert isinstance(search.ask(), Wait)
    finish(search, first)
    assert isinstance(search.ask(), Wait)
    finish(search, second)
    assert search.ask() == Done("max_models=3 is reached")
    assert len(search.models()) == 3


def test_a_dropped_growth_makes_room_for_another_one() -> None:
    search = with_seed_model(max_models=2)
    growth = ask_growth(search)
    search.fail(growth.id, "first")
    search.fail(ask_growth(search).id, "second")
    replacement = ask_growth(search)
    assert replacement.id != growth.id
    assert isinstance(search.ask(), Wait)


def test_no_growth_starts_that_would_exceed_max_epochs() -> None:
    # The seed takes 4 epochs and a growth 2 + 3, of which two fit into 14.
    search = a_search(max_epochs=14)
    finish(search, ask_growth(search), epochs=4)
    first, second = ask_growth(search), ask_growth(search)
    assert isinstance(search.ask(), Wait)
    finish(search, first, epochs=5)
    finish(search, second, epochs=1)  # ended early: 10 spent, 4 left
    assert search.ask() == Done("max_epochs=14 leaves no room: 10 taken, 5 needed")


def test_a_growth_that_ended_early_leaves_its_epochs_to_others() -> None:
    search = a_search(max_epochs=14)
    finish(search, ask_growth(search), epochs=4)
    finish(search, ask_growth(search), epochs=2)
    finish(search, ask_growth(search), epochs=3)
    finish(search, ask_growth(search), epochs=5)
    assert isinstance(search.ask(), Done)
    assert sum(m.outcome.epochs for m in search.models()) == 14


def test_a_seed_that_does_not_fit_into_max_epochs_is_not_started() -> None:
    assert isinstance(a_search(max_epochs=3).ask(), Done)


def test_nothing_starts_after_max_seconds() -> None:
    search = with_seed_model(max_seconds=60)
    growth = ask_growth(search, elapsed=59.9)
    assert isinstance(search.ask(60), Wait)
    search.fail(growth.id, "too slow")
    assert search.ask(61) == Done("max_seconds=60 is reached")
    assert search.elapsed == 59.9


@pytest.mark.parametrize(
    ("limits", "big"),
    [
        ({"max_multiply_adds": 500}, {"multiply_adds": 500}),
        ({"max_parameters": 70}, {"multiply_adds": 500, "parameters": 70}),
        ({"max_growths": 1}, {"multiply_adds": 500}),
    ],
)
def test_models_that_reached_a_limit_are_not_grown(
    limits: dict[str, int], big: dict[str, int]
) -> None:
    search = with_seed_model(**limits)
    finish(search, ask_growth(search), error=0.1, **big)
    assert [model.id for model in search.hull()] == ["g00000", "g00001"]
    assert {ask_growth(search).parent for _ in range(30)} == {"g00000"}


def test_a_search_ends_when_no_model_on_the_hull_may_grow() -> None:
    search = a_search(max_multiply_adds=50)
    seed = ask_growth(search)
    finish(search, seed)
    assert search.ask() == Done("no model on the hull may grow further (max_multiply_adds=50)")


def test_with_max_growths_0_only_seeds_are_trained() -> None:
    search = a_search(seeds=2, max_growths=0)
    for growth in [ask_growth(search), ask_growth(search)]:
        finish(search, growth)
    assert isinstance(search.ask(), Done)


def test_the_lineage_leads_from_the_seed_to_the_model() -> None:
    search = with_seed_model(max_growths=4)
    parent = "g00000"
    path = [parent]
    for k in range(4):
        growth = ask_growth(search)
        while growth.parent != parent:
            growth = ask_growth(search)
        finish(search, growth, error=0.2 / (k + 2), multiply_adds=200 + k)
        parent = growth.id
        path.append(parent)
    assert search.lineage(parent) == path
    assert parent not in {ask_growth(search).parent for _ in range(50)}


# Failures, late results, releases.


def test_a_failed_growth_is_tried_once_more_with_another_random_seed_then_dropped() -> None:
    search = with_seed_model()
    first = ask_growth(search)
    assert search.fail(first.id, "NaN loss", attempt=1)
    second = ask_growth(search)
    assert (second.id, second.parent, second.attempt) == (first.id, first.parent, 2)
    assert second.seed != first.seed
    assert search.fail(second.id, "NaN loss again", attempt=2)
    assert search.dropped() == {first.id: "NaN loss again"}
    assert ask_growth(search).id != first.id
    assert search.times_chosen("g00000") == 2


def test_a_refused_growth_stops_the_search_until_it_is_released() -> None:
    search = Search(SearchSettings())
    seed = search.ask()
    assert isinstance(seed, Growth)
    assert search.fail(seed.id, "lr must be positive.", kind=REFUSED)
    assert search.ask() == Done(f"{seed.id} was refused: lr must be positive")
    assert search.refused() == {seed.id: "lr must be positive."}
    assert not search.dropped()
    assert search.release(seed.id)
    assert search.ask() == seed
    assert not search.refused()


def test_a_failure_of_an_old_attempt_is_ignored() -> None:
    search = with_seed_model()
    growth = ask_growth(search)
    assert search.fail(growth.id, "died", attempt=1)
    assert not search.fail(growth.id, "died, said once more", attempt=1)
    assert ask_growth(search).attempt == 2
    assert not search.fail(growth.id, "died, said late", attempt=1)
    assert [g.id for g in search.running()] == [growth.id]


def test_a_late_result_revives_a_growth_that_was_given_up() -> None:
    search = with_seed_model()
    growth = ask_growth(search)
    search.fail(growth.id, "no result")
    finish(search, growth, error=0.1, multiply_adds=200)
    assert ask_growth(search).id != growth.id
    other = ask_growth(search)
    search.fail(other.id, "no result")
    search.fail(ask_growth(search).id, "no result")
    assert other.id in search.dropped()
    finish(search, other, error=0.05, multiply_adds=300)
    assert search.dropped() == {}
    assert [m.id for m in search.hull()] == ["g00000", growth.id, other.id]


def test_telling_twice_changes_nothing() -> None:
    search = with_seed_model()
    before = search.state()
    assert not search.tell(an_outcome("g00000", error=0.01))
    assert not search.fail("g00000", "too late")
    assert not search.release("g00000")
    assert search.state() == before


def test_growths_that_were_never_asked_for_are_refused() -> None:
    search = with_seed_model()
    for call in (
        lambda: search.tell(an_outcome("g00007")),
        lambda: search.fail("g00007", "?"),
        lambda: search.release("g00007"),
        lambda: search.quarantine("g00007"),
        lambda: search.lineage("nonsense"),
    ):
        with pytest.raises(SearchError, match="never asked for"):
            call()
    with pytest.raises(SearchError, match="Attempt 2 of g00000"):
        search.fail("g00000", "?", attempt=2)


def test_a_released_growth_is_handed_out_again_as_it_was() -> None:
    search = with_seed_model(max_models=2)
    growth = ask_growth(search)
    assert search.release(growth.id)
    assert not search.release(growth.id)
    assert search.running() == []
    assert ask_growth(search) == growth
    search.fail(growth.id, "died")
    retry = ask_growth(search)
    assert search.release(growth.id)
    assert ask_growth(search) == retry
    assert search.times_chosen("g00000") == 1


def test_the_search_ends_with_the_reason_when_no_seed_can_be_trained() -> None:
    search = a_search()
    for _ in range(2):
        search.fail(ask_growth(search).id, "out of memory")
    assert search.ask() == Done("no model to grow from: g00000 failed (out of memory)")


@pytest.mark.parametrize("error", [math.nan, math.inf, -math.inf])
def test_models_without_a_finite_error_are_kept_but_never_grown(error: float) -> None:
    search = with_seed_model()
    growth = ask_growth(search)
    finish(search, growth, error=error, multiply_adds=1)
    assert [m.id for m in search.models()] == ["g00000", growth.id]
    assert [m.id for m in search.hull()] == ["g00000"]
    assert {ask_growth(search).parent for _ in range(20)} == {"g00000"}


def test_a_quarantined_model_leaves_the_hull_to_those_it_hid() -> None:
    search = a_search(seeds=3)
    for growth, error in [(ask_growth(search), e) for e in (0.3, 0.2, 0.25)]:
        finish(search, growth, error=error)
    assert [m.id for m in search.hull()] == ["g00001"]
    child = ask_growth(search)
    finish(search, child, error=0.1, multiply_adds=200)
    assert search.quarantine("g00001", "bad checksum")
    assert not search.quarantine("g00001", "bad checksum")
    assert [m.id for m in search.hull()] == ["g00002", child.id]
    assert search.lineage(child.id) == ["g00001", child.id]
    assert not search.tell(an_outcome("g00001"))


def test_growths_of_a_quarantined_parent_are_not_tried_again() -> None:
    search = a_search(seeds=2)
    first, second = ask_growth(search), ask_growth(search)
    finish(search, first, error=0.1)
    finish(search, second, error=0.2)
    growth = ask_growth(search)
    assert growth.parent == first.id
    search.fail(growth.id, "parent is damaged")
    search.quarantine(first.id)
    assert growth.id in search.dropped()
    assert ask_growth(search).parent == second.id


# State and events.


def play(seed: int, steps: int) -> tuple[Search, list[Event]]:
    """Apply random calls to a search, keep its events, and check the invariants."""
    rng = random.Random(seed)
    limits = Limits(
        max_models=rng.choice([None, 15, 60]),
        max_growths=rng.choice([None, 3]),
        max_epochs=rng.choice([None, 150]),
        max_multiply_adds=rng.choice([None, 2000]),
    )
    settings = SearchSettings(
        seed=seed,
        seeds=rng.choice([1, 3]),
        tolerance=rng.choice([0.0, 0.05]),
        limits=limits,
        seed_epochs=4,
        weak_epochs=2,
        final_epochs=3,
    )
    events: list[Event] = []

    def commit(event: Event) -> None:
        event = json.loads(json.dumps(event))
        events.append(event)
        search.apply(event)

    search = Search(settings, commit=commit)
    handed_out: dict[str, list[Growth]] = {}
    finished: set[str] = set()
    revived = 0
    for step in range(steps):
        action = rng.choice(["ask", "ask", "ask", "tell", "tell", "fail", "release", "quarantine"])
        if action == "quarantine" and rng.random() < 0.8:
            continue
        running = [growth.id for growth in search.running()]
        if action == "ask":
            answer = search.ask(elapsed=float(step))
            if isinstance(answer, Growth):
                handed_out.setdefault(answer.id, []).append(answer)
                if limits.max_models is not None:
                    count = len(search.models()) + len(search.running())
                    assert count <= limits.max_models
            else:
                assert isinstance(answer, Wait) == bool(running)
        elif not handed_out:
            continue
        elif action == "tell":
            # Sometimes one that was given up or released, or finished before.
            id = rng.choice(running or list(handed_out))
            if rng.random() < 0.2:
                id = rng.choice(list(handed_out))
            error = rng.choice([rng.random(), rng.randint(1, 9) / 10, math.nan])
            is_new = id not in finished and search.state()["growths"][id]["quarantined"] is None
            revived += is_new and id not in running
            cost = rng.randint(1, 30) * 100
            assert search.tell(an_outcome(id, error, cost, epochs=rng.randint(0, 5))) == is_new
            finished.add(id)
        elif action == "fail":
            id = rng.choice(list(handed_out))
            search.fail(id, f"step {step}", rng.randint(1, handed_out[id][-1].attempt))
        elif action == "release":
            search.release(rng.choice(list(handed_out)))
        elif finished:
            search.quarantine(rng.choice(sorted(finished)), f"step {step}")
        check_invariants(search, handed_out)
    spent = sum(e["outcome"]["epochs"] for e in events if e["event"] == "model")
    if limits.max_epochs is not None:
        assert spent <= limits.max_epochs + 5 * revived
    return search, events


def check_invariants(search: Search, handed_out: dict[str, list[Growth]]) -> None:
    models = search.models()
    expected = lower_hull([(m.multiply_adds, m.error) for m in models])
    assert [m.id for m in search.hull()] == [models[i].id for i in expected]
    firsts = Counter(growths[0].parent for growths in handed_out.values())
    for id in handed_out:
        assert search.times_chosen(id) == firsts[id]
        attempts = {(g.attempt, g.seed) for g in handed_out[id]}
        assert len(attempts) == handed_out[id][-1].attempt <= 2
        assert len({(g.parent, g.l1, g.i_max) for g in handed_out[id]}) == 1
    distinct = {(g.parent, g.seed) for growths in handed_out.values() for g in growths}
    assert len(distinct) == sum(growths[-1].attempt for growths in handed_out.values())


@pytest.mark.parametrize("seed", range(25))
def test_whatever_happens_replaying_the_events_gives_the_same_state(seed: int) -> None:
    search, events = play(seed, 250)
    replayed = Search.replay(search.settings, events)
    state = search.state()
    assert replayed.state() == state
    assert json.loads(json.dumps(state, allow_nan=False)) == state
    # The next answer is a function of the state too.
    assert replayed.ask(250.0) == search.ask(250.0)


@pytest.mark.parametrize("seed", range(25))
def test_results_may_stand_anywhere_in_the_journal_and_more_than_once(seed: int) -> None:
    search, events = play(100 + seed, 200)
    rng = random.Random(seed)
    by_workers = [e for e in events if e["event"] in ("model", "quarantine")]
    others = [e for e in events if e["event"] not in ("model", "quarantine")]
    for event in by_workers:
        for _ in range(rng.choice([1, 1, 2])):
            others.insert(rng.randint(0, len(others)), event)
    replayed = Search.replay(search.settings, others)
    assert replayed.state() == search.state()
    assert replayed.ask(200.0) == search.ask(200.0)


@pytest.mark.parametrize("seed", range(10))
def test_a_lost_line_breaks_no_replay_and_no_id_is_used_twice(seed: int) -> None:
    search, events = play(200 + seed, 150)
    for lost in range(len(events)):
        remaining = events[:lost] + events[lost + 1 :]
        replayed = Search.replay(search.settings, remaining)
        growths = replayed.state()["growths"]
        answer = replayed.ask(150.0)
        if isinstance(answer, Growth) and answer.id in growths:
            assert growths[answer.id]["status"] == "waiting"


def test_a_line_of_an_earlier_attempt_that_is_read_again_changes_nothing() -> None:
    events: list[Event] = []

    def commit(event: Event) -> None:
        events.append(event)
        search.apply(event)

    search = Search(SearchSettings(), commit=commit)
    search.fail(ask_growth(search).id, "died")
    ask_growth(search)
    before = search.state()
    for event in events:
        search.apply(event)
        assert search.state() == before


def test_every_finished_model_survives_the_loss_of_all_other_lines() -> None:
    search, events = play(7, 300)
    models = [e for e in events if e["event"] in ("model", "quarantine")]
    assert Search.replay(search.settings, models).hull() == search.hull()


def test_growths_and_outcomes_pass_through_json_unchanged() -> None:
    growth = Growth("g00003", "g00001", 77, 0.001, 3, 2)
    assert Growth.from_dict(json.loads(json.dumps(growth.to_dict()))) == growth
    outcome = Outcome("g00003", 0.25, 1000, 50, 5, {"loss": math.nan, "sizes": (1, 2)})
    again = Outcome.from_dict(json.loads(json.dumps(outcome.to_dict(), allow_nan=False)))
    assert again == outcome
    assert again.metrics == {"loss": None, "sizes": [1, 2]}
    lost = Outcome("g00003", math.inf, 1, 1)
    assert math.isnan(Outcome.from_dict(lost.to_dict()).error)


def test_settings_pass_through_json_unchanged() -> None:
    settings = SearchSettings(seed=3, tolerance=0.02, limits=Limits(max_models=4, max_seconds=1.5))
    assert SearchSettings.from_dict(json.loads(json.dumps(settings.to_dict()))) == settings
    assert "limits" not in settings.identity()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: SearchSettings(i_max=0), "i_max must be a whole number of at least 1 but got 0."),
        (lambda: SearchSettings(l1=-1.0), "l1 must be a number of at least 0 but got -1.0."),
        (lambda: SearchSettings(l1=math.nan), "l1 must be a number of at least 0 but got nan."),
        (
            lambda: SearchSettings(seeds=True),
            "seeds must be a whole number of at least 1 but got True.",
        ),
        (
            lambda: SearchSettings(tolerance=1.0),
            "tolerance must be a number in [0, 1) but got 1.0.",
        ),
        (
            lambda: SearchSettings(weak_epochs="3"),
            "weak_epochs must be a whole number of at least 0 but got '3'",
        ),
        (
            lambda: Limits(max_models=0),
            "max_models must be a whole number of at least 1 but got 0.",
        ),
        (
            lambda: Limits(max_epochs=2.5),
            "max_epochs must be a whole number of at least 1 but got 2.5.",
        ),
        (
            lambda: Limits(max_seconds="1h"),
            "max_seconds must be a number of at least 0 but got '1h'.",
        ),
        (lambda: SearchSettings.from_dict({"lambda": 1}), "Unknown key 'lambda' in settings"),
        (lambda: SearchSettings.from_dict({"limits": {"max": 1}}), "Unknown key 'max' in limits"),
        (lambda: SearchSettings.from_dict({"limits": 3}), "limits must be a mapping but got 3."),
    ],
)
def test_bad_settings_are_named_in_one_line(make: Any, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        make()
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "event",
    [
        {},
        {"event": "dance", "id": "g00000"},
        {"event": "ask", "id": "g00000"},
        {"event": "ask", "id": "g00000", "growth": {"id": "g00000"}},
        {"event": "ask", "id": "seed", "growth": {}},
        {"event": "model", "id": "g00000", "growth": None, "outcome": None},
        {"event": "fail", "id": "g00000"},
    ],
)
def test_nonsense_is_no_event(event: Event) -> None:
    with pytest.raises(SearchError):
        a_search().apply(event)


def test_the_search_imports_no_torch_and_no_nni() -> None:
    heavy = "{'torch', 'nni', 'numpy'}"
    code = f"import sys, nni_petridish.search.search; print({heavy} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_with_a_hundred_thousand_models_replay_and_asking_take_little_time() -> None:
    number, asked = 100_000, 3000
    rng = random.Random(0)

    def outcome(k: int) -> Outcome:
        error = 0.1 + 0.8 * rng.random() / (1 + 0.01 * math.sqrt(k))
        return Outcome(growth_id(k), error, rng.randint(100, 10**9), 10)

    growths = [
        Growth(growth_id(k), growth_id(k // 2) if k else None, k, 0.1, 3) for k in range(number)
    ]
    events = [model_event(growth, outcome(k)) for k, growth in enumerate(growths)]
    # Processor time, which does not depend on other processes.
    start = time.process_time()
    search = Search.replay(SearchSettings(limits=Limits(max_growths=50)), events)
    assert time.process_time() - start < 10
    assert len(search.models()) == number
    start = time.process_time()
    for k in range(number, number + asked):
        growth = ask_growth(search)
        assert growth.id == growth_id(k)
        search.tell(outcome(k))
    assert (time.process_time() - start) / asked < 1e-3


def grown(kind: str, models: int) -> Search:
    """Run a search for this many growths, with outcomes of one kind."""
    tolerance = 0.025 if kind == "near the hull" else 0.0
    search = Search(SearchSettings(tolerance=tolerance, limits=Limits(max_growths=10**6)))
    go_on(search, kind, 0, models)
    return search


def go_on(search: Search, kind: str, number: int, models: int) -> None:
    rng = random.Random(number)
    for k in range(number, number + models):
        if kind == "on the hull":
            cost, error = 1000 + k, (1 - k / 1e6) ** 2
        else:
            cost, error = rng.randint(10**6, 10**9), rng.randint(200, 5000) / 5000
        search.tell(Outcome(ask_growth(search).id, error, cost, 10))


def calls(work: Callable[[], object]) -> int:
    """Count the calls of Python and C functions: a measure of work without a clock."""
    count = 0

    def profile(frame: object, event: str, argument: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(profile)
    try:
        work()
    finally:
        sys.setprofile(before)
    return count


@pytest.mark.parametrize("kind", ["anywhere", "near the hull", "on the hull"])
def test_asking_and_telling_cost_the_same_however_many_models_there_are(kind: str) -> None:
    small, large = grown(kind, 500), grown(kind, 8000)
    if kind == "on the hull":
        assert len(large.hull()) == 8000
    few = calls(lambda: go_on(small, kind, 500, 200))
    many = calls(lambda: go_on(large, kind, 8000, 200))
    assert many < 2 * few  # for 16 times as many models; hulls grow like the logarithm at most


def test_memory_and_replay_grow_in_proportion_to_the_models() -> None:
    def event(k: int) -> Event:
        growth = Growth(growth_id(k), growth_id(k // 2) if k else None, k, 0.1, 3)
        return model_event(growth, Outcome(growth_id(k), 0.5 + k % 97 / 200, 1000 + k, 10))

    def replay(models: int) -> tuple[int, int]:
        events = [event(k) for k in range(models)]
        work = calls(lambda: Search.replay(SearchSettings(), events))
        tracemalloc.start()
        search = Search.replay(SearchSettings(), events)
        size, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert len(search.models()) == models
        return work, size

    (few, small), (many, large) = replay(1000), replay(8000)
    assert many < 1.1 * 8 * few
    assert large < 1.25 * 8 * small  # dictionaries double now and then


EXHAUSTION = "the space is exhausted: the models on the hull have no new child"


def test_models_at_the_limits_of_their_space_are_no_parents() -> None:
    search = with_seed_model(max_models=9)
    child = ask_growth(search)
    finish(search, child, error=0.1, multiply_adds=200, metrics={"full": True})
    assert [model.id for model in search.hull()] == ["g00000", "g00001"]
    assert {ask_growth(search).parent for _ in range(5)} == {"g00000"}

    full = a_search()
    finish(full, ask_growth(full), metrics={"full": True})
    assert full.ask() == Done(EXHAUSTION)
    assert full.why_ended(0.0) == EXHAUSTION


def test_the_end_of_a_search_tells_every_reason_there_is() -> None:
    search = a_search(max_growths=1, max_seconds=60)
    assert search.why_ended(0.0) is None
    seed = ask_growth(search)
    assert search.why_ended(99.0) is None  # what is running may change the answer
    finish(search, seed, metrics={"full": True})
    assert search.why_ended(0.0) == f"{EXHAUSTION} within max_growths=1"
    assert search.why_ended(60.0) == "max_seconds=60 is reached"

    search = with_seed_model(max_growths=1)
    finish(search, ask_growth(search), error=0.1, multiply_adds=200)
    assert search.fail(ask_growth(search).id, "nothing new", kind=EXHAUSTED)
    limits = "max_growths=1, the space has no more"
    assert search.why_ended(0.0) == f"no model on the hull may grow further ({limits})"


def test_a_model_is_grown_as_often_as_there_are_architectures_to_grow() -> None:
    search = Search(SearchSettings())
    seed = search.ask()
    assert isinstance(seed, Growth)
    search.tell(Outcome(seed.id, 0.5, 100, 10, metrics={CHOICES: 2}))
    first, second = search.ask(), search.ask()
    assert isinstance(first, Growth)
    assert isinstance(second, Growth)
    assert isinstance(search.ask(), Wait)
    assert search.fail(first.id, "trouble")
    assert isinstance(again := search.ask(), Growth)
    assert again.id == first.id
    for growth in (first, second):
        search.tell(Outcome(growth.id, 0.6, 200, 20))
    assert search.ask() == Done(EXHAUSTION)


def test_a_parent_whose_growth_finds_nothing_new_is_not_grown_again() -> None:
    search = Search(SearchSettings())
    seed = search.ask()
    assert isinstance(seed, Growth)
    search.tell(Outcome(seed.id, 0.5, 100, 10))
    growth = search.ask()
    assert isinstance(growth, Growth)
    assert search.fail(growth.id, "nothing new", kind=EXHAUSTED)
    assert search.ask() == Done(EXHAUSTION)
    assert search.dropped() == {growth.id: "nothing new"}


class Twos:
    """A chooser of I_max from 1 to 3 that always prefers 2."""

    i_max_range = range(1, 4)

    def __call__(self, number: int) -> tuple[float, int]:
        return 0.1, 2


def test_a_parent_is_grown_with_each_i_max_of_a_range_that_finds_something_new() -> None:
    search = Search(SearchSettings(), Twos())
    seed = ask_growth(search)
    search.tell(Outcome(seed.id, 0.5, 100, 10, metrics={CHOICES: 1}))
    search.tell(Outcome(ask_growth(search).id, 0.6, 200, 20))  # not on the hull
    chosen = []
    while isinstance(growth := search.ask(), Growth):
        chosen.append(growth.i_max)
        assert search.fail(growth.id, "nothing new", kind=EXHAUSTED)
    assert chosen == [2, 1, 3]
    assert growth == Done(EXHAUSTION)


def test_a_chooser_of_unknown_range_ends_with_the_first_growth_without_anything_new() -> None:
    search = Search(SearchSettings(), lambda number: (0.1, 2))
    finish(search, ask_growth(search))
    assert search.fail(ask_growth(search).id, "nothing new", kind=EXHAUSTED)
    assert search.ask() == Done(EXHAUSTION)


def test_a_rejected_growth_is_no_failure_and_closes_its_parent_when_repeated() -> None:
    events: list[Event] = []
    search = Search(
        SearchSettings(weak_epochs=5, limits=Limits(max_failures=1, max_epochs=1000)),
        commit=lambda event: (events.append(event), search.apply(event)),
    )
    finish(search, ask_growth(search), epochs=200)
    first = ask_growth(search)
    assert search.fail(first.id, "would not pay", kind=REJECTED)
    assert not search.fail(first.id, "again")
    assert search.rejected() == {first.id: "would not pay"}
    assert search.dropped() == {}
    assert search.gave_up() is None
    assert search.failed_attempts() == 0
    assert not search.retry(first.id)
    second = ask_growth(search)
    assert (second.parent, second.attempt) == ("g00000", 1)
    assert second.seed != first.seed
    assert search.fail(second.id, "would not pay", kind=REJECTED)
    why = "no model on the hull may grow further (growing would not pay)"
    assert search.ask() == Done(why)
    assert search._spent_epochs == 200 + 2 * 5
    assert Search.replay(search.settings, events).state() == search.state()


def test_a_search_goes_on_from_other_parents_after_rejections() -> None:
    search = with_seed_model()
    finish(search, ask_growth(search), error=0.1, multiply_adds=200)
    parents: Counter[str | None] = Counter()
    while isinstance(growth := search.ask(), Growth):
        parents[growth.parent] += 1
        assert search.fail(growth.id, "would not pay", kind=REJECTED)
    assert parents == {"g00000": 2, "g00001": 2}


# Failures in a row.


def fail_twice(search: Search, reason: str = "bad luck") -> str:
    growth = ask_growth(search)
    assert search.fail(growth.id, "first")
    assert search.fail(ask_growth(search).id, reason)
    return growth.id


def test_a_search_gives_up_after_some_growths_failed_in_a_row() -> None:
    search = with_seed_model(max_models=100, max_failures=3)
    fail_twice(search)
    fail_twice(search)
    assert search.failed_attempts() == 4
    finish(search, ask_growth(search), error=0.2)
    assert search.failed_attempts() == 0
    for reason in ("one", "two"):
        fail_twice(search, reason)
    assert search.gave_up() is None
    last = fail_twice(search, "no memory.")
    reason = f"3 growths in a row failed, the last one, {last}, with: no memory"
    assert search.gave_up() == reason
    assert search.ask() == Done(reason)
    assert [model.id for model in search.models()] == ["g00000", "g00003"]


def test_a_search_without_that_limit_never_gives_up() -> None:
    search = with_seed_model(max_failures=None)
    for _ in range(20):
        fail_twice(search)
    assert search.gave_up() is None
    assert ask_growth(search).id == "g00021"


def test_what_was_given_up_is_tried_again_as_if_it_had_not_failed() -> None:
    events: list[Event] = []
    search = Search(
        SearchSettings(limits=Limits(max_failures=2)),
        commit=lambda event: (events.append(event), search.apply(event)),
    )
    finish(search, ask_growth(search))
    first = ask_growth(search)
    search.fail(first.id, "no GPU")
    search.fail(ask_growth(search).id, "no GPU")
    fail_twice(search, "no GPU")
    assert isinstance(search.ask(), Done)
    assert list(search.dropped()) == ["g00001", "g00002"]
    assert not search.retry("g00000")
    assert search.retry("g00001")
    assert not search.retry("g00001")
    assert search.retry("g00002")
    assert search.gave_up() is None
    assert ask_growth(search) == first
    finish(search, first, error=0.1)
    assert ask_growth(search).attempt == 1
    assert Search.replay(search.settings, events).state() == search.state()


def test_a_growth_with_a_damaged_parent_is_not_tried_again() -> None:
    search = with_seed_model()
    growth = ask_growth(search)
    search.quarantine("g00000")
    search.fail(growth.id, "its parent is damaged")
    assert list(search.dropped()) == [growth.id]
    assert not search.retry(growth.id)
    assert search.failed_attempts() == 0


@pytest.mark.parametrize(("pays", "deepest"), [(False, 2), (True, 3)])
def test_a_lineage_that_does_not_pay_is_not_grown(pays: bool, deepest: int) -> None:
    search = with_seed_model(max_unpaid=2, max_models=30)
    depths = {"g00000": 0}
    while isinstance(growth := search.ask(), Growth):
        assert growth.parent is not None
        depths[growth.id] = depths[growth.parent] + 1
        number = int(growth.id[1:])
        metrics = {"payment": {"age": 1.0, "pays": pays}}
        search.tell(Outcome(growth.id, 0.1 / number, 1000 + number, 10, 1, metrics))
    assert max(depths.values()) >= deepest if pays else max(depths.values()) == deepest


def test_a_search_says_that_growing_would_not_pay() -> None:
    search = with_seed_model(max_unpaid=1, max_models=30)
    growth = ask_growth(search)
    better = {"payment": {"age": 1.0, "pays": False}}
    # It dominates the seed, so that it is the only parent, and its own growth did not pay.
    seed = search.models()[0]
    search.tell(Outcome(growth.id, seed.error / 2, seed.multiply_adds, 10, 1, better))
    answer = search.ask()
    assert isinstance(answer, Done)
    assert "growing would not pay" in answer.reason


def test_a_lineage_that_does_not_pay_is_trained_on_once_and_may_grow_again() -> None:
    search = with_seed_model(max_unpaid=1, unpaid="train_on", max_models=30)
    seed = search.models()[0]

    def finish(growth: Growth, error: float, **payment: bool) -> None:
        metrics = {"payment": {"age": 1.0, **payment}}
        search.tell(Outcome(growth.id, error, seed.multiply_adds, 10, 1, metrics))

    unpaid = ask_growth(search)
    assert not unpaid.trains_on
    finish(unpaid, 0.1, pays=False)  # the only model on the hull
    on = ask_growth(search)
    assert (on.parent, on.trains_on) == (unpaid.id, True)
    assert Growth.from_dict(on.to_dict()) == on
    assert search.settings.epochs_of(on) == search.settings.final_epochs
    again = search.ask()
    assert isinstance(again, Wait)  # once, and only one of its kind at a time
    finish(on, 0.05)
    grown = ask_growth(search)
    assert (grown.parent, grown.trains_on) == (on.id, False)


def test_training_on_that_does_not_help_is_not_repeated() -> None:
    search = with_seed_model(max_unpaid=1, unpaid="train_on", max_models=30)
    seed, unpaid = search.models()[0], ask_growth(search)
    metrics = {"payment": {"age": 1.0, "pays": False}}
    search.tell(Outcome(unpaid.id, 0.1, seed.multiply_adds, 10, 1, metrics))
    on = ask_growth(search)
    search.tell(Outcome(on.id, 0.2, seed.multiply_adds, 10, 1, {"payment": {"age": 2.0}}))
    answer = search.ask()
    assert isinstance(answer, Done)
    assert "growing would not pay" in answer.reason


def test_training_on_needs_a_number_of_growths_that_did_not_pay() -> None:
    with pytest.raises(ConfigError, match="unpaid: train_on needs max_unpaid"):
        Limits(unpaid="train_on")
    with pytest.raises(ConfigError, match="unpaid must be one of stop, train_on"):
        Limits(max_unpaid=1, unpaid="rest")


def test_a_seed_cannot_be_trained_on() -> None:
    data = {"id": "g00000", "parent": None, "seed": 1, "l1": 0.1, "i_max": 1, "attempt": 1}
    assert "trains_on" not in Growth.from_dict(data).to_dict()
    with pytest.raises(SearchError, match="g00000 must have a parent to train it on"):
        Growth.from_dict({**data, "trains_on": True})


def test_the_last_growth_is_told_only_where_learning_rates_decay_once() -> None:
    for anneal in (0.0, 0.25):
        settings = SearchSettings(limits=Limits(max_growths=2, max_models=30), anneal=anneal)
        search, last = Search(settings), {}
        while isinstance(growth := search.ask(), Growth):
            depth = search._depth(growth.id)
            last.setdefault(depth, set()).add(growth.last)
            assert Growth.from_dict(growth.to_dict()) == growth
            assert ("last" in growth.to_dict()) is growth.last
            number = int(growth.id[1:])
            search.tell(Outcome(growth.id, 0.5 / (1 + number), 1000 + number, 10, 1, {}))
            if number == 20:
                break
        assert last[0] == last[1] == {False}
        assert last[2] == {anneal > 0}
    models = Search(SearchSettings(limits=Limits(max_models=1), anneal=0.25)).ask()
    assert isinstance(models, Growth)
    assert models.last
