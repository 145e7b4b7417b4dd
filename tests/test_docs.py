"""Links, names of files and lengths in the documentation."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
GUIDES = sorted(ROOT.glob("docs/guide/*.md"))
MOST_WORDS = 700


def name(page: Path) -> str:
    return str(page.relative_to(ROOT))


def without_code_blocks(text: str) -> str:
    """Return the text without fenced blocks and blocks indented after an empty line."""
    text = re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)
    return re.sub(r"(?<=\n\n)(?: {4}.*\n)+", "", text)


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ +(.*)$", without_code_blocks(page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def links(page: Path) -> list[str]:
    text = without_code_blocks(page.read_text())
    targets = re.findall(r"\]\(([^)\s]+)\)", text) + re.findall(r'<img src="([^"]+)"', text)
    return [target for target in targets if "://" not in target]


def paths_in_backticks(page: Path) -> set[str]:
    """Return the paths from the root of the repository that a page names in backticks."""
    spans = re.findall(r"`([^`\n]+)`", without_code_blocks(page.read_text()))
    words = (word.rstrip(".,;:") for span in spans for word in span.split())
    top = r"(nni_petridish|search_spaces|tests|benchmarks|examples|configs|docs)/[\w./-]*"
    return {word for word in words if re.fullmatch(top, word)}


def modules_in_backticks(page: Path) -> set[str]:
    spans = re.findall(r"`([^`\n]+)`", without_code_blocks(page.read_text()))
    pattern = r"\b((?:nni_petridish|search_spaces)(?:\.\w+)+)"
    return {module for span in spans for module in re.findall(pattern, span)}


def imports_in_code(page: Path) -> set[str]:
    pattern = r"^(?:from|import) ((?:nni_petridish|search_spaces)(?:\.\w+)*)"
    return set(re.findall(pattern, page.read_text(), re.MULTILINE))


def is_module(dotted: str) -> bool:
    path = ROOT.joinpath(*dotted.split("."))
    return (path / "__init__.py").exists() or path.with_suffix(".py").exists()


def is_module_or_name(dotted: str) -> bool:
    """Tell whether a dotted name is a module, or a name that its parent module contains."""
    parent, _, last = dotted.rpartition(".")
    path = ROOT.joinpath(*parent.split("."))
    source = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    named = source.exists() and re.search(rf"\b{last}\b", source.read_text())
    return is_module(dotted) or bool(named)


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_every_relative_link_resolves(page: Path) -> None:
    for link in links(page):
        file, _, anchor = link.partition("#")
        target = (page.parent / file).resolve() if file else page
        assert target.exists(), f"{name(page)}: {link}"
        if anchor:
            assert anchor in anchors(target), f"{name(page)}: {link}"


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_every_file_that_is_named_exists(page: Path) -> None:
    for path in paths_in_backticks(page):
        assert (ROOT / path).exists(), f"{name(page)}: {path}"


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_every_module_that_is_named_exists(page: Path) -> None:
    if page.name == "CHANGELOG.md":
        return  # it names modules of earlier versions
    for module in modules_in_backticks(page):
        assert is_module_or_name(module), f"{name(page)}: {module}"
    for module in imports_in_code(page):
        assert is_module(module), f"{name(page)}: {module}"


@pytest.mark.parametrize("page", GUIDES, ids=name)
def test_guides_are_short(page: Path) -> None:
    words = [word for word in without_code_blocks(page.read_text()).split() if word.strip("|-:*")]
    assert len(words) <= MOST_WORDS


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_every_page_is_linked(page: Path) -> None:
    linked = {
        (other.parent / link.partition("#")[0]).resolve()
        for other in PAGES
        for link in links(other)
    }
    assert page == ROOT / "README.md" or page in linked


def test_comments_of_configurations_and_modules_name_pages_that_exist() -> None:
    files = [*ROOT.glob("configs/*.yml"), *ROOT.glob("nni_petridish/**/*.py"), ROOT / "setup.cfg"]
    for file in files:
        for page in re.findall(r"docs/[\w/-]+\.md", file.read_text()):
            assert (ROOT / page).exists(), f"{name(file)}: {page}"


def test_the_checks_notice_what_they_are_for(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "# A heading, of λ\n[x](nowhere.md#there) `configs/none.yml` `nni_petridish.none.at_all`\n"
        "```python\nfrom nni_petridish.none import x  # [y](block.md)\n```\n\n    indented block\n"
    )
    assert links(page) == ["nowhere.md#there"]
    assert anchors(page) == {"a-heading-of-λ"}
    assert paths_in_backticks(page) == {"configs/none.yml"}
    assert modules_in_backticks(page) == {"nni_petridish.none.at_all"}
    assert imports_in_code(page) == {"nni_petridish.none"}
    assert not is_module("nni_petridish.none")
    assert not is_module_or_name("nni_petridish.none.at_all")
    assert "indented" not in without_code_blocks(page.read_text())


def test_the_recurrent_guides_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
    text = (ROOT / "docs" / "guide" / "recurrent.md").read_text()
    code = re.search(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    assert code is not None
    small = code[1].replace('load_text("pydoc")', 'load_text("pydoc", limit=20000)')
    small = re.sub(r"epochs=\d", "epochs=1", small).replace("embedding=100", "embedding=8")
    exec(small, {})
    genotype, perplexity = capsys.readouterr().out.splitlines()[-2:]
    assert '"space": "recurrent"' in genotype
    assert 1 < float(perplexity) < 2000  # 2000 words, all equally likely, would give 2000
