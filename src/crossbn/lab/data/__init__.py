"""Data sets by name: looked for in a folder, then in a cache, then downloaded, and checked wherever they come from."""

from crossbn.lab.data.catalogue import DATASETS, names_of
from crossbn.lab.data.dataset import DataError, DataSet, Pictures, Source
from crossbn.lab.data.fetching import fetch, load_pictures
from crossbn.lab.data.places import FOLDER_VARIABLE, cache_folder, data_folder, imagenet_folder

__all__ = [
    "DATASETS",
    "FOLDER_VARIABLE",
    "DataError",
    "DataSet",
    "Pictures",
    "Source",
    "cache_folder",
    "data_folder",
    "fetch",
    "imagenet_folder",
    "load_pictures",
    "names_of",
]
