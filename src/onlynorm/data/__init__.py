"""Data sets: digits, CIFAR-10, CIFAR-100 and Fashion-MNIST in their standard formats, synthetic tasks, and files.

The data folder is `ONLYNORM_DATA`, else `onlynorm` in the user's cache folder. Only `get_data` downloads,
and code in files is never executed. Reading order: split, digits, plain_pickle, tensor_files, cifar, fashion, teacher,
load, downloads, matrices, corruptions.
"""

from onlynorm.data import matrices, tensor_files
from onlynorm.data.cifar import CIFAR_MEAN, CIFAR_RECORD, CIFAR_STD, cifar10, cifar100
from onlynorm.data.corruptions import CORRUPTIONS, corrupt
from onlynorm.data.digits import digits
from onlynorm.data.downloads.get import DataState, get_data, list_data
from onlynorm.data.downloads.sources import SOURCES, RemoteFile, Source
from onlynorm.data.fashion import FASHION_MEAN, FASHION_STD, fashion_mnist
from onlynorm.data.load import DATA_SETS, load_data
from onlynorm.data.split import Split, data_folder, find_data
from onlynorm.data.teacher import teacher

__all__ = [
    "CIFAR_MEAN",
    "CIFAR_RECORD",
    "CIFAR_STD",
    "CORRUPTIONS",
    "DATA_SETS",
    "FASHION_MEAN",
    "FASHION_STD",
    "SOURCES",
    "DataState",
    "RemoteFile",
    "Source",
    "Split",
    "cifar10",
    "cifar100",
    "corrupt",
    "data_folder",
    "digits",
    "fashion_mnist",
    "find_data",
    "get_data",
    "list_data",
    "load_data",
    "matrices",
    "teacher",
    "tensor_files",
]
