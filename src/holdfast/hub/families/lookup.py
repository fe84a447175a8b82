"""Find the family of a model and the layers that have its modules, and what its config says about its inputs."""

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from holdfast.hub.families.dense import DENSE_FAMILIES, DenseFamily, DenseLayer
from holdfast.hub.families.moe import MOE_FAMILIES, MoEFamily, as_version, installed_transformers
from holdfast.hub.families.recognition import check_declared, fused_experts, recognise

IMAGE_TOKENS = ("image_token_id", "image_token_index", "video_token_id", "video_token_index")  # entries of a config
_REGISTERED: set[str] = set()  # model types of rows that `register_family` added; our own rows are checked by tests


def layers_of(family: MoEFamily, model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield name and module of every transformer layer that has the family's modules, in the order of the model."""
    wanted = [f"{family.block}.{family.gate}", f"{family.block}.{family.experts}"]
    for name, module in model.named_modules():
        if mixer_of(family, module) is not None and all(find_submodule(module, path) is not None for path in wanted):
            yield name, module


def mixer_of(family: MoEFamily, layer: nn.Module) -> str | None:
    """Return the path of a layer's attention, or of the recurrent module in its place; None if it has neither."""
    paths = [family.attention] if family.recurrent is None else [family.attention, family.recurrent]
    return next((path for path in paths if find_submodule(layer, path) is not None), None)


def dense_layers(model: Any) -> dict[str, DenseLayer]:
    """Return every layer of a dense model that `sparsify` can change, by the name of the module that it replaces.

    Raise ValueError with advice if the family is not known.
    """
    found = {}
    rows = dense_family(model).rows
    for name, module in model.named_modules():
        for row in rows:
            wanted = (row.attention, row.projection, *row.up, row.down)
            if all(find_submodule(module, path) is not None for path in wanted):
                config = getattr(module.get_submodule(row.attention), "config", None) or text_config(model)
                place = f"{name}.{row.place}".lstrip(".")
                found[place] = DenseLayer(place, module, row, config)
    return found


def find_submodule(module: nn.Module, path: str) -> nn.Module | None:
    """Return the submodule at `path`; None if there is none."""
    current: nn.Module | None = module
    for step in path.split("."):
        current = None if current is None else current._modules.get(step)
    return current


def register_family(family: MoEFamily | DenseFamily) -> None:
    """Declare a family that Holdfast does not know, for this process: `reroute`, `sparsify`, `load` and all others use it.

    The row of an MoE family is checked when a model of it is first used: its layers must be all the MoE layers of the
    model, and its gate, alone, must rank and weight experts as the declared rule does, gradients included. A model that
    does not pass raises ValueError.
    """
    if not isinstance(family, MoEFamily | DenseFamily):
        raise ValueError(f"a family is a holdfast.hub.MoEFamily or DenseFamily, not a {type(family).__name__}.")
    table: dict[str, Any] = MOE_FAMILIES if isinstance(family, MoEFamily) else DENSE_FAMILIES
    if family.model_type in table and table[family.model_type] != family:
        raise ValueError(f"{family.model_type} has a row already; it cannot be declared in two ways.")
    if isinstance(family, MoEFamily):
        _REGISTERED.add(family.model_type)
    table[family.model_type] = family


def check_registered(family: MoEFamily, blocks: Iterable[tuple[str, nn.Module]]) -> None:
    """Raise ValueError if a row of `register_family` does not describe the gates of these blocks."""
    if family.model_type in _REGISTERED:
        for name, block in blocks:
            check_declared(family, name, block)


def moe_family(model: nn.Module) -> MoEFamily:
    """Return the row of an MoE model's family, declared or recognised. Raise ValueError with the reason if there is none."""
    model_type = _model_type(model)
    if model_type in MOE_FAMILIES:
        family = MOE_FAMILIES[model_type]
        _require_installed(model_type, family.since)
        return family
    recognised = recognise(model)
    if recognised is not None:
        return recognised
    if model_type in DENSE_FAMILIES:
        raise ValueError(f"{model_type} is a dense family. Make a dense model an MoE with holdfast.sparsify.")
    raise ValueError(
        f"this {model_type} model has no experts with fused weights, by which Holdfast recognises MoE layers. Declare the "
        "family with holdfast.register_family."
    )


def has_experts(model: nn.Module) -> bool:
    """Whether the model is of a declared MoE family, or has experts with fused weights."""
    model_type = getattr(getattr(model, "config", None), "model_type", None)
    return model_type in MOE_FAMILIES or next(fused_experts(model), None) is not None


def dense_family(model: nn.Module) -> DenseFamily:
    """Return the row of a dense model's family. Raise ValueError with advice if there is none."""
    model_type = _model_type(model)
    if model_type not in DENSE_FAMILIES:
        if has_experts(model):
            raise ValueError(f"{model_type} is an MoE family. Change the routers of an MoE with holdfast.reroute.")
        raise ValueError(
            f"Holdfast does not know where the feed-forward networks of {model_type} are. Declare the family with "
            f"holdfast.register_family; known are {', '.join(sorted(DENSE_FAMILIES))}."
        )
    family = DENSE_FAMILIES[model_type]
    _require_installed(model_type, family.since)
    return family


def _require_installed(model_type: str, since: str) -> None:
    if installed_transformers() < as_version(since):
        raise ValueError(f"{model_type} needs transformers {since} or later; the installed one is older.")


def _model_type(model: nn.Module) -> str:
    model_type: Any = getattr(getattr(model, "config", None), "model_type", None)
    if model_type is None:
        raise ValueError(
            f"{type(model).__name__} is not a Hugging Face model (it has no config.model_type) and contains no Router."
        )
    return str(model_type)


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
