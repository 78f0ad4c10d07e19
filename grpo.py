"""GRPO and its successors: reinforcement learning without a critic.

For each prompt q a group of G answers o_1..o_G is sampled and scored; an answer's advantage is how far its reward lies
from its group's mean. The variants differ in a few switches (VARIANTS), each of which is a flag too:

grpo     Shao et al., "DeepSeekMath" (2024): equation 3 (objective), 4 (KL estimate k3), section 4.1.2 (advantages)
dr_grpo  Liu et al., "Understanding R1-Zero-Like Training" (2025): no division by the std, nor by an answer's length
dapo     Yu et al., "DAPO" (2025): equations 8 (token mean, clip-higher), 11 (dynamic sampling), 13 (overlong shaping)
cispo    MiniMax, "MiniMax-M1" (2025), equations 4, 5: the clipped ratio is a constant weight, so its gradient survives
gspo     Zheng et al., "Group Sequence Policy Optimization" (2025), equations 5, 7: one ratio per sequence

1. Group statistics in float64: population standard deviation + 1e-8, exactly 0 where all rewards of a group are equal.
2. Every mean is over the whole minibatch, all micro-batches and ranks: the cut never changes the gradient. An unscored
   (None) answer, or with --mask-truncated a cut one, is not trained on.
3. Old log-probs are the trainer's own; in the first update after a rollout they are the current ones (ratio 1).
4. Log-ratios are clamped to +-20 before exp, and an update with a non-finite gradient is skipped on all ranks.
5. Sampling and scoring use one temperature; the reference is scored at it too. The reference is never updated.
6. AdamW has torch's betas 0.9, 0.999 and epsilon 1e-8; its decay, if any, is on all weights.

role        weights  gradients  Adam moments   bytes per parameter, all ranks together, after loading (bfloat16 adds 2)
policy      4        4          8              16
reference   2 or 4   -          -              only where the KL is in the loss or has a budget
reward      2 or 4   -          -              one per --reward-model
sampler     0 or 2/4                           the policy itself, or an unsharded copy where the policy is sharded

    python grpo.py                                     the toy task on a CPU, a minute; --variant dapo for another
    python grpo.py --model DIR --dataset train.jsonl --eval-dataset test.jsonl     one GPU
    torchrun --nproc-per-node 8 grpo.py --model DIR --dataset ... --group-size 16
"""

import math
import time
from dataclasses import dataclass, field
from itertools import chain
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
    sampler_correction: Literal["off", "token", "sequence"] = "off"
    """Weigh tokens by min(trainer's / sampler's probability, 2), of the token or of its whole sequence."""
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
    reward_scale: Literal["sum", "each"] = "sum"
    """Advantages of the weighted sum of the rewards, or weighted sum of each reward's own advantages."""
    overlong_buffer: int | None = None
    """Answers lose up to 1 over the last so many tokens before --max-response-length; 0: off. None: the variant's."""
    # algorithm
    variant: Literal["grpo", "dr_grpo", "dapo", "cispo", "gspo"] = "grpo"
    """Sets the switches that are None below and overlong_buffer; the resolved values are printed and stored."""
    advantage_scale: Literal["group", "batch", "none"] | None = None
    """Advantages are divided by the standard deviation of the group, of the batch, or by nothing."""
    aggregation: Literal["sequence", "token", "constant"] | None = None
    """Mean over sequences of their token means, mean over tokens, or sum / (sequences * max_response_length)."""
    objective: Literal["clip", "cispo"] | None = None
    """PPO's clipped objective, or the log-prob weighted by the clipped ratio."""
    ratio_level: Literal["token", "sequence"] | None = None
    """Importance ratio of each token, or one of the sequence: the geometric mean over its tokens."""
    clip_low: float | None = None
    """The importance ratio is clipped below 1 - clip_low (objective clip)."""
    clip_high: float | None = None
    """The importance ratio is clipped above 1 + clip_high."""
    kl_coef: float | None = None
    """Weight beta of the KL to the reference; 0: no reference is loaded."""
    dynamic_sampling: bool | None = None
    """Replace groups without spread of the task reward by groups of new prompts, several times at most."""
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


MAX_REDRAWS = 8  # --dynamic-sampling gives up on a group after so many prompts without spread

VARIANTS = {
    "grpo": {"advantage_scale": "group", "aggregation": "sequence", "clip_low": 0.2, "clip_high": 0.2, "kl_coef": 0.04},
    "dr_grpo": {"advantage_scale": "none", "aggregation": "constant", "clip_low": 0.2, "clip_high": 0.2},
    "dapo": {
        "aggregation": "token",
        "clip_low": 0.2,
        "clip_high": 0.28,
        "dynamic_sampling": True,
        "overlong_buffer": -1,
    },
    "cispo": {"aggregation": "token", "objective": "cispo", "clip_low": 0.0, "clip_high": 4.0},
    "gspo": {"aggregation": "sequence", "ratio_level": "sequence", "clip_low": 3e-4, "clip_high": 4e-4},
}
DEFAULTS = {
    "advantage_scale": "group", "objective": "clip", "ratio_level": "token", "kl_coef": 0.0, "dynamic_sampling": False,
    "overlong_buffer": 0,
}  # fmt: skip


def resolve_variant(args: Args) -> dict:
    """Fill the switches that were not given from VARIANTS and DEFAULTS, in place; the resolved values.

    DAPO's overlong buffer is a fifth of the longest response (4096 of 20480 tokens in its section 4.1).
    """
    switches = {**DEFAULTS, **VARIANTS[args.variant]}
    if switches["overlong_buffer"] < 0:
        switches["overlong_buffer"] = max(1, args.max_response_length // 5)
    for name, value in switches.items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    return {name: getattr(args, name) for name in switches}


def has_spread(rewards: Tensor, group_size: int) -> Tensor:
    """(P,) bool: whether the scored (not NaN) rewards of each group differ; rewards (P * G,), prompt-major."""
    r = rewards.reshape(-1, group_size)
    return r.nan_to_num(nan=-math.inf).amax(1) > r.nan_to_num(nan=math.inf).amin(1)


def group_advantages(rewards: Tensor, group_size: int, scale: str = "group") -> Tensor:
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
    spread = has_spread(rewards, group_size)  # (P,)
    if scale == "group":
        std = common.masked_mean(centred**2, scored, dim=1).sqrt()[:, None]
    elif scale == "batch":
        std = common.masked_mean((r - common.masked_mean(r, scored)) ** 2, scored).sqrt()
    else:
        std = torch.ones(())
    epsilon = 0.0 if scale == "none" else 1e-8
    return torch.where(spread[:, None], centred / (std + epsilon), 0.0).reshape(-1).float()


def importance_ratio(logprobs: Tensor, old_logprobs: Tensor, mask: Tensor, level: str = "token") -> Tensor:
    """pi / pi_old of each token (B, T), or at level "sequence" exp(mean log-ratio) of its sequence.

    Source of the second: Zheng et al. (2025), equation 7. ValueError for another level.
    """
    log_ratio = logprobs - old_logprobs
    if level == "sequence":
        log_ratio = common.masked_mean(log_ratio, mask, dim=1)[:, None].expand_as(log_ratio)
    elif level != "token":
        raise ValueError(f'level is "token" or "sequence", not "{level}"')
    return log_ratio.clamp(-common.MAX_LOG_RATIO, common.MAX_LOG_RATIO).exp()


def sampler_weights(
    old_logprobs: Tensor, sampler_logprobs: Tensor, mask: Tensor, level: str, cap: float = 2.0
) -> Tensor:
    """Truncated importance weights between trainer and sampler, (B, T), detached: min(pi_old / pi_sampler, cap).

    `level` "token" takes each token's ratio, "sequence" the product over its sequence, "off" gives ones; ValueError for
    another. Source: Yao et al., "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training" (2025).
    """
    log_ratio = torch.where(mask, old_logprobs - sampler_logprobs, 0.0).detach()
    if level == "off":
        return torch.ones_like(log_ratio)
    if level == "sequence":
        log_ratio = log_ratio.sum(1, keepdim=True).expand_as(log_ratio)
    elif level != "token":
        raise ValueError(f'level is "off", "token" or "sequence", not "{level}"')
    return log_ratio.clamp(max=math.log(cap)).exp()


def loss_denominator(mask: Tensor, aggregation: str, max_length: int | None = None) -> float:
    """What a minibatch's sum is divided by: trained sequences, trained tokens, or all sequences * max_length."""
    if aggregation == "sequence":
        return mask.any(dim=1).sum().item()
    if aggregation == "token":
        return mask.sum().item()
    if aggregation == "constant":
        return len(mask) * float(max_length or mask.shape[1])
    raise ValueError(f'aggregation is "sequence", "token" or "constant", not "{aggregation}"')


def policy_loss(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor,
    clip_low: float = 0.2, clip_high: float = 0.2, ref_logprobs: Tensor | None = None, kl_coef: float = 0.0,
    denominator: float | None = None, objective: str = "clip", ratio_level: str = "token",
    aggregation: str = "sequence", weights: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """The scalar loss of one micro-batch; by default DeepSeekMath's equation 3.

    Log-probs, the bool `mask` and `weights` (of --sampler-correction) are (B, T), `advantages` (B,). `denominator` is
    `loss_denominator` of the whole minibatch, all micro-batches and ranks; without it, of this batch.
    """
    ratio = importance_ratio(logprobs, old_logprobs, mask, ratio_level)  # (B, T)
    advantages = advantages[:, None]  # (B, 1)
    if objective == "cispo":  # MiniMax-M1, equations 4, 5
        gain = ratio.clamp(max=1 + clip_high).detach() * advantages * logprobs
    else:  # DeepSeekMath, equation 3; per sequence: GSPO, equation 5
        gain = torch.minimum(ratio * advantages, ratio.clamp(1 - clip_low, 1 + clip_high) * advantages)
    gain = gain if weights is None else gain * weights
    if kl_coef:
        gain = gain - kl_coef * common.kl_estimate(logprobs, ref_logprobs, "k3")  # DeepSeekMath, equation 4
    total = common.masked_mean(gain, mask, 1).sum() if aggregation == "sequence" else common.masked_sum(gain, mask)
    return -total / max(loss_denominator(mask, aggregation) if denominator is None else denominator, 1.0)


def overlong_penalty(lengths: Tensor, max_length: int, buffer: int) -> Tensor:
    """DAPO's equation 13: 0 up to max_length - buffer tokens, then linearly to -1 at max_length; 0 without buffer."""
    return -((lengths - (max_length - buffer)) / max(buffer, 1)).clamp(0, 1) if buffer else torch.zeros(lengths.shape)


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
    if args.group_size < 2:
        common.fail(
            "--group-size must be at least 2: the advantage of an answer is relative to the others of its group"
        )
    if not args.reward and not args.reward_model:
        common.fail("--reward and --reward-model are both empty: name at least one reward")
    if args.overlong_buffer is not None and args.overlong_buffer >= args.max_response_length:
        common.fail(f"--overlong-buffer {args.overlong_buffer} is not shorter than --max-response-length")
    common.say(f"{args.variant}: " + ", ".join(f"{k} {v}" for k, v in resolve_variant(args).items()))
    run = common.Run(args, "grpo")

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
    state = run.restore(models) if run.checkpoint else {"before": evaluate(0), "position": 0}  # in the data
    sampler.load_weights(policy)
    mine = common.own(range(args.prompts_per_step))  # the places of this rank's prompts in a step: it owns whole groups

    # 4 loop
    for step in run.steps():
        began, rollout_seconds, metrics = time.time(), 0.0, common.Metrics()
        groups: dict[int, tuple] = {}  # place of a prompt of this rank in the step -> what its group's columns hold
        wanted = list(range(args.prompts_per_step))  # the places, of all ranks, whose group is still to be drawn
        for draw in range(1 + MAX_REDRAWS * args.dynamic_sampling):
            # 4a rollout
            order = common.data_order(len(rows), args.seed, state["position"], len(wanted))
            state["position"] += len(wanted)
            asked = {place: rows[i] for place, i in zip(wanted, order, strict=True) if place in mine}
            rollout_began = time.time()
            sampler.wake()
            ids, lengths, finished, logprobs = sampler.generate(
                [row["prompt_ids"] for row in asked.values()], args.group_size, args.temperature,
                args.max_response_length, stream=f"train/{step}/{draw}", indices=list(asked),
            )  # fmt: skip
            sampler.sleep()
            rollout_seconds += time.time() - rollout_began
            responses, response_logprobs = common.cut(ids, lengths), common.cut(logprobs, lengths)

            # 4b rewards
            texts = [common.decode(tokenizer, response, stops) for response in responses]
            b_rows = [row for row in asked.values() for _ in range(args.group_size)]
            scores = common.score_samples(functions, reward_models, b_rows, responses, texts, tokenizer, args)  # (F, B)
            flat = set()  # DAPO's equation 11 asks for a group in which some answers are better than others
            for k, place in enumerate(asked):
                g = slice(k * args.group_size, (k + 1) * args.group_size)
                groups[place] = tuple(c[g] for c in (b_rows, responses, texts, response_logprobs, finished, scores.T))
                if not has_spread(common.weighted_reward(scores[:, g], weights), args.group_size).item():
                    flat.add(place)
            wanted = sorted(set().union(*common.all_gather(flat)))
            if not wanted:
                break
        columns = list(zip(*(groups[place] for place in mine), strict=True))
        b_rows, responses, texts, response_logprobs = (list(chain.from_iterable(c)) for c in columns[:4])
        finished, scores = (torch.cat(c) for c in columns[4:])  # (B,), (B, F)
        prompts = [row["prompt_ids"] for row in b_rows]
        b_tensors = common.collate(prompts, responses, tokenizer.pad_token_id, device)
        b_input_ids, b_attention_mask, b_response_mask = b_tensors  # (B, T) each
        b_sampler_logprobs = common.align(response_logprobs, b_response_mask)  # (B, T)

        # 4c reference and old log-probs
        several = args.epochs_per_step * args.minibatches > 1  # with one update the old policy is the current one
        limits = args.temperature, args.microbatch_tokens
        b_old_logprobs = common.batched_logprobs(policy, *b_tensors, *limits) if several else None  # (B, T)
        b_ref_logprobs = common.batched_logprobs(reference, *b_tensors, *limits) if reference else None  # (B, T)

        # 4d advantages
        scores = common.gather_rows(scores, args.group_size).T  # (F, P * G)
        rewards = common.weighted_reward(scores, weights)  # (P * G,)
        if not rewards.isfinite().any():
            common.fail(f"step {step}: no answer was scored; does --answer-column name answers the rewards can read?")
        lengths = common.gather_rows(torch.tensor([len(r) for r in responses]), args.group_size)  # (P * G,)
        spread = has_spread(rewards, args.group_size)  # (P,)
        penalty = overlong_penalty(lengths, args.max_response_length, args.overlong_buffer)  # (P * G,)
        if args.reward_scale == "each":  # each reward in units of its own spread in the group, then weighted
            each = [group_advantages(r, args.group_size, args.advantage_scale) for r in scores]
            advantages = sum(w * a for w, a in zip(weights, each, strict=True))
            advantages = advantages + group_advantages(penalty, args.group_size, "none")
        else:
            advantages = group_advantages(rewards + penalty, args.group_size, args.advantage_scale)
        trained = rewards.isfinite() & (spread.repeat_interleave(args.group_size) | (not args.dynamic_sampling))
        if args.dynamic_sampling and not trained.any():
            common.say(
                f"step {step}: {1 + draw} draws gave no group with spread, so there is nothing to learn: stopping"
            )
            break
        by_place = torch.stack([advantages, trained.float()]).reshape(2, -1, args.group_size)  # (2, P, G)
        b_advantages, b_trained = by_place[:, mine].reshape(2, -1).to(device)  # (B,) each: this rank's groups
        b_trained = b_trained.bool() & (finished.to(device) | (not args.mask_truncated))
        b_mask = b_response_mask & b_trained[:, None]  # (B, T)
        assert b_mask.shape == b_input_ids.shape == b_sampler_logprobs.shape and len(b_advantages) == len(b_mask)

        # 4e update
        size = len(b_input_ids) // args.minibatches  # this rank's rows of a minibatch
        for update in range(args.epochs_per_step * args.minibatches):
            first_row = update % args.minibatches * size
            minibatch = slice(first_row, first_row + size)
            counted = loss_denominator(b_mask[minibatch], args.aggregation, args.max_response_length)
            denominator, num_sequences = common.all_sum(counted, b_mask[minibatch].any(1).sum())
            for micro in common.microbatches(b_attention_mask[minibatch].sum(1).tolist(), args.microbatch_tokens):
                mb = torch.tensor(micro, device=device) + first_row
                width = int(b_attention_mask[mb].sum(1).max())  # T of this micro-batch
                mb_mask = b_mask[mb, :width]
                mb_inputs = b_input_ids[mb, :width], b_attention_mask[mb, :width], mb_mask
                logprobs, entropy = common.token_logprobs(policy, *mb_inputs, args.temperature, with_entropy=True)
                old_logprobs = b_old_logprobs[mb, :width] if update else logprobs.detach()
                ref_logprobs = b_ref_logprobs[mb, :width] if reference else None
                weights_of = sampler_weights(
                    old_logprobs, b_sampler_logprobs[mb, :width], mb_mask, args.sampler_correction
                )
                loss = policy_loss(
                    logprobs, old_logprobs, b_advantages[mb], mb_mask, args.clip_low, args.clip_high, ref_logprobs,
                    args.kl_coef, denominator, args.objective, args.ratio_level, args.aggregation, weights_of,
                )  # fmt: skip
                loss.backward()

                sequences = mb_mask.any(1).sum()
                metrics.add("loss", loss, sequences / max(num_sequences, 1.0))  # the counts of an update add up to 1
                metrics.add_masked("entropy", entropy, mb_mask)
                ratio, sign = importance_ratio(logprobs, old_logprobs, mb_mask).detach(), b_advantages[mb, None]
                metrics.add_masked("approx_kl", ratio - 1 - ratio.log(), mb_mask)
                ratio = importance_ratio(logprobs, old_logprobs, mb_mask, args.ratio_level).detach()
                too_low = (ratio < 1 - args.clip_low) & (sign < 0) & (args.objective == "clip")
                too_high = (ratio > 1 + args.clip_high) & ((sign > 0) | (args.objective == "cispo"))
                metrics.add_masked("clip_ratio/low_mean", too_low, mb_mask)
                metrics.add_masked("clip_ratio/high_mean", too_high, mb_mask)
                metrics.add_masked("clip_ratio/region_mean", too_low | too_high, mb_mask)
                if reference:
                    kl = common.masked_sum(common.kl_estimate(logprobs, ref_logprobs, "k1"), mb_mask)
                    metrics.add("kl", kl, sequences)
                if update == 0:
                    gap = (logprobs - b_sampler_logprobs[mb, :width]).abs()
                    metrics.add_masked("sampler/logprob_gap", gap, mb_mask)
                metrics.add_masked("sampler/importance_weight", weights_of, mb_mask)
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
        scored = rewards[rewards.isfinite()]
        metrics.add("completions/clipped_ratio", (~finished).sum(), len(finished))
        numbers = {
            "loss": 0.0,
            "reward": scored.mean().item(),
            "reward_std": scored.std(correction=0).item(),
            "frac_unscored": 1 - len(scored) / len(rewards),
            "frac_reward_zero_std": 1 - spread.double().mean().item(),
            **{f"rewards/{name}/mean": s.nanmean().item() for name, s in zip(reward_names, scores, strict=True)},
            "completions/mean_length": lengths.double().mean().item(),
            "redraws": float(draw),
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
        own_rewards = rewards.reshape(-1, args.group_size)[mine].flatten().tolist()
        shown = zip(b_rows, texts, own_rewards, strict=True)
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
