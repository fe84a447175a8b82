"""Load: how evenly tokens are spread over experts."""

from dataclasses import dataclass

from torch import Tensor

from holdfast.metrics.accumulator import Accumulator
from holdfast.metrics.rows import only_real
from holdfast.routing import Routing


@dataclass(frozen=True)
class Load:
    percent: list[float]  # of the tokens, that chose each expert; the sum is 100 times the experts per token
    std: float  # of the percentages (ACMoE Table 6), 0 when even
    cv: float  # std / mean (survey 5.2), which does not depend on how many experts a token uses
    dead: list[int]  # experts that no token chose


class ExpertLoad(Accumulator[Load]):
    """c_e, how many tokens chose expert e, as percentages of the tokens; their standard deviation and CV; dead experts.

    Both take the population's standard deviation: the experts are all there are. Nobody chosen at all has CV 0.
    """

    def update(self, routing: Routing, token_mask: Tensor | None = None) -> None:
        chosen = only_real(routing, token_mask).chosen
        self._add(counts=chosen.sum(0), tokens=chosen.shape[0])

    def result(self) -> Load:
        tokens = self._per("tokens")
        percent = 100 * self._sums["counts"] / tokens
        std, mean = float(percent.std(correction=0)), float(percent.mean())
        dead = (percent == 0).nonzero().flatten().tolist()
        return Load(percent.tolist(), std, std / mean if mean > 0 else 0.0, dead)
