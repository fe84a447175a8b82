"""Perturbations change only what they describe, compare the right tokens, and restore the model."""

from typing import Any

import pytest
import torch
from auditing.audited_models import batches, constant, hooks, sparse, state, texts, tokenizer
from tiers import quick_or_slow
from tiny import EXTRA, tiny
from tiny_dense import inputs as dense_inputs
from tiny_dense import tiny_dense
from torch import Tensor, nn

import holdfast
from holdfast.attacks import swap_words
from holdfast.auditing import audit
from holdfast.auditing.model_and_data import TextEncoder, labelled_batch
from holdfast.auditing.perturbations import aligned_rows

ROUTERS = ["native", "smoe", "smooth", "symphony+similarity", "ac", "attention", "top-p"]


@pytest.mark.parametrize("model_type", quick_or_slow(sorted(EXTRA), ["deepseek_v3", "gpt_oss"]))
def test_every_family_is_audited_under_every_perturbation(model_type: str) -> None:
    found: Any = audit(tiny(model_type), texts(), tokenizer=tokenizer(), batch=3)
    assert found.status == "complete" and len(found.layers) == len(found.model.layers) > 1
    assert found.skipped == {}
    assert set(found.perturbations) == {
        *("none", "noise.0.01", "noise.0.05", "routing.bf16", "routing.fp16", "model.bf16"),
        *("batch.alone", "batch.left", "batch.right", "backend", "words", "typos", "attack"),
    }
    none = found.perturbations["none"].overall
    assert none.flips == none.weight_change == none.output.total == none.prediction_flips == 0
    assert (
        0 < found.perturbations["noise.0.01"].overall.output.total < found.perturbations["noise.0.05"].overall.output.total
    )
    for name in ("batch.alone", "batch.left", "batch.right", "backend"):
        assert found.perturbations[name].overall.output.total < 1e-5, name


@pytest.mark.parametrize("model_type", ["mixtral", "deepseek_v3", "gpt_oss"])
def test_a_model_in_bfloat16_is_compared_with_itself_in_float32(model_type: str) -> None:
    model = tiny(model_type).bfloat16()
    kept = state(model)
    found: Any = audit(model, batches())
    assert set(found.skipped) == {"words", "typos"}
    assert found.perturbations["model.fp32"].overall.output.total > 0.001 and found.model.dtype == "bfloat16"
    assert found.perturbations["attack"].overall.flips > 0 == found.perturbations["none"].overall.output.total
    assert all(torch.equal(tensor, kept[name]) for name, tensor in model.state_dict().items())


def test_a_model_with_constant_routers_never_flips() -> None:
    found: Any = audit(constant(), texts(), tokenizer=tokenizer(), batch=3, noise=(0.01, 0.5), budget=0.5)
    assert len(found.perturbations) == 13
    for name, one in found.perturbations.items():
        for layer in one.layers:
            assert layer.flips == layer.first_flips == layer.output.flip == 0, name
    assert found.overall.undecided == {"bf16": 0, "fp16": 0}
    assert all(layer.radius and layer.radius.low == 0 for layer in found.layers)
    assert found.perturbations["model.bf16"].overall.output.rest > 0  # the outputs do change


@pytest.mark.parametrize("router", quick_or_slow(ROUTERS, ["native", "symphony+similarity"]))
def test_a_rerouted_model_is_audited_and_unchanged(router: str) -> None:
    model = holdfast.reroute(tiny("olmoe"), router).train()
    kept, hooked, modes = state(model), hooks(model), [module.training for module in model.modules()]
    found: Any = audit(model, batches())
    assert len(found.perturbations) >= 9
    assert found.perturbations["none"].overall.output.total == 0
    assert all(torch.equal(tensor, kept[name]) for name, tensor in model.state_dict().items())
    assert hooks(model) == hooked and [module.training for module in model.modules()] == modes
    assert model.config._experts_implementation == tiny("olmoe").config._experts_implementation


def test_a_sparsified_model_is_audited_without_another_backend() -> None:
    found: Any = audit(sparse(), batches(vocabulary=96))
    assert "Holdfast's own" in found.skipped["backend"].reason
    assert "not texts" in found.skipped["words"].reason
    assert found.perturbations["noise.0.05"].overall.flips > 0


@pytest.mark.parametrize("model_type", quick_or_slow(["vit", "swin", "bert", "gpt2"], ["vit"]))
def test_other_kinds_of_models_are_audited_too(model_type: str) -> None:
    model = holdfast.sparsify(tiny_dense(model_type), experts=4, k=2, router="smoe").eval()
    found: Any = audit(model, [dense_inputs(model_type)])
    alone = found.perturbations["batch.alone"]
    assert alone.overall.output.total < 1e-4 and alone.overall.loss.size < 1e-4
    if model_type in ("vit", "swin"):
        assert found.skipped["batch.left"].reason.startswith("images ")
    else:
        assert found.perturbations["batch.left"].overall.output.total < 1e-4
    assert found.overall.loss > 0


def test_noise_has_the_given_length_and_is_repeatable() -> None:
    from holdfast.auditing.perturbations import Noise

    tokens = 3 * torch.randn(400, 64, generator=torch.Generator().manual_seed(0))
    moved = Noise(0.05, seed=1)._perturbed_input(0, 0, tokens)
    assert ((moved - tokens).norm(dim=1) / tokens.norm(dim=1)).mean() == pytest.approx(0.05, rel=0.02)
    assert torch.equal(moved, Noise(0.05, seed=1)._perturbed_input(0, 0, tokens))
    for other in (Noise(0.05, seed=2)._perturbed_input(0, 0, tokens), Noise(0.05, 1)._perturbed_input(1, 0, tokens)):
        assert not torch.equal(moved, other)
    runs = [audit(tiny("mixtral"), batches(), perturb=["noise"], seed=seed).perturbations for seed in (0, 0, 1)]
    assert runs[0] == runs[1] != runs[2]


class Nosy(nn.Module):
    """An experts module that lets the rest of the batch leak into every token."""

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, tokens: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
        return self.inner(tokens, experts, weights) + tokens.mean(0)


def test_a_layer_that_depends_on_other_sequences_is_found() -> None:
    model = tiny("mixtral")
    model.model.layers[0].mlp.experts = Nosy(model.model.layers[0].mlp.experts)
    found: Any = audit(model, batches(), perturb=["batch", "none"])
    assert found.perturbations["none"].overall.output.total == 0
    for name in ("batch.alone", "batch.left", "batch.right"):
        assert found.perturbations[name].overall.output.total > 0.01
        assert found.perturbations[name].layers[0].flips == 0 < found.perturbations[name].layers[1].flips


def test_a_router_that_is_random_in_evaluation_is_found() -> None:
    model = tiny("mixtral")
    model.model.layers[1].mlp.gate.register_forward_pre_hook(lambda module, given: (given[0] + torch.randn_like(given[0]),))
    found: Any = audit(model, batches(), perturb="none")
    layers = found.perturbations["none"].layers
    assert layers[0].flips == 0 < layers[1].flips


def test_the_backend_is_changed() -> None:
    """Read from the config in a hook, because tiny models give the same numbers with both."""
    model = tiny("mixtral")
    seen: list[str] = []
    experts = model.model.layers[0].mlp.experts
    experts.register_forward_pre_hook(lambda module, given: seen.append(module.config._experts_implementation))
    audit(model, batches(1), perturb=["backend"])
    assert seen == ["grouped_mm", "eager"] and model.config._experts_implementation == "grouped_mm"


def test_a_failing_perturbation_reports_why_and_restores_the_model() -> None:
    model = tiny("mixtral")

    def refuse(module: Any, given: tuple[Tensor, ...]) -> None:
        if given[0].dtype == torch.bfloat16:
            raise RuntimeError("no bfloat16 here\nand a long story")

    kept = state(model)
    model.model.layers[2].mlp.experts.register_forward_pre_hook(refuse)
    found: Any = audit(model, batches(), perturb=["model", "noise"])
    assert found.skipped["model.bf16"].reason.endswith("no bfloat16 here")
    assert found.status == "complete" and found.perturbations["noise.0.01"].overall.tokens == 90
    assert all(torch.equal(tensor, kept[name]) for name, tensor in model.state_dict().items())


def test_swapped_words_are_compared_by_the_untouched_tokens() -> None:
    reader = TextEncoder(tokenizer())
    before = reader.batch(0, texts(4), 64)
    attacked = swap_words(before.texts or (), rate=0.3, seed=0)
    after = reader.batch(0, attacked.texts, 64)
    first, second = aligned_rows(before, after, attacked)
    assert before.ids is not None and after.ids is not None
    assert torch.equal(before.ids.flatten()[first], after.ids.flatten()[second])
    words = [text.split() for text in attacked.texts]
    assert len(first) == sum(word != "AAA" for line in words for word in line) < sum(map(len, words))
    assert torch.equal(first, second)  # a token a word: each stays in its place


def test_a_token_with_another_id_in_the_new_text_is_not_compared() -> None:
    """Some tokenizers give the same characters another id after another word."""
    reader = TextEncoder(tokenizer())
    before = reader.batch(0, ["the cat sat on the mat"], 64)
    attacked = swap_words(before.texts or (), rate=1.0, seed=0, stop_words=("the", "on", "sat", "cat"))
    after = reader.batch(0, attacked.texts, 64)
    assert after.ids is not None
    assert aligned_rows(before, after, attacked)[0].tolist() == [0, 1, 2, 3, 4]
    after.ids[0, 2] += 1
    assert aligned_rows(before, after, attacked)[0].tolist() == [0, 1, 3, 4]


def test_alignment_follows_longer_replacements_and_bytes_of_one_character() -> None:
    from holdfast.data import Bytes

    reader = TextEncoder(Bytes())
    before = reader.batch(0, ["the wonderful caf\u00e9 house", "a garden"], 64)
    attacked = swap_words(before.texts or (), rate=1.0, seed=0, stop_words=("the", "a", "caf\u00e9"))
    after = reader.batch(0, attacked.texts, 64)
    first, second = aligned_rows(before, after, attacked)
    assert before.ids is not None and after.ids is not None
    assert torch.equal(before.ids.flatten()[first], after.ids.flatten()[second])
    assert bytes(before.ids.flatten()[first].tolist()).decode() == "the  caf\u00e9 a "
    assert not torch.equal(first, second)


def test_both_texts_of_a_pair_are_attacked_and_aligned() -> None:
    from holdfast.data import LabelledText, Vocabulary
    from holdfast.data.encoded_texts import PairEncoder
    from holdfast.data.labelled_texts import with_texts

    examples = [
        LabelledText("the cat sat", 0, "a dog ran on the mat"),
        LabelledText("one text only", 1),
        LabelledText("a fine film", 1, "the cat ran"),
    ]
    vocabulary = Vocabulary([" ".join(f"{one.text} {one.pair or ''} AAA" for one in examples)], 100)
    reader = TextEncoder(PairEncoder(vocabulary, 64, pad=0))
    before = labelled_batch(reader, 0, examples, 64, classes=2)
    assert before.texts == ("the cat sat", "one text only", "a fine film", "a dog ran on the mat", "the cat ran")
    attacked = swap_words(before.texts, rate=1.0, seed=0, stop_words=("the", "a", "on", "one"))
    changed = with_texts(examples, attacked.texts)
    assert changed[0] == LabelledText("the AAA AAA", 0, "a AAA AAA on the AAA")
    assert changed[1:] == [LabelledText("one AAA AAA", 1), LabelledText("a AAA AAA", 1, "the AAA AAA")]
    after = labelled_batch(reader, 0, changed, 64, classes=2)
    first, second = aligned_rows(before, after, attacked)
    assert before.ids is not None and after.ids is not None
    shared = before.ids.flatten()[first]
    assert torch.equal(shared, after.ids.flatten()[second])
    assert vocabulary.decode(shared.tolist()).split() == ["the", "one", "a", "a", "on", "the", "the"]


def test_left_padding_flips_no_token() -> None:
    """Rows are matched: compared with the wrong rows, nearly all tokens would seem to flip."""
    found: Any = audit(tiny("qwen3_moe"), batches(), perturb=["batch"])
    for name in ("batch.alone", "batch.left", "batch.right"):
        assert found.perturbations[name].overall.tokens == 2 * (17 + 11 + 17)
        assert found.perturbations[name].overall.flips == 0 and found.perturbations[name].overall.prediction_flips == 0


def test_the_attack_finds_more_flips_with_more_budget() -> None:
    rates, changes = [], []
    for budget in (0.0001, 0.01, 0.3):
        found: Any = audit(tiny("mixtral"), batches(1), perturb=["attack"], budget=budget)
        rates.append(found.perturbations["attack"].overall.flips)
        details = found.perturbations["attack"].details
        assert [entry["layer"] for entry in details] == [0, 1, 2] and all(entry["budget"] == budget for entry in details)
        changes.append(found.perturbations["attack"].overall.prediction_flips)
        assert found.perturbations["attack"].overall.loss.size > 0 or budget < 0.001
    assert rates[0] < rates[1] < rates[2] and rates[2] > 0.9
    assert changes[0] <= changes[1] < changes[2]


def test_losses_are_compared_where_the_label_is_the_same() -> None:
    from holdfast.auditing.forwards import ForwardComparison, Observation, Predictions
    from holdfast.auditing.model_and_data import AuditedModel

    def said(best: list[int], nll: list[float], labels: list[int]) -> Observation:
        return Observation([], [], None, Predictions(torch.tensor(best), torch.tensor(nll), torch.tensor(labels), True), 1)

    tally = ForwardComparison(AuditedModel(tiny("mixtral")))
    one, two = (
        said([1, 2, 3, 4], [1.0, 2.0, 3.0, 0.0], [5, 6, 7, -100]),
        said([1, 2, 3, 9], [1.5, 9.0, 2.0, 0.0], [5, 8, 7, -100]),
    )
    tally.compare_predictions(one, two, (torch.arange(4), torch.arange(4)))
    assert tally.losses.tokens == 2 and tally.losses.result().change == -0.25 and tally.losses.result().size == 0.75
    assert tally.predictions.result() == 0.75
