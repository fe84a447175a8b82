"""Recipes and comparisons with routers that choose by token id, and with other gates."""

from pathlib import Path

import torch
from train.conftest import MakeRecipe

from holdfast import Router
from holdfast.train import Comparison, build_model, make_task, parse_routers


def test_a_balanced_hash_table_counts_the_ids_of_the_training_text(tiny: MakeRecipe) -> None:
    task = make_task(tiny())
    counts = task.token_counts()
    assert counts is not None

    def largest_share(balanced: bool) -> float:
        model = build_model(task, "hash", {"balanced": balanced}, seed=0)
        routers = [module for module in model.modules() if isinstance(module, Router)]
        shares = []
        for router in routers:
            table = router.score.get_buffer("table")
            load = torch.zeros(router.experts).index_add(
                0, table.flatten().long(), counts.repeat_interleave(table.shape[1]).float()
            )
            shares.append(float(load.max() / load.mean()))
        return max(shares)

    assert largest_share(True) < 1.01 < 1.1 < largest_share(False)


def test_a_comparison_trains_all_of_them_and_flips_no_route_of_a_fixed_one(tiny: MakeRecipe, tmp_path: Path) -> None:
    written = "smoe,hash[balanced=true],stablemoe[stage=0.5],sparsemax,grouped[groups=2],hierarchical[groups=2]"
    results = Comparison(tiny({"training.steps": 4}), parse_routers(written), 1, tmp_path / "run").run()
    assert len(results) == 6
    for result in results:
        assert 0 < result["clean"]["nll"] < 10 * result["clean"]["tokens"]
        if result["router"].startswith(("hash", "stablemoe")):
            ties = [layer["near_ties"] for layer in result["clean"]["routing"]["layers"]]
            assert all(strip["share"] == 0 for layer in ties for strip in layer["strips"])
