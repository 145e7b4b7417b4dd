"""NNI's web UI of a running search, in a real browser."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nni_petridish.nni_adapter.manager import from_nni_space, to_nni_space
from nni_petridish.nni_adapter.nnictl import Experiment, free_port
from nni_petridish.running.config import SearchConfig, read_experiment
from tests.support import chaos


def test_a_space_in_the_form_of_nni_is_the_same_search(tmp_path: Path) -> None:
    path = chaos.write_config(tmp_path, 2)
    space, arguments, base, experiment = read_experiment(path)
    shown = to_nni_space(space)
    assert all(set(entry) == {"_type", "_value"} for entry in shown.values())
    assert to_nni_space(shown) == shown
    again = SearchConfig.from_parts(from_nni_space(shown), arguments, base, experiment)
    assert again == SearchConfig.from_yaml(path)


@pytest.mark.browser
def test_every_tab_of_the_web_ui_has_content_and_no_script_errors(
    tmp_path: Path, browser: Any
) -> None:
    path = chaos.write_config(tmp_path, 8)
    config = SearchConfig.from_yaml(path)
    with Experiment(path, free_port()) as experiment:
        _wait_for(lambda: chaos.finished_models(config), 120)
        browser.get(experiment.url)  # a cookie then has the token
        assert experiment.token not in browser.current_url
        for page, words in (
            ("oview", ["Overview", "Top trials", "SUCCEEDED"]),
            ("detail", ["Trials detail", "Trial jobs", "SUCCEEDED"]),
            # The rows of this page, of all experiments, are NNI's own and may be missing.
            ("experiment", ["All experiments", "Start time"]),
        ):
            browser.get(f"http://127.0.0.1:{experiment.port}/{page}")
            _expect(browser, words)
            if page == "detail":
                _visit_tabs(browser)


def _visit_tabs(browser: Any) -> None:
    tabs = browser.find_elements("css selector", "[role=tab]")
    contents = {
        "Default metric": ["Optimization curve"],
        "Hyper-parameter": ["Add/Remove axes", "filters", "merge"],
        "Duration": ["Trial jobs"],
        "Intermediate result": ["# Intermediate result"],
    }
    assert len(tabs) == len(contents)
    for tab, (name, words) in zip(tabs, contents.items(), strict=True):
        assert name in tab.text
        tab.click()
        _expect(browser, [*words, "SUCCEEDED"])
        _wait_for(lambda: browser.find_elements("css selector", "canvas, svg"), 20)


def _expect(browser: Any, words: list[str]) -> None:
    def missing() -> list[str]:
        text = browser.find_element("tag name", "body").text
        return [word for word in words if word not in text]

    _wait_for(lambda: not missing(), 20, lambda: f"{missing()}: {_script_errors(browser)}")
    assert _script_errors(browser) == []


def _script_errors(browser: Any) -> list[str]:
    """Return the errors since the last call, without fonts of the network that do not load."""
    return [
        entry["message"]
        for entry in browser.get_log("browser")
        if entry["level"] == "SEVERE" and entry["source"] != "network"
    ]


def _wait_for(
    condition: Callable[[], object], seconds: float, reason: Callable[[], str] = str
) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"it took too long: {reason()}"
        time.sleep(0.2)
