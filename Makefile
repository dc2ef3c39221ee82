# make demo   set up, export the built-in model, show its tree
# make test   set up, lint, check types and imports, run the tests
# make test-processors   run the tests as other processors compute; needs qemu-x86_64
# make docs   build the documentation as a site that works offline, site/index.html, and check its links
# TORCH_INDEX=https://download.pytorch.org/whl/cpu before any of these sets up with PyTorch's build for CPUs, without CUDA
# make figures   measure again, and rewrite the tables of figures in the docs; ONLY=extract for one script
PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check
export HF_HUB_OFFLINE ?= 1
# Packages that tests import from folders of their own (tests/side_packages.py).
SIDE := explorer peft pillow

.PHONY: demo test check quick-tests test-slow test-processors test-devices bench figures docs clean

demo: .venv/installed
	@$(BIN)/modelexport export bert-tiny -o demo/bert-tiny.onnx --verify
	@$(BIN)/modelexport tree demo/bert-tiny.onnx
	@echo "next:"
	@echo "  . $(BIN)/activate"
	@echo "  modelexport report demo/bert-tiny.onnx -o demo/bert-tiny.html"

# The checks run beside the tests: mypy uses one processor, and would leave the other one idle.
test: .venv/installed-for-tests
	@$(MAKE) --no-print-directory -j 2 check quick-tests

# Tests start many commands: with bytecode they start faster.
quick-tests: .venv/installed-for-tests
	PYTHONDONTWRITEBYTECODE= $(BIN)/pytest -n 2 --dist worksteal

check: .venv/installed-for-tests
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports

test-slow: .venv/installed-for-tests
	PYTHONDONTWRITEBYTECODE= $(BIN)/pytest -n 2 --dist worksteal -m slow -o faulthandler_timeout=1800

# Other processors: PyTorch's plainest kernels, and files with 8-bit integers on an emulated one without VNNI.
test-processors: .venv/installed-for-tests
	@command -v qemu-x86_64 >/dev/null || { echo "qemu-x86_64 is missing; install it (Debian: apt install qemu-user)"; exit 2; }
	ATEN_CPU_CAPABILITY=default PYTHONDONTWRITEBYTECODE= $(BIN)/pytest -n 2 --dist worksteal
	qemu-x86_64 -cpu Haswell $(BIN)/python -m pytest -n 0 -m int8 tests/tools/quantize

# Devices that need packages of their own; `python benchmarks/devices.py` measures ten models there.
test-devices: .venv/installed-for-tests
	$(PIP) --no-deps --target .venv/qnn --upgrade -r tests/side/qnn.txt
	PYTHONPATH=.venv/qnn $(BIN)/pytest -n 0 tests/tools/devices

bench: .venv/installed-for-tests
	for script in $(filter-out benchmarks/tables.py,$(shell grep -l "^if __name__" benchmarks/*.py)); do $(BIN)/python $$script || exit 1; done

figures: .venv/installed-for-tests
	$(BIN)/python benchmarks/tables.py $(ONLY)

docs: .venv/installed-for-docs
	$(BIN)/mkdocs build --strict

clean:
	rm -rf .venv demo site

# torch first, and alone: where TORCH_INDEX is given, it comes from there and everything else from PyPI. Without it, Linux gets
# PyPI's build for CUDA, several GB, unless a torch of this version is at hand.
.venv/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(PIP) torch -c constraints.txt $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX))
	$(PIP) -e '.[transformers]' -c constraints.txt
	@touch $@

.venv/installed-for-tests: .venv/installed tests/requirements-nodeps.txt $(SIDE:%=tests/side/%.txt)
	$(PIP) -e '.[transformers,check]' -c constraints.txt
	$(PIP) --no-deps -r tests/requirements-nodeps.txt
	for name in $(SIDE); do $(PIP) --no-deps --target .venv/$$name --upgrade -r tests/side/$$name.txt || exit 1; done
	@touch $@

.venv/installed-for-docs: .venv/installed
	$(PIP) -e '.[transformers,docs]' -c constraints.txt
	@touch $@
