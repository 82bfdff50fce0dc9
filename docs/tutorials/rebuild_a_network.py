# %% [markdown]
# # Rebuild a trained network from random weights
#
# A trained network is replaced by one whose weights are random and stay as they are. Only the
# scales and shifts of its norms are computed, and it has the same outputs.

# %%
from torch import nn

import onlynorm as on
from onlynorm.data import digits
from onlynorm.models import mlp
from onlynorm.tuning import accuracy

data = digits()
target = mlp((64, 32, 10), seed=0)
on.fit(
    target,
    (data.train_inputs, data.train_labels),
    schedule=on.Schedule(epochs=15, lr=0.1, seed=0),
)
target = target.double().eval()
inputs, test = data.train_inputs[:256].double(), data.test_inputs.double()

# %% [markdown]
# ## What will it cost?
#
# A layer with $m$ inputs and $n$ outputs has $m n$ weights, so that its norms have to satisfy
# $m n$ equations, with one unknown for each random feature. By default there are 1.25 features
# per equation. `plan` predicts memory, conditioning and time before anything is computed.

# %%
print(on.plan(target, inputs))

# %% [markdown]
# ## Rebuild
#
# Every linear layer becomes: random layer, norm, ReLU, random layer, norm. The batch of inputs
# fixes the ranges in which the ReLUs between the random layers are straight.

# %%
result = on.reconstruct(target, inputs, on.Wide(activation=nn.ReLU()), seed=0)
print(result)

# %%
check = on.verify(target, result, test)
print(check)
assert check.relative_error < 1e-8

# %% [markdown]
# Every test image has the same outputs up to rounding, so the accuracy is the same:

# %%
for name, network in (("target", target), ("rebuilt", result.network)):
    print(f"{name}: {100 * accuracy(network, (test, data.test_labels)):.2f} %")

# %% [markdown]
# ## Other random weights
#
# The weights may come from many distributions. For three of them, the relative error of the
# outputs:

# %%
for features in ("orthogonal", "sparse_he_normal", "ortho_cond"):
    other = on.reconstruct(target, inputs, on.Wide(features=features), seed=1)
    print(f"{features:17} {on.verify(target, other, test).relative_error:.1e}")

# %% [markdown]
# ## Save a seed and the norms
#
# The file has no random weight. They are drawn again when it is loaded, and compared with a
# checksum.

# %%
on.save(result, "digits.safetensors")
again = on.load("digits.safetensors", like=mlp((64, 32, 10)).double())
print(on.verify(target, again, test).relative_error == check.relative_error)

# %% [markdown]
# [Rebuild a network](../reconstruct.md) has convolutions, residual and deep constructions,
# ranges with a proof, and costs. [Is this compression?](../faq.md#is-this-compression) It is
# not.
