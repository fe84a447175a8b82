"""Instability: do tokens that share an expert in one layer still share one in the next?"""

import torch
from torch import Tensor

from holdfast.metrics.accumulator import Accumulator
from holdfast.metrics.rows import kept
from holdfast.routing import Routing


class LayerInstability(Accumulator[float]):
    """mean_ij |Same_l[i,j] - Same_(l-1)[i,j]|, Same_l[i,j] = 1 if tokens i, j have the same first expert (ACMoE C.9).

    From the joint counts N_ab of the tokens with first expert a in layer l-1 and b in layer l, never T x T:
    (sum_a N_a.^2 + sum_b N_.b^2 - 2 sum_ab N_ab^2) / T^2. All tokens added form one set of pairs, also across batches.
    Tokens that took no expert are alike: they form a group of their own.
    """

    def update(self, previous: Routing, routing: Routing, token_mask: Tensor | None = None) -> None:
        """The same tokens in layer l-1 and in layer l."""
        if previous.experts.shape[0] != routing.experts.shape[0]:
            raise ValueError(
                f"{previous.experts.shape[0]} tokens in one layer and {routing.experts.shape[0]} in the next; "
                "instability needs the same tokens in both."
            )
        before, now = (kept(record.experts[:, 0], token_mask).to(routing.experts.device) for record in (previous, routing))
        groups = [record.gates.shape[-1] + 1 for record in (previous, routing)]  # the last group took no expert
        joint = torch.bincount(before * groups[1] + now, minlength=groups[0] * groups[1])
        self._add(joint=joint.view(groups), tokens=now.shape[0])

    def result(self) -> float:
        tokens = self._per("tokens")
        joint = self._sums["joint"]
        pairs = joint.sum(1).square().sum() + joint.sum(0).square().sum() - 2 * joint.square().sum()
        return float(pairs) / tokens**2
