"""The plugin inside vLLM on a CPU computes the same scores as `Injection`. Each test starts engines."""

import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from i2cl.export import export_causal_lm
from i2cl.interfaces.vllm.support import SUBLAYERS
from i2cl.models.decoder import Decoder
from i2cl.models.loading import resolve_name

from .engines import RUNNERS, WORDS, max_difference, nats, off, random_injection, texts


@RUNNERS
def test_fifty_tasks_share_batches_with_aborts_and_preemption(run, decoder, artefacts, runner):
    folder, injections = artefacts
    queries = texts(60)
    tasks = [f"t{number % 50}" for number in range(60)]
    random.Random(1).shuffle(tasks)
    steps = [["classify", queries, tasks], ["crowd", 1, 80], ["crowd", 2, 80]]
    got = run(steps, paths(folder, *injections), runner=runner)
    labels, *crowds = got["answers"]
    worst = [max_difference(labels, decoder, injections, queries, tasks)]
    crowd = crowds[0] + crowds[1]
    worst += [off(decoder, injections.get(one["task"]), one["prompt"], one) for one in crowd]
    print(f"\nworst {max(worst):.2e} of {len(worst)} and 60 texts; {got['counted']}")
    assert len(worst) > 100
    assert max(worst) < 1e-4
    assert got["counted"]["vllm:num_preemptions"] > 0


PROMPT = [1 + 7 * number % 600 for number in range(130)]  # four blocks and a little


def paths(folder, *names):
    return {name: str(folder / name) for name in names}


def close(result, wanted):
    torch.testing.assert_close(torch.tensor(result), wanted, rtol=0, atol=1e-4)


def cached(run, decoder, artefacts, **more):
    folder, injections = artefacts
    order = ["t0", None, "t1", "t0", None]
    got = run([["ask", PROMPT, task, 1] for task in order], paths(folder, "t0", "t1"), **more)["answers"]
    wrong = [off(decoder, injections.get(task), PROMPT, one) for task, one in zip(order, got, strict=True)]
    return wrong, [one["cached"] for one in got]


@RUNNERS
def test_the_prefix_cache_keeps_tasks_apart(run, decoder, artefacts, runner):
    wrong, hits = cached(run, decoder, artefacts, runner=runner)
    print(f"\nworst {max(wrong):.2e}, cached tokens {hits}")
    assert max(wrong) < 1e-4
    assert hits == [0, 0, 0, 128, 128]


def test_without_salts_the_cache_mixes_tasks(run, decoder, artefacts):
    wrong, hits = cached(run, decoder, artefacts, unsalted=True)
    print(f"\nnats off {[round(one, 2) for one in wrong]}, cached tokens {hits}")
    assert hits[1] == 128
    assert max(wrong) > 0.1


def test_guessed_salts_share_no_cache_with_a_task(run, decoder, artefacts):
    """Not even the engine's own, which takes a look into its process."""
    folder, injections = artefacts
    (digest,) = run([["digest", "t0"]], paths(folder, "t0"))["answers"]
    salts = [f"{before}i2cl:{digest}" for before in ("|", "", "mine|", "i2cl:plain:|")] + ["i2cl:"]
    mine, plain = ["ask", PROMPT, "t0", 1, "mine"], [["ask", PROMPT, None, 1, salt] for salt in salts]
    worst = 0.0
    for steps in (
        [mine, *plain],
        [*plain, mine],
        [["ask", PROMPT, "t0", 1, salt] for salt in (None, *salts)],
    ):
        answers = run(steps, paths(folder, "t0"))["answers"]
        assert [one["cached"] for one in answers] == [0] * len(steps)
        for (_, _, task, *_), one in zip(steps, answers, strict=True):
            worst = max(worst, off(decoder, injections.get(task), PROMPT, one))
    print(f"\nworst {worst:.2e} of {3 * len(salts) + 3} requests")
    assert worst < 1e-4


def test_the_engines_own_salt_does_not_help_a_plain_request(run, decoder, artefacts):
    folder, _ = artefacts
    steps = [["ask", PROMPT, "t0", 1], ["stolen", PROMPT, "t0"], ["ask", PROMPT, "t0", 1]]
    answers = run(steps, paths(folder, "t0"))["answers"]
    assert [one["cached"] for one in answers] == [0, 0, 128]


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_failed_write_fails_only_its_load(run, decoder, artefacts, ranks):
    folder, injections = artefacts
    queries = texts(2)
    steps = [
        ["spoil", ranks - 1],
        ["load", "b", str(folder / "t1")],
        ["load", "b", str(folder / "t1")],  # was booked as done, and the next request ended the engine
        ["classify", queries, ["b", "b"]],
        ["classify", queries, ["a", "a"]],
        ["spoil", None],
        ["load", "b", str(folder / "t1")],
        ["classify", queries, ["a", "b"]],
    ]
    options = {"tensor_parallel_size": ranks} if ranks > 1 else {}
    options |= {"distributed_executor_backend": "mp"} if ranks > 1 else {}
    env = {"VLLM_ALLOW_INSECURE_SERIALIZATION": "1"}  # calls of functions, by which the test spoils a worker
    answers = run(steps, {"a": str(folder / "t0")}, options=options, env=env)["answers"]
    for one in answers[1:3]:
        assert f"1 of {ranks} workers could not write this task, RuntimeError (no memory)" in one["error"]
    assert "no task 'b' is loaded" in answers[3]["error"]
    first, other = (injections[name].log_probs(decoder, queries) for name in ("t0", "t1"))
    close(answers[4], first)
    close(answers[7], torch.stack([first[0], other[1]]))


@RUNNERS
@pytest.mark.parametrize("caching", [True, False])
def test_labels_of_several_tokens_match_the_library(run, decoder, tmp_path, runner, caching):
    injection = random_injection(decoder, torch.Generator().manual_seed(1), "intents")
    injection.save_pretrained(tmp_path / "intents")
    queries = texts(4, seed=9, most=24)
    steps = [["classify", queries, ["intents"] * len(queries)]]
    options = {"enable_prefix_caching": caching, "max_num_batched_tokens": 256}
    (answer,) = run(steps, paths(tmp_path, "intents"), options=options, runner=runner)["answers"]
    worst = float((torch.tensor(answer) - injection.log_probs(decoder, queries)).abs().max())
    print(f"\nworst {worst:.2e}")
    assert worst < 1e-3  # sums of up to 15 log-probabilities


def test_tasks_come_go_and_are_replaced(run, decoder, artefacts):
    folder, injections = artefacts
    queries = texts(2)
    one = {name: injections[name].log_probs(decoder, queries) for name in ("t0", "t3", "t4")}
    steps = [
        ["classify", queries, ["a", "a"]],
        ["load", "a", str(folder / "t3")],
        ["classify", queries, ["a", "a"]],
        ["load", "b", str(folder / "t4")],
        ["classify", queries, ["b", "a"]],
        ["load", "c", str(folder / "t5")],
        ["drop", "b"],
        ["ask", [5, 6, 7], "b", 1],
        ["load", "c", str(folder / "t5")],
        ["classify", queries, ["a", "a"]],
    ]
    options = {"additional_config": {"i2cl": {"slots": 2}}}
    answers = run(steps, {"a": str(folder / "t0")}, options=options)["answers"]
    close(answers[0], one["t0"])
    close(answers[2], one["t3"])
    close(answers[4], torch.stack([one["t4"][0], one["t3"][1]]))
    assert "all 2 slots" in answers[5]["error"]
    assert "no task 'b' is loaded" in answers[7]["error"]
    assert answers[8] is None
    close(answers[9], one["t3"])


def test_a_replaced_task_does_not_answer_from_the_cache_of_its_predecessor(run, decoder, artefacts):
    folder, injections = artefacts
    queries = [text for text in texts(40, seed=13) if len(decoder.tokenizer(text)["input_ids"]) > 40]
    classify = ["classify", queries, ["a"] * len(queries)]
    steps = [classify, classify, ["load", "a", str(folder / "t3")], classify]
    options = {"num_gpu_blocks_override": 400}
    outcome = run(steps, {"a": str(folder / "t0")}, options=options)
    assert outcome["counted"]["vllm:prefix_cache_hits"] > 0
    close(outcome["answers"][3], injections["t3"].log_probs(decoder, queries))


def test_a_cold_and_a_warm_cache_agree_on_near_ties(run, decoder, artefacts):
    folder, injections = artefacts
    candidates = texts(200, seed=14)
    first, second = injections["t0"].log_probs(decoder, candidates).topk(2, -1).values.unbind(-1)
    queries = [candidates[row] for row in (first - second).argsort()[:16]]
    classify = ["classify", queries, ["a"] * len(queries)]
    options = {"num_gpu_blocks_override": 400}
    cold, warm = run([classify, classify], {"a": str(folder / "t0")}, options=options)["answers"]
    close(warm, torch.tensor(cold))


def test_tasks_that_differ_only_in_their_prior_have_different_scores(run, decoder, artefacts, tmp_path):
    _, injections = artefacts
    prior = torch.linspace(0, 2, len(injections["t0"].task.labels))
    tasks = {
        name: injections["t0"].with_head(bias=tuple(bias.tolist()))
        for name, bias in (("up", prior), ("down", -prior))
    }
    for name, injection in tasks.items():
        injection.save_pretrained(tmp_path / name)
    queries = texts(8, seed=15)
    steps = [["classify", queries, [name] * len(queries)] for name in ("up", "down", "up")]
    answers = run(steps, paths(tmp_path, *tasks))["answers"]
    for name, answer in zip(("up", "down", "up"), answers, strict=True):
        close(answer, tasks[name].log_probs(decoder, queries))


def test_chunked_prefill_of_a_long_text_matches_the_library(run, decoder, artefacts):
    folder, injections = artefacts
    long = " ".join(random.Random(16).choices(WORDS, k=280))
    assert len(decoder.tokenizer(long)["input_ids"]) > 640  # more than ten steps of 64 tokens
    queries = [*texts(6, seed=17), long, *texts(6, seed=18)]
    tasks = ["t0", "t1"] * 6 + ["t0"]
    options = {"max_model_len": 1024, "num_gpu_blocks_override": 80}
    (answer,) = run([["classify", queries, tasks]], paths(folder, "t0", "t1"), options=options)["answers"]
    assert max_difference(answer, decoder, injections, queries, tasks) < 1e-4


@pytest.mark.parametrize("level", [1, 2])
def test_tasks_give_the_same_answers_after_sleep_mode(run, decoder, artefacts, level):
    folder, injections = artefacts
    queries, tasks = texts(6, seed=19), ["t0", "t1"] * 3
    classify = ["classify", queries, tasks]
    env = {"VLLM_ALLOW_INSECURE_SERIALIZATION": "1"}  # calls of functions, by which the test loses tables
    steps = [classify, ["sleep_and_lose_tables", level], classify]
    before, _, after = run(steps, paths(folder, "t0", "t1"), env=env)["answers"]
    assert max_difference(before, decoder, injections, queries, tasks) < 1e-4
    assert max_difference(after, decoder, injections, queries, tasks) < 1e-4


def test_reloaded_weights_leave_tasks_as_they_were(run, decoder, artefacts):
    folder, injections = artefacts
    queries, tasks = texts(4, seed=20), ["t0", "t1"] * 2
    steps = [["reload_weights"], ["classify", queries, tasks]]
    _, answer = run(steps, paths(folder, "t0", "t1"))["answers"]
    assert max_difference(answer, decoder, injections, queries, tasks) < 1e-4


@RUNNERS
def test_the_start_fails_without_a_working_edit(run, runner):
    value = run([], unedited=True, succeeds=False, runner=runner)
    assert "edit does not work in this vLLM: a task does not change the answer" in value


CONNECTOR = {"kv_connector": "ExampleConnector", "kv_role": "kv_both"}


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"enable_lora": True}, "LoRA replaces the sublayers by its own layers"),
        ({"kv_transfer_config": CONNECTOR}, "leave kv_transfer_config and offloading unset"),
    ],
)
def test_unsupported_configurations_do_not_start(run, options, reason):
    assert reason in run([], options=options, succeeds=False)


def graphs(tmp_path):
    return {path.name for path in (tmp_path / "cache").rglob("torch_aot_compile/*")}


def test_compiled_answers_match_eager_even_if_the_cache_predates_the_plugin(
    run, tmp_path, decoder, artefacts
):
    folder, injections = artefacts
    queries, tasks = texts(12, seed=4), [f"t{number % 3}" for number in range(12)]
    compiled, env = {"enforce_eager": False}, {"VLLM_CACHE_ROOT": str(tmp_path / "cache")}
    run([["ask", [5, 6, 7], None, 1]], options=compiled, env=env | {"VLLM_PLUGINS": ""})
    plain = graphs(tmp_path)
    worst = []
    for _ in range(2):  # the second start takes the graph that the first one saved
        steps = [["classify", queries, tasks]]
        result = run(steps, paths(folder, *tasks), options=compiled, env=env)["answers"][0]
        worst.append(max_difference(result, decoder, injections, queries, tasks))
    print(f"\nworst {worst}, saved graphs {len(plain)} and then {len(graphs(tmp_path))}")
    assert max(worst) < 1e-4
    assert plain
    assert len(graphs(tmp_path)) == 2 * len(plain)


SMALL = {"vocab_size": 694, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
SMALL |= {"intermediate_size": 96, "num_key_value_heads": 2, "max_position_embeddings": 256}
SMALL |= {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": None, "initializer_range": 0.15}
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


@pytest.mark.parametrize("architecture", sorted(SUBLAYERS.keys() - {"LlamaForCausalLM"}))
def test_every_supported_architecture_matches_the_library(run, tmp_path, architecture):
    torch.manual_seed(0)
    config = AutoConfig.for_model(**SMALL | KINDS[architecture])
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "model")
    AutoTokenizer.from_pretrained(resolve_name("reference")).save_pretrained(tmp_path / "model")
    decoder = Decoder.from_pretrained(str(tmp_path / "model"), dtype="float32", device="cpu")
    injection = random_injection(decoder, torch.Generator().manual_seed(0), "mood-colour-1")
    injection.save_pretrained(tmp_path / "task")
    draw = random.Random(8)
    prompts = [[draw.randrange(1, 690) for _ in range(draw.randint(3, 60))] for _ in range(12)]
    steps = [["ask", prompt, task, 4] for prompt in prompts for task in ("task", None)]
    options = {"max_model_len": 128}
    result = run(steps, paths(tmp_path, "task"), where=tmp_path / "model", options=options)["answers"]
    worst = [
        max(nats(result[start::2], own, decoder, prompts)) for start, own in enumerate((injection, None))
    ]
    print(f"\n{architecture}, injected and plain: {worst}")
    assert max(worst) < 1e-4


def test_two_ranks_answer_as_one(run, decoder, artefacts):
    folder, injections = artefacts
    queries, tasks = texts(12, seed=5), [f"t{number % 3}" for number in range(12)]
    options = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
    result = run([["classify", queries, tasks]], paths(folder, *tasks), options=options)["answers"][0]
    worst = max_difference(result, decoder, injections, queries, tasks)
    print(f"\nworst {worst:.2e}")
    assert worst < 1e-4


def test_vllm_agrees_with_a_folded_checkpoint_to_within_its_rounding(
    run, tmp_path, model, decoder, artefacts
):
    folder, injections = artefacts
    export_causal_lm(decoder, injections["t0"], tmp_path / "folded")
    draw = random.Random(6)
    prompts = [[draw.randrange(1, 690) for _ in range(draw.randint(3, 60))] for _ in range(40)]
    half, errors = {"dtype": "bfloat16"}, {}
    for name, where, task, options in (
        ("folded", tmp_path / "folded", None, {}),
        ("folded bfloat16", tmp_path / "folded", None, half),
        ("plugin bfloat16", model, "t0", half),
    ):
        steps = [["ask", prompt, task, 1] for prompt in prompts]
        tasks = paths(folder, *([] if task is None else [task]))
        result = run(steps, tasks, where=where, options=options)["answers"]
        errors[name] = nats(result, injections["t0"], decoder, prompts)
    mean = {name: sum(differences) / len(prompts) for name, differences in errors.items()}
    print(f"\n{mean}")
    assert max(errors["folded"]) < 1e-4
    assert mean["plugin bfloat16"] <= 1.1 * mean["folded bfloat16"]


def test_model_runner_v2_fills_the_slots_of_its_batches():
    """With vLLM's own classes, but without kernels that need a GPU."""
    from torch import nn
    from vllm.v1.worker.gpu.input_batch import InputBatch, InputBuffers
    from vllm.v1.worker.gpu.model_states import resolve_model_state_cls

    from i2cl.interfaces.vllm.worker import EditedModel, EditTables, PackedEdit

    model = type("Model", (EditedModel, nn.Module), {"__init__": nn.Module.__init__})()
    model.i2cl_tables = EditTables([nn.Linear(4, 4), nn.Linear(4, 4)], 3, 4, 32)
    edit = PackedEdit.of(torch.ones(1, 2, 4), torch.zeros(1, 2))
    model.i2cl_tables.write(2, edit.digest, edit)
    kind = resolve_model_state_cls(None, model)
    state = object.__new__(kind)
    state.i2cl_tables, state.i2cl_slots = model.i2cl_tables, np.zeros(8, dtype=np.int32)
    state.rope_state = state.prompt_embeds_state = None
    extra = SimpleNamespace(extra_args={"i2cl_digest": edit.digest})
    state.add_request(1, SimpleNamespace(sampling_params=extra))
    state.add_request(0, SimpleNamespace(sampling_params=SimpleNamespace(extra_args=None)))
    batch = InputBatch.make_dummy(3, 7, InputBuffers(8, 32, torch.device("cpu")))
    assert state.prepare_inputs(batch, None) == {}
    assert model.i2cl_tables.token_slots[:7].tolist() == [0, 0, 2, 2, 0, 0, 0]
