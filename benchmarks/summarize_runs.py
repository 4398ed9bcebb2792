"""One CSV row per run, and a table of means and ranges per set of options, from the `summary.json` of runs.

python benchmarks/summarize_runs.py FOLDER [FOLDER ...] --csv docs/results/rainbow_safety.csv

Runs are pooled when their options differ in nothing but the seed; a seed may occur once in a pool.
"""

from __future__ import annotations

import argparse
import csv
import json
from collections import defaultdict
from pathlib import Path
from statistics import mean

import yaml

NAMES = ["env", "problem", "algorithm"]
MEASURED = ["iou", "false_safe", "false_unsafe", "safe_rate", "success_rate", "seconds"]
COLUMNS = [*NAMES, "seed", *MEASURED, "frames"]


def options(file: Path) -> str:
    """Everything that decides the outcome of a run, apart from its seed."""
    config = yaml.safe_load((file.parent / "config.yaml").read_text())
    return json.dumps({key: value for key, value in config.items() if key not in ("seed", "resume")}, sort_keys=True)


def spread(values: list[float], digits: int) -> str:
    """Mean, least and greatest."""
    return f"{mean(values):.{digits}f} ({min(values):.{digits}f}-{max(values):.{digits}f})" if values else "-"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="+", type=Path)
    parser.add_argument("--csv", type=Path)
    arguments = parser.parse_args()
    files = sorted(file for folder in arguments.folders for file in folder.rglob("summary.json"))
    if not files:
        parser.error(f"no summary.json below {[str(folder) for folder in arguments.folders]}; name folders of runs")
    pools: dict[str, dict[int, dict]] = defaultdict(dict)
    for file in files:
        summary, pool = json.loads(file.read_text()), pools[options(file)]
        if summary["seed"] in pool:
            parser.error(f"{file.parent} repeats seed {summary['seed']} of a run with the same options; leave out one")
        pool[summary["seed"]] = summary
    every = (run for pool in pools.values() for run in pool.values())
    runs = sorted(every, key=lambda run: [run[column] for column in (*NAMES, "seed")])
    if arguments.csv is not None:
        arguments.csv.parent.mkdir(parents=True, exist_ok=True)
        with arguments.csv.open("w", newline="") as target:
            table = csv.DictWriter(target, COLUMNS, extrasaction="ignore")
            table.writeheader()
            table.writerows(runs)
    print("| " + " | ".join([*NAMES, "seeds", "frames", *MEASURED]) + " |")
    print("|---" * (len(NAMES) + len(MEASURED) + 2) + "|")
    for pool in sorted(pools.values(), key=lambda pool: [next(iter(pool.values()))[name] for name in NAMES]):
        first = next(iter(pool.values()))
        cells = [*(first[name] for name in NAMES), ",".join(map(str, sorted(pool))), f"{first['frames']:,}"]
        for column in MEASURED:
            values = [run[column] for run in pool.values() if run[column] is not None]
            cells.append(spread(values, 0 if column == "seconds" else 4))
        print("| " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
