"""The numbers of the README and the docs are those that report.py prints from the logs in results/."""
import re

import pytest

import report
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
    pages = "".join((HERE / page).read_text() for page in ("docs/results.md", "docs/reproduction.md"))
    assert len(copied) >= 7
    assert [drawn for drawn, _ in copied if not (report_folder / drawn).is_file()] == []
    assert [path for _, path in copied if f"({path.removeprefix('docs/')})" not in pages] == []


def test_every_table_of_the_reproduction_page_is_in_the_report(printed):
    text, found, _ = (HERE / "docs" / "reproduction.md").read_text().partition(END)
    assert found
    tables = [line for line in text.splitlines() if line.startswith("|") and not line.startswith("|---")]
    lines = set(printed.splitlines())
    assert len(tables) > 10
    assert [line for line in tables if line not in lines] == []


@pytest.mark.parametrize("page", ["README.md", "docs/results.md", "docs/reproduction.md"])
def test_every_mean_with_a_deviation_is_in_the_report(printed, page):
    text = (HERE / page).read_text().partition("## Digits with the paper's recipe")[0]  # has no logs
    means = re.findall(r"\d+\.\d\d ± \d+\.\d\d", text)
    assert means
    assert [mean for mean in means if mean not in printed] == []
