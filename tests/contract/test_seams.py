"""The table of seams against the installed vLLM and the recorded versions."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.engine.v2 import REPOSITORY, run_in_v1
from vllm_ext_plugin import seams
from vllm_ext_plugin.seam_table import ALL_VERSIONS, SEAMS, Seam
from vllm_ext_plugin.signatures import SourcePackage

pytestmark = pytest.mark.contract

PLUGIN = REPOSITORY / "plugins" / "vllm_ext_plugin"
BY_ID = {seam.id: seam for seam in SEAMS}
ADD_REQUEST = BY_ID["vllm.v1.core.sched.scheduler.Scheduler.add_request"]


def ids(seam: Seam) -> str:
    return seam.id.removeprefix("vllm.")


# The installed vLLM


def test_the_installed_version_is_supported():
    version = seams.installed_version()
    assert version is not None and seams.supported_version(version)


@pytest.mark.parametrize("seam", SEAMS, ids=ids)
def test_signature_is_the_recorded_one(seam: Seam):
    version = seams.installed_version()
    assert version is not None
    minor = ".".join(version.split(".")[:2])
    assert seams.fingerprint(seam) == seams.recorded(minor)["seams"].get(seam.id)


def test_check_finds_nothing_and_parses_nothing_on_a_recorded_release(monkeypatch):
    def refuse(*args: Any) -> None:
        raise AssertionError("an unchanged file was parsed")

    monkeypatch.setattr(SourcePackage, "signature", refuse)
    assert seams.check() == []


def resolve_all() -> dict[str, Any]:
    result: dict[str, Any] = {}
    for seam in SEAMS:
        try:
            found = seams.resolve(seam)
        except LookupError as error:
            result[seam.id] = f"LookupError: {error}"
            continue
        result[seam.id] = list(inspect.signature(found).parameters) if inspect.isfunction(found) else None
    return result


def test_every_row_can_be_imported_and_agrees_with_its_source():
    imported = run_in_v1(resolve_all)
    assert {name: text for name, text in imported.items() if isinstance(text, str)} == {}
    compared = 0
    for name, parameters in imported.items():
        text = seams.fingerprint(BY_ID[name])
        assert text is not None
        if parameters is None or "def " not in text:
            continue
        signature = ast.parse(text.partition(" calls ")[0].partition("def ")[2].join(("def ", ": ..."))).body[
            0
        ]
        assert isinstance(signature, ast.FunctionDef)
        arguments = signature.args
        every = [
            *arguments.posonlyargs,
            *arguments.args,
            arguments.vararg,
            *arguments.kwonlyargs,
            arguments.kwarg,
        ]
        assert [argument.arg for argument in every if argument] == parameters, name
        compared += 1
    assert compared >= 15


# The table


def test_rows_are_complete_and_unique():
    assert len(BY_ID) == len(SEAMS)
    for seam in SEAMS:
        assert seam.why and seam.when_missing, seam.id
        assert set(seam.versions) <= set(ALL_VERSIONS)


@pytest.mark.parametrize("minor", ALL_VERSIONS)
def test_every_row_is_recorded_for_every_version(minor: str):
    record = seams.recorded(minor)
    assert record["version"].startswith(f"{minor}.")
    assert set(record["seams"]) == {seam.id for seam in SEAMS if minor in seam.versions}
    assert set(record["modules"]) == {BY_ID[name].module for name in record["seams"]}


@pytest.mark.parametrize("seam", SEAMS, ids=ids)
def test_what_differs_between_versions_is_explained(seam: Seam):
    texts = {seams.recorded(minor)["seams"].get(seam.id) for minor in ALL_VERSIONS}
    shared_note = any(
        other.differs == seam.differs
        and len({seams.recorded(minor)["seams"].get(other.id) for minor in ALL_VERSIONS}) > 1
        for other in SEAMS
        if other.module == seam.module and other.differs
    )
    assert bool(seam.differs) == (len(texts) > 1) or shared_note


def test_every_import_of_vllm_in_the_plugin_has_a_row():
    covered = {(seam.module, seam.qualname.split(".")[0]) for seam in SEAMS}
    missing = []
    for path in sorted(PLUGIN.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.ImportFrom) or (node.module or "").split(".")[0] != "vllm":
                continue
            for alias in node.names:
                module = f"{node.module}.{alias.name}"
                is_module = any(seam.module == module for seam in SEAMS)
                if not is_module and (node.module, alias.name) not in covered:
                    missing.append(f"{path.name}:{node.lineno}: {module}")
    assert missing == []


def test_every_patched_attribute_has_a_row():
    """`patch(Owner, "name", …)` and `add(Owner, …)` with a literal name."""
    names = {
        seam.qualname.split(".")[-1] for seam in SEAMS if seam.how in ("wrap", "set attribute", "subclass")
    }
    missing = []
    for path in sorted(PLUGIN.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "patch":
                name = node.args[1]
                if isinstance(name, ast.Constant) and name.value not in names:
                    missing.append(f"{path.name}:{node.lineno}: {name.value}")
    assert missing == []


def test_importing_the_table_imports_no_vllm():
    code = "import sys, vllm_ext_plugin.seams; sys.exit('vllm' in sys.modules or 'torch' in sys.modules)"
    environment = {"PYTHONPATH": f"{REPOSITORY}:{REPOSITORY / 'plugins'}"}
    assert subprocess.run([sys.executable, "-c", code], env=environment, check=False).returncode == 0


@pytest.mark.parametrize("columns", [80, 200])
def test_on_a_terminal_a_table_is_printed(columns: int, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("NO_COLOR", "1")
    assert seams.main([]) == 0
    printed = re.sub("\x1b\\[[0-9;]*m", "", capsys.readouterr().out)
    lines = printed.splitlines()
    assert "Seams on vLLM" in printed and max(map(len, lines)) <= columns
    words = {line.split()[1] for line in lines if line.startswith("│") and line.split()[1] != "│"}
    for seam in SEAMS:  # none is cut or broken over lines
        assert {seam.module, seam.qualname} <= words
    assert lines[-1] == seams.summary(["ok"] * len(SEAMS))


def test_elsewhere_one_line_per_symbol_is_printed(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    assert seams.main([]) == 0
    *rows, last = capsys.readouterr().out.splitlines()
    assert rows == [f"ok\t{seam.id}\t{seam.how}\t{seam.when_missing}" for seam in SEAMS]
    assert last == f"{len(SEAMS)} ok, 0 changed, 0 missing"


def test_problems_are_counted_and_only_fatal_ones_end_in_an_error(capsys, monkeypatch):
    fatal = next(seam for seam in SEAMS if seam.fatal)
    harmless = [seam for seam in SEAMS if not seam.fatal][:3]

    def found(*problems: seams.SeamProblem) -> tuple[int, list[str], str]:
        monkeypatch.setattr(seams, "check", lambda: list(problems))
        status = seams.main([])
        out, err = capsys.readouterr()
        return status, out.splitlines(), err

    gone, broken, changed = (
        seams.SeamProblem(seam, "0.32.0", "def a()", now, breaking)
        for seam, now, breaking in (
            (harmless[0], None, True),
            (harmless[1], "def a(b)", True),
            (harmless[2], "def a(b=1)", False),
        )
    )
    status, lines, errors = found(gone, broken, changed)
    assert status == 0
    assert lines[-1] == f"{len(SEAMS) - 3} ok, 1 changed, 1 missing, 1 broken"
    states = {line.split("\t")[1]: line.split("\t")[0] for line in lines[:-1]}
    assert [states[seam.id] for seam in harmless] == ["missing", "broken", "changed"]
    assert str(gone) in errors
    assert found(seams.SeamProblem(fatal, "0.32.0", "def a()", None, True))[0] == 1
    assert found(seams.SeamProblem(fatal, "0.32.0", "def a()", "def a(b=1)", False))[0] == 0


def test_help_and_no_vllm(capsys, monkeypatch):
    with pytest.raises(SystemExit) as caught:
        seams.main(["--help"])
    assert caught.value.code == 0 and "usage: python -m vllm_ext_plugin.seams" in capsys.readouterr().out
    monkeypatch.setattr(SourcePackage, "installed", lambda: None)
    assert seams.main([]) == 2
    assert "vLLM is not installed here" in capsys.readouterr().err


# Another vLLM


def changed_vllm(tmp_path: Path, version: str, seam: Seam, old: str, new: str) -> SourcePackage:
    """A copy of the module of `seam` with one text replaced, under another version number."""
    installed = SourcePackage.installed()
    assert installed is not None
    source = installed.path(seam.module)
    assert source is not None
    copy = tmp_path / "vllm" / source.relative_to(installed.root)
    copy.parent.mkdir(parents=True)
    text = source.read_text()
    assert old in text
    copy.write_text(text.replace(old, new))
    (tmp_path / "vllm" / "_version.py").write_text(f"__version__ = version = '{version}'\n")
    return SourcePackage(tmp_path / "vllm")


DEFINITION = "    def add_request(self, request: Request) -> None:"


def test_a_new_required_parameter_is_fatal_and_says_so(tmp_path):
    package = changed_vllm(
        tmp_path,
        "0.34.0",
        ADD_REQUEST,
        DEFINITION,
        "    def add_request(self, request: Request, wave: int) -> None:",
    )
    (problem,) = seams.check([ADD_REQUEST], package)
    assert problem.breaking and problem.fatal
    assert str(problem) == (
        "vLLM 0.34.0: vllm.v1.core.sched.scheduler: Scheduler.add_request "
        "was `def add_request(self, request)`, is now `def add_request(self, request, wave)`: "
        "vllm_ext refuses to start"
    )


def test_a_removed_symbol_is_fatal_and_says_so(tmp_path):
    package = changed_vllm(
        tmp_path, "0.34.0", ADD_REQUEST, DEFINITION, DEFINITION.replace("add_request", "enqueue_request")
    )
    (problem,) = seams.check([ADD_REQUEST], package)
    assert problem.fatal and "add_request is gone (was `def add_request(self, request)`)" in str(problem)


def test_an_optional_addition_is_reported_but_usable(tmp_path):
    package = changed_vllm(
        tmp_path,
        "0.32.1",
        ADD_REQUEST,
        DEFINITION,
        "    def add_request(self, request: Request, wave: int = 0) -> None:",
    )
    (problem,) = seams.check([ADD_REQUEST], package)
    assert not problem.breaking and not problem.fatal and "still usable" in str(problem)


def test_a_change_elsewhere_in_the_file_is_no_problem(tmp_path):
    package = changed_vllm(tmp_path, "0.32.1", ADD_REQUEST, DEFINITION, "    # moved\n" + DEFINITION)
    assert seams.check([ADD_REQUEST], package) == []


def test_a_lost_metric_is_not_fatal(tmp_path):
    seam = BY_ID["vllm.v1.engine.output_processor.OutputProcessor._finish_request"]
    package = changed_vllm(tmp_path, "0.34.0", seam, "def _finish_request(", "def _complete_request(")
    (problem,) = seams.check([seam], package)
    assert problem.breaking and not problem.fatal and "metrics" in str(problem)


def test_a_plugin_load_that_comes_too_late_is_noticed(tmp_path):
    """No signature changes here, but the order of two calls that we hang on."""
    seam = BY_ID["vllm.engine.arg_utils.AsyncEngineArgs.add_cli_args"]
    package = changed_vllm(
        tmp_path,
        "0.34.0",
        seam,
        "        load_general_plugins()\n        if not async_args_only:",
        "        if not async_args_only:",
    )
    (problem,) = seams.check([seam], package)
    assert problem.breaking


@pytest.mark.parametrize("minor", ALL_VERSIONS)
def test_signatures_of_all_supported_versions_are_fine_in_each(tmp_path, minor: str):
    """A build may carry a neighbour's signature; the code copes with each, so it is no problem."""
    seam = BY_ID["vllm.v1.core.sched.scheduler.Scheduler.grammar_compile_error_reqs"]
    package = changed_vllm(
        tmp_path,
        f"{minor}.9",
        seam,
        "self.grammar_compile_error_reqs: set[str] = set()",
        "self.grammar_compile_error_reqs: dict[str, RequestError] = {}",
    )
    assert seams.check([seam], package) == []


@pytest.mark.parametrize(
    ("version", "supported"),
    [
        ("0.30.1", False),
        ("0.31.0", True),
        ("0.32.0+cpu", True),
        ("0.32.1.dev3+gabcdef", True),
        ("0.33.0rc1", True),
        ("0.34.0", False),
        ("1.32.0", False),
        ("dev", False),
    ],
)
def test_supported_version(version: str, supported: bool):
    assert seams.supported_version(version) is supported


# The tool


@pytest.fixture(scope="module")
def fingerprint_tool() -> Any:
    spec = importlib.util.spec_from_file_location("fingerprint_tool", REPOSITORY / "tools" / "fingerprint.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_record_of_the_installed_version_is_up_to_date(fingerprint_tool, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["fingerprint.py", "--check"])
    assert fingerprint_tool.main() == 0, capsys.readouterr().err


def test_the_tool_reads_a_wheel_like_the_installed_package(fingerprint_tool, tmp_path):
    import zipfile

    package = SourcePackage.installed()
    assert package is not None
    wheel = tmp_path / "vllm-0.32.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for module in sorted({"vllm._version", *(seam.module for seam in SEAMS)}):
            path = package.path(module)
            assert path is not None
            archive.write(path, str(Path("vllm") / path.relative_to(package.root)))
    unpacked = fingerprint_tool.open_package(wheel, tmp_path / "unpacked")
    assert fingerprint_tool.record(unpacked) == fingerprint_tool.record(package)
