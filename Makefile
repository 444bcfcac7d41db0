# make demo    labelled-only and CRAE+ on the embedded digits; a second call prints the results again
# make test    lint the code and run all tests
# make quick   the same without the tests that are marked slow
# Each of them first creates the virtual environment .venv and installs what it needs, once.
PYTHON ?= python3

.PHONY: demo test quick

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
