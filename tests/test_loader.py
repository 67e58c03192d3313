"""Every form of a checkpoint loads to the same model; every damage is an error that names it."""

import json
import os
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from conftest import MakeCheckpoint
from safetensors.torch import load_file, save_file
from torch import nn

from nanovllm import LLM, SamplingParams
from nanovllm.utils.loader import find_checkpoint_files, load_weights
from nanovllm.utils.model_folder import resolve_model_folder

TESTS = Path(__file__).resolve().parent
PROMPTS = [[1, 2, 3], list(range(40))]
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
Q_PROJ = "model.layers.0.self_attn.q_proj.weight"
Tensors = dict[str, torch.Tensor]


def open_llm(folder: Path, **options: object) -> LLM:
    defaults = {"device": "cpu", "skip_tokenizer_init": True, "max_model_len": 64}
    return LLM(str(folder), **{**defaults, **options})


def answers(folder: Path, **options: object) -> list[list[int]]:
    with open_llm(folder, **options) as llm:
        return [output.token_ids for output in llm.generate(PROMPTS, GREEDY, use_tqdm=False)]


@pytest.fixture
def copy(make_checkpoint: MakeCheckpoint, tmp_path: Path) -> Callable[..., Path]:
    """A checkpoint of its own for a test that changes it."""

    def make(**changes: object) -> Path:
        return Path(shutil.copytree(make_checkpoint(**changes), tmp_path / "model"))

    return make


def rewrite(folder: Path, change: Callable[[Tensors], object]) -> None:
    """Change the tensors of a single-file checkpoint."""
    tensors = load_file(folder / SINGLE)
    change(tensors)
    save_file(tensors, folder / SINGLE)


def change_config(folder: Path, **changes: object) -> None:
    """Set fields of config.json; None takes one away."""
    fields = json.loads((folder / "config.json").read_text()) | changes
    fields = {name: value for name, value in fields.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(fields))


# forms


@pytest.mark.parametrize("tied", [True, False])
def test_shards_and_single_file_are_the_same_model(
    make_checkpoint: MakeCheckpoint, tied: bool
) -> None:
    single = make_checkpoint(tie_word_embeddings=tied)
    sharded = make_checkpoint(tie_word_embeddings=tied, max_shard_size="100KB")
    assert [path.name for path in find_checkpoint_files(single)] == [SINGLE]
    assert len(find_checkpoint_files(sharded)) > 2
    assert (sharded / INDEX).is_file()
    assert answers(single) == answers(sharded)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_checkpoint_runs_in_float32_on_cpu(
    make_checkpoint: MakeCheckpoint, tmp_path: Path, dtype: str
) -> None:
    half = make_checkpoint(dtype=dtype)
    full = Path(shutil.copytree(half, tmp_path / "full"))
    rewrite(full, lambda tensors: tensors.update({k: v.float() for k, v in tensors.items()}))
    with open_llm(half) as llm:
        assert llm.stats().dtype == "float32"
    assert answers(half) == answers(full)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_dtype_option_runs_any_checkpoint(make_checkpoint: MakeCheckpoint, dtype: str) -> None:
    folder = make_checkpoint()
    with open_llm(folder, dtype=dtype) as llm:
        assert llm.stats().dtype == dtype
        assert len(llm.generate(PROMPTS, GREEDY, use_tqdm=False)[1].token_ids) == 8


def test_tied_copy_of_the_head_is_left_alone(copy: Callable[..., Path]) -> None:
    folder = copy(tie_word_embeddings=True)
    expected = answers(folder)
    rewrite(
        folder,
        lambda tensors: tensors.update(
            {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}
        ),
    )
    assert answers(folder) == expected


def test_derived_tensors_are_left_alone(copy: Callable[..., Path]) -> None:
    folder = copy()
    expected = answers(folder)
    inv_freq = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(16)}
    rewrite(folder, lambda tensors: tensors.update(inv_freq))
    assert answers(folder) == expected


@pytest.mark.parametrize(
    "changes",
    [
        {"rope_theta": 10000.0, "rope_parameters": None},
        {"rope_theta": 10000.0, "rope_scaling": {"rope_type": "default"}, "rope_parameters": None},
        {"rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"}},
        {"torch_dtype": "bfloat16", "dtype": None},
        {"torch_dtype": "float32", "dtype": "float32"},
        {"transformers_version": "4.51.0", "use_cache": True, "sliding_window": None},
    ],
)
def test_configs_of_all_versions_are_the_same_model(
    copy: Callable[..., Path], changes: dict[str, object]
) -> None:
    folder = copy()
    expected = answers(folder)
    change_config(folder, **changes)
    assert answers(folder) == expected


def test_folder_that_only_looks_like_a_shard_is_passed_over(copy: Callable[..., Path]) -> None:
    folder = copy()
    expected = answers(folder)
    (folder / "x.safetensors").mkdir()
    assert answers(folder) == expected
    (folder / SINGLE).unlink()
    with pytest.raises(ValueError, match="no .safetensors file"):
        open_llm(folder)


def test_what_a_download_without_weights_left_is_said(copy: Callable[..., Path]) -> None:
    folder = copy()
    (folder / SINGLE).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\n")
    with pytest.raises(ValueError, match="is a Git LFS pointer, git lfs pull"):
        open_llm(folder)
    (folder / SINGLE).rename(folder / "pytorch_model.bin")
    with pytest.raises(ValueError, match="no .safetensors file: convert its .bin files"):
        open_llm(folder)


def test_linked_files_load(copy: Callable[..., Path], tmp_path: Path) -> None:
    """The hub's cache is a folder of links to files with other names elsewhere."""
    folder = copy(max_shard_size="100KB")
    linked = tmp_path / "snapshot"
    linked.mkdir()
    for number, path in enumerate(folder.iterdir()):
        blob = path.rename(tmp_path / f"blob{number}")
        (linked / path.name).symlink_to(blob)
    assert len(answers(linked)) == 2


def test_dummy_weights_need_no_files_and_repeat(copy: Callable[..., Path]) -> None:
    folder = copy()
    (folder / SINGLE).unlink()
    first = answers(folder, load_format="dummy")
    assert answers(folder, load_format="dummy") == first
    assert len(set(map(tuple, first))) == 2


# damage


def remove(name: str) -> Callable[[Tensors], object]:
    return lambda tensors: tensors.pop(name)


def add(name: str, tensor: torch.Tensor) -> Callable[[Tensors], object]:
    return lambda tensors: tensors.update({name: tensor})


def cut(name: str, rows: int, columns: int) -> Callable[[Tensors], object]:
    return lambda tensors: tensors.update({name: tensors[name][:rows, :columns].contiguous()})


def enlarge(name: str, dim: int) -> Callable[[Tensors], object]:
    return lambda tensors: tensors.update(
        {name: torch.cat((tensors[name], tensors[name]), dim=dim)}
    )


DOWN_PROJ = "model.layers.1.mlp.down_proj.weight"
DAMAGES: dict[str, tuple[Callable[[Tensors], object], str]] = {
    "a norm is missing": (
        remove("model.norm.weight"),
        "doesn't hold model.norm.weight",
    ),
    "a part of a packed weight is missing": (
        remove(Q_PROJ),
        "doesn't hold model.layers.0.self_attn.qkv_proj.weight .part 'q'.",
    ),
    "the untied head is missing": (remove("lm_head.weight"), "doesn't hold lm_head.weight"),
    "the embedding is missing": (
        remove("model.embed_tokens.weight"),
        "doesn't hold model.embed_tokens.weight",
    ),
    "one layer too many": (
        add("model.layers.2.mlp.down_proj.weight", torch.zeros(64, 128)),
        "model.layers.2.mlp.down_proj.weight has no parameter",
    ),
    "an unknown tensor": (add("visual.weight", torch.zeros(3)), "visual.weight has no parameter"),
    "a bias that config.json doesn't have": (
        add("model.layers.0.self_attn.q_proj.bias", torch.zeros(128)),
        "q_proj.bias has no parameter",
    ),
    "a tensor packed already": (
        add("model.layers.0.self_attn.qkv_proj.weight", torch.zeros(256, 64)),
        "qkv_proj.weight has no parameter",
    ),
    "an MLP packed already": (
        add("model.layers.0.mlp.gate_up_proj.weight", torch.zeros(256, 64)),
        "gate_up_proj.weight has no parameter",
    ),
    "too few rows": (cut(Q_PROJ, 96, 64), f"{Q_PROJ}.*96, 64.*128, 64"),
    "too few columns": (cut(Q_PROJ, 128, 32), f"{Q_PROJ}.*128, 32.*128, 64"),
    "too many rows": (enlarge(Q_PROJ, 0), f"{Q_PROJ}.*256, 64.*128, 64"),
    "too many columns": (enlarge(DOWN_PROJ, 1), f"{DOWN_PROJ}.*64, 256.*64, 128"),
    "a larger vocabulary": (
        enlarge("model.embed_tokens.weight", 0),
        "embed_tokens.weight.*2000, 64.*1000, 64",
    ),
    "a larger head": (enlarge("lm_head.weight", 0), "lm_head.weight.*2000, 64.*1000, 64"),
    "a longer norm": (
        add("model.norm.weight", torch.ones(128)),
        "model.norm.weight.*128,.*64,",
    ),
    "a scalar norm": (add("model.norm.weight", torch.tensor(1.0)), "model.norm.weight"),
    "a transposed weight": (
        add(DOWN_PROJ, torch.zeros(128, 64)),
        f"{DOWN_PROJ}.*128, 64.*64, 128",
    ),
    "three dimensions": (add(Q_PROJ, torch.zeros(1, 128, 64)), f"{Q_PROJ}.*1, 128, 64"),
    "integers": (
        add(Q_PROJ, torch.zeros(128, 64, dtype=torch.int8)),
        f"{Q_PROJ} holds I8.*quantized",
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_weights_is_refused(copy: Callable[..., Path], damage: str) -> None:
    change, text = DAMAGES[damage]
    folder = copy()
    rewrite(folder, change)
    with pytest.raises(ValueError, match=text):
        open_llm(folder)


def test_tensor_in_two_shards_is_refused(copy: Callable[..., Path]) -> None:
    folder = copy()
    save_file({"model.norm.weight": torch.ones(64)}, folder / "other.safetensors")
    with pytest.raises(ValueError, match="model.norm.weight is written twice"):
        open_llm(folder)


def with_index(folder: Path, weight_map: object) -> Path:
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("model-00002-of-00002.safetensors", "model-00002-of-00002.safetensors, which is missing"),
        ("../model.safetensors", "outside the folder"),
        ("../model/model.safetensors", "outside the folder"),
        ("/etc/passwd", "outside the folder"),
        ("sub/model.safetensors", "outside the folder"),
        ("", "outside the folder"),
        ("..", "missing"),
        ("nul\0byte.safetensors", "."),
        (5, "damaged"),
        (None, "damaged"),
        (["model.safetensors"], "damaged"),
    ],
)
def test_hostile_name_in_the_index_is_refused(
    copy: Callable[..., Path], name: object, text: str
) -> None:
    folder = with_index(copy(), {"model.norm.weight": "model.safetensors", "lm_head.weight": name})
    with pytest.raises(ValueError, match=text):
        open_llm(folder)


@pytest.mark.parametrize(
    "content", ["", "{", "[]", "null", '{"weight_map": []}', '{"weight_map": 5}', "[" * 100_000]
)
def test_damaged_index_is_refused(copy: Callable[..., Path], content: str) -> None:
    folder = copy()
    (folder / INDEX).write_text(content)
    with pytest.raises(ValueError, match=f"{INDEX} is damaged"):
        open_llm(folder)


def test_index_without_shards_is_refused(copy: Callable[..., Path]) -> None:
    with pytest.raises(ValueError, match=r"doesn't hold .* and \d+ more"):
        open_llm(with_index(copy(), {}))


@pytest.mark.parametrize("num_bytes", [0, 4, 8, 100, -1, -1000])
def test_file_cut_short_is_refused(copy: Callable[..., Path], num_bytes: int) -> None:
    folder = copy()
    content = (folder / SINGLE).read_bytes()
    (folder / SINGLE).write_bytes(content[:num_bytes])
    with pytest.raises(ValueError, match="model.safetensors can't be read as safetensors"):
        open_llm(folder)


@pytest.mark.parametrize(
    "content",
    [
        struct.pack("<Q", 2**63 - 1) + b"{}",  # a header larger than memory
        struct.pack("<Q", 10) + b"not a json",
        struct.pack("<Q", 2) + b"[]",
        struct.pack("<Q", 100_000) + b"[" * 100_000,
        b"PK\x03\x04 a pickle in a zip",
    ],
)
def test_file_of_another_kind_is_refused(copy: Callable[..., Path], content: bytes) -> None:
    folder = copy()
    (folder / SINGLE).write_bytes(content)
    with pytest.raises(ValueError, match="model.safetensors can't be read as safetensors"):
        open_llm(folder)


def test_offsets_beyond_the_file_is_refused(copy: Callable[..., Path]) -> None:
    header = json.dumps(
        {"model.norm.weight": {"dtype": "F32", "shape": [64], "data_offsets": [0, 2**40]}}
    ).encode()
    folder = copy()
    (folder / SINGLE).write_bytes(struct.pack("<Q", len(header)) + header + b"\0" * 256)
    with pytest.raises(ValueError, match="model.safetensors can't be read as safetensors"):
        open_llm(folder)


def test_failed_load_leaves_defaults_and_the_next_load_alone(
    copy: Callable[..., Path], make_checkpoint: MakeCheckpoint
) -> None:
    folder = copy()
    rewrite(folder, remove("model.norm.weight"))
    before = torch.get_default_dtype(), torch.get_default_device()
    with pytest.raises(ValueError, match=r"model\.norm\.weight"):
        open_llm(folder)
    assert (torch.get_default_dtype(), torch.get_default_device()) == before
    assert len(answers(make_checkpoint())) == 2


# load_weights


class Pair(nn.Module):
    """Two parameters, one of them filled from two tensors."""

    packed_modules_mapping = {"a": ("ab", 0), "b": ("ab", 1)}

    def __init__(self) -> None:
        super().__init__()
        self.ab = nn.Linear(1, 2, bias=False)
        self.c = nn.Linear(1, 1, bias=False)
        self.ab.weight.weight_loader = self.load_part
        self.c.weight.weight_loader = lambda param, loaded, shard: param.data.copy_(loaded)

    def load_part(self, param: nn.Parameter, loaded: torch.Tensor, shard: int) -> None:
        param.data[shard] = loaded


def test_load_weights_takes_any_order_and_names_what_is_wrong() -> None:
    one, two, three = (torch.full((1, 1), float(i)) for i in (1, 2, 3))
    model = Pair()
    load_weights(model, [("c.weight", three), ("b.weight", two), ("a.weight", one)])
    assert model.ab.weight.flatten().tolist() == [1, 2]
    assert model.c.weight.item() == 3
    good = [("a.weight", one), ("b.weight", two), ("c.weight", three)]
    with pytest.raises(ValueError, match=r"ab.weight is written twice: b.weight"):
        load_weights(Pair(), [*good, ("b.weight", one)])
    with pytest.raises(ValueError, match=r"doesn't hold ab.weight \(part 1\)"):
        load_weights(Pair(), [good[0], good[2]])
    with pytest.raises(ValueError, match=r"d.weight has no parameter"):
        load_weights(Pair(), [*good, ("d.weight", one)])


# folders and ids


def test_gguf_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"GGUF")
    for name in (str(path), "Qwen/Qwen3-0.6B-GGUF/Qwen3-0.6B-Q8_0.gguf"):
        with pytest.raises(
            ValueError, match=r"expected a folder with config.json and .safetensors"
        ):
            LLM(name)


def test_single_weights_file_is_refused(make_checkpoint: MakeCheckpoint) -> None:
    with pytest.raises(ValueError, match="is a file: expected a folder"):
        LLM(str(make_checkpoint() / SINGLE))


@pytest.mark.parametrize("name", ["./nowhere", "/no/such/folder", "nowhere", "a/b/c", "~nobody-/x"])
def test_missing_folder_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=r"no folder: expected a checkpoint folder|no path"):
        LLM(name)


@pytest.mark.parametrize("name", ["x" * 5000, "nul\0byte"])
def test_impossible_path_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="."):
        LLM(name)


def test_hub_id_that_cannot_be_had_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object, **kwargs: object) -> str:
        raise ConnectionError("no route")

    monkeypatch.setattr("huggingface_hub.snapshot_download", fail)
    with pytest.raises(ValueError, match=r"Qwen/Qwen3-0.6B is no local folder.*hf download Qwen"):
        LLM("Qwen/Qwen3-0.6B")


def test_hub_id_in_the_local_cache_is_found(
    make_checkpoint: MakeCheckpoint, tmp_path: Path
) -> None:
    commit = "0" * 40
    repo = tmp_path / "models--Someone--Tiny"
    (repo / "refs").mkdir(parents=True)
    (repo / "refs" / "main").write_text(commit)
    shutil.copytree(make_checkpoint(), repo / "snapshots" / commit)
    code = (
        "from nanovllm.utils.model_folder import resolve_model_folder as find;"
        "print(find('Someone/Tiny'))"
    )
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HUB_CACHE": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, cwd=TESTS.parent
    )
    assert done.stdout.strip() == str(repo / "snapshots" / commit), done.stderr


def test_local_folder_wins_over_a_hub_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "Someone" / "Tiny").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert resolve_model_folder("Someone/Tiny") == Path("Someone/Tiny")
