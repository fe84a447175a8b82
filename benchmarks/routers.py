"""What each router costs, forward and backward, as a multiple of plain `smoe` in the same run.

    python benchmarks/routers.py                         # on a CPU: 8 sequences of 512, d 256, 16 experts, top 2, float32
    python benchmarks/routers.py --device cuda           # on a GPU: 8 sequences of 2048, d 2048, 64 experts, top 8

On a GPU also as a share of the time of the experts, and in more ways: one step at a time, where what Python and the launches
take counts; many queued; replayed as a CUDA graph, which is what the kernels take; and as a layer together with the
experts, where the difference to the experts alone is what routing costs. Prints ratios measured in one run and, with
--out FILE, writes them as JSON.
"""

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from command import check, command, write
from timing import captured, median_ratio, time_in_turns, waits
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
    hidden: int


SHAPES = {"cpu": Shape(8, 512, 256, 16, 2, 8, 256), "cuda": Shape(8, 2048, 2048, 64, 8, 16, 1024)}
QUEUED = 20
VOCABULARY = 32_000
ROUTERS: dict[str, tuple[str, dict[str, Any]]] = {
    "smoe": ("smoe", {}),
    "xmoe": ("xmoe", {}),
    "top-p": ("top-p", {}),
    "random": ("random", {}),
    "smoe, learned Gaussian noise": ("smoe", {"noise": "gaussian"}),
    "remoe": ("remoe", {}),
    "remoe, load-weighted": ("remoe", {"penalty": "load"}),
    "expert-choice": ("expert-choice", {}),
    "sinkhorn": ("sinkhorn", {}),
    "base": ("base", {}),
    "capacity": ("capacity", {}),
    "capacity, next": ("capacity", {"policy": "next"}),
    "capacity, reroute": ("capacity", {"policy": "reroute"}),
    "symphony": ("symphony", {}),
    "ac": ("ac", {}),
    "ac, exact": ("ac", {"scales": "exact"}),
    "ac, interquartile ranges": ("ac", {"spread": "iqr"}),
    "smooth": ("smooth", {}),
    "similarity, rank 64": ("similarity", {"rank": 64}),
    "similarity": ("similarity", {}),
    "similarity, bilinear, rank 64": ("similarity", {"rank": 64, "form": "bilinear"}),
    "similarity, learned strength, rank 64": ("similarity", {"rank": 64, "strength": "learned"}),
    "similarity, from confident, rank 64": ("similarity", {"rank": 64, "from_": "confident"}),
    "attention": ("attention", {"heads": None}),
    "attention, all heads": ("attention", {"heads": "all"}),
    "symphony+similarity, rank 64": ("symphony+similarity", {"rank": 64}),
    "hash": ("hash", {"vocabulary": VOCABULARY}),
    "stablemoe": ("stablemoe", {"vocabulary": VOCABULARY}),
    "sparsemax": ("sparsemax", {}),
    "grouped": ("grouped", {}),
    "hierarchical": ("hierarchical", {}),
    "modality": ("modality", {}),
}


def synthetic_context(shape: Shape, device: str, dtype: torch.dtype) -> tuple[Tensor, Context]:
    """Tokens, the attention before them and a previous MoE layer."""
    tokens = torch.randn(shape.sequences, shape.length, shape.dim, device=device, dtype=dtype)
    width = shape.dim // shape.heads
    query, key, value = (
        torch.randn(shape.sequences, shape.heads, shape.length, width, device=device, dtype=dtype) for _ in range(3)
    )
    projection = torch.nn.Linear(shape.dim, shape.dim, bias=False, device=device, dtype=dtype).requires_grad_(False)
    attention = Attention(query, key, value, projection, torch.randn_like(tokens))
    with torch.no_grad():
        previous = holdfast.create_router("smoe", dim=shape.dim, experts=shape.experts, k=shape.k).to(device).eval()(tokens)
    ids = torch.randint(VOCABULARY, tokens.shape[:2], device=device)
    context = Context(
        causal=True,
        attention=attention,
        previous=Previous(tokens.detach(), previous),
        token_ids=ids,
        modality=ids % 2,
    )
    return tokens.requires_grad_(), context


class Step:
    """A forward, and the backward from gradients of weights (as the experts give them) and of gates (as losses do)."""

    def __init__(
        self, router: Callable[..., holdfast.Routing], tokens: Tensor, context: Context, parameters: Sequence[Tensor]
    ):
        self.router, self.tokens, self.context, self.parameters = router, tokens, context, parameters
        with torch.no_grad():
            routing = router(tokens, context)
        self.grads = [torch.randn_like(routing.weights), torch.randn_like(routing.gates)]

    def __call__(self) -> None:
        routing = self.router(self.tokens, self.context)
        outputs = [routing.weights, routing.gates, *routing.losses.values()]
        grads = [*self.grads, *(torch.ones_like(loss) for loss in routing.losses.values())]
        differentiate(outputs, [self.tokens, *self.parameters], grads)


def differentiate(outputs: Sequence[Tensor], inputs: Sequence[Tensor], grads: Sequence[Tensor]) -> None:
    """Run the backward of those outputs that have one: the routing of `hash` has none."""
    pairs = [(output, grad) for output, grad in zip(outputs, grads, strict=True) if output.requires_grad]
    if pairs:
        torch.autograd.grad([pair[0] for pair in pairs], inputs, [pair[1] for pair in pairs], allow_unused=True)


def experts_step(module: holdfast.Experts, tokens: Tensor, context: Context) -> Callable[[], object]:
    """Run the experts on the previous layer's selection: the cost that routing is compared with."""
    assert context.previous is not None
    rows = tokens.detach().flatten(0, 1).requires_grad_()
    chosen, weights = context.previous.routing.experts, context.previous.routing.weights.requires_grad_()
    grad = torch.randn_like(rows)

    def run() -> None:
        torch.autograd.grad(module(rows, chosen, weights), [rows, weights, *module.parameters()], grad)

    return run


def layer_step(step: Step, module: holdfast.Experts) -> Callable[[], object]:
    """Router and experts together."""
    grad = torch.randn_like(step.tokens).flatten(0, 1)
    inputs = [step.tokens, *step.parameters, *module.parameters()]

    def run() -> None:
        routing = step.router(step.tokens, step.context)
        out = module(step.tokens.flatten(0, 1), routing.experts, routing.weights)
        differentiate([out, routing.gates], inputs, [grad, step.grads[1]])

    return run


def measure(steps: Mapping[str, Step], shape: Shape, device: str, rounds: int) -> dict[str, dict[str, list[float]]]:
    """Times by way of measuring and by contestant."""
    if device != "cuda":
        return {"one at a time": time_in_turns(steps, device, rounds)}
    smoe = steps["smoe"]
    module = holdfast.Experts(shape.dim, shape.hidden, shape.experts, device=device, dtype=smoe.tokens.dtype)
    alone = experts_step(module, smoe.tokens, smoe.context)
    runs: dict[str, Callable[[], object]] = {**steps, "experts": alone}
    queued = {title: run for title, run in runs.items() if not waits(run)}  # the others cannot be queued, nor recorded
    layers = {title: layer_step(step, module) for title, step in steps.items() if title in queued}
    replays = {title: captured(run) for title, run in queued.items()}
    return {
        "one at a time": time_in_turns(runs, device, rounds),
        "queued": time_in_turns(queued, device, rounds, QUEUED),
        "replayed": time_in_turns(replays, device, rounds, QUEUED),
        "in a layer": time_in_turns({**layers, "experts": alone}, device, rounds, QUEUED // 4),
    }


def main() -> None:
    parser = command(__doc__, rounds=10)
    parser.add_argument("--routers", nargs="*", help="routers besides smoe (default: all)")
    parser.add_argument("--compile", action="store_true", help="torch.compile each router")
    arguments = parser.parse_args()
    check(arguments)
    torch.manual_seed(0)
    torch._dynamo.config.recompile_limit = 100  # the routers share one forward, and each compiles its own version of it
    shape = SHAPES[arguments.device]
    dtype = torch.bfloat16 if arguments.device == "cuda" else torch.float32
    tokens, context = synthetic_context(shape, arguments.device, dtype)
    steps = {}
    for title, (name, options) in ROUTERS.items():
        if arguments.routers is not None and title not in ("smoe", *arguments.routers):
            continue
        options = {key: shape.heads if key == "heads" and value is None else value for key, value in options.items()}
        router = holdfast.create_router(name, dim=shape.dim, experts=shape.experts, k=shape.k, **options).to(
            arguments.device, dtype
        )
        parameters = [p for p in router.parameters() if p.requires_grad]
        run = torch.compile(router, fullgraph=True) if arguments.compile else router
        steps[title] = Step(run, tokens, context, parameters)
    times = measure(steps, shape, arguments.device, arguments.rounds)
    result = {
        "versions": versions(),
        "device": arguments.device,
        "compiled": arguments.compile,
        **asdict(shape),
        "ms": {way: {title: statistics.median(values) for title, values in each.items()} for way, each in times.items()},
        "over smoe": {
            way: {title: median_ratio(values, each["smoe"]) for title, values in each.items()} for way, each in times.items()
        },
    }
    print(f"{shape}, {dtype}, {'compiled' if arguments.compile else 'eager'}, forward + backward")
    for way in times:
        print(f"{way}:")
        milliseconds, ratios = result["ms"][way], result["over smoe"][way]
        for title, value in milliseconds.items():
            share = f"{value / milliseconds['experts']:8.2%} of the experts" if "experts" in milliseconds else ""
            print(f"  {title:30} {value:9.3f} ms   {ratios[title]:6.2f} x smoe {share}")
    if arguments.out:
        write(arguments.out, result)


if __name__ == "__main__":
    main()
