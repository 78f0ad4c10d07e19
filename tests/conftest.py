"""One thread (the same sums in the same order on every machine), and the project's root on the path."""

import os
import sys
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import pytest
import torch
from helpers import ARCHITECTURES, byte_tokenizer, tiny_model

torch.set_num_threads(1)


@pytest.fixture(params=ARCHITECTURES)
def architecture(request) -> str:
    """The name of each tiny architecture in turn, for helpers.tiny_model."""
    return request.param


@pytest.fixture
def model() -> torch.nn.Module:
    """A tiny Qwen3-shaped model."""
    return tiny_model()


@pytest.fixture
def tokenizer():
    """A tokenizer of bytes without BOS, with a chat template."""
    return byte_tokenizer(template="eos")


@pytest.fixture
def refused(capsys):
    """Call a function that must end the program with exit code 2 and one line on stderr; returns that line."""

    def call(function, *args, **kwargs) -> str:
        capsys.readouterr()
        with pytest.raises(SystemExit) as stopped:
            function(*args, **kwargs)
        message = capsys.readouterr().err
        assert stopped.value.code == 2
        assert message.startswith("error: ") and message.count("\n") == 1
        return message

    return call
