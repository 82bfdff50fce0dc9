"""Trains only the norms of networks from scratch, and compares them with ordinary training."""

from torch import nn

import onlynorm as on
from onlynorm.data import digits
from onlynorm.models import mlp
from onlynorm.tuning import accuracy

data = digits()
train, test = (data.train_inputs, data.train_labels), (data.test_inputs, data.test_labels)


def learn(name: str, network: nn.Module, *, follow_weights: bool = False) -> None:
    schedule = on.Schedule(epochs=5, lr=0.05, follow_weights=follow_weights, seed=0)
    losses = [row["loss"] for row in on.fit(network, train, schedule=schedule).history]
    print(f"{name:39} loss {losses[-1]:.6f}, {100 * accuracy(network, test):.1f} % accuracy")


learn("ordinary network", mlp((64, 32, 10), seed=0))
learn("id_cond features", on.to_norm_only(mlp((64, 32, 10), seed=0), features="id_cond"))
random = on.to_norm_only(mlp((64, 32, 10), seed=0), features="he_normal", excess=1.25)
learn("random features", random)
random = on.to_norm_only(mlp((64, 32, 10), seed=0), features="he_normal", excess=1.25)
learn("random features that follow the weights", random, follow_weights=True)
