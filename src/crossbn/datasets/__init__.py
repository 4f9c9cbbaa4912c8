"""Data sets by name: looked for in a folder, then in a cache, then downloaded, and checked wherever they come from."""

from crossbn.datasets.imagenet import imagenet_folder
from crossbn.datasets.loading import load_pictures
from crossbn.datasets.places import FOLDER_VARIABLE, cache_folder, data_folder
from crossbn.datasets.records import DataError, DataSet, Pictures, Source
from crossbn.datasets.registry import DATASETS

__all__ = [
    "DATASETS",
    "FOLDER_VARIABLE",
    "DataError",
    "DataSet",
    "Pictures",
    "Source",
    "cache_folder",
    "data_folder",
    "imagenet_folder",
    "load_pictures",
]
