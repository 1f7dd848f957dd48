"""The command `locallip`: one function per subcommand, its arguments are the options and its docstring the help."""

from __future__ import annotations

import io
import platform
import sys
import traceback
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from json import dumps
from pathlib import Path
from typing import Any, Literal

import torch

import locallip
from locallip import demo as demonstration
from locallip import listing, paper, tables
from locallip.arithmetic import is_out_of_memory
from locallip.attacking import attack
from locallip.attacks import MissingAttack
from locallip.auditing import audit
from locallip.breaking import BrokenCertificate
from locallip.completion import Completed, script
from locallip.data import DamagedData, MissingData
from locallip.onnx_model import MissingOnnx
from locallip.options import WrongOption, check, device_of, options_of, radius_of
from locallip.processes import Disagreeing, LostProcess, TooManyProcesses, processes, restarts_left
from locallip.proofs import WrongRows
from locallip.provenance import hardware
from locallip.proving import Disagreement, certify, verify
from locallip.report.runs import WrongRun
from locallip.reporting import report
from locallip.results import WrongResult, read_results
from locallip.training.fit import Options, fit
from locallip.training.recipe import Recipe, WrongRecipe, find, names, rescaled
from locallip.training.run import Diverged, Stopped
from locallip.training.run_folder import RunFolderError
from locallip.vnnlib import WrongSpec
from locallip.zoo import WrongModel, model_cards
from locallip_command import SUMMARIES, answered, nearest, without_colours

TRAIN_USAGE = """usage: locallip train RECIPE [--out RUN] [--data-root DIR] [--resume] [any field of the recipe]

RECIPE is a name from `locallip recipes` or the path of a .toml file of your own. For example:
  locallip train fast-cifar10-6c2f-local-b --data-root data --download
  locallip train cifar10-6c2f-local-b --epochs 100 --out runs/short     schedules shrink with the epochs
  locallip train mine.toml --out runs/mine --json > result.json     a recipe of your own
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
    json: bool = False,
) -> None:
    """Train a small network on embedded handwritten digits, certify test images, and write a report to look at.

    For example:
      locallip demo
      locallip demo --eps 1.0 --epochs 30 --out runs/demo    a larger radius, and the run is kept
      locallip demo --json > demo.json

    Args:
        eps: Radius of the l2 balls, for pixels in [0, 1]; a number or a fraction such as 36/255.
        epochs: Passes over the training images.
        seed: Start of every random draw; the same seed gives the same result on the same machine.
        limit: Certify the first so many test images, at most 10000.
        images: Train on the first so many training images, at most 10000.
        out: Run folder to keep: weights, metrics, checkpoints, certificates (default: none is kept).
        page: Report to write (default: report.html in --out, or else locallip-demo.html here).
        json: Print what was found as JSON, and all else on stderr.
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
    found = demonstration.run(radius, epochs, seed, limit, images, out, page, sys.stderr if json else sys.stdout)
    if json:
        print(dumps(demonstration.figures(found), indent=1))


def recipes(json: bool = False) -> None:
    """List the recipes for `locallip train`: the rows of the paper's tables, and faster ones of our own.

    For example:
      locallip recipes
      locallip recipes --json > recipes.json    every field of every recipe

    Args:
        json: Print them as JSON, with all fields.
    """
    print(dumps([asdict(find(name)) for name in names()], indent=1) if json else listing.recipe_list())


def models(json: bool = False) -> None:
    """List the trained networks that come with the package, with their measured figures.

    For example:
      locallip models
      locallip models --json > models.json    with checksums and all that was measured

    Args:
        json: Print them as JSON, with checksums and all that was measured.
    """
    print(dumps([vars(card) for card in model_cards()], indent=1) if json else listing.model_list())


def table(results: Path = Path("results"), json: bool = False) -> None:
    """Print the paper's tables beside our own results, in Markdown.

    For example:
      locallip table > tables.md
      locallip table --results results --json > tables.json

    Args:
        results: The folder of result files that `locallip train` writes.
        json: Print the paper's rows and our runs as JSON.
    """
    if not json:
        print(tables.table(results))
        return
    rows = {name: getattr(paper, name.upper()) for name in ("robust", "initialisation", "sparsity", "adversarial", "times")}
    runs = [{**asdict(run), "path": str(run.path)} for run in read_results(results)]
    print(dumps({"paper": {name: [asdict(row) for row in found] for name, found in rows.items()}, "runs": runs}, indent=1))


def completion(shell: Literal["bash", "zsh", "fish"], /) -> None:
    """Print a script that completes commands, options, choices and the names of networks and recipes in a shell.

    Run the lines for your shell once, and the one with `locallip` again after an update. Then open a new shell, type
    `locallip cer` and press Tab.

    For example:
      locallip completion bash > ~/.locallip.bash
      echo 'source ~/.locallip.bash' >> ~/.bashrc

      locallip completion zsh > ~/.locallip.zsh
      echo 'autoload -Uz compinit && compinit && source ~/.locallip.zsh' >> ~/.zshrc

      mkdir -p ~/.config/fish/completions
      locallip completion fish > ~/.config/fish/completions/locallip.fish

    Args:
        shell: Which shell the script is for; `echo $SHELL` says which one you have.
    """
    networks = [card.name for card in model_cards()]
    behind = {
        "certify": networks,
        "attack": networks,
        "audit": networks,
        "report": networks,
        "train": names(),
        "completion": SHELLS,
    }
    found = {name: COMMANDS.get(name, Train) for name in SUMMARIES}
    print(script(shell, {name: Completed(options_of(call), behind.get(name, [])) for name, call in found.items()}), end="")


@dataclass(frozen=True)
class Train:
    """Train a network by a recipe; any field of the recipe can be changed here.

    Args:
        recipe: The recipe's own fields.
        out: Run folder to write (default: runs/RECIPE).
        data_root: Folder that holds the data sets (default: LOCALLIP_DATA, or else ./data).
        download: Fetch missing data from its official place.
        resume: Go on with the run in --out.
        device: Such as cpu or cuda:1 (default: the first GPU, or else the CPU).
        compiled: Compile the step with torch.compile; done on a GPU anyway. On a CPU it needs a C++ compiler and takes two
            minutes first, which pays in runs of many minutes.
        evaluate: Evaluate on the test images at the end.
        limit: Evaluate on the first so many images only (default: all).
        results: Folder to write the result file to as well, as RECIPE.json.
        stop_after: Save and stop after so many seconds, as Ctrl-C does (default: train to the end).
        json: Print the result as JSON at the end.
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
    json: bool = False


def train(args: Sequence[str]) -> None:
    """`locallip train RECIPE ...`: the recipe is read first, as its values are the defaults of its fields."""
    from locallip.parsing import parsed

    if not args or args[0] in ("-h", "--help"):
        print(TRAIN_USAGE, end="")
        return
    name, *rest = args
    check(
        not name.startswith("-"), f"the recipe comes first: locallip train RECIPE {name} ...; `locallip recipes` lists them"
    )
    asked = parsed(Train, rest, f"locallip train {name}", pairs=True, recipe=_stretched(find(name), rest))()
    check(asked.limit is None or asked.limit > 0, f"--limit must be at least 1, got {asked.limit}")
    check(asked.stop_after is None or asked.stop_after > 0, f"--stop-after must be above 0, got {asked.stop_after}")
    check(asked.evaluate or asked.results is None, "--results wants figures: leave out --no-evaluate or --results")
    recipe = replace(asked.recipe, epochs=float(asked.recipe.epochs))
    with processes() as together:
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
            together=together,
        )
        result = fit(recipe, options)
    if together.first:
        print(dumps(result, indent=1) if asked.json else _ended(result, options.out))


def _ended(result: dict[str, Any], out: Path) -> str:
    """A line on what a run has come to."""
    found = result["evaluation"]
    if found is None:
        return f"{out}: trained, not evaluated"
    parts = {"clean": "clean", "pgd": f"PGD-{found['pgd_steps']}", "certified": f"certified ({found['guarantee']})"}
    figures = ", ".join(f"{word} {found[key]:.2f}%" for key, word in parts.items() if found[key] is not None)
    return f"{out}: {figures} of {found['images']:,} test images"


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
    "completion": completion,
}
SHELLS = ["bash", "zsh", "fish"]
#: What `main` turns into a line on stderr, by the exit code: the answer is no; called wrongly or with a wrong file; failed.
NO = (BrokenCertificate, Disagreement)
WRONG = (
    WrongOption,
    WrongRecipe,
    WrongModel,
    WrongResult,
    WrongRows,
    WrongRun,
    WrongSpec,
    MissingData,
    DamagedData,
    RunFolderError,
    TooManyProcesses,
    Disagreeing,
    OSError,
)
FAILED = (MissingAttack, MissingOnnx, Diverged, LostProcess)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; docs/command_line.md has the exit codes."""
    args = ["--out" if word == "-o" else word for word in (sys.argv[1:] if argv is None else argv)]
    plain, warnings.formatwarning = warnings.formatwarning, _plain_warning
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal that knows no dashes gets question marks
    try:
        code = answered(args)
        return _run(args) if code is None else code
    except BrokenPipeError:
        raise
    except NO as error:
        print(f"locallip: {error}", file=sys.stderr)
        return 1
    except WRONG as error:
        print(f"locallip: {error}", file=sys.stderr)
        return 2
    except FAILED as error:
        print(f"locallip: {error}", file=sys.stderr)
        return 3
    except Stopped:
        return 0 if restarts_left() else 130  # torchrun would start again what ends in another way, and train on
    except KeyboardInterrupt:
        print("locallip: stopped", file=sys.stderr)
        return 130
    except Exception as error:  # Python would exit with 1, which says that a certificate broke
        if is_out_of_memory(error):
            print("locallip: too little memory: try a smaller --batch, or another --device", file=sys.stderr)
            return 3
        traceback.print_exc()
        print("locallip: this is a fault in locallip: please report it, with `locallip --version`", file=sys.stderr)
        return 3
    finally:
        warnings.formatwarning = plain


def _run(args: Sequence[str]) -> int:
    name, *rest = args
    if name == "--version":
        check(rest in ([], ["--json"]), f"--version goes with --json alone, got {' '.join(rest)}")
        print(dumps(versions(), indent=1) if rest else version())
        return 0
    without_colours()
    try:
        import tyro  # noqa: F401
    except ImportError:
        print(MISSING_EXTRA, file=sys.stderr)
        return 3
    from locallip.parsing import parsed

    if name == "help":
        name, rest = rest[0], ["--help"]
        hint = nearest(name, list(SUMMARIES))
        check(name in SUMMARIES, f"there is no command {name!r}{hint}; `locallip --help` lists the commands")
    if name == "train":
        train(rest)
        return 0
    parsed(COMMANDS[name], rest, f"locallip {name}")()
    return 0


def _plain_warning(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None
) -> str:
    """For people, who need no line of our source with it."""
    return f"locallip: {message}\n"


def versions() -> dict[str, str]:
    """What a report of a fault should name: versions, platform, and the device that would be used."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return {
        "locallip": locallip.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "device": device.type,
        "hardware": hardware(device),
    }


def version() -> str:
    """The same in a line."""
    found = versions()
    software = f"locallip {found['locallip']}, torch {found['torch']}, Python {found['python']}, {found['platform']}"
    return f"{software}, device {found['device']} ({found['hardware']})"
