# %% [markdown]
# # Random features and their conditioning
#
# Two frozen layers with a norm between them compute `left diag(gamma) right`. This tutorial
# solves for gamma, looks at the singular values of the system, and shows what a few more
# features buy.

# %%
import torch

import onlynorm as on
from onlynorm.solvers.spectrum import measure_spectrum, predict_condition, sweep_excess

torch.manual_seed(0)
target = torch.randn(16, 24, dtype=torch.float64)
features = on.draw("he_normal", target.shape, excess=1.25, seed=0)
print(features)

# %% [markdown]
# ## Solve
#
# The equations are linear in gamma. Their matrix, with a row for each weight and a column for
# each feature, is never built.

# %%
solution = on.solve_features(features, target, tolerance=1e-10)
made = features.left() @ (solution.gamma[:, None] * features.right())
print(solution)
print(f"relative error {float((made - target).norm() / target.norm()):.1e}")

# %% [markdown]
# ## The law of the singular values
#
# With $\ell$ features per equation the singular values of random features fill $[|1 -
# \sqrt\ell|, 1 + \sqrt\ell]$, by the Marchenko-Pastur law.

# %%
spectrum = measure_spectrum(features)
print(spectrum)
spectrum.plot()

# %% [markdown]
# ## Double descent
#
# The condition number peaks at one feature per equation and falls on both sides:

# %%
sweep_excess("he_normal", (16, 16)).plot()

# %%
for excess in (1.0, 1.02, 1.1, 1.25, 1.5, 2.0):
    predicted = predict_condition(16, 24, round(excess * 16 * 24))
    print(f"excess {excess:4}: predicted condition number {predicted.condition:8.1f}")

# %% [markdown]
# ## Features of condition number one
#
# `id_cond` and `ortho_cond` have equal singular values by design, so that gamma is read off:

# %%
for name in ("id_cond", "ortho_cond", "fast_ortho_cond"):
    structured = on.draw(name, target.shape, seed=0)
    solution = on.solve_features(structured, target)
    print(f"{name:16} {structured.n_features} features, residual {solution.residual:.1e}")

# %% [markdown]
# `kron_normal` features are random, but on a grid: their condition number is the product of
# those of two factors, and one factorization of each solves for all outputs:

# %%
grid = on.draw("kron_normal", target.shape, excess=2.0, seed=0)
print(on.solve_features(grid, target))
print(measure_spectrum(grid, unit_length=False))

# %% [markdown]
# [Draw frozen weights](../features.md) has all distributions and the number format, [Solve for
# gamma](../solvers.md) the choice of the method, and [Random
# features](../papers/random_features.md) the theory.
