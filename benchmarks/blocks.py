"""Whole MoE blocks, router and experts, forward and backward: against a dense network of the same FLOPs, transformers' block
and, where it can be imported, ScatterMoE.

    python benchmarks/blocks.py                          # on a CPU, float32
    python benchmarks/blocks.py --device cuda            # on a GPU, bfloat16: olmoe, qwen3-30b, mixtral and a small block
    python benchmarks/blocks.py --device cuda --shapes small --routers smoe    # only smoe, transformers and dense

Many steps are queued at a time, as in training. "Captured" is the step replayed as a CUDA graph. Prints ratios measured in
one run and, with --out FILE, writes JSON.
"""

import importlib.util
import os
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F
from command import check, command, write
from peak import peak_mib
from routers import ROUTERS
from timing import captured, median_ratio, time_in_turns
from torch import Tensor, nn
from versions import versions

import holdfast
from holdfast import Context, Experts, MoE
from holdfast.routing import Previous

os.environ.setdefault("HF_HUB_OFFLINE", "1")
NAMES = ("smoe", "symphony", "ac", "smooth", "similarity, rank 64")


@dataclass(frozen=True)
class Shape:
    sequences: int
    length: int
    dim: int
    hidden: int
    experts: int
    k: int
    queued: int  # steps; on a GPU 0.4 s of them, in which times settle: in 80 ms they differ by 7% from round to round


SHAPES = {
    "cpu": {"small": Shape(8, 512, 256, 256, 16, 2, 1)},
    "cuda": {
        "olmoe": Shape(8, 2048, 2048, 1024, 64, 8, 40),
        "qwen3-30b": Shape(8, 2048, 2048, 768, 128, 8, 40),
        "mixtral": Shape(4, 2048, 4096, 14336, 8, 2, 14),
        "small": Shape(48, 256, 352, 352, 16, 2, 100),  # where the host, not the GPU, is the limit
    },
}


class Dense(nn.Module):
    """One gated network with the same FLOPs per token as k experts."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate_up = nn.Linear(shape.dim, 2 * shape.k * shape.hidden, bias=False)
        self.down = nn.Linear(shape.k * shape.hidden, shape.dim, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        gate, up = self.gate_up(tokens).chunk(2, dim=-1)
        out: Tensor = self.down(F.silu(gate) * up)
        return out


class Ours(nn.Module):
    def __init__(self, block: MoE, context: Context) -> None:
        super().__init__()
        self.block, self.context = block, context

    def forward(self, tokens: Tensor) -> Tensor:
        out: Tensor = self.block(tokens, self.context)[0]
        return out


class Scatter(nn.Module):
    """ScatterMoE's experts behind transformers' router, on the same weights."""

    def __init__(self, shape: Shape, theirs: Any) -> None:
        super().__init__()
        from scattermoe.mlp import GLUMLP  # type: ignore[import-not-found]

        self.gate = theirs.gate
        self.mlp = GLUMLP(shape.dim, shape.hidden, shape.experts, shape.k)
        gate, up = theirs.experts.gate_up_proj.chunk(2, dim=1)
        # It multiplies the first half with the activated second one; its weights are copies, in its own layout.
        self.mlp.experts.weight = nn.Parameter(torch.cat([up, gate], dim=1).detach().clone())
        self.mlp.output_experts.weight = nn.Parameter(theirs.experts.down_proj.detach().clone())

    def forward(self, tokens: Tensor) -> Tensor:
        _, weights, chosen = self.gate(tokens.reshape(-1, tokens.shape[-1]))
        out: Tensor = self.mlp(tokens.reshape(-1, tokens.shape[-1]), weights, chosen)
        return out.view(tokens.shape)


def transformers_block(ours: MoE, shape: Shape) -> nn.Module:
    """Return transformers' block with the weights of `ours`."""
    from transformers import OlmoeConfig
    from transformers.models.olmoe.modeling_olmoe import OlmoeSparseMoeBlock

    sizes = {"hidden_size": shape.dim, "intermediate_size": shape.hidden}
    with torch.device("meta"):
        config = OlmoeConfig(**sizes, num_experts=shape.experts, num_experts_per_tok=shape.k, norm_topk_prob=True)
        config._experts_implementation = "grouped_mm"
        block = OlmoeSparseMoeBlock(config)
    block.gate.weight = ours.router.get_parameter("score.weight")
    block.experts.gate_up_proj, block.experts.down_proj = ours.experts.gate_up_proj, ours.experts.down_proj
    return block


def step(module: Callable[[Tensor], Tensor], tokens: Tensor, parameters: list[Tensor], grad: Tensor) -> list[Tensor]:
    out = module(tokens)
    return [out, *torch.autograd.grad(out, [tokens, *parameters], grad, allow_unused=True)]


def blocks(shape: Shape, device: str, dtype: torch.dtype) -> tuple[dict[str, nn.Module], Tensor]:
    torch.manual_seed(0)
    tokens = torch.randn(shape.sequences, shape.length, shape.dim, device=device, dtype=dtype)
    sizes = {"dim": shape.dim, "experts": shape.experts, "k": shape.k}
    shared = Experts(shape.dim, shape.hidden, shape.experts, device=device, dtype=dtype)  # one for all: weights are large
    with torch.no_grad():
        before = holdfast.create_router("smoe", **sizes).to(device, dtype).eval()(tokens)
    context = Context(causal=True, previous=Previous(tokens, before))
    made: dict[str, nn.Module] = {
        title: Ours(MoE(holdfast.create_router(name, **sizes, **options).to(device, dtype), shared), context)
        for title, (name, options) in ((title, ROUTERS[title]) for title in NAMES)
    }
    plain = made["smoe"].block
    assert isinstance(plain, MoE)
    theirs = transformers_block(plain, shape)
    made["transformers"] = theirs
    if device == "cuda" and importlib.util.find_spec("scattermoe") is not None:
        made["scattermoe"] = Scatter(shape, theirs)
    made["dense, same FLOPs"] = Dense(shape).to(device, dtype)
    return made, tokens.requires_grad_()


def agree(results: dict[str, Tensor], tolerance: float) -> None:
    """Exit unless all blocks with plain top-k compute the same; the median ignores near-ties, which may flip."""
    expected = results["smoe"]
    for name, out in results.items():
        error = (out - expected).float().norm(dim=-1) / expected.float().norm(dim=-1)
        if not float(error.median()) < tolerance:
            raise SystemExit(f"{name} differs from holdfast by {float(error.median()):.1e}; times not comparable.")


def measure(
    name: str, shape: Shape, device: str, dtype: torch.dtype, rounds: int, compiled: bool, routers: Sequence[str] = NAMES
) -> dict[str, Any]:
    made, tokens = blocks(shape, device, dtype)
    made = {title: block for title, block in made.items() if title not in NAMES or title in routers}
    same = [title for title in ("smoe", "transformers", "scattermoe") if title in made]
    with torch.no_grad():
        agree({title: made[title](tokens).flatten(0, 1) for title in same}, 1e-4 if dtype == torch.float32 else 3e-2)
    grad = torch.randn_like(tokens)
    modules: dict[str, Callable[[Tensor], Tensor]] = dict(made)
    if compiled:
        for title in ("smoe", "transformers", "dense, same FLOPs"):
            modules[f"{title}, compiled"] = torch.compile(made[title])
    runs: dict[str, Callable[[], object]] = {}
    for title, module in modules.items():
        parameters = [one for one in made[title.removesuffix(", compiled")].parameters() if one.requires_grad]
        runs[title] = lambda module=module, parameters=parameters: step(module, tokens, parameters, grad)  # type: ignore[misc]
    if compiled:
        for title in ("smoe", "dense, same FLOPs"):
            runs[f"{title}, captured"] = captured(runs[title])
    times = time_in_turns(runs, device, rounds, shape.queued)
    dense = times["dense, same FLOPs, compiled" if compiled else "dense, same FLOPs"]
    return {
        "shape": name,
        **asdict(shape),
        "dtype": str(dtype).removeprefix("torch."),
        "ms": {title: statistics.median(values) for title, values in times.items()},
        "peak_mib": {title: peak_mib(run, device) for title, run in runs.items()},
        "throughput over dense": {title: median_ratio(dense, values) for title, values in times.items()},
        "time over transformers": {
            title: median_ratio(values, times["transformers, compiled" if compiled else "transformers"])
            for title, values in times.items()
        },
    }


def main() -> None:
    parser = command(__doc__, rounds=12)
    parser.add_argument("--shapes", nargs="*", help="which of the device's shapes (default: all)")
    parser.add_argument(
        "--routers", nargs="*", choices=NAMES, default=NAMES, help="which routers, besides smoe (default: all)"
    )
    arguments = parser.parse_args()
    check(arguments)
    routers = ["smoe", *arguments.routers]
    torch._dynamo.config.recompile_limit = 100
    dtype = torch.bfloat16 if arguments.device == "cuda" else torch.float32
    results = []
    for name, shape in SHAPES[arguments.device].items():
        if not arguments.shapes or name in arguments.shapes:
            on_gpu = arguments.device == "cuda"
            results.append(measure(name, shape, arguments.device, dtype, arguments.rounds, on_gpu, routers))
            _print(results[-1])
    if arguments.out:
        write(arguments.out, {"versions": versions(), "results": results})


def _print(result: dict[str, Any]) -> None:
    print(f"\n{result['shape']}, router and experts, forward + backward, {result['dtype']}", flush=True)
    for title, value in result["ms"].items():
        memory = "" if result["peak_mib"][title] is None else f"{result['peak_mib'][title]:8.0f} MiB"
        dense, theirs = result["throughput over dense"][title], result["time over transformers"][title]
        print(f"  {title:28} {value:8.2f} ms {memory}  {dense:.2f} of dense throughput, {theirs:.2f} of transformers' time")


if __name__ == "__main__":
    main()
