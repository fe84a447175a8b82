"""`holdfast routers`: the routers there are, and what each does with real text."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any

from tyro.conf import arg

from holdfast.cli.common import PluginFiles, show

if TYPE_CHECKING:
    from torch import Tensor

    from holdfast.routing import Context, Routing

LENGTH = 128  # words in a sequence
VOCABULARY = 2000
HEADS = 4
WARM_UP = 4  # batches through which routers that keep state see text before it counts


@dataclass(frozen=True)
class Routers:
    """List the routers, or route a batch of text through each and show what it did.

    Examples: `holdfast routers`, `holdfast routers --route`, `holdfast routers --route --names smoe xmoe+top-p --experts 32`
    """

    names: tuple[str, ...] = ()
    """Which routers, + joins names; all of them by default."""
    route: bool = False
    """Route a batch of the embedded text through each router, its weights untrained, and print a table."""
    experts: int = 16
    """How many experts to choose from."""
    k: int | None = None
    """Experts a token; by default each router's own."""
    dim: int = 128
    """Width of the tokens."""
    sequences: int = 32
    """How many sequences of 128 words to route."""
    seed: int = 0
    """Seed of the router weights and the word vectors."""
    plugins: Annotated[PluginFiles, arg(name="")] = field(default_factory=PluginFiles)

    def run(self) -> None:
        self.plugins.load()
        if self.route:
            self._print_routes()
        else:
            self._print_names()

    def _print_names(self) -> None:
        from rich.table import Table

        from holdfast.routing.presets import REGISTRY

        wanted = [preset for name in self.names for preset in REGISTRY.parse(name)] or list(REGISTRY)
        table = Table(title="Routers; + joins names that claim different slots")
        for column in ("name", "claims", "what it does", "from"):
            table.add_column(column)
        for preset in wanted:
            table.add_row(preset.name, ", ".join(preset.claims) or "nothing", preset.about, preset.paper)
        show(table)

    def _print_routes(self) -> None:
        from rich.console import Console
        from rich.progress import track
        from rich.table import Table

        from holdfast.routing import list_routers

        batches = embedded_tokens(WARM_UP + 1, self.sequences, self.dim, self.seed)
        table = Table(
            title=f"{self.sequences} x {LENGTH} words of Python's documentation through each router, weights untrained",
            caption="load sd: standard deviation of the experts' shares of the tokens, uniform is 0; "
            "sets moved: share of tokens that go to another set of experts; worst: the largest share of a token's weight "
            "that moves to other experts",
        )
        table.add_column("router", no_wrap=True)
        for column in (
            "experts a token",
            "load sd %",
            "idle",
            "sets moved by bf16 %",
            "worst, bf16 %",
            "sets moved by 1% noise %",
        ):
            table.add_column(column, justify="right")
        names, hidden = list(self.names or list_routers()), not sys.stderr.isatty()
        for name in track(names, "Routing", console=Console(stderr=True), transient=True, disable=hidden):
            table.add_row(name, *self._describe(name, batches))
        show(table)

    def _describe(self, name: str, batches: list[Tensor]) -> list[str]:
        """What the router `name` did with the last batch: one cell a column."""
        import torch

        from holdfast.routing.presets import REGISTRY

        torch.manual_seed(self.seed)
        options: dict[str, Any] = {"heads": HEADS} if "heads" in REGISTRY.options(name) else {}
        router = REGISTRY.build(name, dim=self.dim, experts=self.experts, k=self.k, **options)
        *earlier, tokens = batches
        noise = torch.randn_like(tokens)
        noise *= 0.01 * tokens.norm(dim=-1, keepdim=True) / noise.norm(dim=-1, keepdim=True)
        with torch.no_grad():
            for batch in earlier:
                router(batch, surroundings(batch, self.experts))
            router.eval()
            routing, rounded, noisy = (
                router(x, surroundings(x, self.experts)) for x in (tokens, tokens.bfloat16().float(), tokens + noise)
            )
        share = routing.chosen.float().mean(0)
        shift = (routing.dense_weights - rounded.dense_weights).abs().sum(-1) / 2
        worst = (shift / routing.weights.sum(-1).clamp_min(1e-30)).amax()

        def moved(other: Routing) -> str:
            return f"{100 * (routing.chosen != other.chosen).any(-1).float().mean():.2f}"

        return [
            f"{routing.used.sum(-1).float().mean():.2f}",
            f"{100 * (share / share.sum()).std(correction=0):.2f}",
            f"{int((share == 0).sum())}",
            moved(rounded),
            f"{100 * worst:.1f}",
            moved(noisy),
        ]


def embedded_tokens(batches: int, sequences: int, dim: int, seed: int) -> list[Tensor]:
    """Batches `(sequences, LENGTH, dim)` of unit-variance vectors: each word's random vector plus half of the one before."""
    import torch

    from holdfast.data import Vocabulary, python_topics

    if sequences < 1 or dim < HEADS or dim % HEADS:
        raise ValueError(f"{sequences} sequences of width {dim}: at least 1, and a width that is a multiple of {HEADS}.")
    text = "\n".join(python_topics().values())
    numbers = Vocabulary([text], VOCABULARY).encode(text)
    if batches * sequences * LENGTH > len(numbers):
        most = len(numbers) // (batches * LENGTH)
        raise ValueError(f"{sequences} sequences are more than the text holds; at most {most}.")
    numbers = numbers[: batches * sequences * LENGTH].view(batches, sequences, LENGTH)
    vectors = torch.randn(VOCABULARY, dim, generator=torch.Generator().manual_seed(seed))[numbers]
    before = vectors.roll(1, dims=2)
    before[:, :, 0] = 0
    return list(torch.nn.functional.layer_norm(vectors + before / 2, (dim,)))


def surroundings(tokens: Tensor, experts: int) -> Context:
    """What a model would show a router: a causal attention and a previous MoE layer, both with fixed random weights."""
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
    return Context(causal=True, attention=attention, previous=Previous(tokens, before))
