"""The documents say what is true: their code runs, their links lead somewhere, the names they give exist."""

from __future__ import annotations

import ast
import contextlib
import io
import re
import shlex
import tomllib
from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from locallip import tables
from locallip.cli import COMMANDS, Train, _stretched
from locallip.network import rules
from locallip.training import recipe as recipes
from locallip.zoo import model_cards
from tests.contracts import test_activations, test_ops

ROOT = Path(__file__).parent.parent
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])
RUNNABLE = ["README.md", "docs/math.md", "docs/training.md", "docs/adding_a_layer.md"]

BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[([^\]]+)\]\(([^)\s]+)\)")


class Block(NamedTuple):
    """A block of python, the line it starts on, and the output that the document prints behind it."""

    line: int
    code: str
    output: str | None


def blocks(document: Path) -> list[Block]:
    text = document.read_text(encoding="utf-8")
    found = list(BLOCK.finditer(text))
    result = []
    for block, following in zip(found, [*found[1:], None], strict=True):
        if block[1] == "python":
            shown = following is not None and following[1] == "output" and following.start() == block.end() + 1
            output = following[2] if following is not None and shown else None
            result.append(Block(text.count("\n", 0, block.start()) + 1, block[2], output))
    return result


@contextlib.contextmanager
def rules_restored() -> Iterator[None]:
    """Layers that a document registers are forgotten behind it."""
    before = dict(rules.MODULE_RULES)
    try:
        yield
    finally:
        rules.MODULE_RULES.clear()
        rules.MODULE_RULES.update(before)


def run(document: Path) -> dict[str, Any]:
    """Execute all blocks of a document in one namespace; what is printed must be what the document shows."""
    names: dict[str, Any] = {"__name__": "document"}
    with rules_restored(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        for block in blocks(document):
            # Leading newlines make the line numbers of a traceback those of the document.
            code = compile("\n" * block.line + block.code, str(document), "exec")
            printed = io.StringIO()
            with contextlib.redirect_stdout(printed):
                exec(code, names)
            if block.output is not None:
                assert printed.getvalue() == block.output, f"{document.name}, line {block.line}"
    return names


@pytest.mark.parametrize("name", RUNNABLE)
def test_code_runs_and_prints_what_is_shown(name: str) -> None:
    document = ROOT / name
    shown = [block for block in blocks(document) if block.output is not None]
    assert len(shown) == document.read_text(encoding="utf-8").count("```output") > 0
    run(document)


def test_readme_certifies_what_it_says() -> None:
    names = run(ROOT / "README.md")
    certificate, radii = names["c"], names["r"]
    assert len(certificate.verdicts) == len(radii) == 8
    assert bool((names["L"] <= names["G"] * (1 + 1e-6)).all())
    assert bool((radii > 0).all())
    assert bool(torch.isfinite(names["loss"]))


@pytest.mark.parametrize("document", ["README.md", "docs/auditing.md"])
def test_documents_show_the_results_that_are_there(document: str) -> None:
    text = (ROOT / document).read_text(encoding="utf-8")
    expected = tables.filled_from(text, ROOT / "results")
    assert text == expected, f"{document} is behind results/: python -m locallip.tables {document} results rewrites it"


def test_documents_know_whether_networks_come_with_the_package() -> None:
    training, readme = ((ROOT / name).read_text(encoding="utf-8") for name in ("docs/training.md", "README.md"))
    none = not model_cards()
    assert ("so far there are none" in training) == none
    assert ("missing today: trained networks that come with the package" in readme) == none


def shell_lines(document: Path) -> list[list[str]]:
    """The calls of `locallip` in blocks of shell, as words."""
    text = document.read_text(encoding="utf-8")
    lines = [line for block in BLOCK.finditer(text) if block[1] == "sh" for line in block[2].splitlines()]
    return [shlex.split(line)[1:] for line in lines if line.startswith("locallip ")]


def own_recipe() -> recipes.Recipe:
    """The recipe of one's own that docs/training.md shows."""
    text = (ROOT / "docs" / "training.md").read_text(encoding="utf-8")
    (block,) = [block[2] for block in BLOCK.finditer(text) if block[1] == "toml"]
    return recipes.from_mapping({"name": "my-recipe", **tomllib.loads(block)}, where="docs/training.md")


@pytest.mark.parametrize("name", ["README.md", "docs/training.md"])
def test_commands_that_are_shown_exist(name: str) -> None:
    """Subcommands, recipes and options are real, and recipes with their changes can be run."""
    calls = shell_lines(ROOT / name)
    assert any(call[0] == "train" for call in calls)
    known = {field.name for field in fields(Train)} - {"recipe"}
    for command, *words in calls:
        if command != "train":
            assert command in COMMANDS, command
            continue
        recipe = own_recipe() if words[0] == "my-recipe.toml" else recipes.find(words[0])
        recipe = _stretched(recipe, words)
        changes = {}
        for word, following in zip(words[1:], [*words[2:], ""], strict=True):
            option = word.removeprefix("--").replace("-", "_")
            if word.startswith("--") and option not in known:
                assert hasattr(recipe, option), word
                changes[option] = type(getattr(recipe, option))(following)
        replace(recipe, **changes)  # refuses what cannot be run


def contracts(module: Any) -> list[Any]:
    """The tests of a module that every row has to pass, those for rows of a special kind left out."""
    tests = [value for name, value in vars(module).items() if name.startswith("test_")]
    every = {"test_ops": "ops", "test_activations": "activations"}[module.__name__.rsplit(".", 1)[1]]
    rows = getattr(module, every).mark
    return [test for test in tests if any(mark == rows for mark in getattr(test, "pytestmark", []))]


def test_new_layers_of_the_document_pass_the_contracts() -> None:
    names = run(ROOT / "docs" / "adding_a_layer.md")
    for module, rows in ((test_ops, names["op_rows"]), (test_activations, names["activation_rows"])):
        tests = contracts(module)
        assert len(tests) > 8
        for row in rows:
            for test in tests:
                test(row)
    test_ops.test_same_as_the_layer_of_torch(names["op_rows"][0])


def test_registered_layers_of_the_document_are_forgotten() -> None:
    before = dict(rules.MODULE_RULES)
    run(ROOT / "docs" / "adding_a_layer.md")
    assert before == rules.MODULE_RULES


def links(document: Path) -> list[tuple[str, str]]:
    """Text and target of every link, code blocks left out."""
    return LINK.findall(BLOCK.sub("", document.read_text(encoding="utf-8")))


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_relative_links_resolve(document: Path) -> None:
    for text, target in links(document):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        file = (document.parent / path) if path else document
        assert file.exists(), f"[{text}]({target})"
        assert ROOT.resolve() in [file.resolve(), *file.resolve().parents], f"[{text}]({target}) leaves the repository"
        if anchor:
            assert anchor in headings(file), f"[{text}]({target})"


def headings(document: Path) -> set[str]:
    """The anchors of a document, as code hosts make them from its headings."""
    text = BLOCK.sub("", document.read_text(encoding="utf-8"))
    titles = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def defined(file: Path) -> set[str]:
    """Functions, classes, methods and constants of a python file; methods and fields as Class.name."""
    result = set[str]()

    def visit(body: list[ast.stmt], prefix: str) -> None:
        for node in body:
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                result.add(prefix + node.name)
            if isinstance(node, ast.ClassDef):
                visit(node.body, f"{prefix}{node.name}.")
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                result.add(prefix + node.target.id)
            if isinstance(node, ast.Assign):
                result.update(prefix + target.id for target in node.targets if isinstance(target, ast.Name))

    visit(ast.parse(file.read_text(encoding="utf-8")).body, "")
    return result


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_named_code_exists(document: Path) -> None:
    """A link written [`name`](file.py) promises that the file defines the name."""
    for text, target in links(document):
        named = re.fullmatch(r"`([\w.]+)`", text)
        if named and target.endswith(".py") and not named[1].endswith(".py"):
            assert named[1] in defined(document.parent / target), f"[{text}]({target})"


def test_every_row_of_the_table_of_symbols_has_code_and_test() -> None:
    text = (ROOT / "docs" / "math.md").read_text(encoding="utf-8")
    section = text.split("## Symbols", 1)[1].split("\n## ", 1)[0]
    rows = [line for line in section.splitlines() if line.startswith("|")][2:]
    assert len(rows) > 15
    for row in rows:
        _, symbol, _, code, test, _ = re.split(r"(?<!\\)\|", row)
        assert re.search(r"\]\(\.\./src/locallip/[\w/]+\.py\)", code), symbol
        assert re.search(r"\[`test_\w+`\]\(\.\./tests/[\w/]+\.py\)", test), symbol


def test_equations_that_the_documents_cite_are_cited_by_the_code() -> None:
    """Labels of the paper are spelled alike in the table of symbols and in docstrings, so that a search finds both."""
    cited = set(re.findall(r"`(eqn?:\w+|theo:\w+|alg:\w+)`", (ROOT / "docs" / "math.md").read_text(encoding="utf-8")))
    source = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "src").rglob("*.py"))
    for label in ("eq:local_lip", "eq:glocal_lips", "eq:indicator_relux", "eqn:bcpworst", "eqn:bcploss", "eqn:sparse_loss"):
        assert label in cited
        assert label in source
