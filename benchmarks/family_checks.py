"""Try Holdfast on a tiny random model of every family of transformers, and write docs/families.md.

    python benchmarks/family_checks.py                     # all families, about two minutes
    python benchmarks/family_checks.py mixtral t5          # print the result of some

An MoE family passes if `reroute(model, "native")` is bit-identical, a router with other scores changes the outputs,
`symphony` starts from the model's own outputs and learns nothing from padding, `smooth` routes and trains with finite router
gradients in every layer, a saved model loads with the same outputs, and `restore` is bit-identical. A dense family passes if
`sparsify` with copies of the feed-forward networks computes the same as before, another router changes the outputs of
experts that differ and `restore` undoes that, a training step gives finite gradients to every router, nothing is learned
from padding, and a saved model loads with the same outputs. What is refused is listed with the reason that the user sees.
"""

import sys
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from family_models import DENSE_MODELS, MOE_MODELS, dense_inputs, is_installed, tiny_dense, tiny_moe
from torch import Tensor

import holdfast
from holdfast.hub import MOE_FAMILIES
from holdfast.hub.layers import MoELayerRef, moe_family, moe_layers
from holdfast.routing import Router
from holdfast.version import versions

PAGE = Path(__file__).parent.parent / "docs" / "families.md"
IDS = torch.randint(3, 64, (2, 12), generator=torch.Generator().manual_seed(0))
MASK = torch.ones_like(IDS).index_put((torch.tensor([1, 1]), torch.tensor([0, 1])), torch.tensor(0))
NEAR = 1e-4  # of the largest output: what rounding may change


@dataclass(frozen=True)
class Outcome:
    """What a family gave: a list of facts, or the reason of its refusal."""

    passed: bool
    text: str


def check_moe(folder: str) -> Outcome:
    """Return what an MoE family gives. Raise AssertionError if it is not refused and a result is wrong."""
    model = tiny_moe(folder)
    try:
        found = moe_layers(model)
    except ValueError as reason:
        return Outcome(False, " ".join(str(reason).split()))
    before = _outputs(model)
    assert torch.equal(_outputs(model), before), "the model is not deterministic"
    holdfast.reroute(model, "native")
    assert torch.equal(_outputs(model), before), "the native router is not bit-identical"
    with holdfast.trace(model) as routes:
        _outputs(model)
    assert all(routing.experts.shape[0] == IDS.numel() for routing in routes), "a layer has no routing for each token"
    holdfast.reroute(model, "xmoe")
    assert _change(_outputs(model), before) > NEAR, "another router changes nothing"
    holdfast.restore(model)
    assert torch.equal(_outputs(model), before), "restore is not bit-identical"
    holdfast.reroute(model, "symphony")
    change = _change(_outputs(model), before)
    assert change <= NEAR, f"symphony changes the outputs at the start by {change:.1g}"
    try:
        holdfast.reroute(model, "smooth")
    except ValueError as reason:
        return Outcome(False, " ".join(str(reason).split()))
    _train(model)
    trained = _outputs(model)
    assert torch.equal(_outputs(_saved_and_loaded(model)), trained), "the loaded model has other outputs"
    holdfast.restore(model)
    own = "row" if model.config.model_type in MOE_FAMILIES else "recognised"
    _check_padding_teaches_nothing(folder)
    return Outcome(True, f"{own}; {_rule(model)}; {_counted(found)}")


def check_dense(family: str, **changes: Any) -> Outcome:
    """Return what a dense family gives. Raise AssertionError if a result is wrong. `changes` are of the config."""
    model = tiny_dense(family, **changes)
    batch = dense_inputs(family)
    before = _dense_outputs(model, batch)
    holdfast.sparsify(model, experts=4, k=2)
    change = _change(_dense_outputs(model, batch), before)
    assert change <= NEAR, f"copies of the dense network compute something else (by {change:.1g})"
    for layer in moe_layers(model):
        with torch.no_grad():  # so that it matters which expert runs
            layer.experts.down_proj += 0.1 * torch.randn(layer.experts.down_proj.shape)
    differing = _dense_outputs(model, batch)
    holdfast.reroute(model, "xmoe")
    assert _change(_dense_outputs(model, batch), differing) > NEAR, "another router changes nothing"
    holdfast.restore(model)
    assert torch.equal(_dense_outputs(model, batch), differing), "restore is not bit-identical"
    model.train()
    out = model(**batch)
    out.loss.backward()
    for layer in moe_layers(model):
        gradients = [parameter.grad for parameter in _router(layer).parameters() if parameter.requires_grad]
        assert all(one is not None and bool(one.isfinite().all()) for one in gradients), f"{layer.name} has no gradient"
        assert any(bool((one != 0).any()) for one in gradients if one is not None), f"the gradient of {layer.name} is 0"
    model.eval()
    loaded = _saved_and_loaded(model)
    assert torch.equal(_dense_outputs(loaded, batch), differing), "the loaded model has other outputs"
    _check_padding_teaches_nothing_to_sparse_layers(family, changes)
    return Outcome(True, f"{len(moe_layers(model))} feed-forward networks")


def _check_padding_teaches_nothing(folder: str) -> None:
    """Compare router state after one training forward for two fillers in the place of padding."""
    states = []
    for filler in (3, 60):
        model = holdfast.reroute(tiny_moe(folder), "symphony").train()
        torch.manual_seed(0)
        model(input_ids=IDS.where(MASK.bool(), filler), attention_mask=MASK, use_cache=False)
        states.append([buffer.clone() for buffer in _router(moe_layers(model)[0]).buffers()])
    _require_equal_states(*states)


def _check_padding_teaches_nothing_to_sparse_layers(family: str, changes: dict[str, Any]) -> None:
    states = []
    for filler in (3, 60):
        model = holdfast.sparsify(tiny_dense(family, **changes), experts=4, router="symphony").train()
        batch = dense_inputs(family)
        if "input_ids" not in batch:
            return
        batch["input_ids"] = batch["input_ids"].where(batch["attention_mask"].bool(), filler)
        torch.manual_seed(0)
        model(**batch)
        states.append([buffer.clone() for buffer in _router(moe_layers(model)[0]).buffers()])
    _require_equal_states(*states)


def _router(layer: MoELayerRef) -> Router:
    assert layer.router is not None
    return layer.router


def _require_equal_states(one: list[Tensor], other: list[Tensor]) -> None:
    for first, second in zip(one, other, strict=True):
        close = torch.allclose(first.float(), second.float(), rtol=1e-4, atol=1e-6)
        assert close, "the router learns from padding"


def _outputs(model: Any) -> Tensor:
    with torch.no_grad():
        out = model(input_ids=IDS, attention_mask=MASK, use_cache=False)
    return _first(out)[MASK.bool()]


def _first(out: Any) -> Tensor:
    first: Tensor = out.logits if hasattr(out, "logits") else out[0]
    return first


def _dense_outputs(model: Any, batch: dict[str, Any]) -> Tensor:
    with torch.no_grad():
        out = model(**batch)
    logits: Tensor = out.logits_per_image if hasattr(out, "logits_per_image") else out.logits
    return logits[batch["labels"] != -100] if logits.shape[:-1] == batch.get("labels", logits).shape else logits


def _change(after: Tensor, before: Tensor) -> float:
    return float((after - before).abs().max() / before.abs().max())


def _train(model: Any) -> None:
    """Run one step, and leave the weights as they were."""
    model.train()
    _first(model(input_ids=IDS, attention_mask=MASK, use_cache=False)).float().square().mean().backward()
    weight = moe_family(model).weight
    for layer in moe_layers(model):
        gradient = layer.gate.get_parameter(weight).grad
        assert gradient is not None and bool(gradient.isfinite().all()), f"the router of {layer.name} has no gradient"
        assert bool((gradient != 0).any()), f"the gradient of the router of {layer.name} is 0"
    model.zero_grad()
    model.eval()


def _saved_and_loaded(model: Any) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        holdfast.save(model, folder)
        return holdfast.load(folder).eval()


def _rule(model: Any) -> str:
    layer = moe_layers(model)[0]
    assert layer.family is not None
    rule = layer.family.rule_of(layer.block)
    groups = getattr(rule, "groups", 1)
    facts = [
        rule.gate.name if type(rule).__name__ != "SparseMixer" else "sparsemixer",
        "bias" if getattr(rule, "bias_name", None) else "",
        f"best {rule.groups_kept} of {groups} groups" if groups > 1 else "",  # type: ignore[attr-defined]
        "renormalised" if rule.renormalise and type(rule).__name__ != "SparseMixer" else "",
        "scaled" if layer.family.scale else "",
    ]
    return ", ".join(fact for fact in facts if fact)


def _counted(found: list[Any]) -> str:
    recurrent = sum(layer.layer_modules.recurrent for layer in found)
    layers = "1 MoE layer" if len(found) == 1 else f"{len(found)} MoE layers"
    return f"{layers}, {recurrent} without attention" if recurrent else layers


def outcome(check: Callable[[str], Outcome], family: str) -> Outcome:
    """Return what `check` gives for a family, without the warnings of transformers about tiny configs."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return check(family)
        except Exception as problem:
            raise AssertionError(f"{family}: {problem}") from problem


def page(moe: dict[str, Outcome], dense: dict[str, Outcome]) -> str:
    """Return docs/families.md."""
    used = versions()["transformers"]
    lines = [
        "# Families of models",
        "",
        f"Made by `benchmarks/family_checks.py` with transformers {used}: it tries every family on a tiny",
        "random model, as its docstring says. [models.md](models.md#families) says how a family is recognised, and how to",
        "declare one that is not.",
        "",
        f"## MoE families: {_count(moe)}",
        "",
        '"Recognised" means that Holdfast has no row for the family: its modules follow the common contract, and its rule',
        "was found by measuring its gate.",
        "",
        *_tables(moe, "how, rule of the gate, layers of the tiny model"),
        "",
        f"## Dense families: {_count(dense)}",
        "",
        "`sparsify` makes their feed-forward networks MoE layers: in encoder and decoder, in text and image towers.",
        "",
        *_tables(dense, "of the tiny model become MoE layers"),
    ]
    return "\n".join(lines) + "\n"


def _count(outcomes: dict[str, Outcome]) -> str:
    passed = sum(one.passed for one in outcomes.values())
    return f"{passed} pass, {len(outcomes) - passed} are refused"


def _tables(outcomes: dict[str, Outcome], about: str) -> list[str]:
    passed = [f"| {name} | {one.text} |" for name, one in outcomes.items() if one.passed]
    refused = [f"| {name} | {_reason(one.text)} |" for name, one in outcomes.items() if not one.passed]
    tables = [f"| family | {about} |", "|---|---|", *passed]
    return [*tables, "", "| refused | because |", "|---|---|", *refused] if refused else tables


def _reason(text: str) -> str:
    """Return the part of a refusal that differs between families."""
    return text.partition("that Holdfast recognises: ")[2].partition(". Declare")[0] or text.partition(" Declare")[0]


def main(wanted: list[str]) -> None:
    torch.set_num_threads(1)
    moe = {name: outcome(check_moe, name) for name in MOE_MODELS if is_installed(name) and (not wanted or name in wanted)}
    dense = {name: outcome(check_dense, name) for name in DENSE_MODELS if not wanted or name in wanted}
    for name, one in {**moe, **dense}.items():
        print(f"{'passed ' if one.passed else 'refused'} {name}: {one.text}")
    if not wanted:
        PAGE.write_text(page(moe, dense))


if __name__ == "__main__":
    main(sys.argv[1:])
