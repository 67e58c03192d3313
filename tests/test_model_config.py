"""What config.json says under all its names, and what is refused by name."""

import json
from pathlib import Path

import pytest
import torch
from transformers import Qwen3Config

from nanovllm import LLM
from nanovllm.model_config import ModelConfig, read_config
from nanovllm.models import model_class

FIELDS: dict[str, object] = {
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 1000,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
}
THETA = 5e5


def read(**changes: object) -> ModelConfig:
    return ModelConfig.from_dict({**FIELDS, "rope_theta": THETA, **changes})


def read_without_theta(**changes: object) -> ModelConfig:
    return ModelConfig.from_dict({**FIELDS, **changes})


@pytest.mark.parametrize(
    "places",
    [
        {"rope_theta": THETA},
        {"rope_theta": THETA, "rope_scaling": None},
        {"rope_theta": int(THETA), "rope_scaling": {"rope_type": "default"}},
        {"rope_scaling": {"rope_theta": THETA, "rope_type": "default"}},
        {"rope_scaling": {"rope_theta": THETA, "type": "default"}},
        {"rope_scaling": {"rope_theta": THETA}},
        {"rope_parameters": {"rope_theta": THETA, "rope_type": "default"}},
        {"rope_parameters": {"rope_theta": THETA}, "rope_theta": None},
        {"rope_parameters": {"rope_theta": THETA, "rope_type": "default"}, "rope_theta": THETA},
        {"rope_parameters": None, "rope_theta": THETA, "partial_rotary_factor": 1.0},
    ],
)
def test_rope_theta_is_the_same_from_every_place(places: dict[str, object]) -> None:
    assert read_without_theta(**places).rope_theta == THETA


@pytest.mark.parametrize(
    "places", [{}, {"rope_parameters": {"rope_type": "default"}}, {"rope_theta": None}]
)
def test_missing_rope_theta_is_refused(places: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="no rope_theta.*rope_parameters"):
        read_without_theta(**places)


def test_two_rope_thetas_that_differ_is_refused() -> None:
    with pytest.raises(ValueError, match="given twice.*10000.*500000|given twice.*500000.*10000"):
        read(rope_parameters={"rope_theta": 1e4, "rope_type": "default"})


@pytest.mark.parametrize("place", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize("key", ["rope_type", "type"])
@pytest.mark.parametrize("kind", ["yarn", "llama3", "linear", "dynamic", "longrope", "mrope"])
def test_rope_scaling_is_refused_by_name(place: str, key: str, kind: str) -> None:
    with pytest.raises(ValueError, match=f"'{kind}'.*{place}.*not supported"):
        read(**{place: {key: kind, "factor": 4.0, "rope_theta": THETA}})


def test_rope_scaling_without_a_name_is_refused_by_its_factor() -> None:
    with pytest.raises(ValueError, match="factor 4.0"):
        read(rope_scaling={"factor": 4.0})
    with pytest.raises(ValueError, match="'yarn'"):  # the old name hidden behind the new one
        read(rope_scaling={"rope_type": "default", "type": "yarn"})


@pytest.mark.parametrize("kind", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("name", ["dtype", "torch_dtype"])
def test_dtype_is_read_under_both_names_and_as_torch_dtype(name: str, kind: str) -> None:
    assert read(**{name: kind}).dtype == kind
    assert read(**{name: f"torch.{kind}"}).dtype == kind
    assert read(**{name: getattr(torch, kind)}).dtype == kind
    assert read(**{"dtype": None, "torch_dtype": None, name: kind}).dtype == kind


def test_missing_dtype_is_float32_as_in_transformers() -> None:
    assert read().dtype == "float32"


def test_config_written_by_transformers_is_read(tmp_path: Path) -> None:
    config = Qwen3Config(
        vocab_size=1000,
        hidden_size=64,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        num_hidden_layers=2,
        tie_word_embeddings=True,
        architectures=["Qwen3ForCausalLM"],
    )
    config.save_pretrained(tmp_path)
    ours = ModelConfig.from_dict(read_config(tmp_path))
    assert (ours.head_dim, ours.num_key_value_heads, ours.tie_word_embeddings) == (32, 2, True)
    assert ours.rope_theta == 10000.0


def test_absent_fields_have_the_defaults_of_transformers() -> None:
    fields = {name: FIELDS[name] for name in FIELDS if name not in ("head_dim", "rms_norm_eps")}
    fields.pop("tie_word_embeddings")
    config = ModelConfig.from_dict({**fields, "rope_theta": THETA})
    assert config.rms_norm_eps == 1e-6
    assert not config.tie_word_embeddings
    assert not config.attention_bias


@pytest.mark.parametrize(("value", "ids"), [(None, ()), (7, (7,)), ([7, 9], (7, 9))])
def test_eos_token_id_is_an_int_or_a_list(value: object, ids: tuple[int, ...]) -> None:
    assert read(eos_token_id=value).eos_token_ids == ids


# refused

COUNTS = ["vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers"]
COUNTS += ["num_attention_heads", "num_key_value_heads", "head_dim", "max_position_embeddings"]


@pytest.mark.parametrize("name", COUNTS)
@pytest.mark.parametrize(
    "value", [0, -1, 2**31, 10**30, 1.5, "64", True, [64], {"a": 1}, float("nan"), 1e300]
)
def test_hostile_count_is_refused(name: str, value: object) -> None:
    with pytest.raises(ValueError, match=f"config.json: {name} is .*1\\.\\.|multiple|head_dim"):
        read(**{name: value})


@pytest.mark.parametrize(
    "name", [n for n in COUNTS if n not in ("head_dim", "num_key_value_heads")]
)
def test_missing_count_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"config.json: {name} is missing"):
        read(**{name: None})


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"rms_norm_eps": 0}, "rms_norm_eps is 0.*positive"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps"),
        ({"rms_norm_eps": "1e-6"}, "rms_norm_eps is '1e-6'"),
        ({"rope_theta": -1.0}, "rope_theta is -1.0"),
        ({"rope_theta": float("inf")}, "rope_theta is inf"),
        ({"rope_theta": 10**400}, "rope_theta"),
        ({"rope_theta": "1e6"}, "rope_theta is '1e6'"),
        ({"rope_scaling": "yarn"}, "rope_scaling must be an object, not 'yarn'"),
        ({"rope_parameters": []}, "rope_parameters must be an object"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
        ({"rope_scaling": {"partial_rotary_factor": 0.25}}, "partial_rotary_factor is 0.25"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings is 'yes'.*true or false"),
        ({"attention_bias": 1}, "attention_bias is 1"),
        ({"num_key_value_heads": 3}, "num_attention_heads 4.*num_key_value_heads 3"),
        ({"head_dim": 33}, "head_dim is 33.*even"),
        ({"dtype": "int8"}, "dtype is 'int8'.*bfloat16, float16, float32"),
        ({"torch_dtype": ["float32"]}, "dtype"),
        ({"eos_token_id": "</s>"}, "eos_token_id.*'</s>'"),
        ({"eos_token_id": [1, -1]}, "eos_token_id"),
        ({"architectures": None}, "architectures must name one class"),
        ({"architectures": []}, "architectures must name one class"),
        ({"architectures": [5]}, "architectures must name one class"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"use_sliding_window": True}, "use_sliding_window"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding_attention"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'.*'silu'"),
    ],
)
def test_hostile_field_is_refused(changes: dict[str, object], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        read(**changes)


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("", "not valid JSON"),
        ("{", "not valid JSON"),
        ("[1]", "must hold a JSON object, not list"),
        ("null", "must hold a JSON object"),
        ("[" * 100_000, "not valid JSON"),
        ('{"a":' * 100_000, "not valid JSON"),
        ('{"vocab_size": ' + "9" * 5000 + "}", "not valid JSON"),
        (b"\xff\xfe{}", "not valid JSON"),
    ],
)
def test_damaged_file_is_refused(tmp_path: Path, text: str | bytes, error: str) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ValueError, match=f"config.json.*{error}|config.json {error}"):
        ModelConfig.from_dict(read_config(tmp_path))
    with pytest.raises(ValueError, match="config.json"):
        LLM(str(tmp_path))


@pytest.mark.parametrize("text", ["{", "[1]", "[" * 100_000, '{"eos_token_id": "</s>"}'])
def test_damaged_generation_config_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**FIELDS, "rope_theta": THETA}))
    (tmp_path / "generation_config.json").write_text(text)
    with pytest.raises(ValueError, match="generation_config.json"):
        LLM(str(tmp_path), skip_tokenizer_init=True, load_format="dummy", device="cpu")


def test_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="config.json is missing.*no checkpoint folder"):
        LLM(str(tmp_path))
    (tmp_path / "config.json").mkdir()
    with pytest.raises(ValueError, match="config.json can't be read"):
        LLM(str(tmp_path))


@pytest.mark.parametrize("name", ["LlamaForCausalLM", "Qwen3MoeForCausalLM", "Qwen3Model"])
def test_other_architecture_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} is not supported.*Qwen3ForCausalLM"):
        model_class(name)
    # Before any field is read, since other architectures have fields of their own.
    (tmp_path / "config.json").write_text(json.dumps({"architectures": [name], "n_embd": 64}))
    with pytest.raises(ValueError, match=f"{name} is not supported.*Qwen3ForCausalLM"):
        LLM(str(tmp_path), skip_tokenizer_init=True)
