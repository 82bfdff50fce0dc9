# %% [markdown]
# # Small adapters: tune only the norms
#
# One trained network, two new tasks: images in another light, and inverted images. Each task
# trains the scales and shifts of the batch norms only, and becomes a file of a few kilobytes.

# %%
import copy

import torch

import onlynorm as on
from onlynorm.data import digits
from onlynorm.models import vgg
from onlynorm.tuning import accuracy

data = digits()
images, labels = data.train_inputs.reshape(-1, 1, 8, 8), data.train_labels
test_images, test_labels = data.test_inputs.reshape(-1, 1, 8, 8), data.test_labels

base = vgg(((8,), (16,)), in_channels=1, image_size=8, n_classes=10, seed=0)
on.fit(base, (images, labels), schedule=on.Schedule(epochs=20, lr=0.1, seed=0))
print(f"base model: {100 * accuracy(base, (test_images, test_labels)):.1f} %")

# %% [markdown]
# ## The new tasks

# %%
tasks = {"light": lambda x: 0.2 * x + 0.8, "inverted": lambda x: x.max() - x}
for name, change in tasks.items():
    print(f"{name}, before: {100 * accuracy(base, (change(test_images), test_labels)):.1f} %")

# %% [markdown]
# ## Train the norms
#
# `only_norms` freezes everything else. The handle says what is trained; `fit` is a training
# loop, any other one will do.

# %%
for name, change in tasks.items():
    model = copy.deepcopy(base)
    handle = on.only_norms(model)
    on.fit(model, (change(images), labels), schedule=on.Schedule(epochs=20, lr=0.1, seed=0))
    on.save_adapter(model, f"{name}.safetensors")
    print(f"{name}, after: {100 * accuracy(model, (change(test_images), test_labels)):.1f} %")
print(handle)

# %% [markdown]
# ## Switch between them
#
# `Adapters` keeps the values of the base model and puts any of the adapters on it. An adapter
# belongs to its base model: in another one it raises an error instead of giving other outputs.

# %%
before = base.eval()(test_images[:8])
adapters = on.Adapters(base)
for name in tasks:
    adapters.add(name, f"{name}.safetensors")
for name, change in tasks.items():
    adapters.switch(name)
    print(f"{name}: {100 * accuracy(base, (change(test_images), test_labels)):.1f} %")
adapters.disable()
print("the base model again, bit for bit:", torch.equal(before, base.eval()(test_images[:8])))

# %% [markdown]
# [Tune only the norms](../tune.md) has running statistics, heads, PEFT files, folding for
# inference, and measurements beside LoRA.
