"""`RolloutReplay`: replay the routes of rollouts in TRL's GRPO trainer. This module does not import TRL.

TRL generates completions for several steps at once, pads them, shuffles them, and splits them into micro-batches. The routes
are one more tensor of that batch, `routed_experts (B,N,L,K)`, so all of this happens to them too.

B completions, N tokens of the longest prompt and of the longest completion together, L MoE layers, K slots
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from holdfast.hub.forwards import ROUTED_EXPERTS
from holdfast.replaying.forwards import record, require_hooks
from holdfast.replaying.routes import RoutedModel, Routes
from holdfast.routing.replaying import NO_RECORD


class RolloutReplay:
    """Mix into `trl.GRPOTrainer` (or `RLOOTrainer`): the policy uses the experts of the rollout in training.

        class Trainer(holdfast.RolloutReplay, trl.GRPOTrainer):
            pass

    The routes come from `rollout_func`, which then returns "routed_experts" too: a record for each completion, prompt
    included, in any form that `Routes.from_sequences` takes. Without a `rollout_func`, they are recorded in TRL's own
    `generate`.

    Replayed: the training pass, and the pass for old log-probabilities. Live: the reference model, whose own choice of
    experts is part of what the policy is compared with.

    replay   False: the batch still has `routed_experts`, but no pass uses them, so that you can measure the difference
    """

    def __init__(self, *given: Any, replay: bool = True, **options: Any) -> None:
        super().__init__(*given, **options)
        self.replay = replay
        trainer: Any = self
        require_hooks(trainer.model)
        _require_recordable(trainer)
        self._routed_model = RoutedModel.from_model(trainer.model)
        self._routes: Tensor | None = None  # of the batch whose log-probabilities are computed
        if getattr(trainer, "rollout_func", None) is not None:
            trainer.rollout_func = self._with_routes(trainer.rollout_func)

    def _with_routes(self, rollout: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
        """Return the function `rollout` without the routes in its output, which are kept for the batch."""

        def rollout_func(prompts: Any, trainer: Any) -> dict[str, Any]:
            output = dict(rollout(prompts, trainer))
            records = output.pop(ROUTED_EXPERTS, None)
            if records is None:
                raise ValueError(
                    f'rollout_func returned no "{ROUTED_EXPERTS}"; expected a record for each completion, prompt included.'
                )
            if not {"prompt_ids", "completion_ids"} <= output.keys():
                return output  # TRL says what is missing
            _, mask = self._padded(output["prompt_ids"], output["completion_ids"])
            self._routes = Routes.from_sequences(records, self._routed_model, attention_mask=mask).experts
            return output

        return rollout_func

    def _generate_single_turn(self, prompt_ids: Any, *given: Any, **options: Any) -> Any:
        trainer: Any = self
        with record(trainer.model) as recorder:
            result = super()._generate_single_turn(prompt_ids, *given, **options)  # type: ignore[misc]
        completions = result[0] if isinstance(result, tuple) else result
        sequences, mask = self._padded(prompt_ids, completions)
        generated = int(mask.any(0).nonzero().max()) + 1  # what follows is padding to a multiple
        routes = recorder.routes(sequences[:, :generated], attention_mask=mask[:, :generated]).experts
        missing = sequences.shape[1] - generated
        self._routes = torch.nn.functional.pad(routes, (0, 0, 0, 0, 0, missing), value=NO_RECORD)
        return result

    def _padded(self, prompts: Sequence[Any], completions: Sequence[Any]) -> tuple[Tensor, Tensor]:
        """Return token ids and mask (B,N) as TRL pads them: prompts on their left, completions on their right."""
        trainer: Any = self
        multiple = getattr(trainer, "pad_to_multiple_of", None) or 1
        left, right = (-(-max(map(len, lists)) // multiple) * multiple for lists in (prompts, completions))
        ids = torch.full((len(prompts), left + right), trainer._tokenizer.pad_token_id)
        mask = torch.zeros_like(ids)
        for row, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
            places = slice(left - len(prompt), left + len(completion))
            ids[row, places], mask[row, places] = torch.tensor([*prompt, *completion]), 1
        return ids, mask

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        self._routes = None
        try:
            batch = super()._generate_and_score_completions(inputs)  # type: ignore[misc]
            shape = (len(batch["prompt_ids"]), batch["prompt_ids"].shape[1] + batch["completion_ids"].shape[1])
            batch[ROUTED_EXPERTS] = self._routes_of(shape, batch["prompt_ids"].device)
        finally:
            self._routes = None
        return batch

    def _compute_loss(self, model: Any, inputs: Any) -> Any:
        if inputs.get(ROUTED_EXPERTS) is None:
            raise ValueError(f'the batch has lost its "{ROUTED_EXPERTS}"; a subclass must keep all that is in the batch.')
        self._routes = inputs[ROUTED_EXPERTS]
        try:
            return super()._compute_loss(model, inputs)  # type: ignore[misc]
        finally:
            self._routes = None

    def _get_per_token_logps_and_entropies(self, model: Any, input_ids: Tensor, *given: Any, **options: Any) -> Any:
        if self.replay and not self._is_reference(model):
            routes, policy = self._routes_of(tuple(input_ids.shape), input_ids.device), model
            # The arguments after `input_ids` are attention_mask, logits_to_keep and batch_size.
            batch_size = given[2] if len(given) > 2 else options.get("batch_size")
            parts = iter(routes.split(batch_size or len(routes)))

            def model(**inputs: Any) -> Any:  # TRL calls it with the rows of the batch in their order
                return policy(**inputs, **{ROUTED_EXPERTS: next(parts)})

        return super()._get_per_token_logps_and_entropies(model, input_ids, *given, **options)  # type: ignore[misc]

    def _routes_of(self, shape: tuple[int, ...], device: torch.device) -> Tensor:
        """Return the routes of the current batch, of this shape (B,N)."""
        if self._routes is None:
            raise ValueError("there are no routes of this batch: no completion was generated while they were recorded.")
        if tuple(self._routes.shape[:2]) != shape:
            raise ValueError(
                f"the batch has the shape {shape}, but the rollout {tuple(self._routes.shape[:2])}: completions were padded "
                "or cut in a way that RolloutReplay does not know."
            )
        return self._routes.to(device)

    def _is_reference(self, model: Any) -> bool:
        """Whether this is the reference model: a model of its own, or the policy with other adapters or none."""
        trainer: Any = self
        if model is getattr(trainer, "ref_model", None):
            return True
        adapted = trainer.accelerator.unwrap_model(model)
        if not hasattr(adapted, "peft_config"):
            return False
        status = adapted.get_model_status()
        return status.enabled is False or status.active_adapters == ["ref"]


def _require_recordable(trainer: Any) -> None:
    """Raise ValueError if TRL generates in a way that leaves no record of the routes."""
    if getattr(trainer, "tools", None):
        raise ValueError(
            "the turns of tools and environments are not recorded: run all turns in a rollout_func, without tools."
        )
    for unrecorded, reason in (
        (trainer.use_vllm, "TRL does not ask vLLM for routes"),
        (getattr(trainer, "use_transformers_continuous_batching", False), "continuous batching cannot be recorded"),
    ):
        if unrecorded and getattr(trainer, "rollout_func", None) is None:
            raise ValueError(f'{reason}: give a rollout_func that returns "{ROUTED_EXPERTS}" for each completion.')
