"""Merge near-equal experts of a trained model, and compare the loss with that of a model that loses its least used ones.

    python examples/merge_experts.py RUN --keep 6     # RUN: a folder of `holdfast train` or `compare`, with a language model

In each layer the two experts with the nearest weights (by cosine) become one, until `keep` are left: the mean of both, by
how many tokens use them, in the place of the more used one; the other one is disabled. docs/notes.md has what we saw.
"""

import argparse
from collections.abc import Sequence

import torch
from torch import nn
from torch.nn.functional import normalize

import holdfast
from holdfast.hub.layers import moe_layers
from holdfast.train.saved_model import load_model_and_task


@torch.no_grad()
def merge(experts: nn.Module, used: Sequence[float], keep: int) -> tuple[list[int], list[float]]:
    """Merge experts in place until `keep` are left. Return those merged into others, and the cosine of each pair."""
    left, tokens, gone, cosines = list(range(len(used))), list(used), [], []
    while len(left) > keep:
        rows = normalize(torch.cat([weight[left].flatten(1) for weight in experts.parameters()], dim=1))
        cosine = (rows @ rows.t()).fill_diagonal_(-1)
        pair = (left[place] for place in divmod(int(cosine.argmax()), len(left)))
        goes, stays = sorted(pair, key=lambda expert: tokens[expert])
        share = tokens[goes] / max(tokens[goes] + tokens[stays], 1e-9)
        for weight in experts.parameters():
            weight[stays] = (1 - share) * weight[stays] + share * weight[goes]
        tokens[stays] += tokens[goes]
        left.remove(goes)
        gone.append(goes)
        cosines.append(float(cosine.max()))
    return gone, cosines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", help="a folder of holdfast train, or of a cell of compare, with a language model")
    parser.add_argument("--keep", type=int, default=6, help="experts that are left in each layer (6)")
    parser.add_argument("--tokens", type=int, default=8192, help="of the test text, to measure usage and loss on (8192)")
    given = parser.parse_args()

    model, task = load_model_and_task(given.run)
    texts = list(task.audit_inputs(given.tokens))
    settings = {"tokenizer": task.audit_tokenizer, "tokens": given.tokens, "length": task.recipe.data.length}
    before = holdfast.audit(model, texts, perturb=["none"], **settings)
    pruned = holdfast.prune(model, texts, keep=given.keep, **settings)
    gone = {}
    for number, (layer, seen) in enumerate(zip(moe_layers(model), before.layers, strict=True)):
        gone[number], cosines = merge(layer.experts, seen.load.percent, given.keep)
        pairs = ", ".join(f"{cosine:.3f}" for cosine in cosines)
        print(f"layer {number}: cosines of the merged pairs {pairs}")
    with holdfast.disable(model, gone):
        merged = holdfast.audit(model, texts, perturb=["none"], **settings)
    print(f"loss {before.overall.loss:.4f}; least used removed {pruned.loss.after:.4f}; merged {merged.overall.loss:.4f}")


if __name__ == "__main__":
    main()
