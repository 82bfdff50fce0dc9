"""Diagnoses a network that is too deep to learn, and compares training before and after a repair."""

import onlynorm as on
from onlynorm.data import digits
from onlynorm.models import mlp
from onlynorm.tuning import accuracy

data = digits()
train, test = (data.train_inputs, data.train_labels), (data.test_inputs, data.test_labels)
deep = mlp((64, *[64] * 30, 10), seed=0)
print(on.diagnose(deep, data.train_inputs[:256], data.train_labels[:256]).verdict)

repaired = on.repair(deep, data.train_inputs[:256], data.train_labels[:256], seed=0)
print(repaired)

schedule = on.Schedule(epochs=15, lr=0.01, seed=0)
for name, network in (("original", deep), ("repaired", repaired.model)):
    on.fit(network, train, schedule=schedule)
    print(f"{name}: {100 * accuracy(network, test):.1f} % accuracy after 15 epochs")
