# make demo   trains CRAE+ on the embedded digits; typed again it reprints the result
# make test   runs the tests
# Both first make the virtual environment .venv and install requirements.txt, once.
PYTHON ?= python3

.PHONY: demo test

# passive: a thread that waits for another sleeps instead of spinning; somewhat slower on an idle machine, many times
# faster where other programs keep the cores busy.
demo: .venv/ready
	OMP_WAIT_POLICY=passive .venv/bin/python train_crae.py --plus --resume

# Two processes of one thread each: most tests wait for imports of torch, not for tensors.
test: .venv/ready
	OMP_NUM_THREADS=1 .venv/bin/python -m pytest -n 2 tests

.venv/ready: requirements.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "Python 3.10 or newer is needed; make PYTHON=python3.12 ...")'
	@echo "installing torch and the rest of requirements.txt into .venv (a few minutes)"
	$(PYTHON) -m venv .venv
	.venv/bin/python -m pip install --quiet --disable-pip-version-check -r requirements.txt
	@touch $@
