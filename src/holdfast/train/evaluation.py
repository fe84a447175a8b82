"""A trained model scored on a text: how well it predicts, and what its routers did meanwhile."""

import math
from typing import Any

import torch

from holdfast.hub import trace
from holdfast.metrics import RoutingReport, boundary_of, token_nll
from holdfast.routing import Router
from holdfast.train.text_task import Trial

BATCH = 32  # blocks


@torch.no_grad()
def score(model: Any, trial: Trial, *, byte_count: int) -> dict[str, Any]:
    """Every token but the first is scored once, in blocks of the training length. `byte_count` is that of the text."""
    was_training = model.training
    model.eval()
    routers = [module for module in model.modules() if isinstance(module, Router)]
    report = RoutingReport(boundaries={layer: boundary_of(router) for layer, router in enumerate(routers)})
    total = left_clean = 0.0
    tokens = clean_tokens = 0
    place = 1  # the first token is not predicted
    with trace(model, each=report.each) as routes:
        for batch in trial.blocks.batches(BATCH):
            device = model.device
            out = model(input_ids=batch.inputs.to(device), attention_mask=batch.mask.long().to(device), use_cache=False)
            nll = token_nll(out.logits, batch.labels.to(device)).cpu()[batch.mask].double()
            total, tokens = total + float(nll.sum()), tokens + nll.numel()
            if trial.touched is not None:
                kept = ~trial.touched[place : place + nll.numel()]
                left_clean, clean_tokens = left_clean + float(nll[kept].sum()), clean_tokens + int(kept.sum())
            place += nll.numel()
    model.train(was_training)
    found = {"nll": total, "tokens": tokens, "perplexity": math.exp(total / tokens)}
    found["bits_per_byte"] = total / math.log(2) / byte_count
    if trial.touched is not None:
        found["perplexity_of_clean_targets"] = math.exp(left_clean / clean_tokens)
    report.names = routes.names
    return {**found, "routing": report.result()}
