"""What an engine's code is like, by its sources: none of it is run.

What only running shows stays unseen: a name that a decorator or `setattr` adds, a function that a decorator replaces
without `functools.wraps`. Where a module defines a name twice the last definition counts, of `try` the first, and the
one before where the later is made of it: `Arguments = defstruct(vars(Arguments))`.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable, Iterator, Mapping, Set
from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias

from kvferry.engines.engine_code import MissingError

Function: TypeAlias = ast.FunctionDef | ast.AsyncFunctionDef
_PROPERTIES = ("property", "cached_property", "setter", "getter", "deleter")


@dataclass(frozen=True, slots=True)
class Import:
    """What an import binds: a module, or one name of it."""

    module: str
    name: str = ""


Definition: TypeAlias = ast.ClassDef | Function | ast.expr | Import


@dataclass(frozen=True)
class Scope:
    """A module, or a class in it.

    Attributes:
        module: the module's name.
        body: its statements.
        bases: a class's.
        is_package: whether the module is a package's own.
    """

    module: str
    body: list[ast.stmt]
    bases: tuple[ast.expr, ...] = ()
    is_package: bool = False

    @cached_property
    def names(self) -> dict[str, Definition]:
        """What it defines, by name."""
        package = self.module if self.is_package else self.module.rpartition(".")[0]
        found: dict[str, Definition] = {}
        for name, node in _defined(self.body, package):
            if name != "*" and not (name in found and isinstance(node, ast.expr) and name in _named_in(node)):
                found[name] = node
        return found

    @cached_property
    def stars(self) -> tuple[str, ...]:
        """The modules of which it takes all names."""
        package = self.module if self.is_package else self.module.rpartition(".")[0]
        return tuple(
            each.module for name, each in _defined(self.body, package) if name == "*" and isinstance(each, Import)
        )


@dataclass(frozen=True, slots=True)
class Found:
    """What a name stands for.

    Attributes:
        module: where it is defined.
        node: a function, or an expression.
        scope: a module or class; None for the others.
        is_instance: whether it is an object of the class.
    """

    module: str
    node: Function | ast.expr | None = None
    scope: Scope | None = None
    is_instance: bool = False


class Sources:
    """An engine's sources; see `EngineCode`."""

    def __init__(self, read: Callable[[str], str | None]) -> None:
        """Reads files when they are asked for.

        Args:
            read: returns the text of a file, by its path as `package/module.py`; None if there is no such file.
        """
        self._read = read
        self._modules: dict[str, Scope | None] = {}

    @property
    def modules(self) -> tuple[str, ...]:
        """The names of the modules that were read."""
        return tuple(name for name, scope in self._modules.items() if scope is not None)

    def check(self, where: str) -> None:
        """See `EngineCode.check`."""
        self._find(where)

    def signature(self, where: str) -> inspect.Signature:
        """See `EngineCode.signature`."""
        found = self._find(where)
        if found.scope is not None and not found.is_instance:
            _own, *others = self.signature(f"{where}.__init__").parameters.values()
            return inspect.Signature(others)
        if (builtin := self._builtin(found)) is not None:
            return builtin
        return _signature(_function(where, found))

    def members(self, where: str) -> Mapping[str, object]:
        """See `EngineCode.members`. A value that is no literal is its text."""
        scope = self._class(where)
        values: dict[str, object] = {}
        for name, node in scope.names.items():
            if isinstance(node, ast.expr) and not name.startswith("_"):
                values[name] = _value(node, values)
        return values

    def fields(self, where: str) -> Set[str]:
        """See `EngineCode.fields`."""
        return {
            each.target.id
            for scope in self._lineage(self._class(where))
            for each in scope.body
            if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name)
        }

    def attributes(self, where: str) -> Set[str]:
        """See `EngineCode.attributes`."""
        scope = self._find(where).scope
        if scope is None:
            raise TypeError(f"{where} is neither a class nor a module")
        return {name for each in self._lineage(scope) for name in each.names}

    def is_subclass(self, where: str, base: str) -> bool:
        """See `EngineCode.is_subclass`."""
        body = self._class(base).body
        return any(each.body is body for each in self._lineage(self._class(where)))

    def names_in(self, where: str) -> Set[str]:
        """See `EngineCode.names_in`."""
        return set(spoken_of(_function(where, self._find(where))))

    def functions(self, module: str) -> Iterator[tuple[str, Function]]:
        """Yields the functions of a module and of its classes, by their names within it."""
        scope = self._module(module)
        if scope is not None:
            yield from _functions(scope, "")

    # ---- finding ------------------------------------------------------------------------------------------------

    def _find(self, where: str) -> Found:
        module, _, inside = where.partition(":")
        scope = self._module(module)
        if scope is None:
            raise MissingError(f"{module} is gone: there is no such module")
        found = Found(module, scope=scope)
        for name in inside.split(".") if inside else ():
            inner = self._member(found, name)
            if inner is None:
                raise MissingError(f"{where} is gone: there is no {name!r}")
            found = inner
        return found

    def _class(self, where: str) -> Scope:
        found = self._find(where)
        if found.scope is None or ":" not in where:
            raise TypeError(f"{where} is no class")
        return found.scope

    def _module(self, name: str) -> Scope | None:
        if name not in self._modules:
            path, scope = name.replace(".", "/"), None
            for file in (f"{path}.py", f"{path}/__init__.py"):
                if (text := self._read(file)) is not None:
                    scope = Scope(name, ast.parse(text).body, is_package=file.endswith("__init__.py"))
                    break
            self._modules[name] = scope
        return self._modules[name]

    def _member(self, found: Found, name: str) -> Found | None:
        if found.scope is None:
            return None
        for scope in self._lineage(found.scope):
            if name in scope.names:
                return self._meaning(scope.names[name], scope)
        if found.scope.bases or found.is_instance:
            return None
        for module in found.scope.stars:
            if (taken := self._named(Import(module, name))) is not None:
                return taken
        return self._named(Import(f"{found.module}.{name}"))

    def _meaning(self, node: Definition, scope: Scope) -> Found | None:
        if isinstance(node, Import):
            return self._named(node)
        if isinstance(node, ast.ClassDef):
            bases = tuple(node.bases) or (ast.Name("object"),)
            return Found(scope.module, scope=Scope(scope.module, node.body, bases))
        if isinstance(node, ast.expr) and (known := self._evaluated(node, scope)) is not None:
            return known
        return Found(scope.module, node)

    def _named(self, wanted: Import) -> Found | None:
        scope = self._module(wanted.module)
        if scope is None:
            return None
        found = Found(wanted.module, scope=scope)
        return self._member(found, wanted.name) if wanted.name else found

    def _evaluated(self, node: ast.expr, scope: Scope) -> Found | None:
        """Returns what an expression stands for, as far as names, attributes and the making of objects tell."""
        if isinstance(node, ast.Name):
            for each in (scope, self._module(scope.module)):
                if each is not None and each.names.get(node.id, node) is not node:
                    return self._meaning(each.names[node.id], each)
        if isinstance(node, ast.Attribute) and (holder := self._evaluated(node.value, scope)) is not None:
            return self._member(holder, node.attr)
        if isinstance(node, ast.Subscript):
            return self._evaluated(node.value, scope)
        if isinstance(node, ast.Call) and (made := self._evaluated(node.func, scope)) is not None and made.scope:
            return Found(made.module, scope=made.scope, is_instance=True)
        return None

    def _builtin(self, found: Found) -> inspect.Signature | None:
        """Returns the signature of a method of a list, a dictionary or a set that a module has under a name."""
        module = self._module(found.module)
        if not isinstance(found.node, ast.Attribute) or module is None:
            return None
        holder = self._evaluated(found.node.value, module)
        literals: dict[type, type] = {ast.List: list, ast.Dict: dict, ast.Set: set}
        kind = literals.get(type(holder.node)) if holder is not None else None
        if kind is None:
            return None
        _own, *others = inspect.signature(getattr(kind, found.node.attr)).parameters.values()
        return inspect.Signature(others)

    def _lineage(self, scope: Scope) -> list[Scope]:
        """Returns a class and those that it inherits from, nearest first; of a module, itself."""
        found = [scope]
        for base in scope.bases:
            meant = self._evaluated(base, Scope(scope.module, []))
            if meant is not None and meant.scope is not None and meant.scope.body is not scope.body:
                found += self._lineage(meant.scope)
        last = {id(each.body): number for number, each in enumerate(found)}
        return [each for number, each in enumerate(found) if last[id(each.body)] == number]


# ---- parts ----------------------------------------------------------------------------------------------------------


def _defined(body: list[ast.stmt], package: str) -> Iterator[tuple[str, Definition]]:
    """Yields what statements define, in their order."""
    for each in body:
        match each:
            case ast.ClassDef() | ast.FunctionDef() | ast.AsyncFunctionDef():
                yield each.name, each
            case ast.Assign(targets=targets, value=value):
                yield from ((target.id, value) for target in targets if isinstance(target, ast.Name))
            case ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value):
                yield name, value
            case ast.Import(names=names):
                for alias in names:
                    bound = alias.asname or alias.name.partition(".")[0]
                    yield bound, Import(alias.name if alias.asname else bound)
            case ast.ImportFrom(module=module, names=names, level=level):
                above = package.split(".")[: len(package.split(".")) - level + 1] if level else []
                origin = ".".join([*above, *([module] if module else [])])
                for alias in names:
                    yield alias.asname or alias.name, Import(origin, "" if alias.name == "*" else alias.name)
            case ast.If(body=first, orelse=second):
                yield from _defined([*first, *second], package)
            case ast.Try(body=first, handlers=handlers, orelse=second, finalbody=last):
                others = [statement for handler in handlers for statement in handler.body]
                yield from _defined([*others, *first, *second, *last], package)
            case ast.With(body=inner):
                yield from _defined(inner, package)


def _named_in(node: ast.expr) -> set[str]:
    return {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}


def _function(where: str, found: Found) -> Function:
    node = found.node
    if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
        raise TypeError(f"{where} is no function any more")
    for decorator in node.decorator_list:
        if (ast.unparse(decorator).rpartition(".")[2]) in _PROPERTIES:
            raise TypeError(f"{where} is a property")
    return node


def _functions(scope: Scope, prefix: str) -> Iterator[tuple[str, Function]]:
    for name, node in scope.names.items():
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield f"{prefix}{name}", node
        elif isinstance(node, ast.ClassDef):
            yield from _functions(Scope(scope.module, node.body), f"{prefix}{name}.")


def _signature(function: Function) -> inspect.Signature:
    given, kinds = function.args, inspect.Parameter
    by_place = [*given.posonlyargs, *given.args]
    required = len(by_place) - len(given.defaults)
    parameters = [
        kinds(
            each.arg,
            kinds.POSITIONAL_ONLY if each in given.posonlyargs else kinds.POSITIONAL_OR_KEYWORD,
            default=kinds.empty if number < required else None,
        )
        for number, each in enumerate(by_place)
    ]
    if given.vararg is not None:
        parameters.append(kinds(given.vararg.arg, kinds.VAR_POSITIONAL))
    parameters += [
        kinds(each.arg, kinds.KEYWORD_ONLY, default=kinds.empty if default is None else None)
        for each, default in zip(given.kwonlyargs, given.kw_defaults, strict=True)
    ]
    if given.kwarg is not None:
        parameters.append(kinds(given.kwarg.arg, kinds.VAR_KEYWORD))
    return inspect.Signature(parameters)


def _value(node: ast.expr, before: Mapping[str, object]) -> object:
    """Returns a member's value; `before` are those of the members above it."""
    match node:
        case ast.Call(func=ast.Name(id="auto") | ast.Attribute(attr="auto")):
            return max((each for each in before.values() if isinstance(each, int)), default=0) + 1
        case ast.Name(id=name) if name in before:
            return before[name]
    try:
        return ast.literal_eval(node)
    except ValueError:
        return ast.unparse(node)


def spoken_of(function: Function) -> Iterator[str]:
    """Yields the names and texts that a function's code speaks of: not its annotations, which are not run."""
    waiting: list[ast.AST] = [function.args, *function.body]
    while waiting:
        node = waiting.pop()
        for field, value in ast.iter_fields(node):
            if field in ("annotation", "returns"):
                continue
            if field == "module" and isinstance(value, str):
                yield value
            for each in value if isinstance(value, list) else [value]:
                if isinstance(each, ast.AST):
                    waiting.append(each)
                elif isinstance(each, str):
                    yield each
