"""Whether the Hugging Face hub answers: its client tries again for a minute before it says that not."""

from huggingface_hub import get_hf_file_metadata, hf_hub_url, try_to_load_from_cache
from huggingface_hub.errors import HfHubHTTPError

from i2cl.errors import I2CLError, did_you_mean

CONFIG = "config.json"
SECONDS = 10
"""That the hub has to answer."""


def require_reachable(name: str, revision: str | None, others: tuple[str, ...]) -> None:
    """Go on only if a model of the hub is in the cache, or the hub answers, whatever it says.

    Args:
        name: hub id.
        revision: branch, tag or commit.
        others: names that mean a model without the hub.

    Raises:
        I2CLError: if it does not answer.
    """
    try:
        if isinstance(try_to_load_from_cache(name, CONFIG, revision=revision), str):
            return
        get_hf_file_metadata(hf_hub_url(name, CONFIG, revision=revision), timeout=SECONDS)
    except (HfHubHTTPError, ValueError):  # loading tells what is wrong with the name
        return
    except Exception as error:  # noqa: BLE001 - whatever the network raises
        hint = did_you_mean(name, others)
        cause = (str(error).splitlines() or [""])[0] or type(error).__name__
        raise I2CLError(
            f"model {name!r} is no folder and not in the cache of the hub, which does not answer ({cause}): "
            f"{hint}give a folder, a GGUF file or {' or '.join(map(repr, others))}, or go online"
        ) from None
