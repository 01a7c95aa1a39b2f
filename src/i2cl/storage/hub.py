"""The Hugging Face hub: an artefact's folder down from it, or up to it, and single files down.

Source: https://huggingface.co/docs/huggingface_hub/guides/download and .../guides/upload.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from huggingface_hub import (
    HfApi,
    get_hf_file_metadata,
    get_token,
    hf_hub_download,
    hf_hub_url,
    snapshot_download,
    try_to_load_from_cache,
)
from huggingface_hub.errors import HfHubHTTPError

from i2cl.errors import I2CLError, did_you_mean, first_line

# The base error of the client's HTTP library, which depends on the client's version.
_HTTP_ERROR: Any = HfHubHTTPError.__bases__[0]

_FAILURES = (OSError, ValueError, _HTTP_ERROR)
CONFIG = "config.json"  # name of the file that every model has
SECONDS = 10  # that the hub has to answer
_LOGIN = "log in with `hf auth login`, or set HF_TOKEN"


def download(name: str, revision: str | None, files: Iterable[str]) -> Path:
    """The folder of a repository's snapshot, with these files of it. Raises I2CLError if there is no such
    repository or revision, or the hub cannot be reached.
    """
    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=sorted(files)))
    except _FAILURES as error:
        at = f" at revision {revision!r}" if revision else ""
        raise I2CLError(
            f"no injection at {name!r}{at}: no such folder, and the hub says {type(error).__name__}; "
            "make one with `i2cl fit MODEL TASK -o FOLDER`"
        ) from None


def download_file(name: str) -> Path:
    """One file, as owner/repository/file. Raises I2CLError if there is none, or the hub does not answer."""
    owner, _, rest = name.partition("/")
    repository, _, file = rest.partition("/")
    try:
        return Path(hf_hub_download(f"{owner}/{repository}", file))
    except _FAILURES as error:
        raise I2CLError(
            f"no file {name!r}: it is not here, and the hub says {type(error).__name__}; give a path, or "
            "owner/repository/file"
        ) from None


def upload(
    folder: Path, repo_id: str, message: str, *, private: bool, token: str | None, revision: str | None
) -> str:
    """Put all of a folder's files into a model repository, made if it is not there: the commit's address.
    See `i2cl.core.injection.Injection.push_to_hub` for the rest, and for what it raises.
    """
    if token is None and get_token() is None:
        raise I2CLError(f"cannot push to {repo_id!r}: you are not logged in: {_LOGIN}")
    api = HfApi(token=token)
    try:
        name = api.create_repo(repo_id, private=private, exist_ok=True).repo_id
        if revision is not None and not revision.startswith("refs/"):
            api.create_branch(name, branch=revision, exist_ok=True)
        where: dict[str, Any] = {"repo_id": name, "folder_path": folder, "revision": revision}
        done = api.upload_folder(**where, commit_message=message)
    except _FAILURES as error:
        raise I2CLError(f"cannot push to {repo_id!r}: {_reason(error)}") from None
    return str(done.commit_url)


def _reason(error: Exception) -> str:
    """What went wrong in a few words, and the cure."""
    status = error.response.status_code if isinstance(error, HfHubHTTPError) else None
    if status == 401:
        return f"the hub does not know this token: {_LOGIN}"
    if status == 403:
        return f"the token may not write there: take one with write access and {_LOGIN}"
    answer = f"the hub says {type(error).__name__} ({first_line(error).rstrip('.')})"
    return f"{answer}: correct the name, or try again later"


def require_reachable(
    name: str, revision: str | None, others: tuple[str, ...], kinds: str = "a folder, a GGUF file"
) -> bool:
    """Check that a model is in the hub's cache, or that the hub answers, whatever it says.

    Without this check the client retries for about a minute per file.

    Args:
        name: hub id.
        revision: branch, tag or commit.
        others: names that mean a model without the hub.
        kinds: what else can be given.

    Returns:
        Whether the hub answers. If not, `cached_snapshot` has the model.

    Raises:
        I2CLError: if the hub does not answer and the model is not cached.
    """
    try:
        cached = isinstance(try_to_load_from_cache(name, CONFIG, revision=revision), str)
        get_hf_file_metadata(hf_hub_url(name, CONFIG, revision=revision), timeout=SECONDS)
    except (HfHubHTTPError, ValueError):  # loading tells what is wrong with the name
        return True
    except _FAILURES as error:
        if cached:
            return False
        hint = did_you_mean(name, others)
        what = "is no folder and not in the cache of the hub, which does not answer"
        cure = f"{hint}give {kinds} or {' or '.join(map(repr, others))}, or go online"
        raise I2CLError(f"model {name!r} {what} ({first_line(error)}): {cure}") from None
    return True


def cached_snapshot(name: str, revision: str | None) -> str:
    """Return the folder of a cached snapshot, without asking the hub."""
    return snapshot_download(name, revision=revision, local_files_only=True)
