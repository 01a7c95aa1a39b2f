"""Load two replicas of Ray Serve, and kill one of them: every request must be answered.

    python scripts/fuzz_ray.py

Needs the extra ``ray``. Exit code 1 if an answer was lost or wrong.
"""

import json
import os
import signal
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from fuzz_serve import ROOT, TEXTS, artefacts, started
from i2cl import Decoder
from i2cl.interfaces.server.client import Client, ServerError
from i2cl.interfaces.server.ray_serve import deployment

REQUESTS = 600
"""Number of requests, from eight concurrent clients; a replica is killed after a third of them."""


def load() -> Counter[str]:
    """Compare answers under load with the library's; clients retry when a replica is killed."""
    import ray
    from ray import serve

    result: Counter[str] = Counter()
    with TemporaryDirectory() as scratch:
        (injection,) = artefacts(Path(scratch), 1)
        folder = Path(scratch) / "tasks"
        program, client = started(folder)
        client.upload("a", Path(scratch) / "0")
        os.kill(program.process.pid, signal.SIGTERM)
        program.wait()
        texts = TEXTS[:20]
        right = injection.log_probs(Decoder.from_pretrained("reference"), texts).softmax(-1)
        paths = os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
        runtime = {"env_vars": {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}}
        ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False, runtime_env=runtime)
        serve.run(deployment("reference", folder, replicas=2))
        client = Client("http://127.0.0.1:8000", retries=20)
        replicas = _processes("ServeReplica")
        result["replicas"] = len(replicas)

        def ask(number: int) -> str:
            if number == REQUESTS // 3:
                os.kill(replicas[0], signal.SIGKILL)
            try:
                (answer,) = client.classify("a", [texts[number % 20]])
            except ServerError as error:
                return f"lost requests: status {error.status}"
            away = torch.tensor(list(answer.probabilities.values())).sub(right[number % 20]).abs().max()
            return "answers" if away < 1e-5 else "wrong answers"

        with ThreadPoolExecutor(8) as threads:
            result.update(threads.map(ask, range(REQUESTS)))
        serve.shutdown()
        ray.shutdown()
    result["lost requests"] = REQUESTS - result["answers"] - result["wrong answers"]
    result["missing replicas"] = 2 - result["replicas"]
    return result


def _processes(word: str) -> list[int]:
    """Return the descendants of this process whose command line contains a word."""
    matches, parents = [], {}
    for path in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            state = (path / "stat").read_text(encoding="utf-8", errors="replace")
            parents[int(path.name)] = int(state.rpartition(")")[2].split()[1])
            if word in (path / "cmdline").read_text(encoding="utf-8", errors="replace"):
                matches.append(int(path.name))

    def below(pid: int) -> bool:
        return pid == os.getpid() or (pid in parents and below(parents[pid]))

    return [pid for pid in matches if below(pid)]


def main() -> None:
    """Run the load, and print the counts."""
    torch.set_num_threads(1)
    result = load()
    print(json.dumps(dict(result), indent=1), flush=True)
    sys.exit(any(result[name] for name in ("lost requests", "wrong answers", "missing replicas")))


if __name__ == "__main__":
    main()
