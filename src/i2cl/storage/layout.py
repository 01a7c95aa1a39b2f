"""File names in the folder of a saved injection."""

from pathlib import Path

TENSORS = "injection.safetensors"
DESCRIPTION = "injection.json"
CARD = "README.md"
FILES = frozenset({TENSORS, DESCRIPTION})  # needed for loading; the card is not


def own_files(folder: Path) -> frozenset[str]:
    """Return the files that saving an injection may replace. README.md only if an injection is there too."""
    return FILES | {CARD} if (folder / DESCRIPTION).is_file() else FILES
