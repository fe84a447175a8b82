"""Models larger than memory, which accelerate holds on a disk and fetches layer by layer.

The model under audit: its MoE layers, what routes in each, and how a forward of it is made.

What a model is audited on: texts cut into sequences, or batches that are there already, one at a time.
"""

import hashlib
import inspect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import Any, final

import numpy as np
import torch
from torch import Tensor, nn

from holdfast.attacks.text import Spans
from holdfast.certificates import Gate
from holdfast.data import Document, Tokenizer, Vocabulary
from holdfast.data.tokenizers import is_bare
from holdfast.hub.layers import Site, sites
from holdfast.hub.tracing import require_known, watched
from holdfast.metrics import Boundary, boundary_of, levels_of
from holdfast.metrics.tasks import IGNORED
from holdfast.routing import Router


@contextmanager
def resident(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Inside the `with`, the weights of these modules stay in memory; afterwards they are where they were.

    Routers are small, and an audit looks at their weights, rounds them and asks them again between forwards.
    """
    with ExitStack() as stack:
        for module in modules:
            for part in module.modules():
                hook = getattr(part, "_hf_hook", None)
                if getattr(hook, "offload", False):
                    _fetch(part, hook)
                    stack.callback(_drop, part, hook)
        yield


def _fetch(module: nn.Module, hook: Any) -> None:
    hook.pre_forward(module)
    hook.offload = False  # so that a forward neither fetches them again nor drops them


def _drop(module: nn.Module, hook: Any) -> None:
    hook.offload = True
    hook.post_forward(module, None)


def device_of(model: Any) -> torch.device:
    """Where inputs go: a model whose weights are on a disk says `meta`, and its hook knows better."""
    device: torch.device = model.device
    if device.type != "meta":
        return device
    return torch.device(getattr(getattr(model, "_hf_hook", None), "execution_device", None) or "cpu")


@final
class Audited:
    """A Hugging Face model with MoE layers. A `ValueError` says why where it is none."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.sites: list[Site] = sites(model)
        self.routes: list[nn.Module] = [module for _, module, _ in watched(model)]
        self.names: list[str] = [name for name, _, _ in watched(model)]
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
        """Is it a causal language model?"""
        name = type(self.model).__name__
        return "CausalLM" in name or "LMHead" in name

    @property
    def takes_positions(self) -> bool:
        return "position_ids" in self._takes

    @property
    def pad(self) -> int:
        return int(getattr(self.model.config, "pad_token_id", None) or 0)

    def forward(self, inputs: dict[str, Tensor]) -> Any:
        """On the model's device and, for pixels, in its dtype; nothing is cached."""
        if "input_ids" in inputs:
            require_known(self.model, inputs["input_ids"])
        moved = {name: tensor.to(self.device) for name, tensor in inputs.items()}
        moved = {name: tensor.to(self.dtype) if tensor.is_floating_point() else tensor for name, tensor in moved.items()}
        options = {"use_cache": False} if self._cached and "input_ids" in inputs else {}
        return self.model(**moved, **options)

    def core(self, layer: int) -> int | None:
        """Return how many of the best experts are compared as a token's set; None is all that it uses."""
        router = self.sites[layer].router
        return None if router is None else router.select.core

    def boundaries(self) -> dict[int, Boundary]:
        found = {}
        for layer, site in enumerate(self.sites):
            if site.router is not None:
                found[layer] = boundary_of(site.router)
            elif site.family is not None:
                found[layer] = Boundary(levels=levels_of(site.family.rule(site.gate)))
        return found

    def certified(self, layer: int) -> Router | Gate:
        """What a certificate is about: our router, or the plain weights and the rule of a family's gate."""
        site = self.sites[layer]
        if site.router is not None:
            return site.router
        assert site.family is not None
        gate, family = site.gate, site.family
        bias = None if family.bias is None else getattr(gate, family.bias)
        return Gate(getattr(gate, family.weight), int(gate.top_k), bias=bias, rule=family.rule(gate))

    def scorers(self) -> list[nn.Module]:
        """The modules that hold the routers' weights."""
        return [self.routes[layer] if site.family is None else site.gate for layer, site in enumerate(self.sites)]

    def describe(self, name: str | None) -> dict[str, Any]:
        config = self.model.config
        return {
            "name": name or getattr(config, "_name_or_path", None) or type(self.model).__name__,
            "type": config.model_type,
            "class": type(self.model).__name__,
            "dtype": str(self.dtype).removeprefix("torch."),
            "parameters": sum(parameter.numel() for parameter in self.model.parameters()),
            "layers": self.names,
            "experts": [site.size[1] for site in self.sites],
            "routers": ["native" if site.router is None else _parts(site.router) for site in self.sites],
        }


def _parts(router: Router) -> str:
    return " ".join(type(part).__name__ for part in router.parts)


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """The model in evaluation and without gradients; every module is left in the mode it was in."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, mode in modes:
            module.training = mode


@contextmanager
def weights_as(modules: list[nn.Module], dtype: torch.dtype, *, only_rounded: bool = False) -> Iterator[None]:
    """Inside the `with`, floating-point weights are in `dtype`, or rounded to it and back; then bit for bit as they were."""
    parameters = {id(parameter): parameter for module in modules for parameter in module.parameters()}
    kept = [(parameter, parameter.data) for parameter in parameters.values() if parameter.is_floating_point()]
    try:
        for parameter, data in kept:
            rounded = data.to(dtype)
            parameter.data = rounded.to(data.dtype) if only_rounded else rounded
        yield
    finally:
        for parameter, data in kept:
            parameter.data = data


@final
@dataclass(frozen=True)
class Sample:
    """One batch. `labels` are what is to be predicted at each place, already shifted; -100 where nothing is."""

    number: int
    inputs: dict[str, Tensor]
    labels: Tensor | None
    texts: tuple[str, ...] | None = None
    spans: tuple[Spans, ...] | None = None  # of each text's tokens

    @property
    def ids(self) -> Tensor | None:
        return self.inputs.get("input_ids")

    @property
    def size(self) -> int:
        return len(next(iter(self.inputs.values())))

    @property
    def tokens(self) -> int:
        """Real ones; pictures have none that could be counted here."""
        mask = self.inputs.get("attention_mask")
        return int(mask.sum()) if mask is not None else 0 if self.ids is None else self.ids.numel()

    def digest(self, into: Any) -> None:
        for name, tensor in sorted(self.inputs.items()):
            into.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
            into.update(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())


@final
class Reader:
    """A tokeniser, of Hugging Face or of ours, as far as an audit needs one: numbers with their places in the text."""

    def __init__(self, tokenizer: Any, pad: int = 0) -> None:
        if not isinstance(tokenizer, Tokenizer) and not callable(tokenizer):
            raise ValueError(f"a {type(tokenizer).__name__} is no tokenizer; take that of the model, AutoTokenizer's.")
        if is_bare(tokenizer):
            raise ValueError("the tokenizer knows special tokens and no words: its files were not where it was loaded from.")
        self.tokenizer, self.ours = tokenizer, isinstance(tokenizer, Tokenizer)
        own = None if self.ours else getattr(tokenizer, "pad_token_id", None)
        self.pad = pad if own is None else int(own)

    @property
    def has_spans(self) -> bool:
        if self.ours:
            inner = getattr(self.tokenizer, "tokenizer", None)
            return inner is None or bool(inner.is_fast)
        return bool(getattr(self.tokenizer, "is_fast", False))

    def encode(self, text: str) -> tuple[list[int], Spans | None]:
        if self.ours:
            document = Document("text", text.encode("utf-8", "replace"))
            ids = [int(number) for piece in self.tokenizer.pieces([document]) for number in piece]
            return ids, self.tokenizer.spans(document, first=True) if self.has_spans else None
        found = self.tokenizer(text, verbose=False, **({"return_offsets_mapping": True} if self.has_spans else {}))
        spans = np.array(found["offset_mapping"], dtype=np.int64).reshape(-1, 2) if self.has_spans else None
        return list(found["input_ids"]), spans

    def knows(self, word: str) -> bool:
        """Whether the word has tokens of its own, and is not the unknown word."""
        inner = getattr(self.tokenizer, "tokenizer", self.tokenizer)
        unknown = 0 if isinstance(inner, Vocabulary) else getattr(inner, "unk_token_id", None)
        ids = self.tokenizer.encode(word).tolist() if self.ours else inner(word, add_special_tokens=False)["input_ids"]
        return unknown not in ids

    def decode(self, ids: Sequence[int]) -> str:
        return str(self.tokenizer.decode(list(ids)))

    def batch(self, number: int, texts: Sequence[str], length: int | None) -> Sample:
        """Texts as one batch, padded on the right; what goes beyond `length` tokens is left out."""
        read = [self.encode(text) for text in texts]
        rows = [torch.tensor(ids[:length], dtype=torch.int64) for ids, _ in read]
        longest = max(len(row) for row in rows)
        ids = torch.full((len(rows), longest), self.pad, dtype=torch.int64)
        mask = torch.zeros_like(ids)
        for place, row in enumerate(rows):
            ids[place, : len(row)], mask[place, : len(row)] = row, 1
        spans = None if not self.has_spans else tuple(found[:length] for _, found in read if found is not None)
        return Sample(number, {"input_ids": ids, "attention_mask": mask}, next_tokens(ids, mask), tuple(texts), spans)

    def pieces(self, text: str, length: int) -> Iterator[str]:
        """A text as texts of at most about `length` tokens, cut between tokens."""
        ids, spans = self.encode(text)
        if spans is None or len(ids) <= length:
            yield text
            return
        places = spans[spans[:, 0] < spans[:, 1]]  # without what the tokeniser adds
        for start in range(0, len(places), length):
            part = places[start : start + length]
            piece = text[int(part[0, 0]) : int(part[-1, 1])]
            if piece.strip():
                yield piece


def next_tokens(ids: Tensor, mask: Tensor | None) -> Tensor:
    """(B,N): at each place the token that follows; -100 at the end and where either is padding."""
    labels = torch.full_like(ids, IGNORED)
    labels[:, :-1] = ids[:, 1:]
    if mask is not None:
        real = mask.bool()
        labels[:, :-1] = labels[:, :-1].masked_fill(~(real[:, 1:] & real[:, :-1]), IGNORED)
    return labels


def from_texts(texts: Iterable[str], reader: Reader, *, batch: int, length: int) -> Iterator[Sample]:
    """Batches of texts; a text that is too long is cut into several, an empty one is passed over."""
    waiting: list[str] = []
    number = 0
    for text in texts:
        if not isinstance(text, str):
            raise ValueError(f"among the texts is a {type(text).__name__}; give strings only, or batches only.")
        for piece in reader.pieces(text, length) if text.strip() else ():
            waiting.append(piece)
            if len(waiting) == batch:
                yield reader.batch(number, waiting, length)
                waiting, number = [], number + 1
    if waiting:
        yield reader.batch(number, waiting, length)


def from_batches(batches: Iterable[Any], audited: Audited) -> Iterator[Sample]:
    """Dicts for the model's forward; their labels are taken out and scored here, so that nothing else enters the loss."""
    for number, given in enumerate(batches):
        if not isinstance(given, Mapping):
            raise ValueError(f"batch {number} is a {type(given).__name__}; expected a dict for the model's forward.")
        tensors = {str(name): tensor for name, tensor in given.items() if isinstance(tensor, Tensor)}
        labels, shifted = tensors.pop("labels", None), tensors.pop("shift_labels", None)
        ids, mask = tensors.get("input_ids"), tensors.get("attention_mask")
        if not tensors or not len(next(iter(tensors.values()))):
            raise ValueError(f"batch {number} is empty; expected input_ids or pixel_values.")
        if ids is not None and audited.predicts_next and shifted is None:
            shifted = next_tokens(ids if labels is None else labels, None if mask is None or mask.dim() != 2 else mask)
        yield Sample(number, tensors, labels if shifted is None else shifted)


def check_size(name: str, value: Any, least: int = 1) -> None:
    if not isinstance(value, int) or value < least:
        raise ValueError(f"{name} is {value!r}; it must be a whole number, at least {least}.")


def samples(
    given: Iterable[Any], audited: Audited, reader: Reader | None, *, batch: int, length: int, tokens: int | None
) -> Iterator[Sample]:
    """Whatever was given, as samples, until there are so many tokens."""
    check_size("batch", batch)
    check_size("length", length, 2)  # one token has no next one
    check_size("tokens", 1 if tokens is None else tokens)
    if isinstance(given, str | Mapping):
        raise ValueError(f"the texts or inputs are one {type(given).__name__}; give a list of strings or of batches.")
    everything = iter(given)
    first = next(everything, None)
    if first is None:
        raise ValueError("there is nothing to audit the model on: no text, no batch.")
    rest = chain([first], everything)
    if isinstance(first, str):
        if reader is None:
            raise ValueError("texts need the model's tokenizer: audit(model, texts, tokenizer=...).")
        found = from_texts(rest, reader, batch=batch, length=length)
    else:
        found = from_batches(rest, audited)
    seen = 0
    for sample in found:
        yield sample
        seen += sample.tokens
        if tokens is not None and seen >= tokens:
            return
    if seen == 0 and isinstance(first, str):
        raise ValueError("there is nothing to audit the model on: every text is empty.")


@final
class Checksum:
    """SHA-256 of everything that was seen."""

    def __init__(self) -> None:
        self._digest = hashlib.sha256()

    def add(self, sample: Sample) -> None:
        sample.digest(self._digest)

    def __str__(self) -> str:
        return str(self._digest.hexdigest())
