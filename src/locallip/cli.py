"""The command `locallip`: one function per subcommand, its arguments are the options and its docstring the help."""

from __future__ import annotations

import platform
import sys
from collections.abc import Callable, Sequence

import torch

import locallip
from locallip import demo as demonstration
from locallip.certify.inputs import as_eps
from locallip.data import DamagedData

DESCRIPTION = """Image classifiers whose robustness to l2-bounded changes is proved. For example:
`locallip demo` trains and certifies a small network in one to two minutes,
`locallip demo --help` lists its options, and `locallip --version` says what is installed."""

MISSING_EXTRA = "locallip: the command line needs the extra 'cli': pip install 'locallip[cli]', or '.[cli]' in a clone"


class WrongOption(ValueError):
    """An option whose value makes no sense; the message is for the user."""


def demo(eps: str = "0.5", epochs: int = 8, seed: int = 0, limit: int = 500, images: int = 10_000) -> None:
    """Train a small network on embedded handwritten digits and certify test images, in one to two minutes on two cores.

    Args:
        eps: Radius of the l2 balls, for pixels in [0, 1]; a number or a fraction such as 36/255.
        epochs: Passes over the training images.
        seed: Start of every random draw; the same seed gives the same result on the same machine.
        limit: Certify the first so many test images, at most 10000.
        images: Train on the first so many training images, at most 10000.
    """
    radius = _radius(eps)
    _check(epochs >= 1, f"--epochs must be at least 1, got {epochs}")
    _check(0 <= seed < 2**31, f"--seed must be between 0 and {2**31 - 1}, got {seed}")
    _check(1 <= limit <= 10_000, f"--limit must be between 1 and 10000, got {limit}")
    _check(1 <= images <= 10_000, f"--images must be between 1 and 10000, got {images}")
    demonstration.run(radius, epochs, seed, limit, images)


COMMANDS: dict[str, Callable[..., None]] = {"demo": demo}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the exit code is 0, 1 where it failed and 2 where it was called wrongly."""
    args = list(sys.argv[1:] if argv is None else argv)
    if args == ["--version"]:
        print(version())
        return 0
    try:
        import tyro
    except ImportError:
        print(MISSING_EXTRA, file=sys.stderr)
        return 1
    try:
        tyro.extras.subcommand_cli_from_dict(COMMANDS, prog="locallip", description=DESCRIPTION, args=args or ["--help"])
    except WrongOption as error:
        print(f"locallip: {error}", file=sys.stderr)
        return 2
    except DamagedData as error:
        print(f"locallip: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("locallip: stopped", file=sys.stderr)
        return 130
    return 0


def version() -> str:
    """The versions of locallip, torch and Python, and the device that torch would use."""
    device = f"cpu ({torch.get_num_threads()} threads)"
    if torch.cuda.is_available():
        device = f"cuda ({torch.cuda.get_device_name()})"
    return f"locallip {locallip.__version__}, torch {torch.__version__}, Python {platform.python_version()}, device {device}"


def _radius(eps: str) -> float:
    try:
        radius = float(as_eps(eps, 1, torch.device("cpu")))
    except ValueError as error:
        raise WrongOption(f"--eps: {error}") from None
    _check(radius > 0, f"--eps must be a positive number, got {eps}")
    return radius


def _check(holds: bool, message: str) -> None:
    if not holds:
        raise WrongOption(message)


if __name__ == "__main__":
    sys.exit(main())
