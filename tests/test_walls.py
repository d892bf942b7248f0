"""The walls between the packages and the limits of style, held by reading the source and by looking at what gets imported."""

import ast
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from echo2 import config_activation, config_evaluation, config_learner, config_sections, config_tasks

REPOSITORY = Path(__file__).parent.parent
PACKAGES = ("echo2", "flows", "clouds")
CONFIG_MODULES = (
    "config_activation.py",
    "config_base.py",
    "config_evaluation.py",
    "config_learner.py",
    "config_sections.py",
    "config_tasks.py",
)
FILES = sorted(file for folder in PACKAGES for file in (REPOSITORY / folder).rglob("*.py"))
READ_FILES = [*FILES, *sorted(file for folder in ("tests", "docs", "examples") for file in (REPOSITORY / folder).rglob("*.py"))]
MODULES = {file: ast.parse(file.read_text(encoding="utf-8")) for file in READ_FILES}

LONGEST_FILE = 400
LONGEST_FUNCTION = 50
TRACKERS = {"tensorboard", "wandb"}
HEAVY = {"torch", "transformers", "numpy", "httpx", "fastapi", "uvicorn", "pydantic", "prefect", "sky", "matplotlib", "pebble"}
HEAVY |= TRACKERS | {"pandas"}
HUB_ONLY = {"fastapi", "starlette", "uvicorn", "pebble", "prometheus_client"}
LEARNER_ONLY = HUB_ONLY | TRACKERS | {"prefect", "sky", "matplotlib", "flows", "clouds"}


def name_of(file):
    return str(file.relative_to(REPOSITORY))


def imports(file):
    """Top-level names that a file imports anywhere, type checking included, with the line of each."""
    found = {}
    for node in ast.walk(MODULES[file]):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name_of(file)}:{node.lineno} is a relative import"
            names = [node.module]
        else:
            continue
        found |= {name.split(".")[0]: node.lineno for name in names}
    return found


def breaches(folder, forbidden):
    return [
        f"{name_of(file)}:{line} imports {name}"
        for file in FILES
        if (REPOSITORY / folder) in (file, *file.parents)
        for name, line in imports(file).items()
        if name in forbidden
    ]


def loaded_by(code):
    """Top-level names in sys.modules after a fresh interpreter ran `code`."""
    report = "import json, sys; print(json.dumps(sorted({name.split('.')[0] for name in sys.modules})), file=sys.stderr)"
    done = subprocess.run(
        [sys.executable, "-c", f"{code}\n{report}"], cwd=REPOSITORY, capture_output=True, text=True, check=True
    )
    return set(json.loads(done.stderr.splitlines()[-1]))


def test_imports_go_from_flows_to_clouds_to_echo2_and_never_back():
    assert breaches("echo2", {"prefect", "sky"}) == []
    assert breaches("clouds", {"prefect", "flows"}) == []


@pytest.mark.parametrize(
    ("function", "module"),
    [
        ("train", "flows.run"),
        ("train", "flows.preflight"),
        ("_machines", "clouds.renting"),
        ("costs", "clouds.costs"),
        ("fleet", "clouds.keeping"),
        ("simulate", "clouds.comparison"),
    ],
)
def test_only_these_commands_reach_from_echo2_into_flows_and_clouds(function, module):
    package = module.split(".")[0]
    assert [breach.split(":")[0] for breach in breaches("echo2", {package})] == ["echo2/cli.py"]
    door = next(node for node in MODULES[REPOSITORY / "echo2/cli.py"].body if getattr(node, "name", "") == function)
    assert any(isinstance(node, ast.ImportFrom) and node.module == module for node in ast.walk(door))


def test_capacity_and_configuration_are_pure():
    outside = HEAVY | {"tenacity", "safetensors", "tokenizers", "blake3", "socket", "subprocess", "sqlite3", "threading"}
    assert breaches("echo2/capacity", outside) == []
    assert breaches("echo2/config.py", outside - {"pydantic"}) == []
    for file in CONFIG_MODULES:
        assert breaches(f"echo2/{file}", outside - {"pydantic"}) == []


def test_package_files_import_nothing_heavy():
    files = [file for file in FILES if file.name in ("__init__.py", "__main__.py")]
    assert [(name_of(file), imports(file).keys() & HEAVY) for file in files if imports(file).keys() & HEAVY] == []
    for package in {file.parent for file in files}:
        dotted = ".".join(package.relative_to(REPOSITORY).parts)
        assert loaded_by(f"import {dotted}") & HEAVY == set(), dotted


def test_a_worker_loads_nothing_that_only_hub_and_learner_have():
    loaded = loaded_by(
        "import echo2.rollout.process, echo2.hub.client, echo2.protocol\n"
        "import echo2.dissemination.receiver, echo2.dissemination.store\n"
        "from echo2.config import load_config\n"
        "from echo2.rollout.engines import make_engine\n"
        "make_engine(load_config([], ['worker.engine=simulated']), None)"
    )
    assert "httpx" in loaded
    assert loaded & (LEARNER_ONLY | {"torch", "transformers"}) == set()


def test_the_hub_loads_neither_torch_nor_prefect():
    loaded = loaded_by("import echo2.hub.server")
    assert "fastapi" in loaded
    assert loaded & (TRACKERS | {"torch", "transformers", "prefect", "sky", "matplotlib", "flows", "clouds"}) == set()


@pytest.mark.parametrize("arguments", [["--help"], ["train", "--help"], ["worker", "--help"], ["--version"]], ids=" ".join)
def test_help_is_shown_before_anything_heavy_is_loaded(arguments):
    loaded = loaded_by(f"import sys; sys.argv[1:] = {arguments!r}\nfrom echo2.cli import main; main()")
    assert "click" in loaded
    assert loaded & (HEAVY | {"flows", "clouds"}) == set()


def test_a_plan_needs_neither_torch_nor_a_network_library():
    loaded = loaded_by("import sys; sys.argv[1:] = ['plan']\nfrom echo2.cli import main; main()")
    assert loaded & (HEAVY - {"pydantic"} | {"scipy", "clouds"}) == set()


def test_choosing_machines_loads_its_solver_only_when_it_solves():
    loaded = loaded_by("import echo2.capacity.activation, clouds.renting_text")
    assert loaded & (HEAVY - {"pydantic"} | {"scipy"}) == set()


def test_files_are_short():
    lengths = {name_of(file): len(file.read_text(encoding="utf-8").splitlines()) for file in READ_FILES}
    assert {name: length for name, length in lengths.items() if length > LONGEST_FILE} == {}


def test_functions_are_short():
    too_long = {}
    for file, module in MODULES.items():
        for node in ast.walk(module):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = node.end_lineno - node.lineno + 1
                if ast.get_docstring(node) is not None:
                    lines -= node.body[0].end_lineno - node.body[0].lineno + 1
                if lines > LONGEST_FUNCTION:
                    too_long[f"{name_of(file)}:{node.lineno} {node.name}"] = lines
    assert too_long == {}


def test_an_except_that_catches_everything_hands_the_error_on():
    silent = []
    for file, module in MODULES.items():
        for node in ast.walk(module):
            if isinstance(node, ast.ExceptHandler) and is_broad(node.type):
                used = {name.id for part in node.body for name in ast.walk(part) if isinstance(name, ast.Name)}
                raised = any(isinstance(part, ast.Raise) for statement in node.body for part in ast.walk(statement))
                if node.name not in used and not raised:
                    silent.append(f"{name_of(file)}:{node.lineno}")
    assert silent == []


def is_broad(kind):
    caught = kind.elts if isinstance(kind, ast.Tuple) else [kind]
    return kind is None or any(isinstance(name, ast.Name) and name.id in ("Exception", "BaseException") for name in caught)


def test_every_module_says_what_it_is():
    written = [file for file in FILES if file.stat().st_size and file.name != "__main__.py"]
    assert [name_of(file) for file in written if not ast.get_docstring(MODULES[file])] == []


def test_every_setting_is_used():
    source = "\n".join(file.read_text(encoding="utf-8") for file in FILES if file.name not in ("config.py", *CONFIG_MODULES))
    modules = (config_activation, config_evaluation, config_learner, config_sections, config_tasks)
    kinds = [kind for module in modules for kind in vars(module).values() if isinstance(kind, type)]
    fields = {field for kind in kinds if issubclass(kind, config_sections.Section) for field in kind.model_fields} - {"type"}
    assert sorted(field for field in fields if not re.search(rf"\.{field}\b", source)) == []
