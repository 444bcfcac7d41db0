"""Every equation agrees, in values and gradients, with a slow loop over single numbers."""
import pytest
import torch

from helpers import generator
from losses import (
    class_loss,
    entropy,
    independent_rotation_loss,
    labeled_rotation_loss,
    log_p_z,
    sharpen,
    soft_cross_entropy,
    unlabeled_rotation_loss,
)

N, C = 5, 3


def random_logits(*shape, seed=0, scale=2.0):
    return (scale * torch.randn(*shape, generator=generator(seed))).requires_grad_()


def softmax_loop(v):
    total = sum(v[i].double().exp() for i in range(len(v)))
    return [v[i].double().exp() / total for i in range(len(v))]


def p_z_loop(class_logits, rot_logits):
    """Eq. 1 for one image, one rotation and one class at a time, with probabilities in float64."""
    out = []
    for n in range(len(class_logits)):
        p_y = softmax_loop(class_logits[n])
        R = [softmax_loop(rot_logits[n, k]) for k in range(rot_logits.shape[1])]
        out.append(torch.stack([sum(R[k][z] * p_y[k] for k in range(len(p_y))) for z in range(4)]))
    return torch.stack(out)


def assert_same_gradients(a, b, *inputs):
    gradients = (torch.autograd.grad(loss, inputs, allow_unused=True) for loss in (a, b))
    for g, h in zip(*gradients):
        assert (g is None) == (h is None)
        if g is not None:
            assert g.abs().max() > 0
            torch.testing.assert_close(g, h, atol=1e-6, rtol=1e-4)


def test_log_p_z_is_equation_1():
    class_logits, rot_logits = random_logits(N, C), random_logits(N, C, 4, seed=1)
    log_p, loop = log_p_z(class_logits, rot_logits), p_z_loop(class_logits, rot_logits)
    torch.testing.assert_close(log_p.double(), loop.log(), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(log_p.exp().sum(1), torch.ones(N))
    weights = torch.randn(N, 4, generator=generator(2))
    assert_same_gradients((weights * log_p).sum(), (weights * loop.log()).sum(), class_logits, rot_logits)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [1e4, -1e4])
def test_log_p_z_survives_extreme_logits(dtype, size):
    class_logits = torch.zeros(2, C, dtype=dtype)
    class_logits[0, 0] = size
    rot_logits = torch.zeros(2, C, 4, dtype=dtype)
    rot_logits[:, :, 1] = -size                                 # every head is certain, and some are wrong
    rot_logits[1, 0, 2] = size
    class_logits.requires_grad_(), rot_logits.requires_grad_()
    log_p = log_p_z(class_logits, rot_logits)
    loss = unlabeled_rotation_loss(class_logits, rot_logits, torch.tensor([0, 1])).mean()
    loss = loss + labeled_rotation_loss(rot_logits, torch.tensor([0, 1]), torch.tensor([1, 2])).mean()
    loss = loss + soft_cross_entropy(class_logits, torch.full((2, C), 1 / C))
    loss.backward()
    for tensor in log_p, loss, class_logits.grad, rot_logits.grad:
        assert tensor.isfinite().all()
    assert rot_logits.grad.abs().max() > 0


def test_bfloat16_logits_are_not_rounded_again():
    class_logits = random_logits(N, C).detach().bfloat16()
    rot_logits = random_logits(N, C, 4, seed=1).detach().bfloat16()
    loop = p_z_loop(class_logits, rot_logits)
    torch.testing.assert_close(log_p_z(class_logits, rot_logits).double(), loop.log(), atol=1e-5, rtol=1e-5)
    z = torch.tensor([0, 1, 2, 3, 3])
    losses = unlabeled_rotation_loss(class_logits, rot_logits, z)
    torch.testing.assert_close(losses.double(), -loop[torch.arange(N), z].log(), atol=1e-5, rtol=1e-5)


def test_labeled_rotation_loss_only_involves_the_head_of_the_true_class():
    rot_logits, y, z = random_logits(N, C, 4), torch.tensor([0, 1, 2, 2, 0]), torch.tensor([0, 1, 2, 3, 3])
    losses = labeled_rotation_loss(rot_logits, y, z)
    loop = torch.stack([-softmax_loop(rot_logits[n, y[n]])[z[n]].log() for n in range(N)])
    torch.testing.assert_close(losses.double(), loop, atol=1e-5, rtol=1e-5)
    assert_same_gradients(losses.sum(), loop.sum(), rot_logits)
    grad, = torch.autograd.grad(labeled_rotation_loss(rot_logits, y, z).sum(), rot_logits)
    touched = grad.abs().sum(-1) > 0                            # (N, C)
    assert torch.equal(touched, torch.nn.functional.one_hot(y, C).bool())


def test_labeled_loss_is_equation_1_with_a_one_hot_class():
    rot_logits, y, z = random_logits(N, C, 4), torch.tensor([0, 1, 2, 2, 0]), torch.tensor([0, 1, 2, 3, 3])
    certain = 1e4 * torch.nn.functional.one_hot(y, C).float()
    expected = unlabeled_rotation_loss(certain, rot_logits, z)
    torch.testing.assert_close(labeled_rotation_loss(rot_logits, y, z), expected)


def test_unlabeled_rotation_loss_values_and_gradients():
    class_logits, rot_logits = random_logits(N, C), random_logits(N, C, 4, seed=1)
    z = torch.tensor([0, 1, 2, 3, 3])
    losses = unlabeled_rotation_loss(class_logits, rot_logits, z)
    p = p_z_loop(class_logits, rot_logits)
    loop = torch.stack([-p[n, z[n]].log() for n in range(N)])
    torch.testing.assert_close(losses.double(), loop, atol=1e-5, rtol=1e-5)
    assert_same_gradients(losses.mean(), loop.mean(), class_logits, rot_logits)


def test_unlabeled_rotation_loss_pulls_the_class_towards_the_head_that_knows_the_rotation():
    rot_logits = torch.zeros(1, C, 4)
    rot_logits[0, 1, 3] = 5.0                                   # only R_1 recognises z = 3
    class_logits = torch.zeros(1, C, requires_grad=True)
    loss = unlabeled_rotation_loss(class_logits, rot_logits, torch.tensor([3])).sum()
    grad, = torch.autograd.grad(loss, class_logits)
    assert grad[0, 1] < 0 < grad[0, 0] and grad[0, 0] == grad[0, 2]


def test_tied_heads_act_as_one_shared_head():
    class_logits, shared = random_logits(N, C), random_logits(N, 1, 4, seed=1)
    z = torch.tensor([0, 1, 2, 3, 3])
    tied = unlabeled_rotation_loss(class_logits, shared.expand(N, C, 4), z)
    one_head = torch.nn.functional.cross_entropy(shared[:, 0], z, reduction="none")
    torch.testing.assert_close(tied, one_head)
    torch.testing.assert_close(unlabeled_rotation_loss(class_logits, shared, z), one_head)
    torch.testing.assert_close(*(torch.autograd.grad(loss.sum(), shared)[0] for loss in (tied, one_head)))
    loss = unlabeled_rotation_loss(class_logits, shared.expand(N, C, 4), z).sum()
    grad, = torch.autograd.grad(loss, class_logits)
    assert grad.abs().max() < 1e-6                              # tied heads say nothing about the class


def test_independent_rotation_loss_is_the_mean_of_the_losses_of_all_heads():
    K = 6
    rot_logits, z = random_logits(N, K, 4), torch.tensor([0, 1, 2, 3, 3])
    losses = independent_rotation_loss(rot_logits, z)
    loop = torch.stack([sum(-softmax_loop(rot_logits[n, k])[z[n]].log() for k in range(K)) / K
                        for n in range(N)])
    torch.testing.assert_close(losses.double(), loop, atol=1e-5, rtol=1e-5)
    assert_same_gradients(losses.sum(), loop.sum(), rot_logits)


@pytest.mark.parametrize("T", [0.25, 0.5, 1.0])
def test_sharpen_is_equation_3(T):
    p = random_logits(N, C).softmax(-1).detach()
    sharp = sharpen(p, T)
    for n in range(N):
        powers = [float(p[n, i]) ** (1 / T) for i in range(C)]
        expected = torch.tensor([v / sum(powers) for v in powers], dtype=torch.double)
        torch.testing.assert_close(sharp[n].double(), expected, atol=1e-5, rtol=1e-5)


def test_sharpen_limits():
    p = torch.tensor([[0.5, 0.3, 0.2], [0.0, 0.4, 0.6], [0.0, 0.0, 1.0]])
    for T in 1e-4, 1e-45:
        torch.testing.assert_close(sharpen(p, T), torch.tensor([[1.0, 0, 0], [0, 0, 1], [0, 0, 1]]))
    torch.testing.assert_close(sharpen(p, 1.0), p)
    torch.testing.assert_close(sharpen(p, 0.5).sum(1), torch.ones(3))
    assert (sharpen(p, 0.5).max(1).values >= p.max(1).values).all()


def test_soft_cross_entropy_values_and_gradients():
    logits, target = random_logits(N, C), sharpen(random_logits(N, C, seed=3).softmax(-1), 0.5).detach()
    loss = soft_cross_entropy(logits, target)
    log_p = [[v.log() for v in softmax_loop(logits[n])] for n in range(N)]
    loop = -sum(target[n, i].item() * log_p[n][i] for n in range(N) for i in range(C)) / N
    torch.testing.assert_close(loss.double(), loop, atol=1e-5, rtol=1e-5)
    assert_same_gradients(loss, loop, logits)


def test_entropy_values_and_gradients():
    logits = random_logits(N, C)
    loop = sum(-p * p.log() for n in range(N) for p in softmax_loop(logits[n])) / N
    torch.testing.assert_close(entropy(logits).double(), loop, atol=1e-6, rtol=1e-5)
    assert_same_gradients(entropy(logits), loop, logits)
    sure = torch.tensor([[1e4, 0.0, 0.0]], requires_grad=True)  # p = 0 must give 0, not nan
    entropy(sure).backward()
    assert entropy(sure) == 0 and torch.isfinite(sure.grad).all()


def test_class_loss_is_the_mean_cross_entropy():
    logits, y = random_logits(N, C), torch.tensor([0, 2, 1, 1, 0])
    loop = sum(-softmax_loop(logits[n])[y[n]].log() for n in range(N)) / N
    torch.testing.assert_close(class_loss(logits, y).double(), loop)
    assert_same_gradients(class_loss(logits, y), loop, logits)


Y, Z = torch.tensor([0, 2, 1, 1, 0]), torch.tensor([0, 1, 2, 3, 1])
FUNCTIONS = {
    "class_loss": (lambda a: class_loss(a, Y), (N, C)),
    "log_p_z": (log_p_z, (N, C), (N, C, 4)),
    "labeled_rotation_loss": (lambda R: labeled_rotation_loss(R, Y, Z), (N, C, 4)),
    "unlabeled_rotation_loss": (lambda a, R: unlabeled_rotation_loss(a, R, Z), (N, C), (N, C, 4)),
    "independent_rotation_loss": (lambda R: independent_rotation_loss(R, Z), (N, C, 4)),
    "sharpen": (lambda a: sharpen(a.softmax(-1), 0.5), (N, C)),
    "soft_cross_entropy": (lambda a, b: soft_cross_entropy(a, b.softmax(-1)), (N, C), (N, C)),
    "entropy": (entropy, (N, C)),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_gradients_agree_with_differences_in_float64(name):
    function, *shapes = FUNCTIONS[name]
    inputs = [torch.randn(shape, generator=generator(k), dtype=torch.float64, requires_grad=True)
              for k, shape in enumerate(shapes)]
    assert function(*inputs).dtype == torch.float64
    assert torch.autograd.gradcheck(function, inputs)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_bfloat16_is_computed_in_float32(name):
    function, *shapes = FUNCTIONS[name]
    inputs = [torch.randn(shape, generator=generator(k)).bfloat16() for k, shape in enumerate(shapes)]
    result = function(*inputs)
    assert result.dtype == torch.float32
    if name not in ("sharpen", "soft_cross_entropy"):           # the softmax before these is in bfloat16
        torch.testing.assert_close(result, function(*(x.float() for x in inputs)))
