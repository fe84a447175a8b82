"""The model that training starts from: a new one of a family, or a checkpoint with its own tokeniser or image processor.

A checkpoint is a Hugging Face folder, a name on the hub, or a folder of a trained model (`model/` and `task.json`). It is
untrusted: no code of it is run, only safetensors are read, and its files are checked as `holdfast.load` does. What it
contains decides how the recipe's routers are put into it (`put_router`):

    a dense model                      `holdfast.sparsify` makes experts from its feed-forward networks
    a mixture of experts               `holdfast.reroute` changes its routers, and its experts stay
    a model with Holdfast's routers    the same; a layer keeps its router, with its state, if the recipe names the same one

A head that does not fit the task (another number of classes, other classes, none at all) gets new weights, and a message
says so. Any other weight that is missing or not used is an error.
"""

import hashlib
import logging
from collections.abc import Callable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from holdfast.data import PixelScaling, Tokenizer
from holdfast.data.tokenizers import Bytes, HubTokenizer, Vocabulary
from holdfast.errors import unknown_name
from holdfast.files import read_json
from holdfast.hub.checkpoint import load_with_head, local_folder
from holdfast.hub.families import DENSE_FAMILIES
from holdfast.hub.folder_files import PROCESSOR, check_files, family_values, sha256_of
from holdfast.model_size import build_or_refuse
from holdfast.train.recipe import ModelPart
from holdfast.train.task_record import MODEL, is_trained, read_record

HEADS = {  # Auto classes of transformers
    "text": "AutoModelForCausalLM",
    "labels": "AutoModelForSequenceClassification",
    "images": "AutoModelForImageClassification",
    "vision-language": "AutoModelForImageTextToText",
}
CONVERTED = ("attn_implementation", "layer_types", "rope_theta")  # entries that transformers reads, and not every config has
OF_DATA = ("vocab_size", "image_size", "num_channels")  # entries that a checkpoint has, and that the data must fit

logger = logging.getLogger("holdfast")


def start_model(part: ModelPart, head: str, **entries: Any) -> Any:
    """Return the model of a recipe, before routers are put into it: new and dense, or from its checkpoint.

    head        "text" (predicts the next token), "labels" (classifies texts), "images" (classifies images) or
                "vision-language" (predicts the next token, and sees pictures)
    entries     entries of the config that follow from the data. A new model gets all of them. A checkpoint gets those of its
                head (id2label, problem_type, pad_token_id); vocab_size, image_size and num_channels must fit it

    Weights are float32. Under `torch.device("meta")` the model has no values. With the head "labels", a model that reads
    sequences from left to right finds the end of a text by `pad_token_id`: give that of `padding_token`.
    """
    if "id2label" in entries:
        entries["label2id"] = {label: number for number, label in entries["id2label"].items()}
    model = _new_model(part, head, entries) if part.checkpoint is None else _from_checkpoint(part, head, entries)
    if head == "labels" and model.config.get_text_config().pad_token_id is None:
        raise ValueError("a model that classifies texts needs a token for padding: set model.config.pad_token_id.")
    return model


def _new_model(part: ModelPart, head: str, entries: Mapping[str, Any]) -> Any:
    import transformers

    if part.family not in transformers.CONFIG_MAPPING:
        raise ValueError(f"transformers has no model family {part.family!r}.")
    usual = transformers.AutoConfig.for_model(part.family)
    # transformers would keep an unknown entry, and ignore it.
    for name in part.config if part.family in DENSE_FAMILIES else ():
        if not hasattr(usual, name) and name not in CONVERTED:
            raise ValueError(f"model.config.{name}: {unknown_name(f'entry of {part.family}', name, usual.to_dict())}")

    def build(config: Mapping[str, Any]) -> Any:
        values = transformers.AutoConfig.for_model(part.family, **{**entries, **config})
        return getattr(transformers, HEADS[head]).from_config(values)

    def build_on_meta(config: Mapping[str, Any]) -> None:
        with torch.device("meta"):
            build_or_refuse(lambda: build(config), str(part.family))

    try:
        return build_or_refuse(lambda: build(part.config), str(part.family))
    except ValueError as problem:
        raise ValueError(f"{wrong_entries(part.config, build_on_meta)}: {problem}") from None


def wrong_entries(config: Mapping[str, Any], work: Callable[[Mapping[str, Any]], object]) -> str:
    """Return the entries of `model.config` that make `work` fail, as text.

    An entry is at fault if `work` succeeds with the family's own value in its place; if there is no such entry, with a 1 in
    its place, because the family's value may contradict the other entries.
    """

    def succeeds(changed: Mapping[str, Any]) -> bool:
        try:
            work(changed)
        except Exception:  # as for the whole config
            return False
        return True

    wrong = [name for name in config if succeeds({other: config[other] for other in config if other != name})]
    wrong = wrong or [name for name in config if succeeds({**config, name: 1})] or list(config)
    return " and ".join(f"model.config.{name} is {config[name]!r}" for name in wrong) or "model.config is empty"


def _from_checkpoint(part: ModelPart, head: str, entries: Mapping[str, Any]) -> Any:
    folder = checkpoint_folder(part)
    stored = family_values(check_files(folder), folder)
    if head == "text":
        from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

        kind = (stored.get("architectures") or ["a model without a class"])[0]
        if kind != MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(str(stored.get("model_type"))):
            raise ValueError(f"{part.checkpoint} is a {kind}, which does not predict the next token: use another task.")
    for_head = {name: value for name, value in entries.items() if name not in OF_DATA}
    new_head = "id2label" in for_head and not _has_classes(stored, for_head["id2label"])
    try:
        model, weights = load_with_head(folder, HEADS[head], {**for_head, **part.config}, new_head=new_head)
    except ValueError as problem:
        raise ValueError(f"model.checkpoint: {problem}") from None
    vocabulary = getattr(model.config.get_text_config(), "vocab_size", None)
    if isinstance(vocabulary, int) and entries.get("vocab_size", 0) > vocabulary:
        raise ValueError(
            f"{part.checkpoint} has {vocabulary:,} tokens, and the tokeniser has {entries['vocab_size']:,}: it belongs to "
            "another model."
        )
    for name, words in (("image_size", "pixels per side"), ("num_channels", "channels")):
        given, own = entries.get(name), getattr(model.config, name, None)
        if given is not None and isinstance(own, int) and own != given:
            hint = f"; set data.size to {own}" if name == "image_size" else ""
            raise ValueError(f"{part.checkpoint} reads images with {own} {words}, and the data have {given}{hint}.")
    if head == "text" and getattr(model.config, "is_decoder", True) is False:
        raise ValueError(f"{part.checkpoint} reads texts in both directions, and cannot learn to predict the next token.")
    if head in ("text", "vision-language") and (weights["new"] or weights["unused"]):
        wrong = [*weights["new"], *weights["unused"]][0]
        raise ValueError(f"model.checkpoint: {part.checkpoint} does not fit its config: {wrong} is missing or not used.")
    if weights["new"]:
        unused = f", and {', '.join(_modules(weights['unused']))} is not used" if weights["unused"] else ""
        _say_once(f"{part.checkpoint} has no head for this task: {', '.join(_modules(weights['new']))} starts new{unused}.")
    return model


def checkpoint_folder(part: ModelPart) -> Path:
    """Return the folder of a checkpoint's model; one on the hub is downloaded first."""
    assert part.checkpoint is not None
    place = Path(part.checkpoint)
    return read_record(place).home / MODEL if is_trained(place) else _folder_of(part.checkpoint)


@lru_cache(maxsize=16)
def _folder_of(name: str) -> Path:
    """Return the folder of a model: the same one for every model of this process, also if the hub changes."""
    return local_folder(name)


def _has_classes(stored: Mapping[str, Any], classes: Mapping[int, str]) -> bool:
    """Return whether a checkpoint's head is for these classes, or for as many that have no names."""
    own = stored.get("id2label")
    if not isinstance(own, dict):  # transformers does not write the names LABEL_0 and LABEL_1
        return len(classes) == 2
    found = {str(number): label for number, label in own.items()}
    unnamed = {str(number): f"LABEL_{number}" for number in range(len(found))}
    return len(found) == len(classes) and (found == unnamed or found == {str(n): label for n, label in classes.items()})


def _modules(weights: list[str]) -> list[str]:
    """Return the modules that these weights are in, without repetition."""
    return list(dict.fromkeys(name.rpartition(".")[0] for name in weights))


@lru_cache(maxsize=256)
def _say_once(message: str) -> None:
    logger.warning("%s", message)


def start_tokenizer(checkpoint: str, given: str | None = None) -> Tokenizer:
    """Return the tokeniser of a recipe's checkpoint.

    given   `data.tokens`; raise ValueError if it is another tokeniser than the checkpoint's
    """
    place = Path(checkpoint)
    own = read_record(place).tokenizer() if is_trained(place) else HubTokenizer(str(_folder_of(checkpoint)))
    is_same = given is None or given == own.name
    if given is not None and isinstance(own, HubTokenizer):  # the words of a vocabulary are always the checkpoint's
        is_same = ("/" in given or Path(given).is_dir()) and HubTokenizer(given).checksum() == own.checksum()
    if not is_same:
        raise ValueError(
            f"data.tokens is {given}, and {checkpoint} was trained with another tokeniser; leave data.tokens out to "
            "use its own."
        )
    return own


def padding_token(used: Tokenizer) -> int:
    """Return the token that texts of a batch are filled up with: one that does not occur in a text before its end."""
    if isinstance(used, HubTokenizer):
        own = used.tokenizer
        found = own.pad_token_id if own.pad_token_id is not None else own.eos_token_id
        if found is None:
            raise ValueError(f"the tokeniser of {used.name} has neither a padding token nor one that ends a text.")
        return int(found)
    if isinstance(used, Vocabulary):
        return used.end
    assert isinstance(used, Bytes)
    return 0  # the byte 0, which text does not contain


def start_scaling(part: ModelPart) -> PixelScaling:
    """Return how the checkpoint's image processor scales pixels; to [-1, 1] for a new model or one without a processor."""
    if part.checkpoint is None:
        return PixelScaling()
    place = Path(part.checkpoint)
    if is_trained(place):
        return scaling_from(read_record(place).state)
    folder = _folder_of(part.checkpoint)
    if not (folder / PROCESSOR).exists():
        return PixelScaling()
    check_files(folder)
    stored = read_json(folder / PROCESSOR)
    if not isinstance(stored, dict) or not stored.get("do_rescale", True) or not stored.get("do_normalize", True):
        raise ValueError(f"{folder / PROCESSOR} does not scale pixels by a mean and a standard deviation.")
    return PixelScaling.from_lists(stored.get("image_mean"), stored.get("image_std"))


def scaling_from(state: Mapping[str, Any]) -> PixelScaling:
    """Return the scaling that the record of a trained model has; it is untrusted."""
    stored = state.get("scaling")
    if stored is None:
        return PixelScaling()
    if not isinstance(stored, dict):
        raise ValueError("the record of this model is damaged: it does not say how pixels are scaled.")
    return PixelScaling.from_lists(stored.get("mean"), stored.get("std"))


def checkpoint_identity(part: ModelPart) -> dict[str, Any]:
    """Return a checksum of the checkpoint's config and weights, as a part of a run's identity; empty without a checkpoint.

    A run that is resumed after its checkpoint has changed is refused.
    """
    if part.checkpoint is None:
        return {}
    folder = checkpoint_folder(part)
    check_files(folder)
    files = [folder / "config.json", *sorted(folder.glob("*.safetensors"))]
    digest = hashlib.sha256()
    for file in files:
        stat = file.stat()
        digest.update(f"{file.name} {_checksum(file, stat.st_size, stat.st_mtime_ns)}\n".encode())
    return {"checkpoint": digest.hexdigest()}


@lru_cache(maxsize=1024)
def _checksum(file: Path, size: int, changed: int) -> str:
    """Return the SHA-256 of a file; read it again only if its size or its time has changed."""
    return sha256_of(file)
