"""Draws what a year came to: `python -m soak.picture YEAR.json` (in tests/) writes docs/pictures/soak.png."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt

from soak.test_year import second_half

OUT = Path(__file__).parents[2] / "docs" / "pictures" / "soak.png"
PANELS = {
    "resident_kib": "resident memory, KiB",
    "objects": "objects of Python",
    "entries": "entries kept in containers",
    "descriptors": "open descriptors",
    "threads": "threads",
    "series": "series on /metrics",
    "state_kib": "state file, KiB",
}


def main() -> None:
    year = json.loads(Path(sys.argv[1]).read_text())
    per_tick = year["amounts"]["starts"] / year["samples"][-1]["tick"]
    figure, grid = plt.subplots(2, 4, figsize=(13, 5.2), layout="constrained")
    for axes, (measure, title) in zip(grid.flat, PANELS.items(), strict=False):
        values = [sample[measure] for sample in year["samples"]]
        axes.plot([sample["tick"] * per_tick for sample in year["samples"]], values, color="#2a6f97", linewidth=1.2)
        trend = second_half(year, measure)
        axes.set_title(f"{title}\n2nd half: {trend.growth:+,.1f} ± {trend.error:,.1f}", fontsize=9)
        axes.set_ylim(0, max(values) * 1.15 + 1)
        axes.tick_params(labelsize=8)
        axes.axvspan(year["amounts"]["starts"] / 2, year["amounts"]["starts"], color="#000000", alpha=0.04)
    happened = year["happened"]
    grid.flat[-1].axis("off")
    grid.flat[-1].text(0, 0.95, "\n".join(f"{number:,} {name}" for name, number in happened.items()), va="top")
    figure.supxlabel("servers started", fontsize=9)
    figure.savefig(OUT, dpi=90)
    print(OUT)


if __name__ == "__main__":
    main()
