"""The house has an order of imports, and importing any of it starts, prints and needs nothing."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "nanovllm"

# From the ground up: a module imports from its own floor and those below.
FLOORS = (
    ("config", "model_config", "sampling_params", "outputs", "utils"),
    ("kernels",),
    ("layers",),
    ("models",),
    ("engine",),
    ("llm",),
    ("", "__main__", "batch_file", "ray_data"),  # "": the package itself
)
WITHOUT_TORCH = ("sequence", "block_manager", "batch", "decodes", "scheduler")

MODULES = sorted(
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
    for path in PACKAGE.rglob("*.py")
)
IMPORTABLE = [name for name in MODULES if not name.endswith("__main__")]


def path_of(module: str) -> Path:
    path = ROOT.joinpath(*module.split("."))
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def floor_of(module: str) -> int:
    room = module.split(".")[1] if "." in module else ""
    floors = [i for i, rooms in enumerate(FLOORS) if room in rooms]
    assert floors, f"{module} is on no floor: give it one in FLOORS"
    return floors[0]


def imports_of(module: str, *, at_import_time: bool) -> set[str]:
    """Modules that `module` imports; those inside functions only without `at_import_time`."""
    tree = ast.parse(path_of(module).read_text(encoding="utf-8"))
    names: set[str] = set()
    for node in walk(tree, into_functions=not at_import_time):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module} imports relatively"
            names.add(node.module or "")
            names.update(f"{node.module}.{alias.name}" for alias in node.names)
    return names


def walk(node: ast.AST, *, into_functions: bool) -> Iterator[ast.AST]:
    """All nodes but those that only a type checker sees."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.dump(child.test):
            continue
        if isinstance(child, ast.FunctionDef | ast.Lambda) and not into_functions:
            continue
        yield child
        yield from walk(child, into_functions=into_functions)


def own_imports(module: str, *, at_import_time: bool) -> set[str]:
    return imports_of(module, at_import_time=at_import_time) & set(MODULES) - {module}


def reachable(module: str) -> set[str]:
    """All modules, ours and others', that importing `module` imports through ours."""
    seen: set[str] = set()
    stack = [module]
    while stack:
        for name in imports_of(stack.pop(), at_import_time=True):
            if name not in seen:
                seen.add(name)
                if name in MODULES:
                    stack.append(name)
    return seen


def run_python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120
    )


@pytest.mark.parametrize("module", MODULES)
def test_imports_go_downstairs_only(module: str) -> None:
    for name in own_imports(module, at_import_time=False) - {"nanovllm"}:
        assert floor_of(name) <= floor_of(module), f"{module} imports {name}, which is above it"


def test_no_module_imports_itself_through_others() -> None:
    for module in MODULES:
        assert module not in reachable(module) or module == "nanovllm", f"{module} is in a circle"


@pytest.mark.parametrize("name", WITHOUT_TORCH)
def test_scheduling_needs_no_torch(name: str) -> None:
    roots = {module.split(".")[0] for module in reachable(f"nanovllm.engine.{name}")}
    assert not roots & {"torch", "triton", "transformers"}


@pytest.mark.parametrize("module", MODULES)
def test_optional_packages_are_imported_by_nobody_at_import_time(module: str) -> None:
    """triton by one module, which tells what is missing where it is missing."""
    roots = {name.split(".")[0] for name in imports_of(module, at_import_time=True)}
    assert not roots & {"flash_attn", "flash_attn_interface", "transformers", "ray"}
    assert "triton" not in roots or module == "nanovllm.kernels.optional_triton"


def test_package_imports_without_optional_packages() -> None:
    """C25: neither triton nor flash-attn is needed to import, in any module."""
    result = run_python(
        "import sys\n"
        "for name in ('triton', 'flash_attn', 'flash_attn_interface', 'transformers', 'ray'):\n"
        "    sys.modules[name] = None\n"  # importing it raises ImportError
        "import importlib, nanovllm\n"
        f"for name in {IMPORTABLE!r}:\n"
        "    importlib.import_module(name)\n"
        "assert nanovllm.LLM and nanovllm.SamplingParams\n"
    )
    assert result.returncode == 0, result.stderr


def test_importing_starts_and_prints_nothing_and_changes_no_default() -> None:
    result = run_python(
        "import importlib, multiprocessing, os, random, signal, threading, warnings\n"
        "import numpy, torch\n"
        "def state():\n"
        "    return (\n"
        "        torch.get_default_dtype(), torch.get_default_device(), torch.is_grad_enabled(),\n"
        "        torch.backends.cuda.matmul.allow_tf32, torch.cuda.is_initialized(),\n"
        "        torch.get_num_threads(), torch.distributed.is_initialized(),\n"
        "        torch.random.get_rng_state().tolist(), random.getstate(),\n"
        "        numpy.random.get_state()[1].tolist(), signal.getsignal(signal.SIGINT),\n"
        "        signal.getsignal(signal.SIGTERM), threading.enumerate(), dict(os.environ),\n"
        "        multiprocessing.active_children(), multiprocessing.get_start_method(True),\n"
        "        list(warnings.filters),\n"
        "    )\n"
        "before = state()\n"
        f"for name in {[name for name in IMPORTABLE if name != 'nanovllm']!r}:\n"
        "    importlib.import_module(name)\n"
        "after = state()\n"
        "for one, other in zip(before, after, strict=True):\n"
        "    assert one == other, (one, other)\n"
    )
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")


def test_public_list_is_what_the_package_exports() -> None:
    import nanovllm

    assert set(nanovllm.__all__) == {
        "LLM",
        "CompletionOutput",
        "Logprob",
        "RequestOutput",
        "SamplingParams",
    }
    assert all(hasattr(nanovllm, name) for name in nanovllm.__all__)
