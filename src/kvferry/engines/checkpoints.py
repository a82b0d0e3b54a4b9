"""Identifies the weights in a directory by what they are, and not by where they lie.

Reading a terabyte from a network's disks would take longer than a start may. What is read instead is every tensor's
name, type and shape, and samples of their bytes: at most `MOST_READS` reads whatever the size, many at a time. Training
changes every tensor that it does not freeze, so that two checkpoints of one shape differ nearly anywhere one looks. Two
that differ in nothing but a few rows of a tensor, or in a few of very many tensors, may count as the same.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

from kvferry.errors import ModelError
from kvferry.loggers import logger_of

log = logger_of(__name__)

MOST_READS = 2048
READS_A_TENSOR = 4
SAMPLE_BYTES = 256
_READERS = 16
_LARGEST_HEADER_BYTES = 256 << 20
_INDEX = "model.safetensors.index.json"
_OTHER_FORMATS = ("*.bin", "*.pt", "*.pth", "*.gguf", "*.npz")
_READS_A_FILE = 64
_BROKEN = (OSError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError)
"""What comes of files in which anything may stand."""


class _Stored(NamedTuple):
    """Bytes in a file, of a tensor or of a sample of one.

    Attributes:
        name: of the tensor or file; what is the same in two directories has the same.
        kind: what else is to be the same.
    """

    name: str
    kind: str
    file: Path
    offset: int
    size: int


def weights_identity(directory: Path) -> str:
    """Returns a text that identifies the weights in a model's directory.

    How the tensors are spread over files does not count, nor does anything else in the directory.

    Raises:
        ModelError: if there are no weights in a form that is known here, or they cannot be read.
    """
    try:
        stored, reads_each = _stored(directory)
        digest = hashlib.blake2b(digest_size=16)
        for each in stored:
            digest.update(f"{each.name}\0{each.kind}\0{each.size}\0".encode())
        for sampled in _read_all(_samples(stored, reads_each)):
            digest.update(sampled)
    except _BROKEN as error:
        raise ModelError(f"the weights in {directory} cannot be read: {type(error).__name__}: {error}") from error
    total = sum(each.size for each in stored)
    return f"{digest.hexdigest()} ({len(stored)} tensors or files, {total:,} bytes)"


def model_directory(name: str, revision: str | None, cache: str | None = None) -> Path | None:
    """Returns where a model's or an adapter's files are; None if that is not here.

    Args:
        name: a directory, or a name of Hugging Face's hub whose files are in the hub's cache.
        revision: of the hub's; the default one if None.
        cache: where the cache is, if not where the hub's client has it.
    """
    if os.path.isdir(name):  # which raises for no path
        return Path(name)
    try:
        from huggingface_hub import snapshot_download

        return Path(snapshot_download(name, revision=revision, cache_dir=cache, local_files_only=True))
    except Exception as error:  # it has many, and none of them matters here
        log.debug("%s is not in the hub's cache: %s", name, error)
        return None


def adapter_identity(directory: Path) -> str:
    """Returns a text that identifies a LoRA adapter: its weights, and what its configuration says of their use.

    Raises:
        ModelError: as for `weights_identity`.
    """
    weights = weights_identity(directory)
    try:
        configuration = json.loads((directory / "adapter_config.json").read_bytes())
        use = adapter_use(configuration)
    except _BROKEN as error:
        raise ModelError(f"the adapter in {directory} cannot be read: {type(error).__name__}: {error}") from error
    return f"{weights}, {use}"


def adapter_use(configuration: Mapping[str, object]) -> str:
    """Returns a digest of what a LoRA adapter's configuration says of its weights' use."""
    said = {name: value for name, value in configuration.items() if name != "base_model_name_or_path"}  # a path, often
    return hashlib.blake2b(json.dumps(said, sort_keys=True, default=str).encode(), digest_size=8).hexdigest()


def identified(directory: Path | None, name: str, identify: Callable[[Path], str] = weights_identity) -> str:
    """Identifies what a directory has; returns the name where there is nothing to read, or not in a known form."""
    try:
        if directory is not None and directory.is_dir():
            return identify(directory)
    except ModelError as error:
        log.warning("%s is identified by its name alone: %s", name, error)
    return name


def _stored(directory: Path) -> tuple[list[_Stored], int]:
    """Returns what is stored in a directory, by name, and how often each is sampled at most."""
    files = _safetensors(directory)
    if files:
        with ThreadPoolExecutor(_READERS) as readers:
            found = [each for of_file in readers.map(_tensors, files) for each in of_file]
        return sorted(found, key=lambda each: each.name), READS_A_TENSOR
    other = sorted(path for pattern in _OTHER_FORMATS for path in directory.glob(pattern))
    if not other:
        raise ModelError(f"{directory} has no weights: no *.safetensors, {', '.join(_OTHER_FORMATS)}")
    return [_Stored(path.name, "file", path, 0, path.stat().st_size) for path in other], _READS_A_FILE


def _safetensors(directory: Path) -> list[Path]:
    """Returns the files that engines load: a directory may have the same weights twice, in one file and in many."""
    index = directory / _INDEX
    if index.exists():
        names = json.loads(index.read_bytes())["weight_map"].values()
        return [directory / name for name in sorted(set(names))]
    single = directory / "model.safetensors"
    return [single] if single.exists() else sorted(directory.glob("*.safetensors"))


def _tensors(file: Path) -> list[_Stored]:
    with file.open("rb") as opened:
        header_bytes = int.from_bytes(opened.read(8), "little")
        if header_bytes > _LARGEST_HEADER_BYTES:
            raise ValueError(f"{file.name} has a header of {header_bytes:,} bytes")
        header = json.loads(opened.read(header_bytes))
    return [
        _Stored(
            name,
            f"{each['dtype']} {each['shape']}",
            file,
            8 + header_bytes + each["data_offsets"][0],
            each["data_offsets"][1] - each["data_offsets"][0],
        )
        for name, each in header.items()
        if name != "__metadata__"
    ]


def _samples(stored: Sequence[_Stored], reads_each: int) -> list[_Stored]:
    """Chooses what to read, the same for all that are stored under the same names: spread over all, and over each."""
    chosen = stored
    if len(stored) > MOST_READS:
        chosen = [stored[number * len(stored) // MOST_READS] for number in range(MOST_READS)]
    count = max(1, min(reads_each, MOST_READS // max(1, len(chosen))))
    return [sample for each in chosen for sample in _spread(each, count)]


def _spread(stored: _Stored, count: int) -> Iterable[_Stored]:
    if stored.size <= count * SAMPLE_BYTES:
        yield stored
        return
    for number in range(count):
        start = (2 * number + 1) * (stored.size - SAMPLE_BYTES) // (2 * count)
        yield stored._replace(offset=stored.offset + start, size=SAMPLE_BYTES)


def _read_all(samples: Sequence[_Stored]) -> list[bytes]:
    """Reads all samples in their order, many at a time: what takes time on a network's disks is to wait.

    Each reader has a share of them: to hand a single one over takes longer than to read it from the page cache, where
    an adapter lies that the engine has just loaded.
    """
    with ExitStack() as files, ThreadPoolExecutor(_READERS) as readers:
        opened = {file: files.enter_context(file.open("rb")).fileno() for file in {each.file for each in samples}}

        def share(first: int) -> list[bytes]:
            return [read_sample(opened[each.file], each) for each in samples[first::_READERS]]

        shares = list(readers.map(share, range(_READERS)))
        return [shares[number % _READERS][number // _READERS] for number in range(len(samples))]


def read_sample(descriptor: int, sample: _Stored) -> bytes:
    data = os.pread(descriptor, sample.size, sample.offset)
    if len(data) != sample.size:
        raise ValueError(f"{sample.file.name} ends before byte {sample.offset + sample.size:,}")
    return data
