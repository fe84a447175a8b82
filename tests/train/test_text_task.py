"""Text tasks: which targets an attack leaves untouched, and that every token is scored once."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from train.conftest import MakeRecipe

import holdfast
from holdfast.data import python_topics
from holdfast.data.documents import WORD_SPLITTERS
from holdfast.metrics.token_routes import MOST_TOKENS
from holdfast.train import Comparison, build_model, parse_routers
from holdfast.train.text_task import ScoredText, TextTask, score_text
from holdfast.train.training import train

CUTS_AND_BYTES = [*WORD_SPLITTERS, "bytes"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder of several documents, some of them in every split."""
    folder = tmp_path_factory.mktemp("texts")
    for number, text in enumerate(list(python_topics().values())[:24]):
        (folder / f"{number:02d}.txt").write_text(f"Caf\u00e9 \u0130zmir {number} \U0001f642.\n{text[:3000]}")
    return folder


def task(tiny: MakeRecipe, folder: Path, tokens: str, **changes: Any) -> TextTask:
    every = {"data.source": str(folder), "data.tokens": tokens, "data.vocabulary": None, **changes}
    return TextTask(tiny(every))


def words(texts: list[str], cut: str) -> list[str]:
    """Return what a word-level model predicts, with an end after each document or line."""
    if cut == "words":
        return [word for text in texts for word in [*WORD_SPLITTERS[cut].line(text), "<eos>"]]
    return [word for text in texts for line in text.splitlines(keepends=True) for word in [*line.split(), "<eos>"]]


@pytest.mark.parametrize("tokens", CUTS_AND_BYTES)
def test_the_untouched_words_are_the_same_in_the_clean_and_the_attacked_text(
    tokens: str, tiny: MakeRecipe, folder: Path
) -> None:
    own = task(tiny, folder, tokens)
    before = [document.text for document in own._test]
    assert len(before) > 1 and own.attack.changed > 50
    kept = []
    for trial, texts in ((own.clean, before), (own.attacked, list(own.attack.texts))):
        pieces = list("\n".join(texts).encode()) if tokens == "bytes" else words(texts, tokens)
        assert len(pieces) == len(trial.untouched) == len(trial.blocks.tokens)
        kept.append([piece for piece, stays in zip(pieces, trial.untouched.tolist(), strict=True) if stays])
        assert trial.bytes == sum(len(text.encode()) for text in texts)
    assert kept[0] == kept[1]
    lost = (~own.clean.untouched).sum() / len(own.clean.untouched)
    assert 0.02 < lost < 0.5  # a fifth of the words that are no stop words


def test_only_changed_words_are_not_untouched(tiny: MakeRecipe, folder: Path) -> None:
    own = task(tiny, folder, "words", **{"attack.token": "AAA"})
    texts = list(own.attack.texts)
    lost = [word for word, stays in zip(words(texts, "words"), own.attacked.untouched.tolist(), strict=True) if not stays]
    assert sum(word.count("aaa") for word in lost) == own.attack.changed
    assert lost == [word for word in words(texts, "words") if "aaa" in word]  # "__aaa__" too


@pytest.mark.parametrize("cut", WORD_SPLITTERS)
def test_words_are_swapped_for_words_of_the_vocabulary(cut: str, tiny: MakeRecipe, folder: Path) -> None:
    own = task(tiny, folder, cut, **{"data.vocabulary": 300})
    before, after = own.clean.blocks.tokens, own.attacked.blocks.tokens
    assert len(before) == len(after) and torch.equal(own.clean.untouched, own.attacked.untouched)
    lost = ~own.attacked.untouched
    assert int(lost.sum()) == own.attack.changed > 50
    assert bool((after[lost] > 1).all()) and bool((after != before)[lost].all())  # 0 and 1 are no words
    assert "vocabulary" in own.measure.attack


def test_a_generic_token_outside_the_vocabulary_is_unknown_and_that_is_why_it_is_not_the_default(
    tiny: MakeRecipe, folder: Path
) -> None:
    own = task(tiny, folder, "words", **{"data.vocabulary": 300, "attack.token": "AAA"})
    assert not own.attacked.blocks.tokens[~own.attacked.untouched].any()
    assert own.measure.attack.endswith(" AAA")


@pytest.mark.parametrize("tokens", CUTS_AND_BYTES)
def test_the_cost_is_that_of_a_naive_loop_over_the_untouched_words(
    tokens: str, tiny: MakeRecipe, folder: Path, tmp_path: Path
) -> None:
    own = task(tiny, folder, tokens, **{"data.test_bytes": 1500, "data.vocabulary": 200, "training.steps": 4})
    model = build_model(own, "smoe", {}, seed=0)
    train(model, own, tmp_path, seed=0, k=2)
    found = own.score(model)
    for cost, trials in (
        (found["attacked"]["cost"], (own.clean, own.attacked)),
        (found["trials"]["typos"]["cost"], own.typos),
    ):
        (clean, kept), (attacked, kept_too) = (naive(model, trial) for trial in trials)
        before = [loss for loss, stays in zip(clean, kept, strict=True) if stays]
        after = [loss for loss, stays in zip(attacked, kept_too, strict=True) if stays]
        assert len(before) == len(after) < len(clean)
        assert cost["mean"] == pytest.approx((sum(after) - sum(before)) / len(before), abs=1e-6)
        assert cost["low"] < cost["mean"] < cost["high"] and "95% interval" in cost["words"]


@pytest.mark.parametrize("tokens", CUTS_AND_BYTES)
def test_at_rate_0_every_token_is_untouched_and_both_perplexities_are_equal(
    tokens: str, tiny: MakeRecipe, folder: Path
) -> None:
    own = task(tiny, folder, tokens, **{"attack.rate": 0.0, "data.test_bytes": 2500})
    model = build_model(own, "smooth", {}, seed=0)
    found = own.score(model)
    assert "trials" not in found
    for name in ("clean", "attacked"):
        assert found[name]["kept_tokens"] == found[name]["tokens"] > 0
        assert found[name]["figure_of_kept"] == found[name]["figure"] == found["clean"]["figure"]


@torch.no_grad()
def naive(model: Any, trial: ScoredText) -> tuple[list[float], list[bool]]:
    """Return the negative log-likelihood of each token but the first, block by block, and whether it is untouched."""
    tokens, length = trial.blocks.tokens.long(), trial.blocks.length
    found: list[float] = []
    for first in range(0, len(tokens) - 1, length):
        block = tokens[first : first + length + 1]
        logits: Tensor = model.eval()(input_ids=block[None, :-1], use_cache=False).logits
        found += [-float(row.log_softmax(-1)[target]) for row, target in zip(logits[0].double(), block[1:], strict=True)]
    return found, trial.untouched.tolist()[1:]


def test_perplexities_are_those_of_a_naive_loop_over_the_tokens(tiny: MakeRecipe, folder: Path, tmp_path: Path) -> None:
    own = task(tiny, folder, "words", **{"data.test_bytes": 4000, "data.vocabulary": 200})
    model = build_model(own, "symphony+smooth", {}, seed=0)
    train(model, own, tmp_path, seed=0, k=2)  # of an untrained one all targets are equally hard
    scores = own.score(model)
    for trial, score in (
        (own.clean, scores["clean"]),
        (own.attacked, scores["attacked"]),
        (own.typos[1], scores["trials"]["typos"]),
    ):
        losses, kept = naive(model, trial)
        assert score["tokens"] == len(losses) == trial.blocks.scored
        assert score["figure"] == pytest.approx(math.exp(sum(losses) / len(losses)), rel=1e-5)
        of_kept = [loss for loss, stays in zip(losses, kept, strict=True) if stays]
        assert score["kept_tokens"] == len(of_kept) < len(losses)
        assert score["figure_of_kept"] == pytest.approx(math.exp(sum(of_kept) / len(of_kept)), rel=1e-5)
        assert score["bits_per_byte"] == pytest.approx(sum(losses) / math.log(2) / trial.bytes, rel=1e-5)
    assert abs(scores["clean"]["figure"] / scores["clean"]["figure_of_kept"] - 1) > 1e-3


def test_batches_of_any_size_give_the_same_perplexities(
    tiny: MakeRecipe, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = task(tiny, folder, "words", **{"data.test_bytes": 4000, "data.vocabulary": 200})
    model = build_model(own, "similarity", {}, seed=0)
    usual, _ = score_text(model, own.attacked)
    monkeypatch.setattr("holdfast.train.text_task.TOKENS_PER_BATCH", {"cpu": 40})
    few, _ = score_text(model, own.attacked)
    assert (few["tokens"], few["kept_tokens"]) == (usual["tokens"], usual["kept_tokens"])
    assert [few[key] for key in ("figure", "figure_of_kept")] == pytest.approx([usual["figure"], usual["figure_of_kept"]])


@pytest.mark.parametrize("limit", [700, 2900, 3100, 5000])
def test_test_bytes_limits_the_test_text_after_a_line(limit: int, tiny: MakeRecipe, folder: Path) -> None:
    whole = [document.data for document in task(tiny, folder, "words")._test]
    own = task(tiny, folder, "words", **{"data.test_bytes": limit})
    cut = [document.data for document in own._test]
    last, full = cut[-1], whole[len(cut) - 1]
    assert cut[:-1] == whole[: len(cut) - 1] and full.startswith(last)
    assert last == full or last.endswith(b"\n")
    size = sum(map(len, cut))
    rest = [full[len(last) :], *whole[len(cut) :]]
    next_line = next(line for data in rest for line in data.splitlines(keepends=True))
    assert 0 < size <= limit < size + len(next_line)
    texts = [data.decode() for data in cut]
    score, _ = score_text(build_model(own, "smoe", {}, seed=0), own.clean)
    assert score["tokens"] == len(words(texts, "words")) - 1
    assert own.clean.bytes == size
    assert [each.data for each in task(tiny, folder, "words", **{"data.test_bytes": sum(map(len, whole))})._test] == whole


def test_the_view_shows_the_pieces_of_the_text_and_an_expert_of_each_layer_for_each(tiny: MakeRecipe, folder: Path) -> None:
    own = task(
        tiny, folder, "words", **{"data.length": 40, "data.test_bytes": 150, "model.config.max_position_embeddings": 64}
    )
    view = own.view(build_model(own, "smoe", {}, seed=0).eval())
    expected = words([document.text for document in own._test], "words")
    count = len(expected) - 1  # the last token is only predicted
    pieces = [piece for example in view.examples for piece in example.pieces]
    known = set(own.tokenizer.describe()["words"])
    shown = [word if word in known else "<unk>" for word in expected[:count]]
    assert [piece.replace("\n", "<eos>").strip() for piece in pieces] == shown
    assert [len(layer.experts) for layer in view.routes.layers] == [count, count]  # padding has no route
    assert all(0 <= expert < 8 for layer in view.routes.layers for experts in layer.experts for expert in experts)


def test_a_text_that_fills_no_block_raises_and_creates_no_folder(tiny: MakeRecipe, folder: Path, tmp_path: Path) -> None:
    mistakes: list[tuple[dict[str, Any], str]] = [
        ({"data.length": 99_999}, "99999"),
        ({"data.length": 2_500, "training.keep": "best", "training.batch": 1}, "held-out text"),
        ({"data.test_bytes": 1}, "test_bytes is 1"),
    ]
    for changes, sentence in mistakes:
        own = tiny({"data.source": str(folder), "model.config.max_position_embeddings": 2_500, **changes})
        with pytest.raises(ValueError, match=sentence):
            Comparison(own, parse_routers("smoe"), 1, tmp_path / "run").run()
        assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("router", ["smooth", "ac"])
def test_the_view_has_the_routes_of_clean_noisy_and_attacked_forwards(router: str, tiny: MakeRecipe, folder: Path) -> None:
    own = task(tiny, folder, "words", **{"attack.rate": 0.3})
    model = build_model(own, router, {}, seed=0).eval()
    view = own.view(model)
    length = own.recipe.data.length
    assert view.tokens == MOST_TOKENS and len(view.examples) == -(-MOST_TOKENS // length)
    ids = own.clean.blocks.tokens[:length].tolist()
    assert "".join(view.examples[0].pieces) == own.tokenizer.decode(ids)
    assert set(view.routes.perturbed) == {"noise", own.attack.attack}
    blocks = {"clean": own.clean.blocks, "attacked": own.attacked.blocks}
    routings = {}
    for name, some in blocks.items():
        with torch.no_grad(), holdfast.trace(model) as routes:
            model(input_ids=some.batch(range(min(len(some), 40))).inputs)
        routings[name] = list(routes)
    changed, compared = view.routes.perturbed[own.attack.attack], set[int]()
    for layer, routed in enumerate(view.routes.layers):
        before, after = routings["clean"][layer], routings["attacked"][layer]
        assert routed.experts == [used(before, row) for row in range(MOST_TOKENS)]
        assert routed.radii is not None and min(radius for radius in routed.radii if radius is not None) >= 0
        now = dict(zip(changed.layers[layer].tokens, changed.layers[layer].experts, strict=True))
        for row, place in enumerate(own.attacked.place.tolist()):
            if 0 <= place < MOST_TOKENS:
                compared.add(place)
                assert now.get(place, routed.experts[place]) == used(after, row)
    assert sorted(compared) == [token for start, end in changed.compared for token in range(start, end)]
    assert 100 < len(compared) < MOST_TOKENS
    assert any(layer.tokens for layer in view.routes.perturbed["noise"].layers)


def used(routing: Any, row: int) -> list[int]:
    return [expert for expert in routing.experts[row].tolist() if expert < routing.gates.shape[1]]
