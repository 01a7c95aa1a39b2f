"""Run vLLM engines, each in a process that is forked from this one after the imports.

Every line of stdin is a job as JSON; the answer is the exit status of its process.
A job: ``result``, the file to write; ``log``; ``env``; ``model`` and ``options`` of ``vllm.LLM``; ``tasks``,
artefact folders by name; and ``steps``, each the name of a method of `Engine` and its arguments.
"""

import json
import os
import random
import sys
import traceback
from pathlib import Path
from types import SimpleNamespace

if sys.argv[1:] == ["V2"]:  # its Triton kernels run on a CPU in Triton's interpreter, where vLLM lets them
    os.environ |= {"TRITON_INTERPRET": "1", "VLLM_USE_V2_MODEL_RUNNER": "1"}
    from triton.backends import backends

    backends["cpu"] = SimpleNamespace(driver=SimpleNamespace(is_active=lambda: True))

import torch
import vllm.model_executor.models.llama
import vllm.v1.worker.cpu_worker  # noqa: F401
from vllm import LLM, SamplingParams

from i2cl import I2CLError, Injection
from i2cl.interfaces.vllm import classify, drop, load, worker as plugin_worker
from i2cl.interfaces.vllm.engine import Core
from i2cl.interfaces.vllm.frontend import TASKS

COUNTED = {"vllm:num_preemptions", "vllm:prefix_cache_hits"}


class Engine:
    """An engine, with a method for every kind of step."""

    def __init__(self, job):
        torch.set_num_threads(1)
        self.job = job
        self.llm = LLM(job["model"], disable_log_stats=False, **job["options"])
        for name, folder in job["tasks"].items():
            self.load(name, folder)

    def classify(self, texts, tasks):
        return [answer.log_probs.tolist() for answer in classify(self.llm, texts, tasks)]

    def load(self, name, folder):
        load(self.llm, name, Injection.from_pretrained(folder))

    def drop(self, name):
        drop(self.llm, name)

    def ask(self, ids, task, new, salt=None):
        prompt = {"prompt_token_ids": ids} | ({} if salt is None else {"cache_salt": salt})
        (output,) = self.llm.generate([prompt], params(task, new), use_tqdm=False)
        return message(output)

    def digest(self, task):
        return TASKS.get(task).edit.digest

    def stolen(self, ids, task):
        """Send a plain request with the task's salt, which only the engine's process knows."""
        return self.ask(ids, None, 1, Core.current.cache_salt(None, self.digest(task)))

    def spoil(self, rank):
        """Make the writes of one worker fail."""
        self.llm.collective_rpc(spoiled, args=(rank,))

    def reload_weights(self):
        self.llm.collective_rpc("reload_weights")

    def sleep_and_lose_tables(self, level):
        """Sleep and wake up, with other contents in the tables' memory."""
        self.llm.sleep(level)
        self.llm.collective_rpc(lose_tables)
        self.llm.wake_up()

    def crowd(self, seed, size):
        """Send requests of random tasks and lengths, and abort some of them while the engine runs."""
        draw, engine = random.Random(seed), self.llm.llm_engine
        names = [*self.job["tasks"], None]
        requests = {
            f"{seed}-{place}": (draw.choices(range(1, 690), k=draw.randint(1, 150)), draw.choice(names))
            for place in range(size)
        }
        waiting, aborted, done = list(requests), set(), {}
        while waiting or engine.has_unfinished_requests():
            for _ in range(min(len(waiting), draw.randint(0, 6))):
                key = waiting.pop()
                ids, task = requests[key]
                engine.add_request(key, {"prompt_token_ids": ids}, params(task, draw.randint(1, 40)))
                aborted |= {key} if draw.random() < 0.15 else set()
            done |= {output.request_id: message(output) for output in engine.step() if output.finished}
            if draw.random() < 0.3:
                engine.abort_request([key for key in aborted if key not in done])
        kept = {key: outcome for key, outcome in done.items() if key not in aborted}
        return [
            {"prompt": requests[key][0], "task": requests[key][1], **outcome} for key, outcome in kept.items()
        ]

    def step(self, kind, *given):
        try:
            return getattr(self, kind)(*given)
        except (I2CLError, ValueError, RuntimeError) as error:
            return {"error": str(error)}

    def counted(self):
        return {metric.name: metric.value for metric in self.llm.get_metrics() if metric.name in COUNTED}


def lose_tables(worker):
    for sublayer in worker.model_runner.model.i2cl_tables.sublayers:
        sublayer.i2cl_rows.fill_(7.0)
        sublayer.i2cl_scales.fill_(7.0)


def spoiled(worker, rank):
    tables, ranks = worker.model_runner.model.i2cl_tables, torch.distributed.get_rank()

    def write(*_):
        raise RuntimeError("no memory")

    if ranks == rank:
        tables.write = write
    elif "write" in vars(tables):
        del tables.write


def params(task, new):
    extra = {} if task is None else {"i2cl": task}
    return SamplingParams(max_tokens=new, temperature=0.0, logprobs=1, ignore_eos=True, extra_args=extra)


def message(output):
    ids = list(output.outputs[0].token_ids)
    steps = zip(output.outputs[0].logprobs, ids, strict=True)
    values = [step[token].logprob for step, token in steps]
    return {"ids": ids, "logprobs": values, "cached": output.num_cached_tokens}


def main(job):
    if job.get("unsalted"):
        Core.cache_salt = lambda self, salt, digest: salt
    if job.get("unedited"):
        plugin_worker.apply_edit = lambda sublayer, inputs, output: None
    engine = Engine(job)
    answers = [engine.step(*step) for step in job["steps"]]
    executor = engine.llm.llm_engine.engine_core.engine_core.model_executor
    runner = getattr(getattr(executor, "driver_worker", None), "worker", None)  # or one a rank
    v2 = None if runner is None else runner.use_v2_model_runner
    outcome = {"answers": answers, "counted": engine.counted(), "v2": v2}
    Path(job["result"]).write_text(json.dumps(outcome), encoding="utf-8")


def forked(job):
    """Run a job in a forked process, and return its exit status."""
    pid = os.fork()
    if pid:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    log = os.open(job["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.environ.update(job["env"])
    status = 1
    try:
        main(job)
        status = 0
    except BaseException:  # noqa: BLE001 - the end of a process
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


if __name__ == "__main__":
    for line in sys.stdin:
        print(forked(json.loads(line)), flush=True)
