"""The house rules as tests: layers, cycles, banned calls, documentation; and a report of budgets.

Sources are parsed, never imported. Each rule is a function from source text to a list of
complaints, so that the last tests can show each of them a made-up violation.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "python"
PACKAGE = "minisgl"

# --- the table of layers: module -> what it may import (arrows only point down) ------------------

NUMBERS = {"env", "utils", "params", "config", "message", "core", "kernel"}
STORES = NUMBERS | {"distributed", "kvcache", "quant"}
BLOCKS = STORES | {"attention", "moe", "layers"}
MODELS = BLOCKS | {"models"}
ENGINE = MODELS | {"engine"}
PLANS = ENGINE | {"scheduler", "tokenizer", "constraint"}
TOPS = PLANS | {"worker", "llm", "server"}

MAY_IMPORT: dict[str, set[str]] = {
    "env": set(),
    "utils": {"env"},
    "params": {"utils"},
    "config": {"params", "env", "utils"},
    "message": {"params", "utils"},
    "core": {"params", "utils"},
    "kernel": {"env", "utils"},
    "distributed": {"kernel", "config", "utils", "env"},
    "kvcache": {"core", "kernel", "distributed", "utils"},
    "quant": {"kernel", "utils"},
    "attention": STORES,
    "moe": STORES | {"attention"},
    "layers": STORES | {"attention"},
    "models": BLOCKS,
    "engine": MODELS,
    "scheduler": {"core", "config", "message", "kvcache", "utils", "env"},
    "tokenizer": {"params", "message", "utils"},
    "constraint": {"params", "utils"},
    "worker": PLANS,
    "llm": PLANS,
    "server": {"params", "config", "message", "tokenizer", "utils", "env"},
    "shell": TOPS,
    "benchmark": TOPS,
    "cli": TOPS | {"shell", "benchmark"},
    "__main__": {"cli"},
    # The package's front door looks names up when asked, so it imports nothing.
    "__init__": set(),
}

FREE_OF_TORCH = (
    "env",
    "utils",
    "params",
    "config",
    "message",
    "tokenizer",
    "shell",
    "benchmark",
    "cli",
)

BANNED_IMPORTS = {"pickle", "cPickle", "dill", "marshal", "shelve", "cloudpickle", "joblib"}
BANNED_CALLS = {"eval", "exec", "compile", "__import__", "torch.load", "os.system", "os.popen"}
WALL_CLOCK = {"time.time", "time.time_ns", "datetime.now", "datetime.datetime.now"}

MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60
MAX_LINE_LENGTH = 100
MAX_PACKAGE_LINES = 10_000


@dataclass(frozen=True)
class Source:
    """One parsed module: its dotted name, its text and its tree."""

    name: str
    text: str
    is_package: bool = False

    @property
    def tree(self) -> ast.Module:
        return ast.parse(self.text)

    @property
    def unit(self) -> str:
        """The first part below the package: `minisgl.utils.gguf` is in `utils`."""
        parts = self.name.split(".")
        return parts[1] if len(parts) > 1 else "__init__"


def all_sources() -> list[Source]:
    sources = []
    for path in sorted((SOURCE / PACKAGE).rglob("*.py")):
        parts = list(path.relative_to(SOURCE).with_suffix("").parts)
        is_package = parts[-1] == "__init__"
        name = ".".join(parts[:-1] if is_package else parts)
        sources.append(Source(name, path.read_text(encoding="utf-8"), is_package))
    return sources


# --- what a module imports -----------------------------------------------------------------------


def statements(tree: ast.AST) -> Iterator[ast.AST]:
    """All nodes but those under `if TYPE_CHECKING:`, which no program runs."""
    stack: list[ast.AST] = [tree]
    while stack:
        node = stack.pop()
        yield node
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            stack.extend(node.orelse)
        else:
            stack.extend(ast.iter_child_nodes(node))


def imports_of(source: Source) -> list[str]:
    """Dotted names of everything imported, also inside functions; relative ones resolved."""
    found = []
    for node in statements(source.tree):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                up = source.name.split(".")
                up = up if source.is_package else up[:-1]
                up = up[: len(up) - (node.level - 1)]
                base = ".".join([*up, *([base] if base else [])])
            found += [f"{base}.{alias.name}" for alias in node.names]
    return found


def units_of(source: Source) -> set[str]:
    """The units of the package that a module imports, its own left out."""
    units = set()
    for name in imports_of(source):
        parts = name.split(".")
        if parts[0] == PACKAGE:
            inside = len(parts) > 1 and parts[1] in MAY_IMPORT
            units.add(parts[1] if inside else "__init__")
    return units - {source.unit}


# --- the rules: each gives a list of complaints --------------------------------------------------


def layer_violations(source: Source) -> list[str]:
    if source.unit not in MAY_IMPORT:
        return [f"{source.name}: {source.unit} is not in the table of layers"]
    allowed = MAY_IMPORT[source.unit]
    return [
        f"{source.name} imports {unit}: {source.unit} may import {', '.join(sorted(allowed))}"
        for unit in sorted(units_of(source) - allowed - {"__init__"})
    ]


def cycles(sources: list[Source]) -> list[str]:
    """Cycles among modules by their top-level imports (one inside a function breaks a cycle)."""
    names = {source.name for source in sources}
    edges: dict[str, list[str]] = {}
    for source in sources:
        top = Source(source.name, _top_level_only(source.tree), source.is_package)
        targets = dict.fromkeys(_module_of(name, names) for name in imports_of(top))
        edges[source.name] = [t for t in targets if t and t != source.name]
    complaints, state = [], dict.fromkeys(edges, 0)

    def visit(name: str, path: list[str]) -> None:
        state[name] = 1
        for target in edges[name]:
            if state[target] == 1:
                complaints.append(" -> ".join([*path[path.index(target) :], target]))
            elif state[target] == 0:
                visit(target, [*path, target])
        state[name] = 2

    for name in edges:
        if state[name] == 0:
            visit(name, [name])
    return complaints


def _top_level_only(tree: ast.Module) -> str:
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    return ast.unparse(ast.Module([n for n in tree.body if not isinstance(n, kinds)], []))


def _module_of(name: str, names: set[str]) -> str | None:
    """The module that an imported name lives in."""
    if name in names:
        return name
    parent = name.rpartition(".")[0]
    return parent if parent in names else None


def banned_things(source: Source) -> list[str]:
    complaints = []
    for name in imports_of(source):
        if name.split(".")[0] in BANNED_IMPORTS:
            complaints.append(f"{source.name} imports {name}")
    for node in ast.walk(source.tree):
        where = f"{source.name}:{getattr(node, 'lineno', 0)}"
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            if called in BANNED_CALLS:
                complaints.append(f"{where} calls {called}")
            if any(k.arg == "allow_pickle" and not _is_false(k.value) for k in node.keywords):
                complaints.append(f"{where} allows pickle")
            if any(k.arg == "trust_remote_code" and not _is_false(k.value) for k in node.keywords):
                complaints.append(f"{where} trusts remote code")
            if called in WALL_CLOCK and source.unit == "scheduler":
                complaints.append(f"{where} looks at the wall clock: {called}")
        if isinstance(node, ast.ExceptHandler):
            complaints += [f"{where} {what}" for what in _bad_handler(node)]
        if isinstance(node, (ast.For, ast.comprehension)) and _is_set(node.iter):
            complaints.append(f"{where or source.name} iterates over a set")
    return complaints


def _is_false(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is False


def _bad_handler(node: ast.ExceptHandler) -> list[str]:
    if node.type is None:
        return ["catches everything with a bare except"]
    broad = ast.unparse(node.type) in ("Exception", "BaseException")
    if broad and len(node.body) == 1 and isinstance(node.body[0], ast.Pass):
        return ["swallows every error: except Exception: pass"]
    return []


def _is_set(node: ast.expr) -> bool:
    if isinstance(node, (ast.Set, ast.SetComp)):
        return True
    return isinstance(node, ast.Call) and ast.unparse(node.func) in ("set", "frozenset")


def undocumented(source: Source) -> list[str]:
    """Modules, and public classes, functions and methods without a docstring."""
    complaints = [] if ast.get_docstring(source.tree) else [f"{source.name} has no docstring"]

    def visit(body: list[ast.stmt], path: str) -> None:
        for node in body:
            if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                continue
            if node.name.startswith("_") or _needs_no_docstring(node):
                continue
            if not ast.get_docstring(node):
                complaints.append(f"{path}.{node.name} has no docstring")
            if isinstance(node, ast.ClassDef):
                visit(node.body, f"{path}.{node.name}")

    visit(source.tree.body, source.name)
    return complaints


def _needs_no_docstring(node: ast.stmt) -> bool:
    """Setters and overloads are documented where the getter or the function is."""
    names = [ast.unparse(d) for d in getattr(node, "decorator_list", [])]
    return any(n.endswith((".setter", "overload", "override")) for n in names)


def bounds_of(source: Source) -> dict[str, str]:
    """The constants MAX_* of a module and the expressions that are their values."""
    found = {}
    for node in source.tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            found[node.targets[0].id] = ast.unparse(node.value)
    return {name: value for name, value in found.items() if name.startswith("MAX_")}


def unlisted_bounds(sources: list[Source], page: str) -> list[str]:
    """Bounds that the page of limits does not give, and rows of the page that are out of date."""
    rows = set(re.findall(r"^\| `(MAX_\w+)` \| `([\w.]+)` \| `([^`]+)` \|", page, re.MULTILINE))
    bounds = {
        (name, source.name.removeprefix(PACKAGE + "."), value)
        for source in sources
        for name, value in bounds_of(source).items()
    }
    missing = [f"docs/limits.md lacks {bound}" for bound in sorted(bounds - rows)]
    return missing + [
        f"docs/limits.md has {row}, the code has not" for row in sorted(rows - bounds)
    ]


def over_budget(source: Source) -> list[str]:
    lines = source.text.splitlines()
    complaints = []
    if len(lines) > MAX_FILE_LINES:
        complaints.append(f"{source.name}: {len(lines)} lines, aim for {MAX_FILE_LINES}")
    for number, line in enumerate(lines, 1):
        if len(line) > MAX_LINE_LENGTH:
            complaints.append(f"{source.name}:{number}: {len(line)} columns")
    for node in ast.walk(source.tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            if length > MAX_FUNCTION_LINES:
                complaints.append(f"{source.name}.{node.name}: {length} lines")
    return complaints


# --- the tests -----------------------------------------------------------------------------------

SOURCES = all_sources()


def expect_none(complaints: list[str]) -> None:
    if complaints:
        pytest.fail("\n".join(complaints), pytrace=False)


def test_arrows_only_point_down_the_table_of_layers() -> None:
    expect_none([c for source in SOURCES for c in layer_violations(source)])


def test_the_table_itself_has_no_cycle() -> None:
    fake = [
        Source(f"{PACKAGE}.{unit}", "\n".join(f"import {PACKAGE}.{d}" for d in sorted(deps)))
        for unit, deps in MAY_IMPORT.items()
    ]
    assert cycles(fake) == []


def test_no_cycle_among_the_modules() -> None:
    expect_none(cycles(SOURCES))


def test_nothing_banned_is_used() -> None:
    expect_none([c for source in SOURCES for c in banned_things(source)])


def test_everything_public_is_documented() -> None:
    expect_none([c for source in SOURCES for c in undocumented(source)])


def test_the_page_of_limits_lists_every_bound() -> None:
    expect_none(unlisted_bounds(SOURCES, (ROOT / "docs/limits.md").read_text(encoding="utf-8")))


@pytest.mark.parametrize("unit", FREE_OF_TORCH)
def test_imports_without_torch(unit: str) -> None:
    if not any(source.unit == unit for source in SOURCES):
        pytest.fail(f"{unit} is not there")
    code = (
        f"import sys; sys.path.insert(0, {str(SOURCE)!r}); import {PACKAGE}.{unit}; "
        "print([m for m in ('torch', 'transformers') if m in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (result.stdout.strip(), result.returncode) == ("[]", 0), result.stderr


def test_budgets_are_reported(capsys: pytest.CaptureFixture[str]) -> None:
    total = sum(len(source.text.splitlines()) for source in SOURCES)
    report = [c for source in SOURCES for c in over_budget(source)]
    with capsys.disabled():
        print(f"\ntidy: {len(SOURCES)} modules, {total} lines, aim for {MAX_PACKAGE_LINES}")
        for line in report:
            print(f"tidy: over budget: {line}")


# --- each rule catches a made-up violation -------------------------------------------------------


def made_up(text: str, name: str = "minisgl.scheduler.plan", package: bool = False) -> Source:
    return Source(name, text, package)


@pytest.mark.parametrize(
    "text",
    [
        "from minisgl.engine import Engine",
        "import minisgl.models.llama",
        "from minisgl import layers",
        "from ..attention import base",
        "def later():\n    from minisgl.llm import LLM",
    ],
)
def test_an_arrow_that_points_up_is_caught(text: str) -> None:
    assert len(layer_violations(made_up(text))) == 1


def test_an_arrow_for_the_type_checker_alone_is_allowed() -> None:
    guarded = (
        "if TYPE_CHECKING:\n    from minisgl.engine import Engine\nelse:\n    import minisgl.core"
    )
    assert layer_violations(made_up(guarded)) == []


def test_a_module_outside_the_table_is_caught() -> None:
    assert len(layer_violations(made_up("", "minisgl.misc.stuff"))) == 1


def test_a_cycle_is_caught() -> None:
    first = made_up("from .b import x", "minisgl.a")
    second = made_up("from . import a", "minisgl.b")
    assert cycles([first, second]) == ["minisgl.a -> minisgl.b -> minisgl.a"]


@pytest.mark.parametrize(
    "text",
    [
        "import pickle",
        "from dill import loads",
        "eval('1')",
        "exec('x = 1')",
        "torch.load('weights.bin')",
        "np.load('x.npy', allow_pickle=True)",
        "load(trust_remote_code=flag)",
        "now = time.time()",
        "try:\n    x()\nexcept:\n    y()",
        "try:\n    x()\nexcept Exception:\n    pass",
        "for x in {1, 2}:\n    pass",
        "y = [x for x in set(z)]",
    ],
)
def test_a_banned_thing_is_caught(text: str) -> None:
    assert len(banned_things(made_up(text))) == 1


def test_the_wall_clock_is_banned_in_the_scheduler_only() -> None:
    assert banned_things(made_up("now = time.time()", "minisgl.llm.run")) == []


def test_missing_documentation_is_caught() -> None:
    text = "class A:\n    def f(self): ...\n    def _g(self): ...\ndef h(): ..."
    assert len(undocumented(made_up(text))) == 4  # the module, A, A.f and h


def test_a_bound_that_is_not_on_the_page_is_caught_and_so_is_an_old_row() -> None:
    source = made_up("MAX_A = 1 << 4\nMAX_B = 5\nmax_c = 1")
    page = "| `MAX_A` | `scheduler.plan` | `1 << 4` | right |\n"
    assert unlisted_bounds([source], page + "| `MAX_B` | `scheduler.plan` | `5` | right |") == []
    assert len(unlisted_bounds([source], page)) == 1
    assert len(unlisted_bounds([source], page + "| `MAX_B` | `scheduler.plan` | `6` | old |")) == 2


def test_budgets_see_long_files_functions_and_lines() -> None:
    body = "def f():\n" + "    x = 1\n" * 60 + "\n" * 350 + "y = " + "1" * 120
    kinds = [c.split(":")[-1].split()[1] for c in over_budget(made_up(body))]
    assert kinds == ["lines,", "columns", "lines"]
