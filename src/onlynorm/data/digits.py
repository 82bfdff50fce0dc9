"""The handwritten digits of scikit-learn."""

from __future__ import annotations

import torch

from onlynorm.data.split import Split
from onlynorm.seeds import seeded
from onlynorm.validate import need_number


def digits(*, seed: int = 0, test_share: float = 0.2) -> Split:
    """1,797 handwritten digits of 8 x 8 pixels, scaled to [0, 1], shuffled by `seed`.

    Examples:
        >>> from onlynorm.data import digits
        >>> data = digits()
        >>> data.train_inputs.shape, data.test_inputs.shape
        (torch.Size([1438, 64]), torch.Size([359, 64]))
    """
    from sklearn.datasets import load_digits  # takes a second to import

    generator = seeded(seed)
    test_share = need_number(
        "test_share", test_share, low=0.0, high=1.0, open_low=True, open_high=True, cure="Try 0.2."
    )
    raw = load_digits()
    inputs = torch.from_numpy(raw.data).float() / 16.0
    labels = torch.from_numpy(raw.target).long()
    order = torch.randperm(len(inputs), generator=generator)
    # At least one training and one test sample.
    cut = min(max(round(len(inputs) * (1.0 - test_share)), 1), len(inputs) - 1)
    train, test = order[:cut], order[cut:]
    return Split("digits", inputs[train], labels[train], inputs[test], labels[test])
