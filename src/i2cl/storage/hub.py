"""Download from and upload to the Hugging Face hub.

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
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

from i2cl.errors import I2CLError, did_you_mean, first_line

# Base error of the client's HTTP library, which depends on the version of huggingface_hub.
_HTTP_ERROR: Any = HfHubHTTPError.__bases__[0]

_HUB_ERRORS = (OSError, ValueError, _HTTP_ERROR)
CONFIG = "config.json"  # a file that every model repository has
TIMEOUT_S = 10
_LOGIN_HINT = "log in with `hf auth login`, or set HF_TOKEN"
_STATUS_PROBLEMS = {
    401: f"the hub rejects the token: {_LOGIN_HINT}",
    403: f"the token has no write access there: use one that has and {_LOGIN_HINT}",
}


def download_failure(error: Exception) -> str:
    """Return why a download failed: the hub client hides a missing connection in LocalEntryNotFoundError."""
    if isinstance(error, HFValidationError):
        return "it is not the name of a hub repository"
    if isinstance(error, LocalEntryNotFoundError):
        return "the hub cannot be reached"
    return f"the hub says {type(error).__name__}"


def download(name: str, revision: str | None, files: Iterable[str]) -> Path:
    """Download files of an injection and return the folder of the snapshot.

    Raises:
        I2CLError: if the repository or revision does not exist, or the hub cannot be reached.
    """
    hint = "make one with `i2cl fit MODEL TASK -o FOLDER`"
    return _download("injection", hint, name, revision, allow_patterns=sorted(files))


def download_model(name: str, revision: str | None) -> Path:
    """Download the safetensors, configuration and tokenizer of a model, and return the snapshot's folder.

    Raises:
        I2CLError: if the repository or revision does not exist, or the hub cannot be reached.
    """
    return _download(
        "model",
        "give a folder or a hub id",
        name,
        revision,
        allow_patterns=["*.safetensors", "*.json", "*.jinja", "*.model", "*.txt"],
        ignore_patterns=["*/*", "consolidated*"],
    )


def _download(what: str, hint: str, name: str, revision: str | None, **patterns: Any) -> Path:
    try:
        return Path(snapshot_download(name, revision=revision, **patterns))
    except _HUB_ERRORS as error:
        at = f" at revision {revision!r}" if revision else ""
        raise I2CLError(
            f"no {what} at {name!r}{at}: no such folder, and {download_failure(error)}; {hint}"
        ) from None


def download_file(name: str) -> Path:
    """Download one file, given as owner/repository/file. Raises I2CLError if that fails."""
    owner, repository, file = (*name.split("/", 2), "", "")[:3]
    try:
        return Path(hf_hub_download(f"{owner}/{repository}", file))
    except _HUB_ERRORS as error:
        raise I2CLError(
            f"no file {name!r}: there is no such local file, and {download_failure(error)}; give a "
            "path, or owner/repository/file"
        ) from None


def upload(
    folder: Path, repo_id: str, message: str, *, private: bool, token: str | None, revision: str | None
) -> str:
    """Upload all files of a folder to a model repository, which is created if needed.

    See `i2cl.core.injection.Injection.push_to_hub` for the arguments and errors.

    Returns:
        URL of the commit.
    """
    if token is None and get_token() is None:
        raise I2CLError(f"cannot push to {repo_id!r}: you are not logged in: {_LOGIN_HINT}")
    api = HfApi(token=token)
    try:
        full_id = api.create_repo(repo_id, private=private, exist_ok=True).repo_id
        if revision is not None and not revision.startswith("refs/"):
            api.create_branch(full_id, branch=revision, exist_ok=True)
        commit = api.upload_folder(
            repo_id=full_id, folder_path=folder, revision=revision, commit_message=message
        )
    except _HUB_ERRORS as error:
        status = error.response.status_code if isinstance(error, HfHubHTTPError) else 0
        reason = f"{type(error).__name__} ({first_line(error).rstrip('.')})"
        problem = f"the hub says {reason}: correct the name, or try again later"
        raise I2CLError(f"cannot push to {repo_id!r}: {_STATUS_PROBLEMS.get(status, problem)}") from None
    return str(commit.commit_url)


def require_reachable(
    name: str, revision: str | None, others: tuple[str, ...], kinds: str = "a folder, a GGUF file"
) -> bool:
    """Check that the hub responds (even with an error), or that a model is cached.

    Without this check the client retries for about a minute per file.

    Args:
        name: hub id.
        revision: branch, tag or commit.
        others: names of models that do not come from the hub, for the error message.
        kinds: alternatives to a hub id, for the error message.

    Returns:
        True if the hub responds. If False, `cached_snapshot` returns the model.

    Raises:
        I2CLError: if the hub does not respond and the model is not cached.
    """
    try:
        cached = isinstance(try_to_load_from_cache(name, CONFIG, revision=revision), str)
        get_hf_file_metadata(hf_hub_url(name, CONFIG, revision=revision), timeout=TIMEOUT_S)
    except (HfHubHTTPError, ValueError):  # loading the model reports what is wrong with the name
        return True
    except _HUB_ERRORS as error:
        if cached:
            return False
        hint = did_you_mean(name, others)
        raise I2CLError(
            f"model {name!r} is not a folder and not in the hub's cache, and the hub does not respond "
            f"({first_line(error)}): {hint}give {kinds} or {' or '.join(map(repr, others))}, or go online"
        ) from None
    return True


def cached_snapshot(name: str, revision: str | None) -> str:
    """Return the folder of a cached snapshot, without contacting the hub."""
    return snapshot_download(name, revision=revision, local_files_only=True)
