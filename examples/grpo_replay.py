"""GRPO with TRL on a tiny MoE, with and without replay of the rollout's experts, on a CPU in a few minutes.

    python examples/grpo_replay.py                 # both, from the same start, and a table
    python examples/grpo_replay.py --replay        # one of them

The policy learns to reverse a row of digits: "3 1 4 =" must be continued with "4 1 3". The reward is the share of right
digits. Training runs in float32 with sdpa attention. The rollout runs in bfloat16 with eager attention, in batches of
another size and token by token, as an inference engine would. So near-ties go to other experts.

Needs: pip install '.[lab]' trl
"""

import argparse
import copy
import logging
import tempfile
import time
import warnings
from typing import Any

import datasets
import tokenizers
import torch
import transformers
import trl
from torch import Tensor

import holdfast

ALPHABET, LENGTH = "0123456789", 8  # the digits of a prompt, and how many it has at most
SPECIAL = ["<pad>", "<eos>", "="]


def make_tokenizer() -> Any:
    """Return a tokeniser of single digits, in memory."""
    vocabulary = {word: index for index, word in enumerate([*SPECIAL, *ALPHABET])}
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<pad>"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", eos_token="<eos>", padding_side="left"
    )


def make_prompts(count: int, seed: int) -> list[str]:
    """Return prompts of different lengths, so that there is padding."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(LENGTH // 2, LENGTH + 1, (count,), generator=generator).tolist()
    rows = [torch.randint(len(ALPHABET), (length,), generator=generator).tolist() for length in lengths]
    return [" ".join(ALPHABET[digit] for digit in row) + " =" for row in rows]


def answer_of(prompt: str) -> list[str]:
    return prompt.split()[-2::-1]


def reward(prompts: list[str], completions: list[str], **_: Any) -> list[float]:
    """Return the share of right digits of each completion."""
    found = []
    for prompt, completion in zip(prompts, completions, strict=True):
        right, given = answer_of(prompt), completion.split()
        hits = sum(one == other for one, other in zip(right, given, strict=False))
        found.append(hits / max(len(right), len(given)))
    return found


def make_model(tokenizer: Any, steps: int, seed: int) -> Any:
    """Return a tiny Qwen3-MoE that was taught the task for some steps: it is right sometimes, which GRPO needs."""
    torch.manual_seed(seed)
    config = transformers.Qwen3MoeConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=64,
        moe_intermediate_size=16,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=16,
        num_experts=32,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
        attn_implementation="sdpa",
    )
    model = transformers.Qwen3MoeForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(steps):
        texts = [f"{prompt} {' '.join(answer_of(prompt))} <eos>" for prompt in make_prompts(64, 10_000 + step)]
        batch = tokenizer(texts, return_tensors="pt", padding=True)
        starts = (batch.input_ids == tokenizer.convert_tokens_to_ids("=")).int().cumsum(-1)
        is_answer = (starts > 0) & (batch.input_ids != tokenizer.convert_tokens_to_ids("="))
        labels = batch.input_ids.masked_fill(~is_answer, -100)
        loss = model(input_ids=batch.input_ids, attention_mask=batch.attention_mask, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if (step + 1) % 100 == 0:
            print(f"taught for {step + 1} steps: loss {float(loss):.3f}", flush=True)
    return holdfast.reroute(model, "native")  # its own router: changes no number, adds the hooks that take routes


class Engine:
    """Stands for an inference engine: a bfloat16 copy of the policy, another attention, other batches."""

    def __init__(self, policy: Any, batch_size: int) -> None:
        self.model = copy.deepcopy(policy).to(torch.bfloat16).eval()
        self.model.set_attn_implementation("eager")
        self.batch_size = batch_size

    @torch.no_grad()
    def rollout(self, prompts: list[str], trainer: Any) -> dict[str, Any]:
        """Return what TRL's `rollout_func` must, and the routes: one record for each completion, as vLLM returns them."""
        self.model.load_state_dict(trainer.accelerator.unwrap_model(trainer.model).state_dict())  # rounds to bfloat16
        tokenizer = trainer.processing_class
        found: dict[str, Any] = {"prompt_ids": [], "completion_ids": [], "logprobs": [], "routed_experts": []}
        for first in range(0, len(prompts), self.batch_size):
            texts = prompts[first : first + self.batch_size]
            batch = tokenizer(texts, return_tensors="pt", padding=True, return_token_type_ids=False)
            with holdfast.record(self.model) as recorder:
                out = self.model.generate(
                    **batch,
                    max_new_tokens=trainer.max_completion_length,
                    do_sample=True,
                    temperature=1.0,
                    top_k=0,
                    return_dict_in_generate=True,
                    output_logits=True,
                )
            completions = out.sequences[:, batch.input_ids.shape[1] :]
            logprobs = torch.stack(out.logits, dim=1).float().log_softmax(-1)
            logprobs = logprobs.gather(-1, completions.unsqueeze(-1)).squeeze(-1)
            is_eos = (completions == tokenizer.eos_token_id).int()
            is_real = is_eos.cumsum(-1) - is_eos == 0  # up to the first <eos>, which belongs to the completion
            found["prompt_ids"] += tokenizer(texts)["input_ids"]
            found["completion_ids"] += [row[real].tolist() for row, real in zip(completions, is_real, strict=True)]
            found["logprobs"] += [row[real].tolist() for row, real in zip(logprobs, is_real, strict=True)]
            mask = torch.cat([batch.attention_mask, is_real], dim=1)
            found["routed_experts"] += recorder.routes(out, attention_mask=mask).to_sequences()
        return found


class Trainer(holdfast.RolloutReplay, trl.GRPOTrainer):
    """GRPO with replay, and a record of how far each training pass is from the rollout."""

    def __init__(self, *given: Any, **options: Any) -> None:
        super().__init__(*given, **options)
        self.log_ratios: list[Tensor] = []  # log p_training(token) - log p_rollout(token), for each token of completions
        self.differing: list[Tensor] = []  # for each token and MoE layer: does its set of experts differ from the rollout's?

    def _compute_loss(self, model: Any, inputs: Any) -> Any:
        with holdfast.trace(self.model) as traced:
            loss = super()._compute_loss(model, inputs)
        used = holdfast.Routes.from_trace(traced, self.model)
        recorded = holdfast.Routes.from_tensor(inputs["routed_experts"], self.model)
        self.differing.append(used.differs(recorded)[recorded.recorded])
        log_ratio = self._latest_logps - inputs["sampling_per_token_logps"]
        self.log_ratios.append(log_ratio[inputs["completion_mask"].bool()])
        return loss

    def _get_per_token_logps_and_entropies(self, *given: Any, **options: Any) -> Any:
        result = super()._get_per_token_logps_and_entropies(*given, **options)
        self._latest_logps = result[0].detach()
        return result


def train(model: Any, tokenizer: Any, replay: bool, options: argparse.Namespace) -> dict[str, float]:
    """Train a copy of the model with GRPO, and return the figures of the table."""
    policy, began = copy.deepcopy(model), time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            policy,
            reward_funcs=reward,
            args=trl.GRPOConfig(
                output_dir=folder,
                max_steps=options.steps,
                per_device_train_batch_size=16,
                gradient_accumulation_steps=4,  # one rollout of 64 completions for each step, in 4 shuffled micro-batches
                num_generations=8,
                max_completion_length=LENGTH + 2,
                learning_rate=options.learning_rate,
                lr_scheduler_type="constant",
                beta=0.0,
                bf16=False,
                gradient_checkpointing=False,
                use_cpu=True,
                save_strategy="no",
                report_to=[],
                logging_steps=1,
                disable_tqdm=True,
                seed=options.seed,
            ),
            train_dataset=datasets.Dataset.from_list([{"prompt": prompt} for prompt in make_prompts(1024, options.seed)]),
            processing_class=tokenizer,
            rollout_func=Engine(policy, batch_size=24).rollout,
            replay=replay,
        )
        trainer.remove_callback(transformers.PrinterCallback)
        trainer.train()
    rewards = [entry["reward"] for entry in trainer.state.log_history if "reward" in entry]
    few = max(1, len(rewards) // 5)
    log_ratio, differing = torch.cat(trainer.log_ratios), torch.cat(trainer.differing).float()
    return {
        "sets that differ": 100 * float(differing.mean()),
        "tokens that differ": 100 * float(differing.any(-1).float().mean()),
        "mean ratio": float(log_ratio.exp().mean()),
        "mean |log ratio|": float(log_ratio.abs().mean()),
        "99% below": float(log_ratio.abs().quantile(0.99)),
        "largest": float(log_ratio.abs().max()),
        "first rewards": sum(rewards[:few]) / few,
        "last rewards": sum(rewards[-few:]) / few,
        "seconds": time.monotonic() - began,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replay", action=argparse.BooleanOptionalAction, help="run only with, or only without, replay")
    parser.add_argument("--steps", type=int, default=40, help="GRPO steps (40)")
    parser.add_argument("--teach", type=int, default=100, help="supervised steps before (100)")
    parser.add_argument("--learning-rate", type=float, default=3e-4)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    warnings.filterwarnings("ignore", category=UserWarning)
    logging.getLogger("transformers").setLevel(logging.ERROR)
    tokenizer = make_tokenizer()
    model = make_model(tokenizer, options.teach, options.seed)
    figures = {}
    for replay in [False, True] if options.replay is None else [options.replay]:
        figures["replay" if replay else "live"] = train(model, tokenizer, replay, options)
    print(f"\n{'':>18} " + " ".join(f"{name:>10}" for name in figures))
    for row in next(iter(figures.values())):
        print(f"{row:>18} " + " ".join(f"{column[row]:>10.4f}" for column in figures.values()))


if __name__ == "__main__":
    main()
