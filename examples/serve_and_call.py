"""Serve one model, fit a task over HTTP, and call it.

python examples/serve_and_call.py [MODEL]     # needs the extra serve
"""

import signal
import subprocess
import sys
from tempfile import TemporaryDirectory

from i2cl.interfaces.server.client import Client

EXAMPLES = [
    {"text": "a warm and funny film", "label": "positive"},
    {"text": "kind, and well played", "label": "positive"},
    {"text": "dull from start to end", "label": "negative"},
    {"text": "I left early", "label": "negative"},
]


def main(model: str = "reference") -> None:
    """Start `i2cl serve` on a free port, fit and query a task over HTTP, and stop the server."""
    with TemporaryDirectory() as folder:
        command = [sys.executable, "-c", "from i2cl.interfaces.cli import main; main()", "serve", model]
        command += ["--tasks", folder, "--port", "0"]
        server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        try:
            assert server.stdout is not None
            address = server.stdout.readline().split()[-1]  # "Serving reference at http://127.0.0.1:38049"
            client = Client(address)
            client.wait(client.fit("films", EXAMPLES, "Review: {text}\nSentiment: {label}"))
            (answer,) = client.classify("films", ["a cold night at the cinema"])
            print(answer.label, {label: round(value, 2) for label, value in answer.probabilities.items()})
            print([task["id"] for task in client.tasks()])
        finally:
            server.send_signal(signal.SIGTERM)  # running requests are answered first
            print("exit code", server.wait(timeout=60))


if __name__ == "__main__":
    main(*sys.argv[1:])
