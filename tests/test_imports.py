"""Imports run downwards (``lint-imports`` checks the layers) and in no circle."""

from __future__ import annotations

import grimp
import pytest


@pytest.fixture(scope="module")
def graph() -> grimp.ImportGraph:
    return grimp.build_graph("memplan", exclude_type_checking_imports=True, cache_dir=None)


def test_no_module_imports_itself_through_others(graph: grimp.ImportGraph) -> None:
    assert not circles(graph)


def test_bash_imports_nothing_of_memplan(graph: grimp.ImportGraph) -> None:
    inside = {name for name in graph.modules if name.startswith("memplan.bash")}
    assert {one for name in inside for one in graph.find_modules_directly_imported_by(name)} <= inside


def circles(graph: grimp.ImportGraph) -> list[set[str]]:
    """Modules that reach one another: each set is strongly connected."""
    found: list[set[str]] = []
    for name in sorted(graph.modules):
        if not any(name in one for one in found):
            both = graph.find_upstream_modules(name) & graph.find_downstream_modules(name)
            if both:
                found.append({name, *both})
    return found
