# %% [markdown]
# # Train norms from scratch
#
# A network whose only parameters are norms can be trained like any other. How well depends on
# the frozen features beside the norms.

# %%
import onlynorm as on
from onlynorm.data import digits
from onlynorm.display import Curve, Figure, Panel
from onlynorm.models import mlp
from onlynorm.tuning import accuracy

data = digits()
train, test = (data.train_inputs, data.train_labels), (data.test_inputs, data.test_labels)
losses = {}


def learn(name, network, **options):
    schedule = on.Schedule(epochs=10, lr=0.05, seed=0, **options)
    losses[name] = [row["loss"] for row in on.fit(network, train, schedule=schedule).history]
    print(f"{name:27} loss {losses[name][-1]:.4f}, {100 * accuracy(network, test):.1f} %")


# %% [markdown]
# ## The ordinary network, and ID cond
#
# With ID cond features, each feature joins one input and one output, and the norm has a scale
# for each weight: the same network with another name for its parameters. The losses are equal
# to the last digit.

# %%
learn("ordinary", mlp((64, 32, 10), seed=0))
learn("id_cond", on.to_norm_only(mlp((64, 32, 10), seed=0), features="id_cond"))

# %% [markdown]
# ## Random features
#
# A step on the scales of random features moves the weights by $M M^\top$ times the gradient,
# where the singular values of $M$ are the spectrum of the features. Directions with small ones
# are learned slowly.

# %%
learn("he_normal", on.to_norm_only(mlp((64, 32, 10), seed=0), features="he_normal", excess=1.25))

# %% [markdown]
# `follow_weights` takes the steps on the effective weights instead and moves gamma by the
# pseudo-inverse of $M$. The network then follows the ordinary one:

# %%
network = on.to_norm_only(mlp((64, 32, 10), seed=0), features="he_normal", excess=1.25)
learn("he_normal, follow_weights", network, follow_weights=True)

# %%
curves = [
    Curve(name, range(1, 11), values, kind="line+points") for name, values in losses.items()
]
Figure(curves, panels=[Panel(x_label="epoch", y_label="training loss")])

# %% [markdown]
# ## Fewer parameters
#
# With a density below one, `id_cond` keeps a random part of the weights, drawn from the seed.
# No mask is saved.

# %%
for density in (0.5, 0.2, 0.1):
    learn(
        f"density {density}",
        on.to_norm_only(mlp((64, 32, 10), seed=0), features="id_cond", density=density),
    )

# %% [markdown]
# [Train norms from scratch](../layers.md) has convolutions, spectra, blocks, and results of
# twenty seeds on two data sets.
