"""`holdfast routers`: list the routers, and show how each one routes real text."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any

from tyro.conf import arg

from holdfast.cli.common import PluginFiles, router_names, show
from holdfast.progress import bar

if TYPE_CHECKING:
    from torch import Tensor

    from holdfast.routing import Context, Routing

LENGTH = 128  # words in a sequence
VOCABULARY = 2000
HEADS = 4
NOTE = (
    "load std: standard deviation of the experts' shares of the tokens, 0 if even; dead: experts that no token selected; "
    "flips: share of tokens whose selected set changes; worst: the largest share of a token's gate weights that moves to "
    "other experts; dropped: share of the experts that tokens lose to a limit"
)
WARM_UP = 4  # batches that update router state before anything is measured


@dataclass(frozen=True)
class Routers:
    """List the routers by family, or route a batch of text with each of them and print metrics of the routing.

    Examples: `holdfast routers`, `holdfast routers --route`,
    `holdfast routers --route --routers smoe,xmoe+top-p --experts 32`
    """

    routers: str | None = None
    """Router names, joined by commas; + joins names, options in brackets; by default all."""
    route: bool = False
    """Route a batch of the embedded text with each router, weights untrained, and print a table."""
    experts: int = 16
    """Number of experts."""
    k: int | None = None
    """Experts per token; by default the router's own k."""
    dim: int = 128
    """Width of the tokens."""
    sequences: int = 32
    """Number of sequences of 128 words."""
    seed: int = 0
    """Seed of the router weights and the word vectors."""
    plugins: Annotated[PluginFiles, arg(name="")] = field(default_factory=PluginFiles)

    def run(self) -> None:
        from holdfast.report.tables import Table
        from holdfast.routing import list_routers
        from holdfast.routing.presets import REGISTRY
        from holdfast.routing.registry import FAMILIES

        names = router_names(self.routers)
        if not self.route:
            wanted = [preset for name in names for preset in REGISTRY.parse(name)] or list(REGISTRY)
            rows = []
            for family, about in FAMILIES.items():
                members = [preset for preset in wanted if preset.family == family]
                rows += [[family.upper(), "", about, ""]] if members else []
                rows += [[one.name, ", ".join(one.parts) or "none", one.about, one.paper] for one in members]
            title, columns = "Routers; + joins names that replace different stages", ["name", "replaces stage"]
            show(Table(title, [*columns, "what it does", "paper"], rows))
            return
        batches, names = embedded_tokens(WARM_UP + 1, self.sequences, self.dim, self.seed), names or list(list_routers())
        described = []
        with bar(len(names), leave=False) as tell:
            for place, name in enumerate(names):
                described.append({"router": name, **self._describe(name, batches)})
                tell(place + 1, "routing", name)
        title = f"{self.sequences} x {LENGTH} words of Python's documentation, weights untrained"
        show(Table.of(title, described, NOTE))

    def _describe(self, name: str, batches: list[tuple[Tensor, Tensor]]) -> dict[str, str]:
        """Route all batches with the router `name`, and return its figures by column, measured on the last batch."""
        import torch

        from holdfast.metrics import DroppedExperts
        from holdfast.routing.presets import REGISTRY

        torch.manual_seed(self.seed)
        given = {"heads": HEADS, "vocabulary": VOCABULARY}
        options: dict[str, Any] = {key: value for key, value in given.items() if key in REGISTRY.options(name)}
        router = REGISTRY.build(name, dim=self.dim, experts=self.experts, k=self.k, **options)
        *earlier, (tokens, ids) = batches
        noise = torch.randn_like(tokens)
        noise *= 0.01 * tokens.norm(dim=-1, keepdim=True) / noise.norm(dim=-1, keepdim=True)
        with torch.no_grad():
            for batch, words in earlier:
                router(batch, synthetic_context(batch, words, self.experts))
            router.eval()
            routing, rounded, noisy = (
                router(x, synthetic_context(x, ids, self.experts))
                for x in (tokens, tokens.bfloat16().float(), tokens + noise)
            )
        dropped = DroppedExperts()
        dropped.update(routing)
        share = routing.chosen.float().mean(0)
        shift = (routing.dense_weights - rounded.dense_weights).abs().sum(-1) / 2
        worst = (shift / routing.weights.sum(-1).clamp_min(1e-30)).amax()

        def flips(other: Routing) -> str:
            return f"{100 * (routing.chosen != other.chosen).any(-1).float().mean():.2f}"

        return {
            "experts per token": f"{routing.used.sum(-1).float().mean():.2f}",
            "load std %": f"{100 * (share / share.sum()).std(correction=0):.2f}",
            "dead": f"{int((share == 0).sum())}",
            "flips by bf16 %": flips(rounded),
            "worst, bf16 %": f"{100 * worst:.1f}",
            "flips by 1% noise %": flips(noisy),
            "dropped %": f"{100 * dropped.result().share:.2f}" if dropped.tokens else "",
        }


def embedded_tokens(batches: int, sequences: int, dim: int, seed: int) -> list[tuple[Tensor, Tensor]]:
    """Return batches of unit-variance vectors (sequences, LENGTH, dim) and of word numbers (sequences, LENGTH).

    A vector is a word's random vector and half the one before.
    """
    import torch

    from holdfast.data import Vocabulary, python_topics

    if sequences < 1 or dim < HEADS or dim % HEADS:
        raise ValueError(f"{sequences} sequences of width {dim}; expected 1 or more, and a width divisible by {HEADS}.")
    text = "\n".join(python_topics().values())
    numbers = Vocabulary([text], VOCABULARY).encode(text)
    if batches * sequences * LENGTH > len(numbers):
        most = len(numbers) // (batches * LENGTH)
        raise ValueError(f"{sequences} sequences are more than the text has; use at most {most}.")
    numbers = numbers[: batches * sequences * LENGTH].view(batches, sequences, LENGTH)
    vectors = torch.randn(VOCABULARY, dim, generator=torch.Generator().manual_seed(seed))[numbers]
    before = vectors.roll(1, dims=2)
    before[:, :, 0] = 0
    return list(zip(torch.nn.functional.layer_norm(vectors + before / 2, (dim,)), numbers.long(), strict=True))


def synthetic_context(tokens: Tensor, ids: Tensor, experts: int) -> Context:
    """Return the context of a router in a model: causal attention and a previous MoE layer, with fixed random weights.

    The first quarter of every sequence has the modality 1, as if it were an image before the text.
    """
    import torch

    from holdfast.routing import Attention, Context, Previous, create_router

    dim = tokens.shape[-1]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        into, out = torch.nn.Linear(dim, 3 * dim, bias=False), torch.nn.Linear(dim, dim, bias=False)
        before = create_router("smoe", dim=dim, experts=experts, k=1).eval()(tokens)
    query, key, value = into(tokens).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
    mixed = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
    attention = Attention(query, key, value, out, out(mixed.transpose(1, 2).flatten(2)))
    modality = (torch.arange(tokens.shape[1]) < tokens.shape[1] // 4).long().expand(tokens.shape[:2])
    return Context(causal=True, attention=attention, previous=Previous(tokens, before), token_ids=ids, modality=modality)
