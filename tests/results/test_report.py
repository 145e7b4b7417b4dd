from __future__ import annotations

import base64
import hashlib
import json
import math
import re
import shlex
import xml.etree.ElementTree as ET
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch
from markupsafe import escape

from nni_petridish.__main__ import _parser, main
from nni_petridish.core.forecast import best_step, slopes
from nni_petridish.core.grow import attach_candidates, sites
from nni_petridish.gallery.gallery import Gallery
from nni_petridish.gallery.select import open_search
from nni_petridish.nni_adapter.user_spaces.genotype import ChoiceGenotype
from nni_petridish.results.report import hull_table, lineage_table, write_report
from nni_petridish.results.report.cells import draw_cells
from nni_petridish.results.report.diary import loss_at_selection_and_end, predicted_change
from nni_petridish.results.report.facts import Usage
from nni_petridish.results.report.hull import hull_chart
from nni_petridish.search.events import ask_event, fail_event, quarantine_event
from nni_petridish.search.records import Growth, Outcome
from nni_petridish.search.search import Search
from nni_petridish.search.settings import SearchSettings
from nni_petridish.tasks.task import Phase
from nni_petridish.tasks.vision.data import load_data
from nni_petridish.tasks.vision.recipe import Recipe
from nni_petridish.tasks.vision.task import VisionTask
from search_spaces import VisionSpace
from tests.contracts.listed import GENOTYPES
from tests.support.small_gallery import MODELS, recurrent_gallery, vision_gallery

Make = Callable[[Path], Gallery]


class Page(HTMLParser):
    """Everything in a page that could make a browser fetch something; and its balance."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.fetched: list[str] = []
        self.open: list[str] = []
        self.title = ""
        self.scripts: list[str] = []
        self.policy = ""
        self.ids: list[str] = []
        self.feed(text)

    def handle_data(self, data: str) -> None:
        if self.open == ["html", "head", "title"]:
            self.title += data
        if self.open[-1:] == ["script"]:
            self.scripts.append(data)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        inside = (given.get("href") or "").startswith("#")
        if not inside:
            self.fetched += [f"{tag} {k}" for k in given if k in ("src", "href", "xlink:href")]
        if tag in ("link", "iframe", "object", "base", "form"):
            self.fetched.append(tag)
        if given.get("http-equiv") == "Content-Security-Policy":
            self.policy = given["content"] or ""
        if "id" in given:
            self.ids.append(given["id"] or "")
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        self.handle_endtag(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def report(gallery: Gallery) -> str:
    _, search = open_search(gallery.folder)
    return write_report(search, gallery.folder).read_text(encoding="utf-8")


def rewrite(gallery: Gallery, id: str, name: str, change: Callable[[Any], Any]) -> None:
    """Change a document of a model, and its checksum with it."""
    folder = gallery.folder / "models" / id
    data = json.dumps(change(json.loads((folder / f"{name}.json").read_text()))).encode()
    (folder / f"{name}.json").write_bytes(data)
    sums = json.loads((folder / "checksums.json").read_text())
    sums[f"{name}.json"] = hashlib.sha256(data).hexdigest()
    (folder / "checksums.json").write_text(json.dumps(sums))


@pytest.mark.parametrize("make", [vision_gallery, recurrent_gallery])
def test_the_page_is_whole_and_needs_no_network(tmp_path: Path, make: Make) -> None:
    text = report(make(tmp_path))
    page = Page(text)
    assert page.open == []
    assert page.fetched == []
    assert "url(" not in text
    assert "@import" not in text
    assert "prefers-color-scheme: dark" in text
    assert [id for id in page.ids if id.startswith("g")] == list(MODELS)


def test_the_only_script_that_may_run_is_ours(tmp_path: Path) -> None:
    page = Page(report(vision_gallery(tmp_path)))
    (script,) = page.scripts
    assert script.startswith('"use strict"')
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}';" in page.policy
    assert "default-src 'none'" in page.policy
    assert "connect-src 'none'" in page.policy


@pytest.mark.parametrize("make", [vision_gallery, recurrent_gallery])
def test_every_picture_is_a_file_of_its_own_and_in_the_page(tmp_path: Path, make: Make) -> None:
    gallery = make(tmp_path)
    text = report(gallery)
    files = [gallery.folder / "hull.svg", *(gallery.folder / "pictures").iterdir()]
    assert len(files) > 10
    assert len(files) + 1 == text.count("<svg")  # and the chart for phones
    assert {f.name.split("-")[0] for f in files if "alphas" not in f.name} >= set(MODELS)
    for file in files:
        assert ET.parse(file).getroot().tag == "{http://www.w3.org/2000/svg}svg"
        assert "<style>" in file.read_text()


def test_a_cell_shows_every_shortcut_and_the_growth_that_added_it(tmp_path: Path) -> None:
    gallery = vision_gallery(tmp_path)
    report(gallery)
    root = ET.parse(gallery.folder / "pictures" / "g00003-normal.svg").getroot()
    shown = [element.text for element in root.iter("{http://www.w3.org/2000/svg}text")]
    assert [t for t in shown if t and t.startswith("growth")] == [
        "growth 1 · g00001",
        "growth 2 · g00003",
    ]
    # The seed's and both growths': g00003 = (identity, sep_conv) of g00001 + (sep_conv, identity).
    assert sorted(t for t in shown if t in ("identity", "sep_conv_3x3", "skip")) == (
        ["identity"] * 2 + ["sep_conv_3x3"] * 3 + ["skip"]
    )
    edges = root.findall("{http://www.w3.org/2000/svg}path")
    assert len(edges) == 2 * 6 + 2  # into and out of each op, and from h0 and h1 to the sum


def test_nothing_is_drawn_outside_its_picture(tmp_path: Path) -> None:
    for name, make in (("v", vision_gallery), ("r", recurrent_gallery)):
        gallery = make(tmp_path / name)
        report(gallery)
        for file in [gallery.folder / "hull.svg", *(gallery.folder / "pictures").iterdir()]:
            root = ET.parse(file).getroot()
            width, height = float(root.attrib["width"]), float(root.attrib["height"])
            for box in root.iter("{http://www.w3.org/2000/svg}rect"):
                x, y, w, h = (float(box.attrib[k]) for k in ("x", "y", "width", "height"))
                assert 0 <= x <= x + w <= width, file.name
                assert 0 <= y <= y + h <= height, file.name
            for circle in root.iter("{http://www.w3.org/2000/svg}circle"):
                assert 0 < float(circle.attrib["cx"]) < width, file.name
                assert 0 < float(circle.attrib["cy"]) < height, file.name


def test_a_label_with_slashes_names_a_file_in_the_pictures(tmp_path: Path) -> None:
    gallery = vision_gallery(tmp_path)
    rewrite(gallery, "g00001", "alphas", lambda alphas: alphas | {"tables": {"../a/b": []}})
    report(gallery)
    assert (gallery.folder / "pictures" / "g00001-alphas-..%2Fa%2Fb.svg").is_file()


def test_what_others_have_named_is_text_in_the_page(tmp_path: Path) -> None:
    hostile = "<script>alert('&')</script>"
    gallery = vision_gallery(tmp_path)
    folder = gallery.folder.rename(gallery.folder.with_name('<i>&"'))
    row = {"source": hostile, "op": hostile, "alpha": 1.0, "slope": 0.5}
    tables = {"tables": {hostile: [row]}}
    rewrite(Gallery(folder), "g00001", "alphas", lambda alphas: alphas | tables)
    text = report(Gallery(folder))
    page = Page(text)  # no tag is left open
    assert page.open == page.fetched == []
    assert page.title == 'Petridish: <i>&"'
    # The label and the shortcut: in the paragraph, in the chart, and in what is read aloud.
    assert text.count("&lt;script&gt;alert(&#") == 3 + 4
    assert "<i>" not in text
    assert len(page.scripts) == 1


def test_a_macro_model_has_a_drawing_for_each_cell() -> None:
    space = VisionSpace((1, 8, 8), 10, cells_per_stage=1, filters=2, mode="macro", stages=2)
    genotype = space.seed().grown({"cell_01": (("prev", "identity"),)})
    assert list(draw_cells(genotype, {})) == ["cell_00", "cell_01", "cell_02"]


SVG = "{http://www.w3.org/2000/svg}"


@pytest.mark.parametrize("name", GENOTYPES)
def test_cells_of_every_family_are_drawn_with_all_their_shortcuts(name: str) -> None:
    listed = GENOTYPES[name]
    genotype = listed.seed.grown(listed.additions)
    drawn = draw_cells(genotype, {key: ["g00007"] for key in listed.additions})
    for key, learner in listed.additions.items():
        root = ET.fromstring(drawn[key])
        texts = [element.text or "" for element in root.iter(f"{SVG}text")]
        assert "growth 1 · g00007" in texts
        for source, op in learner:
            assert any(text == op or text.endswith(f": {op}") for text in texts)
            assert any(text == source or text.startswith(f"{source}: ") for text in texts)
        edges = root.findall(f"{SVG}path")
        assert len(edges) >= 2 * len(learner)  # into and out of each op


def test_a_long_chain_of_learners_reads_from_left_to_right() -> None:
    learners = [
        [("a very long name of an input", "conv")],
        *([(f"h{i}", "conv")] for i in range(3)),
    ]
    genotype = ChoiceGenotype({"label": learners})
    root = ET.fromstring(draw_cells(genotype, {})["label"])
    width = float(root.attrib["width"])
    boxes = [(float(b.attrib["x"]), float(b.attrib["width"])) for b in root.iter(f"{SVG}rect")]
    assert boxes[0][1] > 28 * 6  # the input's box holds its name
    assert [x for x, _ in boxes] == sorted(x for x, _ in boxes)
    assert all(x + w <= width for x, w in boxes)


def test_the_tables_are_those_of_the_search(tmp_path: Path) -> None:
    _, search = open_search(vision_gallery(tmp_path).folder)
    rows = [line.split() for line in hull_table(search).splitlines()]
    assert [row[0] for row in rows] == ["model", "g00000", "g00001", "g00003"]
    assert rows[2] == ["g00001", "g00000", "1", "200,000", "20,000,000", "0.2000", "1"]
    tree = lineage_table(search).splitlines()
    assert [re.search(r"g\d+", line)[0] for line in tree] == [  # type: ignore[index]
        "g00000",
        "g00001",
        "g00003",
        "g00002",
    ]
    assert [line.endswith("*") for line in tree] == [True, True, True, False]
    assert tree[2].startswith("│  └─ g00003")


def test_the_diary_tells_selected_predicted_and_realized(tmp_path: Path) -> None:
    gallery = vision_gallery(tmp_path)
    documents = gallery.load_documents("g00001")
    assert predicted_change(documents["alphas"]) == -0.1
    assert predicted_change({}) is None
    assert loss_at_selection_and_end(documents["history"]) == (0.8, 0.55)
    text = report(gallery)
    assert "<dt>predicted Δ loss</dt><dd>−0.1000</dd>" in text
    assert "<dt>realized Δ loss</dt><dd>−0.2500</dd>" in text
    chart = (gallery.folder / "pictures" / "g00001-alphas-normal.svg").read_text()
    assert chart.count("✓") == 2


def test_slopes_are_those_of_the_loss_along_each_candidate() -> None:
    data = load_data("digits", limit=64)
    options = {"cells_per_stage": 1, "filters": 3, "stages": 2, "ops": ["sep_conv_3x3", "identity"]}
    space = VisionSpace(data.image_shape, data.num_classes, **options)  # type: ignore[arg-type]
    task = VisionTask(space, data, Recipe.named("digits", device="cpu"))
    torch.manual_seed(0)
    net = attach_candidates(space.build(space.seed()).double(), l1=5.0)
    before = {name: tensor.clone() for name, tensor in net.state_dict().items()}

    def losses(net: torch.nn.Module):  # type: ignore[no-untyped-def]
        images = data.validation.normalize(data.validation.images[:50]).double()
        yield torch.nn.functional.cross_entropy(net(images), data.validation.labels[:50])

    found = slopes(net, losses)
    assert all(torch.equal(tensor, before[name]) for name, tensor in net.state_dict().items())
    assert all(parameter.grad is None for parameter in net.parameters())
    net.eval()
    for key in ("normal", "reduce"):
        for index, shortcut in enumerate(sites(net)[0].eligible_shortcuts()):
            slope = _slope_of_a_step(net, key, index, losses)
            assert found[key][shortcut] == pytest.approx(slope, rel=1e-4, abs=1e-9)
    net.float()
    with torch.no_grad():
        total = float(sum(task.validation_losses(net)))
    assert total == pytest.approx(task.evaluate(net)["loss"], rel=1e-5)


def test_the_best_step_lowers_the_loss_by_what_it_says() -> None:
    data = load_data("digits", limit=64)
    space = VisionSpace(data.image_shape, data.num_classes, cells_per_stage=1, filters=3, stages=2)
    task = VisionTask(space, data, Recipe.named("digits", device="cpu"))
    torch.manual_seed(0)
    net = attach_candidates(space.build(space.seed()))
    task.train(net, Phase("seed", epochs=2))
    before = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    i_max = len(sites(net)[0].eligible_shortcuts())  # all of them: then it is x_c that is added
    total = sum(
        slope for table in slopes(net, task.validation_losses).values() for slope in table.values()
    )
    step = best_step(net, task.validation_losses, i_max, backward=total > 0)
    assert step is not None
    assert step.change < 0
    assert step.size * total < 0
    assert all(torch.equal(tensor, before[name]) for name, tensor in net.state_dict().items())

    def add(module, arguments, output):  # type: ignore[no-untyped-def]
        candidates = zip(module.table.alpha, module.ops_with_inputs(arguments[1]), strict=True)
        return output + step.size * sum(alpha * op(z) for alpha, (op, z) in candidates)

    start = task.evaluate(net)["loss"]
    for site in sites(net):
        site.weak_learner.register_forward_hook(add)
    assert task.evaluate(net)["loss"] - start == pytest.approx(step.change, rel=1e-3, abs=1e-6)


def _slope_of_a_step(net, key, index, losses, step=1e-5) -> float:  # type: ignore[no-untyped-def]
    """Differentiate the loss of a network that really adds t·α·op(z) to x_k."""

    def loss_at(t: float) -> float:
        handles = []
        for site in sites(net):
            if site.key == key:
                learner = site.weak_learner

                def add(module, arguments, output, learner=learner):  # type: ignore[no-untyped-def]
                    op, z = learner.ops_with_inputs(arguments[1])[index]
                    return output + t * learner.table.alpha[index] * op(z)

                handles.append(learner.register_forward_hook(add))
        with torch.no_grad():
            value = float(sum(losses(net)))
        for handle in handles:
            handle.remove()
        return value

    return (loss_at(step) - loss_at(-step)) / (2 * step)


def test_a_damaged_model_is_left_out_and_the_rest_is_shown(tmp_path: Path) -> None:
    gallery = vision_gallery(tmp_path)
    (gallery.folder / "models" / "g00003" / "genotype.json").write_text("{}")
    text = report(gallery)
    assert "g00003: its files cannot be read." in text
    assert (gallery.folder / "pictures" / "g00001-normal.svg").exists()


def test_the_command_prints_hull_and_lineage_and_writes_the_report(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = vision_gallery(tmp_path).folder
    assert main(["show", str(folder)]) == 0
    output = capsys.readouterr().out
    assert output.count("g00002") == 1  # not on the hull, but in the lineage
    assert str(folder / "report.html") in output
    assert main(["show", str(tmp_path)]) == 2
    assert "gallery.json is missing" in capsys.readouterr().err


def test_a_report_that_cannot_be_written_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = vision_gallery(tmp_path).folder
    (folder / "pictures").write_text("in the way")
    assert main(["show", str(folder)]) == 2
    assert capsys.readouterr().err.startswith("nni-petridish: Cannot make ")


def test_an_axis_is_logarithmic_where_errors_span_decades() -> None:
    search = Search(SearchSettings())
    for error, size in ((0.9, 100), (0.02, 300), (0.004, 500)):
        growth = search.ask()
        assert isinstance(growth, Growth)
        search.tell(Outcome(growth.id, error, size, parameters=1))
    root = ET.fromstring(hull_chart(search))
    texts = [element.text for element in root.iter(f"{SVG}text")]
    assert texts[:4] == ["0.1", "1", "10", "100"]  # percent
    dots = {
        d.attrib["data-model"]: d for d in root.iter(f"{SVG}circle") if "data-model" in d.attrib
    }
    heights = [float(dots[f"g0000{i}"].attrib["cy"]) for i in range(3)]
    expected = math.log(0.9 / 0.02) / math.log(0.02 / 0.004)
    assert (heights[1] - heights[0]) / (heights[2] - heights[1]) == pytest.approx(expected, 0.01)
    # The hull is straight on linear axes, so it is bent here; it meets its models all the same.
    (curve,) = root.iter(f"{SVG}polyline")
    points = curve.attrib["points"].split()
    assert len(points) > 40
    for dot in dots.values():
        assert f"{dot.attrib['cx']},{dot.attrib['cy']}" in points


def test_failures_settings_and_times_are_told(tmp_path: Path) -> None:
    gallery = vision_gallery(tmp_path)
    for event in (
        ask_event(Growth("g00004", "g00001", 4, 0.001, 2), 7300.0),
        fail_event("g00004", 1, "out of <memory>"),
        ask_event(Growth("g00004", "g00001", 5, 0.001, 2, attempt=2), 7300.0),
        fail_event("g00004", 2, "loss is NaN"),
        quarantine_event("g00002", "its weights are damaged"),
        ask_event(Growth("g00005", "g00001", 6, 0.001, 2), 7300.0),
    ):
        gallery.journal.append(event)
    text = report(gallery)
    assert "<td>g00004, attempt 1</td><td>given up</td><td>out of &lt;memory&gt;</td>" in text
    assert "<td>g00004, attempt 2</td><td>given up</td><td>loss is NaN</td>" in text
    assert "<td>g00002</td><td>quarantined</td><td>its weights are damaged</td>" in text
    assert "<dt>l1</dt><dd>0.001</dd>" in text
    assert "2 h 1 min after the beginning" in text
    assert "<dt>training</dt><dd>10.0 s</dd>" in text  # 2 + 4 + 4 epochs of a second
    assert re.search(r"Unfinished:\s+<b>g00005</b> from g00001", text)


def test_the_page_tells_how_to_load_each_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = vision_gallery(tmp_path).folder
    monkeypatch.chdir(tmp_path)
    usage = Usage.of(folder, {"space": "vision"})
    assert f"<code>{escape(usage.python('g00002'))}</code>" in report(Gallery(folder))
    scope: dict[str, Any] = {}
    exec(usage.python("g00002"), scope)
    assert scope["net"].facts["id"] == "g00002"
    assert str(tmp_path) not in usage.python("g00002")
    export, train = (shlex.split(line) for line in usage.commands("g00002").splitlines())
    options = _parser().parse_args(export[1:])
    assert (options.gallery, options.model) == (folder.relative_to(tmp_path), "g00002")
    assert _parser().parse_args(train[1:]).model == "g00002"
    other = Usage.of(folder, {"space": "nni"})  # its networks need the user's code
    assert other.commands("g00002") == ""
    exec(other.python("g00002"), scope)
    assert scope["genotype"].growths == 1


def test_a_notebook_shows_the_report_in_a_frame(tmp_path: Path) -> None:
    gallery = vision_gallery(tmp_path)
    shown = gallery._repr_html_()
    frame = ET.fromstring(shown)
    assert frame.tag == "iframe"
    assert frame.attrib["sandbox"] == "allow-scripts"  # without access to the notebook
    page = Page(frame.attrib["srcdoc"])
    assert page.open == page.fetched == []
    assert [id for id in page.ids if id.startswith("g")] == ["g00000", "g00001", "g00003"]
    assert not (gallery.folder / "report.html").exists()


@pytest.mark.browser
def test_a_browser_shows_the_chosen_model_light_and_dark_wide_and_narrow(
    tmp_path: Path, browser: Any
) -> None:
    gallery = vision_gallery(tmp_path)
    report(gallery)
    for scheme, width in (("light", 1200), ("dark", 400)):
        media = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", media)
        size = {"width": width, "height": 800, "deviceScaleFactor": 1, "mobile": False}
        browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        browser.get((gallery.folder / "report.html").as_uri())
        assert _chosen(browser) == ["g00003"]  # the most accurate
        (chart,) = [c for c in browser.find_elements("css selector", ".chart") if c.is_displayed()]
        chart.find_element("css selector", "[data-model=g00002]").click()
        assert _chosen(browser) == ["g00002"]
        assert browser.current_url.endswith("#g00002")
        assert "sep_conv_3x3" in browser.find_element("id", "g00002").text
        lit = chart.find_elements("css selector", ".lit")
        assert [line.get_attribute("data-child") for line in lit] == ["g00002"]
        browser.find_element("css selector", ".steps button:last-child").click()
        assert _chosen(browser) == ["g00003"]
        script = "return document.documentElement.scrollWidth"
        assert browser.execute_script(script) <= width
        ground = "return getComputedStyle(document.body).backgroundColor.match(/\\d+/g).map(Number)"
        assert (sum(browser.execute_script(ground)) > 600) == (scheme == "light")
    header = browser.find_element("css selector", "th:nth-child(3) button")
    browser.execute_script("arguments[0].click()", header)
    rows = browser.find_elements("css selector", "tr[data-model]")
    assert rows[0].get_attribute("data-model") == "g00003"
    assert [log["message"] for log in browser.get_log("browser")] == []


def _chosen(browser: Any) -> list[str]:
    shown = browser.find_elements("css selector", ".model")
    return [model.get_attribute("id") for model in shown if model.is_displayed()]
