"""The plugin in vLLM itself, on a CPU: what it answers is what `Injection` answers.

Each test starts engines in processes of their own; all are skipped without vLLM.
"""

import json
import os
import random
import re
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from i2cl.core.context import ContextVector, ExtractConfig
from i2cl.core.injection import Injection
from i2cl.export import ask_server, export_hf, make_golden
from i2cl.export.verify import judged
from i2cl.faces.vllm.support import WRITERS
from i2cl.models.decoder import Decoder
from i2cl.models.loading import located
from i2cl.models.scoring import labelled_batch
from i2cl.tasks import load_task

pytestmark = pytest.mark.skipif(find_spec("vllm") is None, reason="takes vLLM: docs/guide/vllm.md")

CHILD = Path(__file__).with_name("child.py")
EAGER = {
    "dtype": "float32",
    "enforce_eager": True,
    "max_model_len": 256,
    "max_num_seqs": 16,
    "max_num_batched_tokens": 64,
    "block_size": 32,
    "num_gpu_blocks_override": 40,
}
ENVIRONMENT = os.environ | {
    "VLLM_PLUGINS": "i2cl",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "OMP_NUM_THREADS": "1",
}
RUNNERS = pytest.mark.parametrize("runner", ["V1", "V2"])
WORDS = ("the", "letter", "arrived", "on", "a", "quiet", "morning", "nobody", "had", "expected", "rise")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A random Llama whose heads are as wide as vLLM's kernels for CPUs want them, in a folder."""
    folder = tmp_path_factory.mktemp("models") / "llama"
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=694,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=1024,
        bos_token_id=0,
        eos_token_id=0,
        initializer_range=0.15,
        tie_word_embeddings=True,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    AutoTokenizer.from_pretrained(located("reference")).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def decoder(model):
    return Decoder.from_pretrained(str(model), dtype="float32", device="cpu")


def random_injection(decoder, draw, name):
    values = torch.randn(decoder.layers, 2, decoder.d_model, generator=draw)
    pairs = torch.randn(decoder.layers, 2, 2, generator=draw) * 0.3 + torch.tensor([0.0, 1.0])
    return Injection(
        ContextVector(values, ExtractConfig(), 4, decoder.base), pairs, load_task(name), decoder.base
    )


@pytest.fixture(scope="module")
def artefacts(decoder, tmp_path_factory):
    """Fifty tasks that change what the model says by nats, saved."""
    draw, folder = torch.Generator().manual_seed(0), tmp_path_factory.mktemp("tasks")
    names = ("mood-colour-1", "place-colour-2", "job-letter-2")
    found = {}
    for number in range(50):
        injection = random_injection(decoder, draw, names[number % 3])
        injection.save_pretrained(folder / f"t{number}")
        found[f"t{number}"] = injection
    return folder, found


@pytest.fixture(scope="module")
def engines():
    """For each model runner, a process that forks one for every engine, and has imported what they need."""
    started = {}

    def engine(runner):
        if runner not in started:
            started[runner] = subprocess.Popen(
                [sys.executable, str(CHILD), runner],
                env=ENVIRONMENT,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
        return started[runner]

    yield engine
    for process in started.values():
        process.stdin.close()
        process.wait()
        process.stdout.close()


@pytest.fixture
def run(engines, tmp_path, model):
    """What an engine answers; where its start is to fail, what it prints."""

    def run(steps, tasks=None, *, where=model, options=None, env=None, succeeds=True, runner="V1", **more):
        result, log = tmp_path / "result.json", tmp_path / "log"
        result.unlink(missing_ok=True)
        job = {"model": str(where), "options": EAGER | (options or {}), "tasks": tasks or {}, "steps": steps}
        job |= {"result": str(result), "log": str(log), "env": env or {}}
        engine = engines(runner)
        engine.stdin.write(json.dumps(job | more) + "\n")
        engine.stdin.flush()
        while not (status := engine.stdout.readline().strip()).lstrip("-").isdigit():
            assert engine.poll() is None
        told = log.read_text(encoding="utf-8")
        assert (status == "0") == succeeds, told[-6000:]
        if not succeeds:
            return told
        found = json.loads(result.read_text(encoding="utf-8"))
        assert found["v2"] in {None, runner == "V2"}
        return found

    return run


def texts(count, seed=0, most=60):
    draw = random.Random(seed)
    return [" ".join(draw.choices(WORDS, k=draw.randint(2, most))) for _ in range(count)]


def apart(found, decoder, injections, asked, tasks):
    """Largest difference of what was found to `Injection.scores`, in nats."""
    worst = 0.0
    for name in set(tasks):
        rows = [row for row, task in enumerate(tasks) if task == name]
        wanted = injections[name].scores(decoder, [asked[row] for row in rows])
        worst = max(worst, float((torch.tensor([found[row] for row in rows]) - wanted).abs().max()))
    return worst


def followed(decoder, injection, prompt, ids):
    """Log-probability of each of some tokens behind a prompt, injected or not."""
    batch = labelled_batch([tuple(prompt)], [tuple(ids)], decoder.device)
    at = batch.last[:, None] + torch.arange(len(ids))
    with torch.no_grad():
        logits = decoder.forward(batch, at=at, edit=None if injection is None else injection.edit())
    return logits[0].float().log_softmax(-1).gather(-1, torch.tensor(ids)[:, None])[:, 0]


@RUNNERS
def test_fifty_tasks_share_batches_with_aborts_and_preemption(run, decoder, artefacts, runner):
    folder, injections = artefacts
    asked = texts(60)
    tasks = [f"t{number % 50}" for number in range(60)]
    random.Random(1).shuffle(tasks)
    steps = [["classify", asked, tasks], ["crowd", 1, 80], ["crowd", 2, 80]]
    paths = {name: str(folder / name) for name in injections}
    got = run(steps, paths, runner=runner)
    labels, *crowds = got["answers"]
    worst = [apart(labels, decoder, injections, asked, tasks)]
    for one in crowds[0] + crowds[1]:
        injection = injections.get(one["task"])
        wanted = followed(decoder, injection, one["prompt"], one["ids"])
        worst.append(float((torch.tensor(one["logprobs"]) - wanted).abs().max()))
    print(f"\nworst {max(worst):.2e} of {len(worst)} and 60 texts; {got['counted']}")
    assert len(worst) > 100
    assert max(worst) < 1e-4
    assert got["counted"]["vllm:num_preemptions"] > 0


def cached(run, decoder, artefacts, **more):
    folder, injections = artefacts
    prompt = [1 + 7 * number % 600 for number in range(130)]  # four blocks and a little
    order = ["t0", None, "t1", "t0", None]
    steps = [["ask", prompt, task, 1] for task in order]
    got = run(steps, {name: str(folder / name) for name in ("t0", "t1")}, **more)
    wrong = []
    for task, one in zip(order, got["answers"], strict=True):
        wanted = followed(decoder, injections.get(task), prompt, one["ids"])
        wrong.append(float((torch.tensor(one["logprobs"]) - wanted).abs().max()))
    return wrong, [one["cached"] for one in got["answers"]]


@RUNNERS
def test_the_prefix_cache_keeps_tasks_apart(run, decoder, artefacts, runner):
    wrong, hits = cached(run, decoder, artefacts, runner=runner)
    print(f"\nworst {max(wrong):.2e}, cached tokens {hits}")
    assert max(wrong) < 1e-4
    assert hits == [0, 0, 0, 128, 128]


def test_without_the_salt_they_are_mixed_up(run, decoder, artefacts):
    wrong, hits = cached(run, decoder, artefacts, unsalted=True)
    print(f"\nnats off {[round(one, 2) for one in wrong]}, cached tokens {hits}")
    assert hits[1] == 128
    assert max(wrong) > 0.1


def test_no_salt_of_a_plain_request_finds_what_a_task_left_nor_the_other_way_round(run, decoder, artefacts):
    """Not even the engine's own, which takes a look into its process."""
    folder, injections = artefacts
    paths = {"t0": str(folder / "t0")}
    asked = [1 + 7 * number % 600 for number in range(130)]
    (digest,) = run([["digest", "t0"]], paths)["answers"]
    salts = [
        f"|i2cl:{digest}",
        f"i2cl:{digest}",
        f"mine|i2cl:{digest}",
        f"i2cl:plain:|i2cl:{digest}",
        "i2cl:",
    ]
    after = [["ask", asked, "t0", 1, "mine"], *(["ask", asked, None, 1, salt] for salt in salts)]
    before = [*(["ask", asked, None, 1, salt] for salt in salts), ["ask", asked, "t0", 1, "mine"]]
    worst = 0.0
    for steps in (after, before, [["ask", asked, "t0", 1, salt] for salt in (None, *salts)]):
        answers = run(steps, paths)["answers"]
        assert [one["cached"] for one in answers] == [0] * len(steps)
        for (_, _, task, *_), one in zip(steps, answers, strict=True):
            wanted = followed(decoder, injections.get(task), asked, one["ids"])
            worst = max(worst, float((torch.tensor(one["logprobs"]) - wanted).abs().max()))
    print(f"\nworst {worst:.2e} of {3 * len(salts) + 3} requests")
    assert worst < 1e-4


def test_the_engines_own_salt_does_not_help_a_plain_request(run, decoder, artefacts):
    folder, _ = artefacts
    asked = [1 + 7 * number % 600 for number in range(130)]
    steps = [["ask", asked, "t0", 1], ["stolen", asked, "t0"], ["ask", asked, "t0", 1]]
    answers = run(steps, {"t0": str(folder / "t0")})["answers"]
    assert [one["cached"] for one in answers] == [0, 0, 128]


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_write_that_fails_fails_its_load_and_nothing_else(run, decoder, artefacts, ranks):
    folder, injections = artefacts
    asked = texts(2)
    steps = [
        ["spoil", ranks - 1],
        ["load", "b", str(folder / "t1")],
        ["load", "b", str(folder / "t1")],  # was booked as done, and the next request ended the engine
        ["classify", asked, ["b", "b"]],
        ["classify", asked, ["a", "a"]],
        ["spoil", None],
        ["load", "b", str(folder / "t1")],
        ["classify", asked, ["a", "b"]],
    ]
    options = {"tensor_parallel_size": ranks} if ranks > 1 else {}
    options |= {"distributed_executor_backend": "mp"} if ranks > 1 else {}
    env = {"VLLM_ALLOW_INSECURE_SERIALIZATION": "1"}  # calls of functions, by which the test spoils a worker
    answers = run(steps, {"a": str(folder / "t0")}, options=options, env=env)["answers"]
    for one in answers[1:3]:
        assert f"1 of {ranks} workers could not write this task, RuntimeError (no memory)" in one["error"]
    assert "no task 'b' is loaded" in answers[3]["error"]
    close = {"rtol": 0, "atol": 1e-4}
    first, other = (injections[name].scores(decoder, asked) for name in ("t0", "t1"))
    torch.testing.assert_close(torch.tensor(answers[4]), first, **close)
    torch.testing.assert_close(torch.tensor(answers[7][0]), first[0], **close)
    torch.testing.assert_close(torch.tensor(answers[7][1]), other[1], **close)


@RUNNERS
def test_labels_of_many_tokens_are_scored_as_injections_score_them(run, decoder, tmp_path, runner):
    """With a prompt for every label, and where the cache shares the query with one for every beginning."""
    injection = random_injection(decoder, torch.Generator().manual_seed(1), "intents")
    injection.save_pretrained(tmp_path / "intents")
    asked = texts(6, seed=9, most=24)
    wanted, worst = injection.scores(decoder, asked), {}
    for way, options in (("labels", {"enable_prefix_caching": False}), ("beginnings", {"max_num_seqs": 4})):
        found = run(
            [["classify", asked, ["intents"] * len(asked)]],
            {"intents": str(tmp_path / "intents")},
            options=options | {"max_num_batched_tokens": 256},
            runner=runner,
        )["answers"][0]
        worst[way] = float((torch.tensor(found) - wanted).abs().max())
    print(f"\nworst {worst}")
    assert max(worst.values()) < 1e-3  # sums of up to 15 log-probabilities


def test_tasks_come_go_and_are_replaced(run, decoder, artefacts):
    folder, injections = artefacts
    asked = texts(2)
    one = {name: injections[name].scores(decoder, asked) for name in ("t0", "t3", "t4")}
    steps = [
        ["classify", asked, ["a", "a"]],
        ["load", "a", str(folder / "t3")],
        ["classify", asked, ["a", "a"]],
        ["load", "b", str(folder / "t4")],
        ["classify", asked, ["b", "a"]],
        ["load", "c", str(folder / "t5")],
        ["drop", "b"],
        ["ask", [5, 6, 7], "b", 1],
        ["load", "c", str(folder / "t5")],
        ["classify", asked, ["a", "a"]],
    ]
    more = {"options": {"additional_config": {"i2cl": {"slots": 2}}}}
    answers = run(steps, {"a": str(folder / "t0")}, **more)["answers"]
    close = {"rtol": 0, "atol": 1e-4}
    torch.testing.assert_close(torch.tensor(answers[0]), one["t0"], **close)
    torch.testing.assert_close(torch.tensor(answers[2]), one["t3"], **close)
    torch.testing.assert_close(torch.tensor(answers[4]), torch.stack([one["t4"][0], one["t3"][1]]), **close)
    assert "all 2 slots" in answers[5]["error"]
    assert "no task 'b' is loaded" in answers[7]["error"]
    assert answers[8] is None
    torch.testing.assert_close(torch.tensor(answers[9]), one["t3"], **close)


@RUNNERS
def test_a_start_whose_edit_does_not_act_fails(run, runner):
    told = run([], unedited=True, succeeds=False, runner=runner)
    assert "edit does not act in this vLLM: its answer with a task is that without one" in told


def test_what_is_not_supported_does_not_start(run):
    told = run([], options={"enable_lora": True}, succeeds=False)
    assert "LoRA puts layers of its own around the residual writers" in told


def graphs(tmp_path):
    return {path.name for path in (tmp_path / "cache").rglob("torch_aot_compile/*")}


def test_compiled_answers_are_the_eager_ones_also_after_a_start_without_the_plugin(
    run, tmp_path, decoder, artefacts
):
    folder, injections = artefacts
    asked, tasks = texts(12, seed=4), [f"t{number % 3}" for number in range(12)]
    paths = {f"t{number}": str(folder / f"t{number}") for number in range(3)}
    compiled, env = {"enforce_eager": False}, {"VLLM_CACHE_ROOT": str(tmp_path / "cache")}
    run([["ask", [5, 6, 7], None, 1]], options=compiled, env=env | {"VLLM_PLUGINS": ""})
    plain = graphs(tmp_path)
    worst = []
    for _ in range(2):  # the second start takes the graph that the first one saved
        found = run([["classify", asked, tasks]], paths, options=compiled, env=env)["answers"][0]
        worst.append(apart(found, decoder, injections, asked, tasks))
    print(f"\nworst {worst}, saved graphs {len(plain)} and then {len(graphs(tmp_path))}")
    assert max(worst) < 1e-4
    assert plain
    assert len(graphs(tmp_path)) == 2 * len(plain)


SMALL = {"vocab_size": 694, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
SMALL |= {
    "intermediate_size": 96,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 0,
}
SMALL |= {"eos_token_id": 0, "pad_token_id": None, "initializer_range": 0.15}
KINDS = {
    "GPT2LMHeadModel": {"model_type": "gpt2", "n_embd": 64, "n_layer": 2, "n_head": 2, "n_positions": 256},
    "GemmaForCausalLM": {"model_type": "gemma", "head_dim": 32},
    "GraniteForCausalLM": {"model_type": "granite", "residual_multiplier": 0.5},
    "MistralForCausalLM": {"model_type": "mistral", "head_dim": 32},
    "NemotronForCausalLM": {"model_type": "nemotron", "head_dim": 32},
    "OPTForCausalLM": {"model_type": "opt", "ffn_dim": 96, "word_embed_proj_dim": 64, "init_std": 0.15},
    "Phi3ForCausalLM": {"model_type": "phi3"},
    "Qwen2ForCausalLM": {"model_type": "qwen2"},
    "Qwen3ForCausalLM": {"model_type": "qwen3", "head_dim": 32},
    "StableLmForCausalLM": {"model_type": "stablelm"},
}


@pytest.mark.parametrize("architecture", sorted(WRITERS.keys() - {"LlamaForCausalLM"}))
def test_every_architecture_of_the_table_answers_as_injected(run, tmp_path, architecture):
    torch.manual_seed(0)
    config = AutoConfig.for_model(**SMALL | KINDS[architecture])
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "model")
    AutoTokenizer.from_pretrained(located("reference")).save_pretrained(tmp_path / "model")
    decoder = Decoder.from_pretrained(str(tmp_path / "model"), dtype="float32", device="cpu")
    injection = random_injection(decoder, torch.Generator().manual_seed(0), "mood-colour-1")
    injection.save_pretrained(tmp_path / "task")
    draw = random.Random(8)
    prompts = [[draw.randrange(1, 690) for _ in range(draw.randint(3, 60))] for _ in range(12)]
    steps = [["ask", prompt, task, 4] for prompt in prompts for task in ("task", None)]
    options = {"max_model_len": 128}
    found = run(steps, {"task": str(tmp_path / "task")}, where=tmp_path / "model", options=options)["answers"]
    worst = {
        task: nats(found[start::2], own, decoder, prompts)
        for start, task, own in ((0, "injected", injection), (1, "plain", None))
    }
    print(f"\n{architecture} {worst}")
    assert max(worst.values()) < 1e-4


def test_two_ranks_answer_as_one(run, decoder, artefacts):
    folder, injections = artefacts
    asked, tasks = texts(12, seed=5), [f"t{number % 3}" for number in range(12)]
    paths = {f"t{number}": str(folder / f"t{number}") for number in range(3)}
    options = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
    found = run([["classify", asked, tasks]], paths, options=options)["answers"][0]
    worst = apart(found, decoder, injections, asked, tasks)
    print(f"\nworst {worst:.2e}")
    assert worst < 1e-4


def nats(found, injection, decoder, prompts):
    """Largest difference of each prompt's first new token's log-probability to the injected model's."""
    wanted = [
        float(followed(decoder, injection, prompt, one["ids"])[0])
        for prompt, one in zip(prompts, found, strict=True)
    ]
    return max(abs(one["logprobs"][0] - value) for one, value in zip(found, wanted, strict=True))


def test_a_folded_checkpoint_agrees_and_in_bfloat16_is_no_closer(run, tmp_path, model, decoder, artefacts):
    folder, injections = artefacts
    export_hf(decoder, injections["t0"], tmp_path / "folded")
    draw = random.Random(6)
    prompts = [[draw.randrange(1, 690) for _ in range(draw.randint(3, 60))] for _ in range(40)]
    half, worst = {"dtype": "bfloat16"}, {}
    for name, where, task, options in (
        ("folded", tmp_path / "folded", None, {}),
        ("folded bfloat16", tmp_path / "folded", None, half),
        ("plugin bfloat16", model, "t0", half),
    ):
        steps = [["ask", prompt, task, 1] for prompt in prompts]
        paths = {} if task is None else {task: str(folder / task)}
        found = run(steps, paths, where=where, options=options)["answers"]
        worst[name] = nats(found, injections["t0"], decoder, prompts)
    print(f"\n{worst}")
    assert worst["folded"] < 1e-4
    assert worst["plugin bfloat16"] <= worst["folded bfloat16"]


def test_model_runner_v2_asks_the_model_for_the_slots_of_its_batches(monkeypatch):
    """Its own classes, without the kernels that take a GPU."""
    import torch.nn as nn
    from vllm.v1.worker.gpu.input_batch import InputBatch, InputBuffers
    from vllm.v1.worker.gpu.model_states import resolve_model_state_cls

    from i2cl.faces.vllm.model import Hooked
    from i2cl.faces.vllm.slots import Packed
    from i2cl.faces.vllm.tables import Tables

    model = type("Model", (Hooked, nn.Module), {"__init__": nn.Module.__init__})()
    model.i2cl_tables = Tables([nn.Linear(4, 4), nn.Linear(4, 4)], 3, 4, 32)
    packed = Packed.of(torch.ones(1, 2, 4), torch.zeros(1, 2))
    model.i2cl_tables.write(2, packed.digest, packed)
    kind = resolve_model_state_cls(None, model)
    state = object.__new__(kind)
    state.i2cl_tables, state.i2cl_places = model.i2cl_tables, np.zeros(8, dtype=np.int32)
    state.rope_state = state.prompt_embeds_state = None
    extra = SimpleNamespace(extra_args={"i2cl_digest": packed.digest})
    state.add_request(1, SimpleNamespace(sampling_params=extra))
    state.add_request(0, SimpleNamespace(sampling_params=SimpleNamespace(extra_args=None)))
    batch = InputBatch.make_dummy(3, 7, InputBuffers(8, 32, torch.device("cpu")))
    assert state.prepare_inputs(batch, None) == {}
    assert model.i2cl_tables.slots[:7].tolist() == [0, 0, 2, 2, 0, 0, 0]


USER, ADMIN = "user-key", "admin-key"


@pytest.fixture(scope="module")
def server(tmp_path_factory, model, artefacts):
    """A server in three processes of its own with the tasks t0 and t1."""
    tmp_path, (folder, _) = tmp_path_factory.mktemp("server"), artefacts
    (tmp_path / "tasks").mkdir()
    for name in ("t0", "t1"):
        (tmp_path / "tasks" / name).symlink_to(folder / name)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    own = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
        "I2CL_VLLM_TASKS": str(tmp_path / "tasks"),
        "I2CL_VLLM_ADMIN_KEY": ADMIN,
    }
    options = "--dtype float32 --enforce-eager --max-model-len 256 --max-num-seqs 16 --max-logprobs 694"
    with (tmp_path / "log").open("w") as log:
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
        command += [*options.split(), "--port", str(port), "--host", "127.0.0.1", "--api-key", USER, ADMIN]
        process = subprocess.Popen(command, env=ENVIRONMENT | own, stdout=log, stderr=log)
    url = f"http://127.0.0.1:{port}"
    try:
        for _ in range(1200):
            try:
                urlopen(f"{url}/health", timeout=5).close()
                break
            except (URLError, OSError):
                assert process.poll() is None, (tmp_path / "log").read_text()[-4000:]
                time.sleep(1)
        yield url
    finally:
        process.terminate()
        process.wait(60)


def call(url, body=None, key=USER, method=None):
    data = None if body is None else json.dumps(body).encode()
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
    try:
        with urlopen(Request(url, data, headers, method=method), timeout=120) as reply:
            return reply.status, json.load(reply), reply.headers
    except HTTPError as error:
        return error.code, error.read().decode(), {}


def test_over_http_tasks_are_asked_loaded_and_dropped(tmp_path, server, decoder, artefacts, monkeypatch):
    folder, injections = artefacts
    classify, listed = f"{server}/v1/i2cl/classify", f"{server}/v1/i2cl/tasks"
    complete = f"{server}/v1/completions"
    asked = texts(3, seed=7)
    wanted = injections["t0"].scores(decoder, asked)

    def right():
        status, reply, headers = call(classify, {"model": "t0", "input": asked})
        assert status == 200
        probs = torch.tensor([one["probs"] for one in reply["data"]])
        torch.testing.assert_close(probs, wanted.softmax(-1), rtol=0, atol=1e-4)
        assert [one["label"] for one in reply["data"]] == injections["t0"].predict(decoder, asked)
        assert reply["labels"] == list(injections["t0"].task.labels)
        assert len(headers["X-I2CL-Digest"]) == 32

    def completion(task):
        xargs = {} if task is None else {"vllm_xargs": {"i2cl": task}}
        body = {"model": str(decoder.name), "prompt": [5, 6, 7, 8], "max_tokens": 1, "temperature": 0}
        return call(complete, body | {"logprobs": 1, "return_tokens_as_token_ids": True} | xargs)

    right()
    for task in ("t0", "t1", None):
        status, reply, _ = completion(task)
        assert status == 200
        told = reply["choices"][0]["logprobs"]
        token, value = int(told["tokens"][0].removeprefix("token_id:")), told["token_logprobs"][0]
        assert abs(value - float(followed(decoder, injections.get(task), [5, 6, 7, 8], [token])[0])) < 1e-4

    assert call(classify, {"model": "t0", "input": "x"}, key=None)[0] == 401
    assert call(complete, {"prompt": [5], "vllm_xargs": {"i2cl": "t0"}}, key=None)[0] == 401
    assert call(listed, key=None)[0] == 401
    assert call(listed)[0] == 403
    for bad, code in (
        ({"model": "t9", "input": "x"}, 404),
        ({"model": "t0", "input": " "}, 400),
        ({"model": "t0", "input": 3}, 400),
        ({"model": "t0"}, 400),
    ):
        assert call(classify, bad)[0] in {code, 422 if code == 400 else code}
        right()
    for bad in ("t9", 3, ["t0"], ""):
        assert completion(bad)[0] == 400
        right()

    status, reply, _ = call(listed, {"name": "new", "artefact": str(folder / "t2")}, key=ADMIN)
    assert status == 200
    assert [one["name"] for one in call(listed, key=ADMIN)[1]["data"]] == ["t0", "t1", "new"]
    assert completion("new")[0] == 200
    assert call(listed, {"name": "bad", "artefact": str(tmp_path)}, key=ADMIN)[0] == 400
    assert call(f"{listed}/new", key=ADMIN, method="DELETE")[0] == 200
    assert call(f"{listed}/new", key=ADMIN, method="DELETE")[0] == 404
    assert completion("new")[0] == 400
    assert call(classify, {"model": "new", "input": "x"})[0] == 404
    right()

    monkeypatch.setenv("VLLM_API_KEY", USER)
    golden = make_golden(decoder, injections["t0"])
    outcome = judged(golden, ask_server(golden, server, task="t0", logprobs=694))
    print(f"\nverify over HTTP: {outcome.worst:.1e}")
    assert outcome.passed
    assert not judged(golden, ask_server(golden, server, task="t1", logprobs=694)).passed
    assert not judged(golden, ask_server(golden, server, logprobs=694)).passed


def test_over_http_a_classify_under_reloads_ends_as_it_began(server, decoder, artefacts):
    folder, injections = artefacts
    classify, listed = f"{server}/v1/i2cl/classify", f"{server}/v1/i2cl/tasks"
    asked = texts(40, seed=11, most=30)
    digests = {}
    for name in ("t3", "t6"):
        _, reply, _ = call(listed, {"name": "turned", "artefact": str(folder / name)}, key=ADMIN)
        digests[reply["digest"]] = injections[name].scores(decoder, asked).softmax(-1)
    bodies = [{"model": "turned", "input": asked}] * 12
    with ThreadPoolExecutor(4) as pool:
        running = [pool.submit(call, classify, body) for body in bodies]
        reloads = 0
        while not all(one.done() for one in running):
            body = {"name": "turned", "artefact": str(folder / ("t3", "t6")[reloads % 2])}
            assert call(listed, body, key=ADMIN)[0] == 200
            reloads += 1
    used = set()
    for one in running:
        status, reply, headers = one.result()
        assert status == 200
        used.add(headers["X-I2CL-Digest"])
        probs = torch.tensor([each["probs"] for each in reply["data"]])
        torch.testing.assert_close(probs, digests[headers["X-I2CL-Digest"]], rtol=0, atol=1e-4)
    print(f"\n{len(running)} requests of {len(asked)} texts under {reloads} reloads, {len(used)} versions")
    assert reloads > 2
    assert used == set(digests)


def test_over_http_what_is_refused_says_why_and_what_to_do(server, decoder, artefacts):
    folder, _ = artefacts
    classify, listed = f"{server}/v1/i2cl/classify", f"{server}/v1/i2cl/tasks"
    for body, code, words in (
        (
            {"model": "t0", "input": ["x", "the " * 400]},
            413,
            "text 2 takes .* and 255 fit into the context: ",
        ),
        ({"model": "t0", "input": ["x"] * 2049}, 413, "2049 texts came, and 2048 fit into a request: send"),
        ({"model": "t0", "input": []}, 400, "input is an empty list: send a text"),
    ):
        status, told, _ = call(classify, body)
        assert status == code
        error = json.loads(told)["error"]
        assert re.search(words, error["message"])
        assert error.keys() >= {"message", "type", "code"}

    beams = {"use_beam_search": True, "n": 2, "temperature": 0, "max_tokens": 2}
    body = {"model": str(decoder.name), "prompt": [5, 6, 7]} | beams
    assert call(f"{server}/v1/completions", body)[0] == 200
    status, told, _ = call(f"{server}/v1/completions", body | {"vllm_xargs": {"i2cl": "t0"}})
    assert status == 400
    assert "beam search takes no task" in told

    for name, path in (("team/mood", "team/mood"), ("team/other", "team%2Fother"), ("a b", "a%20b")):
        assert call(listed, {"name": name, "artefact": str(folder / "t2")}, key=ADMIN)[0] == 200
        assert call(f"{listed}/{path}", key=ADMIN, method="DELETE")[1]["name"] == name


def test_over_http_work_stops_when_the_client_leaves(server):
    def figures():
        with urlopen(f"{server}/metrics", timeout=60) as reply:
            lines = [line.rsplit(" ", 1) for line in reply.read().decode().splitlines() if line[0] != "#"]
        told = {name.partition("{")[0]: 0.0 for name, _ in lines}
        for name, value in lines:
            told[name.partition("{")[0]] += float(value)
        return told["vllm:request_success_total"], told["vllm:num_requests_running"]

    before, _ = figures()
    body = json.dumps({"model": "t0", "input": texts(2000, seed=12)}).encode()
    address = server.removeprefix("http://").split(":")
    with socket.create_connection((address[0], int(address[1]))) as client:
        head = f"POST /v1/i2cl/classify HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {USER}\r\n"
        head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        client.sendall(head.encode() + body)
        while figures()[0] == before:
            time.sleep(0.05)
    for _ in range(1200):
        done, running = figures()
        if not running:
            break
        time.sleep(0.05)
    time.sleep(1)
    print(f"\n{done - before:.0f} of 2000 texts were done")
    assert figures() == (done, 0)
    assert done - before < 1900
