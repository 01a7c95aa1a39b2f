"""File names in the folder of a saved injection."""

from pathlib import Path

TENSORS = "injection.safetensors"
DESCRIPTION = "injection.json"
CARD = "README.md"
EXAMPLES = "examples.jsonl"  # the rows of the fit, only if the user asked for it
FILES = frozenset({TENSORS, DESCRIPTION})  # needed for loading; the card is not


def own_files(folder: Path) -> frozenset[str]:
    """Return the files that saving an injection may replace: optional ones only if an injection is there."""
    return FILES | {CARD, EXAMPLES} if (folder / DESCRIPTION).is_file() else FILES
