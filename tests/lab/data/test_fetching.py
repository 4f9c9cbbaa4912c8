from pathlib import Path

import pytest

from crossbn.lab.data import (
    DATASETS,
    FOLDER_VARIABLE,
    DataError,
    Source,
    cache_folder,
    data_folder,
    fetch,
    load_pictures,
)
from crossbn.lab.data import fetching as module
from crossbn.lab.data.dataset import DataSet
from crossbn.lab.data.download import Watch
from crossbn.lab.data.store import Parts, write_store
from tests.lab.data.conftest import Places
from tests.lab.data.tiny import PICTURE_NAMES, assert_same, make_parts, shrink, write_idx, write_rows

NOBODY = Source("nobody", (("crossbn-no-such-program",),), {}, 1)


@pytest.fixture(autouse=True)
def _tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in PICTURE_NAMES:
        monkeypatch.setitem(DATASETS, name, shrink(name, make_parts(name), sources=(NOBODY,)))


@pytest.fixture
def downloads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Let downloads succeed; returns the names of what was downloaded."""
    names: list[str] = []

    def obtained(dataset: DataSet, watch: Watch) -> Parts:
        watch("afar", 0.5)
        watch("afar", 1.0)
        names.append(dataset.name)
        return make_parts(dataset.name)

    monkeypatch.setattr(module, "obtain", obtained)
    return names


def test_the_variable_names_the_folder(monkeypatch: pytest.MonkeyPatch, places: Places) -> None:
    assert data_folder() == places.folder
    assert data_folder(Path("given")) == Path("given")
    monkeypatch.setenv("HOME", "/home/someone")
    monkeypatch.setenv(FOLDER_VARIABLE, "~/pictures")
    assert data_folder() == Path("/home/someone/pictures")
    monkeypatch.setenv(FOLDER_VARIABLE, "")
    assert data_folder() == Path("data")


def test_the_cache_is_where_caches_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/var/caches")
    assert cache_folder() == Path("/var/caches/crossbn")
    monkeypatch.setenv("HOME", "/home/someone")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_folder() == Path("/home/someone/.cache/crossbn")


def test_downloaded_once_and_kept(downloads: list[str], places: Places, capsys: pytest.CaptureFixture[str]) -> None:
    expected = make_parts("cifar100")
    assert_same(load_pictures("cifar100", train=True), expected[True])
    assert capsys.readouterr().err == "crossbn: cifar100 from afar\n"
    assert_same(load_pictures("cifar100", train=False), expected[False])
    assert downloads == ["cifar100"]
    assert [path.name for path in places.cache.iterdir()] == ["cifar100.npz"]
    assert not places.folder.exists()


def test_the_given_folder_goes_before_the_variable_s_and_that_before_the_cache(
    places: Places, tmp_path: Path, downloads: list[str]
) -> None:
    kept = make_parts("cifar100")  # whose content has no checksum, so that copies can differ here
    for number, folder in enumerate((places.cache, places.folder, tmp_path / "given"), start=1):
        kept[True].classes[0] = number
        write_store(folder / "cifar100.npz", kept)
    assert load_pictures("cifar100", True, tmp_path / "given").classes[0] == 3
    assert load_pictures("cifar100", True).classes[0] == 2
    assert load_pictures("cifar100", True, tmp_path / "elsewhere").classes[0] == 1
    assert downloads == []


@pytest.mark.parametrize("name", ["cifar10", "fashion_mnist"])
def test_what_is_in_a_folder_is_used_there_without_a_copy(name: str, places: Places) -> None:
    expected = make_parts(name)
    (write_rows if name == "cifar10" else write_idx)(places.folder / name, expected)
    for train in (True, False):
        assert_same(load_pictures(name, train), expected[train])
    assert not places.cache.exists()


def test_missing(places: Places) -> None:
    with pytest.raises(DataError) as caught:
        load_pictures("cifar10", True, download=False)
    absence = f"cifar10 is not in {places.folder} nor in {places.cache}"
    assert str(caught.value) == f"{absence}: `crossbn data get cifar10` downloads it"
    with pytest.raises(DataError) as caught:
        load_pictures("cifar10", True)
    reason = "it could not be downloaded (nobody: crossbn-no-such-program is not installed)"
    assert str(caught.value) == f"{absence}, and {reason}"
    assert not places.cache.exists()


def test_damaged_cache_is_named_and_not_replaced_in_silence(places: Places, downloads: list[str]) -> None:
    path = places.cache / "fashion_mnist.npz"
    write_store(path, make_parts("fashion_mnist"))
    path.write_bytes(path.read_bytes()[:-1000])
    with pytest.raises(DataError, match=f"{path} is damaged or incomplete; remove it, then `crossbn data get fash"):
        load_pictures("fashion_mnist", train=True)
    assert downloads == []


def test_download_that_cannot_be_kept(places: Places, downloads: list[str]) -> None:
    places.cache.parent.write_text("a file where the folder should be")
    with pytest.raises(DataError, match=r"cifar10\.npz cannot be written: Not a directory"):
        load_pictures("cifar10", train=True)
    assert downloads == ["cifar10"]


def test_no_place_for_temporary_files(places: Places) -> None:
    places.temporary.rmdir()
    with pytest.raises(DataError, match="cifar10 cannot be downloaded: No such file or directory"):
        load_pictures("cifar10", train=True)


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("faces", "there is no data set 'faces': there are cifar10, cifar100, fashion_mnist, digits"),
        ("cifar", "there is no data set 'cifar': did you mean cifar10"),
        ("imagenet", "imagenet is too large to be loaded as a whole"),
    ],
)
def test_what_cannot_be_loaded(name: str, sentence: str) -> None:
    with pytest.raises(DataError, match=sentence):
        load_pictures(name, train=True)


def test_getting_into_a_folder(places: Places, tmp_path: Path, downloads: list[str]) -> None:
    wanted = tmp_path / "wanted"
    found = fetch("cifar10", into=wanted)
    assert found.path == wanted / "cifar10.npz"
    assert_same(found.read(train=True), make_parts("cifar10")[True])
    assert not places.cache.exists()
    again = fetch("cifar10", into=wanted)
    assert again.path == found.path
    assert downloads == ["cifar10"]


def test_getting_into_a_folder_takes_what_is_on_the_disk(places: Places, tmp_path: Path, downloads: list[str]) -> None:
    write_idx(places.folder, make_parts("fashion_mnist"))
    assert fetch("fashion_mnist").path == places.folder
    found = fetch("fashion_mnist", into=tmp_path / "wanted")
    assert found.path == tmp_path / "wanted" / "fashion_mnist.npz"
    assert_same(found.read(train=False), make_parts("fashion_mnist")[False])
    assert downloads == []


def test_getting_into_the_cache(places: Places, downloads: list[str]) -> None:
    assert fetch("cifar10").path == places.cache / "cifar10.npz"
    assert downloads == ["cifar10"]
