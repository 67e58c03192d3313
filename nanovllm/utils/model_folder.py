"""From what the user calls a model to a folder on this machine."""

from pathlib import Path

_WANTED_FILES = ("*.json", "*.safetensors", "*.jinja", "merges.txt", "vocab.txt", "*.model")


def resolve_model_folder(model: str) -> Path:
    """Return the folder of a checkpoint, given as a path or as an id on the Hugging Face hub.

    An id is looked up in the local cache and downloaded where the hub can be reached.

    Raises:
        ValueError: It is neither; the text says what is expected.
    """
    try:
        path = Path(model).expanduser()
        is_folder, is_file = path.is_dir(), path.is_file()
    except (OSError, RuntimeError) as error:  # no such user, a name that is too long
        raise ValueError(f"{model} is no path: {error}") from error
    if is_folder:
        return path
    if path.suffix == ".gguf" or is_file:
        raise ValueError(
            f"{model} is a file: expected a folder with config.json and .safetensors files "
            "(GGUF and single-file checkpoints don't run here)"
        )
    if model.startswith((".", "/", "~")) or model.count("/") != 1:
        raise ValueError(f"{model} is no folder: expected a checkpoint folder or a hub id")
    return _download(model)


def _download(repo_id: str) -> Path:
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(repo_id, allow_patterns=list(_WANTED_FILES)))
    except Exception as error:  # the hub client raises dozens of kinds, all of which mean this
        raise ValueError(
            f"{repo_id} is no local folder, isn't in the local cache and can't be downloaded "
            f"({type(error).__name__}): run `hf download {repo_id} --local-dir FOLDER` where the "
            "hub can be reached and pass the folder"
        ) from error
