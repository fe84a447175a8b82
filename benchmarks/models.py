"""Whole models: a training step and `generate` of a sparsified llama with each router, as ratios to `smoe` in the same run.

    python benchmarks/models.py                          # on a CPU: 2 layers, float32
    python benchmarks/models.py --device cuda            # on a GPU: 6 layers, d 1024, 16 experts, top 4, bf16 autocast

A training step is forward, backward and AdamW. A smooth router runs more experts: its speed per active expert is its speed
times the experts it runs over k.
"""

import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
import transformers
from command import check, command, write
from peak import peak_mib
from timing import median_ratio, time_in_turns
from torch import Tensor
from versions import versions

import holdfast

ROUTERS: dict[str, tuple[str, dict[str, Any]]] = {
    "smoe": ("smoe", {}),
    "symphony": ("symphony", {}),
    "ac": ("ac", {}),
    "smooth": ("smooth", {}),
    "similarity, rank 64": ("similarity", {"rank": 64}),
    "attention": ("attention", {}),
}
NEW_TOKENS = 32


@dataclass(frozen=True)
class Shape:
    layers: int
    dim: int
    heads: int
    hidden: int
    experts: int
    k: int
    sequences: int
    length: int
    vocabulary: int


SHAPES = {"cpu": Shape(2, 64, 4, 64, 8, 2, 16, 64, 2000), "cuda": Shape(6, 1024, 16, 1024, 16, 4, 16, 1024, 32000)}


def model(shape: Shape, router: str, options: dict[str, Any], device: str) -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=shape.vocabulary,
        hidden_size=shape.dim,
        intermediate_size=shape.hidden,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        max_position_embeddings=shape.length + NEW_TOKENS,
    )
    with torch.device(device):
        made = transformers.AutoModelForCausalLM.from_config(config)
    losses = holdfast.Losses(balance=0.01)
    return holdfast.sparsify(
        made, experts=shape.experts, k=shape.k, router=router, init="random", losses=losses, router_options=options
    )


def trainer(made: Any, ids: Tensor, device: str) -> Callable[[], object]:
    optimizer = torch.optim.AdamW(made.parameters(), lr=1e-4, fused=device == "cuda")
    made.train()

    def run() -> None:
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            loss = made(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return run


def generator(made: Any, ids: Tensor) -> Callable[[], object]:
    def run() -> None:
        mask = torch.ones_like(ids)
        made.generate(
            ids, attention_mask=mask, max_new_tokens=NEW_TOKENS, min_new_tokens=NEW_TOKENS, do_sample=False, pad_token_id=0
        )

    return run


def active(made: Any, ids: Tensor, device: str) -> float:
    """Experts a token, over layers, in training mode."""
    with torch.no_grad(), torch.autocast(device, torch.bfloat16, enabled=device == "cuda"), holdfast.trace(made) as routes:
        made(input_ids=ids, use_cache=False)
        return statistics.fmean(float(routing.chosen.sum(1).float().mean()) for routing in routes)


def measure(shape: Shape, device: str, rounds: int) -> dict[str, Any]:
    ids = torch.randint(1, shape.vocabulary, (shape.sequences, shape.length), device=device)
    made = {title: model(shape, name, options, device) for title, (name, options) in ROUTERS.items()}
    steps = {title: trainer(one, ids, device) for title, one in made.items()}
    times = time_in_turns(steps, device, rounds, 3 if device == "cuda" else 1)
    used = {title: active(one, ids, device) for title, one in made.items()}
    peak = {title: peak_mib(run, device) for title, run in steps.items()}
    for one in made.values():
        one.eval()
    spoken = time_in_turns({title: generator(one, ids[:, : shape.length // 4]) for title, one in made.items()}, device, 3)
    return {
        **asdict(shape),
        "ms a step": {title: statistics.median(values) for title, values in times.items()},
        "experts a token": used,
        "speed over smoe": {title: median_ratio(times["smoe"], values) for title, values in times.items()},
        "per active expert": {
            title: median_ratio(times["smoe"], values) * used[title] / used["smoe"] for title, values in times.items()
        },
        "peak_mib": peak,
        "ms a generated token": {title: statistics.median(values) / NEW_TOKENS for title, values in spoken.items()},
        "generate: speed over smoe": {title: median_ratio(spoken["smoe"], values) for title, values in spoken.items()},
    }


def main() -> None:
    parser = command(__doc__, rounds=8)
    arguments = parser.parse_args()
    check(arguments)
    result = measure(SHAPES[arguments.device], arguments.device, arguments.rounds)
    print(f"{SHAPES[arguments.device]}")
    for title in ROUTERS:
        memory = "" if result["peak_mib"][title] is None else f"{result['peak_mib'][title]:7.0f} MiB"
        figure = {name: values[title] for name, values in result.items() if isinstance(values, dict)}
        print(
            f"  {title:22} {figure['ms a step']:8.2f} ms a step {memory}  {figure['speed over smoe']:.3f} of smoe's speed, "
            f"{figure['per active expert']:.3f} per active expert ({figure['experts a token']:.2f}); generate "
            f"{figure['ms a generated token']:.2f} ms a token, {figure['generate: speed over smoe']:.2f} of smoe's speed"
        )
    if arguments.out:
        write(arguments.out, {"versions": versions(), **result})


if __name__ == "__main__":
    main()
