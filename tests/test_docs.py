"""What the documents say is so: commands work, paths exist, tables are complete."""

import os
import re
import runpy
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

from echo2.cli import echo2 as command_line
from echo2.config import load_config
from echo2.hub.app import create_app
from flows.run import render_summary

REPOSITORY = Path(__file__).parent.parent
DOCUMENTS = [REPOSITORY / "README.md", REPOSITORY / "CONTRIBUTING.md", *sorted((REPOSITORY / "docs").glob("*.md"))]
TEXTS = {file.name: file.read_text(encoding="utf-8") for file in DOCUMENTS}
FOLDERS = ("echo2", "flows", "clouds", "configs", "examples", "docs", "tests", "benchmarks")
PROGRAMS_OF_THE_SYSTEM = ("export",)
GAP = "…"


def blocks(language):
    """(document, text) of every fenced block in `language`."""
    return [(name, block) for name, text in TEXTS.items() for block in re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)]


def commands():
    """(document, command, the output shown below it) of every line that begins with `$ ` in a console block."""
    found = []
    for name, block in blocks("console"):
        for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
            command, _, output = part.partition("\n")
            found.append((name, command, output.splitlines()))
    return found


def run(*arguments, **environment):
    return subprocess.run(
        [sys.executable, "-m", *arguments],
        cwd=REPOSITORY,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=120,
    )


def check_echo2(arguments, environment):
    """Plans and replays are made, training is planned, and the rest is parsed. Returns what was printed, if anything."""
    name, *rest = arguments
    if name == "train":
        # The documents name models and machines that are not here, so nothing is checked but the settings.
        name, rest = "plan", [argument for argument in rest if argument not in ("--resume", "--dry-run")]
    if name == "plan" or (name == "simulate" and "--plot" not in rest):
        done = run("echo2", name, *rest, **environment)
        assert done.returncode == 0, done.stderr
        return done.stdout
    context = command_line.commands[name].make_context(name, list(rest))
    load_config([], context.params.get("overrides", ()))
    return None


def check_make(arguments, _):
    rules = (REPOSITORY / "Makefile").read_text(encoding="utf-8")
    for target in (argument for argument in arguments if "=" not in argument):
        assert re.search(rf"^{target}:", rules, re.MULTILINE), f"the Makefile has no target {target}"


def check_pip(arguments, _):
    extras = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    assert arguments[0] == "install"
    for asked in re.findall(r"\[(.*)\]", arguments[1]):
        assert set(asked.split(",")) <= extras.keys()


def check_prefect(arguments, _):
    words = [word for word in arguments if re.fullmatch(r"[a-z]+", word)]
    done = run("prefect", *words, "--help")
    assert done.returncode == 0, done.stdout + done.stderr


def check_python(arguments, _):
    assert arguments[0] == "-m" or (REPOSITORY / arguments[0]).is_file()


def check_pre_commit(arguments, _):
    hooks = yaml.safe_load((REPOSITORY / ".pre-commit-config.yaml").read_text(encoding="utf-8"))["repos"][0]["hooks"]
    assert {shlex.split(hook["entry"])[0] for hook in hooks} <= {f".venv/bin/{name}" for name in ("ruff", "mypy", "python")}


def check_sky(arguments, _):
    assert arguments[0] == "launch"
    task = yaml.safe_load((REPOSITORY / arguments[1]).read_text(encoding="utf-8"))
    given = [arguments[place + 1].split("=")[0] for place, flag in enumerate(arguments) if flag in ("--env", "--secret")]
    assert sorted(given) == sorted(name for name, value in (task["envs"] | task["secrets"]).items() if value is None)
    assert set(task["secrets"].values()) == {None}
    line = next(line for line in task["run"].splitlines() if "echo2 worker" in line)
    worker = shlex.split(line.partition("bin/echo2 ")[2].rstrip("& "))
    check_echo2(worker, {})


CHECKS = {
    "echo2": check_echo2,
    "make": check_make,
    "pip": check_pip,
    "pre-commit": check_pre_commit,
    "prefect": check_prefect,
    "python": check_python,
    "sky": check_sky,
}


@pytest.mark.parametrize(("document", "command", "output"), commands(), ids=[command for _, command, _ in commands()])
def test_commands_in_documents_work(document, command, output):
    words = shlex.split(command)
    environment = {}
    while "=" in words[0]:
        name, _, value = words.pop(0).partition("=")
        environment[name] = value
    program = Path(words[0]).name
    if program in PROGRAMS_OF_THE_SYSTEM:
        return
    assert program in CHECKS, f"{document} shows {command!r}: say in CHECKS how to check {program}"
    printed = CHECKS[program](words[1:], environment)
    for line in output:
        assert line == GAP or line in (printed or "").splitlines(), f"{document}: {command!r} does not print {line!r}"


@pytest.mark.parametrize("document", TEXTS)
def test_paths_and_links_in_documents_exist(document):
    text = TEXTS[document]
    folders = "|".join(FOLDERS)
    named = set(re.findall(rf"(?<![\w./-])(?:{folders})/[\w./-]*\w/?", text))
    linked = {link for link in re.findall(r"\]\(([^)#]+)(?:#[\w-]*)?\)", text) if "://" not in link}
    base = (REPOSITORY / "docs" / document if (REPOSITORY / "docs" / document).exists() else REPOSITORY / document).parent
    assert [path for path in sorted(named) if not (REPOSITORY / path).exists()] == []
    assert [link for link in sorted(linked) if not (base / link).exists()] == []


def test_the_tree_in_the_readme_has_every_folder():
    tree = next(block for name, block in blocks("text") if name == "README.md" and block.startswith("echo2/"))
    shown, path = set(), []
    for line in tree.splitlines():
        depth = (len(line) - len(line.lstrip())) // 2
        path = [*path[:depth], line.split()[0]]
        shown.add("".join(path))
    packages = {f"{file.parent.relative_to(REPOSITORY)}/" for file in (REPOSITORY / "echo2").rglob("__init__.py")}
    present = {f"{folder}/" for folder in FOLDERS if any((REPOSITORY / folder).glob("*.*"))}
    assert shown == packages | present


def test_the_summary_in_the_readme_is_the_one_that_a_run_prints():
    summary = {
        "run_id": "demo-seed0-1",
        "steps": 100,
        "wall_s": 44.0,
        "exact_match_first": 0.1,
        "exact_match_last": 0.1,
        "busy_share_observed": 0.1,
        "busy_share_window_steps": 100,
        "busy_share_observed_in_window": 0.1,
        "busy_share_predicted": 0.1,
        "evaluations": [{"eval/version": v, "eval/pass@1": 0.1, "eval/pass@1_stderr": 0.01} for v in (0.0, 50.0, 100.0)],
        "max_staleness": 2,
        "staleness_bound": 2,
        "trained_groups": 1,
        "groups": {"filtered": 1, "expired": 1, "failed": 1},
        "versions_disseminated": 2,
        "workers": 2,
    }
    printed = render_summary(summary, load_config([], ["run.name=demo-seed0-1"]), elapsed_s=1.0)
    shown = next(block for name, block in blocks("text") if name == "README.md" and block.startswith("run demo"))

    def words(text):
        return [[word for word in line.split() if not re.search(rf"[\d{GAP}]", word)] for line in text.strip().splitlines()]

    assert words(shown) == words(printed)


def test_the_configuration_page_is_the_one_that_the_models_make():
    made = runpy.run_path(str(REPOSITORY / "docs" / "make_configuration.py"))["render"]()
    assert TEXTS["configuration.md"] == made, "run: python docs/make_configuration.py"


def test_the_architecture_page_lists_every_route_and_no_other(make_run):
    served = {f"{method} {route.path}" for route in create_app(make_run()).routes for method in route.methods}
    listed = re.findall(r"^\| `((?:GET|POST|PUT|DELETE) [^`]+)` \|", TEXTS["architecture.md"], re.MULTILINE)
    assert len(set(listed)) == len(listed)
    assert set(listed) == served


def test_the_license_is_the_one_that_the_package_names():
    text = (REPOSITORY / "LICENSE").read_text(encoding="utf-8")
    assert "Apache License" in text and "Version 2.0, January 2004" in text and "END OF TERMS AND CONDITIONS" in text
