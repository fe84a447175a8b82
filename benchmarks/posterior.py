"""Measure the attention posterior of a trained model: its weight on the token itself, on the first token, and its spread.

PYTHONPATH=src python benchmarks/posterior.py results/enwik8/cells/attention-seed0 --data DATA
"""

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from holdfast.kernels.token_mixing import SecondProduct, softmax_mix
from holdfast.routing import token_graph
from holdfast.routing.token_graph import AttentionPosterior
from holdfast.train import load_trained
from holdfast.train.snapshots import routings_of


def weights_of(query: Tensor, key: Tensor, scale: float, causal: bool, second: SecondProduct, bias: Tensor) -> Tensor:
    scores = scale * query.float() @ key.float().transpose(1, 2) + bias.unsqueeze(1)
    scores = scores + second.scale * second.query.float() @ second.key.float().transpose(1, 2)
    if causal:
        later = torch.ones(scores.shape[1:], dtype=torch.bool, device=scores.device).triu(1)
        scores = scores.masked_fill(later, -torch.inf)
    return scores.softmax(-1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cell", type=Path)
    parser.add_argument("--data", type=Path, default=None)
    given = parser.parse_args()
    trained = load_trained(given.cell)
    model = trained.model.to("cuda" if torch.cuda.is_available() else "cpu")
    found: list[dict[str, Any]] = []
    plain = softmax_mix

    def watched(query: Tensor, key: Tensor, value: Tensor, **how: Any) -> Tensor:
        weights = weights_of(query, key, how["scale"], how["causal"], how["second"], how["bias"])
        late = weights[:, 64:]  # tokens that have something to look at
        mixed = plain(query, key, value, **how)
        places = torch.arange(64, weights.shape[1], device=weights.device)
        found.append(
            {
                "self": float(late[:, torch.arange(len(places)), places].mean()),
                "first": float(late[:, :, 0].mean()),
                "last 8": float(sum(late[:, torch.arange(len(places)), places - back].mean() for back in range(8))),
                "tokens looked at": float(torch.special.entr(late).sum(-1).exp().mean()),
                "entropy of p": float(torch.special.entr(value[:, 64:]).sum(-1).mean()),
                "entropy of g": float(torch.special.entr(mixed[:, 64:]).sum(-1).mean()),
                "std over tokens of p": float(value[:, 64:].std(1).mean()),
                "std over tokens of g": float(mixed[:, 64:].std(1).mean()),
            }
        )
        return mixed

    token_graph.softmax_mix = watched  # type: ignore[attr-defined]
    with torch.no_grad():
        routings_of(model, trained.task(given.data).probe())
    heads = [module.entropy.tolist() for module in model.modules() if isinstance(module, AttentionPosterior)]
    for layer, (figures, entropies) in enumerate(zip(found, heads, strict=True)):
        print(json.dumps({"layer": layer, **{k: round(v, 4) for k, v in figures.items()}}))
        print("   entropies of the heads:", [round(value, 2) for value in entropies])


if __name__ == "__main__":
    main()
