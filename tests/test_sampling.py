"""Drawing responses, putting them into batches, and the order of rows."""

import itertools
import math
import random

import numpy as np
import pytest
import torch
from helpers import EOS, byte_tokenizer, tiny_model, tiny_reward_model

import common

CPU = torch.device("cpu")
NEVER = [10**6]  # a stop id outside every vocabulary
PROMPTS = [[5, 6, 7, 8, 9, 10, 11], [12], [13, 2, 14], [20, 21, 22, 23, 24, 25, 26, 27, 28, 29, 30], [31, 32]]


def sampler_of(model, stops=(EOS,), seed=1, pad_id=0):
    return common.HFSampler(model, list(stops), pad_id, seed, torch.float32)


def samples(result):
    """[(ids, log-probs, finished)] of what `generate` returned, without padding."""
    ids, lengths, finished, logprobs = result
    return [
        (row[:k], scores[:k], done)
        for row, scores, k, done in zip(
            ids.tolist(), logprobs.tolist(), lengths.tolist(), finished.tolist(), strict=True
        )
    ]


def ids_of(result):
    return [ids for ids, _, _ in samples(result)]


def same(left, right):
    """Equal ids and ends, log-probs equal up to rounding."""
    assert [(ids, done) for ids, _, done in left] == [(ids, done) for ids, _, done in right]
    for (_, a, _), (_, b, _) in zip(left, right, strict=True):
        assert a == pytest.approx(b, abs=1e-5)


def fits(counts, expected):
    """Whether counts agree with their expectations: chi-square within six standard deviations, rare cells pooled."""
    rare = expected < 5
    if rare.any():
        counts, expected = (torch.cat([x[~rare], x[rare].sum()[None]]) for x in (counts, expected))
    degrees = len(counts) - 1
    return ((counts - expected) ** 2 / expected).sum() < degrees + 6 * math.sqrt(2 * degrees)


# ---------------------------------------------------------------------------------------- what is drawn, and when


def test_the_same_seed_draws_the_same_and_seeds_streams_prompts_and_samples_differ(model):
    def draw(seed=1, **options):
        return ids_of(sampler_of(model, seed=seed).generate([[5, 6]] * 2, 3, 1.0, 12, **options))

    base = draw(stream="train/1")
    assert draw(stream="train/1") == base
    others = [draw(stream="train/1", seed=2), draw(stream="train/2"), draw(stream="train/1", indices=[5, 6])]
    everything = [tuple(ids) for run in [base, *others] for ids in run]
    assert len(everything) == 24 and len(set(everything)) == 24
    assert len({ids[0] for ids in everything}) > 5  # the first tokens differ too
    assert draw(stream="train/1", indices=[1, 0]) == base[3:] + base[:3]


def test_draws_are_independent_between_positions_samples_prompts_streams_and_seeds(model):
    with torch.no_grad():
        model.get_output_embeddings().weight.zero_()  # every token is equally likely
    runs = [
        sampler_of(model, NEVER, seed).generate([[5], [6, 7]], 4, 1.0, 60, stream=stream)[0]
        for seed in (1, 2)
        for stream in ("train/1", "train/2", "evaluate")
    ]
    table = torch.cat(runs)  # (48, 60)
    assert fits(torch.bincount(table.flatten(), minlength=40), torch.full((40,), table.numel() / 40))

    def rare(matches, trials):
        return abs(matches - trials / 40) < 6 * math.sqrt(trials / 40)

    pairs = list(itertools.combinations(range(48), 2))
    assert rare(sum((table[a] == table[b]).sum().item() for a, b in pairs), 60 * len(pairs))
    assert all((table[a] == table[b]).sum() < 15 for a, b in pairs)
    for lag in range(1, 50):
        repeated = table[:, lag:] == table[:, :-lag]
        assert rare(repeated.sum().item(), repeated.numel())


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.8])
def test_first_tokens_follow_the_softmax_at_the_temperature(temperature):
    model, n = tiny_model("gemma3_softcap"), 3000
    prompt = [5, 6, 7]
    ids, _, _, _ = sampler_of(model).generate([[9], prompt], n, temperature, 1, max_rows=n)
    with torch.no_grad():
        expected = n * (model(input_ids=torch.tensor([prompt])).logits[0, -1].double() / temperature).softmax(-1)
    assert fits(torch.bincount(ids[n:, 0], minlength=40), expected)


def test_whole_sequences_follow_the_policy_and_end_at_the_stop_id():
    model, n = tiny_model("llama_untied", vocab_size=6), 4000
    expected = {}
    with torch.no_grad():
        first = model(input_ids=torch.tensor([[5, 4]])).logits[0, -1].double().softmax(-1)
        for a in range(6):
            second = model(input_ids=torch.tensor([[5, 4, a]])).logits[0, -1].double().softmax(-1)
            expected |= {(a,): first[a]} if a == EOS else {(a, b): first[a] * second[b] for b in range(6)}
    drawn = ids_of(sampler_of(model).generate([[5, 4]], n, 1.0, 2))
    counts = {sequence: drawn.count(list(sequence)) for sequence in expected}
    assert sum(counts.values()) == n and len(counts) == 31
    assert fits(torch.tensor(list(counts.values())), n * torch.stack(list(expected.values())))


def test_samples_do_not_depend_on_what_else_is_in_the_batch(architecture):
    sampler = sampler_of(tiny_model(architecture), [2, 3, 4])
    whole = samples(sampler.generate(PROMPTS, 4, 1.0, 12, stream="s"))
    assert {True, False} == {done for _, _, done in whole}
    same(samples(sampler.generate(PROMPTS, 4, 1.0, 12, stream="s", max_rows=4)), whole)
    alone = [sampler.generate([p], 4, 1.0, 12, stream="s", indices=[i]) for i, p in enumerate(PROMPTS)]
    same([sample for result in alone for sample in samples(result)], whole)
    order = [3, 0, 4]
    some = sampler.generate([PROMPTS[i] for i in order], 4, 1.0, 12, stream="s", indices=order)
    same(samples(some), [whole[4 * i + k] for i in order for k in range(4)])
    fewer = sampler.generate(PROMPTS, 2, 1.0, 12, stream="s")
    same(samples(fewer), [whole[4 * i + k] for i in range(len(PROMPTS)) for k in range(2)])


@pytest.mark.parametrize("greedy", [False, True])
def test_sampled_log_probs_equal_those_of_the_trainer(architecture, greedy):
    model = tiny_model(architecture)
    prompts = [p for p in PROMPTS for _ in range(3)]
    ids, lengths, _, logprobs = sampler_of(model, [2, 3, 4]).generate(PROMPTS, 3, 0.7, 14, greedy=greedy)
    responses = [row[:k] for row, k in zip(ids.tolist(), lengths.tolist(), strict=True)]
    inputs = common.collate(prompts, responses, 0, CPU)
    with torch.no_grad():
        trainer = common.token_logprobs(model, *inputs, 0.7)
    torch.testing.assert_close(common.align(common.cut(logprobs, lengths), inputs[2]), trainer, rtol=1e-5, atol=1e-5)
    beyond = torch.arange(ids.shape[1]) >= lengths[:, None]
    assert logprobs.dtype == torch.float32 and (beyond.any() or greedy)
    assert not logprobs[beyond].any() and not ids[beyond].any()


def test_greedy_decoding_equals_that_of_transformers(architecture):
    model, stops = tiny_model(architecture), [2, 3, 17]
    ours = ids_of(sampler_of(model, stops).generate(PROMPTS, 1, 1.0, 14, greedy=True))
    for prompt, ids in zip(PROMPTS, ours, strict=True):
        tokens = torch.tensor([prompt])
        theirs = model.generate(
            tokens, attention_mask=torch.ones_like(tokens), do_sample=False, max_new_tokens=14, eos_token_id=stops
        )
        assert ids == theirs[0, len(prompt) :].tolist()


def test_greedy_decoding_uses_no_random_numbers(model):
    first = ids_of(sampler_of(model, seed=1).generate(PROMPTS, 2, 1.0, 10, greedy=True, stream="a"))
    assert ids_of(sampler_of(model, seed=2).generate(PROMPTS, 2, 0.3, 10, greedy=True, stream="b")) == first
    assert first[::2] == first[1::2]


@pytest.mark.parametrize("greedy", [False, True])
def test_temperature_zero_is_greedy(model, greedy):
    expected = samples(sampler_of(model).generate(PROMPTS, 1, 1.0, 10, greedy=True))
    same(samples(sampler_of(model).generate(PROMPTS, 1, 0.0, 10, greedy=greedy)), expected)


def test_defaults_of_the_models_generation_config_have_no_effect():
    plain, loaded = tiny_model(), tiny_model()
    config = {"top_k": 1, "top_p": 0.1, "temperature": 0.01, "repetition_penalty": 9.0, "do_sample": True}
    config |= {"max_new_tokens": 2, "min_new_tokens": 9, "bad_words_ids": [[5]], "num_beams": 3}
    loaded.generation_config.update(**config)
    for greedy in (False, True):
        runs = [samples(sampler_of(m).generate(PROMPTS, 3, 1.0, 12, greedy=greedy)) for m in (plain, loaded)]
        same(*runs)
    assert loaded.generation_config.top_k == 1


# -------------------------------------------------------------------------------------------------- how it ends


@pytest.mark.parametrize("pad_id", [0, EOS])
@pytest.mark.parametrize("greedy", [False, True])
def test_a_response_ends_in_its_first_stop_id_or_is_cut_without_one(model, pad_id, greedy):
    stops = [2, 3, 17]
    result = sampler_of(model, stops, pad_id=pad_id).generate(PROMPTS * 4, 4, 1.3, 9, greedy=greedy)
    ids, lengths, finished, _ = result
    assert finished.dtype == torch.bool and ids.shape[1] == lengths.max()
    for row, length, done in zip(ids.tolist(), lengths.tolist(), finished.tolist(), strict=True):
        assert (row[length - 1] in stops) == done and not set(row[: length - 1]) & set(stops)
        assert done or length == 9
        assert set(row[length:]) <= {pad_id}
    if not greedy:
        assert {row[-1] for row in ids_of(result)} >= set(stops) and not finished.all()
        assert ((lengths == 9) & finished).any()  # a stop id in the last place counts


def test_a_stop_id_at_once_is_a_response_of_one_token(model):
    ids, lengths, finished, logprobs = sampler_of(model, range(40)).generate(PROMPTS, 2, 1.0, 8)
    assert ids.shape == (10, 1) and lengths.tolist() == [1] * 10 and finished.all() and (logprobs < 0).all()


def test_one_token_at_most(model):
    ids, lengths, finished, _ = sampler_of(model).generate(PROMPTS, 40, 2.0, 1)
    assert ids.shape == (200, 1) and lengths.tolist() == [1] * 200
    assert torch.equal(finished, ids[:, 0] == EOS) and finished.any()


def test_a_cut_response_keeps_its_ids_and_gets_no_stop_id(model):
    ids, lengths, finished, _ = sampler_of(model, NEVER).generate([[5, 6]], 2, 1.0, 3)
    longer, _, _, _ = sampler_of(model, NEVER).generate([[5, 6]], 2, 1.0, 6)
    assert torch.equal(ids, longer[:, :3]) and lengths.tolist() == [3, 3] and not finished.any()


@pytest.mark.parametrize("greedy", [False, True])
def test_a_stop_id_inside_the_prompt_ends_nothing(model, greedy):
    ids, lengths, finished, _ = sampler_of(model, [2]).generate([[5, 2, 6], [2], [2, 2]], 4, 1.0, 4, greedy=greedy)
    assert (lengths > 1).any() and torch.equal(finished, (ids == 2).any(1))


def test_there_are_n_samples_of_each_prompt_in_the_prompts_order(model):
    ids, lengths, finished, logprobs = sampler_of(model).generate(PROMPTS[:2], 4, 1.0, 6)
    assert len(ids) == len(lengths) == len(finished) == len(logprobs) == 8
    for i, prompt in enumerate(PROMPTS[:2]):
        alone = sampler_of(model).generate([prompt], 4, 1.0, 6, indices=[i])
        assert (
            ids_of(alone)
            == [row[:k] for row, k in zip(ids[4 * i :].tolist(), lengths[4 * i :].tolist(), strict=True)][:4]
        )


def test_no_prompts_give_no_samples(model):
    ids, lengths, finished, logprobs = sampler_of(model).generate([], 4, 1.0, 6)
    assert [len(x) for x in (ids, lengths, finished, logprobs)] == [0] * 4 and finished.dtype == torch.bool


# ------------------------------------------------------------------------------------- what stays as it was


@pytest.mark.parametrize("name", ["qwen3_tied", "gemma3_softcap"])
def test_a_model_in_training_mode_with_gradient_checkpointing_samples_the_same_and_stays_in_it(name):
    expected = samples(sampler_of(tiny_model(name)).generate(PROMPTS, 3, 1.0, 12))
    model = tiny_model(name, attention_dropout=0.5).train()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    same(samples(sampler_of(model).generate(PROMPTS, 3, 1.0, 12)), expected)
    assert model.training and model.is_gradient_checkpointing and all(m.training for m in model.modules())


def test_a_failing_forward_pass_leaves_the_model_in_its_mode():
    model = tiny_model().train()
    with pytest.raises(IndexError):
        sampler_of(model).generate([[5, 999]], 1, 1.0, 4)
    assert model.training


def test_sampling_leaves_the_global_generators_the_prompts_and_the_weights_alone(model):
    prompts = [list(p) for p in PROMPTS]
    before = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    weights = {name: w.clone() for name, w in model.state_dict().items()}
    result = sampler_of(model).generate(prompts, 2, 1.0, 6)
    assert (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()) == before
    torch.manual_seed(99)
    assert ids_of(sampler_of(model).generate(prompts, 2, 1.0, 6)) == ids_of(result)
    assert prompts == PROMPTS and all(torch.equal(w, weights[name]) for name, w in model.state_dict().items())
    assert not result[3].requires_grad


def test_new_weights_are_used_at_once(model):
    sampler = sampler_of(model)
    before = ids_of(sampler.generate(PROMPTS, 1, 1.0, 8, greedy=True))
    with torch.no_grad():
        for p in model.model.layers[0].parameters():
            p.zero_()
    sampler.sleep()
    sampler.wake()
    sampler.load_weights(model)
    after = ids_of(sampler.generate(PROMPTS, 1, 1.0, 8, greedy=True))
    assert after == ids_of(sampler_of(model).generate(PROMPTS, 1, 1.0, 8, greedy=True)) != before


# ------------------------------------------------------------------------------------------------- batches


def test_pad_fills_up_on_either_side_and_keeps_the_type():
    rows = [[5, 6, 7], [8], []]
    before = [list(row) for row in rows]
    assert common.pad(rows, 9, CPU).tolist() == [[5, 6, 7], [8, 9, 9], [9, 9, 9]]
    assert common.pad(rows, 9, CPU, left=True).tolist() == [[5, 6, 7], [9, 9, 8], [9, 9, 9]]
    assert rows == before
    for fill, dtype in ((0, torch.int64), (0.0, torch.float32), (False, torch.bool)):
        assert common.pad([[], []], fill, CPU).dtype == common.pad([[fill]], fill, CPU).dtype == dtype
        assert common.pad([[], []], fill, CPU).shape == (2, 0)


def test_collate_puts_each_response_directly_after_its_prompt():
    ids, attention, response = common.collate([[5, 2, 6], [7]], [[8, 2], [9, 10, 11, 2]], 0, CPU)
    assert ids.tolist() == [[5, 2, 6, 8, 2], [7, 9, 10, 11, 2]]
    ids, attention, response = common.collate([[5, 2, 6], [7], [4]], [[8], [9, 2], []], EOS, CPU)
    assert ids.tolist() == [[5, 2, 6, 8], [7, 9, 2, 2], [4, 2, 2, 2]]
    assert attention.tolist() == [[1, 1, 1, 1], [1, 1, 1, 0], [1, 0, 0, 0]]
    assert response.dtype == torch.bool
    assert response.long().tolist() == [[0, 0, 0, 1], [0, 1, 1, 0], [0, 0, 0, 0]]


def test_align_puts_values_of_responses_of_unequal_length_at_their_tokens():
    lengths = torch.tensor([1, 3, 0])
    _, _, response = common.collate([[5, 2, 6], [7], [4]], [[8], [9, 2, 3], []], 0, CPU)
    values = torch.tensor([[0.5, 99, 99], [1, 2, 3], [99, 99, 99]])
    assert common.align(common.cut(values, lengths), response).tolist() == [[0, 0, 0, 0.5], [0, 1, 2, 3], [0, 0, 0, 0]]


LENGTHS = [[1, 9, 2], [5] * 7, [20], [1], [3, 1, 4, 1, 5, 9, 2, 6], []]


@pytest.mark.parametrize("budget", [1, 10, 16, 1000])
@pytest.mark.parametrize("lengths", LENGTHS)
def test_microbatches_hold_every_row_once_within_the_budget(lengths, budget):
    cut = common.microbatches(lengths, budget)
    assert sorted(i for rows in cut for i in rows) == list(range(len(lengths))) and all(cut)
    assert all(len(rows) == 1 or max(lengths[i] for i in rows) * len(rows) <= budget for rows in cut)
    if budget == 1000:
        assert len(cut) == bool(lengths)


def test_microbatches_put_rows_of_similar_length_together_and_the_longest_first():
    assert common.microbatches([1, 9, 2], 10) == [[1], [2, 0]]
    assert common.microbatches([2, 5, 2, 5, 2], 10) == [[1, 3], [0, 2, 4]]


def test_a_rank_with_short_rows_cuts_as_many_microbatches_as_the_others(monkeypatch):
    monkeypatch.setattr(common, "all_max", lambda value: max(value, 5.0))  # another rank needs five
    cut = common.microbatches([20] * 5, 100)
    assert sorted(cut) == [[0], [1], [2], [3], [4]]
    cut = common.microbatches([20] * 8, 100)
    assert len(cut) == 5 and all(cut) and sorted(i for rows in cut for i in rows) == list(range(8))


@pytest.mark.parametrize("budget", [1, 12, 25, 10**6])
def test_results_of_microbatches_return_to_their_rows(budget):
    pairs = [
        ([5], []),
        ([6, 7], [8, 9, 2, 3, 4, 5, 6]),
        ([9], [10]),
        (list(range(3, 15)), [20, 2]),
        ([30, 31], [32, 33]),
    ]
    model, judge = tiny_model(), tiny_reward_model()
    ids, attention, response = common.collate(*zip(*pairs, strict=True), 0, CPU)
    with torch.no_grad():
        expected = common.token_logprobs(model, ids, attention, response, 0.7)
    logprobs = common.batched_logprobs(model, ids, attention, response, 0.7, budget)
    torch.testing.assert_close(logprobs, expected, rtol=1e-5, atol=1e-5)
    assert not logprobs.requires_grad
    scores = common.batched_scores(judge, ids, attention, budget)
    torch.testing.assert_close(scores.float(), common.reward_scores(judge, ids, attention), rtol=1e-5, atol=1e-5)
    assert len(set(scores.tolist())) == len(pairs)


# -------------------------------------------------------------------------------------------- order of rows


def test_every_epoch_is_its_own_permutation_of_all_rows():
    epochs = [common.data_order(10, 1, 10 * epoch, 10) for epoch in range(5)]
    assert all(sorted(epoch) == list(range(10)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 5


@pytest.mark.parametrize(("size", "batch"), [(8, 2), (10, 4), (3, 7), (1, 2), (20, 20)])
def test_an_order_read_in_batches_and_begun_anywhere_is_the_same_stream(size, batch):
    steps = 4 * size // batch + 2
    whole = common.data_order(size, 5, 0, steps * batch)
    assert [i for step in range(steps) for i in common.data_order(size, 5, batch * step, batch)] == whole
    for resumed in range(steps):
        assert common.data_order(size, 5, batch * resumed, (steps - resumed) * batch) == whole[batch * resumed :]
    assert all(sorted(whole[i : i + size]) == list(range(size)) for i in range(0, len(whole) - size + 1, size))


def test_the_seed_and_nothing_else_decides_the_order():
    first = common.data_order(50, 1, 0, 100)
    torch.manual_seed(3)
    random.seed(3)
    assert common.data_order(50, 1, 0, 100) == first != common.data_order(50, 2, 0, 100)


# ----------------------------------------------------------------------------------------------- evaluation


@pytest.mark.parametrize("n", [1, 2, 5])
def test_pass_at_k_is_the_share_of_all_draws_of_k_with_a_right_one(n):
    for correct in range(n + 1):
        answers = [True] * correct + [False] * (n - correct)
        for k in range(1, n + 1):
            draws = list(itertools.combinations(answers, k))
            expected = sum(map(any, draws)) / len(draws)
            assert common.pass_at_k(n, correct, k) == pytest.approx(expected, abs=1e-12)


class Scripted:
    """A sampler whose answers are given: prompt -> (four sampled texts, the greedy one)."""

    stops = (EOS,)

    def __init__(self, tokenizer, answers):
        self.tokenizer, self.answers = tokenizer, answers

    def generate(self, prompt_ids, n, temperature, max_tokens, greedy=False, **_):  # noqa: ARG002
        texts = [self.answers[self.tokenizer.decode(p)] for p in prompt_ids]
        texts = [greedy_text for _, greedy_text in texts] if greedy else [t for sampled, _ in texts for t in sampled]
        assert len(texts) == n * len(prompt_ids)
        rows = [self.tokenizer(t).input_ids[:max_tokens] for t in texts]
        ids, lengths = common.pad(rows, 0, CPU), torch.tensor([len(row) for row in rows])
        return ids, lengths, torch.tensor([row[-1] == EOS for row in rows]), torch.zeros(ids.shape)


def test_evaluation_counts_right_answers_and_leaves_out_rows_without_a_readable_answer(tmp_path):
    (tmp_path / "judge.py").write_text(
        "def judge(prompts, completions, answer, **columns):\n"
        "    return [None if a == '?' else 1.5 if c == a else 0.9 for c, a in zip(completions, answer)]\n"
    )
    tokenizer = byte_tokenizer()
    answers = {
        "a": (["1<eos>", "0<eos>", "0<eos>", "0<eos>"], "1<eos>"),
        "b": (["1<eos>", "2<eos>", "2<eos>", "22222"], "1<eos>"),
        "c": (["9<eos>"] * 4, "9<eos>"),
    }
    rows = [{"prompt": p, "answer": a} for p, a in (("a", "1"), ("b", "2"), ("c", "?"))]
    rows = common.encode_prompts(tokenizer, rows, "prompt", 9)
    sampler = Scripted(tokenizer, answers)
    metrics, shown = common.evaluate(sampler, tokenizer, rows, f"{tmp_path}/judge.py:judge", 4, 1.0, 5)
    assert metrics["eval/sampled_accuracy"] == 3 / 8 and metrics["eval/greedy_accuracy"] == 0.5
    # Two of four: one right answer gives 1/2, two give 1 - 1/6.
    assert metrics["eval/pass@2"] == pytest.approx((1 / 2 + 5 / 6) / 2) and metrics["eval/pass@4"] == 1.0
    assert metrics["eval/mean_length"] == pytest.approx((11 * 2 + 5) / 12)
    assert metrics["eval/clipped_ratio"] == pytest.approx(1 / 12)
    assert [(s["prompt"], s["completion"]) for s in shown] == [("a", "1"), ("b", "1"), ("c", "9")]
    assert [s["reward"] for s in shown[:2]] == [1.5, 0.9]


def test_two_evaluations_of_one_policy_agree(tokenizer):
    model = tiny_model(vocab_size=len(tokenizer))
    rows = common.encode_prompts(tokenizer, [{"prompt": p, "answer": "3"} for p in ("1+2=", "12", "3=")], "prompt", 9)
    runs = []
    for _ in range(2):
        runs.append(common.evaluate(sampler_of(model), tokenizer, rows, "rewards.py:math_answer", 4, 1.0, 6))
        torch.rand(1)
    assert runs[0] == runs[1]
    assert set(runs[0][0]) >= {"eval/sampled_accuracy", "eval/greedy_accuracy", "eval/pass@4"}
