"""`holdfast routers`: the routers there are, and what each does with real text."""

from dataclasses import dataclass

from torch import Tensor

LENGTH = 128
VOCABULARY = 2000


@dataclass(frozen=True)
class Routers:
    """List the routers, or route a batch of text through each and show what it did.

    Examples: `holdfast routers`, `holdfast routers --route`, `holdfast routers --route --names smoe xmoe+top-p --experts 32`
    """

    names: tuple[str, ...] = ()
    """Which routers, + joins names; all of them by default."""
    route: bool = False
    """Route a batch of the embedded text through each router, untrained, and print a table."""
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

    def run(self) -> None:
        if self.route:
            self._print_routes()
        else:
            self._print_names()

    def _print_names(self) -> None:
        from rich.console import Console
        from rich.table import Table

        from holdfast.routing.presets import REGISTRY

        wanted = [preset for name in self.names for preset in REGISTRY.parse(name)] or list(REGISTRY)
        table = Table(title="Routers; + joins names that claim different slots")
        for column in ("name", "claims", "what it does", "from"):
            table.add_column(column)
        for preset in wanted:
            table.add_row(preset.name, ", ".join(preset.claims) or "nothing", preset.about, preset.paper)
        Console().print(table)

    def _print_routes(self) -> None:
        from rich.console import Console
        from rich.table import Table

        from holdfast.routing import routers

        tokens = embedded_tokens(self.sequences, self.dim, self.seed)
        table = Table(
            title=f"{self.sequences} x {LENGTH} words of Python's documentation through each router, untrained",
            caption="load sd: standard deviation of the experts' shares of the tokens, uniform is 0; "
            "last two: share of tokens that go to another set of experts",
        )
        table.add_column("router", no_wrap=True)
        for column in ("experts a token", "load sd %", "idle experts", "entropy, nats", "bf16 tokens %", "1% noise %"):
            table.add_column(column, justify="right")
        for name in self.names or routers():
            table.add_row(name, *self._describe(name, tokens))
        Console().print(table)

    def _describe(self, name: str, tokens: Tensor) -> list[str]:
        """What the router `name` did: one cell a column."""
        import torch

        from holdfast.routing import router as build

        torch.manual_seed(self.seed)
        router = build(name, dim=self.dim, experts=self.experts, k=self.k).eval()
        noise = torch.randn_like(tokens)
        noise *= 0.01 * tokens.norm(dim=-1, keepdim=True) / noise.norm(dim=-1, keepdim=True)
        with torch.no_grad():
            routing = router(tokens)
            rounded, noisy = router(tokens.bfloat16()), router(tokens + noise)
        share = routing.chosen.float().mean(0)
        gates = routing.gates / routing.gates.sum(-1, keepdim=True)
        entropy = torch.special.entr(gates).sum(-1).mean()

        def moved(other: Tensor) -> str:
            return f"{100 * (routing.chosen != other).any(-1).float().mean():.2f}"

        return [
            f"{routing.used.sum(-1).float().mean():.2f}",
            f"{100 * (share / share.sum()).std(correction=0):.2f}",
            f"{int((share == 0).sum())}",
            f"{entropy:.2f}",
            moved(rounded.chosen),
            moved(noisy.chosen),
        ]


def embedded_tokens(sequences: int, dim: int, seed: int) -> Tensor:
    """`(sequences, LENGTH, dim)` unit-variance vectors: each word's random vector plus half of the word's before it."""
    import torch

    from holdfast.data import Vocabulary, python_docs

    if sequences < 1 or dim < 1:
        raise ValueError(f"{sequences} sequences of width {dim}: both must be at least 1.")
    text = "\n".join(python_docs().values())
    numbers = Vocabulary([text], VOCABULARY).encode(text)
    if sequences * LENGTH > len(numbers):
        raise ValueError(f"{sequences} sequences are more than the text holds; at most {len(numbers) // LENGTH}.")
    numbers = numbers[: sequences * LENGTH].view(sequences, LENGTH)
    vectors = torch.randn(VOCABULARY, dim, generator=torch.Generator().manual_seed(seed))[numbers]
    before = vectors.roll(1, dims=1)
    before[:, 0] = 0
    return torch.nn.functional.layer_norm(vectors + before / 2, (dim,))
