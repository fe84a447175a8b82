"""Search for the tokens that raise a value most: greedy coordinate gradient (Zou et al. 2023, arXiv:2307.15043).

In each step, the slopes of the value with respect to one-hot tokens say which tokens are promising at each place. Some of
these single replacements are drawn and tried, and the best one is kept if it raises the value.

A = allowed tokens, n = tokens of the sequence, C = candidates
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, final

import torch
from torch import Tensor

from holdfast.attacks.flags import AttackResult, Flag
from holdfast.attacks.threat import check_count, check_seed, derived_seed

WIDTH, TRIES, STEPS = 32, 32, 20  # promising tokens at a place, candidates of a step, steps from each start


@final
@dataclass(frozen=True)
class FoundTokens(AttackResult):
    """The best sequence of a search."""

    stored: ClassVar[tuple[str, ...]] = ("tokens", "value", "tried", "seed", "flags")
    tokens: tuple[int, ...]
    value: float
    tried: int  # sequences
    seed: int
    flags: tuple[Flag, ...]


def search_tokens(
    value: Callable[[Tensor], Tensor],
    slopes: Callable[[Tensor], Tensor],
    allowed: Tensor,
    starts: Tensor,
    *,
    most: float = float("inf"),
    steps: int = STEPS,
    width: int = WIDTH,
    tries: int = TRIES,
    seed: int = 0,
) -> FoundTokens:
    """Return the sequence with the highest value that the search from each of `starts` (S,n) finds.

    value       from sequences (C,n) to their values (C,)
    slopes      from one sequence (n,) to (n,A): how the value changes with the share of each allowed token at each place
    allowed     (A,) token ids
    most        the highest possible value, with which the search ends

    A flag says that the search was still improving at its last step, or that no slope was known.
    """
    for name, count in (("steps", steps), ("width", width), ("tries", tries)):
        check_count(count, name)
    check_seed(seed)
    width = min(width, len(allowed))
    values = value(starts)
    tried, best, highest = len(starts), starts[int(values.argmax())], float(values.max())
    still_improving, has_slopes = False, False
    for number, start in enumerate(starts):
        random = torch.Generator().manual_seed(derived_seed(seed, "tokens", number))
        current, reached, improved = start, float(values[number]), False
        for _ in range(steps):
            if reached >= most:
                improved = False
                break
            slope = slopes(current)
            has_slopes |= bool((slope != 0).any())
            promising = allowed[slope.topk(width, dim=1).indices.to(allowed.device)]  # (n,width)
            drawn = torch.randperm(promising.numel(), generator=random)[:tries].to(allowed.device)
            candidates = current.repeat(len(drawn), 1)
            candidates.scatter_(1, (drawn // width).unsqueeze(1), promising.flatten()[drawn].unsqueeze(1))
            found = value(candidates)
            tried += len(drawn)
            improved = float(found.max()) > reached
            if improved:
                current, reached = candidates[int(found.argmax())], float(found.max())
            elif len(drawn) == promising.numel():  # the next step would try the same
                break
        if reached > highest:
            best, highest, still_improving = current, reached, improved
    flags = []
    if still_improving:
        flags.append(
            Flag("still improving", "the search found better tokens in its last step; more steps may find better ones.")
        )
    if not has_slopes and highest < most:
        flags.append(Flag("zero gradients", "no slope reaches the tokens, so they were drawn at random."))
    return FoundTokens(tuple(best.tolist()), highest, tried, seed, tuple(flags))


def random_tokens(allowed: Tensor, count: int, tokens: int, seed: int) -> Tensor:
    """Return (count,tokens): random sequences of allowed tokens."""
    random = torch.Generator().manual_seed(derived_seed(seed, "random tokens", tokens))
    return allowed[torch.randint(len(allowed), (count, tokens), generator=random).to(allowed.device)]
