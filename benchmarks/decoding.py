"""Measure decoding: the time of a token in `generate`, with a family's native router and with each router.

    python benchmarks/decoding.py                        # on a CPU: 2 layers, float32; compiles each model, minutes
    python benchmarks/decoding.py --modes dynamic        # the same without compilation
    python benchmarks/decoding.py --device cuda          # on a GPU: Mixtral of 3 layers, d 1024, 8 experts, top 2, bf16
    python benchmarks/decoding.py --device cuda --layers 8   # compilation takes as many times longer

    dynamic     the default KV cache, not compiled
    static      cache_implementation="static": transformers compiles the step of one token, on a GPU with CUDA graphs
    graphs      how many graphs the step of a model was compiled to; more than 1: a graph break, or a recompilation
    recompiled  how many graphs were compiled in the measured rounds; 0 is right

All models take turns, and a ratio to "native", the unchanged model, is a median over rounds. A token's time includes its
share of reading the prompt and what `generate` does besides the forward.
"""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
import transformers
from command import check, command, write
from timing import median_ratio, time_in_turns
from torch import Tensor
from torch._dynamo.utils import counters
from versions import versions

import holdfast

NAMES = ("native", "smoe", "symphony", "smooth", "similarity", "attention")
MODES = ("dynamic", "static")
PROMPT = 32


@dataclass(frozen=True)
class Shape:
    layers: int
    dim: int
    heads: int
    hidden: int
    experts: int
    k: int
    sequences: int
    vocabulary: int
    dtype: str
    new_tokens: dict[str, int]  # in a round, for each mode


SHAPES = {
    "cpu": Shape(2, 64, 4, 64, 8, 2, 1, 1000, "float32", {"dynamic": 32, "static": 64}),
    "cuda": Shape(3, 1024, 8, 3584, 8, 2, 1, 32000, "bfloat16", {"dynamic": 32, "static": 256}),
}


def model(shape: Shape, router: str, device: str) -> Any:
    torch.manual_seed(0)
    config = transformers.MixtralConfig(
        vocab_size=shape.vocabulary,
        hidden_size=shape.dim,
        intermediate_size=shape.hidden,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.heads,
        num_local_experts=shape.experts,
        num_experts_per_tok=shape.k,
        max_position_embeddings=2048,
        dtype=shape.dtype,
    )
    with torch.device(device):
        made = transformers.AutoModelForCausalLM.from_config(config).eval()
    return made if router == "native" else holdfast.reroute(made, router)


def generator(made: Any, ids: Tensor, mode: str, new_tokens: int) -> Callable[[], Tensor]:
    options: dict[str, Any] = {}
    if mode == "static":
        options["cache_implementation"] = "static"
        if ids.device.type == "cpu":  # where transformers does not compile by itself
            options["compile_config"] = transformers.CompileConfig(mode="default")
            options["compile_config"]._compile_all_devices = True
    options |= {"max_new_tokens": new_tokens, "min_new_tokens": new_tokens, "do_sample": False, "pad_token_id": 0}

    def run() -> Tensor:
        made_tokens: Tensor = made.generate(ids, attention_mask=torch.ones_like(ids), **options)
        return made_tokens

    return run


def compiled_graphs() -> int:
    """Return how many graphs have been compiled in this process."""
    return int(counters["stats"]["unique_graphs"])


def measure(
    shape: Shape, device: str, rounds: int, routers: Sequence[str], modes: Sequence[str]
) -> dict[str, dict[str, dict[str, float]]]:
    # All models are compiled in one process, and a limit of 8 is meant for one model.
    torch._dynamo.config.recompile_limit = 8 * len(routers)
    ids = torch.randint(1, shape.vocabulary, (shape.sequences, PROMPT), device=device)
    models = {name: model(shape, name, device) for name in routers}
    found: dict[str, dict[str, dict[str, float]]] = {}
    for mode in modes:
        tokens = shape.new_tokens[mode]
        runs = {name: generator(made, ids, mode, tokens) for name, made in models.items()}
        graphs = {}
        for name, run in runs.items():
            before = compiled_graphs()
            run()
            graphs[name] = compiled_graphs() - before
        before = compiled_graphs()
        times = time_in_turns(runs, device, rounds)
        recompiled = compiled_graphs() - before
        base = routers[0]
        found[mode] = {
            name: {
                "ms a token": statistics.median(times[name]) / tokens,
                f"over {base}": median_ratio(times[name], times[base]),
                "graphs": graphs[name],
            }
            for name in runs
        }
        for name, figures in found[mode].items():
            print(
                f"  {mode:8} {name:22} {figures['ms a token']:7.2f} ms a token   {figures[f'over {base}']:5.2f} of {base}"
                f"   graphs {graphs[name]}",
                flush=True,
            )
        print(f"  {mode:8} recompiled in {rounds + 2} rounds of {tokens} tokens: {recompiled}", flush=True)
    return found


def main() -> None:
    parser = command(__doc__, rounds=2)
    parser.add_argument("--routers", nargs="*", default=NAMES, help="the first is what the others are compared with")
    parser.add_argument("--modes", nargs="*", choices=MODES, default=MODES)
    parser.add_argument("--layers", type=int, help="another number of layers")
    parser.add_argument("--sequences", type=int, help="another number of sequences in the batch")
    arguments = parser.parse_args()
    check(arguments)
    shape = SHAPES[arguments.device]
    shape = replace(shape, layers=arguments.layers or shape.layers, sequences=arguments.sequences or shape.sequences)
    print(shape, flush=True)
    result = measure(shape, arguments.device, arguments.rounds, arguments.routers, arguments.modes)
    if arguments.out:
        write(arguments.out, {"versions": versions(), **asdict(shape), "modes": result})


if __name__ == "__main__":
    main()
