"""Names of the files in an artefact's folder."""

from pathlib import Path

TENSORS = "injection.safetensors"
DESCRIPTION = "injection.json"
CARD = "README.md"
FILES = frozenset({TENSORS, DESCRIPTION})  # what is loaded; the card is for people


def own_files(folder: Path) -> frozenset[str]:
    """Return the files that saving an artefact may replace: a README.md only beside an artefact."""
    return FILES | {CARD} if (folder / DESCRIPTION).is_file() else FILES
