"""Statements of the papers beside measurement, as a table, and the t-SNE of router inputs."""

from holdfast.report.audit_page import Table, number, share
from holdfast.report.plot_data import SYMBOLS, Plot, Trace, trace
from holdfast.report.stored_geometry import Clusters, Entropies, Geometry, GraphPrecision, Skipped, Slopes, Theory, Tsne

MOST_NAMED = 16  # experts in the legend of the t-SNE


def theory_table(theory: Theory) -> Table:
    """Return a row for each statement: what it says, and what was measured."""
    rows = {
        "Expert graph of a batch (Symphony, theorem 1)": _graph(theory.co_selection),
        "Entropy of shared gates (Mutual-Inform, proposition 1)": _entropy(theory.entropy),
        "Clusters of AC (ACMoE, lemmas 1 and 2, proposition 2)": _clusters(theory.clusters),
        "Slope of gate weights (survey, section 6.1)": _slopes(theory.slopes),
    }
    return Table(list(rows), [{"theory": said, "measured": found} for said, found in rows.values()])


def _graph(found: GraphPrecision | Skipped) -> tuple[str, str]:
    if isinstance(found, Skipped):
        return "", found.skipped
    last = len(found.noise) - 1
    return (
        f"An entry of one batch is within {number(found.half_width)} of its mean, with probability {1 - found.alpha:g}.",
        f"Noise of {found.noise[last]:g} of the norm moves entries by {number(found.mean[last])} on average and by "
        f"{number(found.largest[last])} at most; {share(found.beyond[last])} of them by more than that width.",
    )


def _entropy(found: Entropies | Skipped) -> tuple[str, str]:
    if isinstance(found, Skipped):
        return "", found.skipped
    return (
        f"Gates that the tokens of a sequence share by similarity have at most {number(found.bound)} nats.",
        f"{number(found.informed)} nats; {number(found.own)} nats before they are shared.",
    )


def _clusters(found: Clusters | Skipped) -> tuple[str, str]:
    if isinstance(found, Skipped):
        return "", found.skipped
    plain, scaled = found.plain, found.scaled
    return (
        f"With noise of {found.noise:g}, {share(plain.predicted)} of a cluster's tokens are nearer to another mean; "
        f"{share(scaled.predicted)} after AC scales features.",
        f"{share(plain.measured)}, and {share(scaled.measured)} after. Separation {number(plain.distance)} and "
        f"{number(scaled.distance)}, condition number {number(plain.condition)} and {number(scaled.condition)} (medians of "
        f"{found.clusters} clusters).",
    )


def _slopes(found: Slopes | Skipped) -> tuple[str, str]:
    if isinstance(found, Skipped):
        return "", found.skipped
    return (
        "Softmax: at most 0.5. Top-k: infinite at a tie. Smooth: finite everywhere.",
        f"Largest slope on the way through the nearest tie: softmax {number(found.softmax.largest)}, top-k "
        f"{'infinite' if found.top_k.largest is None else number(found.top_k.largest)} (weights jump by "
        f"{number(found.top_k.jump)}), smooth {number(found.smooth.largest)} with a strip of {found.strip:g}.",
    )


def tsne(geometry: Geometry) -> Plot:
    """Draw the t-SNE of router inputs, in the colours and marks of their first experts."""
    data: list[Trace] = []
    for layer in geometry.measured:
        found = layer.theory.tsne if layer.theory else None
        if not isinstance(found, Tsne):
            continue
        experts = sorted(set(found.experts), key=lambda each: (-found.experts.count(each), each))
        for expert in sorted(experts[:MOST_NAMED]) + experts[MOST_NAMED:]:
            places = [place for place, own in enumerate(found.experts) if own == expert]
            x, y = [found.x[place] for place in places], [found.y[place] for place in places]
            mark = {"size": 6, "symbol": SYMBOLS[(expert + expert // len(SYMBOLS)) % len(SYMBOLS)]}
            hover = f"expert {expert}<extra></extra>"
            name = {"name": f"expert {expert}"} if expert in experts[:MOST_NAMED] else {}
            own = str(layer.layer)
            data.append(
                trace(expert, x, y, layer=own, mode="markers", marker=mark, opacity=0.8, hovertemplate=hover, **name)
            )
    hidden = {"showticklabels": False, "showgrid": False, "zeroline": False}
    layout = {
        "xaxis": {**hidden, "title": {"text": "t-SNE"}},
        "yaxis": hidden,
        "height": 420,
        "legend": {"orientation": "h", "x": 0, "y": 1, "yanchor": "bottom"},
    }
    caption = (
        "Router inputs of the first batch, drawn by t-SNE so that neighbours stay neighbours, in the colour and mark of the "
        "expert with the largest score. Distances and directions between groups mean nothing."
    )
    return Plot("tsne", "Router inputs by expert", caption, data, layout)
