"""The tree tells the story: imports point one way, and only comm.py talks to the network."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import oktopk

ROOT = Path(oktopk.__file__).parent
MODULES = sorted(ROOT.rglob("*.py"))

# Each may import from those before it, never from those after it.
ORDER = [
    "version",
    "arguments",
    "interrupts",
    "bounded",
    "files",
    "extras",
    "flags",
    "host",
    "sparse",
    "kernels",
    "wire",
    "ledger",
    "comm",
    "simulate",
    "handshake",
    "methods",
    "costs",
    "feedback",
    "stats",
    "settings",
    "layout",
    "tally",
    "engine",
    "bucket_tracker",
    "saved_state",
    "reducer",
    "policy",
    "rollcall",
    "groups",
    "exchanger",
    "followed",
    "flatviews",
    "adamstate",
    "stephooks",
    "moments",
    "remedies",
    "clipping",
    "weights",
    "named",
    "gathered",
    "handle",
    "hook",
    "misuse",
    "ddp",
    "place",
    "meeting",
    "rendezvous",
    "signin",
    "join",
    "lifeline",
    "launch",
    "check",
    "report",
    "train",
    "bench",
    "watch",
    "compare",
    "sweep",
    "cli",
    "__main__",
]

# Not collectives: asking who and where one is, and where ranks meet before there is a group.
HARMLESS = {
    "DistError",
    "HashStore",
    "PrefixStore",
    "Store",
    "TCPStore",
    "destroy_process_group",
    "init_process_group",
    "ProcessGroup",
    "get_backend",
    "get_backend_config",
    "get_process_group_ranks",
    "get_rank",
    "get_world_size",
    "is_initialized",
    "new_group",
}


def part_of(path: Path) -> str:
    return path.relative_to(ROOT).with_suffix("").parts[0]


def imported_parts(tree: ast.AST) -> set[str]:
    names = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            names += [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
    return {name.split(".")[1] for name in names if name.startswith("oktopk.")}


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_point_one_way(path):
    part = part_of(path)
    if part == "__init__":
        return
    for other in imported_parts(ast.parse(path.read_text())):
        assert ORDER.index(other) <= ORDER.index(part), f"{part} imports {other}"


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_only_comm_calls_collectives(path):
    if path.name == "comm.py":
        return
    used = {
        node.attr
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id == "dist"
    }
    assert used <= HARMLESS
    assert "from torch.distributed" not in path.read_text()
