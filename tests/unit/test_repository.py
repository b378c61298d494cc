"""Rules that hold for the whole repository: sizes, docstrings, dependency directions, and docs that match the code."""

import ast
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.main import get_command

from cluster.cli.main import app

ROOT = Path(__file__).parents[2]
MAX_FILE_LINES, MAX_TEST_LINES, MAX_FUNCTION_LINES = 300, 500, 60


def tracked(*patterns: str) -> list[Path]:
    """The repository's files, tracked or about to be."""
    listing = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "--", *patterns],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    return [path for name in listing.stdout.split("\n") if name and (path := ROOT / name).exists()]


def sources() -> list[Path]:
    """Python modules of ours, generated code left out."""
    return [path for path in tracked("*.py") if "_generated" not in path.parts]


def functions(tree: ast.Module) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    return (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


def is_test(path: Path) -> bool:
    return path.relative_to(ROOT).parts[0] == "tests"


def imports(tree: ast.Module) -> set[str]:
    """Top-level names of all imported modules, wherever the import stands."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
    return names


@pytest.fixture(scope="module")
def trees() -> dict[Path, ast.Module]:
    return {path: ast.parse(path.read_text()) for path in sources()}


def test_files_own_one_concept(trees: dict[Path, ast.Module]) -> None:
    limits = {path: MAX_TEST_LINES if is_test(path) else MAX_FILE_LINES for path in trees}
    lines = {path: path.read_text().count("\n") for path in trees}
    assert not {str(path.relative_to(ROOT)): lines[path] for path in trees if lines[path] > limits[path]}


def test_functions_fit_on_a_screen(trees: dict[Path, ast.Module]) -> None:
    too_long = [
        f"{path.relative_to(ROOT)}:{node.lineno} {node.name}"
        for path, tree in trees.items()
        for node in functions(tree)
        if (node.end_lineno or node.lineno) - node.lineno + 1 > MAX_FUNCTION_LINES
    ]
    assert not too_long


def test_every_module_says_what_it_owns(trees: dict[Path, ast.Module]) -> None:
    assert not [
        str(path.relative_to(ROOT)) for path, tree in trees.items() if tree.body and not ast.get_docstring(tree)
    ]


def test_nothing_is_left_unwritten(trees: dict[Path, ast.Module]) -> None:
    stubs = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path, tree in trees.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Raise) and node.exc and "NotImplementedError" in ast.unparse(node.exc)
    ]
    assert not stubs


def test_ray_is_called_in_actors_only(trees: dict[Path, ast.Module]) -> None:
    library = {path: tree for path, tree in trees.items() if path.relative_to(ROOT).parts[0] == "cluster"}
    assert not [
        str(path) for path, tree in library.items() if any(name.split(".")[0] == "ray" for name in imports(tree))
    ]


def test_only_the_command_line_reaches_into_actors(trees: dict[Path, ast.Module]) -> None:
    outside = {path: tree for path, tree in trees.items() if path.relative_to(ROOT).parts[0] == "cluster"}
    callers = {path for path, tree in outside.items() if any(name.split(".")[0] == "actors" for name in imports(tree))}
    assert not [str(path) for path in callers if path.relative_to(ROOT).parts[:2] != ("cluster", "cli")]


def test_nothing_is_unpickled_or_evaluated(trees: dict[Path, ast.Module]) -> None:
    """But for a draft's pickled weights, which torch's unpickler of tensors reads where the operator allows it."""
    tensors_only = "torch.load(file.path, map_location='cpu', weights_only=True, mmap=True)"
    calls = {
        f"{path.relative_to(ROOT)}: {ast.unparse(node)}"
        for path, tree in trees.items()
        if not is_test(path)
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and ast.unparse(node.func) in ("eval", "exec", "torch.load", "pickle.load", "pickle.loads")
    }
    assert calls == {f"cluster/speculation/draft_tensors.py: {tensors_only}"}


def test_the_proto_folder_holds_no_python() -> None:
    assert not tracked("proto/*.py")  # a package called `proto` would shadow the one that Ray's dependencies import


def test_no_file_names_a_registry_host_or_a_private_path() -> None:
    hosts = ["pypi" + ".org", "pythonhosted" + ".org", "npmjs" + ".org", "download.pytorch" + ".org"]
    banned = re.compile("|".join(map(re.escape, [*hosts, "/work" + "/", "/root" + "/"])))
    texts = [
        path for path in tracked() if path.suffix in (".py", ".md", ".toml", ".txt", ".yaml", ".proto", "", ".json")
    ]
    assert not [str(path.relative_to(ROOT)) for path in texts if banned.search(path.read_text(errors="replace"))]


def docs() -> list[Path]:
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def test_docs_name_make_targets_that_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    named = {
        name
        for path in docs()
        for name in re.findall(r"`make ([a-z-]+)|^ *(?:\$ )?make ([a-z-]+)", path.read_text(), re.M)
    }
    assert {first or second for first, second in named} <= targets


def test_docs_name_commands_that_exist() -> None:
    known = set(get_command(app).commands)  # type: ignore[attr-defined]  # Typer's own type of group
    named = {
        name for path in docs() for name in re.findall(r"(?:^ *|`)(?:\$ )?tandem ([a-z]+)\b", path.read_text(), re.M)
    }
    assert named and named <= known


def test_the_architecture_page_lists_every_module() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text()
    modules = [path for path in sources() if not is_test(path) and path.name != "__init__.py"]
    names = [str(path.relative_to(ROOT / path.relative_to(ROOT).parts[0])) for path in modules]
    assert not [name for name in names if f"`{name}`" not in page]


def test_docs_name_files_that_exist() -> None:
    pattern = re.compile(r"(?:\]\(|`)((?:cluster|actors|proto|tests|docs|\.ci)/[\w./-]*\w|[\w-]+\.md)[`)#]")
    missing = set()
    for path in docs():
        for name in pattern.findall(path.read_text()):
            if not (ROOT / name).exists() and not (path.parent / name).exists():
                missing.add(f"{path.name}: {name}")
    assert not missing
