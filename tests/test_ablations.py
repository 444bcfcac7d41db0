"""Sweeps: the runs of each table, none of them twice, stopping and continuing, and the tables and figures."""
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
import devices
import helpers
import report
import run_folder
import train_crae

QUICK = dict(steps=4, **helpers.QUICK)


@pytest.fixture
def fake(monkeypatch, tmp_path):
    """A sweep that does not train: it writes the files of a finished run. Returns the names of these runs."""
    monkeypatch.chdir(tmp_path)
    started = []

    def sweep(runs, jobs, device):
        for run in runs:
            if not ablations.is_finished(run):
                started.append(run["folder"].name)
                write_finished_run(run["folder"], run["config"])
        return []

    monkeypatch.setattr(ablations, "sweep", sweep)
    return started


def write_finished_run(folder, config):
    """The files of a finished run: an error of 10 % plus the seed, and a matrix with 0.55 on the diagonal."""
    folder.mkdir(parents=True)
    steps, classes = config["steps"], 2 if "npz" in config["dataset"] else 10
    resolved = dict(rotation_heads=config["heads"] or classes, num_classes=10, parameters=1)
    (folder / "config.json").write_text(json.dumps(config | dict(resolved=resolved)))
    row = dict(step=steps, test_error=10.0 + config["seed"], unlabeled_error=9.0)
    run_folder.write_rows(folder / "log.csv", [row], "w")
    matrix = [{"step": steps, "class": c} | {f"head_{j}": 0.55 if j == c else 0.05 for j in range(10)}
              for c in range(10)]
    run_folder.write_rows(folder / "diversity.csv", matrix, "w")
    (folder / "model.pt").touch()


@pytest.mark.parametrize("table, methods", {
    "components": ["crae", "crae_ext1", "crae_plus", "no_rotation", "no_rotation_ext1", "crae_ext2"],
    "ensemble": ["crae", "random", "independent", "detach", "crae_plus"],
    "aux_classifier": ["crae", "crae_no_aux", "crae_plus", "crae_plus_no_aux"],
    "heads": ["independent_2", "independent", "independent_20"],        # ten heads are the default for digits
    "diversity": ["crae", "crae_plus"],
}.items())
def test_each_table_has_its_runs(table, methods, fake, capsys):
    rows = ablations.ablate(table, labels=[50, 100], seeds=[0, 2])
    assert fake == [f"digits_{n}_{m}_{seed}" for n in (50, 100) for m in methods for seed in (0, 2)]
    for name in fake:                                           # the folder that train_crae.py would choose
        saved = json.loads(Path("runs", name, "config.json").read_text())
        assert Path(saved["out"]) == Path("runs", name)
    if table != "diversity":
        assert [(r["labels"], r["error"]) for r in rows] == [(n, "11.00 ± 1.41 (2)")
                                                             for n in (50, 100) for _ in methods]
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
    runs = [ablations.plan_run(dict(), "runs")]
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


def test_tables_share_their_runs(fake):
    for table in "components", "ensemble", "aux_classifier", "heads", "diversity":
        ablations.ablate(table)
    assert len(fake) == len(set(fake)) == 6 + 3 + 2 + 2


def test_rotation_dim_goes_down_from_the_number_of_features_and_counts_costs(fake, capsys):
    rows = ablations.ablate("rotation_dim", arch="wrn-10-1", labels=[50])
    assert [r["rot_dim"] for r in rows] == ["no reduction", 64, 32, 16, 8, 4]
    reduced = [64 * d + 40 * d + 40 for d in (64, 32, 16, 8, 4)]
    assert [r["head_parameters"] for r in rows] == [64 * 40 + 40, *reduced]
    assert all(float(r["head_microseconds"]) > 0 for r in rows)
    memory = 4 * (4 * (104 * 4 + 40) + 2 * 256 * 44) / 1024
    assert float(rows[-1]["head_kilobytes"]) == pytest.approx(memory, abs=1)
    assert Path("runs/_ablations/rotation_dim_digits_arch-wrn-10-1_50.png").stat().st_size > 5000
    assert ablations.dims_of("resnet50v2")[1:9] == [2048, 1024, 512, 256, 128, 64, 32, 16]


def test_the_papers_number_is_shown_only_for_the_papers_setting(fake, monkeypatch):
    monkeypatch.setattr(run_folder, "load_images", lambda config: (None, None, None, range(10)))
    monkeypatch.setattr(run_folder, "draw_split", lambda *rest: None)
    rows = ablations.ablate("ensemble", dataset="cifar10", labels=[250])
    assert [r["paper"] for r in rows] == ["17.07", "28.68", "23.26", "23.27", "10.76"]
    rows = ablations.ablate("ensemble", dataset="cifar10", labels=[250], steps=10)
    assert [r["paper"] for r in rows] == [""] * 5


@pytest.mark.slow
def test_a_real_sweep_is_not_repeated_and_the_report_shows_it(tmp_path):
    words = "diversity", *helpers.words_of(**QUICK), "--jobs=2", "--labels=50"
    done = helpers.run_script("ablations.py", *words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "2 runs, 0 of them already finished" in done.stdout
    runs = [tmp_path / "runs" / f"digits_50_{method}_0_archwrn-10-0.25_steps4_batch4"
            for method in ("crae", "crae_plus")]
    times = [(run / "model.pt").stat().st_mtime_ns for run in runs]
    again = helpers.run_script("ablations.py", *words, cwd=tmp_path)
    assert again.returncode == 0 and "2 runs, 2 of them already finished" in again.stdout
    assert times == [(run / "model.pt").stat().st_mtime_ns for run in runs]
    report.write_report(str(tmp_path / "runs"), out=str(tmp_path / "report"))
    text = (tmp_path / "report" / "report.md").read_text()
    assert "## digits, with arch wrn-10-0.25, batch 4, steps 4" in text and "Skipped" not in text
    for run, name in zip(runs, ("crae", "crae_plus")):          # the same run by hand has the same folder
        assert json.loads((run / "config.json").read_text())["method"] == name


@pytest.mark.slow
def test_a_stopped_sweep_is_continued(tmp_path):
    words = "diversity", "--steps=400", *helpers.words_of(**helpers.QUICK), "--labels=50"
    process = subprocess.Popen([sys.executable, helpers.HERE / "ablations.py", *words], cwd=tmp_path,
                               stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    log = tmp_path / "runs" / "digits_50_crae_0_archwrn-10-0.25_steps400_batch4" / "log.csv"
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


def test_cores_and_gpus_are_distributed_over_the_runs(monkeypatch, tmp_path):
    asked = []
    monkeypatch.setattr(ablations.subprocess, "Popen",
                        lambda command, env, **rest: asked.append((command, env)))
    monkeypatch.setattr(devices, "cores", lambda: 8)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    run = ablations.plan_run(dict(plus=True, aux=False, dataset="digits", seed=3), tmp_path)
    ablations.start_run(run, 1, 4, None)
    monkeypatch.setattr(ablations.torch.cuda, "device_count", lambda: 2)
    for slot in range(4):
        ablations.start_run(run, slot, 4, None)
    assert [env["OMP_NUM_THREADS"] for _, env in asked] == ["2"] * 5
    assert "CUDA_VISIBLE_DEVICES" not in asked[0][1]
    assert [env["CUDA_VISIBLE_DEVICES"] for _, env in asked[1:]] == ["0", "1", "0", "1"]
    ablations.start_run(run, 1, 4, "cpu"), ablations.start_run(run, 1, 4, "cuda:1")
    assert not any("CUDA_VISIBLE_DEVICES" in env for _, env in asked[5:])
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,7")
    ablations.start_run(run, 1, 4, "cuda")
    assert asked[-1][1]["CUDA_VISIBLE_DEVICES"] == "7"
    words = [str(word) for word in asked[0][0][2:]]
    assert words == ["--plus=True", "--aux=False", "--seed=3",
                     f"--out={tmp_path}/digits_100_crae_plus_no_aux_3", "--resume"]


@pytest.mark.slow
def test_a_run_that_fails_is_named_and_the_others_are_finished(monkeypatch, tmp_path):
    runs = [ablations.plan_run(dict(QUICK, seed=seed), tmp_path) for seed in (0, 1)]
    runs[0]["folder"].mkdir()
    (runs[0]["folder"] / "something").touch()                   # not the folder of a run
    failed, = ablations.sweep(runs, 1, "cpu")
    assert "_0_" in failed and "is not the folder of a run" in failed
    assert ablations.is_finished(runs[1])
    monkeypatch.setattr(ablations, "sweep", lambda *rest: [failed])
    with pytest.raises(cli.Refused,
                       match="1 of 2 runs failed; the first is .*_0_.*is not the folder of a run"):
        ablations.ablate("diversity", out=str(tmp_path / "other"), device="cpu")


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
    "": "TABLE is missing, one of components, ensemble", "everything": "components, ensemble",
    "heads --jobs 0": "--jobs", "heads --seeds a": "--seeds", "heads --seeds -1": "--seeds",
    "heads --labels 50,x": "--labels", "heads --labels 5": "--labels", "heads --labels 100,2000": "--labels",
    "heads --dataset nothing": "--dataset", "heads --arch vgg": "--arch", "heads --steps 0": "--steps",
    "rotation_dim --arch vgg": "--arch", "heads --plus": "--plus", "heads more": "more",
    "heads --out file": "--out",
}.items())
def test_bad_input_gives_one_line_before_any_work(flags, word, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    monkeypatch.setattr(ablations, "sweep", lambda *a: pytest.fail("the sweep started"))
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
    assert train_crae.method_name(True, True, False, "marginal", None, "upright") == "crae_plus"
