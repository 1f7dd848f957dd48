"""The documents say what is true: their code runs, their links lead somewhere, the names they give exist."""

from __future__ import annotations

import ast
import contextlib
import functools
import inspect
import io
import os
import re
import shlex
import tomllib
from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import pytest
import torch

import locallip
from locallip import bounds, commands, documents, losses, norms
from locallip.cli import COMMANDS, Train, _stretched
from locallip.network import rules
from locallip.training import recipe as recipes
from locallip.zoo import model_cards
from tests.contracts import test_activations, test_ops

ROOT = Path(__file__).parent.parent
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])
RUNNABLE = ["README.md", *(f"docs/{name}.md" for name in ("index", "guide", "math", "training", "adding_a_layer"))]
GENERATED = ["README.md", "docs/auditing.md", "docs/bounds.md", "docs/reproducing.md", "docs/scale.md", "docs/tightness.md"]

BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
#: A part that is filled from results/.
PART = re.compile(r"<!-- (\w+):begin -->.*?<!-- \1:end -->", re.DOTALL)
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


@functools.cache
def run(document: Path) -> dict[str, Any]:
    """Execute all blocks of a document in one namespace; what is printed must be what the document shows.

    Files that it writes go into a folder that is removed.
    """
    names: dict[str, Any] = {"__name__": "document"}
    with rules_restored(), torch.random.fork_rng(devices=[]), TemporaryDirectory() as place, contextlib.chdir(place):
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


@pytest.mark.parametrize("document", GENERATED)
def test_documents_show_the_results_that_are_there(document: str) -> None:
    text = (ROOT / document).read_text(encoding="utf-8")
    expected = documents.filled_from(text, ROOT / "results")
    assert text == expected, f"{document} is behind results/: python -m locallip.documents {document} results rewrites it"


def test_pictures_show_the_results_that_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    from scaling_picture import pictures  # type: ignore[import-not-found]

    found = pictures(ROOT / "results")
    assert found
    for name, drawn in found.items():
        assert (ROOT / "docs" / "images" / name).read_text(encoding="utf-8") == drawn, "python benchmarks/scaling_picture.py"


def test_every_document_with_a_generated_part_is_compared() -> None:
    having = {path.relative_to(ROOT).as_posix() for path in DOCUMENTS if PART.search(path.read_text(encoding="utf-8"))}
    assert having == set(GENERATED)


#: Numbers with a unit that no measurement is behind: document, and the words that hold the number.
SETTINGS = {
    ("certifying.md", "its 95 % interval"),
    ("certifying.md", "(within 2 %)"),
    ("certifying.md", "0.1, ... 2 times the run's eps"),
    ("certifying.md", "within about one per cent"),
    ("scale.md", "at 300 GB/s inside"),
    ("scale.md", "at 25 GB/s between"),
    ("soundness.md", "within 0.03 %"),
    ("tightness.md", "less than 1e-290 times the widths"),
    ("training.md", "at most one in ten seconds"),
    ("training.md", "when the last is a minute old"),
    ("training.md", "above 2 GB"),
    ("training.md", "within five per cent"),
}
MEASURE = re.compile(
    r"\b(?:\d[\d.,]*|a|one|two|three|four|five|ten)\s(?:%|(?:per cent|s|ms|seconds?|minutes?|min|hours?|GB|MB|times)\b)"
)


def test_measurements_stand_in_generated_parts_alone() -> None:
    """A share, time or size that is typed by hand would not change with results/; a new setting goes into SETTINGS."""
    found = set()
    for document in sorted((ROOT / "docs").glob("*.md")):
        if document.name == "commands.md":  # made from the command as a whole
            continue
        text = BLOCK.sub("", PART.sub("", document.read_text(encoding="utf-8")))
        text = re.sub(r"`[^`\n]*`", "", " ".join(text.split()))
        for number in MEASURE.finditer(text):
            known = [
                (name, words) for name, words in SETTINGS if name == document.name and number[0] in words and words in text
            ]
            assert known, f"{document.name}: {text[max(0, number.start() - 60) : number.end() + 20]!r}"
            found.update(known)
    assert found == SETTINGS


def test_the_command_reference_is_that_of_the_command() -> None:
    shown = (ROOT / "docs" / "commands.md").read_text(encoding="utf-8")
    behind = "docs/commands.md is behind the command: python -m locallip.commands docs/commands.md rewrites it"
    assert _words(shown) == _words(commands.reference()), behind
    assert not any(ord(letter) < 32 and letter != "\n" for letter in shown)  # colours begin with such a letter
    assert all(f"\n## locallip {name}\n" in shown for name in (*COMMANDS, "train"))


def _words(text: str) -> list[str]:
    """The words of a help text without its rulers: how lines are drawn and broken is the terminal's."""
    return [word for word in text.split() if not re.fullmatch(r"[-─│╭╮╰╯]+", word)]


@pytest.mark.parametrize("terminal", [{"COLUMNS": "40"}, {"COLUMNS": "300", "FORCE_COLOR": "1", "TERM": "xterm-256color"}])
def test_the_command_reference_does_not_depend_on_the_terminal(monkeypatch, terminal: dict[str, str]) -> None:
    expected = commands.reference()
    for name, value in terminal.items():
        monkeypatch.setenv(name, value)
    assert commands.reference() == expected
    assert {name: os.environ[name] for name in terminal} == terminal  # and leaves it as it was


@pytest.mark.parametrize(("args", "code"), [([], 2), (["--help"], 2), (["a", "b"], 2), (["absent/commands.md"], 1)])
def test_a_wrong_call_of_the_writer_of_the_reference_is_explained(tmp_path, capsys, monkeypatch, args, code) -> None:
    monkeypatch.chdir(tmp_path)
    assert commands.write(args) == code
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_the_command_reference_is_written(tmp_path: Path) -> None:
    assert commands.write([str(tmp_path / "commands.md")]) == 0
    assert (tmp_path / "commands.md").read_text(encoding="utf-8") == commands.reference()


def test_the_python_reference_has_every_public_name_once() -> None:
    shown = re.findall(r"^::: ([\w.]+)$", (ROOT / "docs" / "api.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert len(shown) == len(set(shown))
    public = [getattr(module, name) for module in (locallip, bounds, norms) for name in module.__all__]
    made = [value for value in public if inspect.isclass(value) or inspect.isfunction(value)]
    made += [value for value in vars(losses).values() if inspect.isfunction(value)]
    wanted = {f"{value.__module__}.{value.__qualname__}" for value in made}
    assert wanted == set(shown)
    assert len(wanted) > 40


def test_documents_know_whether_networks_come_with_the_package() -> None:
    training, readme = ((ROOT / name).read_text(encoding="utf-8") for name in ("docs/training.md", "README.md"))
    none = not model_cards()
    assert ("so far there are none" in training) == none
    assert ("missing today: trained networks that come with the package" in readme) == none


def shell_lines(document: Path) -> list[list[str]]:
    """The calls of `locallip` in blocks of shell, as words."""
    text = document.read_text(encoding="utf-8")
    lines = [line for block in BLOCK.finditer(text) if block[1] == "sh" for line in block[2].splitlines()]
    calls = [line.removeprefix(".venv/bin/") for line in lines]
    return [shlex.split(line)[1:] for line in calls if line.startswith("locallip ")]


def own_recipe() -> recipes.Recipe:
    """The recipe of one's own that docs/training.md shows."""
    text = (ROOT / "docs" / "training.md").read_text(encoding="utf-8")
    (block,) = [block[2] for block in BLOCK.finditer(text) if block[1] == "toml"]
    return recipes.from_mapping({"name": "my-recipe", **tomllib.loads(block)}, where="docs/training.md")


@pytest.mark.parametrize("name", ["README.md", "docs/training.md", "docs/guide.md", "docs/reproducing.md"])
def test_commands_that_are_shown_exist(name: str) -> None:
    """Subcommands, recipes and options are real, and recipes with their changes can be run."""
    calls = shell_lines(ROOT / name)
    assert any(call[0] == "train" for call in calls)
    known = {field.name for field in fields(Train)} - {"recipe"}
    for command, *words in calls:
        if command != "train":
            assert command in COMMANDS or command == "--version", command
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


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_options_that_are_shown_exist(document: Path) -> None:
    """Those of recipes are looked at above."""
    reference = commands.reference()
    for command, *words in shell_lines(document):
        if command == "train" or command.startswith("-"):
            continue
        section = reference.split(f"\n## locallip {command}\n", 1)
        assert len(section) == 2, f"locallip {command}"
        options = set(re.findall(r"(?<!\S)(--?[a-z][a-z-]*)", section[1].split("\n## ", 1)[0]))
        for word in words:
            option = word.partition("=")[0]
            assert not option.startswith("-") or option in options, f"locallip {command} {word}"


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
