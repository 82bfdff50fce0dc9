"""A trained layer as a deep network of layers near the identity: the deeper, the nearer, and the same outputs."""

import torch

import onlynorm as on
from onlynorm.data import digits
from onlynorm.models import mlp
from onlynorm.tuning import accuracy

data = digits()
model = mlp((64, 32, 10), seed=0)
on.fit(model, (data.train_inputs, data.train_labels), schedule=on.Schedule(epochs=20, lr=0.1, seed=0))
print(f"trained network: {100 * accuracy(model, (data.test_inputs, data.test_labels)):.2f} % accuracy")

layer = model[0]  # 64 inputs, 32 outputs, and a bias
for depth in (16, 64, 256):
    factors = on.factorize(layer, depth)
    print(f"{depth:3} layers x + A x: largest |A| {factors.max_norm:.4f}, bound of the paper {factors.bound:.4f}")
print(factors.usage)

model[0] = factors.to_network(dtype=torch.float32)  # 256 residual layers, which can be trained further
print(f"with 256 layers: {100 * accuracy(model, (data.test_inputs, data.test_labels)):.2f} % accuracy")
