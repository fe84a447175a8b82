"""The MoE families we know: one declarative row each, no branches on names anywhere else.

A family's MoE block holds a gate and experts. The gate returns router logits, weights (T,k) and expert indices (T,k).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from holdfast.routing import Routing
from holdfast.suggest import unknown


@dataclass(frozen=True)
class MoEFamily:
    """Where the router of a model type sits, and how it turns logits into the gates it selects from."""

    model_type: str
    gate: str  # the router's name in the MoE block
    gates: Literal["softmax", "sigmoid"] = "softmax"
    experts: str = "experts"
    since: str = "5.17"  # the first transformers whose routers look like this

    def blocks(self, model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
        """Name and gate of every MoE layer, in the order of the model."""
        for name, module in model.named_modules():
            children = dict(module.named_children())
            if self.gate in children and self.experts in children:
                yield f"{name}.{self.gate}".lstrip("."), children[self.gate]

    def record(self, output: tuple[Tensor, Tensor, Tensor]) -> Routing:
        """What a gate returned, as a `Routing`: float32, slots sorted by weight, ties to the lower index."""
        logits, weights, experts = output
        if not logits.is_floating_point():  # granitemoe up to 5.17 returns them the other way round
            logits, experts = experts, logits
        logits, weights = logits.detach().flatten(0, -2).float(), weights.detach().flatten(0, -2).float()
        experts = experts.detach().flatten(0, -2).long()
        by_index = experts.argsort(dim=-1)
        experts, weights = experts.gather(1, by_index), weights.gather(1, by_index)
        order = weights.argsort(dim=-1, descending=True, stable=True)
        gates = logits.softmax(-1) if self.gates == "softmax" else logits.sigmoid()
        return Routing(logits, gates, experts.gather(1, order), weights.gather(1, order))


FAMILIES = {
    family.model_type: family
    for family in (
        MoEFamily("mixtral", gate="gate"),
        MoEFamily("olmoe", gate="gate"),
        MoEFamily("qwen2_moe", gate="gate"),
        MoEFamily("qwen3_moe", gate="gate"),
        MoEFamily("deepseek_v3", gate="gate", gates="sigmoid"),
        MoEFamily("glm4_moe", gate="gate", gates="sigmoid"),
        MoEFamily("gpt_oss", gate="router"),
        MoEFamily("phimoe", gate="router"),
        MoEFamily("granitemoe", gate="router"),
    )
}


def family_of(model: nn.Module) -> MoEFamily:
    """The row for a Hugging Face model; a sentence about what is missing where there is none."""
    model_type = getattr(getattr(model, "config", None), "model_type", None)
    if model_type is None:
        raise ValueError(
            f"{type(model).__name__} is no Hugging Face model (it has no config.model_type) and holds no Router."
        )
    if model_type not in FAMILIES:
        raise ValueError(f"{unknown('MoE family', model_type, FAMILIES)} A new one is a row in holdfast/hub/families.py.")
    family = FAMILIES[model_type]
    _check_version(family)
    return family


def _check_version(family: MoEFamily) -> None:
    import transformers

    found = [int(part) for part in transformers.__version__.split(".")[:2]]
    needed = [int(part) for part in family.since.split(".")[:2]]
    if found < needed:
        raise ValueError(
            f"{family.model_type} needs transformers {family.since} or later; {transformers.__version__} is here."
        )


def padding_of(mask: object, sequences: int, length: int, start: int | None = None) -> Tensor | None:
    """(B,N) bool, True where a token is real, from whatever a model was given as its attention mask; None if all are.

    A 2-D mask may be longer than the tokens at hand: the earlier ones are in the cache. Of a 4-D mask the last query's row
    tells which tokens are seen, `start` where those at hand begin in it. A dict holds a mask for each kind of attention.
    """
    if isinstance(mask, dict):
        mask = next((value for value in mask.values() if isinstance(value, Tensor)), None)
    if not isinstance(mask, Tensor):
        return None
    if mask.dim() == 2:
        real = mask[:, -length:] != 0
    elif mask.dim() == 4:
        row = mask[:, 0, -1]
        allowed = row if row.dtype == torch.bool else row > torch.finfo(row.dtype).min / 2
        start = allowed.shape[-1] - length if start is None else start
        real = allowed[:, start : start + length]
    else:
        raise ValueError(f"the attention mask has {mask.dim()} dimensions; expected (B, N) or (B, 1, N, M).")
    return real.expand(sequences, length)
