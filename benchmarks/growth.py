"""How the cost of each router grows with the length of sequences, the number of experts and k: time and peak memory.

    python benchmarks/growth.py --out growth.json                       # on a CPU, small
    python benchmarks/growth.py --device cuda --out growth.json         # on a GPU
    python benchmarks/growth.py --plot growth.json --page growth.html   # draws what was measured

The number of tokens is the same at every length. The slope is that of log time over log size between the last two sizes: 0
where a router does not care, 1 where it grows linearly, 2 quadratically.
"""

import json
import math
import statistics
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from command import check, command, write
from peak import peak_mib
from timing import time_in_turns
from torch import Tensor
from versions import versions

import holdfast
from holdfast import Context
from holdfast.routing import Attention, Previous

ROUTERS: dict[str, tuple[str, dict[str, Any]]] = {
    "smoe": ("smoe", {}),
    "symphony": ("symphony", {}),
    "ac": ("ac", {}),
    "smooth": ("smooth", {}),
    "similarity, rank 64": ("similarity", {"rank": 64}),
    "attention": ("attention", {"heads": 16}),
}


@dataclass(frozen=True)
class Shape:
    tokens: int
    length: int
    dim: int
    experts: int
    k: int
    heads: int = 16


SHAPES = {"cpu": Shape(1024, 256, 128, 16, 2), "cuda": Shape(16384, 2048, 2048, 64, 8)}
SIZES: dict[str, dict[str, tuple[int, ...]]] = {
    "cpu": {"length": (128, 256, 512, 1024), "experts": (8, 16, 32, 64), "k": (1, 2, 4, 8)},
    "cuda": {"length": (512, 1024, 2048, 4096, 8192), "experts": (16, 32, 64, 128, 256), "k": (1, 2, 4, 8, 16)},
}
TITLES = {"length": "tokens of a sequence", "experts": "experts", "k": "k"}


def surroundings(shape: Shape, device: str, dtype: torch.dtype) -> tuple[Tensor, Context]:
    sequences, width = shape.tokens // shape.length, shape.dim // shape.heads
    tokens = torch.randn(sequences, shape.length, shape.dim, device=device, dtype=dtype)
    query, key, value = (
        torch.randn(sequences, shape.heads, shape.length, width, device=device, dtype=dtype) for _ in range(3)
    )
    projection = torch.nn.Linear(shape.dim, shape.dim, bias=False, device=device, dtype=dtype).requires_grad_(False)
    attention = Attention(query, key, value, projection, torch.randn_like(tokens))
    with torch.no_grad():
        before = holdfast.router("smoe", dim=shape.dim, experts=shape.experts, k=shape.k).to(device, dtype).eval()(tokens)
    return tokens.requires_grad_(), Context(causal=True, attention=attention, previous=Previous(tokens.detach(), before))


def measure(shape: Shape, device: str, rounds: int) -> dict[str, dict[str, float | None]]:
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    torch.manual_seed(0)
    tokens, context = surroundings(shape, device, dtype)
    runs = {}
    for title, (name, options) in ROUTERS.items():
        router = holdfast.router(name, dim=shape.dim, experts=shape.experts, k=shape.k, **options).to(device, dtype)
        parameters = [one for one in router.parameters() if one.requires_grad]

        def run(router: Any = router, parameters: Any = parameters) -> None:
            routing = router(tokens, context)
            outputs = [routing.weights, routing.gates]
            grads = [torch.ones_like(one) for one in outputs]
            torch.autograd.grad(outputs, [tokens, *parameters], grads, allow_unused=True)

        runs[title] = run
    times = time_in_turns(runs, device, rounds, 10 if device == "cuda" else 1)
    return {title: {"ms": statistics.median(times[title]), "mib": peak_mib(run, device)} for title, run in runs.items()}


def slopes(found: dict[str, dict[str, Any]]) -> dict[str, float]:
    """Of log time over log size, between the last two sizes."""
    (small, before), (large, after) = list(found.items())[-2:]
    return {
        title: math.log(after[title]["ms"] / before[title]["ms"]) / math.log(int(large) / int(small)) for title in ROUTERS
    }


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
            for place, title in enumerate(ROUTERS):
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
    parser.add_argument("--page", type=Path, default=Path("growth.html"), help="where to")
    arguments = parser.parse_args()
    if arguments.plot is not None:
        draw(json.loads(arguments.plot.read_text()), arguments.page)
        print(arguments.page)
        return
    check(arguments)
    shape = SHAPES[arguments.device]
    grown: dict[str, Any] = {}
    for over, sizes in SIZES[arguments.device].items():
        grown[over] = {str(n): measure(replace(shape, **{over: n}), arguments.device, arguments.rounds) for n in sizes}
        print(f"\nover {TITLES[over]}, ms:")
        for title in ROUTERS:
            row = "  ".join(f"{size}: {each[title]['ms']:.2f}" for size, each in grown[over].items())
            memory = [each[title]["mib"] for each in grown[over].values()]
            more = "" if memory[0] is None else f"   MiB {memory[0]:.0f} to {memory[-1]:.0f}"
            print(f"  {title:22} {row}   slope {slopes(grown[over])[title]:.2f}{more}", flush=True)
    if arguments.out:
        device = torch.cuda.get_device_name() if arguments.device == "cuda" else "a CPU"
        write(arguments.out, {"versions": versions(), "device": device, "grown": grown})


if __name__ == "__main__":
    main()
