"""What an audit says about the geometry of routing, from some of its tokens: shares near ties, and one slice.

`holdfast.measure_geometry` measures all tokens, and more about them.
"""

from typing import Any

import torch

from holdfast.auditing.forwards import Observation
from holdfast.auditing.model_and_data import AuditedModel
from holdfast.auditing.token_geometry import LayerTokens, slice_around
from holdfast.geometry import nearest_ties

ORDERS = (1, 2)
WIDTHS = (0.001, 0.003, 0.01, 0.03, 0.1)  # in shares of a token's norm
MOST = 256  # tokens of a layer, evenly spaced over the first batch


def near_boundaries(audited: AuditedModel, observed: Observation) -> list[dict[str, Any]]:
    """Return for each layer the share of tokens near ties of two and of three experts, or the reason why it has none.

    The layer with the most tokens near ties of two experts has a slice as well; `slice.token` is its row in the batch.
    """
    found: list[dict[str, Any]] = []
    known: dict[int, LayerTokens] = {}
    for layer in range(len(audited.moe_layers)):
        try:
            tokens = LayerTokens.of(audited, layer, observed)
        except ValueError as reason:  # its ties are not flats
            found.append({"skipped": str(reason)})
            continue
        if tokens.k == tokens.experts:
            found.append({"skipped": "every token uses every expert."})
            continue
        known[layer] = tokens
        found.append(_shares(tokens))
    if known:
        worst = max(known, key=lambda layer: (found[layer]["orders"][0]["shares"][2], -layer))
        found[worst]["slice"] = _slice(known[worst])
    return found


def _shares(tokens: LayerTokens) -> dict[str, Any]:
    count = len(tokens.tokens)
    chosen = torch.arange(count) if count <= MOST else torch.arange(MOST) * count // MOST
    chosen = chosen.to(tokens.tokens.device)
    parts, exact = [], True
    for rows, order in tokens.groups():
        rows = rows[torch.isin(rows, chosen)]
        if len(rows):
            ties = nearest_ties(order, tokens.tokens[rows], tokens.k, ORDERS)
            parts.append(ties.distances / tokens.lengths[rows].unsqueeze(1))
            exact = exact and bool(ties.exact.all())
    distances = torch.cat(parts)
    shares = {
        m: [float((distances[:, place] <= width).double().mean()) for width in WIDTHS] for place, m in enumerate(ORDERS)
    }
    orders = [{"order": order, "shares": each} for order, each in shares.items()]
    return {"tokens": len(distances), "widths": list(WIDTHS), "exact": exact, "orders": orders}


def _slice(tokens: LayerTokens) -> dict[str, Any] | None:
    """Return a slice around the token whose distance to its nearest boundary is the median, or None."""
    try:
        relative = tokens.flips().distances / tokens.lengths
        central = int((relative - relative.median()).abs().argmin())
        found = slice_around(tokens, central)
    except ValueError:
        return None
    for mark in found["tokens"]:
        mark |= {"x": mark["x"] / found["unit"], "y": mark["y"] / found["unit"], "text": None}
    return {**found, "row": int(tokens.rows[central])}
