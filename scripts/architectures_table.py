"""Print docs/architectures.md: what is known of each model type.

Usage: python scripts/architectures_table.py > docs/architectures.md
"""

from i2cl.architectures import ARCHITECTURES, Architecture
from i2cl.export.families import FAMILIES, REFUSED

HEAD = """# Model types

Printed by `python scripts/architectures_table.py`. *Writers* are the two modules of a block that write to
its residual stream. *Packs*: several short queries share one row of a batch. *Fold*: how `i2cl export` puts
an injection into the weights ([export.md](export.md)): *in place* keeps the model type; *as llama* writes a
Llama that computes the same, and is refused where the config has what Llama lacks: a sliding window shorter
than the context, or rotary embeddings on part of a head.

| model type | attention writer | MLP writer | packs | fold |
|---|---|---|---|---|"""


def folding(model_type: str) -> str:
    """How it is folded, in words."""
    if model_type in REFUSED:
        return f"no: {REFUSED[model_type]}"
    row = FAMILIES[model_type]
    if row.target:
        return f"as {row.target}"
    return "in place, both constants in one bias" if row.joint else "in place"


def line(row: Architecture) -> str:
    """A row of the table."""
    packs = "yes" if row.packs else "no"
    kind = row.model_type
    return f"| {kind} | `{row.attention}` | `{row.mlp}` | {packs} | {folding(kind)} |"


def page() -> str:
    """The whole page."""
    return "\n".join([HEAD, *(line(row) for row in ARCHITECTURES.values()), ""])


if __name__ == "__main__":
    print(page(), end="")
