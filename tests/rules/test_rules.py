"""Rules of the code that ruff, mypy and import-linter cannot express, checked on the syntax trees of `src/shardwise`.

A rule is a function from one parsed file to its violations. The planted trees below show that each rule can fail.
"""

import ast
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

PACKAGE_ROOT = Path(__file__).parents[2] / "src" / "shardwise"
MAX_LINES = 500
ENVIRONMENT_NAMES = ("os.environ", "os.environb", "os.getenv", "os.getenvb", "os.putenv", "os.unsetenv")


@dataclass(frozen=True)
class Source:
    """One file: its path below the package root, its text and its tree."""

    path: Path
    text: str
    tree: ast.Module

    @property
    def layer(self) -> str:
        return self.path.parts[0].removesuffix(".py")


Violation = tuple[int, str]
Rule = Callable[[Source], Iterator[Violation]]


def read_sources(root: Path) -> list[Source]:
    texts = {path: path.read_text(encoding="utf-8") for path in sorted(root.rglob("*.py"))}
    return [Source(path.relative_to(root), text, ast.parse(text, str(path))) for path, text in texts.items()]


def find_violations(root: Path, rule: Rule) -> list[str]:
    return [f"{root / source.path}:{line}: {message}" for source in read_sources(root) for line, message in rule(source)]


def is_inside(name: str, parent: str) -> bool:
    return name == parent or name.startswith(f"{parent}.")


def imported_names(tree: ast.Module) -> Iterator[tuple[int, str, str]]:
    """Yield (line, name it is bound to, full dotted name) for every absolute import."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                # `import a.b` binds `a`; `import a.b as c` binds `c` to `a.b`.
                yield node.lineno, alias.asname or alias.name, alias.name
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            for alias in node.names:
                yield node.lineno, alias.asname or alias.name, f"{node.module}.{alias.name}"


def dotted_name(node: ast.expr, bound: dict[str, str]) -> str | None:
    """Return `torch.distributed.x` for the expression `dist.x` after `import torch.distributed as dist`."""
    match node:
        case ast.Name():
            return bound.get(node.id)
        case ast.Attribute():
            parent, attribute = node.value, node.attr
        case ast.Call(func=ast.Name(id="getattr"), args=[parent, ast.Constant(value=str(attribute)), *_]):
            pass
        case _:
            return None
    prefix = dotted_name(parent, bound)
    return prefix and f"{prefix}.{attribute}"


def used_names(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield (line, full dotted name) for every import and every attribute read through an imported name."""
    bound = {}
    for line, local, full in imported_names(tree):
        yield line, full
        if "." in local:
            bound[local.split(".")[0]] = full.split(".")[0]
        else:
            bound[local] = full
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute | ast.Call) and (name := dotted_name(node, bound)):
            yield node.lineno, name


def is_private_torch(name: str) -> bool:
    parts = name.split(".")
    return parts[0] == "torch" and any(part.startswith("_") and not part.endswith("__") for part in parts[1:])


def no_assert(source: Source) -> Iterator[Violation]:
    if source.layer != "testing":
        for node in ast.walk(source.tree):
            if isinstance(node, ast.Assert):
                yield node.lineno, "`assert` vanishes under `python -O`; raise an error that names the remedy"


def environment_in_cli_only(source: Source) -> Iterator[Violation]:
    if source.layer not in ("cli", "testing"):
        for line, name in used_names(source.tree):
            if name in ENVIRONMENT_NAMES:
                yield line, f"`{name}` belongs in cli; pass the value in"


def private_torch_in_devices_only(source: Source) -> Iterator[Violation]:
    if source.layer not in ("devices", "testing"):
        for line, name in used_names(source.tree):
            if is_private_torch(name):
                yield line, f"`{name}` is private to torch; call it in devices"


def core_without_distributed(source: Source) -> Iterator[Violation]:
    if source.layer == "core":
        for line, name in used_names(source.tree):
            if is_inside(name, "torch.distributed"):
                yield line, f"core is pure: `{name}` belongs in wire or above"


def short_files(source: Source) -> Iterator[Violation]:
    num_lines = len(source.text.splitlines())
    if num_lines > MAX_LINES:
        yield MAX_LINES + 1, f"{num_lines} lines where {MAX_LINES} is the most; split the file by its nouns"


def module_docstring(source: Source) -> Iterator[Violation]:
    is_private = any(part.startswith("_") and not part.startswith("__") for part in source.path.parts)
    if not is_private and not ast.get_docstring(source.tree):
        yield 1, "a public module needs a docstring: what it owns and what it must not know"


RULES = [
    no_assert,
    environment_in_cli_only,
    private_torch_in_devices_only,
    core_without_distributed,
    short_files,
    module_docstring,
]

BROKEN = {
    "assert": (no_assert, "core/unit.py", "x = 1\nassert x\n", 2),
    "assert-nested": (no_assert, "api/shard.py", "def f(x):\n    if x:\n        assert x\n", 3),
    "environ": (environment_in_cli_only, "wire/comm.py", "import os\nrank = os.environ['RANK']\n", 2),
    "environ-in-root": (environment_in_cli_only, "__init__.py", "import os\nrank = os.environ.get('RANK')\n", 2),
    "getenv-from": (environment_in_cli_only, "api/plan.py", "from os import getenv\n", 1),
    "getenv-alias": (environment_in_cli_only, "api/plan.py", "import os as system\n\nsystem.getenv('X')\n", 3),
    "os-path-first": (environment_in_cli_only, "api/plan.py", "import os.path\n\nos.getenv('X')\n", 3),
    "torch-C": (private_torch_in_devices_only, "runtime/hooks.py", "import torch\ntorch._C.x()\n", 2),
    "torch-private-from": (private_torch_in_devices_only, "core/unit.py", "from torch import _foreach_add\n", 1),
    "torch-private-module": (private_torch_in_devices_only, "core/unit.py", "import torch._dynamo\n", 1),
    "torch-private-deep": (private_torch_in_devices_only, "core/unit.py", "from torch.utils._pytree import tree_map\n", 1),
    "torch-getattr": (private_torch_in_devices_only, "core/unit.py", "import torch\ngetattr(torch, '_C')\n", 2),
    "c10d-private": (
        private_torch_in_devices_only,
        "wire/torch_comm.py",
        "from torch.distributed import distributed_c10d as c10d\nc10d._get_default_group()\n",
        2,
    ),
    "core-distributed": (core_without_distributed, "core/plan.py", "import torch.distributed as dist\n", 1),
    "core-distributed-from": (core_without_distributed, "core/plan.py", "from torch import distributed\n", 1),
    "core-distributed-attribute": (core_without_distributed, "core/plan.py", "import torch\ntorch.distributed.barrier()\n", 2),
    "core-distributed-local": (
        core_without_distributed,
        "core/plan.py",
        "def f():\n    from torch.distributed.fsdp import MixedPrecisionPolicy\n",
        2,
    ),
    "long-file": (short_files, "core/plan.py", "x = 1\n" * (MAX_LINES + 1), MAX_LINES + 1),
    "no-docstring": (module_docstring, "core/plan.py", "x = 1\n", 1),
    "no-docstring-package": (module_docstring, "core/__init__.py", "", 1),
}

ALLOWED = {
    "assert-in-testing": (no_assert, "testing/worlds.py", "assert True\n"),
    "environ-in-cli": (environment_in_cli_only, "cli/main.py", "import os\nos.environ['X']\n"),
    "environ-in-testing": (environment_in_cli_only, "testing/worlds.py", "import os\nos.environ['X']\n"),
    "other-os": (environment_in_cli_only, "api/plan.py", "import os\nos.getpid()\n"),
    "someone-elses-environ": (environment_in_cli_only, "api/plan.py", "def f(job):\n    return job.environ\n"),
    "private-in-devices": (private_torch_in_devices_only, "devices/torch_private.py", "import torch\ntorch._C.x()\n"),
    "torch-dunder": (private_torch_in_devices_only, "core/unit.py", "import torch\ntorch.__version__\n"),
    "own-private": (private_torch_in_devices_only, "core/unit.py", "class A:\n    def f(self):\n        return self._x\n"),
    "core-torch-nn": (core_without_distributed, "core/unit.py", "import torch\nfrom torch import nn\n"),
    "wire-distributed": (core_without_distributed, "wire/comm.py", "import torch.distributed as dist\n"),
    "full-file": (short_files, "core/plan.py", "x = 1\n" * MAX_LINES),
    "docstring": (module_docstring, "core/plan.py", '"""Owns the plan."""\n'),
    "private-module": (module_docstring, "core/_tables.py", "x = 1\n"),
}


def plant(root: Path, path: str, text: str) -> Path:
    target = root / path
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(text, encoding="utf-8")
    return target


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_source_follows_rule(rule: Rule) -> None:
    violations = find_violations(PACKAGE_ROOT, rule)
    assert not violations, "\n" + "\n".join(violations)


def test_source_is_found() -> None:
    assert read_sources(PACKAGE_ROOT), f"no Python file below {PACKAGE_ROOT}: the rules would pass on nothing"


@pytest.mark.parametrize(("rule", "path", "text", "line"), BROKEN.values(), ids=BROKEN.keys())
def test_broken_rule_names_file_and_line(rule: Rule, path: str, text: str, line: int, tmp_path: Path) -> None:
    target = plant(tmp_path, path, text)
    violations = find_violations(tmp_path, rule)
    assert violations
    assert all(violation.startswith(f"{target}:{line}: ") for violation in violations), violations


@pytest.mark.parametrize(("rule", "path", "text"), ALLOWED.values(), ids=ALLOWED.keys())
def test_allowed_source_passes(rule: Rule, path: str, text: str, tmp_path: Path) -> None:
    plant(tmp_path, path, text)
    assert find_violations(tmp_path, rule) == []


def test_every_rule_has_a_planted_violation() -> None:
    assert {rule for rule, *_ in BROKEN.values()} == set(RULES)
