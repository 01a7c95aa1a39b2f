"""The bundled reference model: its corpus, its tasks and its weights."""
