"""Write `src/penstock/bus/sync.py`: the bus for code that is not asynchronous, made from the one that is.

Run it (`make sync`) after a change of `Bus`, `Consumer`, `Delivery`, `DeliveredBatch` or `Prepared`; a test says if
that was forgotten.
Signatures, overloads and docstrings are taken as they are, without `async`; what each method does is decided by what it
is there:

* a coroutine is waited for, an asynchronous iterator is iterated over;
* a plain method is called in the loop's thread, unless its class is said to be otherwise;
* a property, or a public attribute, is looked up.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "src" / "penstock"
TARGET = PACKAGE / "bus" / "sync.py"

HEADER = '''"""The bus for code that is not asynchronous: Django, Flask, notebooks, scripts, workers.

Written by `tools/sync_facade.py`: change the classes that it is made from, and run that.

`bus.sync()` gives a `SyncBus`. It has the methods of `Bus`, and they return when those have ended. What it hands out is
of the same kind: consumers to iterate over with `for`, deliveries to `ack`, a prepared publish to `send`. There is no
second implementation: an event loop runs in a thread of its own, and `penstock.bus.portal` says what holds for that.
"""
'''


@dataclass(frozen=True)
class Source:
    """A class that a facade is made from."""

    name: str
    module: str
    doc: str
    generic: bool = False
    bases: tuple[str, ...] = ()
    live: bool = False
    """Whether its properties change while somebody looks, so that they are looked up in the loop's thread."""
    here: frozenset[str] = frozenset()
    """Plain methods that are called in the caller's thread."""
    pure: frozenset[str] = frozenset()
    """Plain methods that only look at what does not change."""
    at_once: Mapping[str, int] = field(default_factory=dict)
    """How many items an iterator brings from one thread to the other at once, if not one."""
    omitted: frozenset[str] = frozenset()

    @property
    def facade(self) -> str:
        return f"Sync{self.name}"


SOURCES = [
    Source("Prepared", "bus/publisher", "A publish that may be sent, and sent again, without making a duplicate."),
    Source(
        "Delivery", "bus/delivered", "One event, handed over.", generic=True, bases=("_Hand",), pure=frozenset({"once"})
    ),
    Source(
        "DeliveredBatch",
        "bus/delivered",
        "Many events of one partition, handed over together.",
        bases=("_Hand",),
        pure=frozenset({"to_arrow"}),
    ),
    Source(
        "Consumer",
        "bus/consumer",
        "A consumer of a subscription; `with` it, then iterate over it or over its `batches()`.",
        generic=True,
        live=True,
    ),
    Source("DeadLetters", "bus/dead_letters", "The dead letters of all subscriptions."),
    Source(
        "Bus",
        "bus/bus",
        "A bus whose methods wait for their end; `with bus.sync() as sync_bus`, or use it, and `close()` it.",
        # A connection of SQLite belongs to the thread that made it.
        here=frozenset({"stage"}),
        at_once={"read": 500},
        # What is sent one by one crosses threads one by one, and that costs more than an append: `publish_batch` it.
        # Subscribers run in an event loop: `await bus.run()`, or `penstock run`.
        omitted=frozenset(
            {
                "publisher",
                "sync",
                "subscriber",
                "subscribers",
                "projection",
                "projections",
                "run",
                "lifespan",
                "open",
                "configure",
                "elsewhere",
            }
            | {"latest_metrics"}
        ),
    ),
]
FACADES = {source.name: source.facade for source in SOURCES}
Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass
class Names:
    """What the facade has to import: by the module it is from."""

    runtime: dict[str, set[str]] = field(default_factory=dict)
    typing: dict[str, set[str]] = field(default_factory=dict)


class Maker:
    """Makes the facade of one class."""

    def __init__(self, source: Source, names: Names) -> None:
        self.source = source
        self._names = names
        self._module = ast.parse((PACKAGE / f"{source.module}.py").read_text())
        self._classes = {node.name: node for node in self._module.body if isinstance(node, ast.ClassDef)}
        self._home = "penstock." + source.module.replace("/", ".")
        self._origins = dict(self._imports())

    def _imports(self) -> list[tuple[str, str]]:
        found = []
        for node in ast.walk(self._module):
            if isinstance(node, ast.ImportFrom | ast.Import):
                module = node.module or "" if isinstance(node, ast.ImportFrom) else ""
                found += [(alias.asname or alias.name, module) for alias in node.names]
        for statement in self._module.body:
            defined: list[ast.AST] = [statement]
            if isinstance(statement, ast.Assign | ast.AnnAssign):
                defined = [*statement.targets] if isinstance(statement, ast.Assign) else [statement.target]
            found += [(getattr(each, "id", getattr(each, "name", "")), self._home) for each in defined]
        return found

    def _need(self, node: ast.AST | None, where: dict[str, set[str]]) -> None:
        for each in ast.walk(node) if node is not None else ():
            if isinstance(each, ast.Name) and each.id in self._origins and each.id not in FACADES and each.id != "T":
                where.setdefault(self._origins[each.id], set()).add(each.id)
            elif isinstance(each, ast.Attribute):
                self._need(each.value, where)

    # --- the class -------------------------------------------------------------------------------

    def text(self) -> str:
        source = self.source
        wrapped = f"{source.name}[T]" if source.generic else source.name
        self._names.runtime.setdefault(self._home, set()).add(source.name)
        bases = f"Facade[{wrapped}]" + (", Generic[T]" if source.generic else "")
        parts = [f'class {source.facade}({bases}):\n    """{source.doc}"""\n\n    __slots__ = ()']
        own = {node.name for node in self._classes[source.name].body if isinstance(node, Function)}
        for base in source.bases:
            parts += self._members(self._classes[base], besides=own)
        parts += self._members(self._classes[source.name])
        return "\n\n".join(parts)

    def _members(self, cls: ast.ClassDef, besides: Collection[str] = ()) -> list[str]:
        """Return what a class has, but for what another one has in its own way."""
        parts = []
        for node in cls.body:
            if isinstance(node, Function) and node.name in besides and node.name != "__init__":
                continue
            if not isinstance(node, Function):
                if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.target.id[0] != "_":
                    parts.append(self._attribute(node.target.id, node.annotation, ""))
            elif node.name == "__init__":
                parts += self._attributes(node)
            elif node.name == "__aenter__":
                parts.append(self._context())
            elif node.name == "__aiter__":
                parts.append(self._method(node, "__iter__"))
            elif node.name in {"__len__", "__iter__"} or (node.name[0] != "_" and node.name not in self.source.omitted):
                parts.append(self._method(node, node.name))
        return parts

    def _context(self) -> str:
        self._names.typing.setdefault("types", set()).add("TracebackType")
        return """    def __enter__(self) -> Self:
        self._portal.call(self._wrapped.__aenter__())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()"""

    def _attributes(self, init: Function) -> list[str]:
        """Return properties for what a class's constructor makes public, with the texts below each."""
        annotations = {arg.arg: arg.annotation for arg in (*init.args.args, *init.args.kwonlyargs)}
        parts = []
        for node, after in zip(init.body, [*init.body[1:], ast.Pass()], strict=True):
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Attribute):
                name = node.targets[0].attr
                if name[0] != "_":
                    doc = ast.literal_eval(after.value) if isinstance(after, ast.Expr) else ""
                    annotation = annotations[name]
                    assert annotation is not None
                    parts.append(self._attribute(name, annotation, doc))
        return parts

    def _attribute(self, name: str, annotation: ast.expr, doc: str) -> str:
        self._need(annotation, self._names.typing)
        lines = ["@property", f"def {name}(self) -> {ast.unparse(annotation)}:", f'    """{doc or f"Its {name}."}"""']
        return "\n".join(f"    {line}" for line in (*lines, f"    return self._wrapped.{name}"))

    # --- methods ---------------------------------------------------------------------------------

    def _method(self, node: Function, name: str) -> str:
        decorators = {ast.unparse(each) for each in node.decorator_list}
        overload, is_property = "overload" in decorators, "property" in decorators
        for argument in (*node.args.args, *node.args.kwonlyargs, node.args.vararg, node.args.kwarg):
            self._need(argument and argument.annotation, self._names.typing)
        for default in (*node.args.defaults, *node.args.kw_defaults):
            self._need(default, self._names.runtime)
        self._need(node.returns, self._names.typing)
        returned = ast.unparse(node.returns) if node.returns is not None else "None"
        lines = [f"    @{each}" for each in ("overload", "property") if each in decorators]
        lines.append(f"    def {name}({ast.unparse(node.args)}) -> {_synchronous(returned)}:")
        doc = ast.get_docstring(node, clean=False)
        if overload:
            lines[-1] += " ..."
            return "\n".join(lines)
        if doc and name[0] != "_":
            lines.append(f'        """{doc}"""')
        lines += [f"        {line}" for line in self._body(node, name, returned, is_property=is_property)]
        return "\n".join(lines)

    def _body(self, node: Function, name: str, returned: str, *, is_property: bool) -> list[str]:
        arguments = _passed_on(node.args)
        if is_property:
            found, wraps = f"self._wrapped.{name}", _wrapping(returned)
            looked_up = f"self._portal.run(lambda: {found})" if self.source.live else found
            return [f"return {wraps}(self._portal, {found})" if wraps else f"return {looked_up}"]
        if name == "close":
            return ["self._portal.stop()" if self.source.name == "Bus" else "self._portal.close(self._wrapped.close())"]
        if returned.startswith("AsyncIterator"):
            return self._iteration(name, arguments, _wrapping(returned))
        if name[:2] == "__":
            return [f"return {name.strip('_')}(self._wrapped)"]
        if self._overloaded(name):
            # What the overloads allow together, none of them allows alone.
            called = f"self._portal.call(wrapped.{name}({arguments}))"
            answer = [called] if returned == "None" else [f"answer: {returned} = {called}", "return answer"]
            return ["wrapped: Any = self._wrapped", *answer]
        return [f"{'' if returned == 'None' else 'return '}{self._call(node, name, returned, arguments)}"]

    def _call(self, node: Function, name: str, returned: str, arguments: str) -> str:
        called = f"self._wrapped.{name}({arguments})"
        if isinstance(node, ast.AsyncFunctionDef):
            return f"self._portal.call({called})"
        if name in self.source.here:
            return f"self._portal.here(lambda: {called})"
        if name in self.source.pure:
            return called
        called, wraps = f"self._portal.run(lambda: {called})", _wrapping(returned)
        return f"{wraps}(self._portal, {called})" if wraps else called

    def _iteration(self, name: str, arguments: str, wraps: str | None) -> list[str]:
        items = "self._wrapped.__aiter__()" if name == "__iter__" else f"self._wrapped.{name}({arguments})"
        more = f", at_once={self.source.at_once[name]}" if name in self.source.at_once else ""
        if wraps is None:
            return [f"return self._portal.iterate({items}{more})"]
        return [f"for item in self._portal.iterate({items}{more}):", f"    yield {wraps}(self._portal, item)"]

    def _overloaded(self, name: str) -> bool:
        members = self._classes[self.source.name].body
        return sum(isinstance(each, Function) and each.name == name for each in members) > 1


def _wrapping(returned: str) -> str | None:
    """Return the facade of what a method returns, or of the items that it yields."""
    return next((facade for cls, facade in FACADES.items() if re.search(rf"\b{cls}\b", returned)), None)


def _synchronous(returned: str) -> str:
    for cls, facade in FACADES.items():
        returned = re.sub(rf"\b{cls}\b", facade, returned)
    return returned.replace("AsyncIterator", "Iterator")


def _passed_on(arguments: ast.arguments) -> str:
    passed = [each.arg for each in arguments.args[1:]] + [f"{each.arg}={each.arg}" for each in arguments.kwonlyargs]
    if arguments.kwarg is not None:
        passed.append(f"**{arguments.kwarg.arg}")
    return ", ".join(passed)


# --- the module ----------------------------------------------------------------------------------


ALIASES = {"np": "numpy", "pa": "pyarrow"}


def _imports(names: Mapping[str, set[str]]) -> list[str]:
    lines = []
    for module, wanted in names.items():
        if module:
            lines.append(f"from {module} import {', '.join(wanted)}")
        else:
            lines += [f"import {ALIASES[name]} as {name}" if name in ALIASES else f"import {name}" for name in wanted]
    return lines


def generate() -> str:
    """Return the text of the module."""
    names = Names()
    names.runtime["penstock.bus.portal"] = {"Facade"}
    classes = "\n\n\n".join(Maker(source, names).text() for source in SOURCES)
    names.typing.setdefault("collections.abc", set()).add("Iterator")
    names.runtime["typing"] = {"TYPE_CHECKING", "Any", "Generic", "Self", "TypeVar", "overload"}
    names.runtime["typing"] |= names.typing.pop("typing", set())
    only_typing = {module: wanted - names.runtime.get(module, set()) for module, wanted in names.typing.items()}
    checked = [f"    {line}" for line in _imports({module: wanted for module, wanted in only_typing.items() if wanted})]
    text = "\n".join(
        [HEADER, "from __future__ import annotations", "", *_imports(names.runtime), "", "if TYPE_CHECKING:", *checked]
    )
    return _tidied(f'{text}\n\nT = TypeVar("T")\n\n\n{classes}\n')


def _tidied(text: str) -> str:
    for command in (["check", "--select", "I,F401", "--fix", "--quiet"], ["format", "--quiet"]):
        ruff = [sys.executable, "-m", "ruff", *command, "--stdin-filename", str(TARGET), "-"]
        done = subprocess.run(ruff, input=text, capture_output=True, text=True, check=True, cwd=ROOT)  # noqa: S603 - ours
        text = done.stdout
    return text


if __name__ == "__main__":
    TARGET.write_text(generate())
    print(f"wrote {TARGET.relative_to(ROOT)}")
