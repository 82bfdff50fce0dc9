"""A network that fits every training point, computed and not trained; exported for batches of any size."""

import torch

import onlynorm as on
from onlynorm.data import digits
from onlynorm.identity import measure_off_sample

data = digits()
inputs, labels = data.train_inputs[:500].double(), data.train_labels[:500]

network = on.memorize(inputs, labels)
print(network.facts)
wrong = int((network.classify(inputs) != labels).sum())
print(f"{wrong} of {len(inputs)} training points wrong")

found = measure_off_sample(network, inputs, labels, held_out=(data.test_inputs, data.test_labels))
print(f"held-out digits: {100 * found.held_out.right:.1f} % accuracy")  # it memorizes, and does not generalize

batch = torch.export.Dim("batch")
exported = torch.export.export(network, (inputs[:8],), dynamic_shapes=({0: batch},)).module()
print("the same outputs after export:", torch.equal(exported(inputs), network(inputs)))
