"""Scores that are a checkpoint's own: read from the family's gate, which keeps its weights and their names."""

from torch import Tensor, nn

from holdfast.kernels.quantised import as_float
from holdfast.routing.parts import LinearScore

UNREADABLE_GATE = "a router cannot score by them; leave gates out when quantising"


class GateScore(LinearScore):
    """logits = x W^T (+ b), with W and b those of a gate.

    Looked up when used, not copied: training updates the gate's own weights, `restore` has nothing to put back, and
    offloading may replace the tensors between forwards.
    """

    def __init__(self, gate: nn.Module, *, weight: str = "weight", bias: str | None = None) -> None:
        super().__init__()
        # Past nn.Module's bookkeeping: the gate holds the router, so it cannot be a part of it too.
        self.__dict__["gate"] = gate
        self.weight_name, self.bias_name = weight, bias
        self.experts, self.dim = self.matrix.shape

    @property
    def matrix(self) -> Tensor:
        # Not `get_parameter`: while an adapter (PEFT's) adds to it, it is none.
        return as_float(self.__dict__["gate"], self.weight_name, UNREADABLE_GATE)

    def finish(self, projected: Tensor) -> Tensor:
        if self.bias_name is None:
            return projected
        bias: Tensor = getattr(self.__dict__["gate"], self.bias_name)
        return projected + bias.float()
