"""Verdicts on the paper's claims: paired differences and intervals by hand, the rule, and the figures."""
import math

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
    (math.nan, math.nan, 1, 0, "cannot be told"),
    (-0.5, 0.9, 5, 1, "holds"), (-0.5, 1.1, 5, 1, "cannot be told"), (0.5, 1.1, 5, 1, "does not hold"),
    (-9, -8, 5, 1, "holds")])
def test_the_rule(low, high, seeds, margin, verdict):
    assert claims.judge(low, high, seeds, margin) == verdict


@pytest.mark.parametrize("parts, verdict", [
    (["holds", "holds"], "holds"), (["holds", "cannot be told"], "cannot be told"),
    (["holds", "does not hold"], "does not hold"), ([], "cannot be told")])
def test_a_claim_must_hold_for_every_number_of_labels(parts, verdict):
    assert claims.judge_all(parts) == verdict


def test_every_method_of_a_claim_has_a_name():
    for _, factors, _ in claims.CLAIMS:
        assert {method.partition("/")[0] for method in factors} <= {*report.METHODS, claims.CHANCE}


def test_the_papers_differences():
    assert claims.paper_difference("cifar10", 250, dict(crae=1, s4l=-1)) == pytest.approx(17.07 - 32.66)
    same = claims.paper_difference("cifar10", 250, dict(crae=1, s4l_upright=-1))
    assert same == pytest.approx(17.07 - 32.66)                 # the paper has one S4L
    assert claims.paper_difference("cifar10", 250, {"crae/16": 1, "crae": -1}) is None


def test_the_report_has_verdicts_mechanism_and_compute(tmp_path, figures):
    for seed in range(3):
        for method, error in dict(crae=30.0, crae_plus=28.0 + seed / 10, detach=31.0, s4l=29.0).items():
            helpers.make_run(tmp_path / "runs", method, "cifar10", 250, seed, errors=[error + seed], heads=3,
                             changed=FAST, diversity=method != "s4l")
        for budget, error in (0.02, 40.0), (0.4, 20.0):
            helpers.make_run(tmp_path / "runs", "crae", "cifar10", 250, seed, errors=[error], heads=3,
                             changed=FAST | dict(pflop=budget))
    report.write_report(str(tmp_path / "runs"), out=str(tmp_path / "out"))
    text = (tmp_path / "out" / "report.md").read_text()
    # The differences 30 - 28 - seed / 10 have the mean 1.9 and the deviation 0.1.
    half = 4.3026527 * 0.1 / math.sqrt(3)
    interval = f"{-1.9 - half:+.2f} to {-1.9 + half:+.2f}"
    assert f"| CRAE+ is better than CRAE | 250 | -6.31 | -1.90 | {interval} | 3 | **holds** |" in text
    same = "+1.00 | +1.00 to +1.00"
    assert f"| CRAE is better than S4L | 250 | -15.59 | {same} | 3 | **does not hold** |" in text
    assert "| CRAE | 40.00 ± 0.00 (3) | 31.00 ± 1.00 (3) | 20.00 ± 0.00 (3) |" in text
    mechanism = figures["cifar10_setting2_250_mechanism.png"]
    assert [line.get_label() for line in mechanism.axes[0].lines] == ["CRAE (3)", "CRAE+ (3)",
                                                                      "detached p(y|x) (3)"]
    assert mechanism.axes[0].lines[0].get_xydata().tolist() == [[1.0, pytest.approx(80.0)]]
    assert mechanism.axes[2].lines[0].get_xydata().tolist() == [[1.0, 50.0]]
    lines = figures["cifar10_250_recipe-fast_compute.png"].axes[0].lines
    end = lines[-2].get_xydata()[-1]                            # the dashed line; the last one is vertical
    power = math.log(20 / 31) / math.log(0.4 / 0.1)
    hour = 0.2 * 312e12 * 3600 / 1e15                           # an A100 at a fifth of its peak, in PFLOP
    assert end.tolist() == pytest.approx([hour, 20 * (hour / 0.4) ** power])
