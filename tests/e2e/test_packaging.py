"""The wheel holds what users need, and works where it is installed."""

import os
import subprocess
import sys
import zipfile
from importlib.util import find_spec
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(find_spec("setuptools") is None or find_spec("pip") is None, reason="a wheel needs setuptools and pip"),
]
ROOT = Path(__file__).parents[2]


def run(*command: str, folder: Path, **environment: str) -> str:
    done = subprocess.run(
        command, cwd=folder, env={**os.environ, **environment}, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr + done.stdout
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel, built from a copy of what is needed for one: builds leave files behind."""
    source, target = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        (source / name).write_bytes((ROOT / name).read_bytes())
    for path in (ROOT / "src").rglob("*"):
        if path.is_file() and "__pycache__" not in path.parts and ".egg-info" not in str(path):
            copy = source / path.relative_to(ROOT)
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_bytes(path.read_bytes())
    # Offline: with what is installed here, and without the packages that it needs.
    command = [sys.executable, "-m", "pip", "wheel", ".", "--no-build-isolation", "--no-deps", "--no-index", "-w", str(target)]
    run(*command, folder=source)
    (built,) = target.glob("shardwise-*.whl")
    return built


def test_wheel_holds_every_module_the_recipes_and_the_mark_of_types(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    package = ROOT / "src" / "shardwise"
    expected = {
        path.relative_to(package.parent).as_posix() for suffix in ("py", "toml") for path in package.rglob(f"*.{suffix}")
    }
    assert len([name for name in expected if name.endswith(".toml")]) == 3
    assert expected | {"shardwise/py.typed"} <= names
    assert not [name for name in names if name.startswith(("tests", "benchmarks"))]


def test_installed_package_answers_from_anywhere(wheel: Path, tmp_path: Path) -> None:
    site, elsewhere = tmp_path / "site", tmp_path / "elsewhere"
    elsewhere.mkdir()
    pip = [sys.executable, "-m", "pip", "install", "--no-deps", "--no-index", "--target", str(site), str(wheel)]
    run(*pip, folder=elsewhere)
    where = run(sys.executable, "-c", "import shardwise; print(shardwise.__file__)", folder=elsewhere, PYTHONPATH=str(site))
    assert where.startswith(str(site))
    version = run(sys.executable, "-m", "shardwise", "--version", folder=elsewhere, PYTHONPATH=str(site))
    assert version.startswith("shardwise 0.")
    script = run(str(site / "bin" / "shardwise"), "train", "digits", "--show", folder=elsewhere, PYTHONPATH=str(site))
    assert 'task = "digits"' in script
