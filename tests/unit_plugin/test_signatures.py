from __future__ import annotations

import ast
from pathlib import Path

import pytest

from vllm_ext_plugin.signatures import SourcePackage, compatible, signature

pytestmark = pytest.mark.unit

SOURCE = '''
from typing import TYPE_CHECKING, overload
from .registry import lookup as find

if TYPE_CHECKING:
    PLUGINS: list[str] | None = None

try:
    fast = True
except ImportError:
    fast = False

def plain(a: int, /, b: str = "x", *rest: int, key: int = 1, must: bool, **more: object) -> None:
    """def hidden(): ..."""
    second()
    if first():
        second()

class Base:
    inherited: int

    def method(self): ...

class Slotted:
    __slots__ = ("a",)

class Thing(Base, metaclass=type):
    field: "str | None" = None
    VALUE = 3

    def __init__(self, x):
        self.x: int = x
        self.y = self.z = 0

    @overload
    def many(self, a: int) -> int: ...
    @overload
    def many(self, a: str) -> str: ...
    def many(self, a, b=None): ...

    @property
    def level(self): ...
    @level.setter
    def level(self, value): ...

    @classmethod
    async def build(cls, *, size=4): ...

    @staticmethod
    @decorated
    def tool(parser): ...
'''
TREE = ast.parse(SOURCE)


@pytest.mark.parametrize(
    ("qualname", "text"),
    [
        ("plain", "def plain(a, /, b='x', *rest, key=1, must, **more)"),
        ("PLUGINS", "PLUGINS: list[str] | None"),
        ("fast", "fast"),
        ("find", "from .registry import find"),
        ("Base", "class Base"),
        ("Slotted", "class Slotted with slots"),
        ("Thing", "class Thing(Base)"),
        ("Thing.field", "field: str | None"),
        ("Thing.VALUE", "VALUE"),
        ("Thing.x", "self.x: int"),
        ("Thing.y", "self.y"),
        ("Thing.z", "self.z"),
        ("Thing.many", "def many(self, a, b=None)"),
        ("Thing.level", "@property def level(self)"),
        ("Thing.build", "@classmethod async def build(cls, *, size=4)"),
        ("Thing.tool", "@staticmethod def tool(parser)"),
        ("Thing.inherited", "inherited: int"),
        ("Thing.method", "def method(self)"),
        ("hidden", None),
        ("Thing.gone", None),
        ("Gone.x", None),
        ("plain.x", None),
    ],
)
def test_signature(qualname: str, text: str | None):
    assert signature(TREE, qualname) == text


def test_calls_are_listed_in_source_order_and_only_when_wanted():
    head = "def plain(a, /, b='x', *rest, key=1, must, **more)"
    assert signature(TREE, "plain", ("first", "second", "third")) == f"{head} calls second, first"
    assert signature(TREE, "plain", ("third",)) == head


def test_package_of_source_files(tmp_path: Path):
    root = tmp_path / "pkg"
    (root / "sub").mkdir(parents=True)
    (root / "__init__.py").write_text("raise RuntimeError('must not be executed')\nname = 1\n")
    (root / "sub" / "__init__.py").write_text("def f(): ...\n")
    (root / "sub" / "mod.py").write_text("class C: ...\n")
    package = SourcePackage(root)
    assert package.signature("pkg", "name") == "name"
    assert package.signature("pkg.sub", "f") == "def f()"
    assert package.signature("pkg.sub.mod", "C") == "class C"
    assert package.signature("pkg.gone", "C") is None and package.digest("pkg.gone") is None
    before = package.digest("pkg.sub.mod")
    (root / "sub" / "mod.py").write_text("class C: pass\n")
    assert package.digest("pkg.sub.mod") != before


def test_installed_package_is_found_without_importing_it():
    package = SourcePackage.installed("rich")
    assert package is not None and package.signature("rich.console", "Console.print") is not None
    assert SourcePackage.installed("no_such_package") is None
    assert SourcePackage.installed("math") is None, "compiled: there is nothing to read"


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        ("def f(a, b)", "def f(a, b)", True),
        ("def f(a, b)", "def f(a, b, c=None)", True),
        ("def f(a, b)", "def f(a, b, *, c=None, **more)", True),
        ("def f(a, b)", "def f(a, b=1)", True),
        ("def f(a, *, k)", "def f(a, *, k=1)", True),
        ("class A(B)", "class A(C)", True),
        ("x: int", "x: int | None", True),
        ("def f(a, b)", None, False),
        ("def f(a, b)", "def f(a)", False),
        ("def f(a, b)", "def f(a, c)", False),
        ("def f(a, b)", "def f(b, a)", False),
        ("def f(a, b)", "def f(a, b, c)", False),
        ("def f(a, b=1)", "def f(a, b)", False),
        ("def f(a, b)", "def f(a, *, b)", False),
        ("def f(a)", "def f(a, *, k)", False),
        ("def f(a, *, k)", "def f(a)", False),
        ("def f(a, *args)", "def f(a)", False),
        ("def f(a, **more)", "def f(a)", False),
        ("def f(a)", "async def f(a)", False),
        ("def f(a)", "@staticmethod def f(a)", False),
        ("def f(a) calls g, h", "def f(a) calls h, g", False),
        ("def f(a) calls g", "def f(a)", False),
        ("def f(a)", "f: Callable", False),
        ("class A", "class A with slots", False),
        ("class A", "def A()", False),
    ],
)
def test_compatible(before: str, after: str | None, expected: bool):
    assert compatible(before, after) is expected
