"""What can be downloaded: addresses, sizes and checksums.

Checksums and sizes are those that torchvision and TensorFlow Datasets publish. Nothing was downloaded from these
addresses when this table was written.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

MAX_BYTES = 2**24
"""Maximum size of a download whose size is not in the table: 16 MiB."""


@dataclass(frozen=True)
class RemoteFile:
    """A file, the addresses that have it, its SHA-256 and its size in bytes.

    `unpacked` and `n_unpacked` are the SHA-256 and the size of the content of a gzip file: a copy that is compressed
    differently is accepted too.
    """

    name: str
    addresses: tuple[str, ...]
    sha256: str
    n_bytes: int | None = None
    unpacked: str | None = None
    n_unpacked: int = 0


@dataclass(frozen=True)
class Source:
    """Files that belong together, and their folder in the data folder.

    With `members`, names and sizes, the only file is an archive, from which these members are unpacked. `others` are
    files and folders that are used instead if they exist.
    """

    title: str
    folder: str
    files: tuple[RemoteFile, ...]
    members: Mapping[str, int] = field(default_factory=dict)
    others: tuple[str, ...] = ()

    @property
    def n_download(self) -> int:
        """Bytes to download, as far as they are known."""
        return sum(file.n_bytes or 0 for file in self.files)


def _cifar(name: str, *, sha256: str, n_bytes: int) -> tuple[RemoteFile, ...]:
    file = f"{name}-binary.tar.gz"
    places = ("https://www.cs.toronto.edu/~kriz/", "https://cave.cs.toronto.edu/kriz/")
    return (RemoteFile(file, tuple(place + file for place in places), sha256, n_bytes),)


def _fashion(name: str, *, sha256: str, n_bytes: int, unpacked: str, n_unpacked: int) -> RemoteFile:
    places = (
        "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
        "https://github.com/zalandoresearch/fashion-mnist/raw/master/data/fashion/",
    )
    return RemoteFile(name, tuple(place + name for place in places), sha256, n_bytes, unpacked, n_unpacked)


_CIFAR_BATCH = 10_000 * (1 + 3 * 32 * 32)
SOURCES: dict[str, Source] = {
    "cifar10": Source(
        "CIFAR-10, 60,000 color images in 10 classes",
        "cifar-10-batches-bin",
        _cifar(
            "cifar-10", sha256="c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd", n_bytes=170_052_171
        ),
        {**{f"data_batch_{i}.bin": _CIFAR_BATCH for i in range(1, 6)}, "test_batch.bin": _CIFAR_BATCH},
        ("cifar-10-batches-py",),
    ),
    "cifar100": Source(
        "CIFAR-100, 60,000 color images in 100 classes",
        "cifar-100-binary",
        _cifar(
            "cifar-100", sha256="58a81ae192c23a4be8b1804d68e518ed807d710a4eb253b1f2a199162a40d8ec", n_bytes=168_513_733
        ),
        {"train.bin": 50_000 * (2 + 3 * 32 * 32), "test.bin": 10_000 * (2 + 3 * 32 * 32)},
        ("cifar-100-python",),
    ),
    "fashion_mnist": Source(
        "Fashion-MNIST, 70,000 gray images in 10 classes",
        "fashion-mnist",
        (
            _fashion(
                "train-images-idx3-ubyte.gz",
                sha256="3aede38d61863908ad78613f6a32ed271626dd12800ba2636569512369268a84",
                n_bytes=26_421_880,
                unpacked="c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888",
                n_unpacked=47_040_016,
            ),
            _fashion(
                "train-labels-idx1-ubyte.gz",
                sha256="a04f17134ac03560a47e3764e11b92fc97de4d1bfaf8ba1a3aa29af54cc90845",
                n_bytes=29_515,
                unpacked="bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9",
                n_unpacked=60_008,
            ),
            _fashion(
                "t10k-images-idx3-ubyte.gz",
                sha256="346e55b948d973a97e58d2351dde16a484bd415d4595297633bb08f03db6a073",
                n_bytes=4_422_102,
                unpacked="5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b",
                n_unpacked=7_840_016,
            ),
            _fashion(
                "t10k-labels-idx1-ubyte.gz",
                sha256="67da17c76eaffca5446c3361aaab5c3cd6d1c2608764d35dfb1850b086bf8dd5",
                n_bytes=5_148,
                unpacked="0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34",
                n_unpacked=10_008,
            ),
        ),
    ),
    "resnet20": Source(
        "weights of a ResNet-20 trained on CIFAR-10 by Yerlan Idelbayev (BSD-2-Clause)",
        "weights",
        (
            RemoteFile(
                "resnet20-12fca82f.th",
                tuple(
                    f"https://{place}/master/pretrained_models/resnet20-12fca82f.th"
                    for place in (
                        "github.com/akamaster/pytorch_resnet_cifar10/raw",
                        "raw.githubusercontent.com/akamaster/pytorch_resnet_cifar10",
                    )
                ),
                "12fca82f0bebc4135bf1f32f6e3710e61d5108578464b84fd6d7f5c1b04036c8",
            ),
        ),
        others=("weights/resnet20_cifar10.safetensors",),
    ),
}
"""What `get_data` can get, by name."""
