"""Adapts a network to new images by training only its norms; the small adapter is applied and removed bit for bit."""

from pathlib import Path
from tempfile import TemporaryDirectory

import torch

import onlynorm as on
from onlynorm.data import digits
from onlynorm.models import vgg
from onlynorm.tuning import accuracy

data = digits()
train, test = data.train_inputs.reshape(-1, 1, 8, 8), data.test_inputs.reshape(-1, 1, 8, 8)
model = vgg(((8,), (16,)), in_channels=1, image_size=8, n_classes=10, seed=0)
on.fit(model, (train, data.train_labels), schedule=on.Schedule(epochs=10, lr=0.1, seed=0))

dark = 0.2 * test + 0.8  # the same digits with other brightness and contrast
print(f"new images, before: {100 * accuracy(model, (dark, data.test_labels)):.1f} %")

handle = on.only_norms(model)  # freezes all other parameters
on.fit(model, (0.2 * train + 0.8, data.train_labels), schedule=on.Schedule(epochs=10, lr=0.1, seed=0))
print(f"new images, after:  {100 * accuracy(model, (dark, data.test_labels)):.1f} %")
print(handle)

with TemporaryDirectory() as folder:
    path = Path(folder) / "adapter.safetensors"
    on.save_adapter(model, path)
    weights = sum(p.numel() for p in model.parameters())
    print(f"the adapter has {path.stat().st_size:,} bytes, the network {weights:,} parameters")
    other = vgg(((8,), (16,)), in_channels=1, image_size=8, n_classes=10, seed=0)
    other.load_state_dict(model.state_dict())
    on.load_adapter(other, path)
    with torch.no_grad():
        print("the same outputs:", torch.equal(other.eval()(dark), model.eval()(dark)))
