"""The documentation as a site: it builds without a warning, fetches nothing from elsewhere, and leads to the right lines."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

pytest.importorskip("mkdocs", reason="the site is built by the extra docs")
ROOT = Path(__file__).parent.parent
#: Attributes that a browser fetches by itself; a link waits until somebody follows it.
FETCHED = {"script": "src", "img": "src", "iframe": "src", "link": "href", "source": "src", "video": "src"}


class Page(HTMLParser):
    """What a page fetches, its links, and the places that links may lead to."""

    def __init__(self, text: str):
        super().__init__()
        self.fetched: list[str] = []
        self.links: list[str] = []
        self.places: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attributes}
        self.places.update(values[name] for name in ("id", "name") if name in values)
        if FETCHED.get(tag) in values:
            self.fetched.append(values[FETCHED[tag]])
        if tag == "a" and "href" in values:
            self.links.append(values["href"])


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built as `make docs` builds it: any warning, such as one of a dead link, is an error."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict", "--site-dir", str(folder)]
    quiet = {**os.environ, "NO_MKDOCS_2_WARNING": "true"}
    result = subprocess.run(command, cwd=ROOT, env=quiet, capture_output=True, text=True, timeout=300, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    return folder


def test_all_documents_are_pages(site: Path) -> None:
    wanted = {path.with_suffix(".html").name for path in (ROOT / "docs").glob("*.md")} | {
        "contributing.html",
        "changes.html",
    }
    navigation = {link.partition("#")[0] for link in Page((site / "index.html").read_text(encoding="utf-8")).links}
    assert len(wanted) > 15
    for page in wanted:
        assert (site / page).is_file()
        assert page in navigation, f"{page} is not in the navigation"


def test_nothing_is_fetched_from_elsewhere(site: Path) -> None:
    pages = list(site.rglob("*.html"))
    assert len(pages) > 50
    for path in pages:
        fetched = Page(path.read_text(encoding="utf-8")).fetched
        assert fetched
        assert not [address for address in fetched if re.match(r"[a-z]+:|//", address) and not address.startswith("data:")]
    for style in site.rglob("*.css"):
        assert not re.search(r"url\(\s*[\"']?(https?:)?//", style.read_text(encoding="utf-8")), style


def test_links_inside_the_site_lead_somewhere(site: Path) -> None:
    """mkdocs looks at links before this hook gives them the lines of code; here they are as a reader gets them."""
    pages = {path.resolve(): Page(path.read_text(encoding="utf-8")) for path in site.rglob("*.html")}
    to_lines = 0
    for path, page in pages.items():
        for link in page.links:
            if re.match(r"[a-z]+:|//", link) or path.name == "404.html":
                continue
            file, _, place = link.partition("#")
            target = (path.parent / file).resolve() if file not in ("", ".") else path
            target = target / "index.html" if target.is_dir() else target
            assert target.exists(), f"{path.name}: {link}"
            if place and target in pages:
                assert place in pages[target].places, f"{path.name}: {link}"
                to_lines += place.startswith("__codelineno")
    assert to_lines > 100


def test_a_name_leads_to_the_line_that_defines_it(site: Path) -> None:
    page = (site / "math.html").read_text(encoding="utf-8")
    link = re.search(
        r'<a href="source/src/locallip/bounds/propagate\.py\.html#__codelineno-0-(\d+)"><code>propagate</code>', page
    )
    assert link is not None
    source = (ROOT / "src" / "locallip" / "bounds" / "propagate.py").read_text(encoding="utf-8")
    assert source.splitlines()[int(link[1]) - 1] == "def propagate("


def test_the_python_reference_shows_signatures_and_first_sentences(site: Path) -> None:
    text = re.sub(r"<[^>]+>", "", (site / "api.html").read_text(encoding="utf-8"))
    assert "One verdict per input." in text
    assert "failure_prob" in text
    assert "eqn:bcploss" in text
