"""What a user installs: the wheel and the sdist hold every file that is needed, and nothing
else."""

from __future__ import annotations

import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import pytest

import shardwright

ROOT = Path(__file__).resolve().parents[2]
JUNK = {"__pycache__", ".venv", ".git", "build", "dist"}


def files_under(folder: Path) -> set[str]:
    found = (
        path
        for path in folder.rglob("*")
        if path.is_file() and not JUNK & set(path.relative_to(folder).parts)
    )
    return {str(path.relative_to(folder)) for path in found}


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """sdist, and the wheel made from that sdist."""
    pytest.importorskip("build.__main__")  # a folder build/ of the repository is no package
    out = tmp_path_factory.mktemp("dist")
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "build",
            "--no-isolation",
            "--skip-dependency-check",
            "--outdir",
            str(out),
            str(ROOT),
        ],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return out


def wheel(built: Path) -> zipfile.ZipFile:
    (path,) = built.glob("*.whl")
    return zipfile.ZipFile(path)


def test_wheel_holds_the_package_templates_and_recipes_and_no_more(built: Path) -> None:
    names = set(wheel(built).namelist())
    info = f"shardwright-{shardwright.__version__}.dist-info"
    expected = {f"shardwright/{name}" for name in files_under(ROOT / "compiler/shardwright")}
    expected |= {f"shardwright/_templates/{name}" for name in files_under(ROOT / "templates")}
    expected |= {f"shardwright/_recipes/{name}" for name in files_under(ROOT / "recipes")}
    expected |= {
        f"{info}/{name}"
        for name in ("METADATA", "RECORD", "WHEEL", "entry_points.txt", "licenses/LICENSE")
    }
    assert names == expected
    assert {"shardwright/py.typed", "shardwright/_templates/launch/local.sh.j2"} <= names


def test_wheel_names_the_command(built: Path) -> None:
    info = f"shardwright-{shardwright.__version__}.dist-info"
    assert (
        "shardwright = shardwright.cli.main:main"
        in wheel(built).read(f"{info}/entry_points.txt").decode()
    )


def test_installed_package_finds_its_own_data(built: Path, tmp_path: Path) -> None:
    wheel(built).extractall(tmp_path)
    code = (
        "import shardwright.utils.installation as r; print(r.__file__, r.templates_folder(), "
        "r.recipes_folder(), sep='\\n')"
    )
    done = subprocess.run(
        [sys.executable, "-S", "-c", code],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={"PYTHONPATH": str(tmp_path)},
    )
    package = tmp_path / "shardwright"
    assert done.stdout.split("\n")[:3] == [
        str(package / name) for name in ("utils/installation.py", "_templates", "_recipes")
    ], done.stderr
    assert (package / "_recipes/tiny-llama-cpu.yaml").read_bytes() == (
        ROOT / "recipes/tiny-llama-cpu.yaml"
    ).read_bytes()


def test_sdist_holds_what_the_tests_need(built: Path) -> None:
    (path,) = built.glob("*.tar.gz")
    with tarfile.open(path) as archive:
        names = {name.split("/", 1)[1] for name in archive.getnames() if "/" in name}
    needed = {
        "Makefile",
        "constraints.txt",
        "pyproject.toml",
        "README.md",
        "CHANGELOG.md",
        "LICENSE",
    }
    needed |= {
        f"{top}/{name}"
        for top in ("compiler", "templates", "recipes", "tests")
        for name in files_under(ROOT / top)
    }
    assert needed <= names
    assert not {name for name in names if JUNK & set(name.split("/"))}


def _applies(requirement: Any) -> bool:
    """Return whether the running Python needs the requirement."""
    return requirement.marker is None or bool(requirement.marker.evaluate())


def test_constraints_pin_every_dependency() -> None:
    import tomllib

    from packaging.requirements import Requirement
    from packaging.utils import canonicalize_name

    lines = [
        line
        for line in (ROOT / "constraints.txt").read_text().splitlines()
        if not line.startswith("#")
    ]
    pinned = [requirement for requirement in map(Requirement, lines) if _applies(requirement)]
    pins = {canonicalize_name(r.name): str(r.specifier).removeprefix("==") for r in pinned}
    assert all("+" not in version for version in pins.values())
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    for text in [*project["dependencies"], *(text for texts in extras.values() for text in texts)]:
        requirement = Requirement(text)
        if not _applies(requirement):
            continue
        if requirement.name == project["name"]:  # an extra made of other extras
            assert requirement.extras <= extras.keys()
            continue
        assert requirement.specifier.contains(pins[canonicalize_name(requirement.name)]), text
