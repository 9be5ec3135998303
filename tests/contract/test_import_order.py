"""Each folder imports only folders below it, and no files import each other in a cycle.

`ORDERS` lists the folders and modules directly below each package, lowest first.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = {"fp8scope_kernels": "kernels", "fp8scope": "agent", "fp8scope_dashboard": "dashboard"}

ORDERS = {
    "fp8scope_kernels": """
        formats devices torch_internals graph_objects hooks plain_tensors random_stream recipes statistics cpu
        triton backends reference quantization custom_ops block_quantization hadamard sampling fp6 weight_only
        smooth_swiglu high_precision scaling_state recomputation plain_state unit_products matmul operands
        fsdp kept_weight linear_product linear_operators tensor_parallel tensor_parallel_operators linear
        experts convert
        revert serving_checkpoint observers distributed dcp_planner gradient_reduction
        optimizer_storage optimizer
    """,
    "fp8scope": """
        credentials config guard scalars binary metadata arguments process observe step recording unrecorded
        delivery client session control incidents advice run evaluation capture event_files autolog replay
        postmortem integrations compat planning mcp_server exporting demo importing cli __main__
    """,
    "fp8scope_dashboard": """
        process_setup preload embedded settings statistics text db notifications instrumentation accounts
        audit wire runs receipts media cold_store telemetry evaluations ingest analysis diagnosis certificates
        alerts control shared_reports file_imports monitoring exports edge pages api mlflow_tracking
        otlp_metrics sql_views distribution urls asgi celery apps servers administration demo certification
        cli
    """,
}
# Inside of these folders of the dashboard the order is held, too.
INNER_ORDERS = {
    "fp8scope_dashboard.alerts": """
        signals detectors kinds rules channels beginnings models evidence growth delivery
        lifecycle run_alerts alert_updates detection custom_rules services tasks apps
    """,
    "fp8scope_dashboard.pages": """
        apps request_reads access address_values formatting badges glossary configuration_differences
        undo_offer storage_notice early_head finders saved_views settled charts cold_values live progress
        middleware media tensors readiness scores panels hours run compare certificate fleet runs imports
        alerts reports project templatetags urls
    """,
}


@cache
def modules(package: str) -> Mapping[str, ast.Module]:
    """All modules of a package except migrations, parsed."""
    folder = ROOT / SOURCES[package] / package
    files = {path: path.relative_to(folder.parent).with_suffix("") for path in folder.rglob("*.py")}
    return {
        ".".join(name.parts).removesuffix(".__init__"): ast.parse(path.read_text(), str(path))
        for path, name in files.items()
        if "migrations" not in name.parts
    }


def imported(tree: ast.AST, known: Mapping[str, ast.Module], *, types: bool) -> Iterator[str]:
    """The known modules that a module imports, also in functions; with `types` also under TYPE_CHECKING."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test) and not types:
            continue
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                yield from {name if name in known else node.module} & known.keys()
        elif isinstance(node, ast.Import):
            yield from {alias.name for alias in node.names} & known.keys()
        yield from imported(node, known, types=types)


def unit(module: str, folder: str) -> str:
    """The folder or module directly below a folder; empty for the folder itself and modules elsewhere."""
    return module.removeprefix(f"{folder}.").partition(".")[0] if module.startswith(f"{folder}.") else ""


@pytest.mark.parametrize("folder", [*ORDERS, *INNER_ORDERS])
def test_no_folder_imports_upward(folder: str) -> None:
    known, order = modules(folder.partition(".")[0]), (ORDERS | INNER_ORDERS)[folder].split()
    level = {name: index for index, name in enumerate(order)}
    unlisted = {unit(module, folder) for module in known} - {""} - level.keys()
    assert not unlisted, "add these to ORDERS or INNER_ORDERS"
    upward = {
        f"{module} -> {other}"
        for module, tree in known.items()
        if unit(module, folder)
        for other in imported(tree, known, types=True)
        if unit(other, folder) and level[unit(other, folder)] > level[unit(module, folder)]
    }
    assert not upward


@pytest.mark.parametrize("package", SOURCES)
def test_no_files_import_each_other(package: str) -> None:
    known = modules(package)
    # A package's __init__ re-exports names of the files below it; importing it does not count as a cycle.
    graph = {
        module: {other for other in imported(tree, known, types=False) if other not in (module, package)}
        for module, tree in known.items()
    }
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(f"import cycle: {' -> '.join(error.args[1])}")


@pytest.mark.parametrize("folder", [*ORDERS, *INNER_ORDERS])
def test_every_listed_folder_exists(folder: str) -> None:
    listed = set((ORDERS | INNER_ORDERS)[folder].split())
    assert listed == {unit(module, folder) for module in modules(folder.partition(".")[0])} - {""}
