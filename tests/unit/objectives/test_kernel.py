"""The sliced kernel equals the plain path in values and gradients, for every slice, and never holds the logits of a batch."""

from __future__ import annotations

import math
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from posttrain.core.sampling import Sampling
from posttrain.objectives.kernel import linear_scores
from posttrain.objectives.logprobs import TokenScores, logit_scores

N, H, V, K = 13, 4, 29, 3
SAMPLINGS = [
    Sampling(),
    Sampling(temperature=0.0),
    Sampling(temperature=0.4),
    Sampling(temperature=1.7),
    Sampling(top_k=6),
    Sampling(top_p=0.7),
    Sampling(min_p=0.2),
    Sampling(temperature=0.6, top_k=12, top_p=0.9),
    Sampling(temperature=1.3, top_k=20, top_p=0.95, min_p=0.05),
]
every_sampling = pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)


@pytest.fixture
def slices(monkeypatch):
    """Set how many logits a slice holds."""
    return lambda size: monkeypatch.setattr("posttrain.objectives.kernel.SLICE", size)


class Inputs(NamedTuple):
    hidden_NH: Tensor
    weight_VH: Tensor
    bias_V: Tensor
    targets_N: Tensor
    at_NK: Tensor


def inputs(n: int = N, dtype: torch.dtype = torch.float64) -> Inputs:
    """Random states and head; every fourth target also stands in at_NK, where two ids are equal."""
    generator = torch.Generator().manual_seed(1)
    states, weight, bias = (torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype) for shape in ((n, H), (V, H), (V,)))
    targets_N = torch.randint(V, (n,), generator=generator)
    at_NK = torch.randint(V, (n, K), generator=generator)
    at_NK[:, 1] = at_NK[:, 2]
    at_NK[::4, 0] = targets_N[::4]
    return Inputs(states.requires_grad_(), weight.requires_grad_(), bias.requires_grad_(), targets_N, at_NK)


def plain(x: Inputs, sampling: Sampling, *, bias: bool = True, **options) -> TokenScores:
    """The path that holds all logits."""
    return logit_scores(F.linear(x.hidden_NH, x.weight_VH, x.bias_V if bias else None), x.targets_N, sampling, **options)


def sliced(x: Inputs, sampling: Sampling, *, bias: bool = True, **options) -> TokenScores:
    """The kernel."""
    return linear_scores(x.hidden_NH, x.weight_VH, x.targets_N, sampling, bias_V=x.bias_V if bias else None, **options)


def gradients(x: Inputs, scores: TokenScores, *, bias: bool = True) -> list[Tensor]:
    """Of a loss in which every output has its own weight per token, and excluded ids have one too; one gradient per trained input."""
    generator = torch.Generator().manual_seed(2)
    outputs = [y for y in (scores.logp_N, scores.entropy_N, scores.at_NK) if y is not None and y.requires_grad]
    weights = [torch.randn(y.shape, generator=generator, dtype=torch.float64).to(y.dtype) for y in outputs]
    trained = [tensor for tensor in x[: 3 if bias else 2] if tensor.requires_grad]
    return list(torch.autograd.grad(outputs, trained, weights))


def assert_equal(found: TokenScores, expected: TokenScores, tolerance: float = 1e-10) -> None:
    """All values."""
    assert (found.top is None) == (expected.top is None)
    if found.top is not None and expected.top is not None:
        assert torch.equal(found.top[0], expected.top[0])
        torch.testing.assert_close(found.top[1], expected.top[1], atol=tolerance, rtol=0)
    for one, other in ((found.logp_N, expected.logp_N), (found.entropy_N, expected.entropy_N), (found.at_NK, expected.at_NK)):
        torch.testing.assert_close(one, other, atol=tolerance, rtol=0)


def test_the_example_by_hand():
    # logits (0, log 3): probabilities 1/4 and 3/4
    hidden = torch.tensor([[1.0]], requires_grad=True)
    weight = torch.tensor([[0.0], [math.log(3)]], requires_grad=True)
    scores = linear_scores(hidden, weight, torch.tensor([1]), Sampling())
    assert scores.logp_N.item() == pytest.approx(math.log(0.75), abs=1e-6)
    assert scores.entropy_N.item() == pytest.approx(0.25 * math.log(4) + 0.75 * math.log(4 / 3), abs=1e-6)
    assert (scores.top, scores.at_NK) == (None, None)
    scores.logp_N.sum().backward()
    # by the logits [v = t] - p_v = (-1/4, 3/4 - 1/2) = (-1/4, 1/4); by the state 1/4 log 3
    assert weight.grad is not None
    assert hidden.grad is not None
    assert weight.grad.flatten().tolist() == pytest.approx([-0.25, 0.25], abs=1e-6)
    assert hidden.grad.item() == pytest.approx(0.25 * math.log(3), abs=1e-6)


@every_sampling
@pytest.mark.parametrize("entropy_gradient", [False, True])
@pytest.mark.parametrize("at", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_values_and_gradients_equal_the_plain_path(slices, sampling, entropy_gradient, at, bias):
    slices(4 * V)
    x = inputs()
    options = {"bias": bias, "entropy_gradient": entropy_gradient, "top_k": 5, "at_NK": x.at_NK if at else None}
    expected, found = plain(x, sampling, **options), sliced(x, sampling, **options)
    assert_equal(found, expected)
    assert found.entropy_N.requires_grad == entropy_gradient
    for one, other in zip(gradients(x, found, bias=bias), gradients(x, expected, bias=bias), strict=True):
        assert other.norm() > 0.1
        torch.testing.assert_close(one, other, atol=1e-10, rtol=0)


@every_sampling
@pytest.mark.parametrize("size", [1, V, 3 * V + 1, 10 * V])
def test_the_size_of_a_slice_changes_nothing(slices, sampling, size):
    x = inputs()
    options = {"entropy_gradient": True, "top_k": 4, "at_NK": x.at_NK}
    slices(2**24)
    expected = sliced(x, sampling, **options)
    by_expected = gradients(x, expected)
    slices(size)
    found = sliced(x, sampling, **options)
    assert_equal(found, expected, 1e-12)
    for one, other in zip(gradients(x, found), by_expected, strict=True):
        torch.testing.assert_close(one, other, atol=1e-12, rtol=0)


@pytest.mark.parametrize("sampling", [Sampling(temperature=0.7), Sampling(top_k=9)], ids=str)
def test_gradients_equal_finite_differences(slices, sampling):
    slices(2 * V)
    x = inputs(5)

    def outputs(hidden_NH, weight_VH, bias_V):
        moved = Inputs(hidden_NH, weight_VH, bias_V, x.targets_N, x.targets_N[:, None].expand(-1, 2))
        scores = sliced(moved, sampling, entropy_gradient=True, at_NK=moved.at_NK)
        assert scores.at_NK is not None
        return scores.logp_N, scores.entropy_N, scores.at_NK

    assert torch.autograd.gradcheck(outputs, x[:3])


def test_a_loss_of_one_output_alone():
    x = inputs()
    for name in ("logp_N", "entropy_N", "at_NK"):
        results = []
        for path in (plain, sliced):
            scores = path(x, Sampling(temperature=0.7), entropy_gradient=True, at_NK=x.at_NK)
            results.append(torch.autograd.grad(getattr(scores, name).square().sum(), x[:3]))
        for one, other in zip(*results, strict=True):
            torch.testing.assert_close(one, other, atol=1e-10, rtol=0)


@every_sampling
@pytest.mark.parametrize("trained", [0, 1, 2])
def test_a_gradient_for_what_is_trained_only(slices, sampling, trained):
    slices(3 * V)
    x = inputs()
    expected = gradients(x, plain(x, sampling))[trained]
    for index in range(3):
        x[index].requires_grad_(index == trained)
    (found,) = gradients(x, sliced(x, sampling))
    torch.testing.assert_close(found, expected, atol=1e-10, rtol=0)


@pytest.mark.parametrize("entropy_gradient", [False, True])
@pytest.mark.parametrize("at", [False, True])
def test_a_frozen_head_does_not_stop_other_gradients(entropy_gradient, at):
    x = inputs()
    options = {"entropy_gradient": entropy_gradient, "at_NK": x.at_NK if at else None}
    expected = gradients(x, plain(x, Sampling(temperature=0.7), **options))[0]
    x.weight_VH.requires_grad_(False)
    x.bias_V.requires_grad_(False)
    (found,) = gradients(x, sliced(x, Sampling(temperature=0.7), **options))
    torch.testing.assert_close(found, expected, atol=1e-10, rtol=0)


@pytest.mark.parametrize(("head_trained", "products"), [(True, 4), (False, 2)])
def test_a_frozen_head_is_not_projected_twice(head_trained, products):
    # trained: logits, logits again, gradient of the states, gradient of the weight; frozen: logits, derivative by the states
    x = inputs()
    x.weight_VH.requires_grad_(head_trained)
    with Products() as seen:
        sliced(x, Sampling(), bias=False).logp_N.sum().backward()
    assert seen.count == products


def test_no_gradient_where_none_is_wanted():
    x = inputs()
    scores = sliced(x, Sampling(), top_k=2, at_NK=x.at_NK)
    assert scores.top is not None
    assert scores.at_NK is not None
    assert (scores.logp_N.requires_grad, scores.at_NK.requires_grad) == (True, True)
    assert not scores.entropy_N.requires_grad
    assert not scores.top[1].requires_grad
    with torch.no_grad():
        assert not sliced(x, Sampling(), entropy_gradient=True).logp_N.requires_grad


def test_excluded_tokens_have_no_probability_and_no_gradient():
    # probabilities 0.15, 0.4, 0.05, 0.3, 0.1; top-k 2 leaves 1 and 3, and token 0 stays because it was sampled: 0.4, 0.3, 0.15 over 0.85
    probabilities = [0.15, 0.4, 0.05, 0.3, 0.1]
    hidden = torch.ones(1, 1, dtype=torch.float64, requires_grad=True)
    weight = torch.tensor(probabilities, dtype=torch.float64).log()[:, None].requires_grad_()
    scores = linear_scores(
        hidden, weight, torch.tensor([0]), Sampling(top_k=2), entropy_gradient=True, top_k=4, at_NK=torch.tensor([[3, 2]])
    )
    kept = [15 / 85, 40 / 85, 30 / 85]
    assert scores.logp_N.exp().item() == pytest.approx(15 / 85)
    assert scores.entropy_N.item() == pytest.approx(-sum(p * math.log(p) for p in kept))
    assert scores.top is not None
    assert scores.at_NK is not None
    assert scores.top[0][0, :3].tolist() == [1, 3, 0]
    assert scores.top[1].exp().tolist()[0] == pytest.approx([40 / 85, 30 / 85, 15 / 85, 0.0])
    assert scores.at_NK.exp().tolist()[0] == pytest.approx([30 / 85, 0.0])
    (by_logp,) = torch.autograd.grad(scores.logp_N.sum(), weight, retain_graph=True)
    assert by_logp.flatten().tolist() == pytest.approx([70 / 85, -40 / 85, 0.0, -30 / 85, 0.0])
    # weight 7 on the excluded token 2 adds nothing
    (by_at,) = torch.autograd.grad(scores.at_NK, weight, torch.tensor([[1.0, 7.0]], dtype=torch.float64), retain_graph=True)
    assert by_at.flatten().tolist() == pytest.approx([-15 / 85, -40 / 85, 0.0, 55 / 85, 0.0])
    (by_entropy,) = torch.autograd.grad(scores.entropy_N.sum(), weight)
    assert by_entropy[[2, 4]].tolist() == [[0.0], [0.0]]
    assert by_entropy.isfinite().all()


def test_infinitely_negative_logits_are_excluded_too():
    # a padded vocabulary: the bias shuts off token 2; tokens 0 and 1 are equal
    hidden, weight = torch.zeros(2, 1, requires_grad=True), torch.ones(3, 1, requires_grad=True)
    bias = torch.tensor([0.0, 0.0, -math.inf])
    scores = linear_scores(hidden, weight, torch.tensor([0, 1]), Sampling(temperature=0.5), bias_V=bias, entropy_gradient=True)
    assert scores.entropy_N.tolist() == pytest.approx([math.log(2)] * 2)
    by_hidden, by_weight = torch.autograd.grad(scores.logp_N.sum() + 3 * scores.entropy_N.sum(), [hidden, weight])
    assert by_hidden.isfinite().all()
    assert by_weight.isfinite().all()


def test_a_confident_token_keeps_its_digits():
    # logits 1000 and 990: 1 - p = 1 / (1 + e^10) = 4.54e-5. As one number, log(e^1000 + e^990) is 1000 in float32, and 1 - p is 0.
    hidden, weight = torch.ones(1, 1), torch.tensor([[1000.0], [990.0]], requires_grad=True)
    linear_scores(hidden, weight, torch.tensor([0]), Sampling()).logp_N.sum().backward()
    assert weight.grad is not None
    assert weight.grad.flatten().tolist() == pytest.approx([4.5398e-5, -4.5398e-5], rel=5e-3)


def test_float32_and_its_dtype():
    x = inputs(dtype=torch.float32)
    expected, found = plain(x, Sampling(temperature=0.7), at_NK=x.at_NK), sliced(x, Sampling(temperature=0.7), at_NK=x.at_NK)
    assert_equal(found, expected, 1e-5)
    assert found.logp_N.dtype == torch.float32
    for one, other in zip(gradients(x, found), gradients(x, expected), strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("head_trained", [True, False])
def test_low_precision_operands_are_scored_in_float32(slices, head_trained):
    slices(4 * V)
    x = inputs(dtype=torch.bfloat16)
    for tensor in (x.weight_VH, x.bias_V):
        tensor.requires_grad_(head_trained)
    found, expected = sliced(x, Sampling(temperature=0.7)), plain(x, Sampling(temperature=0.7))
    assert found.logp_N.dtype == torch.float32
    assert_equal(found, expected, 1e-5)
    states, weight, bias = (tensor.detach().float().requires_grad_(tensor.requires_grad) for tensor in x[:3])
    exact = Inputs(states, weight, bias, x.targets_N, x.at_NK)
    for one, other in zip(gradients(x, found), gradients(exact, plain(exact, Sampling(temperature=0.7))), strict=True):
        assert one.dtype == torch.bfloat16
        # a logit of 8 is rounded by up to 2^-9 of itself, which is 2% of a probability at temperature 0.7
        torch.testing.assert_close(one.float(), other, atol=5e-2 * other.abs().max().item(), rtol=0)


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(top_k=6)], ids=str)
def test_no_tokens(sampling):
    x = inputs(0)
    scores = sliced(x, sampling, entropy_gradient=True, top_k=2, at_NK=x.at_NK)
    assert scores.top is not None
    assert scores.at_NK is not None
    assert [tuple(t.shape) for t in (scores.logp_N, scores.entropy_N, *scores.top, scores.at_NK)] == [(0,), (0,), (0, 2), (0, 2), (0, K)]
    by_hidden, by_weight, by_bias = gradients(x, scores)
    assert by_hidden.shape == (0, H)
    assert (by_weight == 0).all()
    assert (by_bias == 0).all()


class Products(TorchDispatchMode):
    """Counts matrix products."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.addmm_)
        return func(*args, **(kwargs or {}))


class Largest(TorchDispatchMode):
    """Notes the size of the largest storage of one precision that any operation returns."""

    def __init__(self, dtype: torch.dtype = torch.float64):
        super().__init__()
        self.dtype, self.elements = dtype, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        sizes = [
            leaf.untyped_storage().nbytes() // leaf.element_size()
            for leaf in tree_leaves(out)
            if isinstance(leaf, Tensor) and leaf.dtype == self.dtype
        ]
        self.elements = max([self.elements, *sizes])
        return out


@every_sampling
@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("extras", [False, True])
def test_no_tensor_outgrows_a_slice(slices, sampling, frozen, extras):
    # 13 x 29 = 377 logits; states, weight and given ids have 52, 116 and 39 elements
    slices(120)
    x = inputs()
    x.weight_VH.requires_grad_(not frozen)
    x.bias_V.requires_grad_(not frozen)
    options = {"entropy_gradient": True, "top_k": 2, "at_NK": x.at_NK} if extras else {}
    largest = {}
    for path in (sliced, plain):
        with Largest() as seen:
            scores = path(x, sampling, **options)
            outputs = [y for y in (scores.logp_N, scores.entropy_N, scores.at_NK) if y is not None and y.requires_grad]
            torch.autograd.backward([y.sum() for y in outputs])
        largest[path] = seen.elements
    assert largest[sliced] <= 120
    assert largest[plain] == N * V  # what is measured can be seen


def test_a_wide_weight_is_raised_in_precision_by_slices(slices):
    # few tokens, so that all of the 29 x 40 weight would fit the slices of 2 x 60 logits
    slices(120)
    hidden, weight = torch.ones(2, 40, dtype=torch.bfloat16, requires_grad=True), torch.ones(V, 40, dtype=torch.bfloat16)
    with Largest(torch.float32) as seen:
        linear_scores(hidden, weight, torch.tensor([0, 1]), Sampling(), entropy_gradient=True).entropy_N.sum().backward()
    assert 80 <= seen.elements <= 120
