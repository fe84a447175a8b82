"""A `Routing` as a short table, for `print` and for notebooks: its first tokens with their experts and weights."""

from holdfast.report.page_shell import decimal, percent
from holdfast.report.tables import Table
from holdfast.routing.records import Routing

SHOWN = 8  # tokens


def routing_table(routing: Routing) -> Table:
    """Return the experts and weights of the first tokens; the note has the numbers of all tokens."""
    tokens, experts = routing.gates.shape
    first = zip(routing.experts[:SHOWN].tolist(), routing.weights[:SHOWN].tolist(), strict=True)
    rows = []
    for place, slots in enumerate(first):
        used = [pair for pair in zip(*slots, strict=True) if pair[0] < experts]
        chosen, weights = (", ".join(parts) for parts in ([str(one) for one, _ in used], [f"{one:.3f}" for _, one in used]))
        rows.append({"token": place, "experts": chosen, "weights": weights})
    note = f"The first {len(rows)} of {tokens:,} tokens."
    if tokens:
        load = routing.chosen.float().mean(0)
        dead = int((load == 0).sum())
        note += (
            f" {decimal(float(load.sum()))} experts per token; an expert gets {percent(float(load.min()))} to "
            f"{percent(float(load.max()))} of the tokens, {dead} get none."
        )
    return Table.of(f"Routing: {tokens:,} tokens, {experts} experts, {routing.experts.shape[-1]} slots", rows, note)
