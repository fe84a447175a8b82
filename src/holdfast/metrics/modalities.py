"""How images and texts share the experts of a layer that routes tokens of both.

c_me is how often tokens of modality m (image or text) select expert e, and p_me = c_me / sum_e c_me. Then

    overlap         sum_e min(p_image,e, p_text,e), from 0 (no expert in common) to 1 (both use experts alike)
    one modality    the share of experts with c_me > 0 for one modality only, among those that any token selected

The survey of robust MoE asks for consistent routing across modalities (5.5) and shared experts (3.5), and gives no formula.
The overlap of both loads is a reading of it that needs no pairs of an image token and a text token. What the survey calls
routing consistency in 5.2, the share of tokens that keep their experts under a perturbation, is in `RoutingChanges`.

An expert that one token of the other modality selects counts as serving both. So the share of one modality falls with the
number of tokens, and is comparable between routers on the same tokens only.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from holdfast.metrics.accumulator import Accumulator, only_real, real_rows
from holdfast.routing import Routing

MODALITIES = ("text", "image")  # by number, as routers read them


@dataclass(frozen=True)
class Modalities:
    overlap: float
    one_modality: float  # share of the experts that are used
    text: list[float]  # percent of text tokens that selected each expert
    image: list[float]  # the same of image tokens


class ModalityUse(Accumulator[Modalities]):
    """Count which experts serve image tokens, text tokens, or both."""

    def update(self, routing: Routing, is_image: Tensor, token_mask: Tensor | None = None) -> None:
        """Add a routing; `is_image (T,)` bool, in any shape, is True where a token is a part of an image."""
        if is_image.dtype != torch.bool or is_image.numel() != len(routing.experts):
            got = f"{is_image.dtype} of shape {tuple(is_image.shape)}"
            raise ValueError(f"is_image is {got}; expected {len(routing.experts)} bools, one for each token.")
        image = real_rows(is_image.reshape(-1).to(routing.experts.device), token_mask)
        chosen = only_real(routing, token_mask).chosen.double()
        parts = torch.stack([~image, image]).double()  # (2,T), in the order of MODALITIES
        self._add(counts=parts @ chosen, by_modality=parts.sum(1), tokens=len(image))

    def result(self) -> Modalities:
        self._per("tokens")
        counts, tokens = self._sums["counts"], self._sums["by_modality"]
        for name, number in zip(MODALITIES, tokens.tolist(), strict=True):
            if not number:
                raise ValueError(f"there are no {name} tokens; experts are compared between images and texts.")
        shares = counts / counts.sum(1, keepdim=True).clamp_min(1)
        used, both = (counts > 0).any(0).sum(), (counts > 0).all(0).sum()
        text, image = (100 * counts / tokens.unsqueeze(1)).tolist()
        return Modalities(float(shares.amin(0).sum()), float((used - both) / used.clamp_min(1)), text, image)
