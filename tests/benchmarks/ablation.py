"""What CAPO adds to plain policy gradients, arm by arm, against its controls.

    python tests/benchmarks/ablation.py small [--arms NAME ...] [--regimes ...] [--modes ...] [--seeds ...]
    python tests/benchmarks/ablation.py embedded [--arms NAME ...] [--seeds ...]
    python tests/benchmarks/ablation.py conflict [--regimes ...] [--modes ...] [--seeds ...]
    python tests/benchmarks/ablation.py table

`small` trains a tiny decoder on two agents that translate (`ablation_task`), seconds a cell; `embedded` runs the
launcher on the embedded task; `conflict` measures whether the gradients of the roles disagree. Each adds one
JSON line a finished cell to `--results` and skips the cells that it holds, so they can be stopped and started again.
`table` prints the Markdown tables of docs/results/capo_tables.md from these files.
"""

import argparse
import itertools
import time
from pathlib import Path

from ablation_statistics import append, read

RESULTS = Path(__file__).parents[2] / "docs/results"
FILES = {stage: RESULTS / f"capo_{stage}.jsonl" for stage in ("small", "embedded", "conflict")}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stage", choices=("small", "embedded", "conflict", "table"))
    parser.add_argument("--results", type=Path, help="where cells are kept")
    parser.add_argument("--arms", nargs="+", help="all by default")
    parser.add_argument("--seeds", nargs="+", type=int)
    parser.add_argument("--regimes", nargs="+", default=["base"])
    parser.add_argument("--modes", nargs="+", default=["central"], choices=("central", "joint"))
    parser.add_argument("--rates", nargs="+", type=float)
    parser.add_argument("--compiled", type=Path, help="folder in which compiled functions are kept between runs")
    return parser.parse_args()


def small(args: argparse.Namespace) -> None:
    """Runs the cells of stage 1 that are not in the results yet, a seed of all arms before the next."""
    import jax
    from ablation_arms import ARMS
    from ablation_small import RATE, Cell, run_cell

    if args.compiled:
        jax.config.update("jax_compilation_cache_dir", str(args.compiled))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)
    file = args.results or FILES["small"]
    done = {Cell(*(line[name] for name in Cell._fields)) for line in read(file)}
    for regime, mode, rate, seed, arm in itertools.product(
        args.regimes, args.modes, args.rates or [RATE], args.seeds or range(5), args.arms or ARMS
    ):
        if (cell := Cell(regime, mode, arm, rate, seed)) not in done:
            began = time.process_time()
            found = run_cell(cell)
            append(file, {"stage": "small", **cell._asdict(), **found})
            print(
                f"{cell}: {found['before']:.3f} -> {found['after']:.3f}, {time.process_time() - began:.1f} s",
                flush=True,
            )


def embedded(args: argparse.Namespace) -> None:
    """Runs the cells of stage 2 that are not in the results yet."""
    from ablation_embedded import ARMS, run_cell

    file = args.results or FILES["embedded"]
    done = {(line["arm"], line["seed"]) for line in read(file)}
    for seed, arm in itertools.product(args.seeds or range(3), args.arms or ARMS):
        if (arm, seed) not in done:
            found = run_cell(arm, seed, Path("runs/ablation") / f"{arm.replace(', ', '-').replace(' ', '-')}-{seed}")
            append(file, {"stage": "embedded", "arm": arm, "seed": seed, **found})
            print(f"{arm}, seed {seed}: {found['before']:.3f} -> {found['after']:.3f}", flush=True)


def conflict(args: argparse.Namespace) -> None:
    """Measures the places that are not in the results yet: before training and after 20 steps."""
    from ablation_conflict import Place, measure

    file = args.results or FILES["conflict"]
    done = {Place(*(line[name] for name in Place._fields)) for line in read(file)}
    for place in itertools.starmap(Place, itertools.product(args.regimes, args.modes, (0, 20), args.seeds or range(3))):
        if place not in done:
            found = measure(place)
            append(file, {"stage": "conflict", **place._asdict(), **found})
            print(f"{place}: cosine {found['all_cosine']:.3f}, in a step {found['all_step_cosine']:.3f}", flush=True)


def tables(args: argparse.Namespace) -> None:
    """Prints every table."""
    from ablation_report import conflict_report, embedded_report, small_report

    print("# Tables of the CAPO ablation\n")
    print("Written by `python tests/benchmarks/ablation.py table`; read in [capo.md](capo.md).\n")
    print("## The embedded task\n\n" + embedded_report(read(FILES["embedded"])) + "\n")
    print("## Conflict of the roles in the small task\n\n" + conflict_report(read(FILES["conflict"])) + "\n")
    print("## The small task\n\n" + small_report(read(FILES["small"])).rstrip())


if __name__ == "__main__":
    given = arguments()
    {"small": small, "embedded": embedded, "conflict": conflict, "table": tables}[given.stage](given)
