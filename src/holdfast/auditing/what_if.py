"""What another router would change, without training: the same audit before and after."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, final

from holdfast.auditing.offloading import resident
from holdfast.auditing.report import AuditReport
from holdfast.auditing.running import audit
from holdfast.auditing.subject import Audited
from holdfast.hub import reroute, restore
from holdfast.hub.gates import ReroutedGate


@final
@dataclass(frozen=True)
class WhatIf:
    """Two audits of one model on the same data: as it is, and with another router."""

    router: str
    before: AuditReport
    after: AuditReport

    def summary(self) -> dict[str, Any]:
        """What it costs, and what it does to flips and to the change of output that they cause."""
        one, two = self.before.overall, self.after.overall
        names = [name for name in one["flips"] if name in two["flips"]]
        return {
            "router": self.router,
            "cost": {name: _pair(one[name], two[name]) for name in ("loss", "perplexity", "experts_per_token")},
            "flips": {name: _pair(one["flips"][name], two["flips"][name]) for name in names},
            "flip_output": {name: _pair(one["output"][name]["flip"], two["output"][name]["flip"]) for name in names},
            "output": {name: _pair(one["output"][name]["total"], two["output"][name]["total"]) for name in names},
            "prediction_flips": {
                name: _pair(one["prediction_flips"][name], two["prediction_flips"][name]) for name in names
            },
            "overall": two,
        }


def what_if(
    model: Any,
    texts_or_inputs: Iterable[Any],
    router: str = "smooth",
    *,
    before: AuditReport | None = None,
    options: dict[str, Any] | None = None,
    **settings: Any,
) -> WhatIf:
    """Audit the model as it is, reroute it, audit it again, and restore it, also where something fails.

    before    the first audit, where it has been made already with the same inputs and settings
    options   of the router
    settings  those of `audit`
    """
    audited = Audited(model)
    if any(site.family is not None and isinstance(site.gate, ReroutedGate) for site in audited.sites) or any(
        site.family is None and site.block.__dict__.get("former") is not None for site in audited.sites
    ):
        raise ValueError("this model was rerouted already, and could not be put back as it is; restore it first.")
    inputs = list(texts_or_inputs) if isinstance(texts_or_inputs, Iterator) else texts_or_inputs  # read twice
    before = audit(model, inputs, **settings) if before is None else before
    with resident(audited.scorers()):  # a new router may take the weights of the old one
        reroute(model, router, **(options or {}))
        try:
            after = audit(model, inputs, **settings)
        finally:
            restore(model)
    if before.data["checksum"] != after.data["checksum"]:
        raise ValueError("the two audits saw different data: the first one was interrupted, or is of other inputs.")
    return WhatIf(router, before, after)


def _pair(before: Any, after: Any) -> dict[str, Any]:
    return {"before": before, "after": after}
