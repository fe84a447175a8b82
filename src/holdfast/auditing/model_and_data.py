"""What an audit works on: the model (`AuditedModel`), its tokenizer (`TextEncoder`) and the batches of its data.

Data are texts, labelled texts (for models that classify them) or a model's inputs; `audit_batches` reads them one batch at a
time. The weights of a model larger than memory may be offloaded to disk (accelerate); those of its routers stay in memory.
"""

import hashlib
import inspect
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, islice
from typing import Any, final

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from holdfast.attacks.text import Spans
from holdfast.auditing.reports import DataDescription, DataSettings, ModelDescription, TokenPlace
from holdfast.certificates import Gate
from holdfast.data import Document, LabelledText, Tokenizer, Vocabulary
from holdfast.data.labelled_texts import flat_texts
from holdfast.data.tokenizers import is_bare
from holdfast.hub.forwards import image_tokens
from holdfast.hub.layers import MoELayerRef, moe_layers
from holdfast.hub.parts import vision_language_family
from holdfast.hub.replacements import gate_weight
from holdfast.hub.tracing import require_finite, require_known_tokens, routing_modules
from holdfast.layers.moe import LAYERS
from holdfast.metrics import Boundary, boundary_of, levels_of
from holdfast.metrics.tasks import IGNORED
from holdfast.progress import reporting
from holdfast.routing import Router
from holdfast.version import versions

CONTEXT = 4  # tokens shown before and after a token


@contextmanager
def resident(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Keep the weights of these modules in memory inside the `with`; offload them again afterwards if they were offloaded.

    Routers are small, and an audit reads their weights, rounds them and calls them again between forwards.
    """
    with ExitStack() as stack:
        for module in modules:
            for part in module.modules():
                hook: Any = getattr(part, "_hf_hook", None)
                if getattr(hook, "offload", False):
                    hook.pre_forward(part)
                    hook.offload = False  # so that a forward neither loads nor offloads them
                    stack.callback(hook.post_forward, part, None)
                    stack.callback(setattr, hook, "offload", True)  # before `post_forward`
        yield


@final
class AuditedModel:
    """A Hugging Face model with MoE layers. Raise ValueError if the model has none or is not supported."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.moe_layers: list[MoELayerRef] = moe_layers(model)
        for site in self.moe_layers:
            if site.router is not None and site.router.select.layer_kind != "moe":
                kind = LAYERS[site.router.select.layer_kind].__name__
                raise ValueError(
                    f"{site.name}: in this {kind} layer every token uses every expert, so there are no near-ties or "
                    "flips to audit and no sets to certify; evaluate and attack the model."
                )
        self.routes: list[nn.Module] = [module for _, module, _ in routing_modules(model)]
        self.names: list[str] = [name for name, _, _ in routing_modules(model)]
        config, kind, takes = model.config, type(model).__name__, inspect.signature(model.forward).parameters
        # Whether it predicts the next token, as causal language models and vision-language models do.
        is_vlm = vision_language_family(model) is not None and "ForConditionalGeneration" in kind
        self.predicts_next = "CausalLM" in kind or "LMHead" in kind or is_vlm
        self.image_tokens = image_tokens(model) if is_vlm else []
        is_classifier = "ForSequenceClassification" in kind
        # The number of classes; 0 if it does not classify sequences: one output is a number, not a class.
        self.classes = int(config.num_labels) if is_classifier and config.num_labels > 1 else 0
        # Models that read in both directions classify a text by its first token.
        self.pools_first_token = is_classifier and getattr(config, "is_decoder", True) is False
        self.takes_positions = "position_ids" in takes
        self.pad = int(getattr(config, "pad_token_id", None) or 0)
        self._cached = "use_cache" in takes or hasattr(config, "use_cache")

    @property
    def device(self) -> torch.device:
        """Return the device of the inputs. A model with offloaded weights reports `meta`; then its hook has the device."""
        device: torch.device = self.model.device
        if device.type != "meta":
            return device
        return torch.device(getattr(getattr(self.model, "_hf_hook", None), "execution_device", None) or "cpu")

    def require_texts(self) -> None:
        """Raise ValueError if an MoE layer has tokens that are parts of images, which have no row in `input_ids`."""
        for site in self.moe_layers:
            if site.of_images:
                raise ValueError(
                    f"{site.name}: its tokens are parts of images, and this report is about the tokens of texts; it takes "
                    "vision-language models in which only the language part is sparse (holdfast.trace takes all)."
                )

    def forward(self, inputs: dict[str, Tensor]) -> Any:
        """Run the model with inputs on its device, floating-point inputs in its dtype, and no KV cache."""
        if "input_ids" in inputs:
            require_known_tokens(self.model, inputs["input_ids"])
        dtypes = {name: self.model.dtype if each.is_floating_point() else each.dtype for name, each in inputs.items()}
        placed = {name: each.to(self.device, dtypes[name]) for name, each in inputs.items()}
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

    def describe(self, name: str | None) -> ModelDescription:
        config, parts = self.model.config, [site.router.parts if site.router else () for site in self.moe_layers]
        return ModelDescription(
            name=name or getattr(config, "_name_or_path", None) or type(self.model).__name__,
            type=config.model_type,
            architecture=type(self.model).__name__,
            dtype=str(self.model.dtype).removeprefix("torch."),
            parameters=sum(parameter.numel() for parameter in self.model.parameters()),
            layers=self.names,
            experts=[site.size[1] for site in self.moe_layers],
            routers=[" ".join(type(part).__name__ for part in each) or "native" for each in parts],
        )


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


Progress = Callable[[int, str], None]  # (tokens done, what is being done)


class Measurement(ABC):
    """A measurement of a model on batches of data, until they end or the user interrupts it (abstract).

    A batch counts when everything has been measured on it.
    """

    def __init__(self, model: Any, tokenizer: Any, settings: DataSettings, progress: Progress | None) -> None:
        self.audited = AuditedModel(model)
        require_finite(model)
        self.encoder = None if tokenizer is None else TextEncoder(tokenizer, self.audited.pad)
        self.settings: Any = settings
        self.finished = self.sequences = self.tokens = 0  # finished batches, and what they have
        self.kind, self.checksum = "inputs", hashlib.sha256()
        self.interrupted, self.started = False, time.monotonic()
        self.progress = progress
        self.tell: Progress = lambda done, what: None  # set by `showing`

    @abstractmethod
    def add(self, batch: "AuditBatch") -> None:
        """Measure one batch."""

    def batches(self, inputs: Iterable[Any]) -> "Iterator[AuditBatch]":
        limits = {"batch": self.settings.batch, "length": self.settings.length, "tokens": self.settings.tokens}
        return audit_batches(inputs, self.audited, self.encoder, **limits)

    @contextmanager
    def showing(self, name: str | None) -> Iterator[None]:
        """Show the progress inside the `with`, with the name of the model, unless the user's function is told of it."""
        with reporting(self.progress, None if self.encoder is None else self.settings.tokens, name) as self.tell:
            yield

    def run(self, inputs: Iterable[Any]) -> None:
        """Measure all batches, or those before Ctrl-C; raise KeyboardInterrupt if none was finished."""
        with evaluation_mode(self.audited.model), resident(self.audited.scorers()):
            try:
                for batch in self.batches(inputs):
                    self.add(batch)
            except KeyboardInterrupt:
                if not self.finished:
                    raise
                self.interrupted = True

    def count(self, batch: "AuditBatch", tokens: int) -> None:
        """Count a finished batch with this number of tokens."""
        for name, tensor in sorted(batch.inputs.items()):
            self.checksum.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
            self.checksum.update(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
        self.finished, self.sequences, self.tokens = self.finished + 1, self.sequences + batch.size, self.tokens + tokens
        self.kind = "inputs" if batch.texts is None else "texts"

    def about(self, name: str | None) -> dict[str, Any]:
        """Return what every report says about how it was made."""
        read: dict[str, Any] = {"batches": self.finished, "sequences": self.sequences, "tokens": self.tokens}
        return {
            "status": "interrupted" if self.interrupted else "complete",
            "model": self.audited.describe(name),
            "data": DataDescription(kind=self.kind, checksum=self.checksum.hexdigest(), **read),
            "settings": self.settings,
            "versions": versions(),
            "seconds": round(time.monotonic() - self.started, 3),
        }


@contextmanager
def weights_in_dtype(
    modules: list[nn.Module], dtype: torch.dtype, *, only_rounded: bool = False, keep: Iterable[nn.Parameter] = ()
) -> Iterator[None]:
    """Hold floating-point weights in `dtype`, or round them to it and back; restore them to the bit afterwards.

    keep    weights that stay as they are
    """
    parameters = {parameter for module in modules for parameter in module.parameters()} - set(keep)
    originals = [(parameter, parameter.data) for parameter in parameters if parameter.is_floating_point()]
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
        return len(next(iter(self.inputs.values())) if self.ids is None else self.ids)

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

    @property
    def token_mask(self) -> Tensor | None:
        """Return the attention mask if it is (B,N), one entry per token; otherwise None."""
        mask = self.inputs.get("attention_mask")
        return mask if mask is not None and mask.dim() == 2 else None

    def sequences(self, rows: slice, positions: Tensor | None = None) -> "AuditBatch":
        """Return some of the sequences; if `positions` are given, only these of each."""

        def cut(tensor: Tensor) -> Tensor:
            has_positions = positions is not None and tensor.dim() == 2 and tensor.shape[1] > int(positions.max())
            return tensor[rows][:, positions] if has_positions else tensor[rows]

        inputs = {name: cut(tensor) for name, tensor in self.inputs.items()}
        return replace(self, inputs=inputs, labels=None if self.labels is None else cut(self.labels))


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
        padding = None if self.is_holdfast else getattr(tokenizer, "pad_token_id", None)
        self.pad = pad if padding is None else int(padding)
        inner = getattr(tokenizer, "tokenizer", None) if self.is_holdfast else tokenizer
        self.has_spans = inner is None or bool(getattr(inner, "is_fast", False))

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
        unknown = 0 if isinstance(inner, Vocabulary) else getattr(inner, "unk_token_id", None)
        if self.is_holdfast:
            return unknown not in self.tokenizer.encode(word).tolist()
        return unknown not in inner(word, add_special_tokens=False)["input_ids"]

    def decode(self, ids: Sequence[int]) -> str:
        return str(self.tokenizer.decode(list(ids)))

    def batch(self, number: int, texts: Sequence[str], length: int) -> AuditBatch:
        """Return texts as one batch, padded on the right and cut after `length` tokens."""
        read = [self.encode(text) for text in texts]
        rows = [torch.tensor(ids[:length], dtype=torch.int64) for ids, _ in read]
        inputs = self.padded(rows)
        spans = None if not self.has_spans else tuple(found[:length] for _, found in read if found is not None)
        return AuditBatch(number, inputs, next_tokens(*inputs.values()), tuple(texts), spans)

    def padded(self, rows: list[Tensor]) -> dict[str, Tensor]:
        """Return token ids as one batch, padded on the right, with their mask."""
        ids = pad_sequence(rows, batch_first=True, padding_value=self.pad)
        return {"input_ids": ids, "attention_mask": pad_sequence([torch.ones_like(row) for row in rows], batch_first=True)}

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


def audit_batches(
    given: Iterable[Any], audited: AuditedModel, encoder: TextEncoder | None, *, batch: int, length: int, tokens: int | None
) -> Iterator[AuditBatch]:
    """Yield batches of the given texts or inputs until there are `tokens` tokens."""
    if isinstance(given, str | Mapping):
        raise ValueError(f"the texts or inputs are one {type(given).__name__}; give a list of strings or a list of batches.")
    everything = iter(given)
    first = next(everything, None)
    if first is None:
        raise ValueError("there are no data: give at least one text or batch.")
    rest = chain([first], everything)
    if not isinstance(first, str | LabelledText):
        found = from_batches(rest, audited)
    elif encoder is None or (encoder.is_holdfast and not isinstance(first, str)):
        raise ValueError("texts need the model's tokenizer: audit(model, texts, tokenizer=...).")
    else:
        found = from_texts(rest, type(first), audited, encoder, batch=batch, length=length)
    seen = 0
    for sample in found:
        yield sample
        seen += sample.tokens
        if tokens is not None and seen >= tokens:
            return
    if seen == 0 and isinstance(first, str):
        raise ValueError("there are no data: every text is empty.")


def from_texts(
    texts: Iterable[Any], kind: type, audited: AuditedModel, encoder: TextEncoder, *, batch: int, length: int
) -> Iterator[AuditBatch]:
    """Yield batches of strings or of labelled texts. Long strings are cut into several sequences, empty ones are skipped."""
    what = "strings" if kind is str else kind.__name__

    def pieces() -> Iterator[Any]:
        for text in texts:
            if not isinstance(text, kind):
                raise ValueError(f"one of the texts is a {type(text).__name__}; give {what} only, or batches only.")
            if not isinstance(text, str):
                yield text
            elif text.strip():
                yield from encoder.pieces(text, length)

    rest = pieces()
    make = encoder.batch if kind is str else partial(labelled_batch, encoder, classes=audited.classes)
    for number, some in enumerate(iter(lambda: list(islice(rest, batch)), [])):
        yield make(number, some, length)


def from_batches(batches: Iterable[Any], audited: AuditedModel) -> Iterator[AuditBatch]:
    """Yield batches from dicts for the model's forward. Labels are removed and scored here, without router losses."""
    for number, given in enumerate(batches):
        if not isinstance(given, Mapping):
            raise ValueError(f"batch {number} is a {type(given).__name__}; expected a dict for the model's forward.")
        tensors = {str(name): tensor for name, tensor in given.items() if isinstance(tensor, Tensor)}
        labels, shifted = tensors.pop("labels", None), tensors.pop("shift_labels", None)
        if not tensors or not len(next(iter(tensors.values()))):
            raise ValueError(f"batch {number} is empty; expected input_ids or pixel_values.")
        ids = tensors.get("input_ids")
        if ids is not None and audited.predicts_next and shifted is None:
            shifted = next_tokens(ids if labels is None else labels, AuditBatch(number, tensors, None).token_mask)
            for token in audited.image_tokens:  # the place of an image is no text to predict
                shifted = shifted.masked_fill(shifted == token, IGNORED)
        yield AuditBatch(number, tensors, labels if shifted is None else shifted)


def labelled_batch(
    encoder: TextEncoder, number: int, examples: Sequence[LabelledText], length: int, classes: int
) -> AuditBatch:
    """Return labelled texts or pairs as one batch, encoded and cut as a classifier reads them.

    The texts of the batch are those of `flat_texts`: the second texts of pairs follow. `classes` is 0 if the model does not
    classify: then labels are not scored.
    """
    how = {"verbose": False, "return_offsets_mapping": encoder.has_spans, "truncation": True, "max_length": length}
    spans: list[Spans] = []
    spans_of_second: list[Spans] = []
    rows, types = [], []
    for one in examples:
        found = encoder.tokenizer(one.text, one.pair, **how)
        rows.append(torch.tensor(found["input_ids"], dtype=torch.int64))
        types.append(torch.tensor(found.get("token_type_ids", [0] * len(rows[-1])), dtype=torch.int64))
        if encoder.has_spans:
            texts = found.sequence_ids(0) if hasattr(found, "sequence_ids") else found.get("sequence_ids", [0])
            of_pair = np.array([[text == 1] for text in texts], dtype=bool)  # (T,1): of the second text
            offsets = np.array(found["offset_mapping"], dtype=np.int64).reshape(-1, 2)
            spans.append(offsets * ~of_pair)
            if one.pair is not None:
                spans_of_second.append(offsets * of_pair)
    inputs = encoder.padded(rows)
    if any(one.pair is not None for one in examples) and "token_type_ids" in found:
        inputs["token_type_ids"] = pad_sequence(types, batch_first=True)
    labels = torch.tensor([int(one.label) for one in examples]) if classes else None
    spans += spans_of_second
    return AuditBatch(number, inputs, labels, tuple(flat_texts(examples)), tuple(spans) or None, tuple(examples))


def token_place(batch: AuditBatch, row: int, encoder: TextEncoder | None) -> TokenPlace:
    """Return the position of a token and the tokens around it, decoded if there is a tokenizer."""
    ids, mask = batch.ids, batch.token_mask
    if ids is None or row >= ids.numel():
        return TokenPlace(batch=batch.number, place=row)
    sequence, position = divmod(row, ids.shape[1])
    line = ids[sequence].tolist()
    near = range(max(0, position - CONTEXT), min(len(line), position + CONTEXT + 1))
    real = [place for place in near if mask is None or mask[sequence, place]]
    parts = {
        "text": [position],
        "before": [place for place in real if place < position],
        "after": [place for place in real if place > position],
        "context": real,
    }
    decoded = {} if encoder is None else {name: encoder.decode([line[n] for n in part]) for name, part in parts.items()}
    where: dict[str, Any] = {"sequence": sequence, "position": position, "token": line[position], **decoded}
    return TokenPlace(batch=batch.number, place=row, **where)
