"""Symphony's overhead as its paper counts it (SymphonySMoE, appendix F.1), beside what this library runs and holds.

L MoE layers, M experts, k of them chosen, N tokens of one sequence. The paper counts

    memory     L M^2 numbers of 4 bytes at inference, L (M^2 + N C(k,2)) in training: the graph, and a list of the pairs of
               experts that each token chose, of all layers at once
    compute    L N M^2 at inference, L N (M^2 + C(k,2)) in training: a multiply-add as 1, no backward
    units      2^20 bytes as an MB, and 2^30 operations as a G

Ours keeps no list: co-selections are summed into a second M x M matrix, staged until the next step, which is a buffer at
inference too. A multiply-add counts 2, counting is a product of 0/1 matrices over all M^2 pairs, and the mix has a backward.
"""

from dataclasses import dataclass
from math import comb

NUMBER = 4
PENDING = 1  # a flag, one byte a layer


@dataclass(frozen=True)
class Overhead:
    """Bytes and operations of all layers for one sequence."""

    inference_bytes: int
    training_bytes: int
    inference_operations: int
    training_operations: int


def symphony_by_the_paper(*, layers: int, experts: int, k: int, tokens: int) -> Overhead:
    graph, pairs = experts**2, comb(k, 2)
    return Overhead(
        inference_bytes=layers * graph * NUMBER,
        training_bytes=layers * (graph + tokens * pairs) * NUMBER,
        inference_operations=layers * tokens * graph,
        training_operations=layers * tokens * (graph + pairs),
    )


def symphony_here(*, layers: int, experts: int, tokens: int) -> Overhead:
    """State and matrix products of this library, for the same layers and tokens; whatever k is."""
    graph = experts**2
    state = layers * (2 * graph * NUMBER + PENDING)
    mix = 2 * layers * tokens * graph
    return Overhead(
        inference_bytes=state,
        training_bytes=state,
        inference_operations=mix,
        training_operations=3 * mix,  # the mix, the counts, and the mix's backward: the graph has no gradient
    )
