"""From what the user calls a model to a folder on this machine, and the JSON files in it."""

import json
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


def read_json(path: Path) -> dict[str, object]:
    """Return the object in a JSON file, or an empty dict where there is no such file.

    Raises:
        ValueError: The file can't be read, isn't JSON or holds no object.
    """
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise ValueError(f"{path} can't be read: {error}") from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(fields, dict):
        raise ValueError(f"{path} must hold a JSON object, not {type(fields).__name__}")
    return fields


def eos_token_ids(file_name: str, fields: dict[str, object]) -> tuple[int, ...]:
    """Return the `eos_token_id` of such a file as ids: it may be one, a list, or absent.

    Raises:
        ValueError: It is anything else.
    """
    value = fields.get("eos_token_id")
    if value is None:
        return ()
    ids = value if isinstance(value, list) else [value]
    if any(isinstance(i, bool) or not isinstance(i, int) or i < 0 for i in ids):
        raise ValueError(f"{file_name}: eos_token_id must be an id or a list of ids, not {value!r}")
    return tuple(ids)


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
