"""Verdicts on the paper's claims: paired differences and intervals by hand, the rule, and the figures."""
import math

import numpy as np
import pytest

import claims
import helpers
import report
import results

FAST = dict(recipe="fast", pflop=0.1)


def runs_of(tmp_path, errors, **more):
    """Read runs back as report.py does. errors: {method: final errors, one per seed}."""
    for method, of_method in errors.items():
        name, _, dim = method.partition("/")
        for seed, error in enumerate(of_method):
            helpers.make_run(tmp_path, name, "cifar10", 250, seed, errors=[error], heads=3,
                             rot_dim=int(dim) if dim else None, **more)
    return results.read_runs(tmp_path, 1)[0]


def test_only_seeds_that_all_methods_have_are_paired(tmp_path):
    runs = runs_of(tmp_path, dict(crae=[30.0, 33.0, 31.0], s4l=[32.0, 34.0]))
    assert claims.paired_differences(runs, dict(crae=1, s4l=-1)) == {0: -2.0, 1: -1.0}


def test_unfinished_runs_do_not_count(tmp_path):
    runs = runs_of(tmp_path, dict(crae=[30.0], s4l=[32.0]), finished=False)
    assert claims.paired_differences(runs, dict(crae=1, s4l=-1)) == {}


def test_a_difference_of_differences(tmp_path):
    runs = runs_of(tmp_path, dict(crae=[30.0], crae_no_aux=[33.0], crae_plus=[28.0], crae_plus_no_aux=[29.0]))
    factors = dict(crae=1, crae_no_aux=-1, crae_plus=-1, crae_plus_no_aux=1)
    assert claims.paired_differences(runs, factors) == {0: -2.0}        # 3 points for CRAE, 1 for CRAE+


def test_a_reduced_dimension_is_another_experiment_than_crae(tmp_path):
    runs = runs_of(tmp_path, {"crae": [30.0, 31.0], "crae/16": [30.5, 31.0], "crae/8": [40.0, 40.0]})
    assert claims.paired_differences(runs, {"crae/16": 1, "crae": -1}) == {0: 0.5, 1: 0.0}


def test_the_diagonal_is_compared_with_heads_that_are_alike(tmp_path):
    runs = runs_of(tmp_path, dict(crae=[30.0]))                 # make_run: a diagonal of 0.8 with three heads
    found = claims.paired_differences(runs, {"crae": 1, claims.CHANCE: -1}, "off_diagonal")
    assert found[0] == pytest.approx(20 - 100 * 2 / 3)


def test_the_interval_is_students():
    mean, low, high = claims.paired_interval([1.0, 2.0, 3.0, 4.0, 5.0])
    half = 2.7764451 * math.sqrt(2.5) / math.sqrt(5)            # t(0.975, 4 degrees of freedom) from a table
    assert (mean, low, high) == pytest.approx((3.0, 3.0 - half, 3.0 + half))


@pytest.mark.parametrize("low, high, seeds, margin, verdict", [
    (-2, -1, 5, 0, "holds"), (1, 2, 5, 0, "does not hold"), (-1, 1, 5, 0, "cannot be told"),
    (-2, -1, 2, 0, "cannot be told"), (1, 2, 2, 0, "cannot be told"),
    (math.nan, math.nan, 1, 0, "cannot be told"), (-2, -2, 5, 0, "cannot be told"),
    (-0.5, 0.9, 5, 1, "holds"), (0.2, 0.9, 5, 1, "holds"), (-0.5, 1.1, 5, 1, "cannot be told"),
    (0.5, 1.1, 5, 1, "cannot be told"), (1.1, 2, 5, 1, "does not hold"), (-9, -8, 5, 1, "holds")])
def test_the_rule(low, high, seeds, margin, verdict):
    assert claims.judge(low, high, seeds, margin) == verdict


@pytest.mark.parametrize("parts, verdict", [
    ([("holds", 3), ("holds", 5)], "holds"), ([("holds", 3), ("cannot be told", 3)], "cannot be told"),
    ([("holds", 3), ("does not hold", 3)], "does not hold"), ([], "cannot be told"),
    ([("cannot be told", 1), ("holds", 5)], "holds"), ([("cannot be told", 2)], "cannot be told")])
def test_a_claim_must_hold_for_every_number_of_labels_with_enough_seeds(parts, verdict):
    assert claims.judge_all([dict(verdict_here=part, seeds=seeds) for part, seeds in parts]) == verdict


def test_every_method_of_a_claim_has_a_name():
    for _, factors, _ in claims.CLAIMS:
        assert {method.partition("/")[0] for method in factors} <= {*report.METHODS, claims.CHANCE}


def test_the_papers_numbers_support_the_papers_claims():
    known = [claims.paper_difference("cifar10", 250, factors) for _, factors, options in claims.CLAIMS
             if not {"measure", "ours"} & options.keys()]
    assert all(difference is None or difference < 0 for difference in known)
    # All but entropy minimisation, --rot_dim 16 and three comparisons with S4L upright.
    assert sum(difference is not None for difference in known) == 13


def test_the_papers_differences():
    assert claims.paper_difference("cifar10", 250, dict(crae=1, s4l=-1)) == pytest.approx(17.07 - 32.66)
    assert claims.paper_difference("cifar10", 250, dict(crae=1, s4l_upright=-1)) is None
    assert claims.paper_difference("cifar10", 250, {"crae/16": 1, "crae": -1}) is None
    on_imagenet = claims.paper_difference("imagenet", "10%", dict(crae=1, s4l=-1))
    assert on_imagenet == pytest.approx(63.84 - 65.34)


def test_rows_of_claims_with_two_numbers_of_labels(tmp_path):
    for seed in range(3):
        for labels, errors in (250, dict(crae=30.0, crae_plus=30.5, mixmatch=30.0)), (1000, dict(crae=20.0)):
            for method, error in errors.items():
                error += seed / 10 if method == "crae_plus" else 0
                helpers.make_run(tmp_path, method, "cifar10", labels, seed, errors=[90.0, error], heads=3,
                                 diversity=method == "crae", changed=FAST)
    helpers.make_run(tmp_path, "mixmatch", "cifar10", 1000, 0, errors=[50.0], changed=FAST)
    helpers.make_run(tmp_path, "crae_plus", "cifar10", 1000, 0, errors=[40.0], changed=FAST, diversity=False)
    for run in tmp_path.iterdir():
        helpers.change_config(run, recipe="fast")               # the last error counts, not a median
    found = claims.claim_rows(results.read_runs(tmp_path, 1)[0])
    rows = {(row["claim"], row["labels"]): row for row in found}
    par = rows["CRAE+ is on a par with MixMatch", 250]
    half = 4.3026527 * 0.1 / math.sqrt(3)                       # differences of 0.5, 0.6 and 0.7
    assert (par["mean"], par["low"], par["high"]) == pytest.approx((0.6, 0.6 - half, 0.6 + half))
    assert (par["verdict_here"], par["verdict"], par["seeds"]) == ("holds", "holds", 3)
    alone = rows["CRAE+ is on a par with MixMatch", 1000]       # one seed does not change the verdict
    assert (alone["mean"], alone["seeds"], alone["verdict"]) == (-10.0, 1, "holds")
    worse = rows["CRAE+ is better than CRAE", 250]
    assert worse["mean"] == pytest.approx(0.6) and worse["verdict"] == "does not hold"
    diagonal, = [row for (claim, labels), row in rows.items() if "above chance" in claim and labels == 250]
    # make_run halves the diagonal at its second evaluation, from 0.8 to 0.4: the last matrix counts.
    assert diagonal["mean"] == pytest.approx(60 - 100 * 2 / 3) and diagonal["paper"] is None


def test_the_error_of_p_y_on_unlabelled_images(tmp_path):
    runs = runs_of(tmp_path, dict(crae=[30.0, 32.0], detach=[35.0, 35.5]))     # make_run adds 1 to each
    assert claims.values_of(runs, "crae", "p_y") == {0: 31.0, 1: 33.0}
    assert claims.paired_differences(runs, dict(crae=1, detach=-1), "p_y") == {0: -5.0, 1: -3.5}
    for run in runs:
        run["unlabeled"] = []                                   # a run without unlabelled images
    assert claims.paired_differences(runs, dict(crae=1, detach=-1), "p_y") == {}


def test_nothing_is_compared_with_itself_on_imagenet(tmp_path):
    for seed in range(3):
        run = helpers.make_run(tmp_path, "crae", "imagenet", "10%", seed, errors=[30.0 + seed])
        helpers.change_config(run, rot_dim=16)                  # the preset's
    rows = claims.claim_rows(results.read_runs(tmp_path, 1)[0])
    assert not [row for row in rows if row["claim"].startswith("16 dimensions")]


def test_unknown_diagonals_are_left_out(tmp_path):
    run = helpers.make_run(tmp_path, "crae", "cifar10", 250, 0, errors=[30.0])
    text = (run / "diversity.csv").read_text().splitlines()
    unknown = [line.split(",")[:2] + ["", "", ""] for line in text[1:]]
    (run / "diversity.csv").write_text("\n".join([text[0], *map(",".join, unknown)]) + "\n")
    runs = results.read_runs(tmp_path, 1)[0]
    assert claims.values_of(runs, "crae", "off_diagonal") == {}
    assert claims.values_of(runs, "crae", "error") == {0: 30.0}


def write_report(tmp_path):
    report.write_report(str(tmp_path / "runs"), out=str(tmp_path / "out"))
    return (tmp_path / "out" / "report.md").read_text()


def test_the_report_has_verdicts_mechanism_and_compute(tmp_path, figures):
    def make(method, error, seed, **more):
        run = helpers.make_run(tmp_path / "runs", method, "cifar10", 250, seed, errors=[80.0, error], heads=3,
                               **dict(changed=FAST) | more)
        helpers.change_config(run, recipe="fast")

    for seed in range(3):
        make("crae", 30.0 + seed, seed)
        make("crae_plus", 28.0 + 1.1 * seed, seed)
        make("detach", 31.0 + seed, seed)
        make("s4l", 29.0 + 0.9 * seed, seed, diversity=False)
        make("crae", 40.0, seed, changed=FAST | dict(pflop=0.02))
        if seed < 2:
            make("crae", 20.0, seed, changed=FAST | dict(pflop=0.4))
        if seed < 1:
            make("s4l", 41.0, seed, changed=FAST | dict(pflop=0.02), diversity=False)
        make("crae", 99.0, seed, rot_dim=8)                     # neither CRAE nor one of its budgets
    make("crae", 99.0, 7, finished=False)
    text = write_report(tmp_path)
    half = 4.3026527 * 0.1 / math.sqrt(3)                       # differences of -2, -1.9, -1.8; and 1, ...
    interval = f"{-1.9 - half:+.2f} to {-1.9 + half:+.2f}"
    assert f"| CRAE+ is better than CRAE | holds | 250 | -6.31 | -1.90 | {interval} | 3 | holds |" in text
    interval = f"{1.1 - half:+.2f} to {1.1 + half:+.2f}"
    row = f"| does not hold | 250 | -15.59 | +1.10 | {interval} | 3 | does not hold |"
    assert f"| CRAE is better than S4L {row}" in text
    assert "| CRAE | 40.00 ± 0.00 (3) | 31.00 ± 1.00 (3) | 20.00 ± 0.00 (2) |" in text
    panels, = [figure.axes for name, figure in figures.items() if name.endswith("250_mechanism.png")]
    assert [line.get_label() for line in panels[0].lines] == ["CRAE (3)", "CRAE+ (3)", "detached p(y|x) (3)"]
    for axes, points in zip(panels, ([[0.5, 80], [1, 40]], [[0.5, 81], [1, 32]], [[0.5, 50], [1, 50]])):
        assert axes.lines[0].get_xydata() == pytest.approx(np.array(points, float))
    lines = figures["cifar10_250-labels_recipe-fast_compute.png"].axes[0].lines
    dashed, = [line for line in lines if line.get_linestyle() == "--"]
    hour = 0.2 * 312e12 * 3600 / 1e15                           # an A100 at a fifth of its peak, in PFLOP
    power = math.log(20 / 30.5) / math.log(0.4 / 0.1)           # the seeds that both have: 30 and 31
    assert dashed.get_xydata()[-1] == pytest.approx([hour, 20 * (hour / 0.4) ** power])
    single, = [line for line in lines if line.get_markerfacecolor() == "white"]
    assert single.get_xydata().tolist() == [[0.02, 41]]         # the only budget with one seed


def test_a_second_column_shows_equal_steps(tmp_path):
    def make(method, errors, seed, changed):
        run = helpers.make_run(tmp_path / "runs", method, "cifar10", 250, seed, errors=errors, heads=3,
                               changed=changed, diversity=False)
        helpers.change_config(run, recipe="fast")

    short = dict(recipe="fast", steps=20)
    for seed in range(3):
        make("crae", [80.0, 30.0], seed, FAST)                  # 40 steps
        make("crae_plus", [31.0 + 0.1 * seed], seed, FAST)      # 20 steps: also the run with --steps 20
        make("crae", [35.0], seed, short)
        make("s4l", [80.0, 50.0 + seed], seed, FAST)
        make("crae", [99.0], seed, FAST | dict(pflop=0.02, lr=0.1))
        make("crae_plus", [90.0], seed, FAST | dict(pflop=0.02, lr=0.1))        # another setting
    make("crae_plus", [44.0], 3, FAST | dict(pflop=0.05))       # another budget with 20 steps
    make("crae_plus", [31.0], 0, FAST | dict(pflop=0.051))      # ... and the same run once more
    make("crae_plus", [80.0, 99.0], 0, dict(recipe="fast", steps=40))           # the shortest length counts
    make("mixmatch", [90.0, 88.0], 0, FAST)                     # our comparison: the paper has 17.07 - 11.08
    text = write_report(tmp_path)
    half = 4.3026527 * 0.1 / math.sqrt(3)                       # differences of 1, 1.1, 1.2; and -4, ...
    row = ("| CRAE+ is better than CRAE | does not hold | 250 | -6.31 | +1.10 "
           f"| {1.1 - half:+.2f} to {1.1 + half:+.2f} | 3 | does not hold "
           f"| -3.90, {-3.9 - half:+.2f} to {-3.9 + half:+.2f} (3) |")
    assert row in text and "| verdict of this row | all with 20 steps (seeds) |" in text
    assert "MixMatch (not claimed in the paper) | cannot be told | 250 | – | -58.00 |" in text
    rows = [line for line in text.splitlines() if line.startswith("| CRAE is better than S4L |")]
    assert rows[0].endswith("| holds |  |")                     # no S4L with 20 steps
    # The table of runs with 20 steps has both methods, the list of all runs has each run once.
    section = text.partition("## cifar10, with recipe fast, steps 20")[2].partition("\n## ")[0]
    assert "| CRAE | 35.00 ± 0.00 (3) |" in section and "| CRAE+ | 34.33 ± 6.45 (4) |" in section
    assert text.count("cifar10_250_crae_plus_0_fast_0.1_None") == 1


@pytest.mark.parametrize("errors, budgets, seeds", [
    ((9.0, 0.0, 0.0), (0.02, 0.1, 0.4), (0, 0, 0)), ((9.0, 5.0, 0.0), (0.02, 0.1, 0.4), (0, 0, 0)),
    ((9.0, 5.0, 10.0), (0.02, 0.1, 0.4), (0, 0, 0)), ((30.0, 20.0, 10.0), (10, 100, 1000), (0, 0, 0)),
    ((20.0, 10.0), (0.1, 0.4), (0, 0)),                         # two budgets only
    ((30.0, 20.0, 10.0), (0.02, 0.1, 0.4), (0, 0, 1))])         # no seed in common
def test_no_prediction_without_a_power_law(tmp_path, figures, errors, budgets, seeds):
    for error, budget, seed in zip(errors, budgets, seeds):
        for method in "crae", "a method of my own":
            helpers.make_run(tmp_path / "runs", method, seed=seed, errors=[error], changed=dict(pflop=budget))
    text = write_report(tmp_path)
    figure = figures["digits_50-labels_compute.png"]
    assert [t.get_text() for t in figure.axes[0].get_legend().get_texts()] == ["CRAE", "a method of my own"]
    assert not [line for line in figure.axes[0].lines if line.get_linestyle() == "--"]
    cells = " | ".join(f"{error:.2f} (1)" for error in errors)
    assert f"| a method of my own | {cells} |" in text


def test_other_settings_have_figures_of_their_own(tmp_path, figures):
    for arch in "a", "b":
        for budget, error in (0.1, 20.0), (0.4, 10.0):
            helpers.make_run(tmp_path / "runs", errors=[error], changed=dict(pflop=budget, arch=arch))
    text = write_report(tmp_path)
    assert {f"digits_50-labels_arch-{arch}_compute.png" for arch in "ab"} <= figures.keys()
    assert "## Error against compute, digits, 50 labels, arch a" in text


def test_the_length_of_the_runs_is_a_median_over_the_seeds(tmp_path, figures):
    for seed, evaluations in enumerate((2, 4, 20)):             # 30 seconds and 20 steps each
        helpers.make_run(tmp_path / "runs", "fine_tune", seed=seed, errors=[20.0] * evaluations,
                         changed=dict(pflop=0.1), diversity=False)
    for budget, errors in (0.1, [20.0] * 2), (0.4, [10.0] * 100):
        helpers.make_run(tmp_path / "runs", errors=errors, changed=dict(pflop=budget))
    section = write_report(tmp_path).partition("### Length of the runs, digits, 50 labels\n")[2]
    assert "| CRAE | 40 steps, 1.0 min | 2,000 steps, 50.0 min |" in section
    assert "| Fine-tune (second of two stages) | 40 steps, 2.0 min |  |" in section


def test_the_figure_of_the_claims_has_the_differences_between_errors_with_enough_seeds(tmp_path, figures):
    def make(method, labels, seed, error):
        helpers.make_run(tmp_path / "runs", method, "cifar10", labels, seed, errors=[error], heads=3)

    for seed in range(3):
        make("crae", 250, seed, 30.0 + seed)
        make("s4l_upright", 250, seed, 40.0 - seed)             # differences of -10, -8 and -6
        make("s4l", 250, seed, 31.0 + seed)                     # all equal: no interval, no verdict
    for method, error in ("crae", 20.0), ("s4l", 22.0):
        make(method, 1000, 0, error)                            # a single seed is not shown
    text = write_report(tmp_path)
    axes, = figures["cifar10_claims.png"].axes
    assert "](cifar10_claims.png)" in text and "| The rotation heads of CRAE specialise" in text
    ticks = [" ".join(tick.get_text().split()) for tick in axes.get_yticklabels()]
    assert ticks == ["CRAE is better than S4L 250 labels", "CRAE is better than S4L upright* 250 labels"]
    means = [line.get_xydata().tolist() for line in axes.lines if line.get_marker() == "o"]
    assert [mean for mean in means if mean] == [[[-1.0, 0.0]], [[-8.0, 1.0]]]   # the legend's are empty


def test_the_mechanism_of_many_evaluations(tmp_path, figures):
    for method in "crae", "detach":
        helpers.make_run(tmp_path / "runs", method, errors=[20.0] * 150, heads=3)
    write_report(tmp_path)
    assert len(figures["digits_50_mechanism.png"].axes[0].lines[0].get_xydata()) == 150
