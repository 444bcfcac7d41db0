"""Fixtures that several test files share."""
from functools import partial

import pytest

import devices
import plots
import presets
import train_crae
from helpers import QUICK


@pytest.fixture(autouse=True)
def freed_memory_is_returned(monkeypatch):
    """A test process trains hundreds of runs; if it kept all freed memory, the largest would add up."""
    monkeypatch.setattr(devices, "keep_freed_memory", lambda: None)


@pytest.fixture
def hooked(monkeypatch):
    """A list of hooks, and a `train` that calls each of them before every step with (step, model).

    The run has ten steps, is evaluated after every fourth and saves a checkpoint after every step.
    """
    hooks = []
    real = train_crae.crae

    def objective(model, *rest, **kwargs):
        for hook in hooks:
            hook(kwargs["step"], model)
        return real(model, *rest, **kwargs)

    monkeypatch.setattr(train_crae, "crae", objective)
    monkeypatch.setitem(presets.digits, "epoch", 4)
    return hooks, partial(train_crae.train, steps=10, save_minutes=1e-9, **QUICK)


@pytest.fixture
def figures(monkeypatch):
    """Every figure by the name of its file, to check what is plotted in it."""
    kept, real = {}, plots.save_figure

    def save_figure(figure, path, **options):
        kept[path.name] = figure
        real(figure, path, **options)

    monkeypatch.setattr(plots, "save_figure", save_figure)
    return kept
