# %% [markdown]
# # Gallery
#
# Figures of onlynorm, each with the code that draws it. Results have `.plot()`, which returns a
# figure: `.save("figure.svg")` writes it as SVG, PNG or PDF. Point at a marker to read its
# value.

# %%
import math

import torch

import onlynorm as on
from onlynorm.data import digits
from onlynorm.display import Curve, Figure, Panel
from onlynorm.identity import Landscape, measure_off_sample
from onlynorm.models import mlp
from onlynorm.rank import rank_ratio, walk
from onlynorm.solvers.spectrum import measure_spectrum, sweep_excess

torch.manual_seed(0)
data = digits()
x, y = data.train_inputs[:256], data.train_labels[:256]

# %% [markdown]
# ## A network that will not learn

# %%
deep = mlp((64, *[64] * 30, 10), seed=0)
on.diagnose(deep, x, y).plot()

# %% [markdown]
# ## Before and after a repair

# %%
on.repair(deep, x, y).plot()

# %% [markdown]
# ## A training run

# %%
net = mlp((64, 32, 10), seed=0)
training = on.fit(
    net, (data.train_inputs, data.train_labels), schedule=on.Schedule(epochs=10, lr=0.1)
)
training.plot()

# %% [markdown]
# ## Layers of a rebuilt network

# %%
target, inputs = net.double().eval(), data.train_inputs[:128].double()
result = on.reconstruct(target, inputs)
result.plot()

# %% [markdown]
# ## Errors of its outputs

# %%
on.verify(target, result, data.test_inputs.double()).plot()

# %% [markdown]
# ## What a reconstruction will cost

# %%
on.plan(mlp((784, 512, 256, 128, 10)), torch.zeros(64, 784)).plot()

# %% [markdown]
# ## Singular values of features, and their law

# %%
measure_spectrum(on.draw("he_normal", (20, 20), excess=1.25)).plot()

# %% [markdown]
# ## Double descent of the condition number

# %%
sweep_excess("he_normal", (14, 14)).plot()

# %% [markdown]
# ## Convergence of a solve

# %%
features = on.draw("he_normal", (32, 32), excess=1.25)
matrix = torch.randn(32, 32, dtype=torch.float64)
on.solve(features.left(), features.right(), matrix, method="krylov").plot()

# %% [markdown]
# ## Methods of alignment

# %%
few = on.draw("he_normal", (12, 12), excess=0.9)
on.align(torch.randn(12, 12, dtype=torch.float64), few.left(), few.right()).plot()

# %% [markdown]
# ## Rank collapse, and what batch norms do

# %%
depths, curves = [1, 2, 4, 8, 16, 32, 64, 128, 256], []
for norm in ("none", "batch"):
    chain = on.Chain(32, math.inf, norm=norm)
    ratios = [float(rank_ratio(H).mean()) for _, H in walk(chain, depths)]
    curves.append(Curve(f"norm: {norm}", depths, ratios, kind="line+points"))
Figure(curves, panels=[Panel(x_label="depth", y_label="rank ratio r", x_log=True)])

# %% [markdown]
# ## Factors near the identity

# %%
on.factorize(torch.randn(16, 16, dtype=torch.float64), depth=64).plot()

# %% [markdown]
# ## Descent in a landscape without bad critical points

# %%
R = torch.eye(4, dtype=torch.float64) + 0.3 * torch.randn(4, 4, dtype=torch.float64)
Landscape(R).descend(torch.zeros(8, 4, 4, dtype=torch.float64)).plot()

# %% [markdown]
# ## A memorizer under noise

# %%
memorizer = on.memorize(data.train_inputs[:500], data.train_labels[:500])
measure_off_sample(memorizer, data.train_inputs[:500], data.train_labels[:500]).plot()
