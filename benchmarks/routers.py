"""What each router costs, forward and backward, as a multiple of plain `smoe` in the same run.

    python benchmarks/routers.py                         # on a CPU: 8 sequences of 512, d 256, 16 experts, top 2, float32
    python benchmarks/routers.py --device cuda           # on a GPU: 8 sequences of 2048, d 2048, 64 experts, top 8

Prints ratios measured in one run and, with --out FILE, writes them as JSON.
"""

import functools
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from command import check, command, write
from timing import median_ratio, time_in_turns
from torch import Tensor
from versions import versions

import holdfast
from holdfast import Context
from holdfast.routing import Attention, Previous


@dataclass(frozen=True)
class Shape:
    sequences: int
    length: int
    dim: int
    experts: int
    k: int
    heads: int


SHAPES = {"cpu": Shape(8, 512, 256, 16, 2, 8), "cuda": Shape(8, 2048, 2048, 64, 8, 16)}
ROUTERS: dict[str, tuple[str, dict[str, Any]]] = {
    "smoe": ("smoe", {}),
    "xmoe": ("xmoe", {}),
    "top-p": ("top-p", {}),
    "remoe": ("remoe", {}),
    "symphony": ("symphony", {}),
    "ac": ("ac", {}),
    "smooth": ("smooth", {}),
    "similarity, rank 64": ("similarity", {"rank": 64}),
    "similarity": ("similarity", {}),
    "attention": ("attention", {"heads": None}),
    "symphony+similarity, rank 64": ("symphony+similarity", {"rank": 64}),
}


def surroundings(shape: Shape, device: str, dtype: torch.dtype) -> tuple[Tensor, Context]:
    """Tokens, the attention before them and a previous MoE layer."""
    tokens = torch.randn(shape.sequences, shape.length, shape.dim, device=device, dtype=dtype)
    width = shape.dim // shape.heads
    query, key, value = (
        torch.randn(shape.sequences, shape.heads, shape.length, width, device=device, dtype=dtype) for _ in range(3)
    )
    projection = torch.nn.Linear(shape.dim, shape.dim, bias=False, device=device, dtype=dtype).requires_grad_(False)
    attention = Attention(query, key, value, projection, torch.randn_like(tokens))
    with torch.no_grad():
        previous = holdfast.router("smoe", dim=shape.dim, experts=shape.experts, k=shape.k).to(device).eval()(tokens)
    return tokens.requires_grad_(), Context(causal=True, attention=attention, previous=Previous(tokens.detach(), previous))


def step(router: Callable[..., holdfast.Routing], tokens: Tensor, context: Context, parameters: Sequence[Tensor]) -> None:
    routing = router(tokens, context)
    total = routing.weights.square().sum() + routing.gates.square().sum() + routing.loss
    torch.autograd.grad(total, [tokens, *parameters], allow_unused=True)


def main() -> None:
    parser = command(__doc__, rounds=10)
    parser.add_argument("--compile", action="store_true", help="torch.compile each router")
    arguments = parser.parse_args()
    check(arguments)
    torch.manual_seed(0)
    torch._dynamo.config.recompile_limit = 100  # the routers share one forward, and each compiles its own version of it
    shape = SHAPES[arguments.device]
    dtype = torch.bfloat16 if arguments.device == "cuda" else torch.float32
    tokens, context = surroundings(shape, arguments.device, dtype)
    runs = {}
    for title, (name, options) in ROUTERS.items():
        options = {key: shape.heads if key == "heads" else value for key, value in options.items()}
        router = holdfast.router(name, dim=shape.dim, experts=shape.experts, k=shape.k, **options).to(
            arguments.device, dtype
        )
        parameters = [p for p in router.parameters() if p.requires_grad]
        run = torch.compile(router, fullgraph=True) if arguments.compile else router
        runs[title] = functools.partial(step, run, tokens, context, parameters)
    times = time_in_turns(runs, arguments.device, arguments.rounds)
    result = {
        "versions": versions(),
        "device": arguments.device,
        "compiled": arguments.compile,
        **asdict(shape),
        "ms": {title: statistics.median(values) for title, values in times.items()},
        "over smoe": {title: median_ratio(values, times["smoe"]) for title, values in times.items()},
    }
    print(f"{shape}, {dtype}, {'compiled' if arguments.compile else 'eager'}, forward + backward")
    for title in times:
        print(f"  {title:30} {result['ms'][title]:9.2f} ms   {result['over smoe'][title]:6.2f} x smoe")
    if arguments.out:
        write(arguments.out, result)


if __name__ == "__main__":
    main()
