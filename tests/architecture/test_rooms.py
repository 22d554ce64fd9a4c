"""The rooms (folders of bigtrain): their order, their size, and the purpose of each."""

from __future__ import annotations

import ast
import warnings
from collections import Counter

import pytest
from support.rooms import ORDER, sources, tree, used_modules


def room(module: str) -> str:
    """The room of a module: its first folder; each module at the root is a room by itself."""
    return module.partition(".")[0]


def test_every_room_stands_in_the_order():
    rooms = {room(module) for module in sources()} - {"", "configs"}
    assert rooms == set(ORDER), "tests/support/rooms.py and the folders of bigtrain/ differ"
    assert len(ORDER) == len(set(ORDER))


def test_imports_go_to_lower_rooms():
    height = {name: number for number, name in enumerate(ORDER)}
    wrong = [
        f"{module} imports {imported}"
        for module in sources()
        for imported in used_modules(module)
        if height.get(room(imported), -1) > height.get(room(module), -1)
        # The registry names the techniques as text: they are imported when they are chosen.
        and module not in ("", "core.registry")
    ]
    assert not wrong, (
        "a room may import only rooms listed above it in tests/support/rooms.py:\n"
        + ("\n".join(sorted(wrong)))
    )


@pytest.mark.filterwarnings("always::UserWarning")  # a warning, not a failure
def test_rooms_are_small_enough_to_look_around_in():
    sizes = Counter(
        module.rpartition(".")[0] for module, path in sources().items() if path.stem != "__init__"
    )
    large = {name: size for name, size in sizes.items() if size > (8 if not name else 16)}
    assert not large, f"more than 16 modules (8 at the root): {large}"
    full = {name: size for name, size in sizes.items() if name and size > 12}
    if full:
        warnings.warn(f"rooms with more than 12 modules: {full}", stacklevel=1)


def test_every_room_says_what_it_is_for():
    for module, path in sources().items():
        if path.stem == "__init__" and module and room(module) != "configs":
            assert ast.get_docstring(tree(path)), f"{path} has no docstring that states its purpose"


def test_no_module_imports_itself_round_a_corner():
    """The imports between modules have no cycle."""
    graph = {module: set(used_modules(module)) for module in sources()}
    finished: set[str] = set()

    def visit(module: str, path: tuple[str, ...]) -> None:
        assert module not in path, "cycle: " + " -> ".join((*path, module))
        if module not in finished:
            for imported in sorted(graph[module]):
                visit(imported, (*path, module))
            finished.add(module)

    for module in graph:
        visit(module, ())


def test_a_public_name_is_defined_once():
    owners: dict[str, set[str]] = {}
    for module, path in sources().items():
        for node in tree(path).body:
            names = []
            if isinstance(node, ast.ClassDef | ast.FunctionDef):
                names = [node.name]
            elif isinstance(node, ast.Assign):
                names = [target.id for target in node.targets if isinstance(target, ast.Name)]
            elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                names = [node.target.id]
            for name in names:
                if not name.startswith("_") and name != "main":
                    owners.setdefault(name, set()).add(module)
    doubles = {name: sorted(modules) for name, modules in owners.items() if len(modules) > 1}
    assert not doubles, f"public names with two meanings: {doubles}"
