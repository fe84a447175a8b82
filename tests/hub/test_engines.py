"""Real processes under DDP, FSDP2 and expert parallelism: two and four of them learn what one process learns."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from engines_on_ranks import CASES, LEG, STEPS, batch, built, by_hand, descend, descent, relay, train
from ranks import on_ranks

import holdfast

SCRIPT = Path(__file__).with_name("engines_on_ranks.py")
REFUSALS = {
    "twice": "already",
    "after FSDP2": "fully_shard",
    "wrapped": "DistributedDataParallel",
    "dense": "Linear",
    "not divisible": "5 experts",
    "a part of the mesh": "2 of 4 ",
    "save_pretrained": "holdfast.save",
    "a folder that is there": "not empty",
}


@pytest.mark.slow
def test_two_and_four_processes_learn_what_one_learns(tmp_path: Path) -> None:
    """Losses, weights and state; and a checkpoint of weights, state and momenta goes on from 1 to 4 to 2 processes to 1."""
    losses = relay(tmp_path, 0, 0, 1)
    for world in (4, 2):
        on_ranks(SCRIPT, str(tmp_path), processes=world)
        found = [torch.load(tmp_path / f"{world}.{rank}.pt") for rank in range(world)]
        for name, case in CASES[world].items():
            folder = tmp_path / f"{world} {name}"
            assert_follows_one(f"{world} processes, {name}", case, [each[name] for each in found], folder)
        assert_experts_agree([each["by hand"] for each in found])
        for error, said in (each["second derivatives"] for each in found):
            assert error < 1e-5 and "second derivatives" in said
        losses += found[0]["relay"]
        for each in found if world == 2 else []:
            assert max(each["compiled"]) < 1e-6
        if world == 4:
            for each in found:
                assert each["refusals"].keys() == REFUSALS.keys()
                for what, sentence in REFUSALS.items():
                    assert sentence in each["refusals"][what]
    losses += relay(tmp_path, 3 * LEG, 0, 1)
    model = built("llama", ("symphony+smooth", "ac+similarity", "smoe"))
    assert losses == pytest.approx(descend(model, descent(model), range(4 * LEG), 0, 1), abs=1e-5)


def assert_follows_one(what: str, case: Any, ranks: list[dict[str, Any]], folder: Path) -> None:
    alone = train(case, 0, 1)
    assert len(set(alone["losses"])) == STEPS
    for rank in ranks:
        assert rank["losses"] == pytest.approx(alone["losses"], abs=1e-5), what
        for part in ("parameters", "state"):
            assert rank[part].keys() == alone[part].keys()
            for name, value in alone[part].items():
                torch.testing.assert_close(rank[part][name], value, atol=1e-5, rtol=1e-4, msg=f"{what}: {name}")
                assert torch.equal(rank[part][name], ranks[0][part][name]), f"{what}: {name} differs between processes"
    if case[0] == "DDP":
        return
    loaded = holdfast.load(folder)  # weights that were sharded over ranks, from one folder
    contents = {**dict(loaded.named_parameters()), **dict(loaded.named_buffers())}
    for name, value in {**ranks[0]["parameters"], **ranks[0]["state"]}.items():
        assert torch.equal(contents[name], value), f"{what}: {name}, loaded"
    with torch.no_grad():
        assert loaded.eval()(**batch(0)).loss.isfinite()


def assert_experts_agree(ranks: list[dict[str, torch.Tensor]]) -> None:
    alone = by_hand(0, 1)
    assert alone["experts.down_proj"][:5].abs().amax((1, 2)).gt(0).all()  # and the last get no token
    for name, value in alone.items():
        torch.testing.assert_close(ranks[0][name], value, atol=1e-5, rtol=1e-5, msg=name)
        if name.startswith("experts"):
            for rank in ranks[1:]:
                assert torch.equal(rank[name], ranks[0][name])


def test_sharding_experts_needs_a_process_group() -> None:
    with pytest.raises(ValueError, match=re.escape("start with torchrun and call torch.distributed.init_process_group")):
        holdfast.shard_experts(holdfast.Experts(4, 4, 4), None)  # type: ignore[arg-type]
