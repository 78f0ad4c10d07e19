"""Advantages and losses without a critic: numbers worked out by hand, plain loops in float64, exact expected gradients.

The expected gradients are those of a softmax policy that is small enough to list all its answers.
"""

import itertools
import math

import pytest
import torch
from torch.autograd.functional import jacobian

import common
import grpo
import rloo_remax
from grpo import VARIANTS

NONE = math.nan  # a reward function that returned None


def rand(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def doubles(rows):
    return torch.tensor(rows, dtype=torch.float64)


def bools(rows):
    return torch.tensor(rows).bool()


def close(ours, expected, atol=1e-6):
    torch.testing.assert_close(ours.double(), torch.as_tensor(expected).double(), rtol=1e-5, atol=atol)


def batch(rows, seed=0):
    """Random log-probs (policy, old, reference), and masks of every kind, the last row's empty."""
    logprobs, old, ref = (rand(rows, 7, seed=seed + i) * 0.3 - 1.5 for i in range(3))
    spans = [(1, 4), (2, 7), (6, 7), (3, 5), (1, 2), (2, 2)][-rows:] if rows > 1 else [(2, 5)]
    mask = torch.zeros(rows, 7, dtype=torch.bool)
    for i, (begin, end) in enumerate(spans):
        mask[i, begin:end] = True
    return logprobs, old, ref, mask


def value_and_gradient(loss, logprobs, *rest, **named):
    """A loss as a number, and its gradient in the log-probs."""
    logprobs = logprobs.clone().requires_grad_()
    value = loss(logprobs, *rest, **named)
    assert value.shape == ()
    value.backward()
    return value.item(), logprobs.grad


CUTS = [[[0], [1], [2], [3], [4], [5]], [[5, 0], [4, 1, 2], [3]], [[3, 1, 0, 2, 4, 5]]]


# --------------------------------------------------------------------------------------------- baselines of rloo_remax


@pytest.mark.parametrize(
    ("rewards", "size", "expected"),
    [
        ([1, 0, 0, 0], 4, [1, -1 / 3, -1 / 3, -1 / 3]),
        ([1, 0, 5, 4], 2, [1, -1, 1, -1]),
        ([1, 0, 5, 3, 3, 3], 3, [-1.5, -3, 4.5, 0, 0, 0]),
        ([1, NONE, 0], 3, [1, 0, -1]),
        ([1, NONE, 0, 0.5], 4, [0.75, 0, -0.75, 0]),
        ([NONE, 2, 4, 1], 2, [0, 0, 3, -3]),  # alone in its group: nothing to compare with
        ([NONE, NONE, NONE], 3, [0, 0, 0]),
        ([-1e6, 1e6], 2, [-2e6, 2e6]),
    ],
)
def test_leave_one_out_compares_with_the_other_scored_answers(rewards, size, expected):
    rewards = doubles(rewards)
    before = rewards.clone()
    advantages = rloo_remax.rloo_advantages(rewards, size)
    assert advantages.dtype == torch.float32
    close(advantages, expected)
    torch.testing.assert_close(rewards, before, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("size", [2, 3, 4, 8])
def test_leave_one_out_is_the_distance_from_the_mean_times_k_over_k_minus_one(size):
    rewards = rand(24, seed=size).double()
    by_loop = []
    for group in rewards.reshape(-1, size).tolist():
        by_loop += [r - (sum(group) - r) / (size - 1) for r in group]
    ours = rloo_remax.rloo_advantages(rewards, size)
    close(ours, by_loop)
    close(ours, size / (size - 1) * rloo_remax.mean_advantages(rewards, size))
    close(ours, size / (size - 1) * grpo.group_advantages(rewards, size, "none"))


@pytest.mark.parametrize(("count", "size"), [(4, 1), (1, 1), (4, 3)])
def test_leave_one_out_refuses_groups_of_one_and_ragged_groups(count, size):
    with pytest.raises(ValueError, match=f"{count}.*{size}"):
        rloo_remax.rloo_advantages(torch.ones(count), size)


@pytest.mark.parametrize(
    ("rewards", "greedy", "expected"),
    [
        ([1, 0], [1], [0, -1]),
        ([1, 0, 5, 4, 2, 2], [1, 4, 0], [0, -1, 1, 0, 2, 2]),  # prompt-major
        ([3], [1], [2]),
        ([1, NONE, 2, 3], [0, 1], [1, 0, 1, 2]),
        ([1, 2, 3, 4], [NONE, 1], [0, 0, 2, 3]),
        ([0.1, 0.3], [0.1], [0, 0.2]),
    ],
)
def test_remax_compares_with_the_greedy_answer_of_the_prompt(rewards, greedy, expected):
    rewards, greedy = doubles(rewards), doubles(greedy)
    advantages = rloo_remax.remax_advantages(rewards, greedy)
    assert advantages.dtype == torch.float32
    close(advantages, expected)
    assert (rewards.isnan().sum() + greedy.isnan().sum()).item() in (0, 1)  # the arguments are as they were


@pytest.mark.parametrize(
    ("rewards", "size", "expected"),
    [
        ([1, 0, 0, 0], 4, [0.75, -0.25, -0.25, -0.25]),
        ([1, 0, 5, 4], 2, [0.5, -0.5, 0.5, -0.5]),
        ([1, NONE, 0], 3, [0.5, 0, -0.5]),
        ([NONE, 2], 2, [0, 0]),
        ([NONE, NONE], 2, [0, 0]),
    ],
)
def test_the_mean_baseline_includes_the_answer_itself(rewards, size, expected):
    close(rloo_remax.mean_advantages(doubles(rewards), size), expected)


# ---------------------------------------------------------------------------------------------------- reinforce++


def whitened_returns_by_definition(rewards, kl, mask, kl_coef):
    """R - beta sum_{i >= t} kl_i, then (x - mean) / sqrt(sample variance + 1e-8), one number at a time in float64."""
    returns = {}
    for i, row in enumerate(mask.tolist()):
        for t in (t for t, trained in enumerate(row) if trained):
            to_come = sum(kl[i, u].item() for u in range(t, len(row)) if row[u])
            returns[i, t] = rewards[i].item() - kl_coef * to_come
    mean = sum(returns.values()) / max(len(returns), 1)
    variance = sum((x - mean) ** 2 for x in returns.values()) / max(len(returns) - 1, 1)
    out = torch.zeros(mask.shape, dtype=torch.float64)
    for place, x in returns.items():
        out[place] = (x - mean) / math.sqrt(variance + 1e-8)
    return out


@pytest.mark.parametrize("rows", [1, 2, 6])
@pytest.mark.parametrize("kl_coef", [0.04, 1.0])
def test_reinforce_pp_is_the_whitened_return_to_go(rows, kl_coef):
    kl, _, _, mask = batch(rows)
    rewards = rand(rows, seed=3)
    before = kl.clone()
    ours = rloo_remax.reinforce_pp_advantages(rewards, kl, mask, kl_coef)
    assert ours.dtype == torch.float32 and ours.shape == mask.shape
    close(ours, whitened_returns_by_definition(rewards, kl, mask, kl_coef), atol=1e-5)
    assert torch.equal(kl, before) and not ours[~mask].any()


def test_reinforce_pp_takes_from_each_token_the_kl_that_is_still_to_come():
    """Score 1, KL (0.1, 0.2), coefficient 0.5: returns 0.85 and 0.9; the other answer's is 0."""
    rewards, mask = torch.tensor([1.0, 0.0]), bools([[0, 1, 1], [0, 1, 0]])
    kl = torch.tensor([[9.0, 0.1, 0.2], [9.0, 0.0, 9.0]])
    ours = rloo_remax.reinforce_pp_advantages(rewards, kl, mask, 0.5)
    first, second, zero = ours[mask].tolist()
    assert (first - zero) / (second - zero) == pytest.approx(0.85 / 0.9, abs=1e-6)
    assert first + second + zero == pytest.approx(0.0, abs=1e-6)
    assert first**2 + second**2 + zero**2 == pytest.approx(2.0, abs=1e-5)  # sample variance 1 over three tokens


def test_reinforce_pp_leaves_out_what_is_masked():
    """A row that was not scored has an empty mask; its NaN reaches nobody, nor does what lies outside a mask."""
    rewards, mask = torch.tensor([1.0, NONE, 0.0]), bools([[0, 1, 1, 0], [0, 0, 0, 0], [0, 1, 0, 0]])
    kl = torch.tensor([[NONE, 0.1, 0.2, NONE], [NONE] * 4, [NONE, 0.3, math.inf, NONE]])
    ours = rloo_remax.reinforce_pp_advantages(rewards, kl, mask, 0.5)
    assert ours.isfinite().all() and not ours[~mask].any()
    kept_kl, kept_mask = kl[[0, 2], 1:3], mask[[0, 2], 1:3]
    close(ours[[0, 2], 1:3], rloo_remax.reinforce_pp_advantages(rewards[[0, 2]], kept_kl, kept_mask, 0.5))


@pytest.mark.parametrize("mask", [[[0, 1, 1], [0, 1, 0]], [[0, 0, 0], [0, 0, 0]], [[0, 0, 0], [0, 1, 0]]])
def test_reinforce_pp_is_exactly_zero_where_all_returns_are_equal(mask):
    ours = rloo_remax.reinforce_pp_advantages(torch.full((2,), 0.1), torch.zeros(2, 3), bools(mask), 0.5)
    assert not ours.any()


# -------------------------------------------------------------------------------------------------- reinforce_loss


def reinforce_by_definition(logprobs, advantages, mask, count=None):
    sequences = count or max(sum(any(row) for row in mask.tolist()), 1)
    total, gradient = 0.0, torch.zeros(mask.shape, dtype=torch.float64)
    for i, row in enumerate(mask.tolist()):
        for t in (t for t, trained in enumerate(row) if trained):
            total -= advantages[i].item() * logprobs[i, t].item() / sequences
            gradient[i, t] = -advantages[i].item() / sequences
    return total, gradient


@pytest.mark.parametrize("count", [None, 11.0])
@pytest.mark.parametrize("rows", [1, 2, 6])
def test_reinforce_loss_and_gradient_equal_the_definition(rows, count):
    logprobs, _, _, mask = batch(rows)
    advantages = rand(rows, seed=9)
    expected, gradient = reinforce_by_definition(logprobs, advantages, mask, count)
    value, ours = value_and_gradient(rloo_remax.reinforce_loss, logprobs, advantages, mask, count)
    assert value == pytest.approx(expected, rel=1e-5, abs=1e-6)
    close(ours, gradient)


def test_reinforce_takes_the_log_prob_of_the_whole_answer():
    """Sum over tokens, mean over answers: a mean over tokens would give 0.5 and 0.75."""
    logprobs, mask = torch.full((2, 4), -1.0), bools([[0, 1, 0, 0], [0, 1, 1, 1]])
    value, gradient = value_and_gradient(rloo_remax.reinforce_loss, logprobs, torch.tensor([1.0, 1.0]), mask)
    assert value == pytest.approx(2.0)
    close(gradient, torch.where(mask, -0.5, 0.0))


@pytest.mark.parametrize("cut", CUTS)
def test_the_cut_does_not_change_the_gradient_of_reinforce(cut):
    logprobs, _, _, mask = batch(6)
    advantages = rand(6, seed=9)
    whole, gradient = value_and_gradient(rloo_remax.reinforce_loss, logprobs, advantages, mask)
    parts = [
        value_and_gradient(rloo_remax.reinforce_loss, logprobs[rows], advantages[rows], mask[rows], 5.0) for rows in cut
    ]
    assert sum(value for value, _ in parts) == pytest.approx(whole, rel=1e-5, abs=1e-6)
    for rows, (_, part) in zip(cut, parts, strict=True):
        close(part, gradient[rows])


@pytest.mark.parametrize("count", [None, 0.0])
def test_reinforce_without_a_trained_token_is_zero(count):
    logprobs = torch.tensor([[0.0, NONE, -math.inf]])
    value, gradient = value_and_gradient(rloo_remax.reinforce_loss, logprobs, torch.ones(1), bools([[0, 0, 0]]), count)
    assert value == 0.0 and not gradient.any()


# ---------------------------------------------------------------------------------------------------- clipped_loss


def clipped_by_definition(logprobs, old, advantages, mask, low, high, count=None):
    tokens = count or max(int(mask.sum()), 1)
    total, gradient = 0.0, torch.zeros(mask.shape, dtype=torch.float64)
    for i, t in mask.nonzero().tolist():
        ratio, a = math.exp(logprobs[i, t].item() - old[i, t].item()), advantages[i, t].item()
        bounded = min(max(ratio, 1 - low), 1 + high)
        total -= min(ratio * a, bounded * a) / tokens
        gradient[i, t] = -ratio * a / tokens if ratio * a <= bounded * a else 0.0
    return total, gradient


@pytest.mark.parametrize("count", [None, 29.0])
@pytest.mark.parametrize("rows", [1, 2, 6])
@pytest.mark.parametrize(("low", "high"), [(0.2, 0.2), (0.05, 0.3)])
def test_clipped_loss_and_gradient_equal_the_definition(rows, low, high, count):
    logprobs, old, _, mask = batch(rows)
    advantages = rand(rows, 7, seed=9)
    expected, gradient = clipped_by_definition(logprobs, old, advantages, mask, low, high, count)
    value, ours = value_and_gradient(rloo_remax.clipped_loss, logprobs, old, advantages, mask, low, high, count)
    assert value == pytest.approx(expected, rel=1e-5, abs=1e-6)
    close(ours, gradient)
    if rows == 6 and low < 0.1:
        assert (gradient[mask] == 0).any() and (gradient[mask] != 0).any()  # the clip is met


@pytest.mark.parametrize(
    ("ratio", "advantage", "gradient"),
    [
        (1.5, 1.0, 0.0),
        (1.5, -1.0, 1.5),
        (0.5, -1.0, 0.0),
        (0.5, 1.0, -0.5),
        (1.25, 1.0, -1.25),  # between 1 + 0.2 and 1 + clip_high
        (0.85, -1.0, 0.0),  # between 1 - clip_low and 1 - 0.2
        (1.0, 2.0, -2.0),
    ],
)
def test_a_clipped_token_of_reinforce_pp_has_no_gradient_and_its_neighbour_keeps_its_own(ratio, advantage, gradient):
    logprobs = torch.tensor([[0.0, -1.0, -1.0]])
    old = logprobs - torch.tensor([[0.0, math.log(ratio), 0.0]])
    advantages, mask = torch.tensor([[9.0, advantage, 1.0]]), bools([[0, 1, 1]])
    _, ours = value_and_gradient(rloo_remax.clipped_loss, logprobs, old, advantages, mask, 0.1, 0.3)
    close(ours, [[0.0, gradient / 2, -0.5]])


@pytest.mark.parametrize("cut", CUTS)
def test_the_cut_does_not_change_the_gradient_of_reinforce_pp(cut):
    logprobs, old, _, mask = batch(6)
    advantages, tokens = rand(6, 7, seed=9), float(mask.sum())
    whole, gradient = value_and_gradient(rloo_remax.clipped_loss, logprobs, old, advantages, mask)
    total = 0.0
    for rows in cut:
        pieces = [x[rows] for x in (logprobs, old, advantages, mask)]
        value, part = value_and_gradient(rloo_remax.clipped_loss, *pieces, num_tokens=tokens)
        total += value
        close(part, gradient[rows])
    assert total == pytest.approx(whole, rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("advantage", [-1.0, 1.0])
@pytest.mark.parametrize("log_ratio", [-1000.0, -100.0, 100.0, 1000.0])
def test_an_extreme_ratio_overflows_neither_reinforce_pp_nor_its_gradient(log_ratio, advantage):
    old = torch.full((1, 2), -1.0)
    advantages = torch.tensor([[0.0, advantage]])
    value, gradient = value_and_gradient(rloo_remax.clipped_loss, old + log_ratio, old, advantages, bools([[0, 1]]))
    assert math.isfinite(value) and gradient.isfinite().all()


# ----------------------------------------------------------------------------------------------- exact expectations


def every_answer(vocabulary: int, longest: int, eos: int | None) -> list[tuple[int, ...]]:
    """All answers over the tokens 0 .. vocabulary - 1 that end in `eos` or after `longest` tokens."""
    answers, begun = [], [()]
    for length in range(1, longest + 1):
        grown = [(*prefix, token) for prefix in begun for token in range(vocabulary)]
        answers += [y for y in grown if y[-1] == eos or length == longest]
        begun = [y for y in grown if y[-1] != eos]
    return answers


class Enumerated:
    """A softmax policy with logits of its own after each prefix, in float64. N answers, T places, D logits in all."""

    def __init__(self, longest: int, eos: int | None = None, vocabulary: int = 3, seed: int = 0):
        self.answers = every_answer(vocabulary, longest, eos)
        self.prefixes = sorted({y[:t] for y in self.answers for t in range(len(y))})
        shape = len(self.answers), 1 + longest  # the prompt is one token
        self.mask = torch.zeros(shape, dtype=torch.bool)  # (N, T)
        self.state, self.token = torch.zeros(shape, dtype=torch.long), torch.zeros(shape, dtype=torch.long)
        for i, y in enumerate(self.answers):
            for t, token in enumerate(y):
                self.mask[i, 1 + t], self.token[i, 1 + t] = True, token
                self.state[i, 1 + t] = self.prefixes.index(y[:t])
        self.logits = rand(len(self.prefixes), vocabulary, seed=seed).double()
        self.logprobs = self.logprobs_under(self.logits)  # (N, T)
        self.jacobian = jacobian(self.logprobs_under, self.logits).flatten(2)  # (N, T, D)
        self.chances = self.logprobs.sum(1).exp()  # (N,)

    def logprobs_under(self, logits):
        return torch.where(self.mask, logits.log_softmax(-1)[self.state, self.token], 0.0)

    def policy_gradient(self, rewards):
        """sum_y pi(y) R(y) grad log pi(y), (D,)."""
        return (self.chances * rewards) @ self.jacobian.sum(1)

    def greedy(self) -> int:
        """The number of the answer that takes the likeliest token every time."""
        y = ()
        while y not in self.answers:
            y = (*y, self.logits[self.prefixes.index(y)].argmax().item())
        return self.answers.index(y)

    def draw(self, groups: int, size: int, seed: int = 0):
        """Numbers of sampled answers, (groups, size)."""
        generator = torch.Generator().manual_seed(seed)
        return torch.multinomial(self.chances, groups * size, True, generator=generator).reshape(groups, size)

    def all_groups(self, size: int):
        """Every group of `size` answers in order, (N^size, size), and its chance."""
        groups = torch.tensor(list(itertools.product(range(len(self.answers)), repeat=size)))
        return groups, self.chances[groups].prod(1)

    def ascent(self, groups, loss):
        """(P, D): each group's part of the direction -grad loss; their mean is that of the whole batch.

        `loss` takes log-probs (B, T) and their mask, prompt-major, and is a mean over sequences or a multiple of it.
        """
        drawn = groups.flatten()
        _, gradient = value_and_gradient(loss, self.logprobs[drawn], self.mask[drawn])  # (B, T)
        parts = -len(drawn) * torch.einsum("bt,btd->bd", gradient, self.jacobian[drawn])
        return parts.reshape(*groups.shape, -1).mean(1)


def within_four_standard_errors(parts, expected) -> bool:
    error = parts.std(0) / math.sqrt(len(parts))
    return bool(((parts.mean(0) - expected).abs() <= 4 * error).all())


@pytest.fixture(scope="module")
def ending():
    """15 answers of one to three tokens, some cut before their EOS."""
    return Enumerated(longest=3, eos=2)


@pytest.fixture(scope="module")
def fixed_length():
    """9 answers of two tokens."""
    return Enumerated(longest=2, seed=1)


def rewards_of(policy):
    """A reward for each answer, far from 0 on average, so that a baseline matters."""
    return 1.0 + rand(len(policy.answers), seed=5).double()


def test_the_enumerated_policy_is_one(ending, fixed_length):
    assert (len(ending.answers), len(fixed_length.answers)) == (15, 9)
    assert {len(y) for y in ending.answers} == {1, 2, 3} and {len(y) for y in fixed_length.answers} == {2}
    for policy in (ending, fixed_length):
        assert policy.chances.sum().item() == pytest.approx(1.0) and policy.chances.min() > 1e-4
        logits = policy.logits.clone().requires_grad_()
        (policy.logprobs_under(logits).sum(1).exp() * rewards_of(policy)).sum().backward()
        close(policy.policy_gradient(rewards_of(policy)), logits.grad.flatten(), atol=1e-12)


def advantages_of(baseline, policy, rewards, groups):
    """Through the functions of rloo_remax.py, prompt-major."""
    drawn = rewards[groups].flatten()
    if baseline == "rloo":
        return rloo_remax.rloo_advantages(drawn, groups.shape[1])
    if baseline == "mean":
        return rloo_remax.mean_advantages(drawn, groups.shape[1])
    if baseline == "remax":
        return rloo_remax.remax_advantages(drawn, rewards[policy.greedy()].expand(len(groups)))
    return drawn.float()


def reinforce_ascent(baseline, policy, rewards, groups):
    advantages = advantages_of(baseline, policy, rewards, groups)
    return policy.ascent(groups, lambda logprobs, mask: rloo_remax.reinforce_loss(logprobs, advantages, mask))


BASELINES = ["rloo", "remax", "none"]


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("baseline", BASELINES)
def test_the_mean_gradient_over_many_draws_is_the_policy_gradient(ending, baseline, size):
    rewards = rewards_of(ending)
    exact = ending.policy_gradient(rewards)
    parts = reinforce_ascent(baseline, ending, rewards, ending.draw(8000, size))
    assert within_four_standard_errors(parts, exact)
    assert not within_four_standard_errors(parts, 0.75 * exact)  # the draws are enough to tell


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("baseline", BASELINES)
def test_the_expected_gradient_is_the_policy_gradient(ending, baseline, size):
    """Over every group that can be drawn, with its chance: no standard error is left."""
    if (baseline, size) == ("rloo", 1):
        with pytest.raises(ValueError):
            reinforce_ascent(baseline, ending, rewards_of(ending), ending.all_groups(1)[0])
        return
    rewards = rewards_of(ending)
    groups, chances = ending.all_groups(size)
    expected = chances @ reinforce_ascent(baseline, ending, rewards, groups)
    close(expected, ending.policy_gradient(rewards))


@pytest.mark.parametrize("size", [2, 3])
def test_the_mean_baseline_shrinks_the_gradient_by_k_minus_one_over_k(ending, size):
    rewards = rewards_of(ending)
    exact = ending.policy_gradient(rewards)
    groups, chances = ending.all_groups(size)
    close(chances @ reinforce_ascent("mean", ending, rewards, groups), (size - 1) / size * exact)
    parts = reinforce_ascent("mean", ending, rewards, ending.draw(8000, size))
    assert within_four_standard_errors(parts, (size - 1) / size * exact)
    assert not within_four_standard_errors(parts, exact)


def test_a_baseline_lowers_the_variance(ending):
    rewards = 3.0 + rewards_of(ending)
    groups = ending.draw(4000, 4)
    noise = {b: reinforce_ascent(b, ending, rewards, groups).var(0).sum().item() for b in BASELINES}
    assert noise["rloo"] < noise["none"] / 2 and noise["remax"] < noise["none"] / 2


@pytest.mark.parametrize("baseline", BASELINES)
def test_with_the_kl_in_the_reward_it_is_the_gradient_of_reward_minus_kl(ending, baseline):
    """d/d theta of sum_y pi(y) (R(y) - beta log pi(y) / pi_ref(y)), the KL's own slope included."""
    rewards, beta = rewards_of(ending), 0.3
    ref_logprobs = Enumerated(longest=3, eos=2, seed=7).logprobs
    logits = ending.logits.clone().requires_grad_()
    of_answer = ending.logprobs_under(logits).sum(1)
    (of_answer.exp() * (rewards - beta * (of_answer - ref_logprobs.sum(1)))).sum().backward()
    penalised = rewards - beta * common.kl_estimate(ending.logprobs, ref_logprobs, "k1").sum(1).double()
    groups, chances = ending.all_groups(2)
    close(chances @ reinforce_ascent(baseline, ending, penalised, groups), logits.grad.flatten())
    assert not torch.allclose(logits.grad.flatten(), ending.policy_gradient(rewards), atol=1e-2)


def variant_ascent(variant, policy, rewards, groups, **by_hand):
    """On policy, through group_advantages, loss_denominator and policy_loss of grpo.py with a variant's switches."""
    longest = policy.mask.shape[1] - 1
    args = grpo.Args(variant=variant, max_response_length=longest, kl_coef=0.0, overlong_buffer=0, **by_hand)
    grpo.resolve_variant(args)
    advantages = grpo.group_advantages(rewards[groups].flatten(), groups.shape[1], args.advantage_scale)

    def loss(logprobs, mask):
        return grpo.policy_loss(
            logprobs, logprobs.detach(), advantages, mask, args.clip_low, args.clip_high,
            denominator=grpo.loss_denominator(mask, args.aggregation, longest), objective=args.objective,
            ratio_level=args.ratio_level, aggregation=args.aggregation,
        )  # fmt: skip

    return policy.ascent(groups, loss)


def right_or_wrong(policy):
    """Reward 1 for three of the nine answers."""
    return doubles([i in (1, 3, 8) for i in range(len(policy.answers))])


def grpo_factor(p: float, size: int) -> float:
    """E sqrt(m (1 - m)) / (p (1 - p)), m = K / G and K binomial: what the division by the std does to the gradient.

    Given m, an answer with reward 1 has A = (1 - m) / s and E grad log pi = grad p / p, one with reward 0 has
    A = -m / s and -grad p / (1 - p), where s = sqrt(m (1 - m)). Their mean over the group is
    m (1 - m) / s (1 / p + 1 / (1 - p)) grad p = s / (p (1 - p)) grad p.
    """
    chance = [math.comb(size, k) * p**k * (1 - p) ** (size - k) for k in range(size + 1)]
    return sum(c * math.sqrt(k / size * (1 - k / size)) for k, c in enumerate(chance)) / (p * (1 - p))


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("variant", VARIANTS)
def test_the_expected_gradient_of_each_variant_is_the_policy_gradient_times_a_factor(fixed_length, variant, size):
    """Right-or-wrong rewards, equal lengths; every variant divides by the length, Dr. GRPO not by the std."""
    rewards = right_or_wrong(fixed_length)
    p = (fixed_length.chances @ rewards).item()
    assert 0.1 < p < 0.9
    factor = (size - 1) / size if variant == "dr_grpo" else grpo_factor(p, size)
    groups, chances = fixed_length.all_groups(size)
    expected = chances @ variant_ascent(variant, fixed_length, rewards, groups)
    close(expected, factor / 2 * fixed_length.policy_gradient(rewards))


@pytest.mark.parametrize("size", [4, 8])
def test_the_mean_gradient_of_grpo_over_many_draws_meets_its_factor(fixed_length, size):
    rewards = right_or_wrong(fixed_length)
    expected = fixed_length.policy_gradient(rewards) / 2 * grpo_factor((fixed_length.chances @ rewards).item(), size)
    parts = variant_ascent("grpo", fixed_length, rewards, fixed_length.draw(8000, size))
    assert within_four_standard_errors(parts, expected)
    assert not within_four_standard_errors(parts, 0.9 * expected)


@pytest.mark.parametrize("p", [0.1, 0.5, 0.8])
def test_the_factor_of_grpo_grows_from_one_to_the_inverse_standard_deviation(p):
    """With pairs it is the policy gradient itself; with large groups rare rights and rare wrongs weigh more."""
    factors = [grpo_factor(p, size) for size in (2, 4, 16, 400)]
    assert factors[0] == pytest.approx(1.0) and factors == sorted(factors)
    assert factors[-1] == pytest.approx(1 / math.sqrt(p * (1 - p)), rel=0.01)


def test_dr_grpo_keeps_the_direction_of_the_policy_gradient_for_answers_of_any_length(ending):
    """Its constant denominator is the reason; dividing by each answer's own length turns the gradient."""
    rewards = rewards_of(ending)
    exact = ending.policy_gradient(rewards)
    groups, chances = ending.all_groups(3)
    close(chances @ variant_ascent("dr_grpo", ending, rewards, groups), 2 / 3 / 3 * exact)
    turned = chances @ variant_ascent("dr_grpo", ending, rewards, groups, aggregation="sequence")
    assert torch.cosine_similarity(turned, exact, dim=0) < 0.99


# ------------------------------------------------------------------------------------------------ importance_ratio


def test_the_ratio_of_a_sequence_is_one_number_and_the_geometric_mean_over_its_tokens():
    logprobs, old, _, mask = batch(6)
    before = logprobs.clone(), old.clone()
    ratio = grpo.importance_ratio(logprobs, old, mask, "sequence")
    assert ratio.shape == mask.shape
    for i, row in enumerate(mask.tolist()):
        gaps = [logprobs[i, t].item() - old[i, t].item() for t, trained in enumerate(row) if trained]
        assert ratio[i].unique().numel() == 1
        assert ratio[i, 0].item() == pytest.approx(math.exp(sum(gaps) / max(len(gaps), 1)), abs=1e-6)
    token = grpo.importance_ratio(logprobs, old, mask)
    close(token[mask], (logprobs.double() - old.double()).exp()[mask])
    assert token[1][mask[1]].unique().numel() == 5
    assert torch.equal(logprobs, before[0]) and torch.equal(old, before[1])


def test_the_gradient_of_a_sequences_ratio_reaches_all_its_tokens_alike_and_no_other():
    logprobs, old, _, mask = batch(6)
    logprobs.requires_grad_()
    grpo.importance_ratio(logprobs, old, mask, "sequence")[:, 0].sum().backward()
    ratio = grpo.importance_ratio(logprobs, old, mask, "sequence").detach()
    close(logprobs.grad, torch.where(mask, ratio / mask.sum(1, keepdim=True).clamp(min=1), 0.0))


def test_what_lies_outside_the_mask_does_not_touch_a_sequences_ratio():
    logprobs, mask = torch.tensor([[9.0, -1.0, -2.0, NONE]]), bools([[0, 1, 1, 0]])
    old = torch.tensor([[-9.0, -1.1, -2.3, math.inf]])
    close(grpo.importance_ratio(logprobs, old, mask, "sequence"), [[math.exp(0.2)] * 4])


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_log_ratios_are_clamped_before_exp(level):
    old, mask = torch.zeros(2, 2), bools([[0, 1], [0, 1]])
    ratio = grpo.importance_ratio(torch.tensor([[0.0, 1000], [0, -1000]]), old, mask, level)[:, 1]
    assert ratio.tolist() == pytest.approx([math.exp(20), math.exp(-20)], rel=1e-5)


def test_an_unknown_level_of_the_ratio_is_refused():
    with pytest.raises(ValueError, match="batch"):
        grpo.importance_ratio(torch.zeros(1, 2), torch.zeros(1, 2), bools([[0, 1]]), "batch")


# ------------------------------------------------------------------------------------------------- sampler_weights


@pytest.mark.parametrize(
    ("level", "cap", "expected"),
    [
        ("off", 2.0, [[1, 1], [1, 1]]),
        ("token", 2.0, [[1.5, 0.5], [2.0, 0.1]]),
        ("token", 1.2, [[1.2, 0.5], [1.2, 0.1]]),
        ("sequence", 2.0, [[0.75, 0.75], [0.8, 0.8]]),
        ("sequence", 0.78, [[0.75, 0.75], [0.78, 0.78]]),
    ],
)
def test_sampler_weights_are_truncated_importance_weights(level, cap, expected):
    """Trainer's / sampler's probability: 1.5 and 0.5 in one row, 8 and 0.1 in the other; what is masked is noise."""
    mask = bools([[0, 1, 1, 0], [0, 1, 1, 0]])
    ratio = torch.tensor([[NONE, 1.5, 0.5, 7.0], [math.inf, 8.0, 0.1, NONE]])
    sampler = torch.full((2, 4), -1.0)
    old = (sampler + ratio.log()).requires_grad_()
    weights = grpo.sampler_weights(old, sampler, mask, level, cap)
    assert not weights.requires_grad and weights.shape == mask.shape and weights[mask].isfinite().all()
    close(weights[:, 1:3], expected)


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_sampler_weights_are_capped_at_two_and_never_overflow(level):
    old, mask = torch.tensor([[0.0, -1.0], [0.0, -2000.0]]), bools([[0, 1], [0, 1]])
    weights = grpo.sampler_weights(old, torch.tensor([[0.0, -1000.0], [0.0, -1.0]]), mask, level)
    close(weights[:, 1], [2.0, 0.0])


def test_sampler_weights_multiply_the_gain_and_not_the_kl():
    logprobs, old, ref, mask = batch(6)
    advantages, weights = rand(6, seed=9), rand(6, 7, seed=8).exp()
    plain, _ = value_and_gradient(grpo.policy_loss, logprobs, old, torch.zeros(6), mask, 0.2, 0.2, ref, 0.5)
    weighed, _ = value_and_gradient(
        grpo.policy_loss, logprobs, old, torch.zeros(6), mask, 0.2, 0.2, ref, 0.5, weights=weights
    )
    assert weighed == pytest.approx(plain, abs=1e-7) and plain > 0
    _, doubled = value_and_gradient(grpo.policy_loss, logprobs, old, advantages, mask, weights=torch.full((6, 7), 2.0))
    _, single = value_and_gradient(grpo.policy_loss, logprobs, old, advantages, mask)
    close(doubled, 2 * single)


# -------------------------------------------------------------------------------- policy_loss with every switch set


def policy_loss_by_definition(
    logprobs, old, advantages, mask, low, high, ref, beta, objective, level, aggregation, weights, denominator
):
    """(loss, gradient), one number at a time in float64."""
    total, gradient = 0.0, torch.zeros(mask.shape, dtype=torch.float64)
    for i, row in enumerate(mask.tolist()):
        places = [t for t, trained in enumerate(row) if trained]
        gaps = {t: logprobs[i, t].item() - old[i, t].item() for t in places}
        a, share = advantages[i].item(), 1.0
        if aggregation == "sequence":
            share = 1 / max(len(places), 1)
        for t in places:
            new, weight = logprobs[i, t].item(), weights[i, t].item()
            ratio = math.exp(sum(gaps.values()) / len(gaps) if level == "sequence" else gaps[t])
            if objective == "cispo":
                factor = min(ratio, 1 + high) * a
                gain, slopes = factor * new, {t: factor}
            else:
                bounded = min(max(ratio, 1 - low), 1 + high)
                gain, slope = min(ratio * a, bounded * a), ratio * a if ratio * a <= bounded * a else 0.0
                slopes = {u: slope / len(places) for u in places} if level == "sequence" else {t: slope}
            towards_ref = ref[i, t].item() - new
            total -= share * (weight * gain - beta * (math.exp(towards_ref) - 1 - towards_ref)) / denominator
            for u, slope in slopes.items():
                gradient[i, u] -= share * weight * slope / denominator
            gradient[i, t] += share * beta * (1 - math.exp(towards_ref)) / denominator
    return total, gradient


@pytest.mark.parametrize("aggregation", ["sequence", "token", "constant"])
@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("objective", ["clip", "cispo"])
@pytest.mark.parametrize("beta", [0.0, 0.3])
def test_policy_loss_and_gradient_equal_the_definition_under_every_switch(objective, level, aggregation, beta):
    low, high = 0.05, 0.1
    for rows in (1, 6):
        logprobs, old, ref, mask = batch(rows)
        advantages, weights = 2 * rand(rows, seed=9), rand(rows, 7, seed=8).exp()
        counts = {"sequence": mask.any(1).sum(), "token": mask.sum(), "constant": rows * 16}
        denominator = int(counts[aggregation])
        assert grpo.loss_denominator(mask, aggregation, 16) == denominator
        expected, gradient = policy_loss_by_definition(
            logprobs, old, advantages, mask, low, high, ref, beta, objective, level, aggregation, weights, denominator
        )
        value, ours = value_and_gradient(
            grpo.policy_loss, logprobs, old, advantages, mask, low, high, ref if beta else None, beta, denominator,
            objective, level, aggregation, weights,
        )  # fmt: skip
        assert value == pytest.approx(expected, rel=1e-5, abs=1e-6)
        close(ours, gradient)


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_the_cut_does_not_change_the_gradient_of_a_variant(variant, cut):
    logprobs, old, ref, mask = batch(6)
    advantages = rand(6, seed=9)
    args = grpo.Args(variant=variant)
    grpo.resolve_variant(args)
    denominator = grpo.loss_denominator(mask, args.aggregation, 16)

    def loss(logprobs, rows):
        return grpo.policy_loss(
            logprobs, old[rows], advantages[rows], mask[rows], args.clip_low, args.clip_high, ref[rows], args.kl_coef,
            denominator, args.objective, args.ratio_level, args.aggregation,
        )  # fmt: skip

    whole, gradient = value_and_gradient(loss, logprobs, list(range(6)))
    total = 0.0
    for rows in cut:
        value, part = value_and_gradient(loss, logprobs[rows], rows)
        total += value
        close(part, gradient[rows])
    assert total == pytest.approx(whole, rel=1e-5, abs=1e-6) and gradient.abs().sum() > 0


@pytest.mark.parametrize(
    ("aggregation", "denominator", "loss"), [("sequence", 2, 0.5), ("token", 4, 0.25), ("constant", 8, 0.125)]
)
def test_the_aggregations_weigh_a_short_and_a_long_answer_differently(aggregation, denominator, loss):
    """Token losses [1] and [0, 0, 0], longest response 4."""
    logprobs, mask = torch.full((2, 4), -1.0), bools([[0, 1, 0, 0], [0, 1, 1, 1]])
    assert grpo.loss_denominator(mask, aggregation, 4) == denominator
    value = grpo.policy_loss(
        logprobs, logprobs, torch.tensor([-1.0, 0.0]), mask, denominator=denominator, aggregation=aggregation
    )
    assert value.item() == pytest.approx(loss)
    own = grpo.policy_loss(logprobs, logprobs, torch.tensor([-1.0, 0.0]), mask, aggregation=aggregation)
    assert own.item() == pytest.approx(loss)  # the mask is four wide


@pytest.mark.parametrize(
    ("mask", "aggregation", "denominator"),
    [
        ([[0, 1, 1, 0], [0, 0, 0, 0]], "sequence", 1),
        ([[0, 1, 1, 0], [0, 0, 0, 0]], "token", 2),
        ([[0, 1, 1, 0], [0, 0, 0, 0]], "constant", 2 * 10),  # Dr. GRPO counts all sequences
        ([[0, 0, 0, 0]], "sequence", 0),
        ([[0, 0, 0, 0]], "token", 0),
    ],
)
def test_a_masked_answer_leaves_the_denominator_too(mask, aggregation, denominator):
    mask = bools(mask)
    assert grpo.loss_denominator(mask, aggregation, 10) == denominator
    logprobs = torch.full(mask.shape, -1.0)
    value, gradient = value_and_gradient(
        grpo.policy_loss, logprobs, logprobs, -torch.ones(len(mask)), mask, aggregation=aggregation,
        denominator=denominator,
    )  # fmt: skip
    expected = {0: 0.0, 20: 0.1}.get(denominator, 1.0)
    assert value == pytest.approx(expected) and torch.equal(gradient != 0, mask)


def test_an_unknown_aggregation_is_refused():
    with pytest.raises(ValueError, match="batch"):
        grpo.loss_denominator(bools([[0, 1]]), "batch")


@pytest.mark.parametrize(
    ("ratio", "advantage", "of_clip", "of_cispo"),
    [
        (1.5, 1.0, 0.0, -1.2),
        (0.5, -1.0, 0.0, 0.5),
        (1.5, -1.0, 1.5, 1.2),
        (0.5, 1.0, -0.5, -0.5),
        (1.1, 1.0, -1.1, -1.1),
        (20.0, 1.0, 0.0, -1.2),
        (1.0, 1.0, -1.0, -1.0),
    ],
)
def test_cispo_keeps_a_gradient_where_the_clip_has_none(ratio, advantage, of_clip, of_cispo):
    logprobs = torch.tensor([[0.0, -1.5]])
    args = logprobs, logprobs - math.log(ratio), torch.tensor([advantage]), bools([[0, 1]]), 0.2, 0.2
    _, clip = value_and_gradient(grpo.policy_loss, *args)
    value, cispo = value_and_gradient(grpo.policy_loss, *args, objective="cispo")
    close(clip, [[0.0, of_clip]])
    close(cispo, [[0.0, of_cispo]])
    assert value == pytest.approx(of_cispo * -1.5)


def test_cispo_as_published_clips_at_five():
    """epsilon_high 4, and no lower bound."""
    args = grpo.Args(variant="cispo")
    grpo.resolve_variant(args)
    ratio = torch.tensor([[1.0, 4.9, 50.0, 0.01]])
    logprobs, mask = torch.full((1, 4), -1.0), bools([[0, 1, 1, 1]])
    _, gradient = value_and_gradient(
        grpo.policy_loss, logprobs, logprobs - ratio.log(), torch.ones(1), mask, args.clip_low, args.clip_high,
        objective=args.objective, ratio_level=args.ratio_level, aggregation=args.aggregation,
    )  # fmt: skip
    close(gradient, [[0.0, -4.9 / 3, -5 / 3, -0.01 / 3]], atol=1e-5)


def test_gspo_clips_whole_sequences():
    """Two tokens far from 1 that cancel leave a ratio of 1; one sequence beyond the range loses all its gradient."""
    mask = bools([[0, 1, 1], [0, 1, 1]])
    logprobs = torch.full((2, 3), -1.0)
    old = logprobs - torch.tensor([[0.0, 0.5, -0.5], [0.0, 0.3, -0.1]])
    _, gradient = value_and_gradient(
        grpo.policy_loss, logprobs, old, torch.ones(2), mask, 3e-4, 4e-4, ratio_level="sequence"
    )
    close(gradient, [[0.0, -0.25, -0.25], [0.0, 0.0, 0.0]])
    _, by_token = value_and_gradient(grpo.policy_loss, logprobs, old, torch.ones(2), mask, 3e-4, 4e-4)
    assert torch.equal(by_token != 0, bools([[0, 0, 1], [0, 0, 1]]))


# ------------------------------------------------------------------------------------------- penalties, ensembles


@pytest.mark.parametrize(
    ("lengths", "longest", "buffer", "expected"),
    [
        ([16, 18, 20], 20, 4, [0, -0.5, -1]),
        ([0, 1, 15, 17, 19], 20, 4, [0, 0, 0, -0.25, -0.75]),
        ([0, 16, 18, 20], 20, 0, [0, 0, 0, 0]),
        ([9, 10], 10, 1, [0, -1]),
        ([16384, 18432, 20480], 20480, 4096, [0, -0.5, -1]),
    ],
)
def test_the_overlong_penalty_falls_from_zero_to_minus_one_over_the_buffer(lengths, longest, buffer, expected):
    penalty = grpo.overlong_penalty(torch.tensor(lengths), longest, buffer)
    assert penalty.is_floating_point()
    close(penalty, expected)


def test_the_minimum_of_an_ensemble_is_never_above_its_mean():
    scores = rand(4, 50, seed=3).double()
    low, mean, careful = (common.aggregate_scores(scores, how, 0.5) for how in ("min", "mean", "mean-std"))
    assert low.shape == mean.shape == careful.shape == (50,)
    assert (low <= mean).all() and (low < mean).any() and (careful <= mean).all()
    for i, column in enumerate(scores.T.tolist()):
        average = sum(column) / 4
        spread = math.sqrt(sum((x - average) ** 2 for x in column) / 4)
        assert low[i].item() == min(column) and mean[i].item() == pytest.approx(average)
        assert careful[i].item() == pytest.approx(average - 0.5 * spread)


@pytest.mark.parametrize("how", ["min", "mean", "mean-std"])
def test_an_ensemble_of_one_is_that_one(how):
    scores = rand(1, 5).double()
    assert torch.equal(common.aggregate_scores(scores, how), scores[0])


# ---------------------------------------------------------------------------------------- variants, groups' spread

SWITCHES = {
    "grpo": ("group", "sequence", "clip", "token", 0.2, 0.2, 0.04, False, 0),
    "dr_grpo": ("none", "constant", "clip", "token", 0.2, 0.2, 0.0, False, 0),
    "dapo": ("group", "token", "clip", "token", 0.2, 0.28, 0.0, True, 10),
    "cispo": ("group", "token", "cispo", "token", 0.0, 4.0, 0.0, False, 0),
    "gspo": ("group", "sequence", "clip", "sequence", 3e-4, 4e-4, 0.0, False, 0),
}
NAMES = (
    "advantage_scale", "aggregation", "objective", "ratio_level", "clip_low", "clip_high", "kl_coef",
    "dynamic_sampling", "overlong_buffer",
)  # fmt: skip


@pytest.mark.parametrize("variant", SWITCHES)
def test_a_variant_sets_its_switches(variant):
    args = grpo.Args(variant=variant, max_response_length=50)
    resolved = grpo.resolve_variant(args)
    assert resolved == dict(zip(NAMES, SWITCHES[variant], strict=True))
    assert all(getattr(args, name) == value for name, value in resolved.items())
    assert SWITCHES.keys() == VARIANTS.keys()


@pytest.mark.parametrize("variant", SWITCHES)
def test_a_switch_given_by_hand_wins_even_if_it_is_zero(variant):
    for name, given in zip(NAMES, ("batch", "token", "cispo", "sequence", 0.0, 0.0, 0.0, False, 0), strict=True):
        args = grpo.Args(variant=variant, max_response_length=50, **{name: given})
        resolved = grpo.resolve_variant(args)
        assert resolved == {**dict(zip(NAMES, SWITCHES[variant], strict=True)), name: given}
        assert type(getattr(args, name)) is type(given)
    assert grpo.resolve_variant(grpo.Args(variant=variant, dynamic_sampling=True))["dynamic_sampling"]


def test_resolving_twice_changes_nothing():
    args = grpo.Args(variant="dapo")
    assert grpo.resolve_variant(args) == grpo.resolve_variant(args)


@pytest.mark.parametrize(("longest", "buffer"), [(20480, 4096), (32, 6), (4, 1), (1, 1)])
def test_the_overlong_buffer_of_dapo_is_a_fifth_of_the_longest_response(longest, buffer):
    assert grpo.resolve_variant(grpo.Args(variant="dapo", max_response_length=longest))["overlong_buffer"] == buffer


@pytest.mark.parametrize(
    ("rewards", "size", "spread"),
    [
        ([1, 0, 1, 1], 2, [True, False]),
        ([1, NONE, NONE, 0, NONE, NONE], 2, [False, False, False]),
        ([1, NONE, 0, 1, NONE, 1], 3, [True, False]),
        ([-1, NONE, -3], 3, [True]),
        ([0.1] * 3 + [0.1, 0.1, 0.1 + 1e-9], 3, [False, True]),
    ],
)
def test_a_group_has_spread_where_its_scored_rewards_differ(rewards, size, spread):
    rewards = doubles(rewards)
    ours = grpo.has_spread(rewards, size)
    assert ours.dtype == torch.bool and ours.tolist() == spread
    for scale in ("group", "none"):
        advantages = grpo.group_advantages(rewards, size, scale).reshape(-1, size)
        assert advantages.any(1).tolist() == spread
