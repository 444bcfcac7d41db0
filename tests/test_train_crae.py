"""Algorithms 1 and 2 against a loop over single images, and the gradients they send."""
import itertools
from functools import partial

import pytest
import torch

import augmentation
import helpers
import losses
import presets
import train_baselines
import train_crae
import training
from helpers import generator
from models import make_model
from train_crae import crae, crae_mixmatch, crae_plus, rotation_terms

B, C, S, T, ETA, ETA2 = 3, 4, 8, 0.5, 0.7, 0.3

# ---------------------------------------------------------------- the objectives, one image at a time


def linear():
    return helpers.Linear(S, C, K=C, aux=True)


def batch(unlabeled=B):
    return helpers.tiny_batch([2, 0, 3], unlabeled, S)


def shifted(x):
    return x.roll(1, 3)                                         # an "augmentation" that can be repeated


def loop(model, x_l, y_l, x_u, ext1, ext2, entmin, aux, gen):
    """Eq. 2 and Eq. 4, image by image and in probabilities. Returns the named terms."""
    def rotated(image, k):
        return torch.rot90(shifted(image[None])[0].double() * 2 / 255 - 1, k, (1, 2))

    copies = [(rotated(x_l[i], k), y_l[i].item(), k) for k in range(4) for i in range(B)]
    copies += [(rotated(x_u[i], k), None, k) for k in range(4) for i in range(len(x_u))]
    seen = [x for x, *_ in copies]
    if ext2:
        alpha = (0.5 + 0.5 * torch.rand(len(copies), 1, 1, 1, generator=gen)).flatten()
        partner = torch.randperm(len(copies), generator=gen)
        seen = [alpha[i] * seen[i] + (1 - alpha[i]) * copies[partner[i]][0] for i in range(len(copies))]
    class_losses, aux_losses, labeled, unlabeled = [], [], [], []
    for (x, y, z), x_seen in zip(copies, seen):
        p_y, p_aux = (logits[0].softmax(0) for logits in model(x[None])[:2])    # always the unmixed image
        R = model(x_seen[None])[2][0].softmax(1)                # (C, 4)
        if y is None:
            unlabeled.append(-torch.log(sum(R[k, z] * p_y[k] for k in range(C))))
        else:
            class_losses.append(-torch.log(p_y[y]))
            if z == 0 or aux == "all":                          # the upright copies
                aux_losses.append(-torch.log(p_aux[y]))
            labeled.append(-torch.log(R[y, z]))
    terms = {"class": sum(class_losses) / len(class_losses), "aux": sum(aux_losses) / len(aux_losses),
             "rotation_labeled": ETA * sum(labeled) / len(labeled),
             "rotation_unlabeled": ETA * sum(unlabeled) / len(unlabeled)}
    if ext1:
        loss = []
        for i in range(len(x_u)):
            p = [model(rotated(x_u[i], k)[None])[0][0].softmax(0) for k in range(4)]
            p_bar = [sum(p[k][c].item() for k in range(4)) / 4 for c in range(C)]   # numbers: no gradient
            total = sum(v ** (1 / T) for v in p_bar)
            p_hat = [v ** (1 / T) / total for v in p_bar]
            loss += [-sum(p_hat[c] * torch.log(p[k][c]) for c in range(C)) for k in range(4)]
        terms["ext1"] = ETA2 * sum(loss) / len(loss)
    if entmin:
        p = [model(rotated(x_u[i], k)[None])[0][0].softmax(0) for k in range(4) for i in range(len(x_u))]
        terms["entropy"] = ETA2 * sum(-v * torch.log(v) for q in p for v in q) / len(p)
    return terms


@pytest.mark.parametrize("aux, unlabeled", [("upright", B), ("all", B), ("upright", 5), ("upright", 2)])
@pytest.mark.parametrize("ext1, ext2, entmin", [*itertools.product([False, True], [False, True], [False]),
                                                (False, False, True), (False, True, True)])
def test_objective_is_that_of_the_paper(ext1, ext2, entmin, aux, unlabeled):
    x_l, y_l, x_u = batch(unlabeled)
    model, slow = linear(), linear().double()
    common = dict(augment=shifted, gen=generator(5), select="marginal", eta=ETA, aux=aux)
    if ext1 or ext2 or entmin:
        extensions = dict(eta2=ETA2, temperature=T, ext1=ext1, ext2=ext2, entmin=entmin)
        terms = crae_plus(model, x_l, y_l, x_u, **common, **extensions)
    else:
        terms = crae(model, x_l, y_l, x_u, **common)
    expected = loop(slow, x_l, y_l, x_u, ext1, ext2, entmin, aux, generator(5))
    reached = helpers.assert_same_terms(terms, expected, model, slow, rtol=1e-5)
    may_reach = {"class": {"y"}, "aux": {"aux"}, "ext1": {"y"}, "entropy": {"y"},
                 "rotation_labeled": {"R"}, "rotation_unlabeled": {"y", "R"}}
    assert reached == {name: may_reach[name] for name in terms}


# ---------------------------------------------------------------- with MixMatch, our addition

MIXMATCH = dict(weight=3.0, beta=0.75, temperature=T, ramp=100, step=40)


@pytest.mark.parametrize("unlabeled", [B, 5, 2])
def test_crae_with_mixmatch_is_mixmatch_of_the_additional_classifier_and_crae_on_one_rotation(unlabeled):
    x_l, y_l, x_u = batch(unlabeled)
    model, slow, gen = linear(), linear().double(), generator(5)
    terms = crae_mixmatch(model, x_l, y_l, x_u, augment=shifted, gen=generator(5), select="marginal", eta=ETA,
                          **MIXMATCH)
    # test_train_baselines.py has MixMatch's loop.
    expected = train_baselines.mixmatch(slow, x_l, y_l, x_u, augment=shifted, gen=gen, **MIXMATCH,
                                        predict=lambda net, x: net(x.double())[1])
    copies = [(x_l[i], y_l[i].item()) for i in (0, 2)], [(x, None) for x in x_u]        # every second one
    class_losses, labeled, rotation_losses = [], [], []
    for group in copies:
        z = torch.randint(0, 4, (len(group),), generator=gen).tolist()
        for (x, y), k in zip(group, z):
            x = torch.rot90(shifted(x[None])[0].double() * 2 / 255 - 1, k, (1, 2))
            p_y, R = slow(x[None])[0][0].softmax(0), slow(x[None])[2][0].softmax(1)
            if y is None:
                rotation_losses.append(-torch.log(sum(R[c, k] * p_y[c] for c in range(C))))
            else:
                class_losses.append(-torch.log(p_y[y]))
                labeled.append(-torch.log(R[y, k]))
    expected |= {"rotated_class": sum(class_losses) / 2, "rotation_labeled": ETA * sum(labeled) / 2,
                 "rotation_unlabeled": ETA * sum(rotation_losses) / len(rotation_losses)}
    reached = helpers.assert_same_terms(terms, expected, model, slow)
    assert reached == {"class": {"aux"}, "guess": {"aux"}, "rotated_class": {"y"}, "rotation_labeled": {"R"},
                       "rotation_unlabeled": {"y", "R"}}


@pytest.mark.parametrize("rot_dim", [None, 5])
def test_with_mixmatch_rotated_labelled_copies_do_not_train_the_features(rot_dim):
    torch.manual_seed(0)
    net = make_model("wrn-10-1", 10, 10, rot_dim)
    terms = crae_mixmatch(net, *helpers.digits_batch(8), augment=training.unchanged, gen=generator(),
                          select="marginal", eta=1.0, **MIXMATCH)
    reached = {}
    for name, term in terms.items():
        grads = torch.autograd.grad(term, list(net.parameters()), allow_unused=True, retain_graph=True)
        reached[name] = {key.split(".")[0] for (key, _), grad in zip(net.named_parameters(), grads)
                         if grad is not None and grad.abs().max() > 0}
    heads = {"rotation"} | ({"reduce"} if rot_dim else set())
    assert reached == {"class": {"backbone", "aux"}, "guess": {"backbone", "aux"},
                       "rotated_class": {"classifier"}, "rotation_labeled": heads,
                       "rotation_unlabeled": {"backbone", "classifier"} | heads}


def test_with_mixmatch_rotated_copies_leave_the_running_statistics_alone():
    nets, common = [], dict(augment=training.unchanged, **MIXMATCH)
    for objective in partial(crae_mixmatch, select="marginal", eta=1.0), train_baselines.mixmatch:
        torch.manual_seed(0)
        nets.append(make_model("wrn-10-1", 10, 10, bn_momentum=0.5))
        nets[-1].aux.load_state_dict(nets[-1].classifier.state_dict())          # so that guesses are equal
        objective(nets[-1], *helpers.digits_batch(8), gen=generator(), **common)
    assert helpers.same(*(dict(net.named_buffers()) for net in nets))


# ---------------------------------------------------------------- which images train what


def test_unlabelled_images_alone_move_the_main_classifier_and_not_the_additional_one():
    x_l, y_l, x_u = batch()
    gradients = []
    for other in x_u, 255 - x_u:                        # the same labelled images, other unlabelled ones
        model = linear()
        terms = crae(model, x_l, y_l, other, augment=shifted, gen=None, select="marginal", eta=1.0,
                     aux="upright")
        sum(terms.values()).backward()
        gradients.append((model.y.weight.grad, model.aux.weight.grad))
    (y_a, aux_a), (y_b, aux_b) = gradients
    assert (y_a - y_b).abs().max() > 1e-3 and torch.equal(aux_a, aux_b)


@pytest.mark.parametrize("aux", ["upright", "all"])
def test_which_copies_train_the_additional_classifier(aux):
    """A model whose additional logits are plain numbers: their gradient shows which copies were used."""
    x_l, y_l, x_u = batch()
    aux_logits = torch.zeros(8 * B, C, requires_grad=True)

    def model(x, _):
        return torch.zeros(8 * B, C), aux_logits, torch.zeros(8 * B, C, 4)

    terms = crae(model, x_l, y_l, x_u, augment=shifted, gen=None, select="marginal", eta=1.0, aux=aux)
    terms["aux"].backward()
    used = (aux_logits.grad.abs().sum(1) > 0).tolist()
    n = B if aux == "upright" else 4 * B                # the upright copies come first
    assert used == [True] * n + [False] * (8 * B - n)


def test_float64_stays_float64():
    x_l, y_l, x_u = batch()
    model = linear().double()
    terms = crae_plus(lambda x, _: model(x.double()), x_l, y_l, x_u, augment=shifted, gen=None,
                      select="marginal", eta=1.0, eta2=1.0, temperature=T, aux="upright", ext2=False)
    assert all(term.dtype == torch.float64 for term in terms.values())


# ---------------------------------------------------------------- the ensembles


def rotation_loss(class_logits, rot_logits, y_l, z, select, gen):
    """The two rotation terms as a mean over all copies, so that one gradient shows all of them."""
    terms = rotation_terms(class_logits, rot_logits, y_l, z, [len(z)], select, 1.0, gen)
    n, N = len(y_l), len(z)
    return (n * terms["rotation_labeled"] + (N - n) * terms["rotation_unlabeled"]) / N


@pytest.mark.parametrize("select", ["marginal", "detach", "random", "independent"])
def test_each_set_has_its_own_mean_and_eta_multiplies_both(select):
    class_logits, rot_logits = logits()
    y_l, z = torch.tensor([0, 1, 2]), torch.arange(8) % 4
    terms = rotation_terms(class_logits, rot_logits, y_l, z, [len(z)], select, 0.7, generator())
    if select == "random":
        k = torch.randint(0, C, (8,), generator=generator())
        per_copy = losses.labeled_rotation_loss(rot_logits, k, z)
    elif select == "independent":
        per_copy = losses.independent_rotation_loss(rot_logits, z)
    else:
        per_copy = torch.cat([losses.labeled_rotation_loss(rot_logits[:3], y_l, z[:3]),
                              losses.unlabeled_rotation_loss(class_logits[3:], rot_logits[3:], z[3:])])
    torch.testing.assert_close(terms["rotation_labeled"], 0.7 * sum(per_copy[:3]) / 3)
    torch.testing.assert_close(terms["rotation_unlabeled"], 0.7 * sum(per_copy[3:]) / 5)


def logits(N=8, K=C):
    gen = generator()
    class_logits, rot_logits = torch.randn(N, C, generator=gen), torch.randn(N, K, 4, generator=gen)
    return class_logits.requires_grad_(), rot_logits.requires_grad_()


def gradient_rows(select):
    """Which images' class logits the rotation loss sends gradient into."""
    class_logits, rot_logits = logits()
    y_l, z = torch.tensor([0, 1, 2]), torch.arange(8) % 4
    loss = rotation_loss(class_logits, rot_logits, y_l, z, select, generator())
    grad, rot_grad = torch.autograd.grad(loss, (class_logits, rot_logits), allow_unused=True)
    assert rot_grad.abs().max() > 0
    return [] if grad is None else (grad.abs().sum(1) > 0).tolist()


def test_only_crae_sends_gradient_into_the_classifier_and_only_from_unlabelled_images():
    assert gradient_rows("marginal") == [False] * 3 + [True] * 5
    assert gradient_rows("detach") == gradient_rows("random") == gradient_rows("independent") == []


def test_detach_has_the_value_of_crae():
    class_logits, rot_logits = logits()
    y_l, z = torch.tensor([0, 1, 2]), torch.arange(8) % 4
    marginal, detach = (rotation_loss(class_logits, rot_logits, y_l, z, select, None)
                        for select in ("marginal", "detach"))
    assert marginal == detach


def test_random_draws_one_head_per_image_and_all_equally_often():
    N, K = 6000, 5
    class_logits, rot_logits = logits(N, K)
    y_l, z = torch.zeros(N // 2, dtype=torch.long), torch.arange(N) % 4
    loss = rotation_loss(class_logits, rot_logits, y_l, z, "random", generator())
    grad, = torch.autograd.grad(loss, rot_logits)
    chosen = grad.abs().sum(-1) > 0                             # (N, K)
    assert (chosen.sum(1) == 1).all()
    assert (chosen.float().mean(0) - 1 / K).abs().max() < 0.03  # six standard deviations
    assert (chosen[:N // 2].float().mean(0) - 1 / K).abs().max() < 0.04         # labelled images too
    for n in range(0, N, 997):
        k = chosen[n].nonzero().item()
        p = rot_logits[n, k].detach().softmax(0)
        p[n % 4] -= 1
        torch.testing.assert_close(grad[n, k], p / N)


def test_independent_is_the_mean_of_the_losses_of_all_heads():
    class_logits, rot_logits = logits(K=6)
    z = torch.arange(8) % 4
    loss = rotation_loss(class_logits, rot_logits, torch.tensor([0, 1, 2]), z, "independent", None)
    mean = sum(-rot_logits[n, k].log_softmax(0)[z[n]] for n in range(8) for k in range(6)) / 48
    torch.testing.assert_close(loss, mean)
    p = sum(rot_logits[:, k].softmax(-1) for k in range(6)) / 6
    torch.testing.assert_close(train_crae.mean_p_z(class_logits, rot_logits), p.log())


# ---------------------------------------------------------------- with a real network


def ensemble(select):
    return partial(crae, select=select, eta=1.0, aux="upright")


PLUS = partial(crae_plus, select="marginal", eta=1.0, eta2=1.0, temperature=0.5, aux="upright")
VARIANTS = {                                            # the objective and its number of rotation heads
    "crae": (ensemble("marginal"), 10),
    "detach": (ensemble("detach"), 10),
    "random": (ensemble("random"), 10),
    "independent": (ensemble("independent"), 20),
    "no_rotation": (ensemble("marginal"), 0),
    "no_rotation_ext1": (partial(PLUS, ext2=False), 0),
    "ext1": (partial(PLUS, ext2=False), 10),
    "entmin": (partial(PLUS, ext1=False, ext2=False, entmin=True), 10),
    "ext2": (partial(PLUS, ext1=False), 10),
    "plus": (PLUS, 10),
}


def call(objective, net, n=8, augment=training.unchanged):
    return objective(net, *helpers.digits_batch(n), augment=augment, gen=generator())


@pytest.mark.parametrize("aux, rot_dim", [(True, None), (False, 5)])
@pytest.mark.parametrize("name", VARIANTS)
def test_every_parameter_of_every_variant_gets_a_gradient(name, aux, rot_dim):
    objective, K = VARIANTS[name]
    torch.manual_seed(0)
    net = make_model("wrn-10-1", 10, K, rot_dim, aux)
    terms = call(objective, net, 32, partial(augmentation.flip_and_crop, flip=False, gen=None))
    sum(terms.values()).backward()
    assert all(p.grad is not None for p in net.parameters())
    assert all(p.grad.abs().max() > 0 for n, p in net.named_parameters() if p.ndim > 1), name
    assert ("aux" in terms) == aux
    assert ("rotation_labeled" in terms) == ("rotation_unlabeled" in terms) == (K > 0)
    assert ("ext1" in terms) == (name in ("no_rotation_ext1", "ext1", "plus"))


def test_mixed_images_leave_the_running_statistics_alone():
    nets = []
    for objective, K in VARIANTS["crae"], VARIANTS["plus"]:
        torch.manual_seed(0)
        nets.append(make_model("wrn-10-1", 10, K, bn_momentum=0.5))
        call(objective, nets[-1])
    crae_buffers, plus_buffers = (dict(net.named_buffers()) for net in nets)
    assert helpers.same(crae_buffers, plus_buffers)             # as if there had been no mixed images
    assert all(v == 1 for k, v in plus_buffers.items() if k.endswith("num_batches_tracked"))
    assert nets[1].backbone.bn.running_mean.abs().max() > 0


def test_one_forward_pass_for_the_unmixed_images_and_one_for_the_mixed_ones():
    torch.manual_seed(0)
    net = make_model("wrn-10-1", 10, 10)
    sizes = []
    net.register_forward_pre_hook(lambda m, x: sizes.append(tuple(x[0].shape)))
    call(VARIANTS["plus"][0], net)
    assert sizes == [(64, 3, 8, 8)] * 2
    sizes.clear()
    call(VARIANTS["crae"][0], net)
    assert sizes == [(64, 3, 8, 8)]


@pytest.mark.slow
def test_twenty_images_can_be_overfitted(tmp_path, monkeypatch, capsys):
    few = helpers.save_few_digits(tmp_path / "few.npz")
    monkeypatch.setitem(presets.own_npz, "bn_momentum", 0.1)
    monkeypatch.setitem(presets.own_npz, "ema", 0.9)
    row = train_crae.train(dataset=few, recipe="paper", plus=True, arch="wrn-10-1", steps=200, batch=20,
                           lr=0.005, out=str(tmp_path / "run"), device="cpu")
    assert row["test_error"] == 0 and row["loss_class"] < 0.5
    assert row["unlabeled_error"] is None and row["val_error"] is None          # their classes are not known
