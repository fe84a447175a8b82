"""Measure whole models: a training step and `generate` of a sparsified llama with each router, as ratios to `smoe`.

    python benchmarks/models.py                          # on a CPU: 2 layers, float32
    python benchmarks/models.py --device cuda            # on a GPU: 6 layers, d 2048, 32 experts, top 8, bf16 autocast

Each router's model takes turns with one that has `smoe`; two of them fit into memory, not all. A training step is forward,
backward and AdamW. A smooth router runs more experts: its speed per active expert is its speed times the experts it runs
over k.
"""

import gc
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
import transformers
from command import check, command, write
from peak import peak_mib
from routers import ROUTERS
from timing import median_ratio, time_in_turns
from torch import Tensor
from versions import versions

import holdfast

NAMES = ("smoe", "symphony", "ac", "smooth", "similarity, rank 64", "attention")
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


SHAPES = {"cpu": Shape(2, 64, 4, 64, 8, 2, 16, 64, 2000), "cuda": Shape(6, 2048, 16, 1024, 32, 8, 8, 2048, 32000)}


def model(shape: Shape, router: str, device: str) -> Any:
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
    name, options = ROUTERS[router]
    options = {key: value for key, value in options.items() if value is not None}  # a model passes its own number of heads
    return holdfast.sparsify(
        made, experts=shape.experts, k=shape.k, router=name, init="random", losses=losses, router_options=options
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
    """Return the mean number of experts per token over layers, in training mode."""
    with torch.no_grad(), torch.autocast(device, torch.bfloat16, enabled=device == "cuda"), holdfast.trace(made) as routes:
        made(input_ids=ids, use_cache=False)
        return statistics.fmean(float(routing.chosen.sum(1).float().mean()) for routing in routes)


def measure(shape: Shape, device: str, rounds: int, routers: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Return the measurements of each router; those of `smoe` come from its turns with the first router."""
    ids = torch.randint(1, shape.vocabulary, (shape.sequences, shape.length), device=device)
    plain = model(shape, "smoe", device)
    found: dict[str, dict[str, Any]] = {}
    plain_step = trainer(plain, ids, device)
    for title in routers:
        made = {"smoe": plain, title: model(shape, title, device)}
        steps = {"smoe": plain_step, title: trainer(made[title], ids, device)}
        times = time_in_turns(steps, device, rounds, 3 if device == "cuda" else 1)
        used = {name: active(one, ids, device) for name, one in made.items()}
        peak = {name: peak_mib(run, device) for name, run in steps.items()}
        generated = time_in_turns(
            {name: generator(one.eval(), ids[:, : shape.length // 4]) for name, one in made.items()}, device, 2
        )
        plain.train()
        for name in steps:
            found.setdefault(
                name,
                {
                    "ms a step": statistics.median(times[name]),
                    "peak_mib": peak[name],
                    "experts a token": used[name],
                    "speed over smoe": median_ratio(times["smoe"], times[name]),
                    "per active expert": median_ratio(times["smoe"], times[name]) * used[name] / used["smoe"],
                    "ms a generated token": statistics.median(generated[name]) / NEW_TOKENS,
                    "generate: speed over smoe": median_ratio(generated["smoe"], generated[name]),
                },
            )
            if name == title or title == routers[0]:
                _print(name, found[name])
        del made, steps
        gc.collect()  # a modified model has reference cycles
    return found


def main() -> None:
    parser = command(__doc__, rounds=8)
    parser.add_argument("--routers", nargs="*", default=NAMES[1:], help="routers besides smoe (default: all)")
    arguments = parser.parse_args()
    check(arguments)
    shape = SHAPES[arguments.device]
    print(shape, flush=True)
    result = measure(shape, arguments.device, arguments.rounds, arguments.routers)
    if arguments.out:
        write(arguments.out, {"versions": versions(), **asdict(shape), "routers": result})


def _print(title: str, figures: dict[str, Any]) -> None:
    memory = "" if figures["peak_mib"] is None else f"{figures['peak_mib']:7.0f} MiB"
    print(
        f"  {title:22} {figures['ms a step']:8.2f} ms per step {memory}  {figures['speed over smoe']:.3f} of smoe's speed, "
        f"{figures['per active expert']:.3f} per active expert ({figures['experts a token']:.2f}); generate "
        f"{figures['ms a generated token']:.2f} ms per token, {figures['generate: speed over smoe']:.2f} of smoe's speed",
        flush=True,
    )


if __name__ == "__main__":
    main()
