"""What all pages have in common: what they load, what they never overwrite, and which files they refuse."""

import base64
import contextlib
import hashlib
import json
import re
from pathlib import Path
from typing import Any

import pytest
from plotly.offline import get_plotlyjs
from report.audited import perturbed, stored_audit
from report.browsing import EVIL
from report.geometries import stored_geometry
from report.mismatches import stored_mismatch
from report.predicted import stored_predictions
from report.stored import stored, stored_costs, stored_images
from report.tags import Tags
from wording import assert_refused

from holdfast import report
from holdfast.auditing import AuditReport, GeometryReport
from holdfast.checked import from_mapping
from holdfast.mismatch import MismatchReport
from holdfast.report.page_shell import SCRIPTS
from holdfast.stored import without_nan
from holdfast.train.prediction_report import PredictionReport
from holdfast.train.results import Results

GONE = object()  # in place of a value that is deleted
KINDS: dict[str, tuple[Any, Any, Any, Any]] = {
    "comparison": (Results, stored, report.render, report.write_report),
    "costs": (Results, stored_costs, report.render, report.write_report),
    "images": (Results, stored_images, report.render, report.write_report),
    "audit": (AuditReport, stored_audit, report.render_audit, report.write_audit),
    "geometry": (GeometryReport, stored_geometry, report.render_geometry, report.write_geometry),
    "mismatch": (MismatchReport, stored_mismatch, report.render_mismatch, report.write_mismatch),
    "predictions": (PredictionReport, stored_predictions, report.render_predictions, report.write_predictions),
}
of_every_kind = pytest.mark.parametrize("kind", KINDS)


VALUES: dict[str, list[str]] = {
    "comparison": [
        "smooth lowered the perplexity by 3.12 (95% interval 1.62 to 4.62), using 2.40 experts per token instead of 2.00",
        "ac made no difference that 3 seeds can show",
        "46,240",
        "184.50",
        "183.38",
        "0.447",
        "25.00%",
        "0.0031",
        "training.learning_rate",
        "2.13.7",
        "5.22.9",
        "744f2cda",
        "a334100e",
        "first2 … last2",
        "a swap of 1.5% of its words",
    ],
    "audit": [
        "tiny-mixtral",
        "layer 1: 30.0% of tokens are undecided in bf16. Training and serving may select different experts for them.",
        "number 0.3, threshold 0.02",
        "2 severe and 1 serious; none about the loss",
        "3.1% of predictions change and the loss rises by 0.2500 nats (router inputs with noise of 0.01 of their length)",
        "10.0% of tokens flip in layer 1",
        "With smooth, predictions change about as often as before under the only perturbation.",
        "0.612",  # CV
        "36.00%",  # of the most entropy
        "4.00%",  # near ties
        "1.50%",  # undecided in bf16
        "0.10%",  # undecided in fp16
        "0.0123",  # the median
        "above 0.1",
        "Nothing changes under none.",
        "2.8%",  # first experts
        "7.0%",
        "6.2%",
        "1.1%",
        "there are no texts, only inputs.",
        "What if: the router smooth",
        "perplexity, unperturbed",
        "2.000 → 2.125",
        "experts per token",
        "+75%",
        "+0.2500 → \u2013",  # the change of the loss with the other router is not stored
        "5.5% → 2.1%",  # what if: tokens that flip
        "f70d1419",
        "2.13.7",
    ],
    "geometry": [
        "tiny-mixtral",
        "In layer 0, 14% of the tokens lie within 1% of their norm",
        "jumps by 46% of its norm on average; with smooth, on the same weights, by 0.040%, with 2.35 experts per token",
        "46% → 0.040%",
        "2 → 2.35",
        "+17%",
        "1.23%",  # within 1% of order 2
        "5.23%",  # flipped before time 1
        "21.31%",  # extra experts
        "jumps by 150% of its norm where expert 1 replaces 3, 0.032 of the token's norm away; with smooth by 0.050%",
        "row 7 of batch 0",
        "its ties are not flats.",
        "An entry of one batch is within 0.042 of its mean, with probability 0.95; noise of 0.1 of the norm",
        "two experts have in common by up to 15.00%",
        "contains a ball of 0.08 of its diameter",
        "by 0.0058 on average and 0.0315 at most, 0.77% of them",
        "at most 4.74 nats",
        "there is no previous MoE layer.",
        "top-k infinite (weights jump by 0.546), smooth 70.6 with a strip of 0.1",
        "30.00%",  # extra experts, by the law
        "What if: the router smooth",
        "2.000 → 2.125",
        "Layers with pictures: 0.",
        "f70d1419",
        "2.13.7",
    ],
    "mismatch": [
        "tiny-mixtral",
        "2.13% of the routing decisions (one token in one layer) have different experts than in the recorded rollout, and",
        "differs by 0.0123 on average and by 0.135 at most",
        "With replay by 0.0045 and 0.0495, and 0.00% are outside; the mean gap is lower by 0.00780 (95% interval of the",
        "-0.0088 to -0.0068",
        "Of 1 remedy, replay clearly lowers the gap between training and the recorded rollout.",
        "Recorded rollout: vLLM on a GPU",
        "Simulated rollout: bfloat16, batches of 1, token by token",
        "2.13% (2.03% to 2.23%)",
        "0.0123 (0.0118 to 0.0128)",
        "0.0861 (0.0851 to 0.0871)",  # 99% of gaps
        "1.0007 (1.0006 to 1.0008)",  # the mean ratio
        "0.30% (0.29% to 0.31%)",  # outside
        "-4.56% (-4.66% to -4.46%)",
        "outside 0.8 to 1.2",
        "smooth[budget=0.25]",
        "its gates are of two kinds.",
        "3.457",
        "f70d1419",
        "2.13.7",
    ],
    "predictions": [
        "smoe and smooth, on digits",
        "At a radius of 0.2 (one sigma), the certified accuracy is: smoe 25.0%",
        "0 violations in 9 certified examples; by chance at most 0.18 expected",
        "37.5",  # smoe under attack at the larger radius
        "0 of 5",
        "comparison/cells/smoe-seed1",
        "capacity routes the copies of a batch together.",
        "right with probability 0.99",
        "pixels between 0 and 1",
        "f70d1419",
        "2.13.7",
    ],
}


@pytest.mark.every_combination
@pytest.mark.parametrize("kind", VALUES)
def test_the_values_are_there(kind: str) -> None:
    shown = Tags(KINDS[kind][2](read(kind))).text
    assert [value for value in VALUES[kind] if value not in shown] == []


def read(kind: str) -> Any:
    """Return the report as it is read from its file."""
    record, content, *_ = KINDS[kind]
    return from_mapping(record, without_nan(content()))


@of_every_kind
def test_nothing_is_fetched_and_only_our_scripts_may_run(kind: str) -> None:
    html = KINDS[kind][2](read(kind))
    page, ours = Tags(html), html.replace(get_plotlyjs(), "")
    for tag, attributes in page.tags:
        assert not attributes.keys() & {"src", "href", "srcset", "action"}, tag
        assert tag not in ("link", "iframe", "object", "img", "base")
    assert "://" not in ours and "@import" not in ours and "url(" not in ours
    policy = next(a["content"] for tag, a in page.tags if tag == "meta" and a.get("http-equiv") == "Content-Security-Policy")
    assert policy is not None and policy.startswith("default-src 'none'") and "unsafe" not in policy.split("style-src")[0]
    allowed = re.findall(r"'sha256-([^']+)'", policy)
    scripts = [hashlib.sha256(script.encode()).digest() for script in page.scripts[2:]]
    assert [base64.b64decode(checksum) for checksum in allowed] == scripts


def poisoned(kind: str) -> Any:
    """Return the report with EVIL before each text and each key that may be any text, the same before equal ones."""
    record, content, *_ = KINDS[kind]
    text = json.dumps(without_nan(content()))
    for string in sorted(set(re.findall(r'"(?:[^"\\]|\\.)*"', text))):
        changed = text.replace(string, json.dumps(EVIL + json.loads(string)))
        with contextlib.suppress(ValueError):  # a field, or a text of which only some are allowed
            from_mapping(record, json.loads(changed))
            text = changed
    return from_mapping(record, json.loads(text))


@of_every_kind
def test_texts_of_a_report_are_text_and_nothing_else(kind: str) -> None:
    page = Tags(KINDS[kind][2](poisoned(kind)))
    assert page.text.count(EVIL) >= 12
    assert "img" not in {tag for tag, _ in page.tags}
    assert not any(name.startswith("on") for _, attributes in page.tags for name in attributes)
    assert len(page.scripts) == 3 + len(SCRIPTS)
    for plot in json.loads(page.scripts[1])["plots"].values():
        assert "<img" not in json.dumps(plot["data"])


@of_every_kind
def test_a_page_is_a_function_of_its_report_which_is_read_from_its_file_or_its_folder(kind: str, tmp_path: Path) -> None:
    record, _, render, write = KINDS[kind]
    stored_at = read(kind).save(tmp_path / record.file_name)
    sources: list[Path | str] = [tmp_path, stored_at, str(tmp_path)]
    for place, source in enumerate(sources):
        path = write(source, str(tmp_path / f"{place}.html"))
        assert path.read_text(encoding="utf-8") == render(read(kind))
    assert_refused("cannot be read", write, tmp_path / "nowhere", tmp_path / "page.html")


@of_every_kind
def test_a_file_is_overwritten_only_when_forced_and_a_report_never(kind: str, tmp_path: Path) -> None:
    record, _, _, write = KINDS[kind]
    path = tmp_path / "new" / "page.html"
    assert write(read(kind), path) == path
    path.write_text("mine")
    assert_refused("--force", write, read(kind), path)
    assert path.read_text() == "mine"
    write(read(kind), path, force=True)
    assert path.read_text(encoding="utf-8").startswith("<!doctype html>")
    assert [file.name for file in path.parent.iterdir()] == ["page.html"]
    mine = read(kind).save(tmp_path / "mine.json")
    for place in (tmp_path, tmp_path / "results.json", tmp_path / record.file_name, mine):
        assert_refused(r"\.html", write, mine, place, force=True)
    assert record.load(mine) == read(kind)


@pytest.mark.parametrize(
    ("content", "says"), [(b"", "not JSON"), (b"{", "not JSON"), (b"\xff{", "not JSON"), (b"[]", "None"), (b"7", "None")]
)
@of_every_kind
def test_a_file_that_is_no_report_gets_one_sentence(kind: str, content: bytes, says: str, tmp_path: Path) -> None:
    record, _, _, write = KINDS[kind]
    (tmp_path / record.file_name).write_bytes(content)
    assert says in assert_refused(rf"{record.file_name} is .*again\.$", write, tmp_path, tmp_path / "page.html")


EDITS: list[tuple[str, tuple[Any, ...], Any, str]] = [
    ("comparison", ("rows",), [], "rows is empty"),
    ("comparison", ("cells", 1, "clean", "routing"), GONE, "cells[1].clean.routing is missing"),
    ("comparison", ("cells", 1, "snapshots", "steps", 0), GONE, "2 steps"),
    ("comparison", ("cells", 1, "snapshots", "layers", 1, "graphs", 0), GONE, "graph"),
    ("comparison", ("cells", 1, "snapshots", "layers", 1, "graphs", 0, 2, 1), GONE, "square"),
    ("comparison", ("cells", 0, "view", "routes", "layers", 1, "experts", 0), GONE, "for each token"),
    ("comparison", ("cells", 0, "view", "routes", "layers", 1, "weights", 0), [500], "a weight for each expert"),
    ("comparison", ("cells", 0, "view", "routes", "layers", 1, "experts", 0), [0, 99], "an expert beyond the 4"),
    ("comparison", ("cells", 0, "view", "routes", "perturbed", "noise", "layers", 0), GONE, "for each layer"),
    ("comparison", ("cells", 0, "view", "examples", 1, "pieces", 0), GONE, "a route for each token"),
    ("images", ("cells", 0, "view", "examples", 1, "picture", "grid"), [2, 2], "each patch"),
    ("images", ("cells", 0, "view", "examples", 0, "picture", "width"), 7, "length"),
    ("audit", ("what_if", "routes", "perturbed", "noise", "layers", 0, "tokens"), [1], "changed routes"),
    ("audit", ("what_if", "routes", "layers"), [], "layer"),
    ("audit", ("schema",), 2, "2"),
    ("audit", ("layers", 1, "load"), GONE, "layers[1].load is missing"),
    ("audit", ("layers", 1, "radius", "counts", 0), GONE, "cannot be drawn"),
    ("audit", ("perturbations", "none", "layers", 0, "flips"), GONE, "perturbations.none.layers[0].flips is missing"),
    ("audit", ("magic",), 1, "magic"),
    ("audit", ("perturbations", "none"), {**perturbed("", 1.0), "layers": []}, "cannot be drawn"),
    ("audit", ("layers",), [], "cannot be drawn"),
    ("audit", ("model",), "mixtral", "model must be a section"),
    ("audit", ("settings", "tokens"), float("nan"), "not JSON (NaN is no number of JSON)"),
    ("geometry", ("layers",), GONE, "layers is missing"),
    ("geometry", ("layers", 0, "k"), "two", "k is"),
    ("geometry", ("layers", 0, "ties", "orders", 0, "shares"), [0.1], "cannot be drawn"),
    ("geometry", ("layers", 0, "pictures", "slices", 0, "cells"), [[0, 1]], "cannot be drawn"),
    ("geometry", ("layers", 0, "pictures", "slices", 0, "cells"), [[9] * 4] * 4, "cannot be drawn"),
    ("geometry", ("layers", 0, "theory", "tsne", "experts"), [1], "cannot be drawn"),
    ("geometry", ("layers", 0, "pictures", "slices", 0, "low"), ["a", 1], "low"),
    ("geometry", ("layers", 0, "jumps", "routers"), [], "cannot be drawn"),
    ("geometry", ("layers", 0, "theory", "entropy"), {}, "entropy"),
    ("mismatch", ("schema",), 7, "not a mismatch report of schema 1"),
    ("mismatch", ("rows", 0, "sets", "tokens"), "many", "rows[0].sets.tokens is 'many'"),
    ("mismatch", ("skipped", 0, "reason"), 3, "skipped[0].reason is 3"),
    ("mismatch", ("rows", 0, "logprobs", "tail"), [0.5], "cannot be drawn"),
    ("mismatch", ("settings", "tail"), [0.0], "cannot be drawn"),
    ("predictions", ("models", 0, "examples", 1, "radius"), "far", "models[0].examples[1].radius is 'far'"),
    ("predictions", ("settings", "radii"), [0.2, 0.1], "the smallest first"),
    ("predictions", ("models",), [], "cannot be drawn"),
]


@pytest.mark.parametrize(("kind", "path", "value", "says"), EDITS)
def test_a_damaged_report_gets_one_sentence(kind: str, path: tuple[Any, ...], value: Any, says: str, tmp_path: Path) -> None:
    record, content, _, write = KINDS[kind]
    place = whole = content()
    for key in path[:-1]:
        place = place[key]
    if value is GONE:
        del place[path[-1]]
    else:
        place[path[-1]] = value
    (tmp_path / record.file_name).write_text(json.dumps(whole))
    assert says in assert_refused(rf"{record.file_name} is .*again\.$", write, tmp_path, tmp_path / "page.html")
    assert not (tmp_path / "page.html").exists()
