"""Replay in models: own routes change nothing, foreign routes are what a loop computes, gradients included."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from changed_models import trainer_of
from foreign_routes import BATCH, IDS, MASK, assert_same_step, gradients, looped, own_routes, random_routes, step
from router_names import IN_TEXT_MODELS
from tiers import quick_or_slow
from tiny import MOE_LAYERS, tiny
from tiny_dense import tiny_dense

import holdfast

NATIVE_LOOPS = ["mixtral", "olmoe", "qwen3_moe", "deepseek_v3"]


def layers_of(model_type: str) -> int:
    return MOE_LAYERS.get(model_type, 3)


@pytest.mark.every_combination
@pytest.mark.parametrize("router", quick_or_slow(IN_TEXT_MODELS, ("smooth", "ac", "capacity", "remoe", "hash", "attention")))
def test_every_router_that_replays_its_own_routes_computes_the_same_bits(router: str) -> None:
    model = holdfast.reroute(tiny("mixtral"), router)
    logits, routes = own_routes(model)
    with torch.no_grad():
        again = model(input_ids=IDS, attention_mask=MASK, routed_experts=routes.experts).logits
    assert torch.equal(again, logits)


@pytest.mark.parametrize("model_type", NATIVE_LOOPS)
@pytest.mark.parametrize("router", ["native", "smoe"])
def test_foreign_routes_give_what_a_loop_gives_with_all_gradients(model_type: str, router: str) -> None:
    routes = random_routes(layers_of(model_type))
    expected = step(looped(model_type, routes).train())
    model = holdfast.reroute(tiny(model_type), router).train()
    assert_same_step(expected, step(model, routed_experts=routes))
    names = [name for name in gradients(model) if name.endswith("gate.weight")]
    assert len(names) == layers_of(model_type) and all(gradients(model)[name].abs().max() > 0 for name in names)


def test_smooth_weighs_foreign_sets_by_the_softmax_of_live_logits() -> None:
    routes = random_routes(3, k=3)
    expected = step(looped("mixtral", routes))
    assert_same_step(expected, step(holdfast.reroute(tiny("mixtral"), "smooth"), routed_experts=routes))


@pytest.mark.parametrize("router", ["native", "symphony+smooth", "ac"])
def test_a_checkpointed_step_replays_the_same_routes_in_its_recomputation(router: str) -> None:
    routes, steps = random_routes(3), []
    for checkpointed in (False, True):
        torch.manual_seed(0)
        model = holdfast.reroute(tiny("mixtral"), router, losses=holdfast.Losses(balance=0.1)).train()
        if checkpointed:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        with holdfast.replay(model, routes):
            loss = model(**BATCH).loss
        loss.backward()  # after the `with`, as trainers do
        steps.append((loss.detach(), gradients(model)))
    assert_same_step(steps[0], steps[1])
    assert not torch.equal(steps[0][0], step(holdfast.reroute(tiny("mixtral"), router).train())[0])


@pytest.mark.parametrize("router", ["native", "smoe"])
@pytest.mark.parametrize("second", ["replayed", "live"])
def test_a_second_checkpointed_forward_before_the_backward_is_refused(router: str, second: str) -> None:
    """Its recomputation could not tell whose routes to replay. The next step runs again."""
    model = holdfast.reroute(tiny("mixtral"), router).train()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    first = model(**BATCH, routed_experts=random_routes(3)).loss
    with pytest.raises(ValueError, match="one forward before each backward"):
        model(**BATCH, routed_experts=random_routes(3, seed=1) if second == "replayed" else None)
    with torch.no_grad():  # old log-probabilities
        model(**BATCH, routed_experts=random_routes(3, seed=2))
    first.backward()
    found = gradients(model)
    plain = holdfast.reroute(tiny("mixtral"), router).train()
    assert_same_step(step(plain, routed_experts=random_routes(3)), (first.detach(), found))
    model(**BATCH).loss.backward()
    model(**BATCH).loss.backward()


def test_accumulated_micro_batches_replay_their_own_rows() -> None:
    routes = random_routes(3)
    model = holdfast.reroute(tiny("mixtral"), "native").train()
    for row in range(2):
        part = {name: value[row : row + 1] for name, value in BATCH.items()}
        loss = model(**part, routed_experts=routes[row : row + 1], num_items_in_batch=torch.tensor(8)).loss
        loss.backward()
    whole = looped("mixtral", routes).train()
    out = whole(**BATCH, num_items_in_batch=torch.tensor(8)).loss
    out.backward()
    torch.testing.assert_close(gradients(model), gradients(whole), atol=2e-5, rtol=1e-3)


def test_tokens_without_a_record_are_live_and_the_last_token_may_lack_one() -> None:
    model = holdfast.reroute(tiny("mixtral"), "native")
    routes = random_routes(3)
    routes[:, -1] = -1
    with holdfast.trace(model) as traced, torch.no_grad():
        model(input_ids=IDS, attention_mask=MASK, routed_experts=routes)
    for layer, routing in enumerate(traced):
        sets = routing.chosen.view(2, 6, 8)
        expected = torch.zeros(2, 6, 8, dtype=torch.bool).scatter(-1, routes[:, :, layer].clamp_min(0), True)
        assert torch.equal(sets[:, :-1], expected[:, :-1])
        live = torch.zeros(2, 8, dtype=torch.bool).scatter(-1, routing.logits.view(2, 6, 8)[:, -1].topk(2).indices, True)
        assert torch.equal(sets[:, -1], live)


def test_the_balance_loss_counts_replayed_sets_with_live_gates() -> None:
    model = holdfast.reroute(tiny("mixtral"), "smoe", losses=holdfast.Losses(balance=1.0)).train()
    routes = random_routes(3)
    with holdfast.trace(model) as traced:
        found = model(**BATCH, routed_experts=routes).router_loss
    total = torch.zeros(())
    for layer, routing in enumerate(traced):
        real = MASK.bool().flatten()
        counts = torch.zeros(8).index_add(
            0, routes[:, :, layer].flatten(0, 1)[real].flatten(), torch.ones(int(real.sum()) * 2)
        )
        total = total + 8 * (counts / counts.sum() * routing.gates[real].mean(0)).sum()
    torch.testing.assert_close(found.detach(), total)


def test_ac_reads_slot_0_of_the_replayed_previous_layer() -> None:
    """Swapping the two slots of a layer's record changes the cluster of the next layer's tokens, and nothing else."""
    model = holdfast.reroute(tiny("mixtral"), "ac")
    for name, buffer in model.named_buffers():
        if name.endswith("score.spreads"):
            buffer.uniform_(0.5, 2.0)
    routes = random_routes(3)
    swapped = routes.clone()
    swapped[:, :, 0] = routes[:, :, 0].flip(-1)
    found = []
    for given in (routes, swapped):
        with holdfast.trace(model) as traced, torch.no_grad():
            model(input_ids=IDS, attention_mask=MASK, routed_experts=given)
        found.append([routing.logits for routing in traced])
    torch.testing.assert_close(found[0][0], found[1][0])
    assert not torch.allclose(found[0][1], found[1][1], atol=1e-4)


@pytest.mark.parametrize("router", ["symphony", "smooth", "ac+symphony"])
def test_routers_learn_from_live_scores_while_they_replay(router: str) -> None:
    live, replayed = (holdfast.reroute(tiny("mixtral"), router, layers=[0]).train() for _ in range(2))
    holdfast.reroute(replayed, "native", layers=[1, 2])
    for _ in range(2):
        live(**BATCH)
        replayed(**BATCH, routed_experts=random_routes(3))
    buffers = (dict(model.model.layers[0].named_buffers()) for model in (live, replayed))
    torch.testing.assert_close(*buffers, rtol=0, atol=0)


def test_a_sparsified_model_replays_and_counts_unused_slots() -> None:
    model = holdfast.sparsify(tiny_dense("llama"), experts=8, router="top-p", noise=0.5)
    logits, routes = own_routes(model)
    used = (routes.experts < 8) & (routes.experts >= 0)
    assert used.sum(-1).unique().numel() > 1  # some tokens leave slots unused
    with torch.no_grad():
        assert torch.equal(model(input_ids=IDS, attention_mask=MASK, routed_experts=routes).logits, logits)


def test_a_base_model_called_by_itself_and_positional_ids_replay() -> None:
    model = holdfast.reroute(tiny("mixtral"), "native")
    routes = random_routes(3)
    with torch.no_grad():
        whole = model(IDS, attention_mask=MASK, routed_experts=routes, output_hidden_states=True).hidden_states[-1]
        base = model.model(IDS, attention_mask=MASK, routed_experts=routes).last_hidden_state
        live = model.model(IDS, attention_mask=MASK).last_hidden_state
    assert torch.equal(whole, base) and not torch.allclose(live, base)


def test_a_failed_forward_leaves_no_routes_to_the_next_one() -> None:
    model = holdfast.reroute(tiny("mixtral"), "native")
    before, _ = own_routes(model)
    with pytest.raises(IndexError), torch.no_grad():
        model(input_ids=IDS + 1000, routed_experts=random_routes(3))
    assert torch.equal(own_routes(model)[0], before)


def test_a_copied_model_has_replay_of_its_own() -> None:
    model = holdfast.reroute(tiny("mixtral"), "native")
    other = copy.deepcopy(model)
    with torch.no_grad():
        expected = model(input_ids=IDS, routed_experts=random_routes(3)).logits
        assert torch.equal(other(input_ids=IDS, routed_experts=random_routes(3)).logits, expected)
        with holdfast.replay(model, random_routes(3)):
            assert not torch.allclose(other(input_ids=IDS).logits, expected)
            assert torch.equal(model(input_ids=IDS).logits, expected)


def test_a_restored_model_takes_no_routes_and_keeps_no_attribute() -> None:
    model = holdfast.restore(holdfast.reroute(tiny("mixtral"), "native"))
    assert not any(hasattr(module, "native_scale") for module in model.modules())
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in model.modules())


@pytest.mark.parametrize("model_type", ["mixtral", "deepseek_v3"])
def test_adapters_of_a_replaying_model_train(model_type: str) -> None:
    peft = pytest.importorskip("peft")
    routes = random_routes(layers_of(model_type))
    plain = looped(model_type, routes)
    adapted = peft.get_peft_model(
        holdfast.reroute(tiny(model_type), "native"), peft.LoraConfig(target_modules=["o_proj"], r=2, init_lora_weights=True)
    )
    with torch.no_grad():
        expected = plain(input_ids=IDS, attention_mask=MASK).logits
        found = adapted(input_ids=IDS, attention_mask=MASK, routed_experts=routes).logits
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
    with holdfast.replay(adapted, routes):
        loss = adapted(**BATCH).loss
    loss.backward()
    assert all(weight.grad is not None for name, weight in adapted.named_parameters() if weight.requires_grad)


@pytest.mark.slow
def test_a_trainer_shuffles_and_splits_routes_with_their_tokens(tmp_path: Path) -> None:
    """The first token id of a sequence names its row: every forward must route it as this row's record says."""
    model, rows = holdfast.reroute(tiny("mixtral"), "native"), 8
    ids = torch.randint(20, 64, (rows, 6), generator=torch.Generator().manual_seed(0))
    ids[:, 0] = torch.arange(rows) + 3
    routes, seen = random_routes(3, shape=(rows, 6)), []

    def compare(layer: int, routing: holdfast.Routing, token_mask: Any) -> None:
        seen.append(routing.chosen)

    data = [{"input_ids": ids[row], "labels": ids[row], "routed_experts": routes[row]} for row in range(rows)]
    settings = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "max_steps": 2, "learning_rate": 0.0}
    given: list[Any] = []
    handle = model.model.embed_tokens.register_forward_pre_hook(lambda _, inputs: given.append(inputs[0]))
    with holdfast.trace(model, each=compare):
        trainer_of(model, tmp_path, data, remove_unused_columns=False, **settings).train()
    handle.remove()
    assert len(given) == 4 and len(seen) == 12
    for batch, layers in zip(given, [seen[start : start + 3] for start in range(0, 12, 3)], strict=True):
        for layer, chosen in enumerate(layers):
            wanted = routes[batch[:, 0] - 3, :, layer].flatten(0, 1)
            assert torch.equal(chosen, torch.zeros(12, 8, dtype=torch.bool).scatter(1, wanted, True))


@pytest.mark.slow
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("router", ["native", "smoe", "symphony+smooth"])
def test_a_compiled_model_replays_the_same(router: str, training: bool) -> None:
    torch.compiler.reset()
    found: list[Any] = []
    for compiled in (False, True):
        torch.manual_seed(0)
        model = holdfast.reroute(tiny("mixtral", num_hidden_layers=2), router).train(training)
        model.set_experts_implementation("batched_mm")
        run: Any = torch.compile(model, fullgraph=not training, backend="aot_eager") if compiled else model
        for seed in (0, 1):  # other routes need no other graph
            model.zero_grad()
            loss = run(**BATCH, routed_experts=random_routes(2, seed=seed), use_cache=False).loss
            loss.backward()
            found.append((loss.detach(), gradients(model)))
    assert_same_step(found[0], found[2])
    assert_same_step(found[1], found[3])


@pytest.mark.slow
def test_bf16_routes_replayed_in_float32_leave_no_other_set() -> None:
    ids = torch.randint(3, 64, (8, 64), generator=torch.Generator().manual_seed(0))
    model = holdfast.reroute(tiny("olmoe"), "native")
    low = copy.deepcopy(model).to(torch.bfloat16)
    with holdfast.trace(low) as traced, torch.no_grad():
        rounded = low(input_ids=ids).logits.float().log_softmax(-1)
    recorded, gaps, differing = holdfast.Routes.from_trace(traced, low), [], []
    for given in (None, recorded):
        with holdfast.trace(model) as traced, torch.no_grad():
            exact = model(input_ids=ids, routed_experts=given).logits.log_softmax(-1)
        differing.append(int(holdfast.Routes.from_trace(traced, model).differs(recorded).sum()))
        targets = ids[:, 1:].unsqueeze(-1)
        gaps.append((exact[:, :-1].gather(-1, targets) - rounded[:, :-1].gather(-1, targets)).abs().mean())
    assert differing[0] > 0 and differing[1] == 0
    assert gaps[1] < 0.8 * gaps[0]


def test_the_layers_that_were_not_rerouted_can_replay_after_what_the_error_says() -> None:
    model = holdfast.reroute(tiny("mixtral"), "similarity@0,2")
    with torch.no_grad(), holdfast.trace(model) as found:
        live = model(input_ids=IDS, attention_mask=MASK).logits
    routes = holdfast.Routes.from_trace(found, model)
    with torch.no_grad():
        with pytest.raises(ValueError, match=r'holdfast.reroute\(model, "native@1"\)'):
            model(input_ids=IDS, attention_mask=MASK, routed_experts=routes)
        holdfast.reroute(model, "native@1")
        again = model(input_ids=IDS, attention_mask=MASK, routed_experts=routes).logits
    assert torch.equal(again, live)
