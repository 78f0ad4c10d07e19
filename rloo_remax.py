"""RLOO, ReMax, REINFORCE++: policy gradients for LLMs with a baseline that is not a critic.

All maximise E[R(x, y)] with the score function, grad = E[(R - b) grad log pi(y | x)]; they differ in b (--baseline):

rloo         mean of the other answers to the prompt (Ahmadian et al., "Back to Basics", 2024, section 3.3)
remax        reward of the greedy answer (Li et al., "ReMax", 2024, algorithm 1), which is never trained on
mean, none   mean of all answers to the prompt (biased by (k - 1)/k), or nothing
reinforce++  A_t = R - beta sum_{i >= t} k1_i, whitened over the batch, PPO's clip per token (Hu, "REINFORCE++", 2025)

1. The answer is one action: its log-prob is summed, and the loss is the mean over answers (rloo, remax, mean, none).
   reinforce++ is per token: the mean over the minibatch's trained tokens.
2. The KL to the reference is in the reward, R = score - beta sum_t k1_t, not in the loss; ReMax's greedy baseline is
   the plain score. In reinforce++ each token carries the KL that is still to come.
3. One update per rollout: with the sampling policy's own log-probs no importance ratio is needed. reinforce++ may make
   several (--epochs-per-step, --minibatches); its ratio is 1 in the first.
4. An unscored (None) answer leaves the baseline and the loss. An empty answer counts in the baseline alone.
5. The mean is over the whole minibatch, all micro-batches and ranks: the cut never changes the gradient.

role        weights  gradients  Adam moments   bytes per parameter (float32 master weights; bfloat16 compute adds 2)
policy      4        4          8              16
reference   2 or 4   -          -              not loaded with --kl-coef 0 and no --kl-budget
reward      2 or 4   -          -              one per --reward-model
sampler     0 or 2/4                           the policy itself, or an unsharded copy where the policy is sharded

    python rloo_remax.py                                 the toy task on a CPU, a minute; --baseline remax for another
    python rloo_remax.py --model DIR --dataset train.jsonl --eval-dataset test.jsonl     one GPU
    torchrun --nproc-per-node 8 rloo_remax.py --model DIR --dataset ... --group-size 4
"""

import math
import time
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

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
    """Directories of reward models; together they are one reward of weight 1."""
    reward_aggregate: Literal["mean", "min", "mean-std"] = "mean"
    """How the scores of several reward models become one: mean-std is mean - reward_std_coef * std."""
    reward_std_coef: float = 1.0
    """Weight of the standard deviation in --reward-aggregate mean-std."""
    reward_cap: float | None = None
    """The reward models' score is cut at this value, so that it cannot drown the reward functions; None: no cap."""
    # algorithm
    baseline: Literal["rloo", "remax", "reinforce++", "mean", "none"] = "rloo"
    """What is subtracted from an answer's reward: see the top of the file."""
    kl_coef: float = 0.04
    """Weight beta of the KL to the reference; 0: no reference is loaded."""
    clip_low: float = 0.2
    """The importance ratio is clipped below 1 - clip_low (objective clip)."""
    clip_high: float = 0.2
    """The importance ratio is clipped above 1 + clip_high."""
    mask_truncated: bool = False
    """Leave answers that were cut at --max-response-length out of the loss (they still count in their group)."""
    kl_budget: float = 0.0
    """Stop the run when the sequence KL to the reference exceeds this many nats; 0: never."""
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
    """Samples per held-out prompt for sampled accuracy and pass@k; 0: no accuracies at all."""
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


def rloo_advantages(rewards: Tensor, group_size: int) -> Tensor:
    """Reward minus the mean reward of the other answers to the prompt: (B,) -> (B,), prompt-major, float64 inside.

    Equal to k / (k - 1) * (r - mean) with k scored answers; 0 where an answer is not scored (NaN) or alone. ValueError
    for group_size 1 or a ragged batch. Source: Ahmadian et al. (2024), section 3.3.
    """
    if group_size < 2 or len(rewards) % group_size:
        raise ValueError(f"leave-one-out needs groups of two or more: {len(rewards)} rewards, group size {group_size}")
    r = rewards.double().reshape(-1, group_size)  # (P, G)
    scored = ~r.isnan()
    others = scored.sum(1, keepdim=True) - 1  # (P, 1), for a scored answer
    baseline = (common.masked_sum(r, scored, dim=1)[:, None] - r) / others.clamp(min=1)
    return torch.where(scored & (others > 0), r - baseline, 0.0).reshape(-1).float()


def remax_advantages(rewards: Tensor, greedy_rewards: Tensor) -> Tensor:
    """Reward minus the reward of the prompt's greedy answer: (P * G,), (P,) -> (P * G,), prompt-major.

    0 where either was not scored (NaN). Source: Li et al. (2024), algorithm 1.
    """
    baseline = greedy_rewards.double().repeat_interleave(len(rewards) // len(greedy_rewards))
    return (rewards.double() - baseline).nan_to_num(nan=0.0).float()


def mean_advantages(rewards: Tensor, group_size: int) -> Tensor:
    """Reward minus the mean of its group, itself included: (B,) -> (B,); 0 where not scored (NaN)."""
    r = rewards.double().reshape(-1, group_size)  # (P, G)
    mean = common.masked_mean(r, ~r.isnan(), dim=1)[:, None]
    return torch.where(r.isnan(), 0.0, r - mean).reshape(-1).float()


def reinforce_pp_advantages(rewards: Tensor, kl: Tensor, mask: Tensor, kl_coef: float) -> Tensor:
    """A_t = R - beta sum_{i >= t} kl_i, whitened over the trained tokens of all ranks: (B,), (B, T), (B, T) -> (B, T).

    `kl` is k1 per token, detached. Source: Hu (2025), REINFORCE++: return to go of a token-level reward that is -beta
    kl_t at each token plus the score at the last, discount 1, then global normalisation.
    """
    penalty = kl_coef * torch.where(mask, kl, 0.0)  # (B, T)
    to_go = penalty.flip(1).cumsum(1).flip(1)
    return common.masked_whiten(rewards[:, None] - to_go, mask)


def reinforce_loss(logprobs: Tensor, advantages: Tensor, mask: Tensor, num_sequences: float | None = None) -> Tensor:
    """REINFORCE on the sequence log-prob: -mean over sequences of A * sum_t log pi; (B, T), (B,), (B, T) -> scalar.

    `num_sequences`: those with a trained token in the whole minibatch, all micro-batches and ranks; default: in this
    batch. Source: Williams (1992); Ahmadian et al. (2024), equation of section 3.3 for RLOO.
    """
    objective = (advantages * common.masked_sum(logprobs, mask, dim=1)).sum()
    return -objective / max(mask.any(dim=1).sum().item() if num_sequences is None else num_sequences, 1.0)


def clipped_loss(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor,
    clip_low: float = 0.2, clip_high: float = 0.2, num_tokens: float | None = None,
) -> Tensor:  # fmt: skip
    """PPO's clipped objective (Schulman et al. 2017, equation 7), all (B, T): mean over the minibatch's tokens."""
    ratio = (logprobs - old_logprobs).clamp(-common.MAX_LOG_RATIO, common.MAX_LOG_RATIO).exp()
    objective = torch.minimum(ratio * advantages, ratio.clamp(1 - clip_low, 1 + clip_high) * advantages)
    return -common.masked_sum(objective, mask) / max(mask.sum().item() if num_tokens is None else num_tokens, 1.0)


# [shared: learning_rate_at]
def learning_rate_at(step: int, args: "Args") -> float:
    """Learning rate of step `step` (0-based): linear warm-up, then --lr-schedule down to 0 at --steps."""
    if step < args.warmup_steps:
        return args.learning_rate * (step + 1) / (args.warmup_steps + 1)
    done = (step - args.warmup_steps) / max(args.steps - args.warmup_steps, 1)
    shape = {"constant": 1.0, "linear": 1 - done, "cosine": 0.5 * (1 + math.cos(math.pi * done))}
    return args.learning_rate * shape[args.lr_schedule]


# [/shared]


def main(args: Args) -> None:
    # 1 setup
    common.check_numbers(args)
    device = common.setup(args.seed, threads=1 if args.model == "toy" else None)  # more would wait for each other
    dtype = common.compute_dtype(args.dtype, device)
    parts = args.minibatches * common.world_size()
    common.check_divides("--prompts-per-step", args.prompts_per_step, parts, "--minibatches x the number of ranks")
    if args.group_size < 2 and args.baseline in ("rloo", "mean"):
        common.fail(
            f"--group-size must be at least 2 for --baseline {args.baseline}: the other answers are the baseline"
        )
    if args.baseline != "reinforce++" and args.epochs_per_step * args.minibatches > 1:
        common.fail("--epochs-per-step and --minibatches must be 1 but for --baseline reinforce++: there is no ratio")
    if not args.reward and not args.reward_model:
        common.fail("--reward and --reward-model are both empty: name at least one reward")
    run = common.Run(args, "rloo_remax")

    # 2 data
    tokenizer = common.load_tokenizer(args.model)
    functions = common.load_rewards(args.reward)
    if args.reward_model and "reward_model" in functions:
        common.fail('--reward: "reward_model" is what the reward models are called in the log; rename the function')

    # [shared: prompts]
    def load(dataset: str, split: str) -> list[dict]:
        rows = common.attach_answer(common.load_rows(dataset, split, "prompts"), args.answer_column)
        return common.encode_prompts(tokenizer, rows, args.prompt_column, args.max_prompt_length)

    rows = load(args.dataset, args.dataset_split)
    eval_source = args.eval_dataset or ("toy" if args.dataset == "toy" else "")
    eval_rows = load(eval_source, "test")[: args.eval_prompts] if eval_source else []
    common.check_reward_columns(functions, rows, "--reward")
    if eval_rows and args.eval_samples:
        common.check_reward_columns(common.load_rewards([args.eval_reward]), eval_rows, "--eval-reward")
    if len(rows) < args.prompts_per_step:
        common.fail(f"--dataset has {len(rows)} usable prompts, fewer than --prompts-per-step {args.prompts_per_step}")
    # [/shared]

    # 3 models
    policy = common.load_policy(args.model, device, dtype, True, args.gradient_checkpointing)
    longest = max(len(row["prompt_ids"]) for row in rows) + args.max_response_length
    common.check_sizes(policy, tokenizer, longest)
    common.check_logprobs(policy, rows[0]["prompt_ids"], dtype, device)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=args.learning_rate, weight_decay=args.weight_decay)
    common.say(f"policy     peak {common.peak_memory_gb(device):.2f} GB")
    reference = common.load_policy(args.model, device, dtype, trained=False) if args.kl_coef or args.kl_budget else None
    common.say(f"reference  peak {common.peak_memory_gb(device):.2f} GB" if reference else "reference  none")
    reward_models = [common.load_reward_model(path, tokenizer, device, dtype) for path in args.reward_model]
    stops = common.stop_ids(tokenizer, policy)
    sampler = common.SAMPLERS[args.sampler](policy, stops, tokenizer.pad_token_id, args.seed, dtype)
    run.start()
    models = {"policy": (policy, optimizer)}

    def evaluate(step: int) -> dict[str, float]:
        limits = args.eval_samples, args.temperature, args.max_response_length
        metrics, samples = common.evaluate(sampler, tokenizer, eval_rows, args.eval_reward, *limits)
        run.log_samples(step, samples)
        return metrics

    weights = [weight for _, weight in functions.values()] + [1.0] * bool(reward_models)
    reward_names = [*functions, *["reward_model"] * bool(reward_models)]
    state = run.restore(models) if run.checkpoint else {"before": evaluate(0)}
    sampler.load_weights(policy)
    several = args.epochs_per_step * args.minibatches > 1
    mine = common.own(range(args.prompts_per_step))  # the places of this rank's prompts in a step: it owns whole groups

    # 4 loop
    for step in run.steps():
        began, metrics = time.time(), common.Metrics()
        order = common.data_order(len(rows), args.seed, (step - 1) * args.prompts_per_step, args.prompts_per_step)
        asked = [rows[order[place]] for place in mine]  # this rank's prompts
        b_rows = [row for row in asked for _ in range(args.group_size)]

        # 4a rollout
        sampler.wake()
        limits = args.temperature, args.max_response_length
        prompts = [row["prompt_ids"] for row in asked]
        ids, lengths, finished, logprobs = sampler.generate(
            prompts, args.group_size, *limits, stream=f"train/{step}", indices=mine
        )
        responses, response_logprobs = common.cut(ids, lengths), common.cut(logprobs, lengths)  # B lists each
        if args.baseline == "remax":  # one greedy answer per prompt, for its reward alone
            ids, greedy_lengths, _, _ = sampler.generate(prompts, 1, *limits, greedy=True)
            greedy_responses = common.cut(ids, greedy_lengths)
        sampler.sleep()
        rollout_seconds = time.time() - began

        # 4b rewards
        texts = [common.decode(tokenizer, response, stops) for response in responses]
        scores = common.score_samples(functions, reward_models, b_rows, responses, texts, tokenizer, args)  # (F, B)
        own_rewards = common.weighted_reward(scores, weights)  # (B,)
        if args.baseline == "remax":
            greedy_texts = [common.decode(tokenizer, response, stops) for response in greedy_responses]
            greedy = common.score_samples(
                functions, reward_models, asked, greedy_responses, greedy_texts, tokenizer, args
            )
            greedy_rewards = common.weighted_reward(greedy, weights)  # (P of this rank,)
        scores = common.gather_rows(scores.T, args.group_size).T  # (F, P * G), of all ranks, for the log
        rewards = common.gather_rows(own_rewards, args.group_size)  # (P * G,)
        if not rewards.isfinite().any():
            common.fail(f"step {step}: no answer was scored; does --answer-column name answers the rewards can read?")
        prompts = [row["prompt_ids"] for row in b_rows]
        b_tensors = common.collate(prompts, responses, tokenizer.pad_token_id, device)
        b_input_ids, b_attention_mask, b_response_mask = b_tensors  # (B, T) each
        b_sampler_logprobs = common.align(response_logprobs, b_response_mask)  # (B, T)

        # 4c reference and old log-probs
        limits = args.temperature, args.microbatch_tokens
        b_old_logprobs = (
            common.batched_logprobs(policy, *b_tensors, *limits) if reference or several else None
        )  # (B, T)
        b_ref_logprobs = common.batched_logprobs(reference, *b_tensors, *limits) if reference else None  # (B, T)

        # 4d advantages
        b_trained = own_rewards.isfinite() & (finished | (not args.mask_truncated))  # (B,)
        if args.baseline == "remax":  # no baseline, no advantage
            b_trained &= greedy_rewards.isfinite().repeat_interleave(args.group_size)
        b_mask = b_response_mask & b_trained.to(device)[:, None]  # (B, T)
        b_kl = torch.zeros(b_mask.shape, device=device)
        if reference:
            b_kl = torch.where(b_response_mask, common.kl_estimate(b_old_logprobs, b_ref_logprobs, "k1"), 0.0)  # (B, T)
        penalised = own_rewards - args.kl_coef * b_kl.sum(1).double().cpu()  # (B,): R(x, y), the KL included
        if args.baseline == "rloo":
            b_advantages = rloo_advantages(penalised, args.group_size).to(device)  # (B,)
        elif args.baseline == "remax":
            b_advantages = remax_advantages(penalised, greedy_rewards).to(device)
        elif args.baseline == "mean":
            b_advantages = mean_advantages(penalised, args.group_size).to(device)
        elif args.baseline == "reinforce++":
            b_advantages = reinforce_pp_advantages(own_rewards.float().to(device), b_kl, b_mask, args.kl_coef)  # (B, T)
        else:
            b_advantages = penalised.nan_to_num(nan=0.0).float().to(device)
        assert b_mask.shape == b_input_ids.shape == b_sampler_logprobs.shape and len(b_advantages) == len(b_mask)

        # 4e update
        size = len(b_input_ids) // args.minibatches  # this rank's rows of a minibatch
        for update in range(args.epochs_per_step * args.minibatches):
            first_row = update % args.minibatches * size
            minibatch = slice(first_row, first_row + size)
            num_sequences, num_tokens = common.all_sum(b_mask[minibatch].any(1).sum(), b_mask[minibatch].sum())
            for micro in common.microbatches(b_attention_mask[minibatch].sum(1).tolist(), args.microbatch_tokens):
                mb = torch.tensor(micro, device=device) + first_row
                width = int(b_attention_mask[mb].sum(1).max())  # T of this micro-batch
                mb_mask = b_mask[mb, :width]
                mb_inputs = b_input_ids[mb, :width], b_attention_mask[mb, :width], mb_mask
                logprobs, entropy = common.token_logprobs(policy, *mb_inputs, args.temperature, with_entropy=True)
                old_logprobs = b_old_logprobs[mb, :width] if update else logprobs.detach()
                if args.baseline == "reinforce++":
                    clip = args.clip_low, args.clip_high
                    loss = clipped_loss(logprobs, old_logprobs, b_advantages[mb, :width], mb_mask, *clip, num_tokens)
                else:
                    loss = reinforce_loss(logprobs, b_advantages[mb], mb_mask, num_sequences)
                loss.backward()

                sequences = mb_mask.any(1).sum()
                metrics.add("loss", loss, sequences / max(num_sequences, 1.0))  # the counts of an update add up to 1
                metrics.add_masked("entropy", entropy, mb_mask)
                log_ratio = (logprobs - old_logprobs).detach().clamp(max=common.MAX_LOG_RATIO)
                metrics.add_masked("approx_kl", log_ratio.exp() - 1 - log_ratio, mb_mask)
                if args.baseline == "reinforce++":
                    ratio, sign = log_ratio.exp(), b_advantages[mb, :width]
                    too_low, too_high = (ratio < 1 - clip[0]) & (sign < 0), (ratio > 1 + clip[1]) & (sign > 0)
                    metrics.add_masked("clip_ratio/region_mean", too_low | too_high, mb_mask)
                if reference:
                    metrics.add("kl", common.masked_sum(b_kl[mb, :width], mb_mask), sequences)
                if update == 0:
                    gap = (logprobs - b_sampler_logprobs[mb, :width]).abs()
                    metrics.add_masked("sampler/logprob_gap", gap, mb_mask)
            grad_norm = common.clip_gradients(policy, args.max_grad_norm)
            for group in optimizer.param_groups:
                group["lr"] = learning_rate_at(step - 1, args)
            usable = math.isfinite(grad_norm) and num_sequences > 0
            if usable:
                optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            metrics.add("grad_norm", grad_norm, 1)
            metrics.add("skipped_updates", float(not usable), 1)
        sampler.load_weights(policy)

        # 4f log
        scored, by_group = rewards[rewards.isfinite()], rewards.reshape(-1, args.group_size)  # (P, G)
        flat = by_group.nan_to_num(nan=-math.inf).amax(1) <= by_group.nan_to_num(nan=math.inf).amin(1)  # (P,)
        metrics.add("completions/mean_length", lengths.sum(), len(lengths))
        metrics.add("completions/clipped_ratio", (~finished).sum(), len(finished))
        numbers = {
            "loss": 0.0,
            "reward": scored.mean().item(),
            "reward_std": scored.std(correction=0).item(),
            "frac_unscored": 1 - len(scored) / len(rewards),
            "frac_reward_zero_std": flat.double().mean().item(),
            **{f"rewards/{name}/mean": s.nanmean().item() for name, s in zip(reward_names, scores, strict=True)},
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
        shown = zip(b_rows, texts, own_rewards.tolist(), strict=True)
        samples = [{"split": "train", "prompt": row["prompt"], "completion": t, "reward": r} for row, t, r in shown]
        run.log_samples(step, samples[:4])

        # 4g evaluate and save
        if args.save_every and step % args.save_every == 0:
            run.save(step, models, state)
        if 0 < args.kl_budget < numbers.get("kl", 0.0):
            common.say(f"step {step}: sequence KL {numbers['kl']:.2f} is over --kl-budget {args.kl_budget}: stopping")
            break
    run.finish(policy, tokenizer, state["before"], evaluate(run.step), dtype)


if __name__ == "__main__":
    main(common.parse_args(Args))
