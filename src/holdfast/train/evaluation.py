"""A model scored on a text: how well it predicts, and what its routers did meanwhile."""

import math
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from holdfast.hub import has_routers, trace
from holdfast.hub.usable import require_known
from holdfast.metrics import RoutingReport, boundary_of, token_nll
from holdfast.routing import Router

if TYPE_CHECKING:
    from holdfast.train.text_task import Trial

TOKENS = {"cpu": 2048, "cuda": 32768}  # in a batch, about; more only where one block has more
LOGITS = 2**28  # numbers in a batch's logits, at most: 1 GiB


def routing_report(model: Any) -> RoutingReport:
    """For `trace(model, each=...)`, knowing the borders of the model's own routers."""
    routers = [module for module in model.modules() if isinstance(module, Router)]
    return RoutingReport(boundaries={layer: boundary_of(router) for layer, router in enumerate(routers)})


@torch.no_grad()
def score_text(model: Any, trial: "Trial", *, routing: bool = True, losses: list[Tensor] | None = None) -> dict[str, Any]:
    """Every token but the first is scored once, in blocks of the training length.

    "figure" is the perplexity over all targets, "figure_of_kept" over those that the attack leaves alone: the same words in
    the clean text and in the attacked one. The losses of all tokens, in nats, are appended to `losses`.
    """
    require_known(model, trial.blocks.tokens)
    was_training = model.training
    model.eval()
    total = of_kept = 0.0
    tokens = kept_tokens = 0
    place, all_kept = 1, trial.kept  # the first token is not predicted
    tokens_at_once = min(TOKENS.get(model.device.type, TOKENS["cpu"]), LOGITS // model.config.vocab_size)
    batch_size = max(1, tokens_at_once // trial.blocks.length)
    with ExitStack() as stack:
        report = routing_report(model) if routing and has_routers(model) else None
        routes = stack.enter_context(trace(model, each=report.each)) if report is not None else None
        for batch in trial.blocks.batches(batch_size):
            device = model.device
            out = model(input_ids=batch.inputs.to(device), attention_mask=batch.mask.long().to(device), use_cache=False)
            nll = token_nll(out.logits, batch.labels.to(device)).cpu()[batch.mask].double()
            kept = all_kept[place : place + nll.numel()]
            total, tokens = total + float(nll.sum()), tokens + nll.numel()
            of_kept, kept_tokens = of_kept + float(nll[kept].sum()), kept_tokens + int(kept.sum())
            if losses is not None:
                losses.append(nll)
            place += nll.numel()
    model.train(was_training)
    found: dict[str, Any] = {
        "figure": perplexity(total, tokens),
        "figure_of_kept": perplexity(of_kept, kept_tokens) if kept_tokens else None,
        "nll": total,
        "tokens": tokens,
        "kept_tokens": kept_tokens,
        "bits_per_byte": total / math.log(2) / trial.bytes,
    }
    if report is not None and routes is not None:
        report.names = routes.names
        found["routing"] = report.result()
    return found


def perplexity(nll: float, tokens: int) -> float:
    """Infinite where a model is so bad that no float holds it."""
    try:
        return math.exp(nll / tokens)
    except OverflowError:
        return math.inf
