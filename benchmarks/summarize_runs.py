"""One CSV row per run, and a table of means and ranges per problem, from the `summary.json` of runs.

python benchmarks/summarize_runs.py FOLDER [FOLDER ...] --csv docs/results/rainbow_safety.csv
"""

from __future__ import annotations

import argparse
import csv
import json
from collections import defaultdict
from pathlib import Path
from statistics import mean

COLUMNS = ["problem", "seed", "iou", "false_safe", "false_unsafe", "safe_rate", "success_rate", "frames", "seconds"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folders", nargs="+", type=Path)
    parser.add_argument("--csv", type=Path)
    arguments = parser.parse_args()
    files = sorted(file for folder in arguments.folders for file in folder.rglob("summary.json"))
    if not files:
        parser.error(f"no summary.json below {[str(folder) for folder in arguments.folders]}; name folders of runs")
    runs = sorted((json.loads(file.read_text()) for file in files), key=lambda run: (run["problem"], run["seed"]))
    if arguments.csv is not None:
        arguments.csv.parent.mkdir(parents=True, exist_ok=True)
        with arguments.csv.open("w", newline="") as file:
            table = csv.DictWriter(file, COLUMNS, extrasaction="ignore")
            table.writeheader()
            table.writerows(runs)
    by_problem = defaultdict(list)
    for run in runs:
        by_problem[run["problem"]].append(run)
    shown = [column for column in COLUMNS[2:] if column != "frames"]
    print("| " + " | ".join(["problem", "seeds", "frames", *shown]) + " |")
    print("|---" * (len(shown) + 3) + "|")
    for problem, group in by_problem.items():
        cells = [problem, str(len(group)), f"{group[0]['frames']:,}"]
        for column in shown:
            values = [run[column] for run in group if run[column] is not None]
            digits = 1 if column == "seconds" else 4
            spread = f"{mean(values):.{digits}f} ({min(values):.{digits}f}-{max(values):.{digits}f})" if values else "-"
            cells.append(spread)
        print("| " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
