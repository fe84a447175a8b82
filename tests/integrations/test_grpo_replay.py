"""Replay in TRL's trainers: every row of every micro-batch has the routes of its own completion."""

from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from foreign_routes import random_routes
from tiers import quick_or_slow
from tiny import tiny
from torch import Tensor
from trained_by_others import SETTINGS, adapter, gradients_of, sentence, tokenizer
from wording import assert_refused

import holdfast
from holdfast.replaying.routes import join_layers
from holdfast.replaying.trl import _require_recordable

trl = pytest.importorskip("trl", reason="TRL is not installed")
datasets = pytest.importorskip("datasets")

LAYERS, EOS, PAD = 3, 2, 0
ROLLOUT: dict[str, Any] = {
    "max_steps": 4,
    "num_generations": 2,
    "max_completion_length": 6,
    "beta": 0.0,
    "gradient_accumulation_steps": 2,
    "learning_rate": 1e-3,
}


GRPO: Any = type("GRPO", (holdfast.RolloutReplay, trl.GRPOTrainer), {})
RLOO: Any = type("RLOO", (holdfast.RolloutReplay, trl.RLOOTrainer), {})


class ForeignRollout:
    """A `rollout_func` with random completions of different lengths and random routes, all of them different."""

    def __init__(self, rows_left_out: int = 1) -> None:
        self.records: dict[tuple[int, ...], Tensor] = {}  # by token ids, prompt included
        self.rows_left_out = rows_left_out

    def __call__(self, prompts: list[str], trainer: Any) -> dict[str, Any]:
        found: dict[str, Any] = {"prompt_ids": tokenizer()(prompts)["input_ids"], "completion_ids": [], "routed_experts": []}
        for number, prompt in enumerate(found["prompt_ids"]):
            seed = len(self.records)
            length = 2 + seed % 4
            completion = torch.randint(7, 60, (length,), generator=torch.Generator().manual_seed(seed)).tolist()
            completion += [EOS] * (number % 3 != 0)  # without it, the completion was truncated
            tokens = tuple(prompt + completion)
            record = random_routes(LAYERS, shape=(1, len(tokens)), seed=seed)[0, : len(tokens) - self.rows_left_out]
            self.records[tokens] = record
            found["completion_ids"].append(completion)
            found["routed_experts"].append(record.numpy())
        return found | {"logprobs": [[0.0] * len(ids) for ids in found["completion_ids"]]}


class Spy:
    """What the forwards of a model were given: token ids, mask, and routes or None."""

    def __init__(self, model: Any) -> None:
        self.seen: list[tuple[Tensor, Tensor, Tensor | None]] = []
        model.register_forward_pre_hook(self._keep, with_kwargs=True, prepend=True)

    def _keep(self, model: Any, given: Any, options: dict[str, Any]) -> None:
        if options.get("fused_lm_head"):
            self.seen.append((options["input_ids"], options["attention_mask"], options.get("routed_experts")))

    def rows(self, by_mask: bool) -> list[tuple[tuple[int, ...], Tensor, Tensor]]:
        """Return tokens without padding, their routes, and the routes of padding, for every row of every forward.

        by_mask   padding is what the mask says (a model may sample the padding token); else it is the padding token (a mask
                  may leave out whole completions)
        """
        found = []
        for ids, mask, routes in self.seen:
            assert routes is not None and routes.shape[:2] == ids.shape
            for row, real, experts in zip(ids, mask != 0 if by_mask else ids != PAD, routes, strict=True):
                found.append((tuple(row[real].tolist()), experts[real], experts[~real]))
        return found


def native() -> Any:
    return holdfast.reroute(tiny("mixtral"), "native")


def trainer_of(kind: Any, model: Any, folder: Path, rollout: Any = None, **options: Any) -> Any:
    rows = datasets.Dataset.from_list([{"prompt": sentence(seed, 2 + seed % 4)} for seed in range(16)])
    config = trl.RLOOConfig if issubclass(kind, trl.RLOOTrainer) else trl.GRPOConfig
    own = {name: options.pop(name) for name in ("replay", "peft_config") if name in options}
    torch.manual_seed(0)
    return kind(
        model,
        reward_funcs=lambda completions, **_: [float(len(set(text))) for text in completions],
        args=config(output_dir=str(folder), **{**SETTINGS, **ROLLOUT, **options}),
        train_dataset=rows,
        processing_class=tokenizer(),
        **own,
        **({} if rollout is None else {"rollout_func": rollout}),
    )


WAYS: dict[str, dict[str, Any]] = {
    "accumulated": {},
    "two iterations": {"num_iterations": 2},
    "several steps for a rollout": {"steps_per_generation": 4, "gradient_accumulation_steps": 1},
    "padded to multiples": {"pad_to_multiple_of": 8},
    "truncated are masked": {"mask_truncated_completions": True},
    "checkpointed": {"gradient_checkpointing": True},
}


@pytest.mark.every_combination
@pytest.mark.parametrize("way", quick_or_slow(WAYS, ("two iterations", "truncated are masked")))
def test_every_row_of_every_micro_batch_runs_the_experts_of_its_own_completion(way: str, tmp_path: Path) -> None:
    model, rollout = native(), ForeignRollout(rows_left_out=len(way) % 2)
    trainer = trainer_of(GRPO, model, tmp_path, rollout, **WAYS[way])
    spy = Spy(model)
    with holdfast.trace(model, keep="all") as traced:
        trainer.train()
    rows = spy.rows(by_mask=False)
    assert {tokens for tokens, _, _ in rows} == rollout.records.keys() and len(rows) >= 16
    for tokens, routes, of_padding in rows:
        record = rollout.records[tokens]
        assert torch.equal(routes[: len(record)].long(), record) and bool((routes[len(record) :] == -1).all())
        assert bool((of_padding == -1).all())
    assert len(traced.steps) == len(spy.seen)
    for step, (_, _, given) in zip(traced.steps, spy.seen, strict=True):
        assert given is not None and step.shape is not None
        used = join_layers(list(step), step.shape, None)
        asked = given.long().where(given >= 0, used)
        assert torch.equal(used.sort(-1).values, asked.sort(-1).values)


@pytest.mark.parametrize(
    "options", [{}, {"pad_to_multiple_of": 8}, pytest.param({"num_iterations": 2}, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("kind", [GRPO, RLOO])
def test_routes_of_trls_own_generation_are_those_of_a_forward_over_each_completion(
    kind: Any, options: dict[str, Any], tmp_path: Path
) -> None:
    model = native()
    trainer = trainer_of(kind, model, tmp_path, learning_rate=0.0, **options)
    spy = Spy(model)
    trainer.train()
    rows = spy.rows(by_mask=True)
    assert len({len(tokens) for tokens, _, _ in rows}) > 1, "there was no padding"
    model.eval()
    for tokens, routes, of_padding in rows:
        with holdfast.trace(model) as traced, torch.no_grad():
            model(input_ids=torch.tensor([tokens]))
        live, given = holdfast.Routes.from_trace(traced, model), holdfast.Routes.from_tensor(routes[None], model)
        assert bool(given.recorded[0, :-1].all()) and int(given.differs(live).sum()) == 0
        assert bool((of_padding == -1).all())


def test_without_replay_the_batch_has_routes_and_every_forward_is_live(tmp_path: Path) -> None:
    model, rollout = native(), ForeignRollout()
    trainer = trainer_of(GRPO, model, tmp_path, rollout, replay=False)
    spy = Spy(model)
    batches: list[Any] = []
    compute_loss = trainer._compute_loss

    def keep_batch(model: Any, inputs: Any) -> Any:
        batches.append(inputs)
        return compute_loss(model, inputs)

    trainer._compute_loss = keep_batch
    trainer.train()
    assert len(batches) == 8 and all((batch["routed_experts"] >= 0).any() for batch in batches)
    assert all(routes is None for _, _, routes in spy.seen) and len(spy.seen) == 8


@pytest.mark.parametrize("adapted", quick_or_slow([False, True], [True]))
def test_the_policy_is_replayed_and_the_reference_is_live(adapted: bool, tmp_path: Path) -> None:
    """With adapters the reference is the policy without them, so the same model runs both."""
    holdfast.save(native(), tmp_path / "saved", tokenizer=tokenizer())
    model, rollout = holdfast.load(tmp_path / "saved"), ForeignRollout()
    options = {"peft_config": adapter()} if adapted else {}
    trainer = trainer_of(GRPO, model, tmp_path / "run", rollout, beta=0.1, num_iterations=2, **options)
    assert (trainer.ref_model is None) == adapted
    policy, reference = Spy(model), Spy(trainer.ref_model or native())
    trainer.train()
    replayed = [routes is not None for _, _, routes in policy.seen]
    # A rollout for 4 forwards: the old log-probabilities in 2 parts, the reference in 2, then training.
    passes = [True] * 2 + ([False] * 2 if adapted else []) + [True] * 4
    assert replayed == passes * 2
    assert [routes for _, _, routes in reference.seen] == ([] if adapted else [None] * 4)


@pytest.mark.parametrize("adapted", quick_or_slow([False, True], [True]))
def test_checkpointing_does_not_change_the_gradients_of_replay(adapted: bool, tmp_path: Path) -> None:
    found = []
    for name, options in (("plain", {}), ("checkpointed", {"gradient_checkpointing": True}), ("live", {"replay": False})):
        given = {"peft_config": adapter()} if adapted else {}
        trainer = trainer_of(GRPO, native(), tmp_path / name, ForeignRollout(), max_steps=1, **options, **given)
        found.append(gradients_of(trainer, trainer.model))
    plain, checkpointed, live = found
    assert plain.keys() == checkpointed.keys() == live.keys() and plain
    torch.testing.assert_close(checkpointed, plain, atol=1e-6, rtol=1e-4)
    assert any(not torch.allclose(live[name], gradient, atol=1e-5) for name, gradient in plain.items())


def test_what_cannot_be_recorded_is_refused(tmp_path: Path) -> None:
    assert_refused("has no hooks that take routes", trainer_of, GRPO, tiny("mixtral"), tmp_path)
    usual = {"use_vllm": False, "tools": [], "rollout_func": None, "use_transformers_continuous_batching": False}
    _require_recordable(SimpleNamespace(**usual))
    _require_recordable(SimpleNamespace(**usual | {"use_vllm": True, "rollout_func": len}))
    for changed, sentence_of_it in (
        ({"use_vllm": True}, "TRL does not ask vLLM for routes: give a rollout_func"),
        ({"use_transformers_continuous_batching": True}, "continuous batching cannot be recorded: give a rollout_func"),
        ({"tools": [len], "rollout_func": len}, "turns of tools and environments are not recorded"),
    ):
        assert_refused(sentence_of_it, _require_recordable, SimpleNamespace(**usual | changed))


def test_rollouts_without_routes_or_with_those_of_another_model_are_refused(tmp_path: Path) -> None:
    def rollout(left_out: str, layers: int, prompts: list[str], trainer: Any) -> dict[str, Any]:
        found = ForeignRollout()(prompts, trainer)
        found["routed_experts"] = [record[:, :layers] for record in found["routed_experts"]]
        return {name: value for name, value in found.items() if name != left_out}

    for left_out, layers, match in (
        ("routed_experts", 3, 'returned no "routed_experts"'),
        ("", 2, "2 layers; this model has 3"),
        ("prompt_ids", 3, "must return keys"),
    ):
        assert_refused(match, trainer_of(GRPO, native(), tmp_path, partial(rollout, left_out, layers)).train)


def test_a_batch_that_lost_its_routes_or_changed_its_shape_is_refused(tmp_path: Path) -> None:
    trainer = trainer_of(GRPO, native(), tmp_path, ForeignRollout())
    assert_refused("lost its", trainer._compute_loss, trainer.model, {})
    ids = torch.ones(2, 5, dtype=torch.long)
    trainer._routes = torch.zeros(2, 4, LAYERS, 2, dtype=torch.int8)
    with pytest.raises(ValueError, match=r"shape \(2, 5\), but the rollout \(2, 4\)"):
        trainer._get_per_token_logps_and_entropies(trainer.model, ids, ids, 2)


def test_records_of_rows_are_what_from_sequences_takes() -> None:
    model = native()
    mask = torch.tensor([[0, 1, 1, 1, 1], [1, 1, 1, 0, 0]])
    experts = random_routes(LAYERS, shape=(2, 5)).where(mask.view(2, 5, 1, 1) > 0, -1)
    experts[0, 4] = -1  # the last token of a sequence may lack a record
    routes = holdfast.Routes.from_tensor(experts, model)
    records = routes.to_sequences()
    assert [len(record) for record in records] == [3, 3]
    assert torch.equal(holdfast.Routes.from_sequences(records, model, attention_mask=mask).experts, routes.experts)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 2])
def test_the_example_runs_and_replay_makes_the_largest_log_ratio_smaller(
    seed: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In so few steps the 99% quantile is not smaller with every seed."""
    import grpo_replay

    monkeypatch.setattr("sys.argv", ["grpo_replay.py", "--steps", "8", "--seed", str(seed)])
    grpo_replay.main()
    lines = capsys.readouterr().out.splitlines()
    header = next(number for number, line in enumerate(lines) if line.split() == ["live", "replay"])
    rows = [line.rsplit(maxsplit=2) for line in lines[header + 1 :] if line.strip()]
    table = {row[0].strip(): row[1:] for row in rows if "{" not in row[0]}
    live, replay = ({name: float(values[column]) for name, values in table.items()} for column in (0, 1))
    assert 0.2 < live["sets that differ"] < 5 and replay["sets that differ"] == replay["tokens that differ"] == 0
    assert replay["largest"] < live["largest"] and replay["mean |log ratio|"] < live["mean |log ratio|"] < 0.1
    assert abs(replay["mean ratio"] - 1) < 0.01 and 0.3 < replay["first rewards"] < 0.9
