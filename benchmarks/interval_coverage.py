"""Simulate how often the intervals of a comparison contain the true difference. Prints one line of JSON for each setting.

    python benchmarks/interval_coverage.py --runs 2000

A model of router r and seed s answers example i rightly if a_r + S e_rs + 1.5 u_i + W w_ri + v_rsi / 2 > 0, with standard
normal e, u, w and v: u is how easy an example is for all models, w for those of one router. The true accuracy of a router,
over seeds and examples, is then Phi(a_r / sqrt(S^2 + 1.5^2 + W^2 + 1/4)).
"""

import argparse
import itertools
import json
import math
from statistics import NormalDist

import numpy as np

from holdfast.metrics.paired import Shares, difference_of, level_of

ACCURACIES = {"equal": (0.7, 0.7), "apart": (0.9, 0.93), "high": (0.98, 0.98)}
SEED_SPREADS = (0.0, 0.2)  # S
OWN_SPREADS = (0.0, 1.0)  # W
EASE, NOISE = 1.5, 0.5


def coverage(
    accuracies: tuple[float, float], spread: float, own: float, examples: int, seeds: int, runs: int
) -> dict[str, float]:
    """Return how often the interval of the difference, Student's t over seeds alone, and that of a level hold the truth."""
    draw = np.random.default_rng(0)
    total = math.hypot(spread, own, EASE, NOISE)
    abilities = [total * NormalDist().inv_cdf(accuracy) for accuracy in accuracies]
    hits = dict.fromkeys(("difference", "seeds alone", "level"), 0)
    widths = []
    for _ in range(runs):
        ease = EASE * draw.standard_normal(examples)
        routers = []
        for ability in abilities:
            sure = ability + spread * draw.standard_normal((seeds, 1)) + ease + own * draw.standard_normal(examples)
            wrong = (sure + NOISE * draw.standard_normal((seeds, examples)) <= 0).astype(float)
            routers.append([{"figure": 100 * one.mean(), "per_example": Shares(one).stored()} for one in wrong])
        truth = 100 * (accuracies[0] - accuracies[1])
        found = difference_of(*routers)
        bare = difference_of(*([{"figure": one["figure"]} for one in scores] for scores in routers))
        level = level_of(routers[0])
        named = {"difference": (found, truth), "seeds alone": (bare, truth), "level": (level, 100 * (1 - accuracies[0]))}
        for name, (one, value) in named.items():
            assert one is not None and one.low is not None and one.high is not None
            hits[name] += one.low - 1e-9 <= value <= one.high + 1e-9
        assert found is not None and found.shows is not None
        widths.append(found.shows)
    return {**{name: count / runs for name, count in hits.items()}, "half-width": float(np.mean(widths))}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=2000)
    runs = parser.parse_args().runs
    for name, spread, own, count, seeds in itertools.product(ACCURACIES, SEED_SPREADS, OWN_SPREADS, (40, 500), (3, 5)):
        setting = {"accuracies": name, "S": spread, "W": own, "examples": count, "seeds": seeds}
        print(json.dumps({**setting, **coverage(ACCURACIES[name], spread, own, count, seeds, runs)}))


if __name__ == "__main__":
    main()
