"""The commands a newcomer types: one environment, pinned versions, and a clear word when something is missing."""

import ast
import os
import re
import shutil
import stat
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import saguaro_core

ROOT = Path(__file__).resolve().parent.parent

# Stands in for an interpreter and for the one in the environment: it logs what it is asked to do, and does nothing.
STUB = """#!/bin/sh
echo "$@" >> "{log}"
case "$*" in
  *"import sys"*) exit {old} ;;
  *"import venv"*) exit {no_venv} ;;
  "-m venv --clear .venv") mkdir -p .venv/bin && cp "$0" .venv/bin/python ;;
  *"pip install"*) exit {no_pip} ;;
esac
"""


class Workshop:
    """A copy of the build files in a folder of its own, with a stub for Python."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.log = folder / "log"
        for name in ("Makefile", "pyproject.toml", "constraints.txt"):
            shutil.copy(ROOT / name, folder / name)

    def make(
        self, *arguments: str, old: int = 0, no_venv: int = 0, no_pip: int = 0
    ) -> subprocess.CompletedProcess[str]:
        """Run make; the stub fails where told to."""
        stub = self.folder / "python-stub"
        stub.write_text(STUB.format(log=self.log, old=old, no_venv=no_venv, no_pip=no_pip))
        stub.chmod(stub.stat().st_mode | stat.S_IXUSR)
        environment = {k: v for k, v in os.environ.items() if not k.startswith(("MAKE", "MFLAGS"))}
        return subprocess.run(
            ["make", *arguments, f"PYTHON={stub}"],
            cwd=self.folder,
            env=environment,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    def installs(self) -> list[str]:
        lines = self.log.read_text().splitlines() if self.log.exists() else []
        return [line for line in lines if "pip install" in line]


@pytest.fixture
def workshop(tmp_path: Path) -> Workshop:
    if shutil.which("make") is None:
        pytest.skip("needs make")
    return Workshop(tmp_path)


def test_the_second_setup_does_nothing(workshop: Workshop) -> None:
    assert workshop.make("setup").returncode == 0
    assert len(workshop.installs()) == 1
    assert "-c constraints.txt" in workshop.installs()[0]
    assert workshop.make("setup").returncode == 0
    assert len(workshop.installs()) == 1


def test_changed_pins_are_installed(workshop: Workshop) -> None:
    workshop.make("setup")
    later = (workshop.folder / ".venv" / ".setup").stat().st_mtime + 10
    os.utime(workshop.folder / "constraints.txt", (later, later))
    workshop.make("setup")
    assert len(workshop.installs()) == 2


def test_a_failed_installation_is_tried_again(workshop: Workshop) -> None:
    assert workshop.make("setup", no_pip=1).returncode != 0
    (workshop.folder / ".venv" / "bin" / "python").write_text(
        STUB.format(log=workshop.log, old=0, no_venv=0, no_pip=0),
    )
    assert workshop.make("setup").returncode == 0
    assert len(workshop.installs()) == 2


def test_the_test_extras_contain_the_setup(workshop: Workshop) -> None:
    assert workshop.make("setup-test").returncode == 0
    assert workshop.installs()[0].endswith("-e .[test]")
    assert workshop.make("setup").returncode == 0
    assert len(workshop.installs()) == 1


def test_an_old_python_is_named(workshop: Workshop) -> None:
    result = workshop.make("run", old=1)
    assert result.returncode != 0
    assert "error: Python 3.11 or newer was not found" in result.stderr
    assert not workshop.installs()


def test_a_missing_venv_module_is_named_with_the_package_to_install(workshop: Workshop) -> None:
    result = workshop.make("setup", no_venv=1)
    assert result.returncode != 0
    assert "lacks the venv module. On Debian and Ubuntu: apt-get install python3-venv" in result.stderr
    assert not (workshop.folder / ".venv").exists()


def test_make_alone_lists_the_commands(workshop: Workshop) -> None:
    output = workshop.make().stdout
    for command in ("make setup", "make run", "make test", "make bench"):
        assert command in output


def _name(requirement: str) -> str:
    return re.split(r"[^A-Za-z0-9._-]", requirement, maxsplit=1)[0].lower().replace("_", "-")


def test_every_dependency_is_pinned() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    wanted = {_name(r) for r in [*project["dependencies"], *project["optional-dependencies"]["test"]]}
    lines = [line for line in (ROOT / "constraints.txt").read_text("utf-8").splitlines() if not line.startswith("#")]
    assert all(re.fullmatch(r"[A-Za-z0-9._-]+==[0-9][A-Za-z0-9.]*", line) for line in lines)
    assert wanted <= {_name(line) for line in lines}
    assert "torch==2.13.0" in lines


def test_the_ci_script_is_valid_and_runs_the_same_tests() -> None:
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    subprocess.run(["bash", "-n", str(script)], check=True)
    assert script.read_text("utf-8").rstrip().endswith("exec make test")


def test_the_licence_is_apache_2() -> None:
    text = (ROOT / "LICENSE").read_text("utf-8")
    assert "Version 2.0, January 2004" in text
    assert "The Saguaro playground authors" in text


def test_the_public_names_are_the_listed_ones() -> None:
    tree = ast.parse(Path(saguaro_core.__file__).read_text("utf-8"))
    imported = {
        alias.name
        for node in tree.body
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("saguaro_core")
        for alias in node.names
    }
    assert set(saguaro_core.__all__) == imported | {"__version__"}
    assert list(saguaro_core.__all__) == sorted(saguaro_core.__all__)


def test_light_imports_stay_light() -> None:
    """The app and the fetch command start in a blink, because neither torch nor transformers comes with them."""
    code = (
        "import sys\n"
        "import saguaro_core, saguaro_core.events, saguaro_core.status, saguaro_core.figures\n"
        "import saguaro_core.models.fetch, saguaro_core.models.catalogue\n"
        "heavy = {'torch', 'transformers', 'gradio', 'gguf'} & set(sys.modules)\n"
        "sys.exit(f'imported: {heavy}' if heavy else 0)\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
