"""The plots of an audit about the geometry of routing: tokens near ties by layer, and one slice through token space."""

from holdfast.report.plot_data import Plot, Trace, curve_of, layer_axis
from holdfast.report.slice_plots import cells_caption, slice_plot
from holdfast.report.stored_audit import Audit, Boundaries

NEAR = 0.01  # of a token's norm
EXPERTS = {1: "two experts tie (order 1)", 2: "three experts tie (order 2)"}


def near_ties(audit: Audit) -> Plot:
    """Draw the share of tokens near ties of each order, by layer."""
    found: dict[int, list[tuple[int, float]]] = {}
    tokens = 0
    for layer in audit.layers:
        if isinstance(layer.boundaries, Boundaries):
            widths, tokens = layer.boundaries.widths, max(tokens, layer.boundaries.tokens)
            place = min(range(len(widths)), key=lambda each: abs(widths[each] - NEAR))
            for near in layer.boundaries.orders:
                found.setdefault(near.order, []).append((layer.layer, 100 * near.shares[place]))
    data: list[Trace] = []
    for number, (order, shares) in enumerate(found.items()):
        name = EXPERTS.get(order, f"order {order}")
        hover = f"{name}, layer %{{x}}: %{{y:.3g}}% of the tokens<extra></extra>"
        data.append(curve_of(number, None, [layer for layer, _ in shares], [y for _, y in shares], hover, name=name))
    layout = {
        "xaxis": layer_axis(1 + max(layer.layer for layer in audit.layers)),
        "yaxis": {"title": {"text": "% of the tokens"}, "rangemode": "tozero"},
        "legend": {"orientation": "h", "x": 0, "y": 1, "yanchor": "bottom"},
    }
    caption = (
        f"The share of tokens within {NEAR:g} of their norm of a place where experts tie at the threshold, so that one may "
        f"replace the other there ({tokens} tokens of the first batch). `holdfast geometry` measures more of this."
    )
    return Plot("near-ties", "Tokens near ties", caption, data, layout)


def boundary_slice(audit: Audit) -> Plot:
    """Draw the slice of the layer that has one."""
    found = [
        (layer.layer, layer.boundaries.slice)
        for layer in audit.layers
        if isinstance(layer.boundaries, Boundaries) and layer.boundaries.slice is not None
    ]
    title = f"A slice through layer {found[0][0]}" if found else "A slice"
    caption = (
        "A plane through the router's input of one token and its nearest points on two boundaries, in the layer with the "
        "most tokens near ties."
    )
    slices = [(None, each) for _, each in found[:1]]
    return slice_plot("slice", slices, 0, title, f"{caption} {cells_caption(slices)}")
