"""Naive references of SoftMoE and SMEAR: loops over sequences, tokens, experts and slots, in float64."""

import torch
from references import inform, inverse, softmax
from torch import Tensor

from holdfast.kernels.select import top_reference as top
from holdfast.layers import Experts
from holdfast.routing import Clustered, Context, Router, Routing
from holdfast.routing.soft import Merged, SequenceScore, SlotScore


def real_tokens(tokens: Tensor, context: Context) -> Tensor:
    return torch.ones(tokens.shape[:2]).bool() if context.token_mask is None else context.token_mask


def slot_logits(score: SlotScore, x: Tensor) -> Tensor:
    """scale * x/|x| . phi_s/|phi_s| for each slot s."""
    unit = x.double() / x.double().norm().clamp_min(1e-6)
    return torch.stack([score.scale.double()[0] * (unit @ (row.double() / row.double().norm())) for row in score.phi])


def all_slot_logits(router: Router, tokens: Tensor, context: Context) -> list[Tensor]:
    """L of every token, whose features AC scales by the mean m of its best clusters of the previous layer."""
    score = router.score
    if isinstance(score, SlotScore):
        return [slot_logits(score, x) for x in tokens.flatten(0, 1)]
    assert isinstance(score, Clustered) and isinstance(score.base, SlotScore) and context.previous is not None
    spreads, rows = score.spreads.double(), []
    for gates, x in zip(context.previous.routing.gates.double(), tokens.flatten(0, 1), strict=True):
        best = top(gates, score.mix).tolist()
        m = sum(gates[c] / sum(gates[c] for c in best) * inverse(spreads[c]) for c in best)
        rows.append(slot_logits(score.base, x.double() * m))
    return rows


def soft(router: Router, tokens: Tensor, context: Context) -> Routing:
    sequences, length = tokens.shape[:2]
    experts, slots = router.experts, router.score.slots
    assert slots is not None
    real = real_tokens(tokens, context)
    logits = torch.stack(all_slot_logits(router, tokens, context)).view(sequences, length, experts * slots)
    combine = torch.stack([torch.stack(softmax(list(row))) for row in logits.flatten(0, 1)])
    combine = combine.view(sequences, length, experts, slots)
    gates = torch.stack([combine[..., e, :].sum(-1) for e in range(experts)], dim=-1)
    shares = combine / combine.sum(-1, keepdim=True)
    columns = []
    for b in range(sequences):
        members = [t for t in range(length) if real[b, t]]
        if not members:
            columns.append(torch.zeros(length, experts * slots).double())
            shares = torch.stack([shares[i] * (i != b) for i in range(sequences)])
            continue
        of_slot = [softmax([logits[b, t, s] for t in members]) for s in range(experts * slots)]
        zero = torch.zeros(()).double()
        row = [
            [of_slot[s][members.index(t)] if t in members else zero for s in range(experts * slots)] for t in range(length)
        ]
        columns.append(torch.stack([torch.stack(values) for values in row]))
    dispatch = torch.stack(columns).view(sequences, length, experts, slots)
    summed = logits.view(sequences, length, experts, slots).exp().sum(-1).log().float()
    gates = inform(router, gates.float(), summed, tokens, context)
    return _routing(summed, gates, dispatch.float(), shares.float())


def merged(router: Router, tokens: Tensor, context: Context) -> Routing:
    score, select = router.score, router.select
    assert isinstance(score, SequenceScore) and isinstance(select, Merged)
    real = real_tokens(tokens, context)

    def logits_of(x: Tensor) -> Tensor:
        centred = x - x.mean()
        unit = centred / (centred.square().mean() + score.norm.eps).sqrt()
        return score.weight.double() @ (unit * score.norm.weight.double() + score.norm.bias.double())

    logits, gates = [], []
    for sequence, mask in zip(tokens.double(), real, strict=True):
        members = [x for x, is_real in zip(sequence, mask, strict=True) if is_real]
        uniform = torch.zeros(router.experts).double()
        if select.average == "tokens":
            mean = logits_of(sum(members) / len(members)) if members else uniform
            rows = [mean for _ in sequence]
            p = torch.stack(softmax(list(mean)))
        else:
            rows = [logits_of(x) for x in sequence]
            each = [torch.stack(softmax(list(logits_of(x)))) for x in members] or [torch.stack(softmax(list(uniform)))]
            p = torch.stack(each).mean(0)
        logits.append(torch.stack(rows))
        gates.append(torch.stack([p for _ in sequence]))
    stacked = torch.stack(logits).float()
    return _routing(stacked, inform(router, torch.stack(gates).float(), stacked, tokens, context))


def _routing(logits: Tensor, gates: Tensor, dispatch: Tensor | None = None, shares: Tensor | None = None) -> Routing:
    gates = gates.flatten(0, 1)
    order = torch.stack([top(row, row.shape[0]) for row in gates])
    flat = [None if value is None else value.flatten(0, 1) for value in (dispatch, shares)]
    return Routing(logits.flatten(0, 1), gates, order, gates.gather(1, order), dispatch=flat[0], shares=flat[1])


def reference(router: Router, tokens: Tensor, context: Context) -> Routing:
    return soft(router, tokens, context) if router.select.layer_kind == "soft" else merged(router, tokens, context)


def expert(experts: Experts, weights: dict[str, Tensor], x: Tensor) -> Tensor:
    """One feed-forward network, with the weights of one expert or of a mixture of them."""
    up_name = "gate_up_proj" if experts.gated else "up_proj"
    hidden = weights[up_name] @ x
    hidden = hidden + weights[f"{up_name}_bias"] if experts.has_bias else hidden
    half = experts.hidden
    hidden = experts.activation(hidden[:half]) * hidden[half:] if experts.gated else experts.activation(hidden)
    out = weights["down_proj"] @ hidden
    return out + weights["down_proj_bias"] if experts.has_bias else out


def layer(router: Router, experts: Experts, tokens: Tensor, context: Context) -> Tensor:
    """The output (B,N,d) of a SoftMoE or SMEAR layer, in float64."""
    routing = reference(router, tokens, context)
    weights = {name: parameter.double() for name, parameter in experts.named_parameters()}
    sequences, length = tokens.shape[:2]
    gates = routing.gates.view(sequences, length, -1).double()
    outputs = []
    for b in range(sequences):
        if routing.dispatch is None:
            theta = {
                name: torch.stack([gates[b, 0, e] * w[e] for e in range(router.experts)]).sum(0)
                for name, w in weights.items()
            }
            outputs += [expert(experts, theta, x) for x in tokens[b].double()]
            continue
        assert routing.shares is not None
        dispatch, shares = (
            value.unflatten(0, (sequences, length))[b].double() for value in (routing.dispatch, routing.shares)
        )
        slots = [(e, s) for e in range(router.experts) for s in range(shares.shape[-1])]
        rows = {}
        for e, s in slots:
            mixed = sum(dispatch[t, e, s] * tokens[b, t].double() for t in range(length))
            rows[e, s] = expert(experts, {name: w[e] for name, w in weights.items()}, mixed)
        outputs += [sum(gates[b, t, e] * shares[t, e, s] * rows[e, s] for e, s in slots) for t in range(length)]
    return torch.stack(outputs).view(tokens.shape)
