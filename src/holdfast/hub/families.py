"""The model families that Holdfast supports: one declarative row each, and no branches on family names anywhere else.

Paths are relative to a transformer layer: a module that contains an attention and, after it, a feed-forward network. The
block of an MoE family contains a gate and experts; the gate returns router logits, weights (T,k) and expert indices (T,k).

Each MoE family has a rule for its weights. Those that are not a softmax over the selected experts come first.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from holdfast.errors import unknown_name
from holdfast.kernels.select import top
from holdfast.layers import Experts
from holdfast.layers.experts import ACTIVATIONS, Activation
from holdfast.routing import Routing
from holdfast.routing.conditions import HIGHEST_OF_GROUP, keep_best, keep_best_in_groups
from holdfast.routing.declarations import SIGMOID, Conditions, NoCertificate
from holdfast.routing.parts import normalise
from holdfast.routing.rules import Rule, Scores
from holdfast.routing.selection import Softmax, faded_gates

OUR_ACTIVATIONS = {"gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "swish": "silu"}  # by transformers' names


class GroupedSigmoid(Rule):
    """DeepSeek-V3: gates are sigmoids; the k largest gates plus a correction bias, within the best groups of experts.

    Groups are selected by a top-k of their own: `smooth` makes the selection within groups continuous, not that of groups.
    """

    gate = SIGMOID
    ordered = False  # ranked with the bias, weighted without
    strip = 0.02  # levels are gates, between 0 and 1

    def __init__(self, gate: Any) -> None:
        self.owner = gate  # the bias is its buffer, looked up at every use because offloading replaces it
        self.groups, self.groups_kept = int(gate.num_group), int(gate.topk_group)
        self.renormalise = bool(gate.norm_topk_prob)

    @property
    def bias(self) -> Tensor:
        buffer: Tensor = self.owner.get_buffer("e_score_correction_bias")
        return buffer

    def ranks(self, scores: Scores) -> Tensor:
        choice = scores.gates + self.bias.float()
        if self.groups_kept >= self.groups:
            return choice
        grouped = choice.unflatten(-1, (self.groups, -1))
        worth = grouped.topk(min(HIGHEST_OF_GROUP, grouped.shape[-1]), dim=-1).values.sum(-1)
        kept = torch.zeros_like(worth, dtype=torch.bool).scatter(-1, top(worth, self.groups_kept), True)
        return grouped.where(kept.unsqueeze(-1), -torch.inf).flatten(-2)

    def levels(self, scores: Scores) -> Tensor:
        return self.ranks(scores)

    def weigh(self, scores: Scores, experts: Tensor, in_use: Tensor, fade: Tensor | None, k: int) -> Tensor:
        gates = faded_gates(scores, experts, in_use, fade)
        return normalise(gates) if self.renormalise else gates

    def conditions(self, scores: Scores, k: int) -> Conditions | None:
        bias = self.bias.detach().to(scores.gates)
        keys = scores.gates + bias
        if self.groups_kept >= self.groups:
            return keep_best(keys, k, "gates", bias)
        in_groups = self.groups_kept * (keys.shape[-1] // self.groups)
        if k > in_groups:
            raise NoCertificate(
                f"no certificate is known for {self.name}: it selects {k} experts, and its groups have {in_groups}"
            )
        return keep_best_in_groups(keys, k, self.groups, self.groups_kept, "gates", bias)


class SparseMixer(Rule):
    """Phi-MoE in evaluation: an expert's weight is its softmax share among the experts close to it and not yet selected.

    "Close" is a logit within 2 * tolerance, relative. Weights are near 1 each and need not sum to 1. In training the family
    samples; a rerouted model does not.
    """

    ordered = False

    def __init__(self, tolerance: float) -> None:
        self.tolerance = tolerance  # relative, as in the family: a shift of all logits changes the weights

    def levels(self, scores: Scores) -> Tensor:
        if not scores.informed:
            return scores.logits
        assert scores.raw is not None  # the logarithm of informed gates, shifted back to the scale of the logits
        return scores.logits + torch.logsumexp(scores.raw, dim=-1, keepdim=True)

    def weigh(self, scores: Scores, experts: Tensor, in_use: Tensor, fade: Tensor | None, k: int) -> Tensor:
        levels = self.levels(scores).gather(-1, experts)
        left, weights = self.levels(scores), []
        for slot in range(k):
            best = levels[..., slot : slot + 1]
            near = ((best - left) / left.abs().maximum(best)).detach() <= 2 * self.tolerance
            # Not -inf: of an unused slot, which reads expert 0, nothing may be near, and the gradient would be NaN.
            close = left.where(near, torch.finfo(left.dtype).min)
            weights.append(torch.softmax(close, dim=-1).gather(-1, experts[..., slot : slot + 1]))
            left = left.scatter(-1, experts[..., slot : slot + 1], -torch.inf)
        # An expert in a strip below the k-th is weighted as if it were the k-th.
        strip = weights[-1] * (levels - levels[..., k - 1 : k]).exp()
        chosen = torch.cat([*weights, strip[..., k:]], dim=-1)
        chosen = chosen if fade is None else chosen * fade.exp()
        return chosen.where(in_use, 0.0)

    def conditions(self, scores: Scores, k: int) -> Conditions | None:
        return keep_best(scores.key, k, scores.compares)


IMAGE_TOKENS = ("image_token_id", "image_token_index", "video_token_id", "video_token_index")  # entries of a config
Family = TypeVar("Family", "MoEFamily", "DenseFamily")


def _renormalised(gate: nn.Module) -> Rule:
    return Softmax(renormalise=True)


def _as_configured(gate: nn.Module) -> Rule:
    return Softmax(renormalise=bool(gate.norm_topk_prob))


def _sparse_mixer(gate: Any) -> Rule:
    return SparseMixer(float(gate.router_jitter_noise))


@dataclass(frozen=True)
class MoEFamily:
    """The paths of an MoE layer's modules, and the rule by which its gate weights experts."""

    model_type: str
    gate: str  # in the block
    rule: Callable[[Any], Rule]
    block: str = "mlp"
    experts: str = "experts"  # in the block
    weight: str = "weight"  # of the gate
    bias: str | None = None
    scale: str | None = None  # the gate's attribute that weights are multiplied by
    attention: str = "self_attn"
    projection: str = "self_attn.o_proj"
    recurrent: str | None = None  # the module in the place of attention in some layers (linear attention, Mamba)
    since: str = "5.17"  # the first transformers with this layout
    usual_order_since: str = "5.17"  # its gate returns (logits, weights, indices); in older versions the reverse

    @property
    def usual_order(self) -> bool:
        return _installed() >= _version(self.usual_order_since)


@dataclass(frozen=True)
class DenseFamily:
    """The paths of a layer's feed-forward network, and how its weights become those of an expert.

    The module `place` is replaced by a `SparseLayer`, `bypassed` modules by the identity; `dropout` remains.
    """

    model_type: str
    place: str
    up: tuple[str, ...]  # stacked: gate first, where there is one
    down: str
    attention: str
    projection: str
    gated: bool
    activation: str = "hidden_act"  # in the config
    dropout: str | None = None
    bypassed: tuple[str, ...] = ()
    windowed: bool = False
    since: str = "5.17"


MOE_FAMILIES = {
    family.model_type: family
    for family in (
        MoEFamily("mixtral", gate="gate", rule=_renormalised),
        MoEFamily("olmoe", gate="gate", rule=_as_configured),
        MoEFamily("qwen2_moe", gate="gate", rule=_as_configured),
        MoEFamily("qwen3_moe", gate="gate", rule=_as_configured),
        MoEFamily("deepseek_v3", gate="gate", rule=GroupedSigmoid, scale="routed_scaling_factor"),
        MoEFamily("glm4_moe", gate="gate", rule=GroupedSigmoid, scale="routed_scaling_factor"),
        MoEFamily("gpt_oss", gate="router", rule=_renormalised, bias="bias"),
        MoEFamily("phimoe", gate="router", rule=_sparse_mixer),
        MoEFamily("granitemoe", gate="router", rule=_renormalised, block="block_sparse_moe", usual_order_since="5.18"),
        MoEFamily("qwen3_next", gate="gate", rule=_as_configured, recurrent="linear_attn"),
        MoEFamily("qwen3_5_moe_text", gate="gate", rule=_renormalised, recurrent="linear_attn"),
        MoEFamily(
            "granitemoehybrid",
            gate="router",
            rule=_renormalised,
            block="block_sparse_moe",
            recurrent="mamba",
            usual_order_since="5.18",
        ),
    )
}

_GATED = ("mlp.gate_proj", "mlp.up_proj")
_ENCODER: dict[str, Any] = {"place": "mlp", "up": ("mlp.fc1",), "down": "mlp.fc2", "gated": False}

DENSE_FAMILIES = {
    family.model_type: family
    for family in (
        DenseFamily("llama", "mlp", _GATED, "mlp.down_proj", "self_attn", "self_attn.o_proj", gated=True),
        DenseFamily("qwen3", "mlp", _GATED, "mlp.down_proj", "self_attn", "self_attn.o_proj", gated=True),
        DenseFamily("llava", "mlp", _GATED, "mlp.down_proj", "self_attn", "self_attn.o_proj", gated=True),  # with a Llama
        DenseFamily("phi3", "mlp", ("mlp.gate_up_proj",), "mlp.down_proj", "self_attn", "self_attn.o_proj", gated=True),
        DenseFamily(
            "gpt2", "mlp", ("mlp.c_fc",), "mlp.c_proj", "attn", "attn.c_proj", False, "activation_function", "mlp.dropout"
        ),
        DenseFamily(
            "bert",
            "intermediate",
            ("intermediate.dense",),
            "output.dense",
            "attention.self",
            "attention.output.dense",
            gated=False,
            bypassed=("output.dense",),
        ),
        DenseFamily("vit", attention="attention", projection="attention.o_proj", **_ENCODER),
        DenseFamily("swin", attention="attention", projection="attention.o_proj", windowed=True, **_ENCODER),
        DenseFamily("siglip", attention="self_attn", projection="self_attn.out_proj", **_ENCODER),
        DenseFamily("siglip_text_model", attention="self_attn", projection="self_attn.out_proj", **_ENCODER),
        DenseFamily("siglip_vision_model", attention="self_attn", projection="self_attn.out_proj", **_ENCODER),
    )
}


def layers_of(family: MoEFamily | DenseFamily, model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield name and module of every transformer layer that has the family's modules, in the order of the model."""
    if isinstance(family, MoEFamily):
        wanted = [f"{family.block}.{family.gate}", f"{family.block}.{family.experts}"]
    else:
        wanted = [family.projection, *family.up, family.down]
    for name, module in model.named_modules():
        if mixer_of(family, module) is not None and all(find_submodule(module, path) is not None for path in wanted):
            yield name, module


def mixer_of(family: MoEFamily | DenseFamily, layer: nn.Module) -> str | None:
    """Return the path of a layer's attention, or of the recurrent module in its place; None if it has neither."""
    paths = [family.attention]
    if isinstance(family, MoEFamily) and family.recurrent is not None:
        paths.append(family.recurrent)
    return next((path for path in paths if find_submodule(layer, path) is not None), None)


def find_submodule(module: nn.Module, path: str) -> nn.Module | None:
    """Return the submodule at `path`; None if there is none."""
    current: nn.Module | None = module
    for step in path.split("."):
        current = None if current is None else current._modules.get(step)
    return current


def moe_family(model: nn.Module) -> MoEFamily:
    """Return the row of an MoE model's family. Raise ValueError with advice if there is none."""
    return _row(model, MOE_FAMILIES, "MoE family", DENSE_FAMILIES, "Make a dense model an MoE with holdfast.sparsify.")


def dense_family(model: nn.Module) -> DenseFamily:
    """Return the row of a dense model's family. Raise ValueError with advice if there is none."""
    return _row(model, DENSE_FAMILIES, "dense family", MOE_FAMILIES, "Change the routers of an MoE with holdfast.reroute.")


def _row(model: nn.Module, table: Mapping[str, Family], kind: str, others: Mapping[str, Any], instead: str) -> Family:
    model_type = _model_type(model)
    if model_type not in table:
        hint = instead if model_type in others else "To support a new one, add a row to holdfast/hub/families.py."
        raise ValueError(f"{unknown_name(kind, model_type, table)} {hint}")
    family = table[model_type]
    if _installed() < _version(family.since):
        raise ValueError(f"{model_type} needs transformers {family.since} or later; the installed one is older.")
    return family


def routing_from_gate(output: tuple[Tensor, Tensor, Tensor], rule: Rule) -> Routing:
    """Return the output of a family's gate as a `Routing`: float32, slots sorted by weight, ties by the lower index."""
    logits, weights, experts = output if output[0].is_floating_point() else output[::-1]
    logits, weights = logits.flatten(0, -2).float(), weights.flatten(0, -2).float()
    experts = experts.flatten(0, -2).long()
    by_index = experts.argsort(dim=-1)
    experts, weights = experts.gather(1, by_index), weights.gather(1, by_index)
    order = weights.argsort(dim=-1, descending=True, stable=True)
    return Routing(logits, rule.gate(logits), experts.gather(1, order), weights.gather(1, order))


def text_config(model: Any) -> Any:
    """Return the config of the model's text part, which is the config itself in most models."""
    config = model.config
    return config.get_text_config() if hasattr(config, "get_text_config") else config


def image_tokens(model: Any) -> list[int]:
    """Return the token ids in whose place a vision and language model puts the parts of an image or a video."""
    found = (getattr(model.config, name, None) for name in IMAGE_TOKENS)
    return sorted({token for token in found if isinstance(token, int) and not isinstance(token, bool)})


def modality_of(ids: Tensor | None, image_tokens: list[int]) -> Tensor | None:
    """Return (B,N): 1 for token `ids (B,N)` that stand for a part of an image, 0 for text; None if that is not known."""
    if ids is None or not image_tokens:
        return None
    return torch.stack([ids == token for token in image_tokens]).any(0).long()


def as_token_ids(given: Any) -> Tensor | None:
    """Return a model's first argument if it is token ids (B,N); None if it is pixels or embeddings."""
    return given if isinstance(given, Tensor) and given.dim() == 2 and not given.is_floating_point() else None


def detached_routing(routing: Routing) -> Routing:
    """Return the routing without its autograd graph and its losses."""
    return routing.map_tokens(Tensor.detach)


def _model_type(model: nn.Module) -> str:
    model_type = getattr(getattr(model, "config", None), "model_type", None)
    if model_type is None:
        raise ValueError(
            f"{type(model).__name__} is not a Hugging Face model (it has no config.model_type) and contains no Router."
        )
    return str(model_type)


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(".")[:2])


def _installed() -> tuple[int, ...]:
    import transformers

    return _version(transformers.__version__)


def new_experts(family: DenseFamily, layer: nn.Module, experts: int, hidden: int | None) -> Experts:
    """Return experts in the form of the dense network of `layer`; `hidden` is their width, None: that of the network."""
    down: Any = layer.get_submodule(family.down)
    dim, inner = linear_shape(down)
    return Experts(
        dim,
        hidden or inner,
        experts,
        activation=activation_of(layer.get_submodule(family.attention).config, family),
        gated=family.gated,
        bias=getattr(down, "bias", None) is not None,
        **device_and_dtype(down.weight),
    )


def activation_of(config: Any, family: DenseFamily) -> str | Activation:
    """Return the config's activation: our name for it if there is a fused kernel, else transformers' function."""
    from transformers.activations import ACT2FN

    name = getattr(config, family.activation)
    name = OUR_ACTIVATIONS.get(name, name)
    known: str | Activation = name if name in ACTIVATIONS else ACT2FN[name]
    return known


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
def dense_weights(family: DenseFamily, layer: nn.Module) -> dict[str, Tensor]:
    """Return the dense network's weights with the names and shapes of one expert."""
    from transformers.pytorch_utils import Conv1D

    up_name = "gate_up_proj" if family.gated else "up_proj"
    weights = {}
    for name, paths in ((up_name, family.up), ("down_proj", (family.down,))):
        linears: list[Any] = [layer.get_submodule(path) for path in paths]
        matrices = [linear.weight.t() if isinstance(linear, Conv1D) else linear.weight for linear in linears]
        weights[name] = torch.cat([matrix.detach() for matrix in matrices])
        biases: list[Any] = [getattr(linear, "bias", None) for linear in linears]
        if biases[0] is not None:
            weights[f"{name}_bias"] = torch.cat([bias.detach() for bias in biases])
    return weights


def initial_std(layer: nn.Module, family: DenseFamily) -> float:
    """Return the standard deviation of the model's initial weights."""
    return float(getattr(layer.get_submodule(family.attention).config, "initializer_range", 0.02))
