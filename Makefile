# make grpo       install into .venv and train the built-in toy task (a laptop is enough)
# make test       install and run the tests
# make install    .venv alone: GPU requirements where nvidia-smi finds a GPU, CPU requirements otherwise

PYTHON ?= python3
REQUIREMENTS ?= $(shell nvidia-smi -L 2>/dev/null | grep -q GPU && echo requirements.txt || echo requirements-cpu.txt)
PIP = .venv/bin/python -m pip install --quiet --disable-pip-version-check
# The CPU build of torch on Linux comes from PyTorch's own index; only the torch line looks there.
TORCH_INDEX ?= --extra-index-url https://download.pytorch.org/whl/cpu

.PHONY: grpo test install clean

grpo: install
	.venv/bin/python grpo.py

test: install
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/python -m pytest

# The stamp's name holds a hash of the pins: nothing to do while they stay the same.
STAMP = .venv/installed-$(shell cat $(REQUIREMENTS) requirements-test.txt | cksum | cut -d' ' -f1)

install: $(STAMP)

$(STAMP):
	@$(PYTHON) -c 'import sys; sys.exit("Python 3.11 or newer is needed: make PYTHON=python3.11 ...") if sys.version_info < (3, 11) else 0'
	@test -x .venv/bin/python || $(PYTHON) -m venv .venv
	@echo "installing $(REQUIREMENTS) into .venv (a few minutes, once)"
	@if [ $(REQUIREMENTS) = requirements-cpu.txt ]; then \
	  $(PIP) --no-deps $(TORCH_INDEX) "$$(grep ^torch== requirements-cpu.txt)"; fi
	@$(PIP) -r $(REQUIREMENTS) -r requirements-test.txt
	@rm -f .venv/installed-* && touch $@

clean:
	rm -rf .venv
