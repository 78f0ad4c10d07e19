"""GRPO: group relative policy optimisation, reinforcement learning without a critic.

For each prompt q a group of G answers o_1..o_G is sampled and scored; an answer's advantage is how far its reward lies
from its group's mean, in units of the group's standard deviation. Source: Shao et al., "DeepSeekMath" (2024), section
4.1: the objective is equation 3 (clipped importance ratio, mean over the answers of the mean over each answer's tokens,
minus beta KL), the KL estimate equation 4 (k3), the advantages section 4.1.2 (outcome supervision).

1. Group statistics in float64: population standard deviation + 1e-8, exactly 0 where all rewards of a group are equal.
2. The mean over answers counts those with a trained token, over the whole minibatch, all micro-batches and ranks: the
   cut never changes the gradient. An unscored (None) answer, or with --mask-truncated a cut one, is not trained on.
3. Old log-probs are the trainer's own; in the first update after a rollout they are the current ones (ratio 1).
4. Log-ratios are clamped to +-20 before exp, and an update with a non-finite gradient is skipped on all ranks.
5. Sampling and scoring use one temperature; the reference is scored at it too. The reference is never updated.

role        weights  gradients  Adam moments   bytes per parameter (float32 master weights; bfloat16 compute adds 2)
policy      4        4          8              16
reference   2 or 4   -          -              2 (bfloat16) or 4; not loaded with --kl-coef 0
reward      2 or 4   -          -              one per --reward-model
sampler     0 or 2/4                           the policy itself, or an unsharded copy where the policy is sharded

    python grpo.py                                                              the toy task on a CPU, a minute
    python grpo.py --model DIR --dataset train.jsonl --eval-dataset test.jsonl  one GPU
    torchrun --nproc-per-node 8 grpo.py --model DIR --dataset ... --group-size 16
"""

import math
import time
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Literal

import torch

import common


@dataclass
class Args:
    # model and data
    model: str = "toy"
    """Policy to start from: a directory, a hub id, or `toy` (the checkpoint in toy/policy)."""
    dataset: str = "toy"
    """Training rows: `toy`, a .jsonl or .parquet file, a directory, or a hub id."""
    dataset_split: str = "train"
    """Split of --dataset."""
    eval_dataset: str = ""
    """Held-out rows, split `test`; empty: those of the toy task for `toy`, none otherwise."""
    prompt_column: str = "prompt"
    """Column of the prompt, text or a list of messages."""
    answer_column: str = "answer"
    """Column of the right answer, handed to reward functions as `answer`."""
    max_prompt_length: int = 512
    """Prompts of more tokens are dropped and counted."""
    # rollout
    prompts_per_step: int = 16
    """Prompts of a step, over all ranks."""
    group_size: int = 8
    """Sampled answers per prompt."""
    max_response_length: int = 32
    """Most tokens of a sampled response; a longer one is cut and scored as it is."""
    temperature: float = 1.0
    """Sampling temperature, used for every log-prob too."""
    sampler: Literal["hf"] = "hf"
    """What generates: hf, the Hugging Face model itself."""
    # reward
    reward: list[str] = field(default_factory=lambda: ["rewards.py:math_answer=1.0"])
    """Reward functions as file.py:function=weight, several after one flag."""
    reward_model: list[str] = field(default_factory=list)
    """Directories of reward models, each added with weight 1."""
    # optimisation
    steps: int = 80
    """Rollouts; each is followed by epochs-per-step x minibatches optimizer steps."""
    epochs_per_step: int = 1
    """Passes over each rollout."""
    minibatches: int = 1
    """Optimizer steps per pass; cuts the prompts of a step."""
    microbatch_tokens: int = 8192
    """Most padded tokens of one forward and backward pass on a rank."""
    learning_rate: float = 3e-4
    """Peak learning rate of AdamW."""
    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Shape of the learning rate after warm-up; linear and cosine fall to 0."""
    warmup_steps: int = 0
    """Steps of linear warm-up."""
    weight_decay: float = 0.0
    """Decoupled weight decay of AdamW."""
    max_grad_norm: float = 1.0
    """Gradients are scaled down to this global norm."""
    clip_low: float = 0.2
    """The importance ratio is clipped below 1 - clip_low."""
    clip_high: float = 0.2
    """The importance ratio is clipped above 1 + clip_high."""
    kl_coef: float = 0.04
    """Weight beta of the KL to the reference in the loss; 0: no reference is loaded."""
    advantage_scale: Literal["group", "batch", "none"] = "group"
    """Advantages are divided by the standard deviation of the group, of the batch, or by nothing."""
    mask_truncated: bool = False
    """Leave answers that were cut at --max-response-length out of the loss (they still count in their group)."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Compute type; master weights are float32. auto: bfloat16 on a GPU, float32 on a CPU."""
    gradient_checkpointing: bool = False
    """Recompute activations of the decoder layers in the backward pass: less memory, a third more time."""
    # evaluation
    eval_every: int = 0
    """Evaluate every so many steps besides before and after; 0: never."""
    eval_prompts: int = 600
    """Held-out rows to evaluate on, at most."""
    eval_samples: int = 4
    """Samples per held-out prompt for sampled accuracy and pass@k; 0: no sampling."""
    eval_reward: str = "rewards.py:math_answer"
    """Reward function (file.py:function) that says which answers are right: at least 1."""
    # run
    seed: int = 1
    """Seed of data order, sampling and fresh weights."""
    run_dir: str = ""
    """Directory of the run; empty: runs/<script>/<time>."""
    resume: bool = False
    """Go on with the last complete checkpoint of --run-dir."""
    save_every: int = 0
    """Checkpoint every so many steps; 0: never."""
    keep_checkpoints: int = 2
    """Checkpoints to keep."""
    wandb_project: str = ""
    """Log to this Weights & Biases project too; empty: nothing leaves the machine."""


def group_advantages(rewards: torch.Tensor, group_size: int, scale: str = "group") -> torch.Tensor:
    """Advantages (B,) of rewards (B,), prompt-major: the answers of one prompt are `group_size` adjacent entries.

    A_i = (r_i - mean) / (std + 1e-8), mean and population std over the scored (not NaN) answers of the group, in
    float64; `scale="batch"` divides by the std of all scored rewards instead, `"none"` by nothing. Exactly 0 where a
    group's rewards are equal and where an answer was not scored. ValueError for another scale or a ragged batch.
    Source: Shao et al. (2024), section 4.1.2; they leave the kind of std open.
    """
    if scale not in ("group", "batch", "none") or len(rewards) % group_size:
        raise ValueError(f'scale "{scale}" is not group, batch or none, or {len(rewards)} is not a multiple of groups')
    r = rewards.double().reshape(-1, group_size)  # (P, G)
    scored = ~r.isnan()
    mean = common.masked_mean(r, scored, dim=1)[:, None]
    centred = torch.where(scored, r - mean, 0.0)
    spread = r.nan_to_num(nan=-math.inf).amax(1) > r.nan_to_num(nan=math.inf).amin(1)  # (P,)
    if scale == "group":
        std = common.masked_mean(centred**2, scored, dim=1).sqrt()[:, None]
    elif scale == "batch":
        std = common.masked_mean((r - common.masked_mean(r, scored)) ** 2, scored).sqrt()
    else:
        std = torch.ones(())
    epsilon = 0.0 if scale == "none" else 1e-8
    return torch.where(spread[:, None], centred / (std + epsilon), 0.0).reshape(-1).float()


def policy_loss(
    logprobs: torch.Tensor,
    old_logprobs: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    ref_logprobs: torch.Tensor | None = None,
    kl_coef: float = 0.0,
    num_sequences: float | None = None,
) -> torch.Tensor:
    """The scalar loss of DeepSeekMath's equation 3: mean over sequences of the mean over their tokens.

    Log-probs and the bool `mask` are (B, T), `advantages` (B,). `num_sequences` is the number of sequences with a
    trained token in the whole minibatch, all micro-batches and ranks; without it, in this batch.
    """
    ratio = (logprobs - old_logprobs).clamp(-common.MAX_LOG_RATIO, common.MAX_LOG_RATIO).exp()  # (B, T)
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high)
    advantages = advantages[:, None]  # (B, 1)
    objective = torch.minimum(ratio * advantages, clipped * advantages)
    if kl_coef:
        objective = objective - kl_coef * common.kl_estimate(logprobs, ref_logprobs, "k3")  # equation 4
    loss = -common.masked_mean(objective, mask, dim=1)  # (B,)
    return loss.sum() / max(mask.any(dim=1).sum().item() if num_sequences is None else num_sequences, 1.0)


# [shared: learning_rate_at]
def learning_rate_at(step: int, args: "Args") -> float:
    """Learning rate of optimizer step `step` (0-based): linear warm-up, then --lr-schedule down to 0 at --steps."""
    if step < args.warmup_steps:
        return args.learning_rate * (step + 1) / (args.warmup_steps + 1)
    done = (step - args.warmup_steps) / max(args.steps - args.warmup_steps, 1)
    shape = {"constant": 1.0, "linear": 1 - done, "cosine": 0.5 * (1 + math.cos(math.pi * done))}
    return args.learning_rate * shape[args.lr_schedule]


# [/shared]


def main(args: Args) -> None:
    # 1 setup
    common.check_numbers(args)
    device = common.setup(args.seed)
    dtype = common.compute_dtype(args.dtype, device)
    parts = args.minibatches * common.world_size()
    common.check_divides("--prompts-per-step", args.prompts_per_step, parts, "--minibatches x the number of ranks")
    if args.group_size < 2:
        common.fail(
            "--group-size must be at least 2: the advantage of an answer is relative to the others of its group"
        )
    if not args.reward and not args.reward_model:
        common.fail("--reward and --reward-model are both empty: name at least one reward")

    # 2 data
    tokenizer = common.load_tokenizer(args.model)
    functions = common.load_rewards(args.reward)
    common.load_rewards([args.eval_reward])  # a mistake in it is found now

    def load(dataset: str, split: str) -> list[dict]:
        rows = common.load_rows(dataset, split, "prompts")
        answers = common.column(rows, args.answer_column, "--answer-column")
        rows = [{**row, "answer": answer} for row, answer in zip(rows, answers, strict=True)]
        return common.encode_prompts(tokenizer, rows, args.prompt_column, args.max_prompt_length)

    rows = load(args.dataset, args.dataset_split)
    eval_source = args.eval_dataset or ("toy" if args.dataset == "toy" else "")
    eval_rows = load(eval_source, "test")[: args.eval_prompts] if eval_source else []
    if len(rows) < args.prompts_per_step:
        common.fail(f"--dataset has {len(rows)} usable prompts, fewer than --prompts-per-step {args.prompts_per_step}")

    # 3 models
    policy = common.load_policy(args.model, device, dtype, True, args.gradient_checkpointing)
    common.check_logprobs(policy, rows[0]["prompt_ids"], dtype, device)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=args.learning_rate, weight_decay=args.weight_decay)
    common.say(f"policy     peak {common.peak_memory_gb(device):.2f} GB")
    reference = common.load_policy(args.model, device, dtype, trained=False) if args.kl_coef else None
    common.say(f"reference  peak {common.peak_memory_gb(device):.2f} GB" if reference else "reference  none")
    reward_models = {Path(p).name: common.load_reward_model(p, tokenizer, device, dtype) for p in args.reward_model}
    if len({*functions, *reward_models}) < len(args.reward) + len(args.reward_model):
        common.fail("--reward and --reward-model: two rewards have the same name")
    stops = common.stop_ids(tokenizer, policy)
    sampler = common.SAMPLERS[args.sampler](policy, stops, tokenizer.pad_token_id, args.seed, dtype)
    run = common.Run(args, "grpo")
    models = {"policy": (policy, optimizer)}

    def evaluate(step: int) -> dict[str, float]:
        limits = args.eval_samples, args.temperature, args.max_response_length
        metrics, samples = common.evaluate(sampler, tokenizer, eval_rows, args.eval_reward, *limits)
        run.log_samples(step, samples)
        return metrics

    state = run.restore(models) if run.checkpoint else {"before": evaluate(0)}
    sampler.load_weights(policy)

    # 4 loop
    for step in range(run.step + 1, args.steps + 1):
        began, metrics = time.time(), common.Metrics()
        start = (step - 1) * args.prompts_per_step
        batch = [rows[i] for i in common.data_order(len(rows), args.seed, start, args.prompts_per_step)]
        mine = common.own(range(args.prompts_per_step))  # this rank's prompts; a rank owns whole groups
        b_rows = [batch[i] for i in mine for _ in range(args.group_size)]

        # 4a rollout
        sampler.wake()
        response_ids, lengths, finished, response_logprobs = sampler.generate(
            [batch[i]["prompt_ids"] for i in mine], args.group_size, args.temperature, args.max_response_length,
            stream=f"train/{step}", indices=mine,
        )  # fmt: skip
        sampler.sleep()
        responses = [ids[:n] for ids, n in zip(response_ids.tolist(), lengths.tolist(), strict=True)]
        b_input_ids, b_attention_mask, b_response_mask = common.collate(
            [row["prompt_ids"] for row in b_rows], responses, tokenizer.pad_token_id, device
        )  # (B, T) each
        b_sampler_logprobs = common.align(response_logprobs, lengths, b_response_mask)  # (B, T)
        rollout_seconds = time.time() - began

        # 4b rewards
        texts = [common.decode(tokenizer, ids, stops) for ids in responses]
        scores = {name: common.call_reward(name, f, b_rows, texts) for name, (f, _) in functions.items()}
        for name, model in reward_models.items():
            scores[name] = common.batched_scores(model, b_input_ids, b_attention_mask, args.microbatch_tokens)
        weights = [w for _, w in functions.values()] + [1.0] * len(reward_models)
        scores = {name: common.gather_rows(s, args.group_size) for name, s in scores.items()}  # (P * G,), all ranks'
        rewards = common.weighted_reward(torch.stack(list(scores.values())), weights)  # (P * G,)

        # 4c reference and old log-probs
        several = args.epochs_per_step * args.minibatches > 1  # with one update the old policy is the current one
        score = partial(
            common.batched_logprobs, input_ids=b_input_ids, attention_mask=b_attention_mask,
            response_mask=b_response_mask, temperature=args.temperature, max_tokens=args.microbatch_tokens,
        )  # fmt: skip
        b_old_logprobs = score(policy) if several else None  # (B, T)
        b_ref_logprobs = score(reference) if reference else None  # (B, T)

        # 4d advantages
        advantages = group_advantages(rewards, args.group_size, args.advantage_scale)  # (P * G,)
        groups = torch.stack([advantages, rewards.isfinite().float()]).reshape(2, -1, args.group_size)  # (2, P, G)
        b_advantages, b_scored = groups[:, mine].reshape(2, -1).to(device)  # (B,) each: this rank's groups
        b_trained = b_scored.bool() & (finished.to(device) | (not args.mask_truncated))  # (B,)
        b_mask = b_response_mask & b_trained[:, None]  # (B, T)
        assert b_mask.shape == b_input_ids.shape == b_sampler_logprobs.shape and b_advantages.shape == lengths.shape

        # 4e update
        size = len(b_input_ids) // args.minibatches  # this rank's rows of a minibatch
        for update in range(args.epochs_per_step * args.minibatches):
            first_row = update % args.minibatches * size
            minibatch = slice(first_row, first_row + size)
            (num_sequences,) = common.all_sum(b_mask[minibatch].any(1).sum())
            for micro in common.microbatches(b_attention_mask[minibatch].sum(1).tolist(), args.microbatch_tokens):
                mb = torch.tensor(micro, device=device) + first_row
                width = int(b_attention_mask[mb].sum(1).max())  # T of this micro-batch
                mb_mask = b_mask[mb, :width]
                mb_inputs = b_input_ids[mb, :width], b_attention_mask[mb, :width], mb_mask
                logprobs, entropy = common.token_logprobs(policy, *mb_inputs, args.temperature, with_entropy=True)
                old_logprobs = b_old_logprobs[mb, :width] if update else logprobs.detach()
                ref_logprobs = b_ref_logprobs[mb, :width] if reference else None
                clip = args.clip_low, args.clip_high
                loss = policy_loss(
                    logprobs, old_logprobs, b_advantages[mb], mb_mask, *clip, ref_logprobs, args.kl_coef, num_sequences
                )
                loss.backward()

                sequences = mb_mask.any(1).sum()
                metrics.add("loss", loss, sequences / max(num_sequences, 1.0))  # the counts of an update add up to 1
                metrics.add_masked("entropy", entropy, mb_mask)
                log_ratio = (logprobs - old_logprobs).detach().clamp(max=common.MAX_LOG_RATIO)
                ratio, sign = log_ratio.exp(), b_advantages[mb, None]
                metrics.add_masked("approx_kl", ratio - 1 - log_ratio, mb_mask)
                too_low, too_high = (ratio < 1 - clip[0]) & (sign < 0), (ratio > 1 + clip[1]) & (sign > 0)
                metrics.add_masked("clip_ratio/low_mean", too_low, mb_mask)
                metrics.add_masked("clip_ratio/high_mean", too_high, mb_mask)
                metrics.add_masked("clip_ratio/region_mean", too_low | too_high, mb_mask)
                if reference:
                    kl = common.masked_sum(common.kl_estimate(logprobs, ref_logprobs, "k1"), mb_mask)
                    metrics.add("kl", kl, sequences)
                if update == 0:
                    gap = (logprobs - b_sampler_logprobs[mb, :width]).abs()
                    metrics.add_masked("sampler/logprob_gap", gap, mb_mask)
            grad_norm = common.clip_gradients(policy, args.max_grad_norm)
            for group in optimizer.param_groups:
                group["lr"] = learning_rate_at(step - 1, args)
            if math.isfinite(grad_norm):
                optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            metrics.add("grad_norm", grad_norm, 1)
            metrics.add("skipped_updates", float(not math.isfinite(grad_norm)), 1)
        sampler.load_weights(policy)

        # 4f log
        by_group = rewards.reshape(-1, args.group_size)  # (P, G)
        spread = by_group.nan_to_num(nan=-math.inf).amax(1) > by_group.nan_to_num(nan=math.inf).amin(1)
        scored = rewards[rewards.isfinite()]
        metrics.add("completions/mean_length", lengths.sum(), len(lengths))
        metrics.add("completions/clipped_ratio", (~finished).sum(), len(finished))
        numbers = {
            "loss": 0.0,
            "reward": scored.mean().item() if len(scored) else 0.0,
            "reward_std": scored.std(correction=0).item() if len(scored) else 0.0,
            "frac_reward_zero_std": 1 - spread.double().mean().item(),
            **{f"rewards/{name}/mean": s.nanmean().item() for name, s in scores.items()},
            **metrics.reduce(),
            "learning_rate": learning_rate_at(step - 1, args),
            "seconds/rollout": rollout_seconds,
            "seconds/step": time.time() - began,
        }
        if numbers.get("sampler/logprob_gap", 0.0) > common.MAX_SAMPLER_GAP:
            raise RuntimeError(
                f"sampler and trainer disagree on the log-probs of the samples by {numbers['sampler/logprob_gap']:.2f} "
                "nats a token on average: a weight did not reach the sampler, or it samples at another temperature"
            )
        due = args.eval_every and step % args.eval_every == 0 and step < args.steps
        run.log(step, {**numbers, **(evaluate(step) if due else {})}, ("reward", "kl", "completions/mean_length"))
        shown = zip(b_rows, texts, by_group[mine].flatten().tolist(), strict=True)
        samples = [{"split": "train", "prompt": row["prompt"], "completion": t, "reward": r} for row, t, r in shown]
        run.log_samples(step, samples[:4])

        # 4g evaluate and save
        if args.save_every and step % args.save_every == 0:
            run.save(step, models, state)
    run.finish(policy, tokenizer, state["before"], evaluate(args.steps), dtype)


if __name__ == "__main__":
    main(common.parse_args(Args))
