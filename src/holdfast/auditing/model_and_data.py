"""What an audit works on: the model (`AuditedModel`), a batch of its data (`AuditBatch`) and its tokenizer (`TextEncoder`).

The weights of a model larger than memory may be offloaded to disk (accelerate); those of its routers stay in memory.
"""

import hashlib
import inspect
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, final

import numpy as np
import torch
from torch import Tensor, nn

from holdfast.attacks.text import Spans
from holdfast.certificates import Gate
from holdfast.data import Document, LabelledText, Tokenizer, Vocabulary
from holdfast.data.tokenizers import is_bare
from holdfast.hub.layers import MoELayerRef, moe_layers
from holdfast.hub.replacements import gate_weight
from holdfast.hub.tracing import require_known_tokens, routing_modules
from holdfast.layers.moe import LAYER_NAMES
from holdfast.metrics import Boundary, boundary_of, levels_of
from holdfast.metrics.tasks import IGNORED
from holdfast.routing import Router


@contextmanager
def resident(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Keep the weights of these modules in memory inside the `with`; offload them again afterwards if they were offloaded.

    Routers are small, and an audit reads their weights, rounds them and calls them again between forwards.
    """
    with ExitStack() as stack:
        for module in modules:
            for part in module.modules():
                hook = getattr(part, "_hf_hook", None)
                if getattr(hook, "offload", False):
                    _fetch(part, hook)
                    stack.callback(_offload, part, hook)
        yield


def _fetch(module: nn.Module, hook: Any) -> None:
    hook.pre_forward(module)
    hook.offload = False  # so that a forward neither loads nor offloads them


def _offload(module: nn.Module, hook: Any) -> None:
    hook.offload = True
    hook.post_forward(module, None)


def device_of(model: Any) -> torch.device:
    """Return the device of the inputs. A model with offloaded weights reports `meta`; then its hook has the device."""
    device: torch.device = model.device
    if device.type != "meta":
        return device
    return torch.device(getattr(getattr(model, "_hf_hook", None), "execution_device", None) or "cpu")


@final
class AuditedModel:
    """A Hugging Face model with MoE layers. Raise ValueError if the model has none or is not supported."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.moe_layers: list[MoELayerRef] = moe_layers(model)
        for site in self.moe_layers:
            if site.router is not None and site.router.select.layer_kind != "moe":
                kind = LAYER_NAMES[site.router.select.layer_kind]
                raise ValueError(
                    f"{site.name}: in this {kind} layer every token uses every expert, so there are no near-ties or "
                    "flips to audit and no sets to certify; evaluate and attack the model."
                )
        self.routes: list[nn.Module] = [module for _, module, _ in routing_modules(model)]
        self.names: list[str] = [name for name, _, _ in routing_modules(model)]
        self._takes = inspect.signature(model.forward).parameters
        self._cached = "use_cache" in self._takes or hasattr(model.config, "use_cache")

    @property
    def device(self) -> torch.device:
        return device_of(self.model)

    @property
    def dtype(self) -> torch.dtype:
        dtype: torch.dtype = self.model.dtype
        return dtype

    @property
    def predicts_next(self) -> bool:
        """Return whether it is a causal language model."""
        name = type(self.model).__name__
        return "CausalLM" in name or "LMHead" in name

    @property
    def classes(self) -> int:
        """Return the number of classes of a model that classifies sequences; 0 if it does not."""
        is_classifier = "ForSequenceClassification" in type(self.model).__name__
        count = int(self.model.config.num_labels) if is_classifier else 0
        return count if count > 1 else 0  # one output is a number, not a class

    @property
    def pools_first_token(self) -> bool:
        """Return whether it classifies a text by its first token, as models do that read in both directions."""
        is_classifier = "ForSequenceClassification" in type(self.model).__name__
        return is_classifier and getattr(self.model.config, "is_decoder", True) is False

    @property
    def takes_positions(self) -> bool:
        return "position_ids" in self._takes

    @property
    def pad(self) -> int:
        return int(getattr(self.model.config, "pad_token_id", None) or 0)

    def forward(self, inputs: dict[str, Tensor]) -> Any:
        """Run the model with inputs on its device, floating-point inputs in its dtype, and no KV cache."""
        if "input_ids" in inputs:
            require_known_tokens(self.model, inputs["input_ids"])
        placed = {name: tensor.to(self.device) for name, tensor in inputs.items()}
        placed = {name: tensor.to(self.dtype) if tensor.is_floating_point() else tensor for name, tensor in placed.items()}
        options = {"use_cache": False} if self._cached and "input_ids" in inputs else {}
        return self.model(**placed, **options)

    def core(self, layer: int) -> int | None:
        """Return how many of a token's best experts are compared; None: all selected experts."""
        router = self.moe_layers[layer].router
        return None if router is None else router.select.declares.core

    def boundaries(self) -> dict[int, Boundary]:
        """Return, by layer, what near-ties are measured in."""
        found = {}
        for layer, site in enumerate(self.moe_layers):
            if site.router is not None:
                found[layer] = boundary_of(site.router)
            elif site.family is not None:
                found[layer] = Boundary(levels=levels_of(site.family.rule_of(site.block)))
        return found

    def certified(self, layer: int) -> Router | Gate:
        """Return what is certified: Holdfast's router, or the weights and the rule of a native gate."""
        site = self.moe_layers[layer]
        if site.router is not None:
            return site.router
        assert site.family is not None
        gate, family = site.gate, site.family
        bias = None if family.bias is None else gate_weight(gate, family.bias)
        rule = family.rule_of(site.block)
        return Gate(gate_weight(gate, family.weight), int(gate.top_k), bias=bias, rule=rule)

    def scorers(self) -> list[nn.Module]:
        """Return the modules with the routers' weights."""
        return [self.routes[layer] if site.family is None else site.gate for layer, site in enumerate(self.moe_layers)]

    def describe(self, name: str | None) -> dict[str, Any]:
        config = self.model.config
        return {
            "name": name or getattr(config, "_name_or_path", None) or type(self.model).__name__,
            "type": config.model_type,
            "class": type(self.model).__name__,
            "dtype": str(self.dtype).removeprefix("torch."),
            "parameters": sum(parameter.numel() for parameter in self.model.parameters()),
            "layers": self.names,
            "experts": [site.size[1] for site in self.moe_layers],
            "routers": ["native" if site.router is None else _parts(site.router) for site in self.moe_layers],
        }


def _parts(router: Router) -> str:
    return " ".join(type(part).__name__ for part in router.parts)


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Put the model into evaluation mode without gradients; restore the mode of every module afterwards."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, mode in modes:
            module.training = mode


@contextmanager
def weights_in_dtype(
    modules: list[nn.Module], dtype: torch.dtype, *, only_rounded: bool = False, keep: Iterable[nn.Parameter] = ()
) -> Iterator[None]:
    """Hold floating-point weights in `dtype`, or round them to it and back; restore them to the bit afterwards.

    keep    weights that stay as they are
    """
    kept = {id(parameter) for parameter in keep}
    parameters = {id(parameter): parameter for module in modules for parameter in module.parameters()}
    parameters = {key: parameter for key, parameter in parameters.items() if key not in kept}
    originals = [(parameter, parameter.data) for parameter in parameters.values() if parameter.is_floating_point()]
    try:
        for parameter, data in originals:
            rounded = data.to(dtype)
            parameter.data = rounded.to(data.dtype) if only_rounded else rounded
        yield
    finally:
        for parameter, data in originals:
            parameter.data = data


@final
@dataclass(frozen=True)
class AuditBatch:
    """One batch. `labels` are the targets at each position, already shifted, or classes of sequences; -100: none."""

    number: int
    inputs: dict[str, Tensor]
    labels: Tensor | None
    texts: tuple[str, ...] | None = None  # one for each row, then the second texts of pairs
    spans: tuple[Spans, ...] | None = None  # for each text, of all tokens of its row; empty for tokens of no or another text
    examples: tuple[LabelledText, ...] | None = None  # the texts with their pairs and labels

    @property
    def ids(self) -> Tensor | None:
        return self.inputs.get("input_ids")

    @property
    def size(self) -> int:
        return len(next(iter(self.inputs.values())))

    @property
    def rows_of_texts(self) -> list[int]:
        """Return the row of each of `texts`."""
        second = [row for row, one in enumerate(self.examples or ()) if one.pair is not None]
        return [*range(self.size), *second]

    @property
    def tokens(self) -> int:
        """Return the number of real tokens; 0 for images, because only the model determines theirs."""
        mask = self.inputs.get("attention_mask")
        return int(mask.sum()) if mask is not None else 0 if self.ids is None else self.ids.numel()

    def add_to(self, digest: Any) -> None:
        """Add the inputs to a checksum."""
        for name, tensor in sorted(self.inputs.items()):
            digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
            digest.update(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())


@final
class TextEncoder:
    """A tokenizer, of Hugging Face or of Holdfast: token ids with their spans in the text."""

    def __init__(self, tokenizer: Any, pad: int = 0) -> None:
        if not isinstance(tokenizer, Tokenizer) and not callable(tokenizer):
            raise ValueError(
                f"a {type(tokenizer).__name__} is not a tokenizer; load the one of the model with AutoTokenizer."
            )
        if is_bare(tokenizer):
            raise ValueError(
                "the tokenizer has special tokens and no words: its files are missing where it was loaded from."
            )
        self.tokenizer, self.is_holdfast = tokenizer, isinstance(tokenizer, Tokenizer)
        own = None if self.is_holdfast else getattr(tokenizer, "pad_token_id", None)
        self.pad = pad if own is None else int(own)

    @property
    def has_spans(self) -> bool:
        if self.is_holdfast:
            inner = getattr(self.tokenizer, "tokenizer", None)
            return inner is None or bool(inner.is_fast)
        return bool(getattr(self.tokenizer, "is_fast", False))

    def encode(self, text: str) -> tuple[list[int], Spans | None]:
        if self.is_holdfast:
            document = Document("text", text.encode("utf-8", "replace"))
            ids = [int(number) for piece in self.tokenizer.pieces([document]) for number in piece]
            return ids, next(self.tokenizer.spans([document])) if self.has_spans else None
        found = self.tokenizer(text, verbose=False, **({"return_offsets_mapping": True} if self.has_spans else {}))
        spans = np.array(found["offset_mapping"], dtype=np.int64).reshape(-1, 2) if self.has_spans else None
        return list(found["input_ids"]), spans

    def knows(self, word: str) -> bool:
        """Return whether the word has tokens of its own, without the unknown token."""
        inner = getattr(self.tokenizer, "tokenizer", self.tokenizer)
        unknown_name = 0 if isinstance(inner, Vocabulary) else getattr(inner, "unk_token_id", None)
        ids = (
            self.tokenizer.encode(word).tolist() if self.is_holdfast else inner(word, add_special_tokens=False)["input_ids"]
        )
        return unknown_name not in ids

    def decode(self, ids: Sequence[int]) -> str:
        return str(self.tokenizer.decode(list(ids)))

    def batch(self, number: int, texts: Sequence[str], length: int | None) -> AuditBatch:
        """Return texts as one batch, padded on the right and cut after `length` tokens."""
        read = [self.encode(text) for text in texts]
        rows = [torch.tensor(ids[:length], dtype=torch.int64) for ids, _ in read]
        longest = max(len(row) for row in rows)
        ids = torch.full((len(rows), longest), self.pad, dtype=torch.int64)
        mask = torch.zeros_like(ids)
        for place, row in enumerate(rows):
            ids[place, : len(row)], mask[place, : len(row)] = row, 1
        spans = None if not self.has_spans else tuple(found[:length] for _, found in read if found is not None)
        return AuditBatch(number, {"input_ids": ids, "attention_mask": mask}, next_tokens(ids, mask), tuple(texts), spans)

    def pieces(self, text: str, length: int) -> Iterator[str]:
        """Yield a text in pieces of about `length` tokens at most, cut between tokens."""
        ids, spans = self.encode(text)
        if spans is None or len(ids) <= length:
            yield text
            return
        places = spans[spans[:, 0] < spans[:, 1]]  # without the special tokens that the tokenizer adds
        for start in range(0, len(places), length):
            part = places[start : start + length]
            piece = text[int(part[0, 0]) : int(part[-1, 1])]
            if piece.strip():
                yield piece


def next_tokens(ids: Tensor, mask: Tensor | None) -> Tensor:
    """Return the next token at each position (B,N); -100 at the end and where either token is padding."""
    labels = torch.full_like(ids, IGNORED)
    labels[:, :-1] = ids[:, 1:]
    if mask is not None:
        real = mask.bool()
        labels[:, :-1] = labels[:, :-1].masked_fill(~(real[:, 1:] & real[:, :-1]), IGNORED)
    return labels


def check_size(name: str, value: Any, least: int = 1) -> None:
    """Raise ValueError if `value` is not a whole number of at least `least`."""
    if not isinstance(value, int) or value < least:
        raise ValueError(f"{name} is {value!r}; it must be a whole number, at least {least}.")


@final
class Checksum:
    """SHA-256 of all data of an audit."""

    def __init__(self) -> None:
        self._digest = hashlib.sha256()

    def add(self, batch: AuditBatch) -> None:
        batch.add_to(self._digest)

    def __str__(self) -> str:
        return str(self._digest.hexdigest())
