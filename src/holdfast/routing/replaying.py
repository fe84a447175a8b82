"""Replay: route tokens to the experts that another run has recorded, with weights from the live scores.

A record has K integers for each token: experts, E in an unused slot, or -1 in every slot of a token without a record, which
is routed live. Only the set of experts is replayed. Scores are live, so gradients reach the router, and what a part learns
without gradients it learns from live scores.

    replay_record       both of the following
    checked_slots       the record of one layer in the form of `Routing.experts`, after checks
    replay_selection    what a router's selector would have returned if it had selected these experts

B sequences of N tokens, E experts, K slots in a record, S slots in the live selection
"""

import torch
from torch import Tensor

from holdfast.kernels.torch_internals import assert_on_device
from holdfast.routing.parts import Selector
from holdfast.routing.rules import Scores, Selection

NO_RECORD = -1


def checked_slots(replayed: Tensor, shape: torch.Size, experts: int, k: int | None, layer: str) -> Tensor:
    """Return the record `replayed (...,K)` as (B,N,K) int64 for tokens of `shape` (B,N), unused slots last.

    k   how many experts every token has; None: the number may differ. With k, the result has k slots

    Raise ValueError if the record does not fit. Reading its values synchronises with a GPU. A compiled or captured forward
    cannot read them and asserts on the device instead.
    """
    if replayed.is_floating_point() or replayed.dtype == torch.bool:
        raise ValueError(f"{layer}: recorded routes are {replayed.dtype}; expected integers.")
    if replayed.dim() < 2 or replayed.shape[:-1].numel() != shape.numel():
        raise ValueError(
            f"{layer}: the recorded routes have shape {tuple(replayed.shape)}, but the layer has {shape.numel()} tokens, "
            f"{tuple(shape)}; routes must be cut, padded and sharded as the tokens are."
        )
    if k is not None and replayed.shape[-1] < k:
        raise ValueError(f"{layer}: the record has {replayed.shape[-1]} slots, but the router selects k = {k} experts.")
    slots = replayed.reshape(*shape, replayed.shape[-1]).long()
    require_values(slots, experts, k, layer)
    order = (slots == experts).to(torch.uint8).argsort(dim=-1, stable=True)
    slots = slots.gather(-1, order)
    return slots if k is None else slots[..., :k]


def require_values(slots: Tensor, experts: int, k: int | None, layer: str) -> None:
    """Raise ValueError if `slots (B,N,K)` are not a record of a layer with this many experts."""
    recorded, none = (slots >= 0).all(-1), (slots == NO_RECORD).all(-1)
    used = (slots >= 0) & (slots < experts)
    ordered = slots.sort(dim=-1).values
    repeated = ((ordered[..., 1:] == ordered[..., :-1]) & (ordered[..., 1:] < experts)).any(-1) & recorded
    in_range = (slots >= NO_RECORD).all() & (slots <= experts).all()
    whole = (recorded | none).all()
    of_size = torch.ones_like(whole) if k is None else ((used.sum(-1) == k) | none).all()
    is_capturing = slots.is_cuda and torch.cuda.is_current_stream_capturing()
    if torch.compiler.is_compiling() or is_capturing:
        assert_on_device(in_range & whole & of_size & ~repeated.any(), f"{layer}: recorded routes do not fit")
        return
    if bool(in_range & whole & of_size & ~repeated.any()):
        return
    if not bool(in_range):
        wrong = int(slots.max()) if int(slots.max()) > experts else int(slots.min())
        raise ValueError(
            f"{layer}: the record names expert {wrong}, but the layer has experts 0 to {experts - 1} ({experts} marks an "
            "unused slot, -1 in every slot a token without a record). Is it of another model, or are these physical ids?"
        )
    if not bool(whole):
        raise ValueError(
            f"{layer}: a token has -1 in some slots and experts in others; -1 must be in every slot of a token without a "
            f"record, and {experts} marks an unused slot."
        )
    if bool(repeated.any()):
        raise ValueError(f"{layer}: a token has the same expert in two slots; a record has each expert once.")
    count = int(used.sum(-1)[~none & (used.sum(-1) != k)][0])
    raise ValueError(f"{layer}: a token has {count} recorded experts, but the router selects k = {k} for every token.")


def replay_record(select: Selector, live: Selection, scores: Scores, record: Tensor, layer: str) -> Selection:
    """Return `live` with the experts of a `record (B,N,K)`; raise ValueError if this selector cannot replay it."""
    if select.layer_kind != "moe":
        raise ValueError(f"{layer}: every token of a SoftMoE or SMEAR layer uses all experts; it cannot replay routes.")
    k = None if select.ragged else live.experts.shape[-1]
    shape, experts = live.gates.shape[:2], live.gates.shape[2]
    return replay_selection(select, live, scores, checked_slots(record.to(live.gates.device), shape, experts, k, layer))


def replay_selection(select: Selector, live: Selection, scores: Scores, slots: Tensor) -> Selection:
    """Return `live` with the experts of `slots (B,N,K)` (see `checked_slots`), and their weights under the live scores.

    A token without a record keeps its live experts. Slots of the others keep their recorded order: the next layer's `ac`
    reads slot 0. A token whose recorded set is its live set gets exactly its live weights.
    """
    experts, width = live.gates.shape[-1], max(slots.shape[-1], live.experts.shape[-1])
    recorded = (slots >= 0).all(-1, keepdim=True)
    slots, live_slots = _widened(slots, width, experts), _widened(live.experts, width, experts)
    held = slots.where(recorded, live_slots)
    # A rule cannot weigh an empty set: it weighs the live one, and the weights of unused slots are 0 below.
    in_use = held < experts
    weighed = held.where(in_use.any(-1, keepdim=True), live_slots)
    weights = select.replayed_weights(weighed, scores, live).where(in_use, 0.0)
    changed = live._replace(experts=held, weights=weights)
    if live.requested is not None:
        changed = changed._replace(requested=held.where(recorded, _widened(live.requested, width, experts)))
    if live.dropped is not None:
        changed = changed._replace(dropped=live.dropped.where(~recorded.squeeze(-1), 0))
    if live.rows is not None:
        changed = changed._replace(rows=live.rows.where(~recorded.squeeze(-1), in_use.sum(-1).to(live.rows.dtype)))
    return changed


def _widened(slots: Tensor, width: int, experts: int) -> Tensor:
    """Return `slots (B,N,K)` with unused slots added, up to `width` of them."""
    missing = width - slots.shape[-1]
    return slots if missing == 0 else torch.nn.functional.pad(slots, (0, missing), value=experts)
