"""Records in the layouts that vLLM documents become routes of the right tokens. No vLLM runs here.

one record     `routed_experts (prompt + answer - 1, L, K)` (its examples/rl/routed_experts_e2e.py), over HTTP also as base64
               of a .npy file
two records    `prompt_routed_experts (prompt, L, K)` and `routed_experts (answer, L, K)`, or fewer rows of the answer;
               int16; -1 for tokens of a cached prefix (its page on routed experts replay, version 0.21)
"""

from typing import Any

import numpy as np
import pytest
import torch
from foreign_routes import as_npy, random_routes
from tiny import tiny

import holdfast

PROMPT, ANSWER, LAYERS = 4, 3, 3
TOKENS = PROMPT + ANSWER
MASK = torch.tensor([[0] * 2 + [1] * TOKENS])  # padded on the left
WHOLE = random_routes(LAYERS, shape=(1, TOKENS))[0].numpy().astype(np.int16)  # (tokens, layers, slots)


def cached(prompt: Any) -> Any:
    """Return the record of a prompt whose first two tokens come from a cache."""
    return np.concatenate([np.full_like(prompt[:2], -1), prompt[2:]])


LAYOUTS: dict[str, tuple[Any, range]] = {  # what is passed, and the tokens that have a record
    "one record": (WHOLE[:-1], range(TOKENS - 1)),
    "one record as lists": (WHOLE[:-1].tolist(), range(TOKENS - 1)),
    "one record as .npy": (as_npy(WHOLE[:-1]), range(TOKENS - 1)),
    "two records": ([(0, WHOLE[:PROMPT]), (PROMPT, WHOLE[PROMPT:])], range(TOKENS)),
    "two records, without the last token": ([(0, WHOLE[:PROMPT]), (PROMPT, WHOLE[PROMPT:-1])], range(TOKENS - 1)),
    "two records as lists": ([(0, WHOLE[:PROMPT].tolist()), (PROMPT, WHOLE[PROMPT:].tolist())], range(TOKENS)),
    "a cached prefix": ([(0, cached(WHOLE[:PROMPT])), (PROMPT, WHOLE[PROMPT:])], range(2, TOKENS)),
}


@pytest.fixture(scope="module")
def model() -> Any:
    return holdfast.reroute(tiny("mixtral"), "native").eval()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_record_of_vllm_is_at_the_places_of_its_tokens(layout: str, model: Any) -> None:
    record, recorded = LAYOUTS[layout]
    routes = holdfast.Routes.from_sequences([record], model, attention_mask=MASK)
    assert routes.recorded[0].nonzero().flatten().tolist() == [2 + token for token in recorded]
    found = routes.experts[0, 2:].numpy()
    np.testing.assert_array_equal(found[list(recorded)], WHOLE[list(recorded)])
    ids = torch.arange(3, 3 + MASK.shape[1]).unsqueeze(0)
    with holdfast.trace(model) as traced, torch.no_grad():
        model(input_ids=ids, attention_mask=MASK, routed_experts=routes)
    assert not bool(holdfast.Routes.from_trace(traced, model).differs(routes).any())  # the recorded experts ran


def test_the_records_of_an_answer_at_the_wrong_place_are_refused(model: Any) -> None:
    """The answer's record of version 0.21 alone is not one of the whole sequence."""
    with pytest.raises(ValueError, match="expected one row for each token, or for all but the last"):
        holdfast.Routes.from_sequences([WHOLE[PROMPT:]], model, attention_mask=MASK)
