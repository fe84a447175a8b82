"""`Routes`: from a trace, from what inference engines return, from files; and one sentence for each record that is wrong."""

import asyncio
import base64
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from foreign_routes import IDS, MASK, as_npy, own_routes, random_routes
from safetensors.torch import save_file
from tiny import tiny
from tiny_dense import tiny_dense
from torch import Tensor
from wording import assert_refused

import holdfast
from holdfast import Routes
from holdfast.replaying import RoutedModel

OF = RoutedModel("deepseek_v3", places=[1, 2], all_layers=3, experts=[8, 8], k=[2, 2])
LENGTHS = [6, 4]


def records(start: int = 0, drop: int = 1, layers: int = 2) -> list[Any]:
    """Return the record of each sequence, as vLLM has it: without the last token."""
    found = random_routes(layers).numpy().astype(np.int32)
    return [found[row, start : length - drop] for row, length in enumerate(LENGTHS)]


def as_int32(record: Any) -> str:
    return base64.b64encode(record.astype("<i4").tobytes()).decode()


def expected(places: list[list[tuple[int, int]]], shape: tuple[int, int], of: list[Any]) -> Tensor:
    """Put row j of a sequence's record to its j-th place (row, column), in loops."""
    routes = torch.full((*shape, 2, 2), -1)
    for record, positions in zip(of, places, strict=True):
        for values, (row, column) in zip(record, positions, strict=False):
            for layer in range(2):
                for slot in range(2):
                    routes[row, column, layer, slot] = int(values[layer][slot])
    return routes


LEFT = [[(0, place) for place in range(6)], [(1, place) for place in range(2, 6)]]
PACKED = [[(0, place) for place in range(6)], [(0, place) for place in range(6, 10)]]


@pytest.mark.parametrize(
    "encode", [lambda record: record, torch.from_numpy, lambda record: record.tolist(), as_int32, as_npy]
)
def test_every_encoding_of_an_engine_is_read(encode: Any) -> None:
    routes = Routes.from_sequences([encode(record) for record in records()], OF, attention_mask=MASK)
    assert routes.experts.dtype == torch.int8
    assert torch.equal(routes.experts.long(), expected(LEFT, (2, 6), records()))
    assert routes.recorded.tolist() == [[True] * 5 + [False], [False] * 2 + [True] * 3 + [False]]


@pytest.mark.parametrize("drop", [0, 1])
def test_packed_rows_by_position_ids_and_by_lengths(drop: int) -> None:
    positions = torch.tensor([[0, 1, 2, 3, 4, 5, 0, 1, 2, 3]])
    given = records(drop=drop)
    by_position = Routes.from_sequences(given, OF, position_ids=positions)
    by_length = Routes.from_sequences(given, OF, cu_seq_lens=torch.tensor([0, 6, 10]))
    assert torch.equal(by_position.experts, by_length.experts)
    assert torch.equal(by_length.experts.long(), expected(PACKED, (1, 10), given))


def test_right_padding_a_start_and_a_sequence_without_a_record() -> None:
    mask = torch.tensor([[1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 0, 0]])
    routes = Routes.from_sequences([as_int32(records(start=2)[0]), None], OF, attention_mask=mask, start=[2, 0])
    places = [[(0, place) for place in range(2, 6)], []]
    assert torch.equal(routes.experts.long(), expected(places, (2, 6), [records(start=2)[0], []]))


def test_turns_of_a_sequence_are_pieces() -> None:
    whole = records()
    turns = [(0, whole[0][:2]), (3, as_npy(whole[0][3:]))]
    routes = Routes.from_sequences([turns, whole[1]], OF, attention_mask=MASK)
    wanted = expected(LEFT, (2, 6), whole)
    wanted[0, 2] = -1
    assert torch.equal(routes.experts.long(), wanted)


def test_dense_layers_in_a_record_are_left_out() -> None:
    given = records(layers=3)
    routes = Routes.from_sequences([as_int32(record) for record in given], OF, attention_mask=MASK)
    assert torch.equal(routes.experts.long(), expected(LEFT, (2, 6), [record[:, 1:] for record in given]))


def wrong(change: Any) -> list[Any]:
    given = [record.copy() for record in records()]
    return change(given) or given


def set_value(at: Any, value: Any) -> Any:
    def change(given: list[Any]) -> None:
        given[0][at] = value

    return change


BAD: dict[str, tuple[Any, dict[str, Any], str]] = {
    "a duplicate": (set_value((0, 0), 3), {}, "same expert in two slots"),
    "a fused shared expert": (
        lambda given: [np.concatenate([record, record[..., :1] * 0 + 8], axis=-1) for record in given],
        {},
        "fused the shared expert",
    ),
    "a physical id": (set_value((0, 0, 0), 130), {}, "physical ids"),
    "a negative id": (set_value((0, 0, 0), -2), {}, "names expert -2"),
    "a mixture": (set_value((0, 0, 0), -1), {}, "-1 in some slots"),
    "an unused slot": (set_value((0, 0, 0), 8), {}, "1 recorded experts, but the router selects k = 2"),
    "other layers": (lambda given: [record[:, :1] for record in given], {}, "1 layers; this model has 2 MoE layers, or 3"),
    "three slots too many": (lambda given: [np.repeat(record, 2, axis=-1) for record in given], {}, "4 slots"),
    "too long": (lambda given: [np.concatenate([given[0], given[0]]), given[1]], {}, "10 rows from token 0"),
    "too short": (lambda given: [given[0][:-1], given[1]], {}, "all but the last"),
    "one record missing": (lambda given: given[:1], {}, "1 records"),
    "a start behind the end": (lambda given: None, {"start": 7}, "starts at 7"),
    "numbers of another model": (lambda given: [as_int32(given[0][:, :1]), given[1]], {}, "another model"),
    "no base64": (lambda given: ["?", given[1]], {}, "not base64"),
    "a broken npy": (lambda given: [base64.b64encode(b"\x93NUMPY").decode(), given[1]], {}, "neither int32"),
    "a pickle": (lambda given: [as_npy(np.array([{}], dtype=object)), given[1]], {}, "neither int32"),
    "fractions": (lambda given: [given[0] / 2, given[1]], {}, "float64"),
    "overlapping turns": (lambda given: [[(0, given[0][:2]), (1, given[0][:2])], given[1]], {}, "same tokens"),
    "no place": (lambda given: None, {"attention_mask": None}, "give one of"),
    "padded positions": (
        lambda given: None,
        {"attention_mask": None, "position_ids": torch.tensor([[0, 1, 2, 3, 4, 5], [1, 1, 0, 1, 2, 3]])},
        "give attention_mask",
    ),
}


@pytest.mark.every_combination
@pytest.mark.parametrize("case", BAD)
def test_a_bad_record_is_refused_in_a_sentence(case: str) -> None:
    change, options, message = BAD[case]
    assert_refused(message, Routes.from_sequences, wrong(change), OF, **{"attention_mask": MASK, **options})


def test_saved_routes_come_back_with_their_model(tmp_path: Path) -> None:
    model = holdfast.reroute(tiny("mixtral"), "native")
    logits, routes = own_routes(model)
    routes.save(tmp_path / "new" / "routes.safetensors")
    loaded = Routes.load(tmp_path / "new" / "routes.safetensors")
    assert torch.equal(loaded.experts, routes.experts) and loaded.of == routes.of
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["routes.safetensors"]
    with torch.no_grad(), holdfast.replay(model, loaded):
        assert torch.equal(model(input_ids=IDS, attention_mask=MASK).logits, logits)


def described(**changes: Any) -> str:
    values = {"model_type": "", "places": [0], "all_layers": 1, "experts": [8], "k": [2]}
    return json.dumps({**values, **changes})


@pytest.mark.parametrize(
    "notes",
    [
        {},
        {"holdfast_routes": "9", "of": described()},
        {"holdfast_routes": "1"},
        {"holdfast_routes": "1", "of": "[" * 100_000},
        {"holdfast_routes": "1", "of": "[]"},
        {"holdfast_routes": "1", "of": described(model_type=3)},
        {"holdfast_routes": "1", "of": described(experts=[0])},
        {"holdfast_routes": "1", "of": described(k=[])},
        {"holdfast_routes": "1", "of": described(experts=[2])},
    ],
    ids=range(9),
)
@pytest.mark.every_combination
def test_a_file_that_is_no_record_is_refused(tmp_path: Path, notes: dict[str, str]) -> None:
    save_file({"experts": torch.tensor([[[[3, 1]]]], dtype=torch.int8)}, tmp_path / "bad", notes)
    assert_refused("bad", Routes.load, tmp_path / "bad")
    (tmp_path / "worse").write_bytes(b"not safetensors")
    assert_refused("worse", Routes.load, tmp_path / "worse")


def test_routes_of_another_model_are_refused_before_the_forward() -> None:
    model, other = (holdfast.reroute(tiny(name), "native") for name in ("mixtral", "olmoe"))
    _, routes = own_routes(other)
    with pytest.raises(ValueError, match="another model"), holdfast.replay(model, routes):
        pass
    assert_refused("another model", model, input_ids=IDS, routed_experts=routes)
    shallow = holdfast.reroute(tiny("olmoe", num_hidden_layers=2), "native")
    assert_refused("another model", shallow, input_ids=IDS, routed_experts=routes)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda routes: routes[:, :, :2], "2 layers, but 3"),
        (lambda routes: routes[:, :5], "12 tokens"),
        (lambda routes: routes[..., 0], "expected a tensor"),
        (lambda routes: routes[..., :1], "1 slots"),
        (lambda routes: routes.float(), "float32"),
        (lambda routes: routes.numpy(), "ndarray"),
        (lambda routes: routes + 7, "names expert"),
    ],
    ids=["layers", "tokens", "dimensions", "slots", "dtype", "array", "experts"],
)
@pytest.mark.parametrize("router", ["native", "smoe"])
@pytest.mark.every_combination
def test_a_tensor_that_does_not_fit_is_refused_in_a_sentence(router: str, change: Any, message: str) -> None:
    model = holdfast.reroute(tiny("mixtral"), router)
    assert_refused(message, model, input_ids=IDS, routed_experts=change(random_routes(3)))


def test_models_that_cannot_replay_say_so() -> None:
    with pytest.raises(ValueError, match="native"), holdfast.replay(tiny("mixtral"), random_routes(3)):
        pass
    partly = holdfast.reroute(tiny("mixtral"), "smoe", layers=[1])
    assert_refused("3 layers, but 1", partly, input_ids=IDS, routed_experts=random_routes(3))
    soft = holdfast.sparsify(tiny_dense("bert"), experts=4, layer="soft")
    assert_refused("SoftMoE", soft, input_ids=IDS, routed_experts=random_routes(3))


def test_replay_is_for_one_forward() -> None:
    model = holdfast.reroute(tiny("mixtral"), "native")
    with torch.no_grad(), holdfast.replay(model, random_routes(3)):
        model(input_ids=IDS)
        assert_refused("one forward", model, input_ids=IDS)


@torch.no_grad()
def test_replay_is_for_its_own_thread_and_task() -> None:
    model = holdfast.reroute(tiny("mixtral"), "native")
    routes = [random_routes(3, seed=seed) for seed in (0, 1)]
    expected = [model(input_ids=IDS, routed_experts=each).logits for each in routes]
    live = model(input_ids=IDS).logits

    def run_in_thread() -> Tensor:
        with ThreadPoolExecutor(1) as other:
            return other.submit(lambda: model(input_ids=IDS).logits).result()  # type: ignore[no-any-return]

    with holdfast.replay(model, routes[0]):
        assert torch.equal(run_in_thread(), live)
        assert torch.equal(model(input_ids=IDS).logits, expected[0])
    with pytest.raises(ValueError, match="no forward took"), holdfast.replay(model, routes[0]):
        run_in_thread()

    async def replayed(routes: Tensor) -> Tensor:
        with holdfast.replay(model, routes):
            await asyncio.sleep(0)
            return model(input_ids=IDS).logits  # type: ignore[no-any-return]

    async def both() -> list[Tensor]:
        return await asyncio.gather(*map(replayed, routes))

    assert all(map(torch.equal, asyncio.run(both()), expected))


@pytest.mark.slow
def test_replay_of_a_compiled_model_runs_it_uncompiled() -> None:
    torch.compiler.reset()
    model = holdfast.reroute(tiny("mixtral"), "native")
    compiled: Any = torch.compile(model, backend="eager")
    with torch.no_grad():
        expected = model(input_ids=IDS, routed_experts=random_routes(3)).logits
        compiled(input_ids=IDS)
        with holdfast.replay(compiled, random_routes(3)):
            assert torch.equal(compiled(input_ids=IDS).logits, expected)
    torch.compiler.reset()


def test_rows_are_chosen_like_those_of_a_batch() -> None:
    _, routes = own_routes(tiny("mixtral"))
    assert len(routes) == 2 and torch.equal(routes[[1, 0]].experts, routes.experts.flip(0))
    assert torch.equal(routes[1].experts, routes.experts[1:])
    assert int(routes.differs(routes).sum()) == 0
    changed = routes.experts.clone()
    changed[0, 0, 1] = torch.tensor([value for value in range(8) if value not in changed[0, 0, 1].tolist()][:2])
    assert routes.differs(Routes.from_tensor(changed, routes.of)).nonzero().tolist() == [[0, 0, 1]]


def test_many_experts_need_two_bytes() -> None:
    model = tiny("mixtral", num_local_experts=128)
    _, routes = own_routes(model)
    assert routes.experts.dtype == torch.int16
