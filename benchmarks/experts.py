"""Speed of `holdfast.Experts`, forward and backward, against transformers' own experts functions on the same weights.

    python benchmarks/experts.py                         # on a CPU, float32
    python benchmarks/experts.py --device cuda           # on a GPU, bfloat16, at the shapes of olmoe, qwen3-30b and mixtral

Prints ratios measured in one run (below 1: holdfast is faster) and, with --out FILE, writes them as JSON.
"""

import functools
import os
import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch
from command import check, command, write
from peak import peak_mib
from timing import median_ratio, time_in_turns
from torch import Tensor, nn
from versions import versions

from holdfast import Experts

os.environ.setdefault("HF_HUB_OFFLINE", "1")


@dataclass(frozen=True)
class Shape:
    tokens: int
    dim: int
    hidden: int
    experts: int
    k: int

    @property
    def flop(self) -> float:
        """FLOPs of forward and backward, with gated experts."""
        return 3 * 2.0 * self.tokens * self.k * 3 * self.dim * self.hidden


SHAPES = {
    "cpu": {"small": Shape(4096, 256, 256, 16, 2)},
    "cuda": {
        "olmoe": Shape(16384, 2048, 1024, 64, 8),
        "qwen3-30b": Shape(16384, 2048, 768, 128, 8),
        "mixtral": Shape(8192, 4096, 14336, 8, 2),
    },
}


def transformers_experts(ours: Experts, implementation: str) -> nn.Module:
    """Return transformers' experts module with the parameters of `ours`."""
    from transformers import OlmoeConfig
    from transformers.models.olmoe.modeling_olmoe import OlmoeExperts

    with torch.device("meta"):
        config = OlmoeConfig(hidden_size=ours.dim, intermediate_size=ours.hidden, num_experts=ours.experts)
        module = OlmoeExperts(config)
    config._experts_implementation = implementation
    module.gate_up_proj, module.down_proj = ours.gate_up_proj, ours.down_proj
    return module


def step(module: Callable[..., Tensor], tokens: Tensor, chosen: Tensor, weights: Tensor, grad: Tensor) -> list[Tensor]:
    """Run one forward and backward; return the output and every gradient."""
    parameters = [tokens, weights, *getattr(module, "parameters", list)()]
    out = module(tokens, chosen, weights)
    return [out, *torch.autograd.grad(out, parameters, grad)]


def contestants(ours: Experts, device: str, loop: bool) -> dict[str, Callable[..., Tensor]]:
    grouped = transformers_experts(ours, "grouped_mm")
    modules: dict[str, Callable[..., Tensor]] = {"holdfast": ours, "transformers grouped_mm": grouped}
    if loop:
        modules["transformers eager"] = transformers_experts(ours, "eager")
    if device == "cuda":
        modules["holdfast compiled"] = torch.compile(ours, fullgraph=True)
        modules["transformers grouped_mm compiled"] = torch.compile(grouped)
    return modules


def agree(results: dict[str, list[Tensor]], tolerance: float) -> None:
    """Exit unless all contestants compute the same, because their times would not be comparable."""
    expected = results["holdfast"]
    for name, values in results.items():
        for ours, theirs in zip(expected, values, strict=True):
            error = float((ours.detach().float() - theirs.detach().float()).norm() / ours.detach().float().norm())
            if not error < tolerance:
                raise SystemExit(f"{name} differs from holdfast by {error:.1e} (relative); times not comparable.")


def measure(name: str, shape: Shape, device: str, dtype: torch.dtype, rounds: int) -> dict[str, object]:
    torch.manual_seed(0)
    ours = Experts(shape.dim, shape.hidden, shape.experts, device=device, dtype=dtype)
    tokens = torch.randn(shape.tokens, shape.dim, device=device, dtype=dtype, requires_grad=True)
    grad = torch.randn_like(tokens)
    scores, chosen = torch.randn(shape.tokens, shape.experts, device=device).topk(shape.k)
    weights = scores.softmax(-1)
    modules = contestants(ours, device, loop=device == "cpu")

    def inputs_of(contestant: str) -> tuple[Tensor, Tensor]:
        # transformers' routers return weights in the model's dtype, Holdfast's in float32.
        own_weights = weights if contestant.startswith("holdfast") else weights.to(dtype)
        return chosen, own_weights.detach().requires_grad_()

    runs = {
        contestant: functools.partial(step, module, tokens, *inputs_of(contestant), grad)
        for contestant, module in modules.items()
    }
    agree({contestant: run() for contestant, run in runs.items()}, 1e-4 if dtype == torch.float32 else 3e-2)
    times = time_in_turns(runs, device, rounds)
    peak = {contestant: peak_mib(run, device) for contestant, run in runs.items()}
    return {
        "shape": name,
        **asdict(shape),
        "dtype": str(dtype).removeprefix("torch."),
        "ms": {contestant: statistics.median(values) for contestant, values in times.items()},
        "tflops": {contestant: shape.flop / statistics.median(values) / 1e9 for contestant, values in times.items()},
        "peak_mib": peak,
        "ratio": _ratios(times),
    }


def _ratios(times: dict[str, list[float]]) -> dict[str, float]:
    """Return holdfast's time over each transformers path: eager over eager, compiled over compiled."""
    return {
        name: median_ratio(times["holdfast compiled" if name.endswith("compiled") else "holdfast"], values)
        for name, values in times.items()
        if name.startswith("transformers")
    }


def main() -> None:
    parser = command(__doc__, rounds=20)
    parser.add_argument("--shapes", nargs="*", help="which of the device's shapes (default: all)")
    arguments = parser.parse_args()
    check(arguments)
    shapes = SHAPES[arguments.device]
    wanted = arguments.shapes or list(shapes)
    unknown = set(wanted) - set(shapes)
    if unknown:
        raise SystemExit(f"no shape {', '.join(sorted(unknown))} here; there are {', '.join(shapes)}.")
    dtype = torch.bfloat16 if arguments.device == "cuda" else torch.float32
    results = [measure(name, shapes[name], arguments.device, dtype, arguments.rounds) for name in wanted]
    for result in results:
        _print(result)
    if arguments.out:
        write(arguments.out, {"versions": versions(), "results": results})


def _print(result: dict[str, object]) -> None:
    print(f"\n{result['shape']}, forward + backward, {result['dtype']}")
    milliseconds, ratios, peak = result["ms"], result["ratio"], result["peak_mib"]
    assert isinstance(milliseconds, dict) and isinstance(ratios, dict) and isinstance(peak, dict)
    for name, value in milliseconds.items():
        ratio = f"holdfast takes {ratios[name]:.2f} of its time" if name in ratios else ""
        memory = f"{peak[name]:8.0f} MiB" if peak[name] is not None else ""
        print(f"  {name:34} {value:9.2f} ms {memory}  {ratio}")


if __name__ == "__main__":
    main()
