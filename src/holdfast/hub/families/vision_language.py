"""Vision-language models: where their parts are, and the rows of the layers in each part.

    vision      the tower: its tokens are patches of images
    connector   the network between both: it maps the tower's width to that of the language model
    language    its tokens are those of `input_ids`, with image tokens in the places of images

A tower and a language model are dense families of their own (`DENSE_FAMILIES`, by the model types of their configs). A
connector has no attention, and the width of its output may differ from that of its input.
"""

from dataclasses import dataclass
from typing import Any

from holdfast.hub.families.dense import DENSE_FAMILIES, GATED, TOWER, DenseFamily, paths


@dataclass(frozen=True)
class VisionLanguageFamily:
    """The paths of the parts of a vision-language model, in its base model."""

    model_type: str
    vision: str
    language: str
    connector: DenseFamily | None  # its paths are those of the base model; None: it has no hidden layer

    def layers_read(self, config: Any, count: int) -> int:
        """Return after how many of the tower's `count` layers the language model reads: the others change no output."""
        chosen = getattr(config, "vision_feature_layer", -1)
        numbers = [chosen] if isinstance(chosen, int) else list(chosen)
        # The states before the first layer have the index 0.
        return max(number if number >= 0 else count + 1 + number for number in numbers)


def connector(place: str, up: str, down: str, **more: Any) -> DenseFamily:
    """Return the row of a connector of two linear maps, which are at the paths `up` and `down` in the module `place`."""
    own: dict[str, Any] = {"place": place, "up": (f"{place}.{up}",), "down": f"{place}.{down}", "gated": False}
    return DenseFamily("connector", **own, attention="", projection="", reads_token_ids=False, causal=False, **more)


VISION_LANGUAGE_FAMILIES = {
    family.model_type: family
    for family in (
        VisionLanguageFamily(
            "llava",
            vision="vision_tower",
            language="language_model",
            connector=connector("multi_modal_projector", "linear_1", "linear_2", activation="projector_hidden_act"),
        ),
        VisionLanguageFamily(
            "qwen2_5_vl",
            vision="visual.blocks",
            language="language_model",
            connector=connector("visual.merger.mlp", "0", "2", activation_module="visual.merger.mlp.1", packed=True),
        ),
        VisionLanguageFamily("smolvlm", vision="vision_model", language="text_model", connector=None),
    )
}

# Rows of parts that are not models of their own, by the model types of their configs.
_ONLY_PARTS = {
    "qwen2_5_vl_vision": DenseFamily(
        "qwen2_5_vl_vision", **paths("mlp", "gate_proj up_proj", "down_proj", "attn", "proj", gated=True), packed=True
    ),
    "qwen2_5_vl_text": DenseFamily("qwen2_5_vl_text", **GATED),
    "smolvlm_vision": DenseFamily("smolvlm_vision", **TOWER),
}


def rows_of_part(model_type: str) -> tuple[DenseFamily, ...]:
    """Return the rows of a tower or a language model; none if Holdfast does not know its feed-forward networks."""
    family = _ONLY_PARTS.get(model_type) or DENSE_FAMILIES.get(model_type)
    return () if family is None else family.rows
