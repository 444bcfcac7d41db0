"""The runs of each table, none of them twice, stopping and continuing, and the tables and figures."""
import csv
import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

import ablations
import cli
import helpers
import metrics
import presets
import report
import run_folder
import sweeps


@pytest.fixture
def fake(monkeypatch, tmp_path):
    """A sweep that does not train: it writes the files of a finished run. Returns the names of these runs."""
    monkeypatch.chdir(tmp_path)
    started = []

    def sweep(runs, jobs, processes, device):
        for run in runs:
            if not sweeps.is_finished(run):
                started.append(run["folder"].name)
                write_finished_run(run["folder"], run["config"])
        return []

    monkeypatch.setattr(sweeps, "sweep", sweep)
    return started


def write_finished_run(folder, config):
    """The files of a finished run: an error of 10 % plus the seed, and a matrix with 0.55 on the diagonal."""
    folder.mkdir(parents=True)
    steps, classes = config["steps"], 2 if "npz" in config["dataset"] else 10
    resolved = dict(rotation_heads=config.get("heads") or classes, num_classes=10, parameters=1,
                    images=dict(test=500))
    (folder / "config.json").write_text(json.dumps(config | dict(resolved=resolved)))
    row = dict(step=steps, seconds=60.0, test_error=10.0 + config["seed"], unlabeled_error=9.0)
    run_folder.write_rows(folder / "log.csv", [row], "w")
    matrix = [{"step": steps, "class": c} | {f"head_{j}": 0.55 if j == c else 0.05 for j in range(10)}
              for c in range(10)]
    run_folder.write_rows(folder / "diversity.csv", matrix, "w")
    (folder / "model.pt").touch()


@pytest.mark.parametrize("table, methods", {
    # S4L has weight 2 in the fast recipe, so it is trained once.
    "self_supervised": ["labeled_only", "fine_tune", "s4l", "s4l_upright", "crae"],
    "state_of_the_art": ["labeled_only", "pi_model", "pseudo_label", "mixup", "vat", "mean_teacher",
                         "mixmatch", "ict", "swa", "fixmatch", "crae", "crae_plus"],
    "components": ["crae", "crae_ext1", "crae_plus", "no_rotation", "no_rotation_ext1", "crae_ext2",
                   "crae_entmin", "crae_ext2_entmin", "crae_detach_rotated"],
    "ensemble": ["crae", "random", "independent", "detach", "crae_plus", "s4l", "s4l_one_rotation"],
    "aux_classifier": ["crae", "crae_aux_all", "crae_no_aux", "crae_plus", "crae_plus_aux_all",
                       "crae_plus_no_aux"],
    "heads": ["independent_2", "independent", "independent_20"],        # ten heads are the default for digits
    "diversity": ["crae", "crae_plus"],
}.items())
def test_each_table_has_its_runs(table, methods, fake, capsys):
    rows = ablations.ablate(table, labels=[50, 100], seeds=[0, 2])
    assert fake == [f"digits_{n}_{m}_{seed}" for n in (50, 100) for m in methods for seed in (0, 2)]
    for name in fake:                                           # the folder that the script would choose
        saved = json.loads(Path("runs", name, "config.json").read_text())
        assert Path(saved["out"]) == Path("runs", name)
    if table != "diversity":
        assert [(r["labels"], r["error"]) for r in rows] == [(n, "11.00 ± 1.41 (2)")
                                                             for n in (50, 100) for _ in methods]
        names = dict(independent="independent, 10 heads") if table == "heads" else {}
        shown = [r["method"] for r in rows[:len(methods)]]
        assert sorted(shown) == sorted(names.get(m, report.METHODS[m]) for m in methods)
        assert all(r["paper"] == "" for r in rows)              # the paper has no digits
    else:
        assert {r["mean_diagonal"] for r in rows} == {"0.5500"} and len(rows) == 8
        assert {p.name for p in Path("runs/_ablations").glob("*.png")} == {
            f"diversity_digits_{n}{m}.png" for n in (50, 100) for m in ("", "_crae", "_crae_plus")}
    with Path("runs", "_ablations", f"{table}_digits_50_100.csv").open() as file:
        assert [dict(r) for r in csv.DictReader(file)] == [{k: str(v) for k, v in r.items()} for r in rows]
    fake.clear()
    ablations.ablate(table, labels=[50], seeds=[0, 2])
    assert not fake                                             # no run is repeated


def test_no_table_is_overwritten_by_another_setting(fake):
    for flags in dict(), dict(labels=[50]), dict(labels=[50], steps=7), dict(labels=["10%"]):
        ablations.ablate("ensemble", **flags)
    assert {p.name for p in Path("runs/_ablations").iterdir()} == {
        "ensemble_digits_100.csv", "ensemble_digits_50.csv", "ensemble_digits_steps-7_50.csv",
        "ensemble_digits_10%.csv"}


def test_what_a_killed_run_leaves_does_not_stop_a_sweep_but_other_files_do(fake, tmp_path):
    folder = Path("runs", "digits_100_crae_0")
    folder.mkdir(parents=True)
    (folder / ".lock").touch()
    (folder / "config.tmp.json").touch()
    runs = [sweeps.plan_run(dict(), "runs")]
    assert not run_folder.holds_anything(folder) and runs[0]["folder"] == folder
    folder.rename("elsewhere")
    ablations.ablate("diversity")
    for place in Path("runs", "digits_100_crae_1"), Path("runs", "digits_100_crae_plus_2"):
        place.touch()                                           # a file in the place of a run
        with pytest.raises(cli.Refused, match="is not the folder of a run"):
            ablations.ablate("diversity", seeds=[1, 2])
        place.unlink()
    with pytest.raises(cli.Refused, match="--out .* cannot be written"):
        ablations.ablate("diversity", out="/proc/runs")


def test_the_comparison_ends_with_an_honest_sentence(fake, monkeypatch, capsys):
    rows = ablations.ablate("compare", labels=[50], seeds=[0, 1])
    assert {row["method"] for row in rows} == {"Labelled-only", "S4L, class loss on upright copies", "CRAE",
                                               "CRAE+", "MixMatch", "CRAE with MixMatch"}
    assert all(row["error"] == "10.50 ± 0.71 (2)" and row["minutes"] == "1.0" and row["steps"] == "600"
               for row in rows)
    last = capsys.readouterr().out.splitlines()[-1]
    assert "has the lowest error, but its 95 % interval overlaps with that of" in last
    low, high = (sum(metrics.wilson(wrong, 500)[k] for wrong in (50, 55)) / 2 for k in (0, 1))
    assert (float(rows[0]["low"]), float(rows[0]["high"])) == pytest.approx((low, high), abs=0.01)
    apart = [dict(method="A", low="1", high="2"), dict(method="B", low="2.1", high="3")]
    assert ablations.verdict(apart, 50).startswith("With 50 labels, A has the lowest error, and its")
    apart[1]["low"] = "2"
    assert "overlaps with that of B:" in ablations.verdict(apart, 50)
    rows = ablations.ablate("compare", labels=[100, 50])
    assert [row["labels"] for row in rows] == [100] * 6 + [50] * 6              # in the order given


def test_the_comparison_uses_the_fast_recipe_and_takes_a_table_of_labels(fake, tmp_path, monkeypatch, capsys):
    files = helpers.make_image_folder(tmp_path / "pics", parts=["all"], n=8)
    rows = [f"{name}/{i}.png,{name}" for name in ("a b", "ö") for i in range(4)]
    (tmp_path / "labels.csv").write_text("\n".join(["image,label", *rows]) + "\n", encoding="utf-8")
    shown = ablations.ablate("compare", dataset=files, labels_file="labels.csv")
    assert {row["labels"] for row in shown} == {"listed"} and len(shown) == 6
    assert capsys.readouterr().out.splitlines()[-1].startswith("With listed labels, ")
    monkeypatch.setattr(sweeps, "print_plan", lambda runs, *rest: runs)
    for dataset, recipe in dict(cifar10="fast", digits="fast").items():
        runs = ablations.ablate("compare", dataset=dataset, dry_run=True)
        assert {run["config"]["recipe"] for run in runs} == {recipe}
    runs = ablations.ablate("compare", dataset="cifar10", recipe="paper", dry_run=True)
    assert {run["config"]["recipe"] for run in runs} == {"paper"}


def test_tables_share_their_runs(fake):
    for table in ablations.ROWS:
        ablations.ablate(table)
    assert len(fake) == len(set(fake)) == 5 + 10 + 7 + 4 + 4 + 2 + 1


@pytest.mark.parametrize("dataset, methods", {
    "cifar10": "labeled_only pi_model pseudo_label mixup vat mean_teacher mixmatch ict crae crae_plus",
    "svhn": "labeled_only pi_model pseudo_label mixup vat mean_teacher mixmatch ict crae crae_plus",
    "cifar100": "mixmatch swa crae crae_plus",
    "fashion_mnist": "labeled_only pi_model pseudo_label mixup vat mean_teacher mixmatch ict swa fixmatch "
                     "crae crae_plus",
}.items())
def test_the_papers_datasets_are_compared_with_the_papers_baselines(dataset, methods):
    rows = ablations.rows_of("state_of_the_art", dataset, "wrn-28-2")
    planned = [sweeps.plan_run(row | dict(dataset=dataset), "runs")["config"] for row in rows]
    assert [config["method"] for config in planned] == methods.split()


def test_rotation_dim_goes_down_from_the_number_of_features_and_counts_costs(fake, capsys):
    rows = ablations.ablate("rotation_dim", arch="wrn-10-1", labels=[50])
    assert [r["rot_dim"] for r in rows] == ["no reduction", 64, 32, 16, 8, 4]
    reduced = [64 * d + 40 * d + 40 for d in (64, 32, 16, 8, 4)]
    assert [r["head_parameters"] for r in rows] == [64 * 40 + 40, *reduced]
    assert all(float(r["head_microseconds"]) > 0 for r in rows)
    copies = 2 * 64 + 4 * 48                                    # of the fast recipe
    memory = 4 * (4 * (104 * 4 + 40) + 2 * copies * 44) / 1024
    assert float(rows[-1]["head_kilobytes"]) == pytest.approx(memory, abs=1)
    assert Path("runs/_ablations/rotation_dim_digits_arch-wrn-10-1_50.png").stat().st_size > 5000
    assert ablations.dims_of("resnet50v2")[1:9] == [2048, 1024, 512, 256, 128, 64, 32, 16]


def test_the_papers_number_is_shown_only_for_the_papers_setting(fake, monkeypatch):
    monkeypatch.setattr(ablations, "check_splits", lambda *rest: (10, 32))
    rows = ablations.ablate("ensemble", dataset="cifar10", labels=[250])
    assert [r["paper"] for r in rows] == ["17.07", "28.68", "23.26", "23.27", "10.76", "32.66", ""]
    rows = ablations.ablate("ensemble", dataset="cifar10", labels=[250], steps=10)
    assert [r["paper"] for r in rows] == [""] * 7
    rows = ablations.ablate("self_supervised", dataset="cifar10", labels=[250])
    assert [r["paper"] for r in rows] == ["56.76", "53.66", "32.66", "", "", "17.07"]
    rows = ablations.ablate("state_of_the_art", dataset="cifar100")
    assert [(r["method"], r["paper"]) for r in rows] == [
        ("MixMatch", "25.88 [mixmatch]"), ("SWA", "28.80 [fast-swa]"), ("CRAE", "30.68"), ("CRAE+", "25.69")]
    rows = ablations.ablate("self_supervised", dataset="imagenet", labels=["10%"], batch=256)
    assert [r["paper"] for r in rows] == ["40.84", "", "36.16", "", "", "34.66"]        # 100 - top-1 accuracy


@pytest.mark.slow
def test_a_real_sweep_is_not_repeated_and_the_report_shows_it(tmp_path):
    words = "diversity", *helpers.words_of(**helpers.FOUR_STEPS), "--jobs=2", "--labels=50"
    done = helpers.run_script("ablations.py", *words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "2 runs, 0 of them already finished" in done.stdout
    runs = [tmp_path / "runs" / f"digits_50_{method}_0_recipepaper_archwrn-10-0.25_steps4_batch4"
            for method in ("crae", "crae_plus")]
    times = [(run / "model.pt").stat().st_mtime_ns for run in runs]
    again = helpers.run_script("ablations.py", *words, cwd=tmp_path)
    assert again.returncode == 0 and "2 runs, 2 of them already finished" in again.stdout
    assert times == [(run / "model.pt").stat().st_mtime_ns for run in runs]
    report.write_report(str(tmp_path / "runs"), out=str(tmp_path / "report"))
    text = (tmp_path / "report" / "report.md").read_text()
    assert "## digits, with arch wrn-10-0.25, batch 4, recipe paper, steps 4" in text
    assert "Skipped" not in text
    for run, name in zip(runs, ("crae", "crae_plus")):          # the same run by hand has the same folder
        assert json.loads((run / "config.json").read_text())["method"] == name


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2])
def test_a_stopped_sweep_is_continued(processes, tmp_path):
    words = "diversity", "--steps=400", *helpers.words_of(**helpers.QUICK, processes=processes), "--labels=50"
    process = subprocess.Popen([sys.executable, helpers.HERE / "ablations.py", *words], cwd=tmp_path,
                               stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    log = tmp_path / "runs" / "digits_50_crae_0_recipepaper_archwrn-10-0.25_steps400_batch4" / "log.csv"
    while not log.exists():
        assert process.poll() is None, process.stderr.read()
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate()
    assert process.returncode == 143
    assert "to continue: python ablations.py diversity --steps=400" in errors
    assert (log.parent / "last.pt").exists() and not (log.parent / "model.pt").exists()
    first = log.read_text().splitlines()[1]
    done = helpers.run_script("ablations.py", *words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert log.read_text().splitlines()[1] == first             # continued, not started again
    assert len(log.read_text().splitlines()) == 21 and (log.parent / "model.pt").exists()


def test_folders_of_other_experiments_and_of_running_sweeps_are_refused(tmp_path, fake):
    for folder, value in ("a", 0), ("b", 1):
        (tmp_path / folder).mkdir()
        np.savez(tmp_path / folder / "two.npz", train_images=np.full((30, 8, 8), value, np.uint8),
                 train_labels=np.arange(30) % 2, test_images=np.zeros((4, 8, 8), np.uint8),
                 test_labels=np.arange(4) % 2)
    rows = ablations.ablate("heads", dataset="a/two.npz", labels=[4])
    # With two classes, two heads are the default of `independent`.
    assert [r["method"] for r in rows] == [f"independent, {k} heads" for k in (2, 10, 20)]
    assert "two.npz_4_independent_0" not in fake and "two_4_independent_0" in fake
    with pytest.raises(cli.Refused, match="--dataset b/two.npz: the run in runs/two_4_.* has a/two.npz"):
        ablations.ablate("heads", dataset="b/two.npz", labels=[4])
    with run_folder.locked("runs"), pytest.raises(cli.Refused, match="another process is using it"):
        ablations.ablate("heads", dataset="a/two.npz", labels=[4])
    ablations.ablate("heads", dataset="a/two.npz", labels=[4, 4])
    np.savez(tmp_path / "c.npz", **dict(np.load("a/two.npz")),
             unlabeled_images=np.zeros((5, 8, 8), np.uint8))
    with pytest.raises(cli.Refused, match="no diversity matrix"):
        ablations.ablate("diversity", dataset="c.npz")
    assert ablations.ablate("ensemble", dataset="c.npz")[0]["labels"] == "all"


@pytest.mark.parametrize("flags, word", {
    "": "TABLE is missing, one of self_supervised, state", "everything": "components, ensemble",
    "heads --jobs 0": "--jobs", "heads --seeds a": "--seeds", "heads --seeds -1": "--seeds",
    "heads --labels 50,x": "--labels", "heads --labels 5": "--labels", "heads --labels 100,2000": "--labels",
    "heads --dataset nothing": "--dataset", "heads --arch vgg": "--arch", "heads --steps 0": "--steps",
    "rotation_dim --arch vgg": "--arch", "heads --plus": "--plus", "heads more": "more",
    "heads --out file": "--out", "heads --processes 0": "--processes",
    "heads --processes 2 --jobs 2": "need 4 GPUs, but there are 0",
    "heads --processes 3": "--processes 3: a batch of 64 cannot be divided equally",
    "heads --processes 2 --accumulate 16 --batch 48": "give a --batch divisible by 32",
    "heads --processes 32": "--processes 32: the recipe's 48 unlabelled images per step cannot be divided",
    "heads --accumulate 32": "--unlabeled 48: cannot be divided",
    "heads --processes 2 --device cuda:0": "--device cuda:0",
    "heads --dry_run --dataset nothing": "--dataset", "heads --dry_run --labels x": "--labels",
    "heads --dry_run --accumulate 3": "--accumulate 3",
    "state_of_the_art --dataset imagenet --dry_run": "--method pi_model: needs several views",
}.items())
def test_bad_input_gives_one_line_before_any_work(flags, word, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    monkeypatch.setattr(sweeps, "sweep", lambda *rest: pytest.fail("the sweep started"))
    monkeypatch.setattr(sweeps, "print_plan", lambda *rest: pytest.fail("the plan was printed"))
    with pytest.raises(SystemExit) as stop:
        helpers.command_line(ablations, flags.split(), ablations.ablate)
    assert isinstance(stop.value.code, str) and "\n" not in stop.value.code and word in stop.value.code
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


def test_help_names_every_flag_and_table(capsys):
    with pytest.raises(SystemExit) as stop:
        helpers.command_line(ablations, ["--help"], ablations.ablate)
    assert stop.value.code == 0
    text = capsys.readouterr().out
    for name in ablations.FLAGS:
        assert name == "table" or f"--{name} " in text, name
    for table in [*ablations.ROWS, "rotation_dim"]:
        assert f"    {table} " in text


# ---------------------------------------------------------------- without data


def test_a_dry_run_needs_no_data_and_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(run_folder, "load_images", lambda config: pytest.fail("the data was read"))
    monkeypatch.setattr(sweeps, "sweep", lambda *rest: pytest.fail("the sweep started"))
    asked = []
    monkeypatch.setattr(sweeps, "print_plan", lambda *rest: asked.append(rest))
    for dataset in presets.NAMED:
        ablations.ablate("components", dataset=dataset, dry_run=True)
    shapes = [(num_classes, image_size) for _, num_classes, image_size, _, _ in asked]
    assert shapes == [(10, 16), (10, 32), (100, 32), (10, 32), (10, 32), (10, 20), (1000, 224)]
    ablations.ablate("heads", dataset="svhn", image_size=16, jobs=3, dry_run=True)
    assert asked[-1][1:] == (10, 16, 3, 1)
    assert [run["config"]["method"] for run in asked[-1][0]] == ["independent_2", "independent",
                                                                 "independent_20"]
    assert not list(tmp_path.iterdir())


def test_a_dry_run_reads_own_data(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    file = helpers.save_few_digits(tmp_path / "few.npz")
    asked = []
    monkeypatch.setattr(sweeps, "print_plan", lambda *rest: asked.append(rest))
    ablations.ablate("heads", dataset=file, dry_run=True)
    assert asked[0][1:3] == (10, 8)
    with pytest.raises(cli.Refused, match="--labels 5: too few for 10 classes"):
        ablations.ablate("heads", dataset=file, labels=[5], dry_run=True)


def test_the_named_datasets_have_the_known_classes_and_sizes():
    config = sweeps.plan_run(dict(dataset="digits"), "runs")["config"]
    assert ablations.known_shape(config) == ablations.check_splits("heads", [config]) == (10, 16)
    assert presets.NUM_CLASSES.keys() == presets.IMAGE_SIZE.keys() == presets.NAMED.keys()


def test_the_plan_of_imagenet_reads_no_image(fake, tmp_path, monkeypatch):
    """The files are not images: every attempt to read one would fail."""
    for part in "train", "val":
        for k in range(1000):
            folder = tmp_path / "data" / part / f"n{k:08}"
            folder.mkdir(parents=True)
            for i in range(3 if part == "train" else 1):
                (folder / f"{i}.JPEG").write_bytes(b"no image")
    monkeypatch.setitem(presets.imagenet_1, "validation", 100)
    monkeypatch.setattr(ablations, "head_cost", lambda *rest: (1, 1.0, 1024))
    rows = ablations.ablate("rotation_dim", dataset="imagenet", labels=[1000], processes=2, accumulate=2,
                            batch=8, device="cpu")
    dims = [0, 2048, 1024, 512, 256, 128, 64, 32, 16, 8, 4]
    # The preset has 16, so this run is the one of the other tables.
    assert fake == [f"imagenet_1000_crae_0{'' if d == 16 else f'_rot_dim{d}'}_batch8" for d in dims]
    assert [r["rot_dim"] for r in rows] == ["no reduction", *dims[1:]]
