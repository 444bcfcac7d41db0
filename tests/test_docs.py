"""The numbers of the README and the docs are those that report.py prints from the logs in results/."""
import re

import pytest

import pages
import presets
import report
import results
from helpers import HERE

END = "## What to run on a GPU"         # the tables below this heading are calculated, not measured


@pytest.fixture(scope="module")
def report_folder(tmp_path_factory):
    out = tmp_path_factory.mktemp("report")
    report.write_report(str(HERE / "results"), out=str(out))
    return out


@pytest.fixture(scope="module")
def printed(report_folder):
    return (report_folder / "report.md").read_text()


def test_make_figures_copies_what_the_report_draws_to_where_the_pages_look(report_folder):
    text = (HERE / "Makefile").read_text()
    name, value = re.search(r"^(FAST) = (\S+)$", text, re.MULTILINE).groups()
    copied = re.findall(r"cp report/(\S+) (docs/\S+)", text.replace(f"$({name})", value))
    texts = "".join((HERE / page).read_text() for page in ("docs/results.md", "docs/reproduction.md"))
    assert len(copied) >= 7
    assert [drawn for drawn, _ in copied if not (report_folder / drawn).is_file()] == []
    assert [path for _, path in copied if f"({path.removeprefix('docs/')})" not in texts] == []


def test_every_table_of_the_reproduction_page_is_the_one_of_the_report(printed, tmp_path):
    text, found, _ = (HERE / "docs" / "reproduction.md").read_text().partition(END)
    assert found
    page = tmp_path / "page.md"
    page.write_text(text)
    pages.update_tables(page, printed.splitlines())
    assert page.read_text() == text, "make figures replaces the tables of docs/reproduction.md"
    tables = re.findall(r"<!-- tables of: .* -->\n((?:.*\n)*?)<!-- end of tables -->", text)
    assert len(tables) >= 5
    lines = [line for line in text.splitlines() if line.startswith("|")]
    assert [line for line in lines if line not in "".join(tables)] == []


@pytest.mark.parametrize("page", ["README.md", "docs/results.md", "docs/reproduction.md"])
def test_every_mean_with_a_deviation_is_in_the_report(printed, page):
    text = (HERE / page).read_text().partition("## Digits with the paper's recipe")[0]  # has no logs
    means = re.findall(r"\d+\.\d\d ± \d+\.\d\d", text)
    assert means
    assert [mean for mean in means if mean not in printed] == []


@pytest.mark.parametrize("page", ["README.md", "docs/results.md", "docs/reproduction.md"])
def test_every_interval_in_a_sentence_is_in_the_report(printed, page):
    """A sentence may turn a difference round: "better by 1.47 to 5.74" is -5.74 to -1.47."""
    signed, number = r"([+-]\d+\.\d\d)", r"([+-]?\d+\.\d\d)"      # those of single runs have no sign
    intervals = {tuple(map(float, pair)) for pair in re.findall(rf"{signed} to {signed}", printed)}
    intervals |= {(-high, -low) for low, high in intervals}
    lines = (HERE / page).read_text().replace("−", "-").splitlines()
    sentences = "\n".join(line for line in lines if not line.startswith("|"))
    found = re.findall(rf"{number}\s+to\s+{number}", sentences)
    assert found or page == "README.md"                         # its sentences round
    assert [pair for pair in found if tuple(map(float, pair)) not in intervals] == []


def test_every_list_of_errors_is_that_of_the_seeds_in_the_logs():
    runs, _ = results.read_runs(HERE / "results", presets.DEFINITION)
    groups = {}
    for r in sorted((r for r in runs if r["finished"]), key=lambda r: r["seed"]):
        key = r["dataset"], r["labels"], r["method"], r["rot_dim"], report.setting_of(r)
        groups.setdefault(key, []).append(f"{r['error']:.2f}")
    lists = [", ".join(errors[:n]) for errors in groups.values() for n in range(3, len(errors) + 1)]
    text = (HERE / "docs" / "results.md").read_text().partition("## Digits with the paper's recipe")[0]
    found = re.findall(r"\d+\.\d\d(?:, \d+\.\d\d){2,}", text)
    assert len(found) > 10
    assert [errors for errors in found if errors not in lists] == []


def test_the_training_time_of_all_runs(printed):
    text = " ".join((HERE / "docs" / "reproduction.md").read_text().split())
    runs, time = re.search(r"the (\d+) runs in `results/` took (\d+ h \d\d min)", text).groups()
    assert f"Training time of all {runs} runs: {time}, without evaluations." in printed
