"""Records the signatures of every seam for one vLLM version in plugins/vllm_ext_plugin/fingerprints/.

    python tools/fingerprint.py                    # from the installed vLLM
    python tools/fingerprint.py vllm-0.33.0-….whl  # from a wheel (only its Python files are read)
    python tools/fingerprint.py path/to/vllm       # from an unpacked package folder
    python tools/fingerprint.py --check […]        # write nothing, exit 1 when the record would change

Only signatures and checksums are recorded, no code.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPOSITORY / "plugins"))

from vllm_ext_plugin import seams  # noqa: E402
from vllm_ext_plugin.signatures import SourcePackage  # noqa: E402

FOLDER = REPOSITORY / "plugins" / "vllm_ext_plugin" / "fingerprints"


def record(package: SourcePackage) -> dict[str, Any]:
    """What is kept of one version: its number, a checksum per module touched, a signature per seam found.

    Raises LookupError naming the seams that should exist in this version and do not, or the other way round.
    """
    version = seams.version_of(package)
    minor = ".".join(version.split(".")[:2])
    found = {seam.id: seams.fingerprint(seam, package) for seam in seams.SEAMS}
    wrong = [seam.id for seam in seams.SEAMS if (found[seam.id] is not None) != (minor in seam.versions)]
    if wrong:
        raise LookupError(f"vLLM {version}: `versions` in seam_table.py does not fit: {', '.join(wrong)}")
    modules = sorted({seam.module for seam in seams.SEAMS if found[seam.id] is not None})
    return {
        "version": version,
        "modules": {module: package.digest(module) for module in modules},
        "seams": {name: text for name, text in found.items() if text is not None},
    }


def open_package(source: Path | None, scratch: Path) -> SourcePackage:
    """The package at `source`; a wheel's Python files are unpacked into `scratch`; None: the installed."""
    if source is None:
        package = SourcePackage.installed()
        if package is None:
            raise LookupError("vLLM is not installed: name a wheel or a folder")
        return package
    if source.is_dir():
        return SourcePackage(source / "vllm" if (source / "vllm" / "__init__.py").exists() else source)
    with zipfile.ZipFile(source) as wheel:
        wheel.extractall(
            scratch, [name for name in wheel.namelist() if name.startswith("vllm/") and name.endswith(".py")]
        )
    return SourcePackage(scratch / "vllm")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("source", nargs="?", type=Path, help="wheel or folder; default: the installed vLLM")
    parser.add_argument("--check", action="store_true", help="compare only")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        try:
            result = record(open_package(options.source, Path(scratch)))
        except LookupError as error:
            print(f"fingerprint: {error}", file=sys.stderr)
            return 2
    target = FOLDER / f"{'.'.join(result['version'].split('.')[:2])}.json"
    text = json.dumps(result, indent=1, sort_keys=True) + "\n"
    if target.exists() and target.read_text() == text:
        print(f"{target.name}: up to date ({result['version']}, {len(result['seams'])} seams)")
        return 0
    if options.check:
        print(f"{target.name}: differs from {result['version']}; run tools/fingerprint.py", file=sys.stderr)
        return 1
    FOLDER.mkdir(exist_ok=True)
    target.write_text(text)
    print(f"{target.name}: written ({result['version']}, {len(result['seams'])} seams)")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
