"""The data sets that there are.

Checksums of content were taken from the registries' packages, which hold what was published: CIFAR-10's pixels and
labels give the known MD5 sums of its binary version, and Debian's Fashion-MNIST gives torchvision's sums once gzip's
file names and times, which Debian strips, are put back. CIFAR-100 is in no package; there the checksums of the
published files must do.
"""

from crossbn.lab.data.records import DataSet
from crossbn.lab.data.sources import SOURCES

_CIFAR_ORIGIN = "Krizhevsky, Learning Multiple Layers of Features from Tiny Images, 2009; no licence stated"

_SETS = (
    DataSet(
        "imagenet",
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
        sources=SOURCES["cifar10"],
    ),
    DataSet(
        "cifar100",
        classes=100,
        channels=3,
        image_size=32,
        train_images=50_000,
        test_images=10_000,
        origin=_CIFAR_ORIGIN,
        sources=SOURCES["cifar100"],
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
        sources=SOURCES["fashion_mnist"],
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
    ),
)

DATASETS: dict[str, DataSet] = {each.name: each for each in _SETS}
"""By name."""
