"""Measure how the cost of each router grows with the length of sequences, the number of experts and k: time and peak memory.

    python benchmarks/growth.py --out growth.json                       # on a CPU, small
    python benchmarks/growth.py --device cuda --out growth.json         # on a GPU
    python benchmarks/growth.py --plot growth.json --page growth.html   # plots stored results

The number of tokens is the same at every length. The slope is that of log time over log size between the last two sizes: 0
if the cost does not grow, 1 if it grows linearly, 2 if quadratically.
"""

import json
import math
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from command import check, command, write
from peak import peak_mib
from routers import ROUTERS, SHAPES, Shape, Step, synthetic_context
from timing import captured, time_in_turns
from versions import versions

import holdfast

NAMES = ("smoe", "symphony", "ac", "smooth", "similarity, rank 64", "attention")
START = {"cpu": Shape(4, 256, 128, 16, 2, 8, 128), "cuda": SHAPES["cuda"]}
SIZES: dict[str, dict[str, tuple[int, ...]]] = {
    "cpu": {"length": (128, 256, 512, 1024), "experts": (8, 16, 32, 64), "k": (1, 2, 4, 8)},
    "cuda": {"length": (512, 1024, 2048, 4096, 8192), "experts": (16, 32, 64, 128, 256), "k": (1, 2, 4, 8, 16)},
}
TITLES = {"length": "tokens of a sequence", "experts": "experts", "k": "k"}


def sized(start: Shape, over: str, size: int) -> Shape:
    """Return the shape with one size changed; the number of tokens is the same at every length."""
    if over != "length":
        return replace(start, **{over: size})
    return replace(start, length=size, sequences=start.sequences * start.length // size)


def measure(shape: Shape, device: str, rounds: int) -> dict[str, dict[str, float | None]]:
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    torch.manual_seed(0)
    tokens, context = synthetic_context(shape, device, dtype)
    runs = {}
    for title in NAMES:
        name, options = ROUTERS[title]
        options = {key: shape.heads if key == "heads" and value is None else value for key, value in options.items()}
        router = holdfast.create_router(name, dim=shape.dim, experts=shape.experts, k=shape.k, **options).to(device, dtype)
        runs[title] = Step(router, tokens, context, [one for one in router.parameters() if one.requires_grad])
    # On a GPU measure the kernels only: at these sizes a router alone waits for Python.
    replays = {title: captured(run) for title, run in runs.items()} if device == "cuda" else runs
    times = time_in_turns(replays, device, rounds, 10 if device == "cuda" else 1)
    return {title: {"ms": statistics.median(times[title]), "mib": peak_mib(run, device)} for title, run in runs.items()}


def slopes(found: dict[str, dict[str, Any]]) -> dict[str, float]:
    """Return the slope of log time over log size, between the last two sizes."""
    (small, before), (large, after) = list(found.items())[-2:]
    return {title: math.log(after[title]["ms"] / before[title]["ms"]) / math.log(int(large) / int(small)) for title in NAMES}


def draw(stored: dict[str, Any], page: Path) -> None:
    from plotly import graph_objects, subplots

    grown = stored["grown"]
    some = [each["smoe"]["mib"] for sizes in grown.values() for each in sizes.values()]
    whats = ["ms"] if None in some else ["ms", "mib"]
    names = {"ms": "ms, forward and backward", "mib": "MiB at the peak"}
    figure = subplots.make_subplots(
        rows=len(whats), cols=len(grown), subplot_titles=[TITLES[over] for over in grown] * len(whats)
    )
    for row, what in enumerate(whats, 1):
        for column, sizes in enumerate(grown.values(), 1):
            for place, title in enumerate(NAMES):
                trace = graph_objects.Scatter(
                    x=[int(size) for size in sizes],
                    y=[each[title][what] for each in sizes.values()],
                    name=title,
                    legendgroup=title,
                    showlegend=row == column == 1,
                    line={"color": COLOURS[place]},
                )
                figure.add_trace(trace, row=row, col=column)
            figure.update_xaxes(type="log", row=row, col=column)
            figure.update_yaxes(type="log", title=names[what] if column == 1 else None, row=row, col=column)
    figure.update_layout(title=f"Routers on {stored['device']}, {stored['versions']['torch']}", height=420 * len(whats))
    unfinished = page.with_name(f"{page.name}.unfinished")
    figure.write_html(unfinished, include_plotlyjs=True)
    unfinished.replace(page)


COLOURS = ("#444444", "#1f77b4", "#2ca02c", "#d62728", "#9467bd", "#ff7f0e")


def main() -> None:
    parser = command(__doc__, rounds=5)
    parser.add_argument("--plot", type=Path, help="draw these results instead of measuring")
    parser.add_argument("--page", type=Path, default=Path("growth.html"), help="the HTML file to write")
    arguments = parser.parse_args()
    if arguments.plot is not None:
        draw(json.loads(arguments.plot.read_text()), arguments.page)
        print(arguments.page)
        return
    check(arguments)
    start = START[arguments.device]
    grown: dict[str, Any] = {}
    for over, sizes in SIZES[arguments.device].items():
        grown[over] = {str(n): measure(sized(start, over, n), arguments.device, arguments.rounds) for n in sizes}
        print(f"\nover {TITLES[over]}, ms:")
        for title in NAMES:
            row = "  ".join(f"{size}: {each[title]['ms']:.2f}" for size, each in grown[over].items())
            memory = [each[title]["mib"] for each in grown[over].values()]
            more = "" if memory[0] is None else f"   MiB {memory[0]:.0f} to {memory[-1]:.0f}"
            print(f"  {title:22} {row}   slope {slopes(grown[over])[title]:.2f}{more}", flush=True)
    if arguments.out:
        device = torch.cuda.get_device_name() if arguments.device == "cuda" else "a CPU"
        write(arguments.out, {"versions": versions(), "device": device, "grown": grown})


if __name__ == "__main__":
    main()
