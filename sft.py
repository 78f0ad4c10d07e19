"""Supervised fine-tuning (SFT): stage 1 of RLHF, the imitation of demonstrations.

Minimises the negative log-likelihood of the responses, -sum_t log pi(y_t | x, y_<t), averaged over all response tokens
of an optimizer step. Stage 1 of Ouyang et al., "Training language models to follow instructions with human feedback"
(2022), section 3.5; they give no formula, and train with dropout 0.2, no warm-up, and cosine decay to 10 %: ours are
flags, dropout is off. AdamW has torch's betas 0.9, 0.999 and epsilon 1e-8. What papers leave open, and our choice:

1. Only the response is trained on: prompts, chat headers and what a template prints after the stop id have no loss.
2. The denominator is the number of response tokens of the whole minibatch, over all micro-batches and ranks, so that
   the cut never changes the gradient. (Averaging per micro-batch gives tokens of short batches more weight.)
3. Prompt and response are tokenised apart, as they will be at generation, and each response ends in one trained EOS.
4. In a conversation every assistant turn is trained; a template that re-prints earlier turns differently is skipped.

Rows: {"prompt", "completion"} (rename with --prompt-column, --answer-column), plain or conversational, or {"messages"}.

role      weights  gradients  Adam moments   bytes per parameter (float32 master weights; bfloat16 adds a copy of 2)
policy    4        4          8              16 + activations; the LM head never holds (B, T, V) logits

    python sft.py                                                  the toy task on a CPU, about a minute
    python sft.py --model DIR --dataset train.jsonl --eval-dataset test.jsonl --prompt-column question \
        --answer-column answer                                     one GPU
    torchrun --nproc-per-node 8 sft.py --model ... --dataset ...   eight GPUs, the same gradient
"""

import math
import time
from dataclasses import dataclass
from typing import Literal

import torch

import common


@dataclass
class Args:
    # model and data
    model: str = "toy"
    """Policy to start from: a directory, a hub id, or `toy` (here: a fresh toy model, drawn with --seed)."""
    dataset: str = "toy"
    """Training rows: `toy`, a .jsonl or .parquet file, a directory, or a hub id."""
    dataset_split: str = "train"
    """Split of --dataset."""
    eval_dataset: str = ""
    """Held-out rows, split `test`; empty: those of the toy task for `toy`, none otherwise."""
    prompt_column: str = "prompt"
    """Column of the prompt, text or a list of messages."""
    answer_column: str = "completion"
    """Column of the response to imitate."""
    max_length: int = 1024
    """Longest row in tokens; longer responses are cut (and then have no EOS), longer prompts dropped."""
    # optimisation
    steps: int | None = None
    """Optimizer steps; None: as many as --epochs gives."""
    epochs: float = 2.5
    """Passes over the data, where --steps is not given."""
    batch_size: int = 48
    """Rows of an optimizer step, over all ranks."""
    microbatch_tokens: int = 8192
    """Most padded tokens of one forward and backward pass on a rank."""
    learning_rate: float = 4e-3
    """Peak learning rate of AdamW."""
    lr_schedule: Literal["constant", "linear", "cosine"] = "cosine"
    """Shape of the learning rate after warm-up; linear and cosine fall to 0."""
    warmup_steps: int = 20
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
    max_response_length: int = 32
    """Most tokens of a sampled response; a longer one is cut and scored as it is."""
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


def sft_loss(logprobs: torch.Tensor, mask: torch.Tensor, num_tokens: float | None = None) -> torch.Tensor:
    """Mean negative log-likelihood of the trained tokens, a scalar in nats.

    `logprobs` and the bool `mask` are (B, T). `num_tokens` is the count over the whole minibatch, all micro-batches and
    ranks; without it the mask's own. 0 where there are none.
    """
    objective = common.masked_sum(logprobs, mask)
    return -objective / max(mask.sum().item() if num_tokens is None else num_tokens, 1.0)


# [shared: learning_rate_at]
def learning_rate_at(step: int, args: "Args") -> float:
    """Learning rate of step `step` (0-based): linear warm-up, then --lr-schedule down to 0 at --steps."""
    if step < args.warmup_steps:
        return args.learning_rate * (step + 1) / (args.warmup_steps + 1)
    done = (step - args.warmup_steps) / max(args.steps - args.warmup_steps, 1)
    shape = {"constant": 1.0, "linear": 1 - done, "cosine": 0.5 * (1 + math.cos(math.pi * done))}
    return args.learning_rate * shape[args.lr_schedule]


# [/shared]


def encode(rows: list[dict], tokenizer, stops: list[int], args: Args, what: str) -> list[dict]:
    """Rows with `input_ids` and `mask`, cut to --max-length; rows without a trained token are dropped and counted."""
    kept, cut = [], 0
    if "messages" in rows[0]:
        pairs = [([], messages) for messages in common.column(rows, "messages", "messages column", (list,))]
    else:
        prompts = common.column(rows, args.prompt_column, "--prompt-column")
        pairs = list(zip(prompts, common.column(rows, args.answer_column, "--answer-column"), strict=True))
    for number, (row, (prompt, completion)) in enumerate(zip(rows, pairs, strict=True), 1):
        if type(prompt) is not type(completion):
            common.fail(f"row {number}: prompt and completion must both be text or both be lists of messages")
        try:
            prompt_ids = [] if prompt == [] else common.prompt_token_ids(tokenizer, prompt)
            if isinstance(prompt, list):
                turns = common.conversation_token_ids(tokenizer, prompt + completion, stops, first=len(prompt))
                ids, mask = turns or ([], [])
            else:
                response = common.completion_token_ids(tokenizer, completion, stops)
                ids, mask = prompt_ids + response, [False] * len(prompt_ids) + [True] * len(response)
        except ValueError:  # the chat template refuses the row or is not prefix-stable
            ids, mask = [], []
        cut += len(ids) > args.max_length
        ids, mask = ids[: args.max_length], mask[: args.max_length]
        if any(mask) and not mask[0]:
            gold = completion if row.get("answer") is None else row["answer"]
            row = {**row, "prompt": prompt, "prompt_ids": prompt_ids, "answer": gold}
            kept.append({**row, "input_ids": ids, "mask": mask})
    if cut or len(kept) < len(rows):
        common.say(f"{what}: {cut} longer than --max-length {args.max_length} were cut")
        common.say(f"{what}: {len(rows) - len(kept)} of {len(rows)} dropped: no response left, or the template refuses")
    if not kept:
        common.fail(f"{what}: no row has a response within --max-length {args.max_length}")
    return kept


def tensors(rows: list[dict], pad_id: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(input_ids, attention_mask, response_mask) of some rows, each (B, T)."""
    input_ids = common.pad([r["input_ids"] for r in rows], pad_id, device)
    attention_mask = common.pad([[1] * len(r["mask"]) for r in rows], 0, device)
    return input_ids, attention_mask, common.pad([r["mask"] for r in rows], False, device)


@torch.no_grad()
def held_out_loss(policy, rows: list[dict], pad_id: int, device: torch.device, args: Args) -> dict[str, float]:
    """Token-mean loss on the held-out rows, over all ranks."""
    metrics = common.Metrics()
    places = range(math.ceil(len(rows) / common.world_size()) * common.world_size())  # equal shares for all ranks
    mine = common.own([rows[i % len(rows)] for i in places])
    repeated = common.own([i >= len(rows) for i in places])  # rows that come again count 0
    for micro in common.microbatches([len(r["mask"]) for r in mine], args.microbatch_tokens):
        input_ids, attention_mask, mask = tensors([mine[i] for i in micro], pad_id, device)
        logprobs = common.token_logprobs(policy, input_ids, attention_mask, mask)
        counted = mask & ~torch.tensor([repeated[i] for i in micro], device=device)[:, None]
        metrics.add_masked("eval/loss", -logprobs, counted)
    return metrics.reduce()


def main(args: Args) -> None:
    # 1 setup
    common.check_numbers(args)
    device = common.setup(args.seed, threads=1 if args.model == "toy" else None)  # more would wait for each other
    dtype = common.compute_dtype(args.dtype, device)
    common.check_divides("--batch-size", args.batch_size, common.world_size(), "the number of ranks")

    run = common.Run(args, "sft")

    # 2 data
    tokenizer = common.load_tokenizer(args.model)
    rows = common.load_rows(args.dataset, args.dataset_split, "demonstrations")
    eval_source = args.eval_dataset or ("toy" if args.dataset == "toy" else "")
    eval_rows = common.load_rows(eval_source, "test", "demonstrations")[: args.eval_prompts] if eval_source else []

    common.load_rewards([args.eval_reward])  # a mistake in it is found now

    # 3 models
    policy = common.load_policy(args.model, device, dtype, True, args.gradient_checkpointing, fresh_seed=args.seed)
    stops = common.stop_ids(tokenizer, policy)
    rows = encode(rows, tokenizer, stops, args, "training rows")
    eval_rows = encode(eval_rows, tokenizer, stops, args, "held-out rows") if eval_rows else []
    if len(rows) < args.batch_size:
        common.fail(f"--dataset has {len(rows)} usable rows, fewer than --batch-size {args.batch_size}")
    args.steps = args.steps or max(
        1, round(args.epochs * len(rows) / args.batch_size)
    )  # args.json keeps what was given
    common.check_sizes(policy, tokenizer, max(len(row["mask"]) for row in [*rows, *eval_rows]))
    common.check_logprobs(policy, rows[0]["input_ids"], dtype, device)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=args.learning_rate, weight_decay=args.weight_decay)
    sampler = common.HFSampler(policy, stops, tokenizer.pad_token_id, args.seed, dtype)
    common.say(f"policy: {sum(p.numel() for p in policy.parameters()):,} parameters on {common.world_size()} rank(s)")
    run.start()
    models = {"policy": (policy, optimizer)}

    def evaluate(step: int) -> dict[str, float]:
        metrics = held_out_loss(policy, eval_rows, tokenizer.pad_token_id, device, args) if eval_rows else {}
        sampler.load_weights(policy)
        asked = [row for row in eval_rows if row["prompt_ids"]]
        limits = args.eval_samples, 1.0, args.max_response_length
        sampled, samples = common.evaluate(sampler, tokenizer, asked, args.eval_reward, *limits)
        run.log_samples(step, samples)
        return {**metrics, **sampled}

    state = run.restore(models) if run.checkpoint else {"before": evaluate(0)}

    # 4 loop
    for step in run.steps():
        began, metrics = time.time(), common.Metrics()
        learning_rate = learning_rate_at(step - 1, args)
        order = common.data_order(len(rows), args.seed, (step - 1) * args.batch_size, args.batch_size)
        batch = [rows[i] for i in common.own(order)]
        (num_tokens,) = common.all_sum(sum(sum(row["mask"]) for row in batch))

        # 4e update
        for micro in common.microbatches([len(row["mask"]) for row in batch], args.microbatch_tokens):
            mb = tensors([batch[i] for i in micro], tokenizer.pad_token_id, device)
            logprobs, entropy = common.token_logprobs(policy, *mb, with_entropy=True)  # (B, T)
            loss = sft_loss(logprobs, mb[2], num_tokens)
            loss.backward()
            metrics.add_masked("loss", -logprobs, mb[2])
            metrics.add_masked("entropy", entropy, mb[2])
        grad_norm = common.clip_gradients(policy, args.max_grad_norm)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate
        if math.isfinite(grad_norm):
            optimizer.step()
        metrics.add("skipped_updates", float(not math.isfinite(grad_norm)), 1)
        optimizer.zero_grad(set_to_none=True)

        # 4f log
        numbers = {"grad_norm": grad_norm, "learning_rate": learning_rate, "num_tokens": num_tokens}
        numbers |= {"seconds": time.time() - began, **metrics.reduce()}
        due = args.eval_every and step % args.eval_every == 0 and step < args.steps
        run.log(step, {**numbers, **(evaluate(step) if due else {})}, shown=("loss", "grad_norm"))

        # 4g evaluate and save
        if args.save_every and step % args.save_every == 0:
            run.save(step, models, state)
    run.finish(policy, tokenizer, state["before"], evaluate(run.step), dtype)


if __name__ == "__main__":
    main(common.parse_args(Args))
