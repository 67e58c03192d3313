"""Checkpoint files to parameters.

A rank reads only the slices it keeps: a safetensors file is mapped into memory, and the parameter's
`weight_loader` asks the tensor for the part it wants. Weights are only ever read from safetensors,
which hold numbers and nothing that could be executed.

Every parameter is written exactly once, or loading ends with an error that names it.
"""

import json
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

# Anything else is a quantized weight without the scales that give it meaning.
_FLOAT_DTYPES = ("BF16", "F16", "F32", "F64")
# In some checkpoints although they are computed, not learned.
_DERIVED_SUFFIXES = ("rotary_emb.inv_freq",)


class LoadedTensor(Protocol):
    """A checkpoint tensor whose parts can be read one by one; torch.Tensor is one."""

    @property
    def shape(self) -> torch.Size: ...

    def narrow(self, dim: int, start: int, length: int) -> torch.Tensor: ...


class FileTensor:
    """A tensor in an open safetensors file, read part by part."""

    def __init__(self, tensor_slice: object) -> None:
        self._slice = tensor_slice

    @property
    def shape(self) -> torch.Size:
        return torch.Size(self._slice.get_shape())  # type: ignore[attr-defined]

    @property
    def dtype_name(self) -> str:
        """As in the file's header: BF16, F16, F32, I8, ..."""
        return str(self._slice.get_dtype())  # type: ignore[attr-defined]

    def narrow(self, dim: int, start: int, length: int) -> torch.Tensor:
        index = tuple(
            slice(start, start + length) if i == dim else slice(None)
            for i in range(len(self.shape))
        )
        with torch.device("cpu"):  # the caller's default device may be another
            return self._slice[index]  # type: ignore[index]


def find_checkpoint_files(folder: Path) -> list[Path]:
    """The safetensors files of a checkpoint: those of its index, or all in the folder.

    Raises:
        ValueError: There are none, or the index is damaged or names one that is missing.
    """
    index_path = folder / "model.safetensors.index.json"
    if index_path.is_file():
        return _files_of_index(index_path)
    files = sorted(path for path in folder.glob("*.safetensors") if path.is_file())
    if not files:
        hint = ": convert its .bin files first" if any(folder.glob("*.bin")) else ""
        raise ValueError(f"{folder} holds no .safetensors file{hint}")
    return files


def _files_of_index(index_path: Path) -> list[Path]:
    try:
        names = set(json.loads(index_path.read_text(encoding="utf-8"))["weight_map"].values())
        files = [index_path.parent / name for name in sorted(names)]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{index_path} is damaged: {error!r}") from error
    for path in files:
        if path.parent != index_path.parent:
            raise ValueError(f"{index_path} names {path}, which is outside the folder")
        if not path.is_file():
            raise ValueError(f"{index_path} names {path.name}, which is missing")
    return files


def iterate_checkpoint(files: Iterable[Path]) -> Iterator[tuple[str, LoadedTensor]]:
    """Yield every tensor of the files by name; valid until the next one is asked for.

    Raises:
        ValueError: A file is no safetensors file or is cut short.
    """
    for path in files:
        try:
            with safe_open(path, framework="pt", device="cpu") as file:
                for name in file.keys():  # noqa: SIM118 - the file object is no dict
                    yield name, _open_tensor(name, file.get_slice(name))
        except (SafetensorError, OSError) as error:
            reason = str(error)
            if _is_lfs_pointer(path):
                reason = "it is a Git LFS pointer, git lfs pull gets the file"
            raise ValueError(f"{path} can't be read as safetensors: {reason}") from error


def _is_lfs_pointer(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            return file.read(24).startswith(b"version https://git-lfs")
    except OSError:
        return False


def _open_tensor(name: str, tensor_slice: object) -> FileTensor:
    tensor = FileTensor(tensor_slice)
    if tensor.dtype_name not in _FLOAT_DTYPES:
        raise ValueError(
            f"checkpoint tensor {name} holds {tensor.dtype_name}, expected one of "
            f"{', '.join(_FLOAT_DTYPES)}: quantized checkpoints don't run here"
        )
    return tensor


def load_model(model: nn.Module, folder: Path) -> None:
    """Write the checkpoint in `folder` into `model`'s parameters."""
    load_weights(model, iterate_checkpoint(find_checkpoint_files(folder)))


def load_weights(model: nn.Module, weights: Iterable[tuple[str, LoadedTensor]]) -> None:
    """Write named checkpoint tensors into `model`'s parameters.

    Args:
        model: Its `packed_modules_mapping` says which tensors share a parameter.
        weights: Names as in the checkpoint; order doesn't matter.

    Raises:
        ValueError: A tensor has no parameter or another shape, or a parameter is written twice or
            never; the text names it.
    """
    params = dict(model.named_parameters())
    mapping: dict[str, tuple[str, Hashable]] = model.packed_modules_mapping  # type: ignore[assignment]
    written: Counter[tuple[str, Hashable]] = Counter()
    for name, tensor in weights:
        target = _find_target(name, params, mapping)
        if target is None:
            continue
        param_name, shard_id = target
        if written[param_name, shard_id]:
            raise ValueError(f"parameter {param_name} is written twice: {name} is a duplicate")
        try:
            params[param_name].weight_loader(params[param_name], tensor, shard_id)  # type: ignore[attr-defined]
        except ValueError as error:
            raise ValueError(f"checkpoint tensor {name}: {error}") from error
        written[param_name, shard_id] += 1
    _check_complete(params, mapping, written)


def update_weights(
    model: nn.Module, weights: Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]]
) -> None:
    """Overwrite parameters with named tensors in the checkpoint's form, all of them or some.

    Raises:
        ValueError, TypeError: See `checked_weights`.
    """
    params = dict(model.named_parameters())
    for item in checked_weights(model, weights):
        _write(model, params, item)


def checked_weights(
    model: nn.Module, weights: Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield named tensors, each to be written before the next is asked for.

    Every tensor is checked before it is yielded. A dict, list or tuple is checked as a whole before
    anything is; of an iterator, which may produce more than memory holds, what came before a
    mistake has been written.

    Args:
        model: One rank's network; it may be without memory (on the meta device).
        weights: Names and whole tensors as in the checkpoint.

    Raises:
        ValueError: A tensor has no parameter or another shape; the text names it. Or there is none.
        TypeError: Something else than pairs of a name and a floating-point tensor.
    """
    if isinstance(weights, str) or not isinstance(weights, Iterable):
        raise TypeError(
            "weights must be a mapping or an iterable of (name, tensor), not "
            f"{type(weights).__name__}: pass what safetensors.torch.load_file() or a module's "
            "state_dict() returns"
        )
    if isinstance(weights, Mapping):
        weights = list(weights.items())
    params = dict(model.named_parameters())  # once: it walks all modules, which takes a millisecond
    if isinstance(weights, list | tuple):
        for item in weights:
            _write(model, params, item, is_rehearsal=True)
    num_written = 0
    for item in weights:
        try:
            _write(model, params, item, is_rehearsal=True)
        except (ValueError, TypeError) as error:
            raise type(error)(f"{error} ({num_written} tensors before it are written)") from error
        yield item
        num_written += 1
    if num_written == 0:
        raise ValueError("no weights were given: the mapping is empty, or the iterator used up")


def _write(
    model: nn.Module,
    params: Mapping[str, nn.Parameter],
    item: object,
    *,
    is_rehearsal: bool = False,
) -> None:
    """Write one tensor to where it belongs; a rehearsal does the same to tensors without memory."""
    name, tensor = _named_tensor(item)
    if _is_tied_copy(name, params):
        name = "model.embed_tokens.weight"  # one parameter under two names
    if not tensor.is_floating_point():
        raise TypeError(f"weight {name} must be floating point, not {tensor.dtype}")
    if tensor.is_meta or tensor.is_nested or tensor.layout is not torch.strided:
        raise TypeError(f"weight {name} must be a dense tensor with memory behind it")
    target = _find_target(name, params, model.packed_modules_mapping)  # type: ignore[arg-type]
    if target is None:
        return
    param = params[target.param_name]
    load = param.weight_loader  # type: ignore[attr-defined]
    if is_rehearsal:
        tensor = torch.empty(tensor.shape, device="meta")
        param = nn.Parameter(torch.empty_like(param, device="meta"), requires_grad=False)
    try:
        load(param, tensor, target.shard_id)
    except ValueError as error:
        raise ValueError(f"weight {name}: {error}") from error


def _named_tensor(item: object) -> tuple[str, torch.Tensor]:
    match item:
        case (str() as name, torch.Tensor() as tensor):
            return name, tensor
        case (str() as name, value):
            raise TypeError(f"weight {name} must be a torch.Tensor, not {type(value).__name__}")
    parts = item if isinstance(item, tuple) else (item,)
    kinds = ", ".join(type(part).__name__ for part in parts)
    raise TypeError(f"weights must be pairs of a name and a tensor, not ({kinds})")


def initialize_dummy(model: nn.Module, seed: int = 0) -> None:
    """Fill the parameters with random numbers, on their device: the shape of a model, no files."""
    for i, param in enumerate(model.parameters()):
        if param.dim() == 1:
            param.data.fill_(1.0)
            continue
        generator = torch.Generator(device=param.device).manual_seed(seed + i)
        param.data.normal_(0.0, 0.02, generator=generator)


def _is_tied_copy(name: str, params: Mapping[str, nn.Parameter]) -> bool:
    """Whether `name` repeats a weight that this model shares: named_parameters lists those once."""
    return name == "lm_head.weight" and name not in params


class _Target(NamedTuple):
    param_name: str
    shard_id: Hashable | None  # which of the tensors that share the parameter; None: it has one


def _find_target(
    name: str, params: Mapping[str, nn.Parameter], mapping: Mapping[str, tuple[str, Hashable]]
) -> _Target | None:
    """Where a checkpoint tensor goes; None if this model computes or shares it.

    Raises:
        ValueError: It has no parameter.
    """
    if name.endswith(_DERIVED_SUFFIXES) or _is_tied_copy(name, params):
        return None
    target = _target_of(name, mapping)
    is_part = target.shard_id is not None or not _is_packed(target.param_name, mapping)
    if target.param_name not in params or not is_part:
        raise ValueError(f"checkpoint tensor {name} has no parameter in this model")
    return target


def _target_of(name: str, mapping: Mapping[str, tuple[str, Hashable]]) -> _Target:
    """Parameter that a checkpoint tensor goes into, and the shard of it."""
    parts = name.split(".")
    for i, part in enumerate(parts):
        if part in mapping:
            packed_name, shard_id = mapping[part]
            return _Target(".".join([*parts[:i], packed_name, *parts[i + 1 :]]), shard_id)
    return _Target(name, None)


def _is_packed(param_name: str, mapping: Mapping[str, tuple[str, Hashable]]) -> bool:
    """Whether a parameter is filled from several checkpoint tensors, never from one of its name."""
    return any(packed_name in param_name.split(".") for packed_name, _ in mapping.values())


def _check_complete(
    params: dict[str, nn.Parameter],
    mapping: dict[str, tuple[str, Hashable]],
    written: Counter[tuple[str, Hashable]],
) -> None:
    shards_of: dict[str, list[Hashable]] = {}
    for packed_name, shard_id in mapping.values():
        shards_of.setdefault(packed_name, []).append(shard_id)
    missing = []
    for name in params:
        module_name = name.split(".")[-2] if "." in name else name
        for shard_id in shards_of.get(module_name, [None]):
            if not written[name, shard_id]:
                missing.append(name if shard_id is None else f"{name} (part {shard_id!r})")
    if missing:
        more = f" and {len(missing) - 5} more" if len(missing) > 5 else ""
        raise ValueError(f"the checkpoint doesn't hold {', '.join(missing[:5])}{more}")
