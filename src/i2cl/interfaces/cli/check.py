"""`i2cl check`."""

import math
from typing import Annotated, Any

import typer

from i2cl.errors import I2CLError
from i2cl.interfaces.cli import console, load, options
from i2cl.interfaces.cli.options import ModelOptions, opt


@options.expanded
def check(
    model: options.Model,
    *,
    layers: str | None = opt(None, "Module path of the blocks in the base model."),
    attention: str | None = opt(None, "Module path, in a block, of the attention output."),
    mlp: str | None = opt(None, "Module path, in a block, of the MLP output."),
    loading: Annotated[ModelOptions, ("device", "dtype", "revision", "trust_remote_code")],
    json: options.Json = False,
) -> None:
    """Check that i2cl supports a model.

    Exit code 1 unless every block adds exactly its attention and MLP outputs to the residual stream.
    """
    load.require_model(model)
    if (layers or attention or mlp) and not (layers and attention and mlp):
        raise I2CLError("--layers, --attention and --mlp belong together: give all three")
    from i2cl.models.architectures import Architecture

    given = None
    if layers and attention and mlp:
        given = Architecture(model_type="custom", layers=layers, attention=attention, mlp=mlp)
    decoder = load.decoder(model, loading, given)
    identity = decoder.residual_identity
    if math.isnan(identity.worst):
        decoder.require_identity()  # raises an error that names what overflows
    record: dict[str, Any] = {"model": model, "model_type": decoder.model.config.model_type}
    record |= {"layers": decoder.layers, "d_model": decoder.d_model, "context": decoder.max_length}
    record |= {"attention": decoder.architecture.attention, "mlp": decoder.architecture.mlp}
    record |= {"worst_error": identity.worst, "passed": identity.passed}
    console.answer(record, "\n".join(f"{name:12} {value}" for name, value in record.items()), as_json=json)
    if not identity.passed:
        raise typer.Exit(1)
