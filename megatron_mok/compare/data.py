"""Training data for `compare`: real text as bytes, in Megatron's indexed dataset format.

A byte is a token (vocabulary 256). Documents end with 255, which is never a byte of UTF-8 text
and is the end-of-document id of Megatron's NullTokenizer at that vocabulary size.
"""

import hashlib
import os
import struct
import sysconfig
import warnings
from dataclasses import dataclass
from pathlib import Path

import numpy as np

BYTE_VOCAB_SIZE = 256
_EOD = 255
_SUFFIXES = {".py", ".txt", ".md", ".rst"}
_SKIPPED_FOLDERS = {"site-packages", "dist-packages", "__pycache__"}


class DataError(ValueError):
    """The data source of a config cannot be used."""


@dataclass(frozen=True)
class Dataset:
    """A Megatron indexed dataset: `<prefix>.bin` and `<prefix>.idx`.

    Attributes:
        prefix: path without the suffix, as Megatron's --data-path takes it.
        index_cache: folder for Megatron's sample indices.
        is_bytes: whether its tokens are the bytes of a text.
        fresh: whether this call wrote it (False: found).
    """

    prefix: Path
    index_cache: Path
    is_bytes: bool = True
    fresh: bool = False


def cache_folder() -> Path:
    """$MEGATRON_MOK_CACHE, else megatron_mok in $XDG_CACHE_HOME, else ~/.cache/megatron_mok."""
    if "MEGATRON_MOK_CACHE" in os.environ:
        return Path(os.environ["MEGATRON_MOK_CACHE"])
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "megatron_mok"


def prepare(source: str, max_bytes: int) -> Dataset:
    """The dataset that `source` names, written into the cache if it is not there yet.

    Args:
        source: "stdlib" (sources and texts of the running interpreter's standard library), a
            folder of text files (.py, .txt, .md, .rst, read recursively), or the prefix of an
            existing Megatron dataset.
        max_bytes: how much text to take, whole documents.

    Raises:
        DataError: there is nothing usable at `source`.
    """
    if source == "stdlib":
        return _prepare_text(Path(sysconfig.get_path("stdlib")), max_bytes)
    path = Path(source).expanduser()
    if path.is_dir():
        return _prepare_text(path, max_bytes)
    missing = [s for s in (".bin", ".idx") if not path.with_name(path.name + s).is_file()]
    if not missing:
        return Dataset(path.absolute(), cache_folder() / "index", is_bytes=False)
    raise DataError(
        f"data.source: {source!r} is neither 'stdlib', nor a folder, nor the prefix of a Megatron "
        f"dataset ({' and '.join(path.name + s for s in missing)} not found in {path.parent})"
    )


def check_split(dataset: Dataset, split: str, evaluates: bool) -> None:
    """Check that the parts of `split` that a run uses have documents; Megatron hangs otherwise.

    Args:
        split: weights of training, validation and test such as "98,1,1".
        evaluates: whether the run uses validation and test; without it all is for training.

    Raises:
        DataError: a part in use would be empty.
    """
    documents = _document_count(Path(f"{dataset.prefix}.idx"))
    weights = [float(weight) for weight in split.split(",")] if evaluates else [1, 0, 0]
    cut = 0
    for i, name in enumerate(("training", "validation", "test")):
        end = round(documents * sum(weights[: i + 1]) / sum(weights))
        wanted = weights[i] > 0 or (name == "validation" and evaluates)
        if wanted and end == cut:
            raise DataError(
                f"data.split: {split!r} leaves nothing for {name}, since {dataset.prefix.name} has "
                f"{documents} documents; give it a larger share or take more text"
            )
        cut = end


def _document_count(index: Path) -> int:
    """Number of documents (Megatron's "sequences"), from the header of a Megatron .idx file."""
    header = struct.Struct("<9sQBQ")  # magic, version, dtype, sequences
    with index.open("rb") as file:
        data = file.read(header.size)
    if len(data) < header.size or not data.startswith(b"MMIDIDX"):
        raise DataError(f"data.source: {index} is not the index of a Megatron dataset")
    return header.unpack(data)[3]


def _text_files(folder: Path) -> list[Path]:
    files = []
    for root, folders, names in os.walk(folder):
        folders[:] = sorted(set(folders) - _SKIPPED_FOLDERS)
        files += [Path(root, n) for n in sorted(names) if Path(n).suffix in _SUFFIXES]
    return files


def _prepare_text(folder: Path, max_bytes: int) -> Dataset:
    documents, total = [], 0
    key = hashlib.sha256()
    for file in _text_files(folder):
        text = file.read_bytes()
        if not text or b"\xff" in text or total + len(text) > max_bytes:
            continue
        documents.append(text)
        total += len(text)
        key.update(hashlib.sha256(text).digest())
    if not documents:
        raise DataError(
            f"data.source: no text file ({', '.join(sorted(_SUFFIXES))}) of at most "
            f"data.max_bytes = {max_bytes} bytes under {folder}"
        )
    cache = cache_folder()
    name = "stdlib" if folder == Path(sysconfig.get_path("stdlib")) else folder.resolve().name
    prefix = cache / "data" / f"{name}-{key.hexdigest()[:16]}"
    found = all(Path(f"{prefix}{s}").is_file() for s in (".bin", ".idx"))
    if not found:
        _write(prefix, documents)
    return Dataset(prefix, cache / "index", fresh=not found)


def _write(prefix: Path, documents: list[bytes]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of Megatron, about the packages it does without
        from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    prefix.parent.mkdir(parents=True, exist_ok=True)
    # Under names of our own first: another process may be writing the same dataset.
    part = f"{prefix}.{os.getpid()}"
    builder = IndexedDatasetBuilder(f"{part}.bin", dtype=np.uint16)
    for text in documents:
        tokens = np.frombuffer(text + bytes([_EOD]), dtype=np.uint8)
        builder.add_document(tokens, [len(tokens)])
    builder.finalize(f"{part}.idx")
    for suffix in (".bin", ".idx"):  # .idx last: it marks the dataset as whole
        os.replace(part + suffix, f"{prefix}{suffix}")
