"""What all pages have in common: what they load, what they never overwrite, and which files they refuse."""

import base64
import hashlib
import json
import re
from pathlib import Path
from typing import Any

import pytest
from plotly.offline import get_plotlyjs
from report.audited import perturbed, stored_audit
from report.geometries import stored_geometry
from report.mismatches import stored_mismatch
from report.stored import stored, stored_images
from report.tags import Tags

from holdfast import report
from holdfast.auditing import AuditReport, GeometryReport
from holdfast.checked import from_mapping
from holdfast.mismatch import MismatchReport
from holdfast.stored import without_nan
from holdfast.train.results import Results

GONE = object()  # in place of a value that is deleted
KINDS: dict[str, tuple[Any, Any, Any, Any]] = {
    "comparison": (Results, stored, report.render, report.write_report),
    "images": (Results, stored_images, report.render, report.write_report),
    "audit": (AuditReport, stored_audit, report.render_audit, report.write_audit),
    "geometry": (GeometryReport, stored_geometry, report.render_geometry, report.write_geometry),
    "mismatch": (MismatchReport, stored_mismatch, report.render_mismatch, report.write_mismatch),
}
of_every_kind = pytest.mark.parametrize("kind", KINDS)


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


@of_every_kind
def test_a_page_is_a_function_of_its_report_which_is_read_from_its_file_or_its_folder(kind: str, tmp_path: Path) -> None:
    record, _, render, write = KINDS[kind]
    stored_at = read(kind).save(tmp_path / record.file_name)
    sources: list[Path | str] = [tmp_path, stored_at, str(tmp_path)]
    for place, source in enumerate(sources):
        path = write(source, str(tmp_path / f"{place}.html"))
        assert path.read_text(encoding="utf-8") == render(read(kind))
    with pytest.raises(ValueError, match="cannot be read"):
        write(tmp_path / "nowhere", tmp_path / "page.html")


@of_every_kind
def test_a_file_is_overwritten_only_when_forced_and_a_report_never(kind: str, tmp_path: Path) -> None:
    record, _, _, write = KINDS[kind]
    path = tmp_path / "new" / "page.html"
    assert write(read(kind), path) == path
    path.write_text("mine")
    with pytest.raises(ValueError, match="--force"):
        write(read(kind), path)
    assert path.read_text() == "mine"
    write(read(kind), path, force=True)
    assert path.read_text(encoding="utf-8").startswith("<!doctype html>")
    assert [file.name for file in path.parent.iterdir()] == ["page.html"]
    mine = read(kind).save(tmp_path / "mine.json")
    for place in (tmp_path, tmp_path / "results.json", tmp_path / record.file_name, mine):
        with pytest.raises(ValueError, match=r"\.html"):
            write(mine, place, force=True)
    assert record.load(mine) == read(kind)


@pytest.mark.parametrize(
    ("content", "says"), [(b"", "not JSON"), (b"{", "not JSON"), (b"\xff{", "not JSON"), (b"[]", "None"), (b"7", "None")]
)
@of_every_kind
def test_a_file_that_is_no_report_gets_one_sentence(kind: str, content: bytes, says: str, tmp_path: Path) -> None:
    record, _, _, write = KINDS[kind]
    (tmp_path / record.file_name).write_bytes(content)
    with pytest.raises(ValueError, match=rf"{record.file_name} is .*again\.$") as caught:
        write(tmp_path, tmp_path / "page.html")
    assert says in str(caught.value) and "\n" not in str(caught.value)


EDITS: list[tuple[str, tuple[Any, ...], Any, str]] = [
    ("comparison", ("rows",), [], "rows is empty"),
    ("comparison", ("cells", 1, "clean", "routing"), GONE, "cells[1].clean.routing is missing"),
    ("comparison", ("cells", 1, "clean", "figure"), GONE, "cells[1].clean.figure is missing"),
    ("comparison", ("run", "data"), GONE, "run.data is missing"),
    ("comparison", ("cells", 1, "snapshots", "steps", 0), GONE, "2 steps"),
    ("comparison", ("cells", 1, "snapshots", "layers", 1, "graphs", 0), GONE, "graph"),
    ("comparison", ("cells", 1, "snapshots", "layers", 1, "graphs", 0, 2, 1), GONE, "square"),
    ("comparison", ("cells", 0, "view", "experts", 1, 0), GONE, "piece"),
    ("images", ("cells", 0, "view", "images", 1, "experts", 1, 0), GONE, "patch"),
    ("images", ("cells", 0, "view", "images", 0, "width"), 7, "length"),
    ("audit", ("schema",), 2, "2"),
    ("audit", ("layers", 1, "load"), GONE, "layers[1].load is missing"),
    ("audit", ("layers", 1, "radius", "counts", 0), GONE, "5 counts"),
    ("audit", ("perturbations", "none", "overall"), GONE, "perturbations.none.overall is missing"),
    ("audit", ("perturbations", "none", "layers", 0, "flips"), GONE, "perturbations.none.layers[0].flips is missing"),
    ("audit", ("perturbations", "none", "harmless"), GONE, "perturbations.none.harmless is missing"),
    ("audit", ("layers", 0, "entropy_share"), GONE, "layers[0].entropy_share is missing"),
    ("audit", ("what_if", "output"), GONE, "what_if.output is missing"),
    ("audit", ("magic",), 1, "magic"),
    ("audit", ("perturbations", "none"), {**perturbed("", 1.0), "layers": []}, "needs its layers"),
    ("audit", ("layers",), [], "layers must not be empty"),
    ("audit", ("model",), "mixtral", "model must be a section"),
    ("audit", ("settings", "tokens"), float("nan"), "not JSON (NaN is no number of JSON)"),
    ("geometry", ("schema",), 2, "schema"),
    ("geometry", ("layers",), GONE, "layers is missing"),
    ("geometry", ("layers", 0, "k"), "two", "k is"),
    ("geometry", ("layers", 0, "ties", "orders", 0, "shares"), [0.1], "share for each width"),
    ("geometry", ("layers", 0, "hitting", "upper"), [0.1], "number for each time"),
    ("geometry", ("layers", 0, "pictures", "slices", 0, "cells"), [[0, 1]], "square grids"),
    ("geometry", ("layers", 0, "pictures", "slices", 0, "cells"), [[9] * 4] * 4, "without a set"),
    ("geometry", ("layers", 0, "pictures", "slices", 0, "low"), ["a", 1], "low"),
    ("geometry", ("layers", 0, "pictures", "normal", "change"), [[0.1]], "change for each position"),
    ("geometry", ("layers", 0, "jumps", "routers"), [], "routers"),
    ("geometry", ("layers", 0, "theory", "tsne", "experts"), [1], "an expert for each token"),
    ("geometry", ("layers", 0, "theory", "entropy"), {}, "entropy"),
    ("geometry", ("refused", 0, "name"), None, "name"),
    ("mismatch", ("schema",), 7, "not a mismatch report of schema 1"),
    ("mismatch", ("rows", 0, "sets", "tokens"), "many", "rows[0].sets.tokens is 'many'"),
    ("mismatch", ("rows", 0, "logprobs", "tail"), [0.5], "needs a share for each size"),
    ("mismatch", ("settings", "tail"), [0.0, 1.0, 2.0, 3.0], "tail needs sizes above 0"),
    ("mismatch", ("skipped", 0, "reason"), 3, "skipped[0].reason is 3"),
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
    with pytest.raises(ValueError, match=rf"{record.file_name} is .*again\.$") as caught:
        write(tmp_path, tmp_path / "page.html")
    assert says in str(caught.value) and "\n" not in str(caught.value)
    assert not (tmp_path / "page.html").exists()
