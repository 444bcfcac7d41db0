"""Runs with the fast recipe: evaluations, precision, --minutes, stop and resume, every method."""
import json
import math
import os
import re
import signal
from copy import deepcopy
from functools import partial
from types import SimpleNamespace

import pytest
import torch

import budget
import cli
import devices
import evaluate
import helpers
import metrics
import presets
import run_folder
import settings
import train_baselines
import train_crae
import training

QUICK = dict(arch="fast-4-8-8", batch=8, unlabeled=4, device="cpu")     # --recipe fast is digits' default

# ---------------------------------------------------------------- evaluations


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run of 23 steps that learns something, and what its evaluations measured."""
    kept, real = [], metrics.measure
    with pytest.MonkeyPatch.context() as monkeypatch:
        def measure(net, ema, images, labels, index, *rest):
            before = deepcopy(ema).eval()
            scores = real(net, ema, images, labels, index, *rest)
            kept.append((before, images, labels, index))
            return scores

        monkeypatch.setattr(metrics, "measure", measure)
        monkeypatch.setattr(metrics, "QUICK_TEST", 70)
        monkeypatch.setattr(metrics, "QUICK_SAMPLE", 60)
        monkeypatch.setattr(metrics, "FINAL_SAMPLE", 90)
        out = tmp_path_factory.mktemp("runs") / "run"
        row = train_crae.train(**QUICK | dict(batch=32), lr=0.03, steps=23, plus=True, precision="fp32",
                               out=str(out))
    return dict(out=out, row=row, kept=kept)


def error_of(net, head, images, labels, index):
    with torch.inference_mode():
        wrong = [head(net.backbone(images[i:i + 1].float() / 127.5 - 1)).argmax() != labels[i]
                 for i in index.tolist()]
    return 100 * sum(wrong).item() / len(wrong)


def test_evaluations_before_the_last_measure_samples(run):
    rows, index = helpers.rows_of(run["out"]), run["kept"][0][-1]
    assert [int(row["step"]) for row in rows] == [*range(2, 23, 2), 23] and len(rows) >= 10
    assert list(rows[0])[-6:] == ["rotation_accuracy", "unlabeled_error", "val_error", "test_error",
                                  "test_error_raw", "test_top5_error"]          # as in older logs
    sizes = dict(quick_test=(70, "test"), sample=(90, "unlabeled"), quick_sample=(60, "sample"))
    for part, (n, whole) in sizes.items():
        assert len(index[part].unique()) == n and set(index[part].tolist()) < set(index[whole].tolist())
    for row, (ema, images, labels, again) in zip(rows, run["kept"]):
        assert torch.equal(again["quick_test"], index["quick_test"])            # the same at every evaluation
        last = row is rows[-1]
        test, unlabeled = ("test", "sample") if last else ("quick_test", "quick_sample")
        error = error_of(ema, ema.aux, images, labels, index[test])
        assert float(row["test_error"]) == pytest.approx(error, abs=1e-3)
        error = error_of(ema, ema.classifier, images, labels, index[unlabeled])
        assert float(row["unlabeled_error"]) == pytest.approx(error, abs=1e-3)
        assert (row["val_error"] != "") == (row["test_error_raw"] != "") == last
        lr = 0.03 * training.triangle((int(row["step"]) - 1) / 23, 0.2)
        assert float(row["lr"]) == pytest.approx(lr, rel=1e-5)
    assert float(rows[-1]["lr"]) < 0.002 and len({row["test_error"] for row in rows}) > 5


def test_the_reported_error_is_that_of_the_saved_model(run):
    scores = evaluate.use_model("test", str(run["out"]), device="cpu")
    row = run["row"]
    assert scores["error"] == row["test_error"] == row["median_test_error"] and scores["images"] == 500
    config = json.loads((run["out"] / "config.json").read_text())
    assert run_folder.rows_that_count(config) == 1
    assert run_folder.rows_that_count(config | dict(recipe="paper")) == run_folder.MEDIAN_OF


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_quick_evaluations_have_the_precision_of_the_steps_and_the_last_one_float32(precision, tmp_path,
                                                                                  monkeypatch):
    used, real = [], metrics.measure
    monkeypatch.setattr(metrics, "measure",
                        lambda *args: used.append(torch.is_autocast_enabled("cpu")) or real(*args))
    train_crae.train(**QUICK, steps=10, precision=precision, out=str(tmp_path / "run"))
    assert used == [precision == "bf16"] * 9 + [False]


@pytest.mark.parametrize("steps", [1, 9, 10, 11, 99, 2000])
def test_a_run_has_ten_evaluations_or_more(steps):
    epoch = train_crae.configure(**QUICK, steps=steps)["epoch"]
    assert min(10, steps) <= math.ceil(steps / epoch) <= 20


# ---------------------------------------------------------------- precision


@pytest.mark.parametrize("device, recipe, supported, expected", [
    ("cpu", "fast", True, "bf16"), ("cpu", "fast", False, "fp32"), ("cpu", "paper", True, "fp32"),
    ("cuda", "fast", False, "bf16"), ("cuda", "paper", False, "bf16")])
def test_the_default_precision(device, recipe, supported, expected, monkeypatch):
    monkeypatch.setattr(devices, "has_bf16", lambda: supported)
    monkeypatch.setattr(devices, "select", lambda *_: device)
    flags = dict(recipe=recipe, arch="fast-4-4-4")
    assert train_crae.configure(**flags)["precision"] == expected
    assert train_baselines.configure(method="s4l", **flags)["precision"] == expected
    other = "fp32" if expected == "bf16" else "bf16"
    assert train_crae.configure(**flags, precision=other)["precision"] == other


def test_whether_a_cpu_supports_bf16(monkeypatch):
    for found, expected in {"avx512_bf16": True, "amx_bf16": True, "avx512_f": False, "": False}.items():
        monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {found: True, "avx2": True})
        assert devices.has_bf16() is expected
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: dict(avx512_bf16=False))
    assert devices.has_bf16() is False


def test_a_resumed_run_keeps_its_precision(tmp_path, monkeypatch):
    used, real = [], train_crae.crae

    def objective(model, *rest, **more):
        used.append(torch.is_autocast_enabled("cpu"))
        terms = real(model, *rest, **more)
        assert all(term.dtype == torch.float32 for term in terms.values())
        return terms

    monkeypatch.setattr(train_crae, "crae", objective)
    for first in True, False:
        flags = dict(QUICK, steps=2, out=str(tmp_path / f"run{first}"))
        monkeypatch.setattr(devices, "has_bf16", lambda: first)
        row = train_crae.train(**flags)
        path = tmp_path / f"run{first}" / "config.json"
        saved = json.loads(path.read_text())
        assert used == [first] * 2 and saved["precision"] == ("bf16" if first else "fp32")
        weights = torch.load(path.with_name("last.pt"), weights_only=True)
        assert {v.dtype for v in weights["net"].values()} == {torch.float32, torch.int64}       # BN's counts
        used.clear()

        monkeypatch.setattr(devices, "has_bf16", lambda: False)
        again = train_crae.train(**flags, resume=True)          # a finished run is only read
        assert again["test_error"] == row["test_error"] and not used
        if first:
            with pytest.raises(cli.Refused, match="uses bf16, which this CPU does not support"):
                train_crae.train(**flags | dict(steps=3), resume=True)
        for name in "model.pt", "last.pt", "previous.pt", "log.csv", "diversity.csv":
            path.with_name(name).unlink()                       # as if it was killed after its first step
        monkeypatch.setattr(devices, "has_bf16", lambda: not first)
        if first:
            with pytest.raises(cli.Refused, match="uses bf16, which this CPU does not support"):
                train_crae.train(**flags, resume=True)
            assert not used
        else:
            train_crae.train(**flags, resume=True)              # in fp32
            assert used == [False] * 2
        other = "fp32" if first else "bf16"
        with pytest.raises(cli.Refused, match=f"--precision {other}: the run in .* has {saved['precision']}"):
            train_crae.train(**flags, precision=other, resume=True)
        used.clear()


def test_runs_from_before_the_recipes_can_be_resumed(tmp_path):
    flags = dict(helpers.QUICK, steps=2, out=str(tmp_path / "run"))
    row = train_crae.train(**flags)
    path = tmp_path / "run" / "config.json"
    old = json.loads(path.read_text()) | dict(precision=None)
    new = "recipe", "minutes", "beta2", "schedule", "ema_horizon", "quick_eval", "cpu_precision"
    path.write_text(json.dumps({k: v for k, v in old.items() if k not in new}))
    assert train_crae.train(**flags, resume=True) == row
    assert train_crae.train(**flags, precision="fp32", resume=True) == row      # what CPUs used
    for other in dict(precision="bf16"), dict(steps=None, minutes=3.0):
        with pytest.raises(cli.Refused, match=f"--{list(other)[-1]} .*: the run in "):
            train_crae.train(**flags | other, resume=True)


# ---------------------------------------------------------------- --minutes


def test_how_many_steps_fit_into_a_time():
    fast, paper = dict(quick_eval=True), dict(quick_eval=False, epoch=20, eval_epochs=2)
    assert budget.steps_in(60, fast, 0.5, 1.0, 3.0) == (60 - 9 - 3) / 0.5      # nine quick ones and the last
    assert budget.steps_in(60.4, fast, 0.5, 1.0, 3.0) == 96    # rounded down
    assert budget.steps_in(65, paper, 0.5, 0.0, 5.0) == 96     # (65 - 5) / (0.5 + 5 / 40)
    assert budget.steps_in(2, fast, 0.5, 1.0, 3.0) == budget.steps_in(1, paper, 0.5, 0.0, 5.0) == 1


def test_an_evaluation_is_timed_on_a_part_of_its_images(monkeypatch):
    clock, index = [0.0], dict.fromkeys(("sample", "validation", "test", "raw_test"), range(2048))

    def measure_state(state, config, some, quick, watch):
        assert {len(i) for i in some.values()} == {512}
        clock[0] += 3.0

    monkeypatch.setattr(training, "measure_state", measure_state)
    monkeypatch.setattr(budget, "time", SimpleNamespace(perf_counter=lambda: clock[0]))
    state = SimpleNamespace(index=index, net=SimpleNamespace(rotation=None))
    assert budget.timed_evaluation(state, {}, False) == 12.0


def test_the_times_of_all_stages_count(monkeypatch, capsys):
    times = dict(one=(0.01, 0.1, 0.5), two=(0.02, 0.2, 1.0))
    monkeypatch.setattr(budget, "measure", lambda build, loaded, config: times[build])
    config = train_crae.configure(minutes=1.0, **QUICK)
    assert config["steps"] is None
    budget.set_steps(config, ["one", "two"], None)
    expected = (60 - 9 * 0.3 - 1.5) / 0.03
    assert expected - 3 < config["steps"] <= expected and config["epoch"] == config["steps"] // 10
    assert f"{config['steps']} steps fit into 1 minutes: 0.03 s per step" in capsys.readouterr().out


@pytest.mark.parametrize("script, flags", [
    (train_crae, dict(plus=True)), (train_baselines, dict(method="fine_tune")),
    (train_crae, dict(recipe="paper", arch="wrn-10-0.25"))], ids=["crae", "fine_tune", "paper"])
def test_minutes_are_the_steps_they_give(script, flags, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(budget, "SECONDS", 0.2)
    real, stages = budget.measure, []
    monkeypatch.setattr(budget, "measure", lambda build, *rest: stages.append(build) or real(build, *rest))
    flags = QUICK | flags | dict(out=str(tmp_path / "timed"))
    script.train(**flags, minutes=0.02)
    N = json.loads((tmp_path / "timed" / "config.json").read_text())["steps"]
    printed = f"{N} steps fit into 0.02 minutes" if N > 1 else "note: --minutes 0.02 is not enough for more"
    assert printed in capsys.readouterr().out
    two = flags.get("method") == "fine_tune"
    assert stages == ([script.build_stage_one] if two else []) + [script.build]
    script.train(**flags | dict(out=str(tmp_path / "steps")), steps=N)
    timed, steps = (helpers.everything_in(tmp_path / name) for name in ("timed", "steps"))
    assert helpers.same(timed, steps) and ("pretrain/last.pt" in timed) == two and "last.pt" in timed

    config = script.configure(**flags, minutes=0.02, resume=True)
    assert config["steps"] is None and run_folder.check_folder(config) and config["steps"] == N
    for other in dict(minutes=0.04), dict(steps=N):
        with pytest.raises(cli.Refused, match="--minutes .*: the run in .* has 0.02"):
            script.train(**flags, **other, resume=True)
    assert len(stages) == 1 + two                               # a resumed run measures nothing


# ---------------------------------------------------------------- --pflop


def training_flops(size, widths, images):
    """Multiplications and additions of FastNet, forward and backward, counted layer by layer."""
    size -= 1
    flops, c_in, passes = 2 * size ** 2 * 24 * 12, 24, 2        # the whitening is fixed: no backward pass,
    for c_out in widths:                                        # and none into the input of the first layer
        flops += passes * 2 * size ** 2 * c_in * c_out * 9
        size = size // 2 if size >= 4 else size
        flops += 3 * 2 * size ** 2 * c_out * c_out * 9
        c_in, passes = c_out, 3
    return images * flops


@pytest.mark.parametrize("script, flags", [
    (train_baselines, dict(method="labeled_only")), (train_baselines, dict(method="fine_tune")),
    (train_crae, dict(plus=True))], ids=["labeled_only", "fine_tune", "crae_plus"])
def test_pflop_are_the_steps_of_equal_compute(script, flags, tmp_path, capsys):
    flags = QUICK | flags | dict(arch="fast-8-16-16", pflop=5e-7, out=str(tmp_path / "run"))
    flags["unlabeled"] = None if flags.get("method") == "labeled_only" else 4
    script.train(**flags)
    N = int(re.search(r"^(\d+) steps are 5e-07 PFLOP", capsys.readouterr().out, re.M)[1])
    # Images that are trained on in a step: 8 labelled ones; stage one: (8 + 4) * 4 more; CRAE+: 2 * 8 + 4 * 4
    # unmixed and 8 + 4 * 4 mixed ones.
    trained = dict(labeled_only=8, fine_tune=8 + 48).get(flags.get("method"), 32 + 24)
    assert N == pytest.approx(5e8 / training_flops(16, (8, 16, 16), trained), rel=0.01, abs=1)
    config = script.configure(**flags, resume=True)
    assert config["steps"] is None and run_folder.check_folder(config) and config["steps"] == N
    with pytest.raises(cli.Refused, match="--pflop .*: the run in .* has 5e-07"):
        script.train(**flags | dict(pflop=6e-7), resume=True)
    with pytest.raises(cli.Refused, match="--pflop 5e-07: --steps 3 already sets the length"):
        script.train(**flags, steps=3)


# ---------------------------------------------------------------- stop and resume, parts, all methods


@pytest.mark.parametrize("more", [dict(plus=True, accumulate=2), dict(rotations="one")], ids=str)
def test_a_stopped_run_continues_bit_for_bit(more, tmp_path, monkeypatch):
    name = "crae_plus" if "plus" in more else "crae"
    real, stops, calls = getattr(train_crae, name), [5], []

    def objective(*args, step, **rest):
        calls.append(step)
        if step in stops:
            stops.remove(step)
            os.kill(os.getpid(), signal.SIGTERM)
        return real(*args, step=step, **rest)

    monkeypatch.setattr(train_crae, name, objective)
    monkeypatch.setattr(settings, "EVALUATIONS", 3)
    train = partial(train_crae.train, **QUICK, **more, steps=12)
    with pytest.raises(cli.Stopped):
        train(out=str(tmp_path / "stopped"))
    train(out=str(tmp_path / "stopped"), resume=True)
    assert calls == sorted([*range(12)] * more.get("accumulate", 1))            # no step twice
    train(out=str(tmp_path / "whole"))
    stopped, whole = (helpers.everything_in(tmp_path / name) for name in ("stopped", "whole"))
    assert helpers.same(stopped, whole) and whole["last.pt"]["run"]["step"] == 12


SHARED = dict(lr=0.003, weight_decay=0.02, beta2=0.99, schedule="triangle", optimizer="adam", ema=None,
              ema_horizon=0.01, bn_momentum=0.1, batch=64, unlabeled=48, labeled_copies="two", steps=600,
              arch="fast-32-128-128", quick_eval=True, cpu_precision="bf16", warmup=0.2, image_size=16)


def test_all_methods_share_the_recipe():
    configs = [train_baselines.configure(method=method) for method in helpers.BASELINES]
    for config in [*configs, train_crae.configure(), train_crae.configure(plus=True)]:
        assert {name: config[name] for name in SHARED} == SHARED, config["method"]
        module = train_baselines if "base" in config else train_crae
        net, objective, loop = module.build(config, 10)
        is_swa = config["method"] == "swa"                      # a way to average, with its own cycles
        own = {"average", "refresh_bn", "schedule"} if is_swa else set()
        assert loop.keys() - {"p_z", "unlabeled"} == own
        assert loop["unlabeled"] == (0 if config["method"] in train_baselines.SUPERVISED else 48)
    for method, constants in presets.BASELINES_FAST.items():
        assert constants.keys() <= {"weight", "threshold", "beta", "epsilon", "entropy_weight", "temperature"}
        assert constants.keys() == presets.BASELINES[method].keys() - {"lr", "weight_decay", "ema"}
    assert train_crae.configure(detach_rotated=True)["method"] == "crae_detach_rotated"


@pytest.mark.parametrize("method", helpers.BASELINES)
def test_every_baseline_runs(method, tmp_path):
    flags = {k: v for k, v in QUICK.items() if k != "unlabeled" or method != "labeled_only"}
    row = train_baselines.train(method=method, **flags, steps=3, out=str(tmp_path / "run"))
    terms = {name for name in row if name.startswith("loss_")}
    assert terms == {f"loss_{name}" for name in helpers.BASELINES[method]}
    assert all(math.isfinite(row[name]) for name in terms) and 0 <= row["test_error"] <= 100
    assert len(helpers.rows_of(tmp_path / "run")) == 3


def test_which_datasets_have_the_fast_recipe(tmp_path):
    (tmp_path / "folder").mkdir()
    own = {str(tmp_path / "x.npz"): None, str(tmp_path / "folder"): 32}
    for dataset, size in (dict(digits=16, fashion_mnist=20) | own).items():
        preset = presets.for_dataset(dataset)
        assert preset["arch"] == SHARED["arch"] and preset["image_size"] == size
        assert preset["flip"] is False or dataset == "fashion_mnist"
    for dataset in "cifar10", "cifar100", "svhn", "svhn_extra", "imagenet":
        assert presets.for_dataset(dataset)["arch"] in ("wrn-28-2", "wrn-28-8.4375", "resnet50v2")
        if dataset != "imagenet":
            preset = presets.for_dataset(dataset, recipe="fast")
            assert (preset["arch"], preset["image_size"]) == (SHARED["arch"], 26)
            assert preset["validation"] == presets.NAMED[dataset]["validation"]
    with pytest.raises(cli.Refused, match="--recipe fast: .* imagenet"):
        train_crae.configure(dataset="imagenet", recipe="fast")
    with pytest.raises(cli.Refused, match="--rotations one: extension 1"):
        train_crae.configure(plus=True, rotations="one")
    assert settings.SMALLEST_FAST == 8
