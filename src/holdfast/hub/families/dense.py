"""The dense families: one row each, and how the weights of a feed-forward network become those of an expert.

A vision-language model has parts, and rows of the layers in each part:

    vision      the tower: its tokens are patches of images
    connector   the network between both: it maps the tower's width to that of the language model
    language    its tokens are those of `input_ids`, with image tokens in the places of images

A tower and a language model are dense families of their own (`DENSE_FAMILIES`, by the model types of their configs). A
connector has no attention, and the width of its output may differ from that of its input.
"""

from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from holdfast.layers import Experts
from holdfast.layers.experts import ACTIVATIONS, Activation

Part = Literal["vision", "connector", "language"]  # of a vision-language model
PARTS: tuple[Part, ...] = get_args(Part)  # in the order in which an image passes through them
OUR_ACTIVATIONS = {"gelu_pytorch_tanh": "gelu_tanh", "swish": "silu"}  # by transformers' names


@dataclass(frozen=True)
class DenseFamily:
    """The paths of a layer's feed-forward network, and how its weights become those of an expert.

    The module `place` is replaced by a `SparseLayer`, `bypassed` modules by the identity; `dropout` remains.
    """

    model_type: str
    place: str
    up: tuple[str, ...]  # stacked: gate first, where there is one
    down: str
    attention: str  # "": a connector, which has none
    projection: str
    gated: bool
    activation: str = "hidden_act"  # in the config
    dropout: str | None = None
    bypassed: tuple[str, ...] = ()
    windowed: bool = False
    activation_module: str | None = None  # in the layer, for an activation that the config does not name
    inner_dropout: str | None = None  # the module between the two linear maps
    zero_dropout: str | None = None  # in the config: a dropout between the linear maps that is not a module
    own_attention: bool = False  # it is not one of transformers' attention functions, or adds a bias: it is not captured
    causal: bool | None = None  # None: the attention says whether no token attends to a later one
    reads_token_ids: bool = True  # the layers' tokens are those of the model's input_ids
    packed: bool = False  # all images of a batch are one row of tokens (T,d)
    others: tuple["DenseFamily", ...] = ()  # rows of other layers of the family: of a decoder, or gated ones

    @property
    def rows(self) -> tuple["DenseFamily", ...]:
        """Return the row and those of other layers of the family."""
        return (self, *self.others)

    def is_causal(self, attention: Any) -> bool:
        """Whether no token attends to a later one."""
        return bool(getattr(attention, "is_causal", False)) if self.causal is None else self.causal


@dataclass(frozen=True)
class DenseLayer:
    """A transformer layer with a feed-forward network that `sparsify` can replace."""

    name: str  # of the module that is replaced
    layer: nn.Module
    family: DenseFamily  # the row that fits this layer
    config: Any  # of the model's part that the layer belongs to
    part: Part | None = None  # of a vision-language model

    @property
    def attention(self) -> Any:
        """Return the attention before the network; None in a connector."""
        return self.layer.get_submodule(self.family.attention) if self.family.attention else None

    @property
    def down(self) -> Any:
        return self.layer.get_submodule(self.family.down)

    @property
    def of_images(self) -> bool:
        """Whether its tokens are parts of images in a vision-language model."""
        return self.part in ("vision", "connector")

    @property
    def dim(self) -> int:
        """The width of the network's input."""
        return linear_shape(self.layer.get_submodule(self.family.up[0]))[1]


def paths(place: str, up: str, down: str, attention: str, projection: str, *, gated: bool = False) -> dict[str, Any]:
    """Return the entries of a row whose feed-forward network is the module `place`; `up` has one name or two."""
    return {
        "place": place,
        "up": tuple(f"{place}.{name}" for name in up.split()),
        "down": f"{place}.{down}",
        "attention": attention,
        "projection": f"{attention}.{projection}",
        "gated": gated,
    }


GATED = paths("mlp", "gate_proj up_proj", "down_proj", "self_attn", "o_proj", gated=True)
TOWER = paths("mlp", "fc1", "fc2", "self_attn", "out_proj")
_VIT = paths("mlp", "fc1", "fc2", "attention", "o_proj")
_GATED_VIT = paths("mlp", "gate_proj up_proj", "down_proj", "attention", "o_proj", gated=True)
_OLDER_VIT = {**_VIT, "attention": "attention.attention", "projection": "attention.output.dense"}  # in older transformers
_DISTILBERT: dict[str, Any] = {"activation": "activation", "dropout": "ffn.dropout"}
_MODERNBERT: dict[str, Any] = {"activation": "hidden_activation", "inner_dropout": "mlp.drop"}
_GPT: dict[str, Any] = {"activation": "activation_function", "dropout": "mlp.dropout"}
_OWN_CAUSAL: dict[str, Any] = {"own_attention": True, "causal": True}
_BERT: dict[str, Any] = {
    "place": "intermediate",
    "up": ("intermediate.dense",),
    "down": "output.dense",
    "attention": "attention.self",
    "projection": "attention.output.dense",
    "gated": False,
    "bypassed": ("output.dense",),
}
_MPNET = {**_BERT, "attention": "attention.attn", "projection": "attention.attn.o"}
_BLOOM: dict[str, Any] = paths("mlp", "dense_h_to_4h", "dense_4h_to_h", "self_attention", "dense")
_BLOOM_ACTIVATION: dict[str, Any] = {  # it is a module between the linear maps
    "place": "mlp.dense_h_to_4h",
    "activation_module": "mlp.gelu_impl",
    "bypassed": ("mlp.gelu_impl", "mlp.dense_4h_to_h"),
}
_IN_LAYER: dict[str, Any] = {  # the linear maps are modules of the layer itself
    "place": "fc1",
    "up": ("fc1",),
    "down": "fc2",
    "attention": "self_attn",
    "projection": "self_attn.out_proj",
    "gated": False,
    "activation": "activation_function",
    "bypassed": ("activation_fn", "fc2"),
}


def _t5(layer: int, *, gated: bool, others: tuple[DenseFamily, ...] = ()) -> DenseFamily:
    """Return the row of T5 layers whose feed-forward network is the last of two (encoder) or three modules."""
    place = f"layer.{layer}.DenseReluDense"
    return DenseFamily(
        "t5",
        **paths(place, "wi_0 wi_1" if gated else "wi", "wo", "layer.0.SelfAttention", "o", gated=gated),
        activation="dense_act_fn",
        inner_dropout=f"{place}.dropout",
        own_attention=True,
        reads_token_ids=False,
        others=others,
    )


def _alike(*model_types: str, **row: Any) -> list[DenseFamily]:
    """Return the rows of families with the same layers."""
    return [DenseFamily(model_type, **row) for model_type in model_types]


DENSE_FAMILIES = {
    family.model_type: family
    for family in (
        *_alike("llama", "qwen3", "mistral", "qwen2", "gemma", **GATED),
        *_alike("olmo2", "smollm3", "granite", "cohere", "stablelm", **GATED),
        *_alike("gemma2", "gemma3_text", **GATED, activation="hidden_activation"),
        DenseFamily("phi3", **paths("mlp", "gate_up_proj", "down_proj", "self_attn", "o_proj", gated=True)),
        DenseFamily("phi", **paths("mlp", "fc1", "fc2", "self_attn", "dense")),
        DenseFamily("gpt2", **paths("mlp", "c_fc", "c_proj", "attn", "c_proj"), **_GPT),
        DenseFamily("gpt_neox", **paths("mlp", "dense_h_to_4h", "dense_4h_to_h", "attention", "dense")),
        DenseFamily("gptj", **paths("mlp", "fc_in", "fc_out", "attn", "out_proj"), **_GPT, **_OWN_CAUSAL),
        DenseFamily("falcon", **_BLOOM, activation="activation", **_OWN_CAUSAL),
        DenseFamily("bloom", **{**_BLOOM, **_BLOOM_ACTIVATION}, **_OWN_CAUSAL),
        DenseFamily("opt", **_IN_LAYER),
        *_alike("bert", "roberta", "xlm-roberta", "electra", **_BERT),
        DenseFamily("deberta-v2", **_BERT, own_attention=True, causal=False),
        DenseFamily("mpnet", **_MPNET, own_attention=True, causal=False),
        DenseFamily("distilbert", **paths("ffn", "lin1", "lin2", "attention", "out_lin"), **_DISTILBERT),
        DenseFamily("modernbert", **paths("mlp", "Wi", "Wo", "attn", "Wo", gated=True), **_MODERNBERT),
        _t5(1, gated=False, others=(_t5(2, gated=False), _t5(1, gated=True), _t5(2, gated=True))),
        *_alike("bart", "whisper", **_IN_LAYER, zero_dropout="activation_dropout", reads_token_ids=False),
        DenseFamily(
            "wav2vec2",
            **paths("feed_forward", "intermediate_dense", "output_dense", "attention", "out_proj"),
            dropout="feed_forward.output_dropout",
            inner_dropout="feed_forward.intermediate_dropout",
            reads_token_ids=False,
        ),
        *_alike("vit", "deit", **_VIT),
        DenseFamily(
            "dinov2",
            **_VIT,
            others=(*_alike("dinov2", **_GATED_VIT, activation_module="mlp.act_fn"), *_alike("dinov2", **_OLDER_VIT)),
        ),
        DenseFamily("swin", **_VIT, windowed=True),
        DenseFamily("swinv2", **_BERT, windowed=True),
        *_alike("siglip", "siglip_text_model", "siglip_vision_model", **TOWER),
        *_alike("clip", "clip_text_model", "clip_vision_model", **TOWER),
    )
}


class DroppedActivation(nn.Module):
    """An activation with dropout after it, for families that drop units of the feed-forward network in training."""

    def __init__(self, activation: Activation, dropout: float) -> None:
        super().__init__()
        self.activation, self.dropout = activation, nn.Dropout(dropout)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.dropout(self.activation(hidden))


def without_dropout(activation: Activation) -> Activation:
    """Return the activation of experts, without the dropout that a family has after it."""
    return activation.activation if isinstance(activation, DroppedActivation) else activation


def new_experts(dense: DenseLayer, experts: int, hidden: int | None) -> Experts:
    """Return experts in the form of the dense network of a layer; `hidden` is their width, None: that of the network."""
    out, inner = linear_shape(dense.down)
    form = {"activation": _activation_of(dense), "gated": dense.family.gated, **device_and_dtype(dense.down.weight)}
    has_bias = getattr(dense.down, "bias", None) is not None
    return Experts(dense.dim, inner if hidden is None else hidden, experts, out=out, bias=has_bias, **form)


def _activation_of(dense: DenseLayer) -> str | Activation:
    """Return the activation of a layer: our name for it if there is a fused kernel, else the model's own function."""
    from transformers.activations import ACT2FN

    family = dense.family
    if family.activation_module is not None:
        return dense.layer.get_submodule(family.activation_module)
    name = getattr(dense.config, family.activation)
    name = OUR_ACTIVATIONS.get(name, name)
    inner: Any = None if family.inner_dropout is None else dense.layer.get_submodule(family.inner_dropout)
    if inner is not None and inner.p:
        return DroppedActivation(ACTIVATIONS.get(name) or ACT2FN[name], float(inner.p))
    return name if name in ACTIVATIONS else ACT2FN[name]  # type: ignore[no-any-return]


def linear_shape(linear: Any) -> tuple[int, int]:
    """Return (out, in) of a linear map; GPT-2's layers store their weight transposed."""
    from transformers.pytorch_utils import Conv1D

    out, inner = linear.weight.shape
    return (inner, out) if isinstance(linear, Conv1D) else (out, inner)


def device_and_dtype(weight: torch.Tensor, module: nn.Module | None = None) -> dict[str, Any]:
    """Return device and dtype of a weight; for one that accelerate has offloaded, the device that computes with it."""
    device = weight.device
    if device.type == "meta" and module is not None and hasattr(module, "_hf_hook"):
        device = torch.device(getattr(module._hf_hook, "execution_device", None) or "cpu")
    return {"device": device, "dtype": weight.dtype} if weight.is_floating_point() else {"device": device}


@torch.no_grad()
def dense_weights(dense: DenseLayer) -> dict[str, Tensor]:
    """Return the dense network's weights with the names and shapes of one expert."""
    from transformers.pytorch_utils import Conv1D

    family = dense.family
    up_name = "gate_up_proj" if family.gated else "up_proj"
    weights = {}
    for name, paths in ((up_name, family.up), ("down_proj", (family.down,))):
        linears: list[Any] = [dense.layer.get_submodule(path) for path in paths]
        matrices = [linear.weight.t() if isinstance(linear, Conv1D) else linear.weight for linear in linears]
        weights[name] = torch.cat([matrix.detach() for matrix in matrices])
        biases: list[Any] = [getattr(linear, "bias", None) for linear in linears]
        if biases[0] is not None:
            weights[f"{name}_bias"] = torch.cat([bias.detach() for bias in biases])
    return weights


def initial_std(config: Any) -> float:
    """Return the standard deviation of the model's initial weights."""
    return float(getattr(config, "initializer_range", None) or 0.02)


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
