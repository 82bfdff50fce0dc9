# %% [markdown]
# # Near the identity: factorize and memorize
#
# Two constructions with residual layers: any matrix as a product of layers that are nearly the
# identity, and a network that has every point of a sample right without training.

# %%
import torch

import onlynorm as on
from onlynorm.data import digits
from onlynorm.display import Curve, Figure, Panel
from onlynorm.identity import measure_off_sample

torch.manual_seed(0)
R = torch.randn(16, 16, dtype=torch.float64)
R[0] *= torch.det(R).sign()  # a positive determinant needs no extra dimension

# %% [markdown]
# ## Factorize
#
# $R = (I + A_l) \cdots (I + A_1)$, with all $\|A_i\|$ as small as the depth $l$ allows:

# %%
factors = on.factorize(R, depth=64)
print(factors)

# %% [markdown]
# The norms fall like one over the depth. No factorization has smaller ones than the lower
# bound:

# %%
depths = [4, 8, 16, 32, 64, 128, 256]
made = [on.factorize(R, depth=depth) for depth in depths]
Figure(
    [
        Curve("largest norm", depths, [one.max_norm for one in made], kind="line+points"),
        Curve("lower bound", depths, [one.least_norm for one in made], style="law"),
    ],
    panels=[Panel(x_label="depth", y_label="norm of a layer", x_log=True, y_log=True)],
)

# %% [markdown]
# `to_network` makes it an ordinary residual network, to be trained further:

# %%
x = torch.randn(100, 16, dtype=torch.float64)
network = factors.to_network()
print(f"largest error {float((network(x) - x @ R.mT).detach().abs().max()):.1e}")

# %% [markdown]
# ## Memorize
#
# `memorize` computes a residual ReLU network of logarithmic width that gives each of 500 digits
# its class:

# %%
data = digits()
images, labels = data.train_inputs[:500], data.train_labels[:500]
memorizer = on.memorize(images, labels)
print(memorizer.facts)
print("all right:", torch.equal(memorizer.classify(images), labels))

# %% [markdown]
# It does not generalize: noise of a few percent switches its neurons off, and on other images
# it is mostly silent. The theorem is about capacity, not about learning.

# %%
off = measure_off_sample(memorizer, images, labels, held_out=(data.test_inputs, data.test_labels))
print(off)
off.plot()

# %% [markdown]
# [Factorize and memorize](../identity.md) has the constructions, bounds and promises, and
# [Identity matters](../papers/hardt_ma2017.md) the theory.
