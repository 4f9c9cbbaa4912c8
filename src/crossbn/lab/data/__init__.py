"""Data sets by name: looked for in a folder, then in a cache, then downloaded, and checked wherever they come from."""

from crossbn.lab.data.imagenet import imagenet_folder
from crossbn.lab.data.loading import load_pictures
from crossbn.lab.data.places import FOLDER_VARIABLE, cache_folder, data_folder
from crossbn.lab.data.records import DataError, DataSet, Pictures, Source
from crossbn.lab.data.registry import DATASETS

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
