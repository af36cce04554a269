"""The contracts of `lint-imports` can fail."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from grimp import ImportGraph

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from tools.import_contracts import AllowlistContract  # noqa: E402 - found through the line above


def graph_of(*imports: tuple[str, str]) -> ImportGraph:
    graph = ImportGraph()
    for name in ("app.engine", "app.engine.window", "app.offsets"):
        graph.add_module(name)
    for importer, imported in imports:
        for name in (importer, imported):
            if name not in graph.modules:
                graph.add_module(name, is_squashed="." not in name)
        graph.add_import(importer=importer, imported=imported)
    return graph


def contract(*modules: str) -> AllowlistContract:
    options = {"modules": list(modules), "allowed": ["app.offsets", "numpy"]}
    return AllowlistContract(name="pure", session_options={"root_packages": ["app"]}, contract_options=options)


def test_a_pure_module_may_import_what_is_listed_and_its_own_parts() -> None:
    graph = graph_of(("app.engine", "app.engine.window"), ("app.engine.window", "app.offsets"), ("app.engine", "numpy"))
    assert contract("app.engine").check(graph, verbose=False).kept


@pytest.mark.parametrize("imported", ["time", "threading", "app.stores", "numpyish"])
def test_anything_else_breaks_the_contract_also_in_a_part(imported: str) -> None:
    graph = graph_of(("app.engine.window", imported))
    check = contract("app.engine", "app.later").check(graph, verbose=False)
    assert not check.kept
    assert check.metadata["found"] == [f"app.engine.window imports {imported}"]


def test_a_contract_about_nothing_is_an_error() -> None:
    with pytest.raises(ValueError, match="would hold for nothing"):
        contract("app.later").check(graph_of(), verbose=False)
