"""Tiny models and tokenizers, built in code: nothing is downloaded and nothing is read from disk."""

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    Cohere2Config,
    CohereConfig,
    Gemma2Config,
    Gemma3TextConfig,
    GPT2Config,
    GraniteConfig,
    LlamaConfig,
    PreTrainedTokenizerFast,
    Qwen3Config,
)

PAD, BOS, EOS = 0, 1, 2

# Each family treats hidden states or logits in its own way; the sliding windows are shorter than the tests' sequences.
ARCHITECTURES = {
    "qwen3_tied": (Qwen3Config, {"tie_word_embeddings": True, "head_dim": 8}),
    "llama_untied": (LlamaConfig, {"tie_word_embeddings": False}),
    "gemma2_softcap": (Gemma2Config, {"final_logit_softcapping": 2.0, "sliding_window": 4, "head_dim": 8}),
    "gemma3_softcap": (Gemma3TextConfig, {"final_logit_softcapping": 2.0, "sliding_window": 4, "head_dim": 8}),
    "cohere_scaled": (CohereConfig, {"logit_scale": 0.25}),
    "cohere2_scaled": (Cohere2Config, {"logit_scale": 0.25, "sliding_window": 4}),
    "granite_scaled": (GraniteConfig, {"logits_scaling": 3.0}),
    "gpt2_absolute": (GPT2Config, {"resid_pdrop": 0.5, "embd_pdrop": 0.5, "attn_pdrop": 0.5}),  # learned positions
}


def tiny_config(architecture: str, vocab_size: int = 40, **changes):
    """A configuration of two layers and hidden size 16."""
    cls, own = ARCHITECTURES[architecture]
    settings = {
        "vocab_size": vocab_size, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 128, "initializer_range": 0.5,
        "pad_token_id": PAD, "bos_token_id": BOS, "eos_token_id": EOS,
    }  # fmt: skip
    return cls(**{**settings, **own, **changes})


def tiny_model(architecture: str = "qwen3_tied", seed: int = 0, **changes) -> torch.nn.Module:
    """A causal language model in evaluation mode, its weights drawn with `seed`, all of them (norms and biases too)."""
    return _drawn(AutoModelForCausalLM.from_config(tiny_config(architecture, **changes)), seed)


def tiny_reward_model(architecture: str = "qwen3_tied", seed: int = 0, **changes) -> torch.nn.Module:
    """A sequence classifier with one label."""
    config = tiny_config(architecture, num_labels=1, **changes)
    return _drawn(AutoModelForSequenceClassification.from_config(config), seed)


def _drawn(model: torch.nn.Module, seed: int) -> torch.nn.Module:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.normal_(1.0, 0.2, generator=generator)
            else:
                parameter.normal_(0.0, 0.3, generator=generator)
    return model.eval()


# ------------------------------------------------------------------------------------------------------- tokenizers

SPECIAL = ["<pad>", "<bos>", "<eos>", "<u>", "</u>", "<a>", "</a>", "<end>"]
_TURNS = (
    "{%% for m in messages %%}"
    "{%% if m.role == 'assistant' %%}<a>{{ %s }}%s{%% else %%}<u>{{ m.content }}</u>{%% endif %%}"
    "{%% endfor %%}{%% if add_generation_prompt %%}<a>{%% endif %%}"
)
_STRIPPED = "m.content if loop.last else m.content.split('</think>')[-1]"
TEMPLATES = {
    "eos": _TURNS % ("m.content", "<eos>\n"),  # ends a turn in the EOS and goes on with a newline
    "bos": "{{ bos_token }}" + _TURNS % ("m.content", "<eos>"),
    "end": _TURNS % ("m.content", "<end>\n"),  # ends a turn in a second stop id
    "no stop": _TURNS % ("m.content", "</a>"),  # has no stop id
    "unstable": _TURNS % (_STRIPPED, "<eos>\n"),  # prints the thoughts of the last turn only
}


def byte_tokenizer(
    merges: tuple[tuple[str, str], ...] = (), bos: bool = False, pad: str | None = "<pad>", template: str | None = None
) -> PreTrainedTokenizerFast:
    """Bytes as tokens, with a few merges. Its first ids are those of SPECIAL; with `bos`, a plain call adds the BOS.

    `pad` is the pad token (`<eos>` for pad = EOS); `template` is a key of TEMPLATES or a Jinja template.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {t: i for i, t in enumerate([*SPECIAL, *alphabet, *(a + b for a, b in merges)])}
    core = Tokenizer(models.BPE(vocab=vocabulary, merges=list(merges)))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens(SPECIAL)
    if bos:
        core.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", BOS)])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, bos_token="<bos>" if bos else None, eos_token="<eos>", pad_token=pad
    )
    tokenizer.chat_template = TEMPLATES.get(template, template)
    return tokenizer
