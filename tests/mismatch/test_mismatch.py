"""`measure_mismatch`: against loops over tokens, and what replay, `smooth` and float32 routing change."""

import copy
import math
from typing import Any

import pytest
import torch
import transformers
from auditing.audited_models import batches, sparse, texts, tokenizer
from tiny import tiny
from wording import assert_refused

import holdfast
from holdfast.auditing.model_and_data import AuditedModel
from holdfast.hub.install import hooks_of
from holdfast.mismatch import MismatchReport, Rollout, measure_mismatch
from holdfast.mismatch.forwards import run_forwards, weights_of_rollout, with_replay
from holdfast.mismatch.rollout import Sequences

QUICK: dict[str, Any] = {"draws": 100}


def made(name: str) -> Any:
    return sparse(name) if name == "smoe" else tiny(name)


def given_sequences() -> list[list[int]]:
    """Return the sequences of two batches, without padding."""
    return [
        [int(token) for token, real in zip(row, mask, strict=True) if real]
        for batch in batches(2)
        for row, mask in zip(batch["input_ids"], batch["attention_mask"], strict=True)
    ]


@torch.no_grad()
def naive_forward(model: Any, tokens: list[int]) -> tuple[list[float], list[list[set[int]]]]:
    """Return the log-probability of every token but the first, and the experts of every token and layer, from one forward
    over the sequence alone."""
    with holdfast.trace(model) as traced:
        logits = model(input_ids=torch.tensor([tokens])).logits[0].float()
    logprobs = [float(logits[place].log_softmax(-1)[tokens[place + 1]]) for place in range(len(tokens) - 1)]
    sets = []
    for place in range(len(tokens)):
        sets.append([{e for e in r.experts[place].tolist() if e < r.gates.shape[-1]} for r in traced])
    return logprobs, sets


def compare_naively(low: Any, high: Any) -> tuple[list[float], list[list[bool]]]:
    """Return the log ratios of all tokens, and whether sets differ, by token and layer."""
    ratios, differ = [], []
    for tokens in given_sequences():
        (before, own), (after, others) = naive_forward(low, tokens), naive_forward(high, tokens)
        ratios += [two - one for one, two in zip(before, after, strict=True)]
        differ += [[one != two for one, two in zip(*pair, strict=True)] for pair in zip(own, others, strict=True)]
    return ratios, differ


@pytest.mark.parametrize("model_type", ["mixtral", "deepseek_v3"])
def test_the_live_row_is_that_of_a_loop_over_sequences(model_type: str) -> None:
    model = tiny(model_type)
    low = copy.deepcopy(model).to(torch.bfloat16)
    for name, buffer in model.named_buffers():  # from_pretrained(dtype=...) does not round buffers that are not saved
        if "inv_freq" in name or "correction_bias" in name:
            low.get_buffer(name).data = buffer.clone()
    ratios, differ = compare_naively(low, model)
    report: Any = measure_mismatch(model, list(batches(2)), **QUICK)
    sets, found = report.row("live").sets, report.row("live").logprobs
    assert sum(map(sum, differ)) > 0  # otherwise this test shows little
    assert sets.tokens == len(differ) and found.tokens == len(ratios)
    assert sets.routers_differ.value == pytest.approx(sum(map(sum, differ)) / sum(map(len, differ)))
    assert sets.tokens_differ.value == pytest.approx(sum(map(any, differ)) / len(differ))
    for layer, entry in enumerate(sets.layers):
        assert entry.routers_differ.value == pytest.approx(sum(token[layer] for token in differ) / len(differ))
    assert found.mean.value == pytest.approx(sum(map(abs, ratios)) / len(ratios), abs=2e-6)
    assert found.largest == pytest.approx(max(map(abs, ratios)), abs=2e-6)
    assert found.ratio.value == pytest.approx(sum(map(math.exp, ratios)) / len(ratios), abs=2e-6)


def test_a_rollout_in_bfloat16_is_what_loading_in_bfloat16_gives(tmp_path: Any) -> None:
    """deepseek_v3 keeps one of its weights in float32 whatever the dtype is."""
    model = tiny("deepseek_v3")
    model.save_pretrained(tmp_path)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16).eval()
    audited, batch = AuditedModel(model), next(iter(batches(1)))
    lengths = batch["attention_mask"].sum(-1)
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    with weights_of_rollout(audited, torch.bfloat16):
        found = run_forwards(audited, Sequences(batch["input_ids"], lengths), batch=2)
    expected = run_forwards(AuditedModel(loaded), Sequences(batch["input_ids"], lengths), batch=2)
    assert torch.equal(found.logprobs.nan_to_num(), expected.logprobs.nan_to_num())
    assert not found.routes.differs(expected.routes).any()
    assert all(torch.equal(weight, before[name]) for name, weight in model.state_dict().items())


@pytest.mark.parametrize("router", ["native", "smooth", "smoe", "similarity"])
def test_token_by_token_gives_what_whole_sequences_give(router: str) -> None:
    model = holdfast.reroute(tiny("mixtral"), router)
    audited, batch = AuditedModel(model), next(iter(batches(1)))
    sequences = Sequences(batch["input_ids"], batch["attention_mask"].sum(-1))
    whole = run_forwards(audited, sequences, batch=3)
    steps = run_forwards(audited, sequences, batch=2, decode=True)
    assert torch.equal(steps.routes.recorded, sequences.token_mask) and torch.equal(
        whole.routes.recorded, sequences.token_mask
    )
    torch.testing.assert_close(steps.logprobs, whole.logprobs, atol=1e-4, rtol=1e-4, equal_nan=True)
    assert not steps.routes.differs(whole.routes).any()


@pytest.mark.parametrize("name", ["olmoe", "deepseek_v3", "smoe"])
def test_replay_in_float32_removes_the_discrete_part(name: str) -> None:
    """With routes from a run in bfloat16, no set differs in float32, and the gap is smaller than with the live router."""
    report: Any = measure_mismatch(made(name), list(batches(4)), **QUICK)
    live, replay = report.row("live"), report.row("replay")
    assert live.sets.routers_differ.value > 0 and live.sets.tokens_differ.value > 0
    assert replay.sets.routers_differ.value == replay.sets.tokens_differ.value == 0
    assert replay.sets.tokens == live.sets.tokens
    assert replay.logprobs.mean.value < live.logprobs.mean.value
    assert replay.logprobs.largest < live.logprobs.largest
    assert replay.logprobs.mean.value > 0  # the rounding
    assert replay.logprobs.change.mean.value == pytest.approx(replay.logprobs.mean.value - live.logprobs.mean.value)
    assert live.logprobs.change is None


@pytest.mark.parametrize("name", ["olmoe", "mixtral", "smoe"])
def test_replay_leaves_the_gap_that_rounding_makes_with_equal_sets(name: str) -> None:
    """The control is the other direction: a run in bfloat16 with the experts of float32, against live float32. Both sides
    have equal sets there too, so its gap is that of rounding alone."""
    model = made(name)
    audited, given = AuditedModel(model), list(batches(32))
    lengths = torch.cat([batch["attention_mask"].sum(-1) for batch in given])
    sequences = Sequences(torch.cat([batch["input_ids"] for batch in given]), lengths)
    with with_replay(model):
        live = run_forwards(audited, sequences, batch=8)
        with weights_of_rollout(audited, torch.bfloat16):
            rollout = run_forwards(audited, sequences, batch=8)
            control = run_forwards(audited, sequences, batch=8, routes=live.routes)
        replayed = run_forwards(audited, sequences, batch=8, routes=rollout.routes)
    assert not control.routes.differs(live.routes).any() and not replayed.routes.differs(rollout.routes).any()
    differs = live.routes.differs(rollout.routes).any(-1)
    assert differs.any()
    scored = ~live.logprobs.isnan()
    of_live, of_replay, of_rounding = (
        float((one.logprobs - other.logprobs)[scored].abs().mean())
        for one, other in ((live, rollout), (replayed, rollout), (live, control))
    )
    assert of_replay == pytest.approx(of_rounding, rel=0.1) and of_live > 1.1 * max(of_replay, of_rounding)
    # Until the first set that differs, a sequence has the same numbers live and replayed.
    same = ~differs.cummax(-1).values
    same = scored & same.roll(1, -1)  # a log-probability is computed at the token before
    assert same.any()
    torch.testing.assert_close(replayed.logprobs[same], live.logprobs[same], atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", ["mixtral", "smoe"])
def test_equal_conditions_have_no_mismatch_and_the_model_is_as_before(name: str) -> None:
    model = made(name).train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    hooks = hooks_of(model)
    report: Any = measure_mismatch(model, list(batches(2)), rollout_dtype="float32", rollout_batch=8, **QUICK)
    assert [row.remedy for row in report.rows] == ["live", "replay", "smooth", "float32"]
    for row in report.rows:
        assert row.sets.routers_differ.value == 0 and row.logprobs.largest == 0
        assert row.logprobs.ratio.value == 1 and row.logprobs.outside.value == 0
        assert row.logprobs.tail[0] == 0
    assert model.training and all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert (hooks_of(model) is None) == (hooks is None)


def test_smooth_is_calibrated_and_costs_what_the_report_says() -> None:
    model = tiny("mixtral")
    report: Any = measure_mismatch(model, list(batches(4)), router="smooth[budget=0.75]", **QUICK)
    row = report.row("smooth")
    assert row.router == "smooth[budget=0.75]" and 2.6 < row.experts_per_token < 2.9
    assert report.row("live").experts_per_token == 2 and row.loss != report.row("live").loss
    holdfast.reroute(model, "smooth[budget=0.75]")  # not calibrated: the strip of the preset
    report = measure_mismatch(model, list(batches(4)), **QUICK)
    assert abs(report.row("live").experts_per_token - 2.75) > abs(row.experts_per_token - 2.75)
    (skipped,) = report.skipped
    assert skipped.remedy == "smooth" and "already rerouted" in skipped.reason


def test_float32_routing_keeps_the_weights_of_routers() -> None:
    """The gate of the rollout has its float32 weights, and its scores are computed from them in float32."""
    model = tiny("mixtral")
    gates = [layer.mlp.gate for layer in model.model.layers]
    seen: list[tuple[torch.dtype, torch.dtype]] = []
    for gate in gates:
        gate.register_forward_pre_hook(lambda gate, inputs: seen.append((gate.weight.dtype, inputs[0].dtype)))
    measure_mismatch(model, list(batches(1)), **QUICK)
    assert (torch.bfloat16, torch.bfloat16) in seen and (torch.float32, torch.bfloat16) in seen
    assert seen[-1] == (torch.float32, torch.float32)


def test_a_recorded_rollout_is_compared_as_it_is() -> None:
    """A record with known differences: two sets and one log-probability of a float32 run were changed by hand."""
    model = tiny("mixtral")
    kept: list[Rollout] = []
    measure_mismatch(model, list(batches(2)), on_rollout=kept.append, rollout_dtype="float32", rollout_batch=8, **QUICK)
    own = kept[0]
    assert own.engine == "Holdfast, float32, batches of 8, whole sequences" and own.logprobs is not None
    experts, logprobs = own.routes.experts.clone(), own.logprobs.clone()
    other = next(e for e in range(8) if e not in experts[0, 3, 1].tolist())
    experts[0, 3, 1, 0] = other
    experts[1, 2, 2] = torch.tensor([e for e in range(8) if e not in experts[1, 2, 2].tolist()][:2])
    logprobs[:, :5] = torch.nan  # the prompt
    logprobs[2, 9] -= 0.5
    changed = Rollout(own.input_ids, own.lengths, holdfast.Routes.from_tensor(experts, model), logprobs, "by hand")
    report: Any = measure_mismatch(model, changed, simulate=False, **QUICK)
    assert [(row.remedy, row.rollout) for row in report.rows] == [("live", "recorded"), ("replay", "recorded")]
    live, tokens = report.rows[0], int(own.lengths.sum())
    assert live.sets.tokens == tokens and report.data.engine == "by hand"
    assert live.sets.routers_differ.value == pytest.approx(2 / (3 * tokens))
    assert [round(layer.routers_differ.value * tokens) for layer in live.sets.layers] == [0, 1, 1]
    assert [round(layer.tokens_differ_so_far.value * tokens) for layer in live.sets.layers] == [0, 1, 2]
    assert live.logprobs.tokens == tokens - 5 * len(own.lengths)
    assert live.logprobs.largest == pytest.approx(0.5, abs=1e-5)
    assert live.logprobs.outside.value == pytest.approx(1 / live.logprobs.tokens)
    assert live.logprobs.quantiles["50"].value == 0
    replay: Any = report.row("replay", "recorded")
    assert replay.sets.routers_differ.value == 0 and replay.logprobs.quantiles["90"].value > 0
    both: Any = measure_mismatch(model, changed, **QUICK)
    assert len(both.rows) == 6 and both.rows[:2] == report.rows
    assert both.row("live").logprobs.tokens == live.logprobs.tokens  # the answers, in simulated rollouts too


def test_a_record_without_logprobs_is_compared_by_its_sets() -> None:
    model = tiny("mixtral")
    kept: list[Rollout] = []
    measure_mismatch(model, list(batches(1)), on_rollout=kept.append, **QUICK)
    own = kept[0]
    report: Any = measure_mismatch(model, Rollout(own.input_ids, own.lengths, own.routes), **QUICK)
    assert report.row("live", "recorded").logprobs is None and report.row("live", "recorded").sets.tokens > 0
    assert report.row("live").logprobs is not None and report.data.logprobs is False
    unknown = torch.full(own.input_ids.shape, math.nan)
    unknown[:, 0] = -1.0  # the first token of a sequence has no log-probability in training
    same = measure_mismatch(model, Rollout(own.input_ids, own.lengths, own.routes, unknown), **QUICK)
    assert same.rows == report.rows and same.data == report.data


def test_texts_are_measured_and_the_report_can_be_saved(tmp_path: Any) -> None:
    told: list[tuple[int, str]] = []
    small = {**QUICK, "length": 8, "batch": 4, "tokens": 48, "progress": lambda *done: told.append(done)}
    report: Any = measure_mismatch(tiny("mixtral"), texts(6), tokenizer=tokenizer(), name="mine", **small)
    assert report.model.name == "mine" and report.data.tokens >= 48 and report.status == "complete"
    phases = list(dict.fromkeys(what for _, what in told))
    assert phases == [
        "training, live",
        "simulated rollout, live",
        "training, replay of the simulated rollout",
        "calibration of smooth",
        "simulated rollout, smooth",
        "training, smooth",
        "simulated rollout, float32 routing",
        "training, float32 routing",
    ]
    assert told[-1][0] == 8 * report.data.tokens
    assert MismatchReport.load(report.save(tmp_path / "found.json")) == report


def test_what_was_finished_is_reported_after_an_interrupt() -> None:
    def stop(done: int, what: str) -> None:
        if "smooth" in what:
            raise KeyboardInterrupt

    model = tiny("mixtral")
    report: Any = measure_mismatch(model, list(batches(1)), progress=stop, **QUICK)
    assert report.status == "interrupted" and [row.remedy for row in report.rows] == ["live", "replay"]
    assert hooks_of(model) is None

    def stop_at_once(done: int, what: str) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        measure_mismatch(model, list(batches(1)), progress=stop_at_once, **QUICK)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"rollout_dtype": "bfloat"}, "bfloat16"),
        ({"rollout_batch": 0}, "rollout_batch is 0"),
        ({"clip": (1.2, 0.8)}, "clip is 1.2 to 0.8"),
        ({"clip": (0.8, math.inf)}, "clip is "),
        ({"draws": 3}, "draws is 3"),
        ({"router": "smoth"}, "smooth"),
        ({"router": "native"}, "native"),
        ({"rolout_batch": 1}, "rollout_batch"),
        ({"simulate": False}, "leaves nothing to compare"),
        ({"length": 1}, "length is 1"),
    ],
)
def test_wrong_settings_are_refused_in_one_sentence(settings: dict[str, Any], says: str) -> None:
    assert_refused(says, measure_mismatch, tiny("mixtral"), list(batches(1)), **settings)


def test_what_does_not_fit_the_model_is_refused_before_any_forward() -> None:
    model, kept = tiny("mixtral"), list[Rollout]()
    measure_mismatch(model, list(batches(1)), on_rollout=kept.append, **QUICK)
    rollout = kept[0]

    def refused(other: Any, given: Any, says: str) -> None:
        other.register_forward_pre_hook(lambda model, inputs: pytest.fail("a forward ran"))
        assert_refused(says, measure_mismatch, other, given, **QUICK)

    refused(tiny("olmoe"), rollout, "another model: they are of a model of type mixtral")
    refused(tiny("mixtral", num_hidden_layers=2), rollout, "the MoE layers")
    refused(tiny("mixtral", num_local_experts=6), rollout, "these numbers of experts")
    refused(tiny("mixtral", num_experts_per_tok=3), rollout, "k = 3")
    refused(tiny("mixtral", vocab_size=16), rollout, "this model has 16 tokens")
    refused(tiny("mixtral", max_position_embeddings=8), rollout, "positions end at 8")
    negative = rollout.input_ids.masked_fill(~rollout.token_mask, -100)
    refused(tiny("mixtral"), Rollout(negative, rollout.lengths, rollout.routes), "there is a token id -100")
    refused(tiny("mixtral"), [], "there are no data")
    refused(tiny("mixtral"), [""], "tokenizer")
    refused(tiny("mixtral"), [{"input_ids": torch.tensor([[3]])}], "no sequence has two tokens")
    refused(tiny("mixtral"), [{"inputs_embeds": torch.zeros(1, 4, 32)}], "give texts or batches with input_ids")
    refused(sparse("softmoe[causal=False]"), list(batches(1)), "every token uses every expert")
    classifier = transformers.MixtralForSequenceClassification(model.config)
    refused(classifier, list(batches(1)), "needs a causal language model")


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"router": "softmoe"}, "layers of their own"),
        ({"router": "capacity", "rollout_decode": True}, "cannot be one token at a time"),
    ],
    ids=["no router", "not causal"],
)
def test_a_router_that_cannot_be_measured_is_refused_before_any_forward(settings: dict[str, Any], says: str) -> None:
    model = tiny("mixtral")
    model.register_forward_pre_hook(lambda model, inputs: pytest.fail("a forward ran"))
    assert_refused(says, measure_mismatch, model, list(batches(1)), **settings, **QUICK)
    assert hooks_of(model) is None


def test_a_router_with_new_weights_is_the_same_in_every_report_of_a_seed() -> None:
    model, before = tiny("mixtral"), torch.get_rng_state()
    first, second, other = (measure_mismatch(model, list(batches(1)), router="xmoe", seed=s, **QUICK) for s in (0, 0, 1))
    assert first.rows == second.rows and first.row("smooth").loss != other.row("smooth").loss
    assert torch.equal(torch.get_rng_state(), before)
