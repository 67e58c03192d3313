"""A model folder is data and a channel is private: nothing in the one is executed, nobody else
reaches the other.
"""

import ast
import contextlib
import json
import os
import pickle
import shutil
import socket
import stat
import struct
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from conftest import MakeCheckpoint
from processes import rank_pids, shared_memory_names

import nanovllm
from nanovllm import LLM, SamplingParams
from nanovllm.engine.channel import Message
from nanovllm.engine.commands import Command, unpack_weight
from nanovllm.engine.rank import serve
from nanovllm.utils.shared_file import SharedFile

PACKAGE = Path(nanovllm.__file__).parent
BUNDLED = Path(__file__).resolve().parent / "tiny_qwen3"
GREEDY = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
WEIGHTS = "model.safetensors"
LISTENING = "0A"  # state of a socket in /proc/net/tcp

is_linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


class Trap:
    """Unpickled, it leaves a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, (str(self.path),)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The bundled model, to be tampered with."""
    return Path(shutil.copytree(BUNDLED, tmp_path / "model"))


def open_llm(folder: Path, **options: object) -> LLM:
    defaults: dict[str, object] = {"device": "cpu", "max_model_len": 64, "num_kvcache_blocks": 2}
    return LLM(str(folder), **{**defaults, **options})


def use_all_of(folder: Path) -> None:
    with open_llm(folder) as llm:
        llm.generate("1 + 2 =", GREEDY, use_tqdm=False)
        llm.get_tokenizer()
        llm.chat([{"role": "user", "content": "x"}], GREEDY, use_tqdm=False)


# a folder is data


@pytest.mark.parametrize(
    "name",
    ["pytorch_model.bin", "model.pt", "model.pth", "consolidated.00.pth", "model.ckpt", WEIGHTS],
)
def test_pickled_weights_are_never_opened(folder: Path, tmp_path: Path, name: str) -> None:
    trap = tmp_path / "sprung"
    (folder / WEIGHTS).unlink()
    (folder / name).write_bytes(pickle.dumps(Trap(trap)))
    with pytest.raises(ValueError, match=r"no \.safetensors file|can't be read as safetensors"):
        open_llm(folder)
    assert not trap.exists()
    pickle.loads((folder / name).read_bytes())
    assert trap.exists(), "the trap itself works"


def test_pickles_beside_the_weights_are_passed_over(folder: Path, tmp_path: Path) -> None:
    trap = tmp_path / "sprung"
    for name in ("pytorch_model.bin", "training_args.bin", "tokenizer.pkl", "optimizer.pt"):
        (folder / name).write_bytes(pickle.dumps(Trap(trap)))
    use_all_of(folder)
    assert not trap.exists()


@pytest.mark.parametrize("kind", ["Qwen3ForCausalLM", "custom.Custom"])
def test_code_in_the_folder_is_never_run(folder: Path, tmp_path: Path, kind: str) -> None:
    trap = tmp_path / "sprung"
    code = f"import os\nos.mkdir({str(trap)!r})\nclass Custom: pass\n"
    names = ("custom.py", "modeling_qwen3.py", "tokenization_qwen3.py", "__init__.py", "setup.py")
    for name in (*names, "sitecustomize.py", "conftest.py"):
        (folder / name).write_text(code)
    auto_map = {"AutoConfig": kind, "AutoModelForCausalLM": kind, "AutoTokenizer": [kind, kind]}
    for name in ("config.json", "tokenizer_config.json"):
        values = json.loads((folder / name).read_text())
        values |= {"auto_map": auto_map, "trust_remote_code": True}
        (folder / name).write_text(json.dumps(values))
    with contextlib.suppress(ValueError):  # transformers may refuse to make a tokenizer of it
        use_all_of(folder)
    assert not trap.exists()


def test_trust_remote_code_is_refused(folder: Path) -> None:
    with pytest.raises(ValueError, match="trust_remote_code=True is not supported"):
        open_llm(folder, trust_remote_code=True)


TEMPLATES = [
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ cycler.__init__.__globals__.os.mkdir(TRAP) }}",
    "{{ self.__init__.__globals__.__builtins__.__import__('os').mkdir(TRAP) }}",
    "{{ lipsum.__globals__['os'].mkdir(TRAP) }}",
    "{{ messages.__class__.__base__.__subclasses__() }}",
    "{% set x = joiner.__init__.__globals__ %}{{ x }}",
    "{{ raise_exception.__globals__ }}",
    "{% include '/etc/passwd' %}",
]


@pytest.mark.parametrize("template", TEMPLATES)
def test_chat_template_cannot_leave_its_sandbox(
    folder: Path, tmp_path: Path, template: str
) -> None:
    trap = tmp_path / "sprung"
    path = folder / "tokenizer_config.json"
    values = json.loads(path.read_text())
    values["chat_template"] = template.replace("TRAP", repr(str(trap)))
    path.write_text(json.dumps(values))
    with pytest.raises(ValueError, match=r"chat template|the prompt is empty"):
        use_all_of(folder)
    assert not trap.exists()


def modules() -> Iterator[tuple[str, ast.Module]]:
    for path in sorted(PACKAGE.rglob("*.py")):
        yield str(path.relative_to(PACKAGE)), ast.parse(path.read_text(encoding="utf-8"))


def test_package_unpickles_and_evaluates_nothing() -> None:
    """Neither pickle nor eval, exec, torch.load or a shell, and no remote code is trusted."""
    found = []
    for name, tree in modules():
        for node in ast.walk(tree):
            imported = [alias.name for alias in getattr(node, "names", ())]
            if isinstance(node, ast.ImportFrom):
                imported.append(node.module or "")
            if isinstance(node, ast.Import | ast.ImportFrom):
                found += [(name, i) for i in imported if i in ("pickle", "marshal", "shelve")]
                found += [(name, i) for i in imported if i in ("subprocess", "dill", "cloudpickle")]
            if isinstance(node, ast.Call):
                called = ast.unparse(node.func)
                is_bad = called in ("eval", "exec", "torch.load", "os.system", "os.popen")
                found += [(name, called)] if is_bad else []
            if isinstance(node, ast.keyword) and node.arg == "trust_remote_code":
                found += [] if ast.unparse(node.value) == "False" else [(name, "trust_remote_code")]
    assert found == []


# channels are private


class OneMessage:
    """A rank's end that receives one message."""

    def __init__(self, kind: int, payload: bytes = b"") -> None:
        self._message = Message(0, kind, bytearray(payload))

    def receive(self) -> Message:
        return self._message

    def reply(self, *args: object) -> None:
        raise AssertionError("an answer to what can't be said")


class AnyRunner:
    """Would do whatever it is told."""

    def __getattr__(self, name: str) -> None:
        raise AssertionError(f"{name} was reached")


@pytest.mark.parametrize("kind", [-1, len(Command), 99, 2**40])
def test_command_outside_the_closed_set_is_refused(kind: int) -> None:
    with pytest.raises(ValueError, match="is not a valid Command"):
        serve(AnyRunner(), OneMessage(kind), 0)


def test_command_cannot_name_a_method() -> None:
    """Payloads are numbers and arrays; the one with names, a weight's, names a kind of number."""

    def weight(dtype_name: str) -> bytes:
        header = json.dumps(["model.norm.weight", dtype_name, [2]]).encode()
        return struct.pack("<Q", len(header)) + header + bytes(8)

    name, tensor = unpack_weight(weight("float32"))
    assert (name, tensor.tolist()) == ("model.norm.weight", [0.0, 0.0])
    for dtype_name in ("load", "nn", "float33", "__loader__", "hub.load"):
        with pytest.raises(ValueError, match="no kind of number"):
            unpack_weight(weight(dtype_name))


@pytest.mark.parametrize("seed", range(20))
def test_random_bytes_are_no_weight(seed: int) -> None:
    rng = np.random.default_rng(seed)
    payload = rng.integers(0, 256, int(rng.integers(0, 40)), dtype=np.uint8).tobytes()
    with pytest.raises(ValueError, match="."):
        unpack_weight(payload)


@is_linux
def test_shared_memory_has_no_name_and_is_this_users_alone() -> None:
    names = shared_memory_names()
    file = SharedFile(4096)
    status = os.fstat(file.fd)
    assert shared_memory_names() == names
    assert status.st_nlink == 0
    assert status.st_uid == os.getuid()
    assert stat.S_IMODE(status.st_mode) == 0o600
    assert not os.get_inheritable(file.fd)
    file.close()


def sockets_of(pid: int) -> set[str]:
    """Inodes of the sockets that a process holds."""
    links = [os.readlink(path) for path in Path(f"/proc/{pid}/fd").iterdir() if path.is_symlink()]
    return {link[8:-1] for link in links if link.startswith("socket:[")}


def listening_hosts(pid: int) -> list[str]:
    """Addresses on which a process accepts TCP connections."""
    hosts = []
    inodes = sockets_of(pid)
    for family, name in ((socket.AF_INET, "tcp"), (socket.AF_INET6, "tcp6")):
        for line in Path(f"/proc/{pid}/net/{name}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == LISTENING and fields[9] in inodes:
                address = bytes.fromhex(fields[1].rpartition(":")[0])
                words = struct.unpack(f"<{len(address) // 4}I", address)
                hosts.append(socket.inet_ntop(family, struct.pack(f">{len(words)}I", *words)))
    return hosts


@is_linux
@pytest.mark.usefixtures("hard_timeout", "quick_start")
def test_ranks_listen_on_this_host_only(
    make_checkpoint: MakeCheckpoint,
) -> None:
    """No port on another interface, and no name in /dev/shm."""
    names = shared_memory_names()
    with open_llm(make_checkpoint(), skip_tokenizer_init=True, tensor_parallel_size=2) as llm:
        assert llm.generate([[1, 2]], GREEDY, use_tqdm=False)
        hosts = [set(listening_hosts(pid)) for pid in rank_pids().values()]
        assert hosts == [{"127.0.0.1"}] * 2  # gloo's
        assert listening_hosts(os.getpid()) == []
        assert shared_memory_names() == names


@is_linux
def test_socket_that_listens_is_seen() -> None:
    """What the test above relies on."""
    with socket.create_server(("127.0.0.1", 0)):
        assert listening_hosts(os.getpid()) == ["127.0.0.1"]
