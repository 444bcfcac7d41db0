"""Tables to the last digit from hand-made logs; unfinished, broken and foreign files; and every figure."""
import csv
import math

import numpy as np
import pytest
from PIL import Image

import claims
import helpers
import plots
import presets
import report
import results
import run_folder
from helpers import change_config, make_run


def lines_of(figure):
    return {line.get_label(): line.get_xydata().tolist() for axes in figure.axes for line in axes.lines}


def matrices_of(figure):
    return [np.asarray(axes.images[0].get_array()) for axes in figure.axes if axes.images]


def colour_of(method):
    """The colour of a method in all figures."""
    (_, _, number), = report.in_table_order({method})
    return plots.colour(number)


def cells(path, dataset, start):
    """The cells of the only row of that name in the section of a dataset."""
    section = path.read_text().split(f"## {dataset}\n")[1].split("\n## ")[0]
    line, = [line for line in section.splitlines() if line.startswith(f"| {start} |")]
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_cells_are_mean_std_and_number_of_seeds_of_the_medians(tmp_path, figures):
    runs = tmp_path / "runs"
    make_run(runs, errors=[99.0] * 5 + [10.0] * 10 + [12.0] * 10, seed=0)       # median of the last 20: 11
    make_run(runs, errors=[13.0] * 25, seed=1)
    make_run(runs, "crae_plus", errors=[7.125], seed=0)
    make_run(runs, "crae_ext1", errors=[8.5])                   # only the table of components shows it
    make_run(runs, "crae", labels=100, errors=[5.0, 6.0], seed=0)
    make_run(runs, "independent", errors=[9.0], heads=10)
    make_run(runs, "independent_2", errors=[8.0], heads=2)
    make_run(runs, "detach", errors=[9.5])
    out = report.write_report(str(runs), out=str(tmp_path / "report"))
    path = tmp_path / "report" / "report.md"
    assert out == str(path)
    text = path.read_text()
    name = "CRAE + ext. 1 and 2 (CRAE+)"
    assert cells(path, "digits", name) == [name, "7.12 (1)", ""]
    assert "| CRAE | 12.00 ± 1.41 (2) | 5.50 (1) |" in text     # sqrt(2) is the deviation of 11 and 13
    assert cells(path, "digits", "10") == ["10", "9.00 (1)"]
    assert cells(path, "digits", "2") == ["2", "8.00 (1)"]
    assert "| 20 |" not in text and "## Not run" not in text    # digits is not in the paper
    assert "| detached p(y\\|x) | 9.50 (1) |" in text           # a bar would end the cell
    assert "| Components, digits | 50 labels | 100 labels |" in text
    assert "| paper |" not in text.split("## digits")[1].split("##")[0]
    for name in ("digits_labels", "digits_50_curves", "digits_50_diversity_crae",
                 "digits_50_diversity_crae_plus", "digits_50_diversity"):
        assert f"({name}.png)" in text
        assert np.asarray(Image.open(tmp_path / "report" / f"{name}.png").convert("L")).std() > 5
    curves = lines_of(figures["digits_50_curves.png"])
    assert curves["CRAE (2)"][0] == [20, (99 + 13) / 2] and curves["CRAE (2)"][-1] == [500, 12.5]
    assert curves["CRAE+ (1)"] == [[20, 7.125]]
    plotted = {c.get_label(): c.lines[0].get_xydata()[:, 1].tolist()
               for c in figures["digits_labels.png"].axes[0].containers}
    assert plotted["CRAE"] == [12, 5.5] and plotted["CRAE+"] == [7.125]
    figure = figures["digits_50_diversity_crae.png"]
    assert lines_of(figure)["_child0"][:2] == [[1, 100], [2, 100]]              # epoch, unlabelled error
    first = np.array([[0.8, 0.15, 0.15], [0.05, 0.8, 0.15], [0.05, 0.05, 0.8]])         # one row per class
    np.testing.assert_allclose(matrices_of(figure), [first / 10, first / 20, first / 25])       # of 25 epochs
    np.testing.assert_allclose(matrices_of(figures["digits_50_diversity.png"]), [first / 25, first])


def test_the_papers_numbers_are_next_to_ours_and_missing_cells_are_listed(tmp_path, figures):
    runs = tmp_path / "runs"
    make_run(runs, "mixmatch", "cifar10", 250, errors=[11.5])
    make_run(runs, "crae", "cifar10", 250, errors=[18.0], changed=dict(steps=40))
    report.write_report(str(runs), out=str(tmp_path / "report"))
    path = tmp_path / "report" / "report.md"
    quoted = ["11.50 (1)", "11.08 [mixmatch]", "", "9.65 [mixmatch]"]
    assert cells(path, "cifar10", "MixMatch")[1:5] == quoted
    text = path.read_text()
    assert "| CRAE+ |  | 10.76 |" in text                       # not run: empty
    short = text.split("## cifar10, with steps 40")[1].split("\n## ")[0]
    assert "| CRAE | 18.00 (1) |" in short
    assert "17.07" not in short                                 # another setting: without the paper's number
    axes = figures["cifar10_labels.png"].axes[0]
    dashed = {line.get_color(): line.get_xydata().tolist() for line in axes.lines
              if line.get_linestyle() == "--" and len(line.get_xydata()) > 0}
    assert dashed[colour_of("mixmatch")] == [[250, 11.08], [500, 9.65], [1000, 7.75], [2000, 7.03],
                                             [4000, 6.24]]
    assert axes.get_xscale() == "log" and len(dashed) == 12     # all methods of the paper's tables
    assert dashed[colour_of("labeled_only")][-1] == [4000, 19.65]       # the paper's run, not one it quotes
    names = [text.get_text() for text in figures["cifar10_labels.png"].legends[0].texts]
    assert "MixMatch" in names and "VAT (paper)" in names and "MixMatch (paper)" not in names
    missing = text.split("## Not run, or not finished")[1]
    assert "- cifar10, 250 labels: " in missing
    methods = missing.split("cifar10, 250 labels: ")[1].splitlines()[0]
    assert "MixMatch" not in methods and "CRAE" in methods
    assert "svhn" not in text and "imagenet" not in text        # were not run


def test_an_unfinished_sweep_and_files_that_are_not_runs(tmp_path, capsys):
    runs = tmp_path / "runs"
    make_run(runs, errors=[20.0, 10.0], seed=0)
    make_run(runs, errors=[20.0], seed=1, finished=False)
    half = make_run(runs, errors=[20.0, 12.0, 11.0], seed=2, finished=False)
    (half / "log.csv").write_text((half / "log.csv").read_text() + "80,4")      # a row that was cut off
    nothing = make_run(runs, errors=[1.0], seed=3, finished=False)
    (nothing / "log.csv").unlink()
    for name, file, content in (("damaged", "config.json", b"{"), ("list", "config.json", b"[]"),
                                ("binary", "config.json", b"\xff\xfe\x00"),
                                ("foreign", "config.json", b'{"model": 3}'),
                                ("words", "readme.txt", b"hello")):
        (runs / name).mkdir()
        (runs / name / file).write_bytes(content)
    broken = make_run(runs, errors=[5.0], seed=4, name="brokenlog")
    (broken / "log.csv").write_bytes(b"step,test_error\n20,abc\n")
    matrix = make_run(runs, "crae_plus", errors=[5.0], name="brokenmatrix")
    (matrix / "diversity.csv").write_bytes(b"step,class,head_0\n20,a,x\n")
    (runs / "stray.bin").write_bytes(b"\0" * 100)
    twin = make_run(runs, errors=[20.0, 10.0], seed=0, name="zz_twin")
    make_run(runs, errors=[55.0], seed=1, name="aa_finished")   # replaces the unfinished run with seed 1
    for name, change in (("epoch0", dict(epoch=0)), ("infinite", dict(steps=1e999)),
                         ("fifty", dict(labels="fifty"))):
        change_config(make_run(runs, errors=[5.0], seed=9, name=name), **change)
    for name, content in (("nounlabeled", b"step,test_error\n20,5\n"),
                          ("blank", b"step,test_error,unlabeled_error\n20,,\n")):
        strange = make_run(runs, errors=[5.0], seed=9, name=name)
        (strange / "log.csv").write_bytes(content)
    for name, content in (("header", b"a,b\n1,2\n"), ("wide", b"step,class,head_0\n20,a,1,2,3\n")):
        strange = make_run(runs, "crae_ext1", errors=[5.0], seed=len(name), name=name)
        (strange / "diversity.csv").write_bytes(content)
    report.write_report(str(runs), out=str(tmp_path / "report"))
    text, errors = (tmp_path / "report" / "report.md").read_text(), capsys.readouterr().err
    assert "| CRAE | 35.00 ± 28.28 (2) |" in text and "5 finished runs, 2 unfinished" in text
    assert "step 60 of 80" in text and "step 0 of 40" in text
    for name in ("damaged", "list", "binary", "foreign", "words", "brokenlog", "brokenmatrix", "stray.bin",
                 twin.name, "epoch0", "infinite", "fifty", "nounlabeled", "blank", "header", "wide"):
        assert name in text.split("## Skipped")[1] and name in errors, name


def test_without_runs_there_are_no_tables(tmp_path):
    (tmp_path / "runs").mkdir()
    report.write_report(str(tmp_path / "runs"), out=str(tmp_path / "report"))
    assert (tmp_path / "report" / "report.md").read_text() == "# Report\n\n0 finished runs, 0 unfinished.\n\n"
    assert "0 finished runs" in (tmp_path / "report" / "report.html").read_text()
    assert not list((tmp_path / "report").glob("*.png"))


def test_the_papers_tables_of_a_dataset_that_was_run_have_all_its_numbers(tmp_path):
    with (helpers.HERE / "paper_results.csv").open() as file:
        numbers = list(csv.DictReader(file))
    for dataset in sorted({row["dataset"] for row in numbers}):
        labels = "1%" if dataset == "imagenet" else 250
        make_run(tmp_path / "runs", dataset=dataset, labels=labels, errors=[77.0], finished=False)
    report.write_report(str(tmp_path / "runs"), out=str(tmp_path / "report"))
    text = (tmp_path / "report" / "report.md").read_text()
    for row in numbers:
        assert f"{float(row['value']):.2f}" in text, row


@pytest.mark.slow
def test_own_data_of_the_same_name_is_another_dataset(tmp_path):
    runs = tmp_path / "runs"
    datasets = ["cifar10", "/elsewhere/cifar10", "my $\\frac$ | pics", "/a/x.npz", "/b/x.npz"]
    for seed, dataset in enumerate(datasets):
        make_run(runs, dataset=dataset, labels=250, errors=[10.0 + seed], name=f"run{seed}")
    make_run(runs, "independent", errors=[3.0], heads=20, name="twenty")
    report.write_report(str(runs), out=str(tmp_path / "report"))
    text = (tmp_path / "report" / "report.md").read_text()
    for seed in range(5):
        assert f"| CRAE | {10 + seed}.00 (1) |" in text
    assert "| 20 | 3.00 (1) |" in text.split("## digits")[1]
    own = text.split("## /a/x.npz")[1].split("\n## ")[0]
    table = "| Method, /a/x.npz | 250 labels |\n|---|---|\n| CRAE | 13.00 (1) |\n\n"
    assert table in own and own.count("|---") == 2              # one table, and nothing is missing
    assert "- /a/x.npz" not in text
    images = [name.split(")")[0] for name in text.split("](")[1:]]
    assert all(" " not in name for name in images)
    assert len(set(images)) == len(images) and len(images) >= 7


def test_other_settings_and_other_folders_are_kept_apart_and_named(tmp_path, figures, capsys):
    runs = tmp_path / "runs"
    make_run(runs / "sweep", errors=[10.0], seed=0)
    make_run(runs / "sweep", errors=[30.0], seed=0, changed=dict(batch=8))      # no twin: another setting
    make_run(runs / "sweep", errors=[12.0], seed=1)
    make_run(runs / "sweep", errors=[50.0, 50.0], seed=2, finished=False)       # in no mean and no curve
    (runs / "sweep" / "junk").mkdir()
    (runs / "sweep" / "stray.txt").touch()
    report.write_report(str(runs), out=str(tmp_path / "report"))
    text = (tmp_path / "report" / "report.md").read_text()
    assert "| CRAE | 11.00 ± 1.41 (2) |" in text
    assert "| CRAE | 30.00 (1) |" in text.split("## digits, with batch 8")[1]
    skipped = text.split("## Skipped")[1].strip().splitlines()
    assert [line.split("sweep/")[1] for line in skipped] == ["junk: not a run", "stray.txt: not a run"]
    assert lines_of(figures["digits_50_curves.png"]) == {"CRAE (2)": [[20, 11.0]]}
    bars, = figures["digits_labels.png"].axes[0].containers
    low, high = bars.lines[2][0].get_segments()[0][:, 1]
    assert high - low == pytest.approx(2 * 2 ** 0.5)            # the deviation of 10 and 12, up and down


def test_imagenet_has_top1_and_top5_accuracies(tmp_path):
    for seed, (error, top5) in enumerate([(50.0, 25.0), (52.0, 27.0)]):
        run = make_run(tmp_path / "runs", dataset="imagenet", labels="1%", errors=[90.0] * 19 + [error],
                       seed=seed, diversity=False)
        change_config(run, decay_at=[0.7], rot_dim=16)
        head, *lines = (run / "log.csv").read_text().splitlines()
        lines = [f"{head},test_top5_error", *(f"{line},{top5}" for line in lines)]
        (run / "log.csv").write_text("\n".join(lines) + "\n")
    report.write_report(str(tmp_path / "runs"), out=str(tmp_path / "report"))
    path = tmp_path / "report" / "report.md"
    assert cells(path, "imagenet, accuracies", "CRAE") == [
        "CRAE", "49.00 ± 1.41 (2)", "49.26", "74.00 ± 1.41 (2)", "75.57", "", "65.34", "", "87.07"]
    assert cells(path, "imagenet, accuracies", "S4L")[1:5] == ["", "46.90", "", "74.16"]
    assert cells(path, "imagenet, accuracies", "S4L, as S4L reports it")[4] == "53.37 [s4l]"
    missing = path.read_text().split("## Not run, or not finished")[1]
    assert "- imagenet, 1% labels: Labelled-only, S4L\n" in missing + "\n"


def test_rotation_dimension(tmp_path, figures):
    for dim, error in (None, 10.0), (16, 11.0), (4, 15.0):
        for seed in 0, 1:
            make_run(tmp_path / "runs", errors=[error + seed], rot_dim=dim, seed=seed)
    report.write_report(str(tmp_path / "runs"), out=str(tmp_path / "report"))
    text = (tmp_path / "report" / "report.md").read_text()
    assert ("| no reduction | 10.50 ± 0.71 (2) | 1,000 |\n| 16 | 11.50 ± 0.71 (2) | 1,016 |\n"
            "| 4 | 15.50 ± 0.71 (2) | 1,004 |") in text
    assert "| CRAE | 10.50 ± 0.71 (2) |" in text                # the other tables omit reduced runs
    assert len({colour_of(m) for m in report.METHODS}) == len(report.METHODS)
    make_run(tmp_path / "runs", "s4l", errors=[50.0], rot_dim=4, seed=7)        # only CRAE is shown
    make_run(tmp_path / "runs", errors=[99.0], seed=2)          # a seed that only the unreduced run has
    report.write_report(str(tmp_path / "runs"), out=str(tmp_path / "report"))
    figure = figures["digits_50_rotation_dim.png"]
    points = figure.axes[0].containers[0].lines[0].get_xydata().tolist()
    assert points == [[16, 88.5], [4, 84.5]] and figure.axes[0].lines[-1].get_ydata()[0] == 89.5


def test_a_fast_run_counts_its_last_evaluation(tmp_path, monkeypatch):
    monkeypatch.setattr(run_folder, "rows_that_count", lambda config: 1 if "recipe" in config else 20)
    make_run(tmp_path / "runs", errors=[40.0, 10.0])
    fast = make_run(tmp_path / "runs", errors=[50.0, 12.0], changed=dict(recipe="fast"))
    change_config(fast, recipe="fast")
    report.write_report(str(tmp_path / "runs"), out=str(tmp_path / "report"))
    paper, section = (tmp_path / "report" / "report.md").read_text().split("## digits")[1:]
    assert "| CRAE | 25.00 (1) |" in paper and "the median of a run's last 20 evaluations." in paper
    assert "| CRAE | 12.00 (1) |" in section and "percent: a run's last evaluation." in section


def test_listed_labels_are_not_called_all_labels(tmp_path):
    for seed, labels_file in enumerate([None, "my list.txt"]):
        run = make_run(tmp_path / "runs", dataset="my.npz", labels=None, errors=[10.0 + seed], seed=seed,
                       changed=dict(labels_file=labels_file) if labels_file else {})
        change_config(run, labels_file=labels_file)
    report.write_report(str(tmp_path / "runs"), out=str(tmp_path / "report"))
    text = (tmp_path / "report" / "report.md").read_text()
    section = text.split("## my.npz, with labels_file my list.txt")[1].split("\n## ")[0]
    assert "| Method, my.npz | 50 listed labels |" in section and "all labels" not in section
    assert "| 11.00 (1) |" in section
    assert "(my.npz_labels_file-my-list.txt_50-listed_diversity_crae.png)" in section
    assert "| Method, my.npz | all labels |" in text.replace(section, "")
    table = text.split("## Means")[0]
    assert "| all (50) | CRAE | 10.00 |" in table and "| 50 listed | CRAE | 11.00 |" in table


def test_mean_of_the_diagonal():
    assert claims.mean_diagonal([[0.5, 0.5], [0.25, 0.75]]) == 0.625
    assert claims.mean_diagonal([[math.nan, math.nan], [0.25, 0.75]]) == 0.75


def test_figures_have_class_names_and_markers(tmp_path, figures):
    make_run(tmp_path / "runs", errors=[30.0, 20.0, 10.0, 9.0])
    make_run(tmp_path / "runs", "crae_plus", errors=[20.0, 10.0, 9.0, 8.0])
    report.write_report(str(tmp_path / "runs"), out=str(tmp_path / "report"))
    for name in "digits_50_diversity_crae.png", "digits_50_diversity.png":
        first = next(axes for axes in figures[name].axes if axes.images)
        assert [text.get_text() for text in first.get_yticklabels()] == ["cat", "dog", "$x$"]
    _, first, *others = [axes for axes in figures["digits_50_diversity_crae.png"].axes if axes.axison]
    shown = [any(text.get_visible() and text.get_text() for text in axes.get_yticklabels())
             for axes in (first, *(axes for axes in others if axes.images))]
    assert shown == [True] + [False] * (len(shown) - 1) and len(shown) > 1      # the rows are the same
    make_run(tmp_path / "once", labels=100, errors=[30.0])
    report.write_report(str(tmp_path / "once"), out=str(tmp_path / "report"))
    assert "digits_100_curves.png" not in figures               # one evaluation is no curve
    assert not any("_labels.png" in name for name in figures)   # nor is one number of labels and one seed
    lines = figures["digits_50_curves.png"].axes[0].lines
    assert len({line.get_marker() for line in lines}) == len(lines) == 2
    assert not {"", "None", None} & {line.get_marker() for line in lines}


def test_bad_input_gives_one_line(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    for words, message in (([], "RUNS is missing"), (["nowhere"], "no such folder"),
                           ([".", "--out", "file"], "--out"), ([".", "other"], "not a flag"),
                           ([".", "--in", "x"], "--in")):
        with pytest.raises(SystemExit) as stop:
            helpers.command_line(report, words, report.write_report)
        assert message in stop.value.code and "\n" not in stop.value.code


# ---------------------------------------------------------------- the paper's tables and figures


@pytest.mark.parametrize("evaluated, shown", [
    (range(1, 1025), [10, 20, 1024]), (range(1, 41), [10, 20, 40]), (range(10, 1001, 10), [10, 20, 1000]),
    (range(1, 22), [10, 20, 21]), (range(1, 21), [1, 7, 14, 20]), ([1, 2], [1, 2]), ([1], [1]),
    (range(4, 41, 4), [4, 16, 28, 40])])                        # every fourth epoch: there is no epoch 10
def test_the_diversity_figure_shows_the_papers_epochs_if_they_were_evaluated(evaluated, shown):
    run = dict(epoch=7, matrices={7 * epoch: None for epoch in evaluated})
    assert report.diversity_steps(run) == [7 * epoch for epoch in shown]


def test_rows_that_the_paper_does_not_have_are_marked_and_have_no_number(tmp_path):
    runs, path = tmp_path / "runs", tmp_path / "report" / "report.md"
    ours = ["s4l_upright", "s4l_weight2", "s4l_weight1", "crae_mixmatch", "s4l_one_rotation", "crae_aux_all",
            "crae_plus_aux_all", "crae_entmin", "crae_ext2_entmin", "crae_ext2"]
    for k, method in enumerate([*ours, "s4l"]):
        make_run(runs, method, "cifar10", 250, errors=[60.0 + k], diversity=False)
    report.write_report(str(runs), out=str(path.parent))
    for k, method in enumerate(ours):
        names = {name for _, rows in report.TABLES.values() for m, name in rows.items() if m == method}
        name, = names
        assert name.endswith("(not in the paper)") and method in report.METHODS
        row = cells(path, "cifar10", name)
        assert row[1:3] == [f"{60 + k}.00 (1)", ""] and not any(row[3:])
    text = path.read_text()
    assert text.count("| S4L | 70.00 (1) | 32.66 |") == 2       # in the first table, and with the ensembles
    missing = text.split("## Not run, or not finished")[1]
    assert "not in the paper" not in missing and "entropy" not in missing


def test_no_table_of_other_methods_on_svhn_extra_unless_there_are_runs(tmp_path):
    runs, path = tmp_path / "runs", tmp_path / "report" / "report.md"
    for method in "crae", "labeled_only", "s4l":
        make_run(runs, method, "svhn_extra", 250, errors=[8.0], diversity=False)
    report.write_report(str(runs), out=str(path.parent))
    text = path.read_text()
    assert "| Self-supervised methods, svhn_extra | 250 labels | paper |" in text
    assert "Semi-supervised methods, svhn_extra" not in text and "Ensembles, svhn_extra" not in text
    assert not any(f"Semi-supervised methods, {name} |" in text for name in ("svhn", "cifar100"))
    make_run(runs, "vat", "svhn_extra", 500, errors=[7.0], diversity=False)
    report.write_report(str(runs), out=str(path.parent))
    table = path.read_text().split("| Semi-supervised methods, svhn_extra ")[1].split("\n\n")[0].splitlines()
    assert table == ["| 250 labels | 500 labels |", "|---|---|---|", "| Labelled-only | 8.00 (1) |  |",
                     "| VAT |  | 7.00 (1) |", "| CRAE | 8.00 (1) |  |"]
    missing = path.read_text().split("## Not run, or not finished")[1]
    assert not any("VAT" in line for line in missing.splitlines() if line.startswith("- svhn_extra"))


def test_each_section_says_which_evaluations_count(tmp_path):
    runs = tmp_path / "runs"
    imagenet = make_run(runs, dataset="imagenet", labels="1%", rot_dim=4, diversity=False)
    change_config(imagenet, decay_at=[0.7])
    make_run(runs, dataset="my.npz", diversity=False)
    report.write_report(str(runs), out=str(tmp_path / "report"))
    before, *sections = (tmp_path / "report" / "report.md").read_text().split("\n## ")
    assert "evaluation" not in before
    for section in sections:
        title = section.splitlines()[0]
        if title.startswith("imagenet"):
            assert "median" not in section and "percent: a run's last evaluation." in section
        elif title == "my.npz":
            assert "Test errors in percent: the median of a run's last 20 evaluations." in section


def test_runs_of_another_definition_of_crae_are_not_counted(tmp_path, capsys):
    runs = tmp_path / "runs"
    current = dict(select="marginal", definition=presets.DEFINITION)
    change_config(make_run(runs, errors=[10.0], name="new"), **current)
    change_config(make_run(runs, errors=[50.0], seed=1, name="old"), select="marginal")
    change_config(make_run(runs, "detach", errors=[51.0], name="future"), select="detach", definition=99)
    change_config(make_run(runs, "s4l", errors=[20.0], name="baseline"), base="s4l")
    report.write_report(str(runs), out=str(tmp_path / "report"))
    text, errors = (tmp_path / "report" / "report.md").read_text(), capsys.readouterr().err
    assert "| CRAE | 10.00 (1) |" in text and "| S4L | 20.00 (1) |" in text and "51.00" not in text
    for name, definition in ("old", 1), ("future", 99):
        line = f"{runs / name}: used definition {definition} of CRAE, not {presets.DEFINITION}"
        assert line in text.split("## Skipped")[1] and line in errors


@pytest.mark.parametrize("curves, steps", [
    ([], []), ([[5]], [5]), ([[5, 6]], [5, 6]), ([[10, 20, 30], [20, 30, 40]], [20, 30]),
    ([[240, 480, 720, 724]], [240, 480, 724]),                  # evaluated twice at the end
    ([[240, 480, 720, 840]], [240, 480, 720, 840])])            # half a distance is no repetition
def test_the_steps_that_curves_show(curves, steps):
    assert results.common_steps([dict.fromkeys(curve) for curve in curves]) == steps


def test_a_method_that_an_earlier_table_shows_is_no_reason_for_another_table(tmp_path):
    for method in "crae", "crae_plus", "crae_ext1":
        make_run(tmp_path / "runs", method)
        report.write_report(str(tmp_path / "runs"), out=str(tmp_path / "out"))
        text = (tmp_path / "out" / "report.md").read_text()
        assert "| Self-supervised methods, digits |" in text
        assert ("| Semi-supervised methods, digits |" in text) == (method != "crae")
        assert ("| Components, digits |" in text) == (method == "crae_ext1")
        assert "| Ensembles, digits |" not in text
