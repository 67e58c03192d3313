"""What a checkpoint says about itself: config.json, read as JSON.

transformers has written the same facts under different names over the years (`torch_dtype` and
`dtype`, `rope_theta` and `rope_parameters`); `ModelConfig` is the one form the rest of the project
sees. A fact that would change the answer is either understood or refused by name, never ignored.
"""

from dataclasses import dataclass
from pathlib import Path

from nanovllm.utils.model_folder import eos_token_ids, read_json

_MAX_FLOAT = 1e38  # of rope_theta and epsilons: they are used in float32
_DTYPES = ("bfloat16", "float16", "float32")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """The facts of a decoder-only checkpoint that the engine and the network need."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int  # need not be hidden_size / num_attention_heads
    rms_norm_eps: float
    rope_theta: float
    max_position_embeddings: int  # tokens
    tie_word_embeddings: bool
    attention_bias: bool
    dtype: str  # of the checkpoint: bfloat16, float16 or float32
    eos_token_ids: tuple[int, ...]

    @classmethod
    def from_dict(cls, fields: dict[str, object]) -> "ModelConfig":
        """Normalise the fields of a config.json, as `read_config` returns them.

        Raises:
            ValueError: A field is missing or out of range, or the checkpoint asks for something
                this project doesn't do.
        """
        _refuse_unsupported(fields)
        num_heads = _int(fields, "num_attention_heads", maximum=4096)
        num_kv_heads = _int(fields, "num_key_value_heads", num_heads, maximum=4096)
        if num_heads % num_kv_heads:
            raise ValueError(
                f"config.json: num_attention_heads {num_heads} is no multiple of "
                f"num_key_value_heads {num_kv_heads}"
            )
        hidden_size = _int(fields, "hidden_size", maximum=2**20)
        head_dim = _int(fields, "head_dim", hidden_size // num_heads, maximum=1024)
        if head_dim % 2:
            raise ValueError(f"config.json: head_dim is {head_dim}, rotary embedding needs it even")
        return cls(
            architecture=architecture_of(fields),
            vocab_size=_int(fields, "vocab_size", maximum=2**24),
            hidden_size=hidden_size,
            intermediate_size=_int(fields, "intermediate_size", maximum=2**22),
            num_hidden_layers=_int(fields, "num_hidden_layers", maximum=4096),
            num_attention_heads=num_heads,
            num_key_value_heads=num_kv_heads,
            head_dim=head_dim,
            rms_norm_eps=_positive(fields, "rms_norm_eps", 1e-6),
            rope_theta=_rope_theta(fields),
            max_position_embeddings=_int(fields, "max_position_embeddings", maximum=2**24),
            tie_word_embeddings=_bool(fields, "tie_word_embeddings", False),
            attention_bias=_bool(fields, "attention_bias", False),
            dtype=_dtype(fields),
            eos_token_ids=eos_token_ids("config.json", fields),
        )

    @property
    def layer_matrices(self) -> list[tuple[int, int]]:
        """(in, out) of the four products of a layer: qkv, o, gate and up, down."""
        q_width = self.num_attention_heads * self.head_dim
        kv_width = self.num_key_value_heads * self.head_dim
        return [
            (self.hidden_size, q_width + 2 * kv_width),
            (q_width, self.hidden_size),
            (self.hidden_size, 2 * self.intermediate_size),
            (self.intermediate_size, self.hidden_size),
        ]

    @property
    def num_layer_weights(self) -> int:
        """Elements of all layers' matrices."""
        return self.num_hidden_layers * sum(i * o for i, o in self.layer_matrices)


def read_config(folder: Path) -> dict[str, object]:
    """The fields of `folder`/config.json as they stand.

    Raises:
        ValueError: The file is missing or holds no JSON object.
    """
    path = folder / "config.json"
    if not path.exists():
        raise ValueError(f"{path} is missing: {folder} is no checkpoint folder")
    return read_json(path)


def architecture_of(fields: dict[str, object]) -> str:
    """The class that the checkpoint's weights belong to."""
    names = fields.get("architectures")
    if not isinstance(names, list) or len(names) != 1 or not isinstance(names[0], str):
        raise ValueError(f"config.json: architectures must name one class, not {names!r}")
    return names[0]


def _refuse_unsupported(fields: dict[str, object]) -> None:
    if fields.get("quantization_config"):
        raise ValueError("config.json: quantization_config: quantized checkpoints don't run here")
    if fields.get("use_sliding_window"):
        raise ValueError("config.json: use_sliding_window: sliding-window attention doesn't run")
    layer_types = fields.get("layer_types") or []
    kinds = layer_types if isinstance(layer_types, list) else [layer_types]
    if any(kind != "full_attention" for kind in kinds):
        raise ValueError(f"config.json: layer_types is {kinds}, only 'full_attention' runs here")
    activation = fields.get("hidden_act", "silu")
    if activation != "silu":
        raise ValueError(f"config.json: hidden_act is {activation!r}, only 'silu' runs here")


def _rope_theta(fields: dict[str, object]) -> float:
    """The rotary base, from any of the places transformers 4.51 to 5.x writes it.

    Raises:
        ValueError: It is nowhere, or two places disagree, or a real scaling is asked for.
    """
    found: dict[str, float] = {}
    if fields.get("rope_theta") is not None:
        found["rope_theta"] = _positive(fields, "rope_theta")
    _refuse_partial_rotation(fields)
    for name in ("rope_parameters", "rope_scaling"):
        nested = fields.get(name)
        if nested is None:
            continue
        if not isinstance(nested, dict):
            raise ValueError(f"config.json: {name} must be an object, not {nested!r}")
        _refuse_rope_scaling(name, nested)
        _refuse_partial_rotation(nested)
        if nested.get("rope_theta") is not None:
            found[f"{name}.rope_theta"] = _positive(nested, "rope_theta")
    if not found:
        raise ValueError("config.json has no rope_theta (looked in rope_parameters, rope_scaling)")
    if len(set(found.values())) > 1:
        raise ValueError(f"config.json: rope_theta is given twice and differs: {found}")
    return next(iter(found.values()))


def _refuse_rope_scaling(name: str, nested: dict[str, object]) -> None:
    kinds = {nested[key] for key in ("rope_type", "type") if isinstance(nested.get(key), str)}
    kinds -= {"default"}
    has_factor = nested.get("factor") not in (None, 1, 1.0)
    if kinds or has_factor:
        kind = ", ".join(sorted(map(repr, kinds))) or f"factor {nested['factor']!r}"
        raise ValueError(f"config.json: rope scaling {kind} ({name}) is not supported")


def _refuse_partial_rotation(fields: dict[str, object]) -> None:
    factor = fields.get("partial_rotary_factor")
    if factor not in (None, 1, 1.0):
        raise ValueError(f"config.json: partial_rotary_factor is {factor!r}, only 1.0 runs here")


def _dtype(fields: dict[str, object]) -> str:
    value = fields.get("dtype")
    if value is None:
        value = fields.get("torch_dtype")
    # A config object made in Python may hold a torch.dtype, which prints as torch.bfloat16.
    name = str(value).removeprefix("torch.")
    if value is None:
        return "float32"  # what transformers assumes where nothing is written
    if name not in _DTYPES:
        raise ValueError(f"config.json: dtype is {value!r}, it must be one of {', '.join(_DTYPES)}")
    return name


def _int(fields: dict[str, object], name: str, default: int | None = None, *, maximum: int) -> int:
    value = fields.get(name)
    if value is None:
        value = default
    if value is None:
        raise ValueError(f"config.json: {name} is missing")
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= maximum:
        raise ValueError(f"config.json: {name} is {value!r}, it must be an int in 1..{maximum}")
    return int(value)


def _positive(fields: dict[str, object], name: str, default: float | None = None) -> float:
    value = fields.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < _MAX_FLOAT:
        raise ValueError(f"config.json: {name} is {value!r}, it must be a positive number")
    return float(value)


def _bool(fields: dict[str, object], name: str, default: bool) -> bool:
    value = fields.get(name, default)
    if not isinstance(value, bool):
        raise ValueError(f"config.json: {name} is {value!r}, it must be true or false")
    return value
