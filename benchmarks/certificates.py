"""Certify the whole test set of shipped networks with every guarantee and method, one run after the other in one process.

    python benchmarks/certificates.py [NAME ...] --data-root DIR [--kinds estimate-local deterministic-auto] [--out FOLDER]

Each run is one of `locallip certify NAME --guarantee G --method M --seed 1`; what stands beside its rows goes to
results/certificates/NAME-G-M.json, from which the table of README.md is made (`python -m locallip.documents README.md`).
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
from pathlib import Path

from locallip.proofs.table import COLUMNS
from locallip.provenance import ROOT
from locallip.proving import certify
from locallip.zoo import model_cards

KINDS = {f"{guarantee.value}-{method}": (guarantee.value, method) for guarantee, method, _ in COLUMNS}
KINDS["deterministic-thorough"] = ("deterministic", "thorough")  # which has no column yet


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="shipped networks; all of them by default")
    parser.add_argument("--data-root", type=Path)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS), help="guarantee and method")
    parser.add_argument("--limit", type=int, help="the first so many images only")
    parser.add_argument("--out", type=Path, default=ROOT / "results" / "certificates")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    for card in model_cards():
        for kind in args.kinds:
            if not args.names or card.name in args.names:
                print(f"{card.name} {kind}", flush=True)
                _certified(card.name, kind, args)


def _certified(name: str, kind: str, args: argparse.Namespace) -> None:
    guarantee, method = KINDS[kind]
    with tempfile.TemporaryDirectory() as folder:
        rows = Path(folder) / f"{name}-{kind}.jsonl"
        options = {"data_root": args.data_root, "limit": args.limit, "out": rows, "seed": 1}
        certify(name, guarantee=guarantee, method=method, **options)
        shutil.copy(rows.with_suffix(".json"), args.out)


if __name__ == "__main__":
    main()
