"""Losses, advantages and schedules of the scripts, against numbers worked out by hand and plain loops in float64."""

import math

import pytest
import torch

import grpo
import sft

NONE = math.nan  # a reward function that returned None


def rand(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def leaf(rows):
    return torch.tensor(rows, requires_grad=True)


def bools(rows):
    return torch.tensor(rows).bool()


# --------------------------------------------------------------------------------------------------------- sft_loss


@pytest.mark.parametrize(
    ("logprobs", "mask", "num_tokens", "loss"),
    [
        ([[0.0, -1, -2, -3]], [[0, 1, 1, 1]], None, 2.0),
        ([[0.0, -1, -2, -3], [0, -5, 0, 0]], [[0, 1, 1, 1], [0, 1, 0, 0]], None, 11 / 4),  # not the mean of 2 and 5
        ([[0.0, -1, -2, -3]], [[0, 1, 1, 1]], 12.0, 0.5),
        ([[0.0, -1, math.nan, -math.inf]], [[0, 1, 0, 0]], None, 1.0),
        ([[0.0, -1, -2, -3]], [[0, 0, 0, 0]], None, 0.0),
        ([[0.0, -1, -2, -3]], [[0, 0, 0, 0]], 0.0, 0.0),
    ],
)
def test_sft_loss_is_the_mean_over_the_trained_tokens_of_the_whole_minibatch(logprobs, mask, num_tokens, loss):
    logprobs, mask = leaf(logprobs), bools(mask)
    value = sft.sft_loss(logprobs, mask, num_tokens)
    value.backward()
    assert value.shape == () and value.item() == pytest.approx(loss, abs=1e-6)
    share = -1 / max(mask.sum().item() if num_tokens is None else num_tokens, 1)
    torch.testing.assert_close(logprobs.grad, torch.where(mask, share, 0.0))


# ------------------------------------------------------------------------------------------------- group_advantages


@pytest.mark.parametrize(
    ("rewards", "size", "scale", "expected"),
    [
        ([1, 0, 5, 4], 2, "group", [1, -1, 1, -1]),
        ([1, 0, 5, 4], 2, "batch", [0.242536, -0.242536, 0.242536, -0.242536]),
        ([1, 0, 5, 4], 2, "none", [0.5, -0.5, 0.5, -0.5]),
        ([1, 0, 0, 0], 4, "group", [1.732051, -0.577350, -0.577350, -0.577350]),  # population std
        ([1000.1, 1000.2, 1000.1, 1000.2], 4, "group", [-1, 1, -1, 1]),  # variance in two passes
        ([1e-6, 0.0], 2, "group", [0.980392, -0.980392]),  # 5e-7 / (5e-7 + 1e-8)
        ([1, NONE, 0], 3, "group", [1, 0, -1]),
        ([1, NONE, 0], 3, "none", [0.5, 0, -0.5]),
        ([1, NONE, 0, 5], 2, "batch", [0, 0, -1.157275, 1.157275]),  # std of (1, 0, 5): sqrt(14 / 3)
        ([NONE, NONE, 1, 0], 2, "group", [0, 0, 1, -1]),
        ([-1, -3, NONE], 3, "group", [1, -1, 0]),
    ],
)
def test_advantages_are_relative_to_the_scored_answers_of_the_group(rewards, size, scale, expected):
    rewards = torch.tensor(rewards, dtype=torch.float64)
    before = rewards.clone()
    advantages = grpo.group_advantages(rewards, size, scale)
    assert advantages.dtype == torch.float32
    torch.testing.assert_close(advantages, torch.tensor(expected, dtype=torch.float32), rtol=0, atol=1e-5)
    torch.testing.assert_close(rewards, before, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
@pytest.mark.parametrize(
    ("rewards", "size"),
    [
        ([1, 1, 1, 1], 4),
        ([0.1] * 6, 3),
        ([0.1] * 3 + [0.7] * 3, 3),
        ([0, 0], 2),
        ([NONE, 1], 2),
        ([NONE] * 2, 2),
        ([3, 5], 1),
    ],
)
def test_advantages_are_exactly_zero_where_the_rewards_of_a_group_are_equal(rewards, size, scale):
    rewards = torch.tensor(rewards, dtype=torch.float64)
    assert not grpo.group_advantages(rewards, size, scale).any()


def test_advantages_of_a_group_do_not_depend_on_the_other_groups_or_their_order():
    rewards = rand(12, seed=1)
    whole = grpo.group_advantages(rewards, 4)
    for i in range(0, 12, 4):
        assert torch.equal(grpo.group_advantages(rewards[i : i + 4], 4), whole[i : i + 4])
    turned = torch.cat([rewards[8:], rewards[:8]])
    assert torch.equal(grpo.group_advantages(turned, 4), torch.cat([whole[8:], whole[:8]]))
    order = torch.tensor([2, 0, 3, 1])
    torch.testing.assert_close(grpo.group_advantages(rewards[:4][order], 4), whole[:4][order])


def test_advantages_equal_a_plain_loop_on_random_rewards_with_gaps():
    rewards = rand(40, seed=2).double()
    rewards[::7] = math.nan
    expected = []
    for group in rewards.reshape(-1, 8).tolist():
        scored = [r for r in group if r == r]
        mean = sum(scored) / len(scored)
        std = math.sqrt(sum((r - mean) ** 2 for r in scored) / len(scored))
        expected += [(r - mean) / (std + 1e-8) if r == r else 0.0 for r in group]
    torch.testing.assert_close(grpo.group_advantages(rewards, 8), torch.tensor(expected), rtol=0, atol=1e-6)


@pytest.mark.parametrize(("size", "scale", "words"), [(3, "group", "4"), (2, "whole", "whole"), (2, "", "scale")])
def test_ragged_groups_and_unknown_scales_are_refused(size, scale, words):
    with pytest.raises(ValueError, match=words):
        grpo.group_advantages(torch.tensor([1.0, 0, 1, 0]), size, scale)


# ------------------------------------------------------------------------------------------------------ policy_loss


def policy_loss_by_definition(logprobs, old, advantages, mask, low, high, ref, beta, count=None):
    """(loss, gradient) of the mean over sequences of the mean over tokens, one number at a time in float64."""
    total, gradient = 0.0, torch.zeros(logprobs.shape)
    sequences = count or max(sum(any(row) for row in mask.tolist()), 1)
    for i, row in enumerate(mask.tolist()):
        for t in (t for t, trained in enumerate(row) if trained):
            new, before, a = logprobs[i, t].item(), old[i, t].item(), advantages[i].item()
            ratio = math.exp(new - before)
            bounded = min(max(ratio, 1 - low), 1 + high)
            objective, slope = (ratio * a, ratio * a) if ratio * a <= bounded * a else (bounded * a, 0.0)
            if beta:
                gap = ref[i, t].item() - new
                objective -= beta * (math.exp(gap) - 1 - gap)
                slope -= beta * (1 - math.exp(gap))
            total -= objective / sum(row) / sequences
            gradient[i, t] = -slope / sum(row) / sequences
    return total, gradient


def batch(rows, seed=0):
    """Random log-probs (policy, old, reference), advantages, and masks of every kind, the last row's empty."""
    logprobs, old, ref = (rand(rows, 7, seed=seed + i) * 0.3 - 1.5 for i in range(3))
    spans = [(1, 4), (2, 7), (6, 7), (3, 5), (1, 2), (2, 2)][-rows:] if rows > 1 else [(2, 5)]
    mask = torch.zeros(rows, 7, dtype=torch.bool)
    for i, (begin, end) in enumerate(spans):
        mask[i, begin:end] = True
    return logprobs, old, ref, 2 * rand(rows, seed=seed + 9), mask


@pytest.mark.parametrize("rows", [1, 2, 6])
@pytest.mark.parametrize(("low", "high", "beta"), [(0.2, 0.2, 0.04), (0.2, 0.28, 0.0), (0.05, 0.3, 0.5)])
def test_policy_loss_and_gradient_equal_the_definition(rows, low, high, beta):
    logprobs, old, ref, advantages, mask = batch(rows)
    before = [x.clone() for x in (old, ref, advantages, mask)]
    expected, gradient = policy_loss_by_definition(logprobs, old, advantages, mask, low, high, ref, beta)
    logprobs.requires_grad_()
    loss = grpo.policy_loss(logprobs, old, advantages, mask, low, high, ref if beta else None, beta)
    loss.backward()
    assert loss.shape == () and loss.item() == pytest.approx(expected, abs=1e-6)
    torch.testing.assert_close(logprobs.grad, gradient, rtol=0, atol=1e-6)
    assert all(torch.equal(a, b) for a, b in zip((old, ref, advantages, mask), before, strict=True))
    if rows == 6:
        ratio = (logprobs - old).exp()[mask]
        assert (ratio > 1 + high).any() and (ratio < 1 - low).any()  # both clips are met


@pytest.mark.parametrize("cut", [[[0], [1], [2], [3], [4], [5]], [[5, 0], [4, 1, 2], [3]], [[3, 1, 0, 2, 4, 5]]])
def test_the_cut_into_microbatches_does_not_change_the_gradient(cut):
    logprobs, old, ref, advantages, mask = batch(6)
    whole = logprobs.clone().requires_grad_()
    loss = grpo.policy_loss(whole, old, advantages, mask, 0.2, 0.2, ref, 0.04)
    loss.backward()
    parts, total = logprobs.clone().requires_grad_(), 0.0
    for rows in cut:
        piece = [x[rows] for x in (parts, old, advantages, mask)]
        piece_loss = grpo.policy_loss(*piece, 0.2, 0.2, ref[rows], 0.04, denominator=5.0)
        piece_loss.backward()
        total += piece_loss.item()
    assert total == pytest.approx(loss.item(), abs=1e-6)
    torch.testing.assert_close(parts.grad, whole.grad, rtol=0, atol=1e-6)


def test_policy_loss_is_the_mean_over_sequences_of_the_mean_over_tokens():
    logprobs, mask = torch.full((2, 4), -1.0), bools([[0, 1, 0, 0], [0, 1, 1, 1]])
    loss = grpo.policy_loss(logprobs, logprobs, torch.tensor([-1.0, 0.0]), mask)
    assert loss.item() == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("mask", "loss"),
    [([[0, 1, 1, 0, 0], [0, 1, 1, 1, 1]], 1.0), ([[0, 1, 1, 0, 0], [0] * 5], 1.0), ([[0] * 5, [0] * 5], 0.0)],
)
def test_a_sequence_that_is_masked_out_is_not_counted_either(mask, loss):
    logprobs, mask = leaf([[-1.0] * 5] * 2), bools(mask)
    value = grpo.policy_loss(logprobs, logprobs.detach(), torch.tensor([-1.0, -1.0]), mask)
    value.backward()
    assert value.item() == pytest.approx(loss)
    assert logprobs.grad.isfinite().all() and torch.equal(logprobs.grad != 0, mask)


@pytest.mark.parametrize(
    ("ratio", "advantage", "gradient"),
    [
        (1.5, 1.0, 0.0),
        (1.5, -1.0, 1.5),
        (0.5, -1.0, 0.0),
        (0.5, 1.0, -0.5),
        (1.1, 1.0, -1.1),
        (0.9, -1.0, 0.9),
        (1.0, 2.0, -2.0),
        (1.25, 1.0, -1.25),  # between 1 + 0.2 and 1 + clip_high
        (0.85, -1.0, 0.0),  # between 1 - clip_low and 1 - 0.2
    ],
)
def test_a_clipped_token_has_no_gradient_and_no_other_token_loses_its_own(ratio, advantage, gradient):
    logprobs = leaf([[0.0, -1.0]])
    old = logprobs.detach() - math.log(ratio)
    loss = grpo.policy_loss(logprobs, old, torch.tensor([advantage]), bools([[0, 1]]), clip_low=0.1, clip_high=0.3)
    loss.backward()
    torch.testing.assert_close(logprobs.grad, torch.tensor([[0.0, gradient]]), rtol=0, atol=1e-6)


def test_the_first_update_after_a_rollout_has_ratio_one_and_the_gradient_of_reinforce():
    logprobs = rand(2, 5, seed=4).requires_grad_()
    mask, advantages = bools([[0, 1, 1, 1, 1], [0, 0, 1, 1, 0]]), torch.tensor([0.5, -2.0])
    loss = grpo.policy_loss(logprobs, logprobs.detach(), advantages, mask)
    loss.backward()
    assert loss.item() == pytest.approx(0.75, abs=1e-6)  # minus the mean advantage
    expected = torch.tensor([[0, *[-0.5 / 8] * 4], [0, 0, 2 / 4, 2 / 4, 0]])
    torch.testing.assert_close(logprobs.grad, expected, rtol=0, atol=1e-6)


def test_equal_rewards_give_no_gradient():
    logprobs, old, _, _, mask = batch(6)
    logprobs.requires_grad_()
    advantages = grpo.group_advantages(torch.ones(6), 3)
    grpo.policy_loss(logprobs, old, advantages, mask).backward()
    assert not logprobs.grad.any()


@pytest.mark.parametrize("kl_coef", [0.0, 0.04])
@pytest.mark.parametrize("advantage", [-1.0, 1.0])
@pytest.mark.parametrize("log_ratio", [-1000.0, -100.0, 100.0, 1000.0])
def test_an_extreme_ratio_overflows_neither_the_loss_nor_its_gradient(log_ratio, advantage, kl_coef):
    old = torch.full((1, 2), -1.0)
    logprobs = (old + log_ratio).requires_grad_()
    loss = grpo.policy_loss(logprobs, old, torch.tensor([advantage]), bools([[0, 1]]), 0.2, 0.2, old, kl_coef)
    loss.backward()
    assert loss.isfinite() and logprobs.grad.isfinite().all()


def test_kl_to_the_reference_is_added_to_the_loss():
    logprobs, ref, mask = leaf([[0.0, -1.0]]), torch.tensor([[0.0, -2.0]]), bools([[0, 1]])
    loss = grpo.policy_loss(logprobs, logprobs.detach(), torch.zeros(1), mask, ref_logprobs=ref, kl_coef=0.1)
    assert loss.item() == pytest.approx(0.036788, abs=1e-6)


def test_a_step_on_the_kl_alone_brings_the_policy_closer_to_the_reference():
    logits, reference = rand(6, seed=1).requires_grad_(), rand(6, seed=2).log_softmax(-1)

    def kl():
        policy = logits.detach().log_softmax(-1)
        return (policy.exp() * (policy - reference)).sum().item()

    tokens = torch.multinomial(logits.detach().softmax(-1), 4000, True, generator=torch.Generator().manual_seed(0))
    logprobs = logits.log_softmax(-1)[tokens][:, None]  # (B, 1)
    mask, ref_logprobs = torch.ones_like(logprobs).bool(), reference[tokens][:, None]
    loss = grpo.policy_loss(
        logprobs, logprobs.detach(), torch.zeros(4000), mask, ref_logprobs=ref_logprobs, kl_coef=0.1
    )
    loss.backward()
    before = kl()
    with torch.no_grad():
        logits -= 0.5 * logits.grad
    assert 0 < kl() < before


# ------------------------------------------------------------------------------------------------- learning_rate_at

SCRIPTS = [sft, grpo]


def schedule(script, steps, shape, warmup=0, peak=1.0):
    args = script.Args(steps=steps, lr_schedule=shape, warmup_steps=warmup, learning_rate=peak)
    return [script.learning_rate_at(step, args) for step in range(steps)]


@pytest.mark.parametrize("script", SCRIPTS)
def test_linear_falls_to_zero_after_the_last_step_and_not_before(script):
    assert schedule(script, 10, "linear") == pytest.approx([1 - k / 10 for k in range(10)])


@pytest.mark.parametrize("script", SCRIPTS)
def test_cosine_is_half_way_in_the_middle(script):
    rates = schedule(script, 10, "cosine")
    assert rates[0] == 1 and rates[5] == pytest.approx(0.5) and 0 < rates[9] < 0.03
    assert rates == sorted(rates, reverse=True)
    assert [a + b for a, b in zip(rates[1:], rates[:0:-1], strict=True)] == pytest.approx([1.0] * 9)


@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.parametrize("shape", ["constant", "linear", "cosine"])
def test_a_single_step_without_warm_up_uses_the_whole_rate(script, shape):
    assert schedule(script, 1, shape, peak=3e-4) == [3e-4]
    assert schedule(script, 3, "constant", peak=3e-4) == [3e-4] * 3


@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.parametrize("shape", ["constant", "linear", "cosine"])
def test_warm_up_rises_in_equal_steps_from_above_zero_to_the_peak(script, shape):
    rates = schedule(script, 12, shape, warmup=4, peak=2.0)
    assert rates[:5] == pytest.approx([0.4, 0.8, 1.2, 1.6, 2.0])
    assert rates[4:] == pytest.approx(schedule(script, 8, shape, peak=2.0))
    assert all(rate > 0 for rate in schedule(script, 4, shape, warmup=4))
