"""Reports are data: complete, repeatable, comparable, and marked if the audit was interrupted."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from auditing.audited_models import batches, texts, tokenizer
from commands import Command
from tiny import tiny
from wording import assert_refused

from holdfast.auditing import AuditReport, audit, differences, parse_condition


@pytest.fixture(scope="module")
def report() -> AuditReport:
    return audit(tiny("mixtral"), texts(), tokenizer=tokenizer(), batch=3, name="tiny", perturb=["none", "noise", "attack"])


def test_a_report_is_the_same_after_saving_and_loading(report: AuditReport, tmp_path: Path) -> None:
    path = report.save(tmp_path / "there" / "audit.json")
    assert AuditReport.load(path) == report
    stored = json.loads(path.read_text())
    assert stored["schema"] == 1 and stored["model"]["name"] == "tiny" and stored["settings"]["seed"] == 0
    assert stored["versions"]["torch"] == torch.__version__ and len(stored["data"]["checksum"]) == 64
    assert stored["data"] == {**stored["data"], "kind": "texts", "batches": 2, "sequences": 6, "tokens": 84}
    assert [file.name for file in (tmp_path / "there").iterdir()] == ["audit.json"]


EDITS: list[tuple[tuple[str, ...], Any]] = [
    *(((key,), value) for key in ("model", "data", "overall", "layers", "perturbations") for value in (None, 3, "x", [1])),
    *((("overall", "entropy"), value) for value in ("x", [1], True, 10**400, {"deep": "x"})),
    *(((key,), value) for key in ("at_risk", "settings", "versions", "what_if", "view") for value in (3, "x")),
    (("layers", "0", "near_ties"), 7),
    (("seconds",), "soon"),
]


@pytest.mark.parametrize(("path", "value"), EDITS, ids=lambda part: str(part)[:20])
def test_a_comparison_with_an_edited_file_prints_a_one_line_error(
    path: tuple[str, ...], value: Any, report: AuditReport, tmp_path: Path, command: Command
) -> None:
    whole, edited = report.save(tmp_path / "whole.json"), tmp_path / "edited.json"
    stored = json.loads(whole.read_text())
    place = stored
    for key in path[:-1]:
        place = place[int(key)] if isinstance(place, list) else place[key]
    place[path[-1]] = value
    edited.write_text(json.dumps(stored))
    assert "edited.json" in command.refused("audit", "--compare", whole, edited)


def test_a_comparison_takes_folders_and_names_that_look_like_markup(
    report: AuditReport, tmp_path: Path, command: Command
) -> None:
    named = replace(report, model=replace(report.model, name="[/red]"), overall=replace(report.overall, loss=1.0))
    for name, one in (("a", report), ("b", named)):
        one.save(tmp_path / name / "audit.json")
    assert "[/red]" in command.printed("audit", "--compare", tmp_path / "a", tmp_path / "b")
    (tmp_path / "deep.json").write_text("[" * 200_000)
    assert "deep.json" in command.refused("audit", "--compare", tmp_path / "a", tmp_path / "deep.json")


def test_two_audits_of_one_model_are_the_same(report: AuditReport) -> None:
    again = audit(
        tiny("mixtral"), iter(texts()), tokenizer=tokenizer(), batch=3, name="tiny", perturb=["attack", "noise", "none"]
    )
    ours, theirs = json.loads(report.to_json()), json.loads(again.to_json())
    for stored in (ours, theirs):
        del stored["seconds"], stored["settings"]["perturb"]
    assert ours == theirs and differences(report, again) == []


def test_the_checksum_depends_only_on_the_data(report: AuditReport) -> None:
    options: dict[str, Any] = {"tokenizer": tokenizer(), "batch": 3, "perturb": ["none"]}
    assert audit(tiny("olmoe"), texts(), **options).data.checksum == report.data.checksum
    assert audit(tiny("olmoe"), [*texts(5), "the cat"], **options).data.checksum != report.data.checksum


def test_conditions_read_the_overall_numbers(report: AuditReport) -> None:
    share = report.overall.undecided["bf16"]
    assert parse_condition(f"undecided.bf16 >= {share!r}").holds(report) == (True, share)
    assert parse_condition(f"undecided.bf16>{share!r}").holds(report)[0] is False
    assert parse_condition("flips.noise.0.05>0").holds(report)[0] and parse_condition("flips.none<=0").holds(report)[0]
    assert not parse_condition("output.noise.0.05.flip < 1e-9").holds(report)[0]


@pytest.mark.parametrize(
    ("written", "says"),
    [
        ("undecided.bf15>0.1", "'undecided.bf16'"),
        ("undecided.bf16=0.1", "undecided.bf16=0.1"),
        ("undecided.bf16>", "undecided.bf16>"),
        ("__import__('os')>1", "__import__"),
        ("entropy > x", "entropy > x"),
        ("loss > 0", "loss"),
    ],
)
def test_a_wrong_condition_raises_a_one_line_error(written: str, says: str, report: AuditReport) -> None:
    report = replace(report, overall=replace(report.overall, loss=None))
    assert_refused(says, lambda: parse_condition(written).holds(report))


def test_differences_are_those_of_the_overall_numbers(report: AuditReport) -> None:
    other = audit(tiny("mixtral", seed=1), texts(), tokenizer=tokenizer(), batch=3, perturb=["none"])
    found = {name: pair for name, *pair in differences(report, other)}
    assert found["entropy"] == [report.overall.entropy, other.overall.entropy]
    assert found["flips.noise.0.05"][1] is None and "layers" not in found


def test_an_interrupted_audit_reports_the_batches_it_finished() -> None:
    def broken_off() -> Iterator[dict[str, Any]]:
        yield from batches(2)
        raise KeyboardInterrupt

    found = audit(tiny("mixtral"), broken_off(), perturb=["none", "noise"])
    assert found.status == "interrupted" and found.data.batches == 2
    whole = audit(tiny("mixtral"), batches(2), perturb=["none", "noise"])
    assert whole.status == "complete" and found.overall == whole.overall


def test_an_interruption_in_the_middle_of_a_batch_leaves_that_batch_out() -> None:
    model = tiny("mixtral")
    forwards = [0]

    def stop(module: Any, given: Any) -> None:
        forwards[0] += 1
        if forwards[0] == 6:  # three forwards a batch: the last of the second batch, whose others were compared
            raise KeyboardInterrupt

    handle = model.register_forward_pre_hook(stop)
    found = audit(model, batches(3), perturb=["none", "noise"], noise=[0.05])
    handle.remove()
    assert found.status == "interrupted" and found.data.batches == 1
    whole = audit(tiny("mixtral"), batches(1), perturb=["none", "noise"], noise=[0.05])
    assert found.overall == whole.overall and found.perturbations == whole.perturbations


def test_an_interruption_before_the_first_batch_is_raised() -> None:
    def at_once() -> Iterator[dict[str, Any]]:
        raise KeyboardInterrupt
        yield {}

    with pytest.raises(KeyboardInterrupt):
        audit(tiny("mixtral"), at_once())


def test_batches_are_read_one_at_a_time() -> None:
    """The next batch is read when the current one is finished."""
    log: list[str] = []

    def told() -> Iterator[dict[str, Any]]:
        for number, batch in enumerate(batches(3)):
            log.append(f"batch {number}")
            yield batch

    audit(tiny("mixtral"), told(), perturb=["none"], progress=lambda done, what: log.append(what))
    assert log == [
        word
        for number in range(3)
        for word in (f"batch {number}", "the unperturbed model", "the same forward a second time")
    ]


def test_an_audit_stops_after_the_tokens_it_was_given() -> None:
    found = audit(tiny("mixtral"), batches(9), perturb=["none"], tokens=100)
    assert found.data.batches == 3 and found.data.tokens == 135


def test_long_texts_are_cut_and_every_token_is_seen() -> None:
    long = " ".join(texts(20))
    found = audit(tiny("mixtral"), [long], tokenizer=tokenizer(), length=16, batch=4, perturb=["none"])
    assert found.data.tokens == len(long.split()) and found.data.sequences == -(-len(long.split()) // 16)


@pytest.mark.parametrize(
    ("given", "options", "says"),
    [
        ([], {}, "no data"),
        (["", "  "], {"tokenizer": True}, "empty"),
        (["the cat"], {}, "tokenizer"),
        ("the cat", {}, "list"),
        ([1, 2], {}, "dict"),
        ([{}], {}, "empty"),
        (["the cat", 3], {"tokenizer": True, "batch": 1}, "string"),
        (None, {"noise": [0.1] * 9}, "9 "),
        (None, {"noise": [2.0]}, "at most 1"),
        (None, {"sed": 1}, "'seed'"),
        (None, {"length": 1}, "length is 1"),
        (None, {"rate": 2}, "rate is 2"),
        (None, {"tokenizer": 3}, "tokenizer"),
    ],
)
def test_a_mistake_raises_a_one_line_error(given: Any, options: dict[str, Any], says: str) -> None:
    if options.get("tokenizer") is True:
        options = {**options, "tokenizer": tokenizer()}
    with pytest.raises(ValueError, match=says) as raised:
        audit(tiny("mixtral"), batches() if given is None else given, **options)
    assert len(str(raised.value).splitlines()) == 1


def test_a_dense_model_and_an_unknown_family_raise_helpful_errors() -> None:
    from tiny_dense import tiny_dense

    assert_refused(r"holdfast\.sparsify", audit, tiny_dense("llama"), batches())
    model = tiny_dense("llama")
    model.config.model_type = "dbrx"
    assert_refused("dbrx", audit, model, batches())
    assert_refused("Hugging Face", audit, torch.nn.Linear(2, 2), batches())
