"""Every method against a loop over single images, where gradients go and where they do not, and BN."""
import copy
import math

import pytest
import torch

import augmentation
import helpers
import train_baselines as tb
import training
from helpers import generator
from models import frozen_bn, make_model

TERMS = helpers.BASELINES
B, C, S = 5, 4, 8

# ---------------------------------------------------------------- the objectives, one image at a time


def linear(seed=0):
    """Some of its predictions are confident, some are not."""
    return helpers.Linear(S, C, K=1, seed=seed, sureness=4)


class Views:
    """A repeatable "augmentation" that differs at every call: call n rolls the images by n pixels."""

    def __init__(self):
        self.calls = 0

    def __call__(self, x):
        self.calls += 1
        return x.roll(self.calls, 3)


def batch(unlabeled=B):
    return helpers.tiny_batch([2, 0, 3, 1, 0], unlabeled, S)


def scaled(x):
    return [image.double() * 2 / 255 - 1 for image in x]


def p_of(model, image):
    """p(y|x) of one image, a list of C numbers with gradient."""
    e = model(image[None])[0][0].exp()
    return [e[c] / sum(e) for c in range(C)]


def numbers(p):
    return [v.item() for v in p]                                # without gradient


def mean(values):
    return sum(values) / len(values)


def one_hot(label):
    return [float(c == label) for c in range(C)]


def ce(p, target):
    """Cross-entropy of one image; the target is a class or a distribution."""
    target = one_hot(target) if isinstance(target, int) else target
    return -sum(t * torch.log(v) for t, v in zip(target, p))


def square(p, target):
    return sum((v - t) ** 2 for v, t in zip(p, target)) / C


def mixed(share, a, b):
    return [share * v + (1 - share) * w for v, w in zip(a, b)]


def drawn_shares(n, gen):
    return augmentation.mixup_share(n, 0.75, gen, "cpu").tolist()


RAMP, STEP, WEIGHT = 20, 5, 3.0
UP = 0.25                                                       # step 5 of a ramp of 20


def loop_labeled_only(model, ema, x_l, y_l, x_u, gen, view):
    return {"class": mean([ce(p_of(model, x), y) for x, y in zip(scaled(view(x_l)), y_l.tolist())])}


def loop_s4l(model, ema, x_l, y_l, x_u, gen, view):
    labeled, unlabeled = scaled(view(x_l)), scaled(view(x_u))
    class_losses = [ce(p_of(model, torch.rot90(x, k, (1, 2))), y)
                    for x, y in zip(labeled, y_l.tolist()) for k in range(4)]
    rotation_losses = [-torch.log(model(torch.rot90(x, k, (1, 2))[None])[2][0, 0].softmax(0)[k])
                       for x in labeled + unlabeled for k in range(4)]
    return {"class": mean(class_losses), "rotation": WEIGHT * mean(rotation_losses)}


def loop_s4l_upright(model, ema, x_l, y_l, x_u, gen, view):
    """The rotation loss of S4L, and the class loss of the upright copies only."""
    terms = loop_s4l(model, ema, x_l, y_l, x_u, gen, Views())
    return terms | loop_labeled_only(model, ema, x_l, y_l, x_u, gen, view)


def loop_s4l_one_rotation(model, ema, x_l, y_l, x_u, gen, view):
    """Each image is rotated once; its class loss is that of the rotated image."""
    images = scaled(view(x_l)) + scaled(view(x_u))
    z = torch.randint(0, 4, (len(images),), generator=gen).tolist()
    images = [torch.rot90(x, k, (1, 2)) for x, k in zip(images, z)]
    rotation_losses = [-torch.log(model(x[None])[2][0, 0].softmax(0)[k]) for x, k in zip(images, z)]
    class_losses = [ce(p_of(model, x), y) for x, y in zip(images, y_l.tolist())]
    return {"class": mean(class_losses), "rotation": WEIGHT * mean(rotation_losses)}


def loop_pi_model(model, ema, x_l, y_l, x_u, gen, view):
    terms = loop_labeled_only(model, ema, x_l, y_l, x_u, gen, view)
    targets, images = [numbers(p_of(model, x)) for x in scaled(view(x_u))], scaled(view(x_u))
    terms["consistency"] = UP * WEIGHT * mean([square(p_of(model, x), t) for x, t in zip(images, targets)])
    return terms


def loop_mean_teacher(model, ema, x_l, y_l, x_u, gen, view):
    terms = loop_labeled_only(model, ema, x_l, y_l, x_u, gen, view)
    targets, images = [numbers(p_of(ema, x)) for x in scaled(view(x_u))], scaled(view(x_u))
    terms["consistency"] = UP * WEIGHT * mean([square(p_of(model, x), t) for x, t in zip(images, targets)])
    return terms


def loop_ict(model, ema, x_l, y_l, x_u, gen, view):
    terms = loop_labeled_only(model, ema, x_l, y_l, x_u, gen, view)
    x, share = scaled(view(x_u)), drawn_shares(len(x_u), gen)
    q = [numbers(p_of(ema, image)) for image in x]              # the teacher sees the images, not the mix
    losses = []
    for i, j in zip(range(len(x)), reversed(range(len(x)))):
        p = p_of(model, share[i] * x[i] + (1 - share[i]) * x[j])
        losses.append(square(p, mixed(share[i], q[i], q[j])))
    terms["consistency"] = UP * WEIGHT * mean(losses)
    return terms


def loop_pseudo_label(model, ema, x_l, y_l, x_u, gen, view):
    terms = loop_labeled_only(model, ema, x_l, y_l, x_u, gen, view)
    losses = []
    for x in scaled(view(x_u)):
        p = p_of(model, x)
        confidence = max(numbers(p))
        losses.append(ce(p, numbers(p).index(confidence)) if confidence > 0.5 else 0.0)
    assert 0 < sum(isinstance(v, float) for v in losses) < len(x_u)     # some are masked, some are not
    terms["pseudo"] = UP * WEIGHT * mean(losses)
    return terms


def loop_mixup(model, ema, x_l, y_l, x_u, gen, view):
    labeled, unlabeled = scaled(view(x_l)), scaled(view(x_u))
    q = [numbers(p_of(model, x)) for x in unlabeled]
    y = [one_hot(label) for label in y_l.tolist()]
    share_l, share_u = drawn_shares(len(x_l), gen), drawn_shares(len(x_u), gen)

    def loss(x, target, share):
        pairs = zip(range(len(x)), reversed(range(len(x))))
        return mean([ce(p_of(model, share[i] * x[i] + (1 - share[i]) * x[j]),
                        mixed(share[i], target[i], target[j])) for i, j in pairs])

    return {"class": loss(labeled, y, share_l), "mixup": WEIGHT * loss(unlabeled, q, share_u)}


def loop_mixmatch(model, ema, x_l, y_l, x_u, gen, view):
    labeled, views = scaled(view(x_l)), [scaled(view(x_u)), scaled(view(x_u))]
    guesses = []
    for i in range(len(x_u)):
        p_bar = [mean([numbers(p_of(model, v[i]))[c] for v in views]) for c in range(C)]
        total = sum(v ** 2 for v in p_bar)                      # T = 0.5
        guesses.append([v ** 2 / total for v in p_bar])
    x = labeled + views[0] + views[1]
    p = [one_hot(label) for label in y_l.tolist()] + guesses + guesses
    N = len(x)
    share, partner = drawn_shares(N, gen), torch.randperm(N, generator=gen).tolist()
    seen = [share[i] * x[i] + (1 - share[i]) * x[partner[i]] for i in range(N)]
    target = [mixed(share[i], p[i], p[partner[i]]) for i in range(N)]
    guess_losses = [square(p_of(model, seen[i]), target[i]) for i in range(B, N)]
    return {"class": mean([ce(p_of(model, seen[i]), target[i]) for i in range(B)]),
            "guess": UP * WEIGHT * mean(guess_losses)}


def loop_fixmatch(model, ema, x_l, y_l, x_u, gen, view):
    weak, strong = scaled(view(x_u)), scaled(augmentation.strong_augment(view(x_u), gen))
    labeled = scaled(view(x_l))
    losses = []
    for w, s in zip(weak, strong):
        p = numbers(p_of(model, w))
        losses.append(ce(p_of(model, s), p.index(max(p))) if max(p) >= 0.5 else 0.0)
    assert 0 < sum(isinstance(v, float) for v in losses) < len(x_u)
    return {"class": mean([ce(p_of(model, x), y) for x, y in zip(labeled, y_l.tolist())]),
            "pseudo": WEIGHT * mean(losses)}


def loop_vat(model, ema, x_l, y_l, x_u, gen, view):
    terms = loop_labeled_only(model, ema, x_l, y_l, x_u, gen, view)
    x = augmentation.scale(view(x_u))
    r = tb.worst_direction(copy.deepcopy(model).float(), x, 6.0, gen).double()  # see test_baseline_parts.py
    divergences, entropies = [], []
    for image, move in zip(x.double(), r):
        p, q = p_of(model, image), p_of(model, image + move)
        divergences.append(sum(t * (math.log(t) - torch.log(v)) for t, v in zip(numbers(p), q)))
        entropies.append(-sum(v * torch.log(v) for v in p))
    return terms | {"vat": UP * WEIGHT * mean(divergences), "entropy": 0.06 * mean(entropies)}


LOOPS = dict(labeled_only=loop_labeled_only, s4l=loop_s4l, pi_model=loop_pi_model,
             pseudo_label=loop_pseudo_label, mixup=loop_mixup, vat=loop_vat, mean_teacher=loop_mean_teacher,
             mixmatch=loop_mixmatch, ict=loop_ict, fixmatch=loop_fixmatch)
CONSTANTS = dict(step=STEP, ramp=RAMP, weight=WEIGHT, threshold=0.5, beta=0.75, temperature=0.5, epsilon=6.0,
                 entropy_weight=0.06)


@pytest.mark.parametrize("unlabeled", [B, 8, 3])
@pytest.mark.parametrize("method", LOOPS)
def test_objective_is_that_of_its_paper(method, unlabeled):
    """Values and gradients of each term. Targets in the loops are numbers: a gradient into one would show."""
    x, model, ema = batch(unlabeled), linear(), linear(seed=9)
    slow, slow_ema = copy.deepcopy(model).double(), copy.deepcopy(ema).double()
    terms = tb.OBJECTIVES[method](model, *x, augment=Views(), gen=generator(5), ema=ema, **CONSTANTS)
    expected = LOOPS[method](slow, slow_ema, *x, generator(5), Views())
    assert list(terms) == list(expected) == TERMS[method]
    helpers.assert_same_terms(terms, expected, model, slow)


@pytest.mark.parametrize("variant, loop", [(dict(class_copies="upright"), loop_s4l_upright),
                                           (dict(rotations="one"), loop_s4l_one_rotation)])
def test_variants_of_s4l(variant, loop):
    (x_l, y_l, x_u), model = batch(), linear()
    slow = copy.deepcopy(model).double()
    terms = tb.s4l(model, x_l, y_l, x_u, augment=Views(), gen=generator(5), weight=WEIGHT, **variant)
    expected = loop(slow, None, x_l, y_l, x_u, generator(5), Views())
    reached = helpers.assert_same_terms(terms, expected, model, slow)
    assert reached == {"class": {"y"}, "rotation": {"R"}}


def test_rotation_is_the_rotation_term_of_s4l_and_sees_no_labels():
    (x_l, y_l, x_u), model = batch(), linear()
    ours = tb.rotation(model, x_l, torch.full_like(y_l, -1), x_u, augment=Views())
    theirs = loop_s4l(copy.deepcopy(model).double(), None, x_l, y_l, x_u, None, Views())
    torch.testing.assert_close(WEIGHT * ours["rotation"].double(), theirs["rotation"], atol=1e-5, rtol=1e-4)
    assert list(ours) == ["rotation"]


# ---------------------------------------------------------------- with a real network: gradients and BN


def call(method, net, ema):
    x = helpers.digits_batch(16, mu=2 if method == "fixmatch" else 1)
    constants = CONSTANTS | dict(threshold=0.0)
    return tb.OBJECTIVES[method](net, *x, augment=Views(), gen=generator(), ema=ema, **constants)


@pytest.mark.parametrize("autocast", [False, True])             # it keeps cast weights, even without gradient
@pytest.mark.parametrize("method", LOOPS)
def test_each_term_reaches_the_student_and_nothing_else(method, autocast):
    torch.manual_seed(0)
    net, ema = (make_model("wrn-10-1", 10, int(method == "s4l"), aux=False) for _ in range(2))
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        terms = call(method, net, ema)                          # ema could receive a gradient, and must not
    assert all(term.dtype == torch.float32 for term in terms.values())
    for name, term in terms.items():
        net.zero_grad()
        term.backward(retain_graph=True)
        kernels = {n: p.grad for n, p in net.named_parameters() if p.ndim > 1}
        for parameter, grad in kernels.items():
            other_head = dict(rotation="classifier").get(name, "rotation")
            if parameter.startswith(other_head):
                assert grad is None or not grad.abs().max()
            else:
                assert grad is not None and grad.abs().max() > 0, (name, parameter)
        assert all(p.grad is None for p in ema.parameters())


@pytest.mark.parametrize("method", LOOPS)
def test_one_pass_updates_the_running_statistics_and_it_is_that_of_the_paper(method):
    torch.manual_seed(0)
    net = make_model("wrn-10-1", 10, int(method == "s4l"), aux=False, bn_momentum=0.5)
    before, ema = copy.deepcopy(net), copy.deepcopy(net)
    passes = []                                                 # the images, and whether BN was updated
    net.register_forward_pre_hook(
        lambda m, x: passes.append((x[0].clone(), m.backbone.bn.track_running_stats)))
    call(method, net, ema)
    assert all(v == 1 for k, v in net.named_buffers() if k.endswith("num_batches_tracked"))
    assert helpers.same(dict(ema.named_buffers()), dict(before.named_buffers()))
    updating = [x for x, tracked in passes if tracked]
    assert len(updating) == 1
    before(updating[0])                                         # as if there had been no other pass
    assert helpers.same(dict(net.named_buffers()), dict(before.named_buffers()))
    x_l, _, x_u = helpers.digits_batch(16)
    if method in ("labeled_only", "pi_model", "pseudo_label", "vat", "mean_teacher", "ict"):
        assert torch.equal(updating[0], augmentation.scale(x_l.roll(1, 3)))     # the first labelled view
    else:
        sizes = {"s4l": 4 * 32, "fixmatch": 16 + 2 * 2 * 16, "mixup": 16, "mixmatch": 16}
        assert len(updating[0]) == sizes[method]
    first, others = updating[0], [x for x, tracked in passes if not tracked]

    def distances(image, images):
        return (augmentation.scale(images).flatten(1) - image.flatten()).norm(dim=1)

    if method == "mixup":           # mixed labelled images: each is nearest to a labelled image
        x = torch.cat([x_l.roll(1, 3), x_u.roll(1, 3)])
        assert all(distances(image, x).argmin() < len(x_l) for image in first)
    if method == "mixmatch":        # each of the three batches contains labelled and unlabelled images
        views = x_l.roll(1, 3), x_u.roll(2, 3), x_u.roll(3, 3)
        for x in first, *others[-2:]:
            nearest = {min(range(3), key=lambda k: distances(image, views[k]).min()) for image in x}
            assert len(nearest) > 1


def test_the_teacher_is_in_training_mode_and_uses_the_statistics_of_its_batch():
    torch.manual_seed(0)
    net, ema = (make_model("wrn-10-1", 10, 0, aux=False) for _ in range(2))
    seen = []
    hook = ema.register_forward_hook(lambda m, x, y: seen.append((x[0], y[0])))
    for method in "mean_teacher", "ict":
        call(method, net, ema)
    hook.remove()
    for x, y in seen:
        with frozen_bn(ema), torch.no_grad():
            assert ema.training and torch.equal(ema(x)[0], y)
        assert not torch.allclose(ema.eval()(x)[0], y, atol=1e-2)
        ema.train()
    assert len(seen) == 2


# ---------------------------------------------------------------- masks and weights


def test_masks_at_the_threshold():
    """Two classes at p = 0.5: Pseudo-Label needs more than its threshold, FixMatch at least its threshold."""
    logits = torch.zeros(B, 2, requires_grad=True)

    def model(x):
        return logits.repeat(len(x) // B, 1), None, None

    x_l, _, x_u = batch()
    y_l = torch.zeros(B, dtype=torch.long)
    arguments = dict(augment=lambda x: x, gen=generator(), ema=None) | CONSTANTS
    model.modules = lambda: []
    assert tb.pseudo_label(model, x_l, y_l, x_u, **arguments)["pseudo"] == 0
    assert tb.pseudo_label(model, x_l, y_l, x_u, **arguments | dict(threshold=0.49))["pseudo"] > 0
    assert tb.fixmatch(model, x_l, y_l, x_u, **arguments)["pseudo"] > 0
    assert tb.fixmatch(model, x_l, y_l, x_u, **arguments | dict(threshold=0.51))["pseudo"] == 0


def test_pseudo_label_below_its_threshold_has_no_gradient():
    # p = 0.98, 0.88, 0.97 and 0.73
    logits = torch.tensor([[4.0, 0.0], [2.0, 0.0], [0.0, 3.5], [0.0, 1.0]], requires_grad=True)

    def model(x):
        return logits, None, None

    model.modules = lambda: []
    x, y = torch.zeros(4, 3, S, S, dtype=torch.uint8), torch.zeros(4, dtype=torch.long)
    terms = tb.pseudo_label(model, x, y, x, augment=lambda x: x, step=1, ramp=1, weight=1.0, threshold=0.95)
    grad, = torch.autograd.grad(terms["pseudo"], logits)
    assert (grad.abs().sum(1) > 0).tolist() == [True, False, True, False]
    p = logits[0].detach().softmax(0)
    torch.testing.assert_close(grad[0], (p - torch.tensor([1.0, 0.0])) / 4)     # the mean over all four


def test_weights_grow_linearly():
    assert [training.ramp_up(step, 0, 8) for step in (0, 2, 8, 80)] == [0, 0.25, 1, 1]
    assert [training.ramp_up(step, 4, 8) for step in (0, 4, 5, 8, 9)] == [0, 0, 0.25, 1, 1]
    assert training.ramp_up(0, 0, 0) == 1                        # no ramp
    for recipe in "paper", "fast":
        assert tb.ramp_steps("pi_model", 1000, recipe) == 400
        assert tb.ramp_steps("vat", 1 << 20, recipe) == 0.4 * (1 << 20)
        assert tb.ramp_steps("swa", 480, recipe) == 150 and tb.ramp_steps("mixmatch", 1000, recipe) == 400
    assert tb.ramp_steps("mixmatch", 1 << 20, "paper") == 16_384
    assert tb.ramp_steps("mixmatch", 1 << 20, "fast") == 0.4 * (1 << 20)
    x = batch()
    for method in set(LOOPS) - {"labeled_only"}:
        terms = []
        for step in 0, 10, 20, 99:
            constants = CONSTANTS | dict(step=step, weight_decay=0)
            terms.append(tb.OBJECTIVES[method](linear(), *x, augment=Views(), gen=generator(), ema=linear(1),
                                               **constants))
        name = TERMS[method][1]
        first, half, full, later = (t[name].item() for t in terms)
        constant = method in ("s4l", "mixup", "fixmatch")
        assert full == later > 0
        assert (first, half) == ((full, full) if constant else (0, pytest.approx(full / 2)))
        others = [k for k in TERMS[method] if k != name]        # class, and the entropy of VAT
        assert all(torch.equal(terms[0][k], terms[3][k]) for k in others)
