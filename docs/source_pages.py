"""A hook of mkdocs: links from the documents to other files of the repository lead to pages that show those files.

The same links work where the repository itself is read; here every file that some document names gets a page under source/,
a folder one that lists it, and CONTRIBUTING.md and CHANGELOG.md become pages of their own.
"""

from __future__ import annotations

import ast
import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parent.parent
#: Documents outside docs/ that are pages of the site.
DOCUMENTS = {"CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changes.md"}
FENCED = re.compile(r"(^```.*?^```$)", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[([^\]]+)\]\(([^)\s]+)\)")
LANGUAGES = {".py": "python", ".toml": "toml", ".md": "markdown", ".json": "json", ".cff": "yaml", ".yml": "yaml"}


def on_files(files: Files, config: Any) -> Files:
    """Add the pages that are made here."""
    for document, page in DOCUMENTS.items():
        files.append(File.generated(config, page, content=(ROOT / document).read_text(encoding="utf-8")))
    named = {place for file in files.documentation_pages() for place in _named(file)}
    for place in sorted(named):
        files.append(File.generated(config, _page_of(place), content=_shown(place, named)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Turn links that leave docs/ into links to pages, and links that show the name of a document into its title."""
    uri = page.file.src_uri
    return markdown if uri.startswith("source/") else _relinked(markdown, uri, _titles(config["nav"]))


def on_post_page(output: str, page: Any, config: Any) -> str:
    """Give the theme's search a name for screen readers."""
    return output.replace(
        'data-md-component="search" role="dialog"', 'data-md-component="search" role="dialog" aria-label="Search"'
    )


def _titles(nav: Any) -> dict[str, str]:
    """What the navigation calls a page, by its file."""
    if isinstance(nav, dict):
        return {
            k: v
            for title, inner in nav.items()
            for k, v in ({inner: title} if isinstance(inner, str) else _titles(inner)).items()
        }
    return {k: v for inner in nav for k, v in _titles(inner).items()}


def on_page_content(html: str, page: Any, config: Any, files: Files) -> str:
    """Give links to lines their anchors; mkdocs does not know of those that highlighting makes, and would warn."""
    return re.sub(r'\?line=(\d+)"', r'#__codelineno-0-\1"', html)


def _relinked(markdown: str, uri: str, titles: dict[str, str]) -> str:
    def relinked(link: re.Match[str]) -> str:
        text, target = link[1], link[2]
        if text in titles and target.partition("#")[0] == text:
            return f"[{titles[text]}]({target})"
        place, anchor = _place(uri, target)
        if place is None:
            return link[0]
        anchor = anchor or _line(place, text)
        return f"[{text}]({posixpath.relpath(_page_of(place), posixpath.dirname(uri) or '.')}{anchor})"

    parts = FENCED.split(markdown)
    return "".join(part if part.startswith("```") else LINK.sub(relinked, part) for part in parts)


def _named(file: File) -> set[str]:
    """The places in the repository that a page links to and that have no page of their own yet."""
    parts = FENCED.split(file.content_string)
    targets = [target for part in parts if not part.startswith("```") for _, target in LINK.findall(part)]
    places = {_place(file.src_uri, target)[0] for target in targets}
    return {place for place in places if place is not None and _page_of(place).startswith("source/")}


def _place(uri: str, target: str) -> tuple[str | None, str]:
    """What a link leads to, as a path in the repository, and its anchor; no path where it is no such link."""
    path, mark, anchor = target.partition("#")
    if not path or re.match(r"[a-z]+:", target):
        return None, ""
    origin = next((document for document, page in DOCUMENTS.items() if page == uri), f"docs/{uri}")
    place = posixpath.normpath(posixpath.join(posixpath.dirname(origin), path))
    within_docs = place.startswith("docs/") and origin.startswith("docs/")
    known = not within_docs and not place.startswith("..") and (ROOT / place).exists()
    return (place if known else None), mark + anchor


def _page_of(place: str) -> str:
    """The page that shows a place in the repository."""
    if place.startswith("docs/") and place.endswith(".md"):
        return place.removeprefix("docs/")
    if place == "README.md":
        return "index.md"
    return DOCUMENTS.get(place) or f"source/{place}.md"


def _shown(place: str, named: set[str]) -> str:
    """The page for a file, or for a folder."""
    head = f"---\ntitle: {place}\nhide: [toc]\nsearch:\n  exclude: true\n---\n\n# `{place}`\n\n"
    path = ROOT / place
    if path.is_dir():
        inside = sorted(f.relative_to(ROOT).as_posix() for f in path.iterdir() if f.suffix in LANGUAGES)
        base = posixpath.dirname(_page_of(place))
        links = [f"[`{f}`]({posixpath.relpath(_page_of(f), base)})" if f in named else f"`{f}`" for f in inside]
        return head + "\n".join(f"- {link}" for link in links) + "\n"
    code = path.read_text(encoding="utf-8")
    return f'{head}``````{{ .{LANGUAGES.get(path.suffix, "text")} linenums="1" }}\n{code}\n``````\n'


def _line(place: str, text: str) -> str:
    """The line on which a python file defines a name that a link shows as code, or nothing."""
    name = re.fullmatch(r"`([\w.]+)`", text)
    if name is None or not place.endswith(".py"):
        return ""
    nodes: list[Any] = [ast.parse((ROOT / place).read_text(encoding="utf-8"))]
    for word in name[1].split("."):
        nodes = [inner for node in nodes for inner in ast.iter_child_nodes(node) if word in _names(inner)]
    return f"?line={nodes[0].lineno}" if nodes else ""


def _names(node: ast.AST) -> list[str]:
    if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
        return [node.name]
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return [target.id for target in targets if isinstance(target, ast.Name)]
