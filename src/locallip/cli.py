"""The command `locallip`: one function per subcommand, its arguments are the options and its docstring the help."""

from __future__ import annotations

import io
import os
import platform
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import torch

import locallip
from locallip import demo as demonstration
from locallip import tables
from locallip.arithmetic import is_out_of_memory
from locallip.attacking import attack
from locallip.attacks import MissingAttack
from locallip.auditing import audit
from locallip.breaking import BrokenCertificate
from locallip.data import DamagedData, MissingData
from locallip.options import WrongOption, check, device_of, radius_of
from locallip.proofs import WrongRows
from locallip.proving import certify, verify
from locallip.report.runs import WrongRun
from locallip.reporting import report
from locallip.results import WrongResult
from locallip.training.fit import Options, fit
from locallip.training.recipe import Recipe, WrongRecipe, find, rescaled
from locallip.training.run import Diverged, Stopped
from locallip.training.run_folder import RunFolderError
from locallip.zoo import WrongModel

DESCRIPTION = """Image classifiers whose robustness to l2-bounded changes is proved. For example:
`locallip demo` trains and certifies a small network in one to two minutes,
`locallip certify mnist-4c3f-local-g --data embedded --limit 50` certifies images with a network that comes along,
`locallip recipes` lists what can be trained, `locallip train RECIPE --help` the options of a recipe,
`locallip demo --help` lists those of the demo, and `locallip --version` says what is installed."""

TRAIN_USAGE = """usage: locallip train RECIPE [--out RUN] [--data-root DIR] [--resume] [any field of the recipe]

RECIPE is a name from `locallip recipes` or the path of a .toml file of your own. For example:
  locallip train fast-cifar10-6c2f-local-b --data-root data
  locallip train cifar10-6c2f-local-b --epochs 100 --out runs/short     schedules shrink with the epochs
  locallip train RECIPE --help     all options and fields, with the values of that recipe
"""

MISSING_EXTRA = "locallip: the command line needs the extra 'cli': pip install 'locallip[cli]', or '.[cli]' in a clone"


def demo(
    eps: str = "0.5",
    epochs: int = 8,
    seed: int = 0,
    limit: int = 500,
    images: int = 10_000,
    out: Path | None = None,
    page: Path | None = None,
) -> None:
    """Train a small network on embedded handwritten digits, certify test images, and write a report to look at.

    Args:
        eps: Radius of the l2 balls, for pixels in [0, 1]; a number or a fraction such as 36/255.
        epochs: Passes over the training images.
        seed: Start of every random draw; the same seed gives the same result on the same machine.
        limit: Certify the first so many test images, at most 10000.
        images: Train on the first so many training images, at most 10000.
        out: Run folder to keep: weights, metrics, checkpoints, certificates.
        page: Report to write; report.html in --out if not given, or locallip-demo.html here.
    """
    radius = radius_of(eps)
    check(epochs >= 1, f"--epochs must be at least 1, got {epochs}")
    check(0 <= seed < 2**31, f"--seed must be between 0 and {2**31 - 1}, got {seed}")
    check(1 <= limit <= 10_000, f"--limit must be between 1 and 10000, got {limit}")
    check(1 <= images <= 10_000, f"--images must be between 1 and 10000, got {images}")
    check(out is None or not (out / "config.json").exists(), f"--out {out} already holds a run: name another folder")
    page = page or (Path("locallip-demo.html") if out is None else out / "report.html")
    check(page.suffix in (".html", ".htm"), f"--page {page}: a report is a file that ends in .html")
    check(page.parent.is_dir() or page.parent == out, f"--page {page}: there is no folder {page.parent}")
    demonstration.run(radius, epochs, seed, limit, images, out, page)


def recipes() -> None:
    """List the recipes for `locallip train`: the rows of the paper's tables, and faster ones of our own."""
    print(tables.recipe_list())


def models() -> None:
    """List the trained networks that come with the package, with their measured figures."""
    print(tables.model_list())


def table(results: Path = Path("results")) -> None:
    """Print the paper's tables beside our own results, in Markdown.

    Args:
        results: The folder of result files that `locallip train` writes.
    """
    print(tables.table(results))


@dataclass(frozen=True)
class Train:
    """Train a network by a recipe; any field of the recipe can be changed here.

    Args:
        recipe: The recipe's own fields.
        out: Run folder to write; runs/RECIPE if not given.
        data_root: Folder that holds the data sets; LOCALLIP_DATA or ./data if not given.
        download: Fetch missing data from its official place.
        resume: Go on with the run in --out.
        device: Such as cpu or cuda:1; the first GPU if there is one.
        compiled: Compile the step with torch.compile; done on a GPU anyway. On a CPU it needs a C++ compiler and takes two
            minutes first, which pays in runs of many minutes.
        evaluate: Evaluate on the test images at the end.
        limit: Evaluate on the first so many images only.
        results: Also write the result file here, as RECIPE.json.
        stop_after: Save and stop after so many seconds, as Ctrl-C does.
    """

    recipe: Recipe
    out: Path | None = None
    data_root: Path | None = None
    download: bool = False
    resume: bool = False
    device: str | None = None
    compiled: bool | None = None
    evaluate: bool = True
    limit: int | None = None
    results: Path | None = None
    stop_after: float | None = None


def train(args: Sequence[str]) -> None:
    """`locallip train RECIPE ...`: the recipe is read first, as its values are the defaults of its fields."""
    import tyro

    if not args or args[0] in ("-h", "--help"):
        print(TRAIN_USAGE, end="")
        return
    name, *rest = args
    check(
        not name.startswith("-"), f"the recipe comes first: locallip train RECIPE {name} ...; `locallip recipes` lists them"
    )
    flat = Annotated[Train, tyro.conf.OmitArgPrefixes]
    asked = tyro.cli(flat, args=rest, default=Train(_stretched(find(name), rest)), prog=f"locallip train {name}")
    check(asked.limit is None or asked.limit > 0, f"--limit must be at least 1, got {asked.limit}")
    check(asked.stop_after is None or asked.stop_after > 0, f"--stop-after must be above 0, got {asked.stop_after}")
    check(asked.evaluate or asked.results is None, "--results wants figures: leave out --no-evaluate or --results")
    recipe = replace(asked.recipe, epochs=float(asked.recipe.epochs))
    options = Options(
        out=asked.out or Path("runs") / recipe.name,
        data_root=asked.data_root,
        download=asked.download,
        resume=asked.resume,
        device=device_of(asked.device),
        compiled=asked.compiled,
        evaluate=asked.evaluate,
        limit=asked.limit,
        results=asked.results,
        stop_after=asked.stop_after,
    )
    fit(recipe, options)


def _stretched(recipe: Recipe, args: Sequence[str]) -> Recipe:
    """The recipe with its schedules stretched to the epochs asked for; what is wrong with the number is said later."""
    words = [word.partition("=") for word in args]
    given = [
        value or (args[i + 1] if i + 1 < len(args) else "") for i, (name, _, value) in enumerate(words) if name == "--epochs"
    ]
    try:
        epochs = float(given[-1])
    except (IndexError, ValueError):
        return recipe
    return rescaled(recipe, epochs) if 0 < epochs <= 1e6 else recipe


COMMANDS: dict[str, Callable[..., None]] = {
    "demo": demo,
    "certify": certify,
    "verify": verify,
    "attack": attack,
    "audit": audit,
    "report": report,
    "recipes": recipes,
    "models": models,
    "table": table,
}
#: What `main` turns into a line on stderr and an exit code.
FAILURES = (
    BrokenCertificate,
    DamagedData,
    MissingAttack,
    MissingData,
    WrongModel,
    WrongResult,
    WrongRows,
    WrongRun,
    RunFolderError,
    Diverged,
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the exit code is 0, 1 where it failed and 2 where it was called wrongly."""
    args = ["--out" if word == "-o" else word for word in (sys.argv[1:] if argv is None else argv)]
    if args == ["--version"]:
        print(version())
        return 0
    try:
        import tyro
    except ImportError:
        print(MISSING_EXTRA, file=sys.stderr)
        return 1
    plain, warnings.formatwarning = warnings.formatwarning, _plain_warning
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal that knows no dashes gets question marks
    try:
        if args[:1] == ["train"]:
            train(args[1:])
        else:
            tyro.extras.subcommand_cli_from_dict(
                {**COMMANDS, "train": _train_help}, prog="locallip", description=DESCRIPTION, args=args or ["--help"]
            )
    except (WrongOption, WrongRecipe) as error:
        print(f"locallip: {error}", file=sys.stderr)
        return 2
    except FAILURES as error:
        print(f"locallip: {error}", file=sys.stderr)
        return 1
    except BrokenPipeError:  # whoever read our output has closed it
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:
        print(f"locallip: {error}", file=sys.stderr)
        return 1
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        print(f"locallip: there is too little memory: try a smaller --batch ({str(error).splitlines()[0]})", file=sys.stderr)
        return 1
    except Stopped:
        return 130
    except KeyboardInterrupt:
        print("locallip: stopped", file=sys.stderr)
        return 130
    finally:
        warnings.formatwarning = plain
    return 0


def _plain_warning(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None
) -> str:
    """For people, who need no line of our source with it."""
    return f"locallip: {message}\n"


def version() -> str:
    """The versions of locallip, torch and Python, and the device that torch would use."""
    device = f"cpu ({torch.get_num_threads()} threads)"
    if torch.cuda.is_available():
        device = f"cuda ({torch.cuda.get_device_name()})"
    return f"locallip {locallip.__version__}, torch {torch.__version__}, Python {platform.python_version()}, device {device}"


def _train_help() -> None:
    """Train a network by a recipe: locallip train RECIPE [options]."""


if __name__ == "__main__":
    sys.exit(main())
