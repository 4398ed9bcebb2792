"""One CSV row per run, and a table of means and ranges per set of options, from the `summary.json` of runs.

python benchmarks/summarize_runs.py FOLDER [FOLDER ...] --csv docs/results/rainbow_safety.csv
python benchmarks/summarize_runs.py FOLDER [FOLDER ...] --reached 200

With --reached, the frames are told after which the mean return was first measured to be that much.

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

NAMES = ["env", "problem", "algorithm", "parts"]
MEASURED = ["mean_return", "reached", "iou", "agreement", "false_safe", "false_unsafe", "safe_rate", "success_rate"]
MEASURED += ["claimed", "lost_elsewhere", "lost_outside"]
MEASURED += [f"against_{name}" for name in ("zero", "random", "trained", "best_response", "exact")]
MEASURED += [f"{claim}_{end}" for claim in ("claimed", "unclaimed") for end in ("withstood", "beaten")] + ["seconds"]
WHOLE = ("mean_return", "reached", "seconds")
PARTS = ("double", "dueling", "noisy", "prioritized")


def options(file: Path) -> str:
    """Everything that decides the outcome of a run, apart from its seed."""
    config = yaml.safe_load((file.parent / "config.yaml").read_text())
    return json.dumps({key: value for key, value in config.items() if key not in ("seed", "resume")}, sort_keys=True)


def parts(file: Path) -> str:
    """Which of Rainbow's parts were on."""
    config = yaml.safe_load((file.parent / "config.yaml").read_text())
    found = [name for name in PARTS if config.get(name)]
    return " ".join(found + [f"{steps}-step" for steps in [config.get("n_steps", 1)] if steps > 1])


def first_frames(file: Path, wanted: float | None) -> int | None:
    """The frames after which the mean return was first measured to be as much as `wanted`."""
    if wanted is None:
        return None
    with (file.parent / "metrics.csv").open(newline="") as rows:
        found = (int(row["frames"]) for row in csv.DictReader(rows) if float(row.get("mean_return") or "nan") >= wanted)
        return next(found, None)


def spread(values: list[float], digits: int) -> str:
    """Mean, least and greatest."""
    return f"{mean(values):.{digits}f} ({min(values):.{digits}f}-{max(values):.{digits}f})" if values else "-"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="+", type=Path)
    parser.add_argument("--csv", type=Path)
    parser.add_argument("--reached", type=float)
    arguments = parser.parse_args()
    for folder in arguments.folders:
        if not folder.is_dir():
            parser.error(f"{folder} is no folder; name those of runs, or one that holds them")
    files = sorted(file for folder in arguments.folders for file in folder.rglob("summary.json"))
    if not files:
        parser.error(f"no summary.json below {[str(folder) for folder in arguments.folders]}; name folders of runs")
    pools: dict[str, dict[int, dict]] = defaultdict(dict)
    for file in files:
        summary, pool = json.loads(file.read_text()), pools[options(file)]
        if summary["seed"] in pool:
            parser.error(f"{file.parent} repeats seed {summary['seed']} of a run with the same options; leave out one")
        found = {"parts": parts(file), "reached": first_frames(file, arguments.reached)}
        pool[summary["seed"]] = {**summary, **found}
    every = (run for pool in pools.values() for run in pool.values())
    runs = sorted(every, key=lambda run: [run[column] for column in (*NAMES, "seed")])
    measured = [name for name in MEASURED if any(run.get(name) is not None for run in runs)]
    if arguments.csv is not None:
        arguments.csv.parent.mkdir(parents=True, exist_ok=True)
        with arguments.csv.open("w", newline="") as target:
            table = csv.DictWriter(target, [*NAMES, "seed", *measured, "frames"], extrasaction="ignore")
            table.writeheader()
            table.writerows(runs)
    print("| " + " | ".join([*NAMES, "seeds", "frames", *measured]) + " |")
    print("|---" * (len(NAMES) + len(measured) + 2) + "|")
    for pool in sorted(pools.values(), key=lambda pool: [next(iter(pool.values()))[name] for name in NAMES]):
        first = next(iter(pool.values()))
        cells = [*(first[name] for name in NAMES), ",".join(map(str, sorted(pool))), f"{first['frames']:,}"]
        for column in measured:
            values = [run[column] for run in pool.values() if run.get(column) is not None]
            short = "" if len(values) in (0, len(pool)) else f", {len(values)} of {len(pool)}"
            cells.append(spread(values, 0 if column in WHOLE else 4) + short)
        print("| " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
