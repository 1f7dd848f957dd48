"""The recipes and the trained networks that come with the package, one aligned line each."""

from __future__ import annotations

from collections.abc import Sequence

from locallip.tables import EMPTY, duration, figure
from locallip.training import recipe as recipes
from locallip.zoo import ModelCard, model_cards


def recipe_list() -> str:
    """The recipes that come with the package, one aligned line each."""
    names = recipes.names()
    found = [recipes.find(name) for name in names]
    rows = [(r.name, f"eps {r.eps}", f"{r.epochs:g} epochs", r.about) for r in found]
    return _aligned(rows) if rows else "No recipes come with this version."


def model_list() -> str:
    """The trained networks that come with the package, one aligned line each with their measured figures."""
    rows = [_model_line(card) for card in model_cards()]
    head = ("network", "eps", "clean", "PGD", "certified*", "guarantee", "test images", "trained in", "weights")
    note = "\n* by the paper's bound; `locallip certify` looks for slopes too and proves more"
    return _aligned([head, *rows]) + note if rows else "No trained networks come with this version."


def _model_line(card: ModelCard) -> tuple[str, ...]:
    found = card.evaluation
    return (
        card.name,
        str(found.get("eps", EMPTY)),
        *(figure(found[key]) for key in ("clean", "pgd", "certified")),
        str(found["guarantee"] or EMPTY).replace("_", " "),
        str(found["images"]),
        duration(card.training["seconds"]),
        str(card.model.get("dtype", EMPTY)),
    )


def _aligned(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows)
