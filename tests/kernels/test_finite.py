"""NaN and infinite scores are reported once, by the layer they were first seen in, however late a GPU is."""

import pytest
import torch

from holdfast.kernels import finite
from holdfast.kernels.finite import encode_name, require_finite


class Event:
    """One that has come, or not yet."""

    def __init__(self, come: bool) -> None:
        self.come = come

    def query(self) -> bool:
        return self.come


def check(layer: str, found: bool, event: Event) -> finite._Check:
    return finite._Check(event, torch.tensor(int(found)), encode_name(layer))  # type: ignore[arg-type]


def test_only_the_first_layer_with_nan_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    late = Event(False)
    checks = [check("first", False, Event(True)), check("second", True, Event(True)), check("third", True, late)]
    monkeypatch.setattr(finite, "_in_flight", type(finite._in_flight)(checks))
    with pytest.raises(ValueError, match=r"second: .*NaN"):
        finite._report_finished_checks()
    finite._report_finished_checks()
    assert list(finite._in_flight) == checks[2:]  # a kernel will write to its memory yet
    late.come = True
    finite._report_finished_checks()
    assert not finite._in_flight
    finite._in_flight.append(check("fourth", True, late))
    with pytest.raises(ValueError, match="fourth"):
        finite._report_finished_checks()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_gpu_reports_at_one_of_the_next_checks_and_not_before(bad: float) -> None:
    good = torch.randn(2, 300, 8, device="cuda")
    scores, layer = good.clone(), encode_name("layers.3")
    scores[1, 299, 7] = bad
    for each in (good, scores):
        assert require_finite(each, good, layer, None) is each
    torch.cuda.synchronize()
    with pytest.raises(ValueError, match=r"layers\.3: .*NaN"):
        require_finite(good, good, layer, None)
    real = torch.ones(2, 300, dtype=torch.bool, device="cuda")
    real[1, 299] = False
    for _ in range(2):  # values of padding are not checked
        require_finite(scores, good, layer, real)
        torch.cuda.synchronize()
