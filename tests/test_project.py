"""The rules of the house: who may import whom, what a distribution holds, what the text may say."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "mmattn"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))

# Each room of the package and those it may import; what those may import is allowed too. Its own folder always is.
ALLOWED = {
    "backend": [],
    "layers": ["backend"],
    "decoding": ["backend"],
    "metrics": ["backend"],
    "preprocess": ["backend"],
    "data": ["backend"],
    "encoders": ["layers"],
    "decoders": ["layers"],
    "model": ["layers"],
    "stream_model": ["model"],
    "heads": ["layers"],
    "safe_config": [],
    "weights": [],
    "card": [],
    "generation": ["decoding", "layers", "preprocess"],
    "bundle_kinds": [],
    "bundle_files": ["card", "bundle_kinds"],
    "bundle_model": ["model", "heads", "generation", "preprocess", "safe_config", "weights", "bundle_files"],
    "bundle_load": ["bundle_model"],
    "bundle_save": ["bundle_load"],
    "bundle": ["bundle_save"],
    "testing_laws": ["backend"],
    "testing": ["testing_laws"],
    "training": ["model", "decoding", "metrics", "bundle"],
    "pictures": ["preprocess"],
    "inference": ["bundle", "pictures"],
    "comparison": ["tasks"],
    "tasks": ["data", "encoders", "inference", "stream_model", "training"],
    "memory": [],
    "cli": ["data", "inference", "memory", "training"],
    "__main__": ["cli"],
    "__init__": [],
}
# Third-party modules that only some files may import, and never while being imported themselves.
LAZY = {
    "tensorflow": {"backend.py", "preprocess/text.py", "export.py"},
    "tensorflow_text": {"backend.py", "preprocess/text.py", "export.py"},
    "jax": {"backend.py"},
    "torch": {"backend.py"},
    "matplotlib": {"comparison/plots.py"},
    "tensorboard": {"training/tensorboard.py"},
    "sacremoses": {"metrics/translation.py"},
    "spacy": {"metrics/translation.py"},
    "hydra": set(),
    "omegaconf": set(),
}


def sources(*folders: str) -> list[Path]:
    found = [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]
    assert found
    return found


def imports(tree: ast.AST) -> list[tuple[str, bool]]:
    """Every module that is imported, and whether at the top level (type checking aside) rather than in a function."""
    lazy = {
        id(node)
        for block in ast.walk(tree)
        if isinstance(block, ast.FunctionDef | ast.AsyncFunctionDef)
        or (isinstance(block, ast.If) and ast.unparse(block.test) == "TYPE_CHECKING")
        for node in ast.walk(block)
    }
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [(alias.name, id(node) not in lazy) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"relative import of {node.module}"
            names = [alias.name for alias in node.names]
            modules = [f"mmattn.{name}" for name in names] if node.module == "mmattn" else [str(node.module)]
            found += [(module, id(node) not in lazy) for module in modules]
    return found


def reachable(name: str) -> set[str]:
    return {name}.union(*(reachable(other) for other in ALLOWED[name]))


def trees(*folders: str) -> list[tuple[str, ast.Module]]:
    """(path from the repository's root, what is in it) of every Python file."""
    return [(path.relative_to(ROOT).as_posix(), ast.parse(path.read_text("utf-8"))) for path in sources(*folders)]


def test_each_module_imports_only_what_lies_below_it() -> None:
    problems = []
    for path, tree in trees("mmattn"):
        room = path.split("/")[1].removesuffix(".py")
        if room not in ALLOWED:
            problems.append(f"{path}: the module {room} is new; say in ALLOWED what it may import")
            continue
        for module, _ in imports(tree):
            top, _, rest = module.partition(".")
            other = rest.split(".")[0]
            if top == "mmattn" and other in ALLOWED and room != "__init__" and other not in reachable(room):
                problems.append(f"{path} may not import {module}")
    assert not problems, "\n".join(problems)


def test_backends_and_extras_are_imported_late_and_in_few_places() -> None:
    problems = []
    for path, tree in trees("mmattn"):
        for module, at_import in imports(tree):
            places = LAZY.get(module.split(".")[0])
            if places is not None and path.removeprefix("mmattn/") not in places:
                problems.append(f"{path} may not import {module}")
            elif places is not None and at_import:
                problems.append(f"{path} must import {module} in the function that needs it")
    assert not problems, "\n".join(problems)


def test_every_module_and_public_class_has_a_docstring() -> None:
    problems = []
    for path, tree in trees("mmattn", "experiments"):
        classes = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name[0] != "_"]
        problems += [f"{path}: {node.name}" for node in classes if not ast.get_docstring(node)]
        problems += [] if ast.get_docstring(tree) or not tree.body else [path]
    assert not problems, "\n".join(problems)


def texts() -> list[Path]:
    kinds = {".py", ".md", ".toml", ".yaml", ".yml", ".txt", ".ipynb", ".cfg", ".json"}
    folders = ["mmattn", "experiments", "conf", "tests", "notebooks"]
    deep = [path for folder in folders for path in (ROOT / folder).rglob("*") if path.suffix in kinds]
    return [*deep, *(path for path in ROOT.iterdir() if path.suffix in kinds), ROOT / ".ci" / "run"]


def test_no_machine_path_package_host_or_unfinished_mark_is_in_any_text() -> None:
    words = ["/" + "work/", "/tmp" + "/w", "/ro" + "ot/", "/opt/" + "wheels", "pypi" + r"\.org", "python" + "hosted"]
    words += [rf"\b{word}\b" for word in ("TO" + "DO", "FIX" + "ME", "XX" + "X")]
    pattern = re.compile("|".join(words))
    found = {str(path): hits for path in texts() if (hits := pattern.findall(path.read_text(encoding="utf-8")))}
    assert not found


def test_no_file_holds_a_pickle_or_is_called_a_drawer_for_everything() -> None:
    drawers = {"utils.py", "util.py", "helpers.py", "helper.py", "common.py", "misc.py", "manager.py"}
    assert not [path for path in sources("mmattn", "experiments") if path.name in drawers]
    assert not [path for path in PACKAGE.rglob("*") if path.suffix in {".pkl", ".pickle", ".pt", ".pth"}]


def test_import_and_version_load_no_backend_and_are_quick() -> None:
    code = (
        "import sys, time, mmattn, mmattn.cli; mmattn.cli.main(['--version']);"
        "seconds = time.process_time();"
        "heavy = {'keras', 'numpy', 'tensorflow', 'jax', 'torch', 'PIL', 'hydra'};"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules); print(seconds)"
    )
    runs = [subprocess.run([sys.executable, "-c", code], capture_output=True, text=True) for _ in range(3)]
    assert all(run.returncode == 0 for run in runs), runs[0].stderr
    assert min(float(run.stdout.split()[-1]) for run in runs) < 0.3


def test_lazy_attributes_are_the_modules_themselves() -> None:
    import mmattn
    import mmattn.metrics

    assert mmattn.metrics is sys.modules["mmattn.metrics"]
    assert {"layers", "Captioner", "__version__"} <= set(dir(mmattn))
    with pytest.raises(AttributeError, match=r"no attribute 'layer'.*layers"):
        _ = mmattn.layer


def test_requirements_without_tensorflow_are_the_dependencies_with_another_backend() -> None:
    core = {line for line in PROJECT["project"]["dependencies"] if not line.startswith("tensorflow")}
    assert len(core) == len(PROJECT["project"]["dependencies"]) - 2
    for backend in ("jax", "torch"):
        text = (ROOT / f"requirements-{backend}.txt").read_text(encoding="utf-8")
        lines = {line for line in text.splitlines() if line and not line.startswith("#")}
        assert {line for line in lines if not line.startswith(backend)} == core
        assert len(lines) == len(core) + 1


@pytest.fixture(scope="module")
def distributions(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A source distribution and the wheel that is built from it."""
    out = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), str(ROOT)]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHONWARNINGS": ""})
    assert done.returncode == 0, done.stdout + done.stderr
    (sdist,), (wheel,) = out.glob("*.tar.gz"), out.glob("*.whl")
    return sdist, wheel


@pytest.mark.slow
def test_wheel_holds_configuration_and_experiments_inside_the_package(distributions: tuple[Path, Path]) -> None:
    with zipfile.ZipFile(distributions[1]) as archive:
        names = set(archive.namelist())
    tops = {name.split("/")[0] for name in names}
    assert tops == {"mmattn", next(top for top in tops if top.endswith(".dist-info"))}
    for folder, inside in (("mmattn", ""), ("conf", "conf/"), ("experiments", "experiments/")):
        for path in (ROOT / folder).rglob("*"):
            if path.is_file() and "__pycache__" not in path.parts:
                assert f"mmattn/{inside}{path.relative_to(ROOT / folder).as_posix()}" in names
    assert "mmattn/py.typed" in names


@pytest.mark.slow
def test_source_distribution_is_complete(distributions: tuple[Path, Path]) -> None:
    with tarfile.open(distributions[0]) as archive:
        names = {name.split("/", 1)[1] for name in archive.getnames() if "/" in name}
    wanted = {"pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md", "requirements-jax.txt", ".ci/run"}
    wanted |= {path.relative_to(ROOT).as_posix() for path in sources("mmattn", "experiments", "tests")}
    wanted |= {path.relative_to(ROOT).as_posix() for path in (ROOT / "conf").rglob("*.yaml")}
    assert wanted <= names, wanted - names
