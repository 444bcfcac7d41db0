# make demo    labelled-only and CRAE+ on the embedded digits; a second call prints the results again
# make test    lint the code and run all tests
# make quick   the same without the tests that are marked slow
# make figures rebuild the tables and figures of docs/reproduction.md, the figures of docs/results.md, and
#              report/, from results/
# Each of them first creates the virtual environment .venv and installs what it needs, once.
PYTHON ?= python3

.PHONY: demo test quick figures

# With the passive policy, a thread that waits for another one sleeps instead of spinning. This is somewhat
# slower on an idle machine, and many times faster where other programs keep the cores busy.
demo: .venv/ready
	OMP_WAIT_POLICY=passive .venv/bin/python demo.py

# Two processes with one thread each: most tests wait for imports of torch, not for tensors.
test: .venv/ready-dev
	.venv/bin/python -m ruff check .
	OMP_NUM_THREADS=1 .venv/bin/python -m pytest -n 2

quick: .venv/ready-dev
	.venv/bin/python -m ruff check .
	OMP_NUM_THREADS=1 .venv/bin/python -m pytest -n 2 -m "not slow"

FAST = cifar10_pflop-0.1-recipe-fast
figures: .venv/ready
	.venv/bin/python report.py results/ --update docs/reproduction.md
	cp report/cifar10_1000-labels_recipe-fast_compute.png docs/compute.png
	cp report/$(FAST)_claims.png docs/claims.png
	cp report/$(FAST)_1000_curves.png docs/reproduction_curves.png
	cp report/$(FAST)_250_mechanism.png docs/reproduction_mechanism_cifar10.png
	cp report/digits_50_mechanism.png docs/reproduction_mechanism.png
	cp report/digits_50_curves.png docs/curves.png
	cp report/digits_50_diversity.png docs/diversity.png
	cp report/digits_50_diversity_crae_plus.png docs/diversity_crae_plus.png

.venv/ready: requirements.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and \
		"Python 3.10 or newer is needed: make PYTHON=python3.12 ...")'
	@echo "installing torch and the rest of requirements.txt into .venv (a few minutes)"
	$(PYTHON) -m venv .venv
	.venv/bin/python -m pip install --quiet --disable-pip-version-check -r requirements.txt
	@touch $@

.venv/ready-dev: .venv/ready requirements-dev.txt
	.venv/bin/python -m pip install --quiet --disable-pip-version-check -r requirements-dev.txt
	@touch $@
