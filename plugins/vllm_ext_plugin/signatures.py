"""Signatures of a Python package read from its source files, without importing it.

Used on the installed vLLM at start and on unpacked wheels of other versions, with the same text as the
result:

    async def call_utility_async(self, method, *args)
    @staticmethod def add_cli_args(parser)
    class Request
    scheduler_cls: str | type[object] | None
    self.cache_salt: str | None

Annotations of parameters are left out (they change without consequence), those of fields are kept.
"""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Iterable, Iterator
from importlib.util import find_spec
from pathlib import Path

FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
KEPT_DECORATORS = ("staticmethod", "classmethod", "property")


class SourcePackage:
    """The source files of one version of a package.

    Args:
        root: the package's folder, e.g. `…/site-packages/vllm`.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self._trees: dict[str, ast.Module | None] = {}

    @classmethod
    def installed(cls, package: str = "vllm") -> SourcePackage | None:
        """The installed package, found without executing any of it; None when it is not installed as
        source."""
        spec = find_spec(package)
        if spec is None or spec.origin is None or not spec.origin.endswith(".py"):
            return None
        return cls(Path(spec.origin).parent)

    def path(self, module: str) -> Path | None:
        """The file of a dotted module name; None when there is no such module."""
        base = self.root.joinpath(*module.split(".")[1:])
        for path in (base / "__init__.py", base.with_suffix(".py")):
            if path.is_file():
                return path
        return None

    def digest(self, module: str) -> str | None:
        """sha256 of the module's source, to tell an unchanged file without parsing it; None without such a
        module."""
        path = self.path(module)
        return None if path is None else hashlib.sha256(path.read_bytes()).hexdigest()

    def signature(self, module: str, qualname: str, calls: Iterable[str] = ()) -> str | None:
        """Text that stands for `qualname` of `module`; None when it is not there.

        A function's text ends with those of `calls` that its body calls, in the order of their first call.
        """
        if module not in self._trees:
            path = self.path(module)
            self._trees[module] = None if path is None else ast.parse(path.read_text(encoding="utf-8"))
        tree = self._trees[module]
        return None if tree is None else signature(tree, qualname, calls)


def signature(tree: ast.Module, qualname: str, calls: Iterable[str] = ()) -> str | None:
    """`SourcePackage.signature` for a parsed module."""
    scope: ast.Module | ast.ClassDef = tree
    *owners, name = qualname.split(".")
    for owner in owners:
        found = next((node for node in _find(scope, owner) if isinstance(node, ast.ClassDef)), None)
        if found is None:
            return None
        scope = found
    node = next(_find(scope, name), None)
    if node is not None:
        return _describe(node, name, tuple(calls))
    if isinstance(scope, ast.ClassDef):
        return _instance_attribute(scope, name) or _inherited(tree, scope, name, tuple(calls))
    return None


def compatible(expected: str, found: str | None) -> bool:
    """Whether code written against `expected` works with `found`: the same, or optional additions only."""
    if found is None:
        return False
    if expected == found:
        return True
    before, after = _parse_function(expected), _parse_function(found)
    if before is None or after is None:
        # Another base class or annotation of a field that is still there does no harm by itself.
        return before is after and _kind(expected) == _kind(found)
    if _kind(expected) != _kind(found) or expected.partition(" calls ")[2] != found.partition(" calls ")[2]:
        return False
    return _accepts(before, after)


def _find(scope: ast.Module | ast.ClassDef, name: str) -> Iterator[ast.stmt]:
    """Statements that define `name` in the scope itself, looking into `if` and `try` blocks."""
    pending: list[ast.stmt] = list(reversed(scope.body))
    while pending:
        node = pending.pop()
        if isinstance(node, ast.If):
            pending += reversed(node.body + node.orelse)
        elif isinstance(node, ast.Try):
            pending += reversed(node.body + [part for handler in node.handlers for part in handler.body])
        elif _defines(node, name):
            yield node


def _defines(node: ast.stmt, name: str) -> bool:
    if isinstance(node, FUNCTIONS):
        # Overloads and property setters repeat a name with another meaning.
        marks = [ast.unparse(decorator).rpartition(".")[2] for decorator in node.decorator_list]
        return node.name == name and not {"overload", "setter"} & set(marks)
    if isinstance(node, ast.ClassDef):
        return node.name == name
    if isinstance(node, ast.AnnAssign):
        return isinstance(node.target, ast.Name) and node.target.id == name
    if isinstance(node, ast.Assign):
        return any(isinstance(target, ast.Name) and target.id == name for target in node.targets)
    if isinstance(node, ast.ImportFrom):
        return any((alias.asname or alias.name) == name for alias in node.names)
    return False


def _describe(node: ast.stmt, name: str, calls: tuple[str, ...]) -> str:
    if isinstance(node, FUNCTIONS):
        return _function(node, calls)
    if isinstance(node, ast.ClassDef):
        return _class(node)
    if isinstance(node, ast.AnnAssign):
        return f"{name}: {_annotation(node.annotation)}"
    if isinstance(node, ast.ImportFrom):
        return f"from {'.' * node.level}{node.module or ''} import {name}"
    return name


def _function(node: ast.FunctionDef | ast.AsyncFunctionDef, calls: tuple[str, ...]) -> str:
    decorators = [f"@{text} " for text in map(ast.unparse, node.decorator_list) if text in KEPT_DECORATORS]
    keyword = "async def" if isinstance(node, ast.AsyncFunctionDef) else "def"
    parameters = ast.unparse(_without_annotations(node.args))
    text = f"{''.join(decorators)}{keyword} {node.name}({parameters})"
    made = _calls_in_order(node, calls)
    return f"{text} calls {', '.join(made)}" if made else text


def _without_annotations(arguments: ast.arguments) -> ast.arguments:
    def bare(argument: ast.arg) -> ast.arg:
        return ast.arg(arg=argument.arg)

    return ast.arguments(
        posonlyargs=[bare(argument) for argument in arguments.posonlyargs],
        args=[bare(argument) for argument in arguments.args],
        vararg=arguments.vararg and bare(arguments.vararg),
        kwonlyargs=[bare(argument) for argument in arguments.kwonlyargs],
        kw_defaults=arguments.kw_defaults,
        kwarg=arguments.kwarg and bare(arguments.kwarg),
        defaults=arguments.defaults,
    )


def _calls_in_order(function: ast.AST, wanted: tuple[str, ...]) -> list[str]:
    made = [
        (node.lineno, node.col_offset, ast.unparse(node.func))
        for node in ast.walk(function)
        if isinstance(node, ast.Call)
    ]
    return list(dict.fromkeys(name for _, _, name in sorted(made) if name in wanted))


def _class(node: ast.ClassDef) -> str:
    bases = [ast.unparse(base) for base in node.bases]
    text = f"class {node.name}({', '.join(bases)})" if bases else f"class {node.name}"
    # Slots decide whether our adapters may hang an attribute on an instance.
    slots = any(_defines(statement, "__slots__") for statement in node.body) or any(
        "slots=True" in ast.unparse(decorator) for decorator in node.decorator_list
    )
    return f"{text} with slots" if slots else text


def _instance_attribute(owner: ast.ClassDef, name: str) -> str | None:
    """`self.name` assigned in a method; with its annotation where there is one."""
    plain = None
    for node in ast.walk(owner):
        if isinstance(node, ast.AnnAssign) and _is_self(node.target, name):
            return f"self.{name}: {_annotation(node.annotation)}"
        if isinstance(node, ast.Assign) and any(_is_self(target, name) for target in node.targets):
            plain = f"self.{name}"
    return plain


def _is_self(target: ast.expr, name: str) -> bool:
    return (
        isinstance(target, ast.Attribute)
        and target.attr == name
        and isinstance(target.value, ast.Name)
        and target.value.id == "self"
    )


def _inherited(tree: ast.Module, owner: ast.ClassDef, name: str, calls: tuple[str, ...]) -> str | None:
    for base in owner.bases:
        found = signature(tree, f"{base.id}.{name}", calls) if isinstance(base, ast.Name) else None
        if found is not None:
            return found
    return None


def _annotation(node: ast.expr) -> str:
    # "quoted" and plain annotations mean the same.
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ast.unparse(node)


def _kind(text: str) -> tuple[object, ...]:
    """What must not change even where the details may."""
    words = text.partition("(")[0].split()
    is_code = "def" in words or "class" in words
    return (*words, text.endswith(" with slots")) if is_code else (words[0].rstrip(":"),)


def _parse_function(text: str) -> ast.arguments | None:
    head = text.partition(" calls ")[0]
    start = head.find("def ")
    if start < 0:
        return None
    node = ast.parse(f"{head[start:]}: ...").body[0]
    assert isinstance(node, ast.FunctionDef)
    return node.args


def _accepts(before: ast.arguments, after: ast.arguments) -> bool:
    """Whether every call and override that fits `before` fits `after`."""

    def positional(arguments: ast.arguments) -> list[tuple[str, bool]]:
        names = [argument.arg for argument in arguments.posonlyargs + arguments.args]
        required = len(names) - len(arguments.defaults)
        return [(name, index >= required) for index, name in enumerate(names)]

    def keyword_only(arguments: ast.arguments) -> dict[str, bool]:
        names = [argument.arg for argument in arguments.kwonlyargs]
        return {name: default is not None for name, default in zip(names, arguments.kw_defaults, strict=True)}

    old, new = positional(before), positional(after)
    if len(new) < len(old):
        return False
    for (old_name, was_optional), (new_name, is_optional) in zip(old, new, strict=False):
        if old_name != new_name or (was_optional and not is_optional):
            return False
    if not all(is_optional for _, is_optional in new[len(old) :]):
        return False
    old_keywords, new_keywords = keyword_only(before), keyword_only(after)
    for name, was_optional in old_keywords.items():
        if name not in new_keywords or (was_optional and not new_keywords[name]):
            return False
    if not all(is_optional for name, is_optional in new_keywords.items() if name not in old_keywords):
        return False
    return bool(after.vararg or not before.vararg) and bool(after.kwarg or not before.kwarg)
