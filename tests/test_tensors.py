"""Masks, KL, GAE, log-probs and scores, against loops, enumerations and numbers worked out by hand."""

import math

import pytest
import torch
from helpers import tiny_model, tiny_reward_model
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import common

NAN, INF = math.nan, math.inf
CPU = torch.device("cpu")


def rand(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


# ------------------------------------------------------------------------------------------------ masked reductions


@pytest.mark.parametrize(
    ("row", "mask", "total", "mean"),
    [
        ([5.0, 6, 7], [0, 0, 0], 0.0, 0.0),
        ([5.0, 6, 7], [1, 0, 1], 12.0, 6.0),
        ([1.0, NAN], [1, 0], 1.0, 1.0),
        ([1.0, -INF], [1, 0], 1.0, 1.0),
        ([INF, 3.0, 4], [0, 1, 1], 7.0, 3.5),
    ],
)
def test_masked_sum_and_mean_select_instead_of_multiplying(row, mask, total, mean):
    x, mask = torch.tensor([row, row], requires_grad=True), torch.tensor([mask, mask]).bool()
    assert common.masked_sum(x, mask) == 2 * total and common.masked_mean(x, mask) == mean
    assert common.masked_sum(x, mask, dim=1).tolist() == [total] * 2
    assert common.masked_mean(x, mask, dim=1).tolist() == [mean] * 2
    (common.masked_sum(x, mask) + common.masked_mean(x, mask)).backward()
    share = 1 + 1 / max(mask.sum().item(), 1)
    assert torch.equal(x.grad, torch.where(mask, share, 0.0))


def test_masked_mean_of_some_rows_is_not_the_mean_of_row_means():
    x, mask = torch.tensor([[4.0, 0, 0], [1, 1, 1]]), torch.tensor([[1, 0, 0], [1, 1, 1]]).bool()
    assert common.masked_mean(x, mask) == 1.75
    assert common.masked_mean(x, mask, dim=1).tolist() == [4.0, 1.0]
    assert common.masked_mean(x, mask, dim=0).tolist() == [2.5, 1.0, 1.0]


def test_whitening_has_mean_zero_and_sample_variance_one_over_the_masked_entries():
    x, mask = torch.tensor([[1.0, 2, NAN], [6, INF, 3]]), torch.tensor([[1, 1, 0], [1, 0, 1]]).bool()
    before = x.clone()
    # mean 3, squared deviations 4 + 1 + 9 + 0 = 14, sample variance 14 / 3
    std = math.sqrt(14 / 3)
    expected = torch.tensor([[-2 / std, -1 / std, 0], [3 / std, 0, 0]])
    torch.testing.assert_close(common.masked_whiten(x, mask), expected, rtol=0, atol=1e-6)
    assert torch.equal(x.nan_to_num(), before.nan_to_num())


def test_whitening_of_close_large_float32_numbers_uses_two_passes():
    x = torch.tensor([[1000.1, 1000.2, 1000.1, 1000.2]])
    whitened = common.masked_whiten(x, torch.ones_like(x).bool())
    torch.testing.assert_close(whitened, torch.tensor([[-0.866, 0.866, -0.866, 0.866]]), rtol=0, atol=1e-3)
    assert whitened.dtype == torch.float32
    many = 1e6 + torch.arange(10001).remainder(2)[None]  # their float32 sum is off by more than 100
    whitened = common.masked_whiten(many, torch.ones_like(many).bool())
    torch.testing.assert_close(whitened.unique(), torch.tensor([-1.0, 1.0]), rtol=0, atol=1e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("mask", [[0, 0, 0, 0], [0, 1, 0, 0], [1, 1, 1, 0]])
def test_whitening_of_nothing_of_one_entry_and_of_equal_entries_is_zero(mask, dtype):
    x = torch.tensor([[0.1, 0.1, 0.1, 9.0]], dtype=dtype)  # in float64 the mean of three times 0.1 is not 0.1
    assert common.masked_whiten(x, torch.tensor([mask]).bool()).tolist() == [[0.0] * 4]


# --------------------------------------------------------------------------------------------------------- EOS mask


@pytest.mark.parametrize(
    ("ids", "stops", "length", "expected"),
    [
        ([7, 8, 0, 0], [2], 2, [1, 1, 0, 0]),
        ([7, 8, 0, 0], [2], None, [1, 1, 1, 1]),
        ([10, 11, 128009, 0], {128001, 128009}, None, [1, 1, 1, 0]),
        ([10, 128001, 128009, 0], {128001, 128009}, None, [1, 1, 0, 0]),
        ([7, 2, 2, 0], [2], None, [1, 1, 0, 0]),
        ([7, 2, 2, 2], [2], 2, [1, 1, 0, 0]),  # pad = EOS
        ([2, 2, 2, 2], [2], 1, [1, 0, 0, 0]),
        ([7, 8, 2, 0], [2], 2, [1, 1, 0, 0]),
        ([7, 8, 9, 4], [2], 0, [0, 0, 0, 0]),
    ],
)
def test_first_eos_mask_keeps_the_first_stop_id_and_nothing_after_it(ids, stops, length, expected):
    ids = torch.tensor([ids, ids])
    before = ids.clone()
    mask = common.first_eos_mask(ids, stops, None if length is None else torch.tensor([length] * 2))
    assert mask.dtype == torch.bool and mask.long().tolist() == [expected] * 2
    assert torch.equal(ids, before)


# --------------------------------------------------------------------------------------------------------------- KL


@pytest.mark.parametrize("kind", ["k1", "k3"])
def test_kl_estimates_are_unbiased_under_the_policy(kind):
    policy, reference = rand(2, 7, seed=1).double().log_softmax(-1)
    true = (policy.exp() * (policy - reference)).sum()
    estimate = (policy.exp() * common.kl_estimate(policy, reference, kind)).sum()
    reverse = (reference.exp() * (reference - policy)).sum()
    assert estimate.item() == pytest.approx(true.item(), abs=1e-6)
    assert abs(true - reverse) > 0.01  # so that a ratio upside down is seen


def test_k2_estimates_kl_where_the_two_are_close():
    logits = rand(7, seed=1).double()
    policy, reference = logits.log_softmax(-1), (logits + 0.01 * rand(7, seed=2)).log_softmax(-1)
    true = (policy.exp() * (policy - reference)).sum().item()
    assert (policy.exp() * common.kl_estimate(policy, reference, "k2")).sum().item() == pytest.approx(true, rel=0.02)


@pytest.mark.parametrize(
    ("kind", "reference", "value", "gradient"),
    [
        ("k1", -2.0, 1.0, 1.0),
        ("k1", -5.0, 4.0, 1.0),
        ("k2", -2.0, 0.5, 1.0),
        ("k2", -5.0, 8.0, 4.0),
        ("k3", -2.0, 0.367879, 0.632121),
        ("k3", -5.0, 3.018316, 0.981684),
        ("k3", -1.0, 0.0, 0.0),
    ],
)
def test_kl_estimate_values_and_gradients(kind, reference, value, gradient):
    logprobs = torch.tensor([[-1.0], [-1.0]], requires_grad=True)
    estimate = common.kl_estimate(logprobs, torch.full((2, 1), reference), kind)
    estimate.sum().backward()
    torch.testing.assert_close(estimate.detach(), torch.full((2, 1), value), rtol=0, atol=1e-6)
    torch.testing.assert_close(logprobs.grad, torch.full((2, 1), gradient), rtol=0, atol=1e-6)


@pytest.mark.parametrize("distance", [-1000.0, -100.0, -25.0, -3.0, 3.0, 25.0, 100.0, 1000.0])
def test_k3_is_finite_never_negative_and_its_gradient_never_leads_away_from_the_reference(distance):
    logprobs = torch.tensor([-1.0], requires_grad=True)
    estimate = common.kl_estimate(logprobs, logprobs.detach() - distance, "k3")  # policy above reference by `distance`
    estimate.backward()
    assert estimate.isfinite().all() and estimate.item() > 0
    assert logprobs.grad.isfinite().all() and logprobs.grad.item() * distance >= 0


def test_kl_estimate_is_float32_and_refuses_an_unknown_kind():
    half = torch.tensor([-1.0], dtype=torch.bfloat16)
    assert common.kl_estimate(half, half, "k3").dtype == torch.float32
    with pytest.raises(ValueError, match="k4"):
        common.kl_estimate(half, half, "k4")


# -------------------------------------------------------------------------------------------------------------- GAE


def gae_by_definition(rewards, values, gamma, lam):
    """A_t = sum_l (gamma lam)^l delta_{t+l} of one response, in plain floats; the value after the end is 0."""
    after = [*values, 0.0][1:]
    deltas = [r + gamma * v_next - v for r, v, v_next in zip(rewards, values, after, strict=True)]
    return [sum((gamma * lam) ** (k - t) * deltas[k] for k in range(t, len(deltas))) for t in range(len(deltas))]


def test_gae_of_a_terminal_reward():
    mask = torch.ones(1, 3, dtype=torch.bool)
    rewards, values = torch.tensor([[0.0, 0, 1]]), torch.tensor([[0.5, 0.4, 0.3]])
    advantages, returns = common.gae(rewards, values, mask, 1.0, 0.95)
    torch.testing.assert_close(returns, torch.tensor([[0.93675, 0.965, 1.0]]), rtol=0, atol=1e-6)
    torch.testing.assert_close(advantages, torch.tensor([[0.43675, 0.565, 0.7]]), rtol=0, atol=1e-6)


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 0.95), (0.9, 0.8), (1.0, 1.0), (0.97, 0.0)])
def test_gae_equals_its_definition_on_rows_of_every_shape(gamma, lam):
    spans = [(1, 6), (2, 5), (3, 4), (1, 1), (5, 6)]  # responses within rows of 6; one of them empty
    rewards, values = rand(5, 6, seed=3), rand(5, 6, seed=4)
    mask = torch.zeros(5, 6, dtype=torch.bool)
    expected = torch.zeros(5, 6)
    for row, (begin, end) in enumerate(spans):
        mask[row, begin:end] = True
        own = rewards[row, begin:end].double().tolist(), values[row, begin:end].double().tolist()
        expected[row, begin:end] = torch.tensor(gae_by_definition(*own, gamma, lam))
    rewards[~mask], values[~mask] = NAN, INF  # prompts and padding have no influence
    before = rewards.clone(), values.clone()
    advantages, returns = common.gae(rewards, values, mask, gamma, lam)
    torch.testing.assert_close(advantages, expected, rtol=0, atol=1e-5)
    torch.testing.assert_close(returns, torch.where(mask, expected + values, 0.0), rtol=0, atol=1e-5)
    assert all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip((rewards, values), before, strict=True))


def test_gae_sees_a_score_on_the_last_token_of_short_and_full_responses():
    mask = torch.tensor([[0, 1, 1, 1, 0, 0], [0, 1, 1, 1, 1, 1]]).bool()
    rewards = torch.tensor([[0.0, 0, 0, 1, 0, 0], [0, 0, 0, 0, 0, 1]])
    advantages, _ = common.gae(rewards, torch.zeros(2, 6), mask, 1.0, 1.0)
    assert torch.equal(advantages, mask.float())  # with V = 0 and no discount, every token gets the score


# ---------------------------------------------------------------------------------------- log-probs of given logits


def test_selected_logprobs_divide_the_logits_by_the_temperature():
    logits, token = torch.tensor([[2.0, 0.0]]), torch.tensor([0])
    for _ in range(2):  # a second call must find the logits as they were
        assert common.selected_logprobs(logits, token, 0.5).item() == pytest.approx(-0.018150, abs=1e-6)
        assert common.selected_logprobs(logits, token).item() == pytest.approx(-0.126928, abs=1e-6)
    assert logits.tolist() == [[2.0, 0.0]]


def test_selected_logprobs_equal_log_softmax_in_float64_for_any_leading_shape():
    logits, ids = 5 * rand(2, 3, 4, 11), torch.arange(24).reshape(2, 3, 4) % 11
    expected = (logits.double() / 1.7).log_softmax(-1).gather(-1, ids[..., None]).squeeze(-1).float()
    torch.testing.assert_close(common.selected_logprobs(logits, ids, 1.7), expected, rtol=0, atol=2e-6)


def test_bfloat16_logits_give_float32_statistics():
    logits = rand(3, 11).bfloat16()
    logprobs, entropy = common.selected_logprobs(logits, torch.tensor([1, 2, 3])), common.entropy_of(logits)
    assert logprobs.dtype == entropy.dtype == torch.float32
    exact = logits.double().log_softmax(-1)
    torch.testing.assert_close(logprobs, exact[range(3), [1, 2, 3]].float(), rtol=0, atol=1e-6)
    torch.testing.assert_close(entropy, -(exact.exp() * exact).sum(-1).float(), rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("logits", "entropy"),
    [
        ([0.0, 0.0, -INF], math.log(2)),
        ([0.0, -INF, -INF], 0.0),
        ([0.0, 0.0, 0.0], math.log(3)),
        ([0.0, -500, 0], math.log(2)),
    ],
)
def test_entropy_counts_impossible_outcomes_as_zero_and_keeps_its_gradient_finite(logits, entropy):
    logits = torch.tensor([logits, logits], requires_grad=True)
    value = common.entropy_of(logits)
    value.sum().backward()
    torch.testing.assert_close(value.detach(), torch.full((2,), entropy), rtol=0, atol=1e-6)
    assert logits.grad.isfinite().all()


def test_entropy_uses_the_temperature():
    logits = 3 * rand(4, 9).double()
    p = (logits / 0.6).softmax(-1)
    torch.testing.assert_close(common.entropy_of(logits, 0.6), -(p * p.log()).sum(-1).float(), rtol=0, atol=1e-5)


# --------------------------------------------------------------------------------------------------- token_logprobs

# (prompt, response) of rows that differ in every length; 2 is the EOS and also stands inside a prompt.
PAIRS = [([5, 6, 7], [20, 21, 2]), ([9], [33, 12, 17, 8, 30, 11, 2]), ([10, 2, 14, 22, 5, 30], [7]), ([4, 4], [])]


def padded(pairs=PAIRS, side="right", value=0):
    """(input_ids, attention_mask, response_mask), padded on one side."""
    width = max(len(p) + len(r) for p, r in pairs) + 1  # no row without padding
    rows = []
    for prompt, response in pairs:
        real = [(token, 1, 0) for token in prompt] + [(token, 1, 1) for token in response]
        fill = [(value, 0, 0)] * (width - len(real))
        rows.append(fill + real if side == "left" else real + fill)
    ids, attention, response = torch.tensor(rows).unbind(-1)
    return ids, attention, response.bool()


def one_by_one(model, pairs, temperature):
    """[[(log-prob, entropy) of each response token] of each row]: one plain forward pass per token, in float64."""
    rows = []
    with torch.no_grad():
        for prompt, response in pairs:
            rows.append([])
            for t, token in enumerate(response):
                logits = model(input_ids=torch.tensor([prompt + response[:t]])).logits[0, -1].double()
                logprobs = (logits / temperature).log_softmax(-1)
                rows[-1].append((logprobs[token].item(), -(logprobs.exp() * logprobs).sum().item()))
    return rows


def small_chunks(monkeypatch, vocab_size=40):
    """20 tokens in a chunk of the LM head."""
    monkeypatch.setattr(common, "HEAD_CHUNK", 20 * vocab_size)


@pytest.mark.parametrize("side", ["right", "left"])
def test_token_logprobs_and_entropy_equal_one_forward_pass_per_token(architecture, side):
    model = tiny_model(architecture)
    ids, attention, response = padded(side=side)
    logprobs, entropy = common.token_logprobs(model, ids, attention, response, 0.7, with_entropy=True)
    expected = [pair for row in one_by_one(model, PAIRS, 0.7) for pair in row]
    assert logprobs.shape == entropy.shape == ids.shape and logprobs.dtype == entropy.dtype == torch.float32
    assert not logprobs[~response].any() and not entropy[~response].any()
    torch.testing.assert_close(logprobs[response], torch.tensor([x for x, _ in expected]), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(entropy[response], torch.tensor([x for _, x in expected]), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("chunk", [1, 40 * 16, 40 * 17, 40 * 23, 2**25])
def test_the_size_of_the_head_chunks_changes_nothing(monkeypatch, model, chunk):
    pairs = [(p, r * 6) for p, r in PAIRS]  # 66 response tokens
    inputs = padded(pairs)
    whole = common.token_logprobs(model, *inputs, 1.3, with_entropy=True)
    monkeypatch.setattr(common, "HEAD_CHUNK", chunk)
    for ours, expected in zip(common.token_logprobs(model, *inputs, 1.3, with_entropy=True), whole, strict=True):
        torch.testing.assert_close(ours, expected, rtol=0, atol=1e-6)
    without = common.token_logprobs(model, *inputs, 1.3)
    torch.testing.assert_close(without, whole[0], rtol=0, atol=1e-6)


def test_gradients_equal_those_of_the_plain_forward_pass(monkeypatch, architecture):
    small_chunks(monkeypatch)
    model = tiny_model(architecture)
    ids, attention, response = padded([(p, r * 3) for p, r in PAIRS])
    weight, entropy_weight = rand(*ids.shape, seed=5), rand(*ids.shape, seed=6)

    logprobs, entropy = common.token_logprobs(model, ids, attention, response, 0.7, with_entropy=True)
    (weight * logprobs + entropy_weight * entropy).sum().backward()
    ours = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()

    logits = model(input_ids=ids, attention_mask=attention).logits[:, :-1] / 0.7  # (B, T - 1, V)
    all_logprobs = logits.log_softmax(-1)
    plain = all_logprobs.gather(-1, ids[:, 1:, None]).squeeze(-1)
    plain_entropy = -(all_logprobs.exp() * all_logprobs).sum(-1)
    shifted = response[:, 1:]
    (weight[:, 1:] * plain + entropy_weight[:, 1:] * plain_entropy)[shifted].sum().backward()
    theirs = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert ours.keys() == theirs.keys() and len(ours) > 10
    for name, gradient in theirs.items():
        scale = gradient.abs().max().item()
        torch.testing.assert_close(ours[name], gradient, rtol=0, atol=1e-4 * max(scale, 1), msg=name)


def test_what_stands_in_the_padding_and_in_untrained_places_has_no_influence(model):
    right = common.token_logprobs(model, *padded())
    other = common.token_logprobs(model, *padded(value=2))
    torch.testing.assert_close(right, other, rtol=0, atol=1e-6)
    ids, attention, response = padded([([5, 6, 7], [20, 21, 2, 9])])
    first = response & (response.cumsum(1) <= 2)
    full, part = (
        common.token_logprobs(model, ids, attention, response),
        common.token_logprobs(model, ids, attention, first),
    )
    torch.testing.assert_close(part, torch.where(first, full, 0.0), rtol=0, atol=1e-6)


def test_a_mask_with_a_hole_keeps_every_log_prob_at_its_token(model):
    ids, attention, response = padded([([5, 6], [20, 21, 2, 9, 33, 2]), ([7, 8, 9], [11, 12, 13, 14])])
    holes = response.clone()
    holes[0, 4:6] = holes[1, 3] = False
    full, part = (
        common.token_logprobs(model, ids, attention, response),
        common.token_logprobs(model, ids, attention, holes),
    )
    torch.testing.assert_close(part, torch.where(holes, full, 0.0), rtol=0, atol=1e-6)


def test_token_logprobs_changes_none_of_its_inputs(model):
    inputs = padded()
    before = [x.clone() for x in inputs]
    common.token_logprobs(model, *inputs, 0.5, with_entropy=True)[0].sum().backward()
    assert all(torch.equal(a, b) for a, b in zip(inputs, before, strict=True))


def test_the_first_token_of_a_row_cannot_be_a_response(model):
    ids, attention, response = padded()
    response[1, 0] = True
    with pytest.raises(ValueError, match="prompt"):
        common.token_logprobs(model, ids, attention, response)


def test_an_empty_mask_gives_zeros_that_can_be_differentiated(model):
    ids, attention, response = padded()
    logprobs, entropy = common.token_logprobs(model, ids, attention, torch.zeros_like(response), with_entropy=True)
    assert not logprobs.any() and not entropy.any() and logprobs.shape == ids.shape
    (logprobs.sum() + entropy.sum()).backward()
    assert all(p.grad is None or not p.grad.any() for p in model.parameters())


def test_a_bfloat16_model_gives_float32_log_probs_close_to_its_own_logits():
    model = tiny_model().bfloat16()
    ids, attention, response = padded()
    logprobs, entropy = common.token_logprobs(model, ids, attention, response, with_entropy=True)
    logits = model(input_ids=ids, attention_mask=attention).logits[:, :-1].double()
    expected = logits.log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)[response[:, 1:]]
    assert logprobs.dtype == entropy.dtype == torch.float32
    # The softmax is in float32: from equal bfloat16 logits the sums agree far below bfloat16's own step of 0.008.
    torch.testing.assert_close(logprobs[response].double(), expected, rtol=0, atol=1e-3)


class Sizes(TorchDispatchMode):
    """Notes the number of elements of every tensor that an operation returns, in forward and backward."""

    def __init__(self):
        super().__init__()
        self.largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.largest = max([self.largest, *(x.numel() for x in tree_leaves(out) if isinstance(x, torch.Tensor))])
        return out


@pytest.mark.parametrize("with_entropy", [False, True])
@pytest.mark.parametrize("tied", [True, False])
def test_no_tensor_ever_holds_all_logits(monkeypatch, tied, with_entropy):
    vocab = 1000
    small_chunks(monkeypatch, vocab)
    model = tiny_model("qwen3_tied" if tied else "llama_untied", vocab_size=vocab)
    ids, attention, response = padded([([5, 6, 7], [20, 21, 2] * 8), ([8], [9] * 26)])
    tokens = int(response.sum())  # 50
    saved = []  # shapes of what is kept for the backward pass

    def forward():
        out = common.token_logprobs(model, ids, attention, response, with_entropy=with_entropy)
        return sum(x.sum() for x in (out if with_entropy else [out]))

    with Sizes() as sizes, torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x.shape) or x, lambda x: x):
        forward().backward()
    assert sizes.largest <= 20 * vocab < tokens * vocab  # one chunk
    assert not [shape for shape in saved if vocab in shape and 16 not in shape]  # the head's (V, H) weight may be
    with Sizes() as plain:
        model(input_ids=ids, attention_mask=attention)
    assert plain.largest >= ids.numel() * vocab  # the measurement sees what must not happen


def test_only_trained_tokens_reach_the_head(model):
    seen = []
    model.get_output_embeddings().register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].numel() // 16))
    ids, attention, response = padded()
    with torch.no_grad():
        common.token_logprobs(model, ids, attention, response)
    assert sum(seen) == response.sum()


def test_response_log_probs_come_from_the_logits_one_place_before(model):
    ids = torch.tensor([[10, 11, 20, 21, 2]])
    mask = torch.tensor([[0, 0, 1, 1, 1]]).bool()
    logprobs = common.token_logprobs(model, ids, torch.ones_like(ids), mask)
    with torch.no_grad():
        table = model(input_ids=ids).logits[0].log_softmax(-1)
    expected = torch.stack([table[1, 20], table[2, 21], table[3, 2]])
    torch.testing.assert_close(logprobs[0, 2:], expected, rtol=0, atol=1e-5)
    assert not logprobs[0, :2].any()


# ---------------------------------------------------------------------------------------------- checks of the model


def test_check_logprobs_accepts_every_known_architecture(architecture):
    common.check_logprobs(tiny_model(architecture), [5, 6, 7, 8, 9, 10, 11], torch.float32, CPU)
    common.check_logprobs(tiny_model(architecture), [5], torch.float32, CPU)


def test_check_logprobs_refuses_logits_that_the_head_alone_does_not_give(model):
    plain = model.forward

    def doubled(*args, **kwargs):
        out = plain(*args, **kwargs)
        out.logits = out.logits * 2
        return out

    model.forward = doubled
    with pytest.raises(RuntimeError, match="Qwen3ForCausalLM"):
        common.check_logprobs(model, [5, 6, 7], torch.float32, CPU)


def test_check_logprobs_refuses_a_model_with_active_dropout():
    with pytest.raises(RuntimeError, match="dropout"):
        common.check_logprobs(tiny_model("gpt2_absolute").train(), [5, 6, 7], torch.float32, CPU)


def test_disable_dropout_makes_two_passes_in_training_mode_equal_and_leaves_the_config():
    model = tiny_model("gpt2_absolute").train()
    ids, attention, response = padded()
    assert not torch.equal(*(common.token_logprobs(model, ids, attention, response) for _ in range(2)))
    common.disable_dropout(model)
    assert model.training
    assert torch.equal(*(common.token_logprobs(model, ids, attention, response) for _ in range(2)))
    assert model.config.resid_pdrop == model.config.embd_pdrop == model.config.attn_pdrop == 0.5
    evaluated = common.token_logprobs(model.eval(), ids, attention, response)
    torch.testing.assert_close(common.token_logprobs(model.train(), ids, attention, response), evaluated)


def test_disable_dropout_reaches_dropout_that_is_an_attribute_of_the_attention():
    model = tiny_model("llama_untied", attention_dropout=0.5).train()
    ids, attention, response = padded()
    common.disable_dropout(model)
    assert torch.equal(*(common.token_logprobs(model, ids, attention, response) for _ in range(2)))
    assert model.config.attention_dropout == 0.5


# ---------------------------------------------------------------------------------------------------- reward scores

SEQUENCES = [[5, 6, 7, 2], [9], [10, 2, 14, 22, 5, 30, 2, 2], [2], [4, 4, 2]]


@pytest.mark.parametrize("name", ["qwen3_tied", "gemma3_softcap", "gpt2_absolute"])
@pytest.mark.parametrize("value", [0, 2])
@pytest.mark.parametrize("side", ["right", "left"])
def test_reward_scores_read_the_last_attended_token_wherever_the_padding_is(name, side, value):
    model = tiny_reward_model(name)
    ids, attention, _ = padded([(row, []) for row in SEQUENCES], side, value)
    scores = common.reward_scores(model, ids, attention)
    with torch.no_grad():
        model.config.pad_token_id = 39  # an id that stands in no sequence, so that the library pools at the last token
        alone = [
            model(input_ids=torch.tensor([row]), attention_mask=torch.ones(1, len(row))).logits for row in SEQUENCES
        ]
    assert scores.shape == (len(SEQUENCES),) and scores.dtype == torch.float32 and not scores.requires_grad
    torch.testing.assert_close(scores, torch.cat(alone)[:, 0], rtol=0, atol=1e-5)
    assert scores.std() > 0.1


# -------------------------------------------------------------------------------------------------------- gradients


class Two(torch.nn.Module):
    """Two parameters with given gradients and one without."""

    def __init__(self, first, second):
        super().__init__()
        self.a, self.b, self.c = (torch.nn.Parameter(torch.zeros(1)) for _ in range(3))
        self.a.grad, self.b.grad = torch.tensor([first]), torch.tensor([second])


def test_gradients_are_scaled_to_the_global_norm():
    module = Two(3.0, 4.0)
    assert common.clip_gradients(module, 1.0) == pytest.approx(5.0)
    torch.testing.assert_close(torch.cat([module.a.grad, module.b.grad]), torch.tensor([0.6, 0.8]), rtol=0, atol=1e-6)
    assert module.c.grad is None


def test_small_gradients_are_left_as_they_are():
    module = Two(0.3, 0.4)
    assert common.clip_gradients(module, 1.0) == pytest.approx(0.5)
    assert (module.a.grad.item(), module.b.grad.item()) == (pytest.approx(0.3), pytest.approx(0.4))


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_a_non_finite_gradient_gives_a_non_finite_norm_and_scales_nothing(bad):
    module = Two(bad, 4.0)
    assert not math.isfinite(common.clip_gradients(module, 1.0))
    assert module.b.grad.item() == 4.0
