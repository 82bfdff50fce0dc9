# %% [markdown]
# # Diagnose and repair a deep network
#
# A deep network with the usual initial weights may not learn at all. This tutorial finds out
# why, repairs it, and trains it before and after.

# %%
import onlynorm as on
from onlynorm.data import digits
from onlynorm.models import mlp
from onlynorm.tuning import accuracy

data = digits()  # 1,797 images of 8 x 8 pixels, from scikit-learn
train, test = (data.train_inputs, data.train_labels), (data.test_inputs, data.test_labels)
x, y = train[0][:256], train[1][:256]

deep = mlp((64, *[64] * 30, 10), seed=0)  # 30 hidden ReLU layers, as torch draws them

# %% [markdown]
# ## What is wrong?
#
# `diagnose` runs one batch forward and backward and measures every layer. The network is not
# changed.

# %%
found = on.diagnose(deep, x, y)
print(found.verdict)

# %% [markdown]
# The score is near zero: plain SGD is unlikely to train this network. The figure shows why. The
# rank ratio *r* of the signal falls to one within a few layers: all images look the same to the
# layers behind, up to their length. And the gradient that reaches the first layer is far
# smaller than that of the last.

# %%
found.plot()

# %% [markdown]
# ## Repair
#
# `repair` draws new initial weights. By default it tries *mirrored* weights first: half of the
# channels carry a signal and the other half its negative, so that a ReLU network starts as a
# linear map, and rank and gradient pass through any depth.

# %%
result = on.repair(deep, x, y)
print(result)

# %%
result.after.plot()

# %% [markdown]
# ## Does it learn now?
#
# The same training with plain SGD, for the network as it was, the repaired one, and one with
# batch norms:

# %%
with_norms = on.repair(deep, x, y, method="batch_norm").model
schedule = on.Schedule(epochs=8, lr=0.01, seed=0)
for name, network in (
    ("as it was", deep),
    ("batch norms", with_norms),
    ("repaired", result.model),
):
    history = on.fit(network, train, schedule=schedule).history
    share = 100 * accuracy(network, test)
    print(f"{name:12} loss {history[-1]['loss']:.2f}, {share:.1f} % of the test images")

# %% [markdown]
# [Repair](../repair.md) compares nine methods on a larger data set, and says for which networks
# batch norms do as well.
