import numpy as np
import pytest

from megatron_mok.compare import data


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("MEGATRON_MOK_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def texts(tmp_path):
    folder = tmp_path / "texts"
    (folder / "deep").mkdir(parents=True)
    (folder / "a.txt").write_bytes("höhe\n".encode())
    (folder / "deep" / "b.py").write_bytes(b"x = 1\n")
    (folder / "c.bin").write_bytes(b"not text")
    (folder / "empty.txt").write_bytes(b"")
    return folder


def test_folder_becomes_documents_of_bytes(texts):
    dataset = data.prepare(str(texts), max_bytes=1000)
    tokens = np.fromfile(f"{dataset.prefix}.bin", dtype=np.uint16)
    assert tokens.tolist() == [*"höhe\n".encode(), 255, *b"x = 1\n", 255]
    assert dataset.is_bytes
    assert dataset.fresh

    from megatron.core.datasets.indexed_dataset import IndexedDataset

    read = IndexedDataset(str(dataset.prefix))
    assert [len(document) for document in (read[0], read[1])] == [7, 7]
    assert read.document_indices.tolist() == [0, 1, 2]


def test_written_once_and_again_when_the_text_changes(texts):
    first = data.prepare(str(texts), 1000)
    again = data.prepare(str(texts), 1000)
    assert again.prefix == first.prefix
    assert not again.fresh
    (texts / "a.txt").write_text("other")
    other = data.prepare(str(texts), 1000)
    assert other.fresh
    assert other.prefix != first.prefix


def test_max_bytes_takes_whole_documents(texts):
    dataset = data.prepare(str(texts), max_bytes=7)
    assert dataset.prefix.with_name(dataset.prefix.name + ".bin").stat().st_size == 2 * 7


def test_stdlib_has_text_and_no_installed_packages():
    dataset = data.prepare("stdlib", max_bytes=200_000)
    tokens = np.fromfile(f"{dataset.prefix}.bin", dtype=np.uint16)
    assert 100_000 < len(tokens) < 202_000
    assert b"import " in tokens[tokens != 255].astype(np.uint8).tobytes()
    files = data._text_files(data.Path(data.sysconfig.get_path("stdlib")))
    assert not any("site-packages" in file.parts for file in files)


def test_existing_dataset_is_taken_as_it_is(texts):
    made = data.prepare(str(texts), 1000)
    taken = data.prepare(str(made.prefix), 1000)
    assert taken.prefix == made.prefix
    assert not taken.is_bytes


def test_nothing_usable(tmp_path):
    with pytest.raises(data.DataError, match=r"neither 'stdlib', nor a folder.*words\.bin"):
        data.prepare(str(tmp_path / "words"), 1000)
    (tmp_path / "empty").mkdir()
    with pytest.raises(data.DataError, match="no text file"):
        data.prepare(str(tmp_path / "empty"), 1000)


def test_split_that_leaves_a_part_empty(texts):
    dataset = data.prepare(str(texts), 1000)  # two documents
    data.check_split(dataset, "98,1,1", evaluates=False)
    data.check_split(dataset, "50,50,0", evaluates=True)
    with pytest.raises(data.DataError, match="leaves nothing for validation"):
        data.check_split(dataset, "98,1,1", evaluates=True)
    with pytest.raises(data.DataError, match="leaves nothing for validation"):
        data.check_split(dataset, "100,0,0", evaluates=True)
    with pytest.raises(data.DataError, match="leaves nothing for test"):
        data.check_split(dataset, "50,49,1", evaluates=True)
