"""Rebuilds a trained network from frozen random layers; the file contains only norms and a seed."""

from pathlib import Path
from tempfile import TemporaryDirectory

import onlynorm as on
from onlynorm.data import digits
from onlynorm.models import mlp

data = digits()
trained = mlp((64, 32, 10), seed=0)
on.fit(trained, (data.train_inputs, data.train_labels), schedule=on.Schedule(epochs=20, lr=0.1, seed=0))

target = trained.double().eval()  # errors of about 1e-10 in float64, 1e-6 in float32
inputs = data.train_inputs[:256].double()
print(on.plan(target, inputs))  # predicted width, memory, conditioning and time

made = on.reconstruct(target, inputs)
with TemporaryDirectory() as folder:
    path = Path(folder) / "digits.safetensors"
    on.save(made, path)
    again = on.load(path, like=mlp((64, 32, 10), seed=1).double())

print(on.verify(target, again, data.test_inputs.double()))
