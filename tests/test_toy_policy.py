"""The shipped checkpoint is what `python sft.py` makes: its first steps are the recorded ones, its result is theirs."""

import json
import re

import pytest
import torch

import common
import sft

RECORDED = common.ROOT / "benchmarks" / "results" / "sft_toy"


@pytest.fixture(scope="module")
def recorded():
    return [json.loads(line) for line in (RECORDED / "seed_1.jsonl").read_text().splitlines()]


def test_a_default_run_begins_as_recorded(recorded, tmp_path):
    # the schedule is that of the whole run: it is cut short by an error after three steps
    class Enough(Exception):
        pass

    def stop(_run, step, metrics, **_named):
        lines.append(metrics)
        if step == 3:
            raise Enough

    lines = []
    with pytest.MonkeyPatch.context() as patch, pytest.raises(Enough):
        patch.setattr(common.Run, "log", stop)
        sft.main(sft.Args(run_dir=str(tmp_path / "run"), eval_prompts=1, eval_samples=0))
    for line, before in zip(lines, recorded, strict=False):
        assert line["loss"] == pytest.approx(before["loss"], rel=1e-3)
        assert line["grad_norm"] == pytest.approx(before["grad_norm"], rel=1e-2)
        assert line["learning_rate"] == before["learning_rate"]


def test_the_shipped_policy_has_the_recorded_held_out_loss():
    args, device = sft.Args(), common.setup(1, threads=1)
    tokenizer = common.load_tokenizer("toy")
    policy = common.load_policy("toy", device, torch.float32, trained=False)
    rows = common.load_rows("toy", "test", "demonstrations")
    rows = sft.encode(rows, tokenizer, common.stop_ids(tokenizer, policy), args, "held-out rows")
    loss = sft.held_out_loss(policy, rows, tokenizer.pad_token_id, device, args)["eval/loss"]
    (recorded,) = re.findall(r"3\.052 → (\d\.\d+)", (RECORDED / "table.md").read_text())
    assert loss == pytest.approx(float(recorded), abs=6e-4)
