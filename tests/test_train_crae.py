"""Algorithms 1 and 2 against a loop over single images, the gradients they send, and the script itself."""
import itertools
import json
import math
import os
import re
from functools import partial

import numpy as np
import pytest
import torch

import augmentation
import cli
import data
import helpers
import losses
import presets
import train_crae
import training
from helpers import generator
from models import make_model
from train_crae import crae, crae_plus, rotation_terms

B, C, S, T, ETA, ETA2 = 3, 4, 8, 0.5, 0.7, 0.3

# ---------------------------------------------------------------- the objectives, one image at a time


def linear():
    return helpers.Linear(S, C, K=C, aux=True)


def batch():
    x = helpers.random_images(2 * B, S, seed=1)
    return x[:B], torch.tensor([2, 0, 3]), x[B:]


def shifted(x):
    return x.roll(1, 3)                                         # an "augmentation" that can be repeated


def loop(model, x_l, y_l, x_u, ext1, ext2, entmin, aux, gen):
    """Eq. 2 and Eq. 4, image by image and in probabilities. Returns the named terms."""
    def rotated(image, k):
        return torch.rot90(shifted(image[None])[0].double() * 2 / 255 - 1, k, (1, 2))

    copies = [(rotated(x_l[i], k), y_l[i].item(), k) for k in range(4) for i in range(B)]
    copies += [(rotated(x_u[i], k), None, k) for k in range(4) for i in range(B)]
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
        for i in range(B):
            p = [model(rotated(x_u[i], k)[None])[0][0].softmax(0) for k in range(4)]
            p_bar = [sum(p[k][c].item() for k in range(4)) / 4 for c in range(C)]   # numbers: no gradient
            total = sum(v ** (1 / T) for v in p_bar)
            p_hat = [v ** (1 / T) / total for v in p_bar]
            loss += [-sum(p_hat[c] * torch.log(p[k][c]) for c in range(C)) for k in range(4)]
        terms["ext1"] = ETA2 * sum(loss) / len(loss)
    if entmin:
        p = [model(rotated(x_u[i], k)[None])[0][0].softmax(0) for k in range(4) for i in range(B)]
        terms["entropy"] = ETA2 * sum(-v * torch.log(v) for q in p for v in q) / len(p)
    return terms


@pytest.mark.parametrize("aux", ["upright", "all"])
@pytest.mark.parametrize("ext1, ext2, entmin", [*itertools.product([False, True], [False, True], [False]),
                                                (False, False, True), (False, True, True)])
def test_objective_is_that_of_the_paper(ext1, ext2, entmin, aux):
    x_l, y_l, x_u = batch()
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

    def model(x):
        return torch.zeros(8 * B, C), aux_logits, torch.zeros(8 * B, C, 4)

    terms = crae(model, x_l, y_l, x_u, augment=shifted, gen=None, select="marginal", eta=1.0, aux=aux)
    terms["aux"].backward()
    used = (aux_logits.grad.abs().sum(1) > 0).tolist()
    n = B if aux == "upright" else 4 * B                # the upright copies come first
    assert used == [True] * n + [False] * (8 * B - n)


def test_float64_stays_float64():
    x_l, y_l, x_u = batch()
    model = linear().double()
    terms = crae_plus(lambda x: model(x.double()), x_l, y_l, x_u, augment=shifted, gen=None,
                      select="marginal", eta=1.0, eta2=1.0, temperature=T, aux="upright", ext2=False)
    assert all(term.dtype == torch.float64 for term in terms.values())


# ---------------------------------------------------------------- the ensembles


def rotation_loss(class_logits, rot_logits, y_l, z, select, gen):
    """The two rotation terms as a mean over all copies, so that one gradient shows all of them."""
    terms = rotation_terms(class_logits, rot_logits, y_l, z, select, 1.0, gen)
    n, N = len(y_l), len(z)
    return (n * terms["rotation_labeled"] + (N - n) * terms["rotation_unlabeled"]) / N


@pytest.mark.parametrize("select", ["marginal", "detach", "random", "independent"])
def test_each_set_has_its_own_mean_and_eta_multiplies_both(select):
    class_logits, rot_logits = logits()
    y_l, z = torch.tensor([0, 1, 2]), torch.arange(8) % 4
    terms = rotation_terms(class_logits, rot_logits, y_l, z, select, 0.7, generator())
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
    row = train_crae.train(dataset=few, plus=True, arch="wrn-10-1", steps=200, batch=20, lr=0.005,
                           out=str(tmp_path / "run"), device="cpu")
    assert row["test_error"] == 0 and row["loss_class"] < 0.5
    assert row["unlabeled_error"] is None and row["val_error"] is None          # their classes are not known


# ---------------------------------------------------------------- as a user runs it


QUICK = helpers.words_of(**helpers.QUICK, steps=4)
CHANGED = "archwrn-10-0.25_steps4_batch4"
FILES = {".lock", "config.json", "split.npz", "log.csv", "curve.png", "last.pt", "model.pt"}
NAMES = {
    "": "crae", "--plus": "crae_plus", "--ext1": "crae_ext1", "--ext2": "crae_ext2",
    "--select detach": "detach", "--select random": "random",
    "--select independent --heads 2": "independent_2", "--heads 0": "no_rotation",
    "--heads 0 --ext1": "no_rotation_ext1", "--entmin": "crae_entmin", "--entmin --ext2": "crae_ext2_entmin",
    "--noaux": "crae_no_aux", "--plus --aux false": "crae_plus_no_aux", "--aux none": "crae_no_aux",
    "--aux all": "crae_aux_all", "--plus --aux=all": "crae_plus_aux_all", "--aux": "crae",
    "--aux upright --select detach": "detach", "--aux all --select random": "random_aux_all",
}


@pytest.mark.parametrize("flags", NAMES)
def test_every_variant_runs_and_has_the_papers_name(flags, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    row = helpers.command_line(train_crae, [*flags.split(), *QUICK])
    folder = tmp_path / "runs" / f"digits_100_{NAMES[flags]}_0_{CHANGED}"
    has_heads, K = "--heads 0" not in flags, 2 if "heads 2" in flags else 10
    assert {p.name for p in folder.iterdir()} == FILES | ({"diversity.csv"} if has_heads else set())
    assert math.isfinite(row["loss_class"]) and (row["rotation_accuracy"] is not None) == has_heads
    if has_heads:
        header, *lines = (folder / "diversity.csv").read_text().splitlines()
        assert header == "step,class," + ",".join(f"head_{k}" for k in range(K)) and len(lines) == 10
        assert all(abs(sum(map(float, line.split(",")[2:])) - 1) < 1e-3 for line in lines)


@pytest.mark.slow
def test_the_script_from_start_to_end(tmp_path):
    run = partial(helpers.run_script, "train_crae.py", "--plus", *QUICK, "--lr", "1e-3", cwd=tmp_path)
    done = run()
    assert done.returncode == 0, done.stderr
    folder = tmp_path / "runs" / f"digits_100_crae_plus_0_{CHANGED}_lr0.001"
    result = r"test error \d+\.\d\d % \(median of the last evaluation\), \d+\.\d\d % at the end$"
    assert re.search(result, done.stdout.strip())
    assert "100 labeled, 1,067 unlabeled, 130 validation, 500 test" in done.stdout
    config = json.loads((folder / "config.json").read_text())
    assert config["lr"] == 0.001 and config["weight_decay"] == 0.02
    assert config["versions"]["torch"] == torch.__version__
    script = os.path.relpath(helpers.HERE / "train_crae.py", tmp_path)          # from where it was started
    flags = "--plus --arch=wrn-10-0.25 --steps=4 --batch=4 --lr=0.001 --device=cpu"
    assert config["command"] == f"python {script} {flags}"
    assert config["labels"] == 100 and "git_commit" in config and config["ext1"] and config["ext2"]
    assert config["resolved"]["rotation_heads"] == 10 and config["resolved"]["image_size"] == 8
    header = (folder / "log.csv").read_text().splitlines()[0]
    assert header == ("step,epoch,seconds,images_per_second,lr,loss_class,loss_aux,loss_ext1,"
                      "loss_rotation_labeled,loss_rotation_unlabeled,rotation_accuracy,unlabeled_error,val_error,test_error,test_error_raw,test_top5_error")
    again = run()
    assert again.returncode != 0 and "--resume" in again.stderr
    files = {p.name: p.read_bytes() for p in folder.iterdir()}
    reprint = helpers.run_script("train_crae.py", "--plus", *QUICK, "--lr", "1e-3", "--resume", cwd=tmp_path)
    assert reprint.returncode == 0 and reprint.stdout.strip() == done.stdout.strip().splitlines()[-1]
    assert files == {p.name: p.read_bytes() for p in folder.iterdir()}


def test_every_flag_reaches_its_place(tmp_path, monkeypatch):
    kept = {}
    monkeypatch.setattr(training, "fit", lambda net, objective, loaded, config, **loop: kept.update(
        net=net, objective=objective, config=config, **loop))
    flags = dict(select="random", heads=7, ext1=True, aux=False, rot_dim=5, arch="wrn-16-1", eta=0.3,
                 eta2=0.4, temperature=0.9, steps=9, batch=3, lr=0.05, weight_decay=0.6, flip=True, labels=20,
                 image_size=16, seed=4)
    train_crae.train(**flags, device="cpu", out=str(tmp_path / "run"))
    assert kept["objective"].func is crae_plus and kept["objective"].keywords == dict(
        select="random", eta=0.3, aux="none", eta2=0.4, temperature=0.9, ext1=True, ext2=False, entmin=False)
    assert {k: kept["config"][k] for k in flags} == flags | dict(aux="none")
    assert kept["p_z"] is train_crae.mean_p_z and kept["mu"] == 1
    net = kept["net"]
    assert net.aux is None and net.rotation.out_features == 28 and net.reduce.out_features == 5
    assert len(net.backbone.blocks) == 6 and net.backbone.bn.momentum == 0.1    # the preset's
    torch.manual_seed(4)                                        # the seed determines the initial weights
    assert torch.equal(net.classifier.weight, make_model("wrn-16-1", 10, 7, 5, aux=False).classifier.weight)
    train_crae.train(eta=0.3, device="cpu", out=str(tmp_path / "run"))
    assert kept["objective"].func is crae
    assert kept["objective"].keywords == dict(select="marginal", eta=0.3, aux="upright")
    assert kept["p_z"] is losses.log_p_z and kept["net"].aux is not None
    for value, aux in {True: "upright", False: "none", "all": "all"}.items():
        train_crae.train(aux=value, device="cpu", out=str(tmp_path / "run"))
        assert kept["objective"].keywords["aux"] == aux and (kept["net"].aux is None) == (aux == "none")


def test_without_rotation_branches_no_unlabelled_image_is_used(tmp_path):
    """Two datasets that differ only in unlabelled images give the same bits; with ext. 1 they do not."""
    images, labels, *_ = data.load("digits", "nowhere")
    pixels = images.permute(0, 2, 3, 1).numpy()
    for name, unlabeled in ("a", pixels[200:300]), ("b", 255 - pixels[200:300]):
        np.savez(tmp_path / f"{name}.npz", train_images=pixels[:40], train_labels=labels[:40].numpy(),
                 test_images=pixels[100:150], test_labels=labels[100:150].numpy(),
                 unlabeled_images=unlabeled)

    def weights(name, **flags):
        out = tmp_path / f"run_{name}_{'_'.join(flags)}"
        flags |= dict(dataset=str(tmp_path / f"{name}.npz"), heads=0, steps=3, out=str(out))
        train_crae.train(**flags, **helpers.QUICK)
        saved = torch.load(out / "last.pt", weights_only=True)
        return saved["net"] | {f"ema.{k}": v for k, v in saved["ema"].items()}

    assert helpers.same(weights("a"), weights("b"))             # BN statistics included
    assert not helpers.same(weights("a", ext1=True), weights("b", ext1=True))
    assert not any("aux" in key for key in weights("b", entmin=True))           # no additional classifier


def test_a_run_with_an_earlier_definition_cannot_be_resumed(tmp_path):
    flags = dict(steps=2, out=str(tmp_path / "run"), **helpers.QUICK)
    train_crae.train(**flags)
    path = tmp_path / "run" / "config.json"
    config = json.loads(path.read_text())
    assert config["definition"] == train_crae.DEFINITION
    first = {k: v for k, v in config.items() if k != "definition"} | dict(aux=True)
    for old in dict(config, definition=1), first:
        path.write_text(json.dumps(old))
        with pytest.raises(cli.Refused, match="earlier definition"):
            train_crae.train(**flags, resume=True)


def test_help_names_every_flag_and_does_not_train(tmp_path):
    for flags in ["--help"], ["--dataset", "cifar10", "--help"], ["-h"]:
        done = helpers.run_script("train_crae.py", *flags, cwd=tmp_path)
        assert done.returncode == 0 and not list(tmp_path.iterdir())
        for name in train_crae.FLAGS:
            assert re.search(rf"^ *--{name}\s", done.stdout, re.M), name


BAD = {                                                         # flags: what the message must contain
    "--epochs 3": "--epochs", "--lable 250": "--labels", "digits": "digits", "--plus maybe": "--plus",
    "--plus=maybe": "--plus", "--labels 0": "--labels", "--labels 5": "--labels", "--labels 1e3": "--labels",
    "--labels 2000": "--labels", "--labels many": "--labels", "--dataset imagnet": "cifar100",
    "--dataset missing/": "no such file", "--dataset missing.npz": "no such file", "--arch wrn-12-2": "6n",
    "--arch vgg": "--arch", "--steps -5": "--steps", "--steps 0": "--steps", "--batch 0": "--batch",
    "--lr 0": "--lr", "--lr nan": "--lr", "--lr fast": "--lr", "--weight_decay -1": "--weight_decay",
    "--eta 0": "--eta", "--eta2 -1": "--eta2", "--temperature 2": "--temperature",
    "--device cuda:99": "--device", "--device tpu9": "--device", "--select best": "marginal, random",
    "--heads -1": "--heads", "--heads 3": "--heads", "--heads 0 --plus": "--heads",
    "--aux maybe": "upright, all, none", "--aux=1": "--aux", "--noaux=3": "--noaux",
    "--heads 0 --aux all": "--aux", "--heads 0 --aux": "--aux", "--entmin --plus": "--entmin",
    "--entmin --ext1": "--entmin", "--rot_dim -1": "--rot_dim",
    "--seed -1": "--seed", "--image_size 4": "--image_size", "--plus - --seed 1": "lone",
    "--noplus=3": "--noplus", "--flip 1": "--flip", "--out train_crae.py": "--out",
    "--resume --out folder": "--out", "--out": "--out: needs", "--noout": "--noout",
    "--normalize": "--normalize", "--device meta": "--device",
    "--seed 4294967296": "--seed", "--lr 1e400": "--lr",
    "--resume --out damaged": "damaged", f"--dataset {'x' * 300}": "no such file", "-labels 5": "--labels",
}


@pytest.mark.parametrize("flags", BAD)
def test_bad_input_gives_a_one_line_error_before_any_work(flags, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train_crae.py").touch()
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "something").touch()
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged" / "config.json").touch()
    monkeypatch.setattr(training, "fit", lambda *a, **k: pytest.fail("training began"))
    with pytest.raises(SystemExit) as stop:
        helpers.command_line(train_crae, flags.split())
    assert isinstance(stop.value.code, str) and "\n" not in stop.value.code and BAD[flags] in stop.value.code
    assert {p.name for p in tmp_path.iterdir()} == {"train_crae.py", "folder", "damaged"}
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("flags", [
    "--epochs 3", "--plus=maybe", "word",                       # reported before torch is imported
    *(pytest.param(flags, marks=pytest.mark.slow) for flags in ("--dataset nothing", "--steps -5")),
])
def test_bad_input_as_a_subprocess(flags, tmp_path):
    done = helpers.run_script("train_crae.py", *flags.split(), cwd=tmp_path)
    assert done.returncode != 0 and len(done.stderr.strip().splitlines()) == 1
    assert "Traceback" not in done.stderr
    assert done.stdout == "" and not list(tmp_path.iterdir())
