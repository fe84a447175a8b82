"""Entropy of the gates: how undecided a router is."""

import torch
from torch import Tensor

from holdfast.metrics.accumulator import Accumulator
from holdfast.metrics.rows import only_real
from holdfast.routing import Routing
from holdfast.routing.parts import shares


class GateEntropy(Accumulator[float]):
    """mean_t -sum_e g_te log g_te in nats, from 0 to log E, g the gates that selection read over their sum.

    High entropy makes routes fluctuate (Mutual-Inform, section 3.3). A token whose gates are all 0 has entropy 0.
    """

    def update(self, routing: Routing, token_mask: Tensor | None = None) -> None:
        gates = shares(only_real(routing, token_mask).gates.double())
        self._add(entropy=torch.special.entr(gates).sum(), tokens=gates.shape[0])

    def result(self) -> float:
        return self._mean("entropy")

    def ratio(self, baseline: "GateEntropy") -> float:
        """Entropy over that of a baseline's same layer (Mutual-Inform, Figure 2): below 1 is more decided."""
        reference = baseline.result()
        if reference == 0:
            raise ValueError("the baseline's gates have entropy 0; there is no ratio to it.")
        return self.result() / reference
