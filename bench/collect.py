"""Takes the CSV files that GPU benches wrote into the results: NAME.csv into results/h200, NAME_context.csv into
results/h200_context/NAME.csv.

    python bench/collect.py FOLDER...

Measured cases replace those of the same key with all of their baselines; the others stay, so that one bench may run in
several parts.
"""

from __future__ import annotations

import argparse
import csv
from pathlib import Path

from common.results import FIELDS, merge_table
from common.run import CONTEXT_FIELDS

RESULTS = Path(__file__).resolve().parent / "results"
SUFFIX = "_context"


def collect(source: Path, results: Path) -> Path:
    if source.stem.endswith(SUFFIX):
        target, fields, key_length = results / f"h200{SUFFIX}" / f"{source.stem[: -len(SUFFIX)]}.csv", CONTEXT_FIELDS, 4
    else:
        target, fields, key_length = results / "h200" / source.name, FIELDS, 5
    with source.open(newline="", encoding="utf-8") as file:
        header, *rows = csv.reader(file)
    if header != list(fields):
        raise SystemExit(f"{source}: has the columns {', '.join(header)}; expected {', '.join(fields)}")
    merge_table(target, fields, rows, key_length)
    return target


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", type=Path, nargs="+", metavar="FOLDER")
    parser.add_argument("--results", type=Path, default=RESULTS, help="default: bench/results")
    arguments = parser.parse_args()
    for folder in arguments.folders:
        sources = sorted(folder.glob("*.csv"))
        if not sources:
            raise SystemExit(f"{folder}: no CSV files")
        for source in sources:
            print(f"{source} -> {collect(source, arguments.results)}")


if __name__ == "__main__":
    main()
