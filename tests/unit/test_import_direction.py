"""Who may know what: imports point downward in the data flow (docs/architecture.md)."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import lightning_ppo

ROOT = Path(lightning_ppo.__file__).parent
PACKAGE = "lightning_ppo"


def module_name(path):
    parts = path.relative_to(ROOT.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


FILES = {module_name(path): path for path in sorted(ROOT.rglob("*.py"))}


def is_type_checking(node):
    return isinstance(node, ast.If) and getattr(node.test, "id", getattr(node.test, "attr", None)) == "TYPE_CHECKING"


def imports_of(tree):
    """Absolute names of everything that is imported when code runs; imports for type checkers are left out."""
    found = set()
    stack = [tree]
    while stack:
        node = stack.pop()
        if is_type_checking(node):
            stack.extend(node.orelse)
            continue
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports hide where something comes from"
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                found.add(name if name in FILES else node.module)
        stack.extend(ast.iter_child_nodes(node))
    return found


IMPORTS = {name: imports_of(ast.parse(path.read_text(encoding="utf-8"))) for name, path in FILES.items()}


def inside(name, *places):
    return any(name == f"{PACKAGE}.{place}" or name.startswith(f"{PACKAGE}.{place}.") for place in places)


def imported_by(*places):
    """Every (importer, imported) pair of modules of the package, for the importers in these places."""
    return [
        (importer, imported)
        for importer, names in IMPORTS.items()
        if inside(importer, *places)
        for imported in names
        if imported.split(".")[0] == PACKAGE
    ]


def test_the_test_sees_the_imports():
    assert ("lightning_ppo.module", "lightning_ppo.strategy") in imported_by("module")
    assert len(FILES) > 30
    tree = ast.parse(
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import a\nelse:\n    import b\ndef f():\n    import c"
    )
    assert imports_of(tree) == {"typing", "b", "c"}


@pytest.mark.parametrize(
    ("places", "allowed"),
    [
        (["algorithms"], ["algorithms"]),
        (["batch", "errors", "validation"], ["batch", "errors", "validation"]),
        # which names the choices that there are
        (["config"], ["config", "validation", "algorithms"]),
    ],
)
def test_the_ground_floor_knows_nothing_above(places, allowed):
    assert [pair for pair in imported_by(*places) if not inside(pair[1], *allowed)] == []


@pytest.mark.parametrize(
    ("places", "forbidden"),
    [
        (["models"], ["rollout", "updates", "module", "strategy", "callbacks", "ppo_step", "hooks"]),
        (["updates"], ["rollout", "strategy", "module", "callbacks", "ppo_step", "hooks"]),
        (["strategy", "accumulator", "residency", "ranks"], ["updates", "algorithms", "rollout", "module", "models"]),
        (["module", "ppo_step"], ["rollout.local", "rollout.collector", "rollout.pump"]),
        (["rollout"], ["updates", "module", "models", "callbacks", "ppo_step", "hooks", "algorithms"]),
        (["rollout.local"], ["rollout.collector", "rollout.pump", "rollout.datamodule", "strategy"]),
        (["refit"], ["rollout", "updates", "module", "strategy", "callbacks"]),
        (["callbacks"], ["module", "cli"]),
    ],
)
def test_nobody_reaches_upward(places, forbidden):
    assert [pair for pair in imported_by(*places) if inside(pair[1], *forbidden)] == []


def test_only_the_command_line_knows_the_command_line():
    importers = {importer for importer, _ in imported_by(*{name.removeprefix(f"{PACKAGE}.") for name in FILES})}
    assert importers
    cli = [importer for importer, names in IMPORTS.items() if f"{PACKAGE}.cli" in names]
    assert [importer for importer in cli if not inside(importer, "cli", "__main__")] == []


def test_rollouts_know_lightning_only_in_the_data_module():
    users = [
        name
        for name, names in IMPORTS.items()
        if inside(name, "rollout", "refit", "algorithms", "models", "batch", "config", "validation", "errors")
        and any(imported.split(".")[0] == "lightning" for imported in names)
    ]
    assert users == [f"{PACKAGE}.rollout.datamodule"]


def importers_of(*packages):
    return sorted(name for name, names in IMPORTS.items() if set(packages) & {n.split(".")[0] for n in names})


def test_heavy_or_conflicting_packages_are_never_imported():
    """The trainer's process never imports vllm; its torch pin may conflict. And of the two Lightnings we use one."""
    assert importers_of("vllm", "megatron", "pytorch_lightning") == []


def test_ray_is_imported_where_it_is_asked_for_only():
    """By functions of one package; that loading it loads no Ray is tested in tests/ray."""
    assert all(name.startswith(f"{PACKAGE}.rollout.ray.") for name in importers_of("ray"))


def test_modules_do_not_import_each_other_in_a_circle():
    done, path = set(), []

    def visit(name):
        assert name not in path, " -> ".join([*path[path.index(name) :], name])
        if name in done:
            return
        path.append(name)
        for imported in sorted(IMPORTS[name] & FILES.keys()):
            visit(imported)
        path.pop()
        done.add(name)

    # the package itself only names its modules, and imports them on first use
    done.add(PACKAGE)
    for name in FILES:
        visit(name)


def run_python(code):
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    return result.stdout.strip()


def test_importing_the_package_imports_nothing_heavy():
    code = (
        "import sys, lightning_ppo; dir(lightning_ppo)\n"
        "print([n for n in ('lightning', 'torch', 'transformers', 'numpy') if n in sys.modules])"
    )
    assert run_python(code) == "[]"


def test_the_command_begins_before_anything_heavy_is_imported():
    """What comes before `main` is out of reach for its answer to Ctrl-C."""
    code = "import sys, lightning_ppo.__main__; print('lightning_ppo.cli' in sys.modules, 'torch' in sys.modules)"
    assert run_python(code) == "False False"


def test_settings_and_the_engine_need_no_lightning():
    """The generation process is started often, and does not need it."""
    code = (
        "import sys, lightning_ppo.config, lightning_ppo.rollout.config, lightning_ppo.rollout.local\n"
        "print('lightning' in sys.modules)"
    )
    assert run_python(code) == "False"


def test_public_names():
    """The API that the README and the examples use; each name can be imported, and none is missing from `__all__`."""
    assert set(lightning_ppo.__all__) >= {
        "CheckpointExclusion",
        "CriticEpochs",
        "CriticWarmup",
        "LocalEngineConfig",
        "PPOCallback",
        "PPOConfig",
        "PPOModule",
        "RolloutConfig",
        "RolloutDataModule",
        "StreamingPPOStrategy",
        "WeightRefit",
    }
    assert sorted(lightning_ppo.__all__) == sorted(lightning_ppo._HOME)
    for name in lightning_ppo.__all__:
        assert getattr(lightning_ppo, name).__name__ == name
    with pytest.raises(AttributeError, match="has no attribute 'Trainer'"):
        _ = lightning_ppo.Trainer


def test_type_checkers_see_the_same_names():
    tree = ast.parse(FILES[PACKAGE].read_text(encoding="utf-8"))
    blocks = [node for node in tree.body if is_type_checking(node)]
    seen = {
        alias.name
        for block in blocks
        for node in ast.walk(block)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert seen == set(lightning_ppo.__all__)
