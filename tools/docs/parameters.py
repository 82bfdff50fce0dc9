"""Tables of parameters for the reference, from the lists and sentences of docstrings."""

from __future__ import annotations

import inspect
import re
from typing import Any

import griffe

from tools.docs.reference import callables, named

_ITEM = re.compile(r"^- ((?:`\w+`(?:, | to | and )?)+): (.*(?:\n  .*)*)\n?", re.MULTILINE)
_SENTENCE = re.compile(r"(?<=[.;])\s+(?=[`\"A-Z(])")
_THEORY = re.compile(r"Theory: [\w:.-]+(,\s*[\w:.-]+)*")

OWN = {
    "onlynorm.Chain device": "The device, by name.",
    "onlynorm.Chain n_samples": "Number of columns of H; by default the width.",
    "onlynorm.Chain norm": 'The norm after every layer: "batch", "centred" or "none".',
    "onlynorm.Chain weights": "The law of the random weights, by name.",
    "onlynorm.data.find_data name": "The name of a file or folder in the data folder.",
    "onlynorm.data.get_data name": "The name of the data set or file.",
    "onlynorm.data.get_data source": "A folder from which files are copied instead.",
    "onlynorm.data.load_data spec": "The name of a data set, or a .safetensors or .npy file.",
    "onlynorm.diagnose max_columns": "Maximum number of columns of a signal, for convolutions and sequences.",
    "onlynorm.draw density": "Fraction of nonzero entries of sparse distributions, or of the features of id_cond.",
    "onlynorm.draw n_features": "Number of features, by default `excess` times the number of equations.",
    "onlynorm.draw name": "Name of the distribution.",
    "onlynorm.draw shared_column": "The position that id_cond_minimal represents by the second norm.",
    "onlynorm.features.draw_blocks name": "Any random distribution of `draw`.",
    "onlynorm.fit data": "The training set: (inputs, targets), or a data set of such pairs.",
    "onlynorm.fit save_every": "Number of steps between two checkpoints, beside those after every epoch.",
    "onlynorm.fit test": "The test set, in the same form; it is evaluated after every epoch.",
    "onlynorm.identity.all_convolutional head": 'The projection to the classes: "fixed" or "trained".',
    "onlynorm.identity.all_convolutional init": '"near_identity", or "standard" for the usual initialization.',
    "onlynorm.identity.near_identity_ inputs": "A batch, or a tuple of batches; not needed with `which`.",
    "onlynorm.identity.nearest_invertible smallest": "Minimum singular value, by default 1e-6 of the largest.",
    "onlynorm.identity.relative_errors targets": "The targets of all outputs.",
    "onlynorm.memorize width": "Number of units per block, by default 4 log n, and more for many classes or outputs.",
    "onlynorm.models.load_model weights": "A file of weights.",
    "onlynorm.modules.is_autocast x": "The tensor.",
    "onlynorm.modules.need_model is_empty_allowed": "Whether a model may have no parameters.",
    "onlynorm.modules.to_affine norm": "A batch norm in evaluation mode.",
    "onlynorm.optim.follow_weights kind": "The class of the optimizer, such as `torch.optim.SGD`.",
    "onlynorm.rank.as_matrix channels": "The dimension of the channels; -1 for transformers.",
    "onlynorm.rank.exact_rank tolerance": "Fraction of the largest singular value, by default max(d, N) times eps.",
    "onlynorm.rank.judge directions": "The part of the first layer's output that can be told apart at the last.",
    "onlynorm.rank.judge loss": "The loss of the batch.",
    "onlynorm.rank.read_signal activation": "The activation (samples, ...).",
    "onlynorm.rank.read_signal channels": "The axis of the channels.",
    "onlynorm.rank.read_signal max_columns": "Maximum number of columns; None uses all.",
    "onlynorm.reconstruct in_place": "Whether the model itself is changed instead of a copy.",
    "onlynorm.reconstruction.linearize among": "The extent of all features, if these are a subset.",
    "onlynorm.reconstruction.linearize dtype": "The precision of the network; it determines `rounding`.",
    "onlynorm.reconstruction.linearize tolerance": "Maximum error and rounding of a window, in x.",
    "onlynorm.repair in_place": "Whether the model itself is changed instead of a copy.",
    "onlynorm.repair max_ratio": "Maximum gradient ratio of an ascent.",
    "onlynorm.repair n_steps": "Number of ascent steps per layer.",
    "onlynorm.repair output": "A function that selects the argument of the loss from what the model returned.",
    "onlynorm.repair target_rank": 'Target of "rank" and "whole", by default the square root of the width.',
    "onlynorm.repair targets": "Targets of the loss; without them, a random projection of the outputs is used.",
    "onlynorm.save_adapter dtype": "The dtype to which tensors are rounded, such as torch.float16.",
    "onlynorm.save_adapter statistics": "As in `take_adapter`.",
    "onlynorm.simulate burn_in": "Number of layers before the first that counts.",
    "onlynorm.simulate every": "Every how many layers the quantities are observed.",
    "onlynorm.solve_features features": "Features from `draw`.",
    "onlynorm.solvers.solve_blocks targets": "The targets, one per block.",
    "onlynorm.solvers.solve_multilayer weights": "The frozen matrices W_1, ..., W_L.",
    "onlynorm.solvers.spectrum.condition_for iterations": "Number of iterations.",
    "onlynorm.solvers.spectrum.estimate_condition n_products": "Number of products with M M^T or M^T M.",
    "onlynorm.solvers.spectrum.measure_spectrum features": "Features from `draw`.",
    "onlynorm.solvers.spectrum.predict_features features": "Features from `draw`.",
    "onlynorm.solvers.spectrum.sweep_excess name": "Name of the distribution.",
    "onlynorm.to_norm_only features": "Name of the distribution, as in `draw`.",
}
"""What a parameter means in one function, where its docstring has no sentence for it alone."""

COMMON = {
    "H": "Activations of a layer, features x samples; leading axes are a batch.",
    "accelerator": "Accelerator of Lightning Fabric.",
    "activation": "The activation between the layers.",
    "activations": "The activations of a layer.",
    "adapter": "The adapter, as from `take_adapter` or a file.",
    "alignment": "Cosine of the gradients on the data and on random inputs.",
    "augmentation": 'Augmentation of images: "none", "flip" or "crop-flip".',
    "axes": "Number of spatial dimensions.",
    "ball": "A ball that contains all inputs too.",
    "batch_size": "Number of samples per forward pass or training step.",
    "between": 'Which pairs: "samples" or "features".',
    "bias": "Whether the layer has a bias.",
    "box": "Bounds of all inputs.",
    "chain": "The settings of the chain.",
    "clip": "Maximum norm of the gradient; None for no limit.",
    "coarse": "Whether labels are the 20 coarse classes.",
    "condition": "The condition number.",
    "contrast": "How fast differences between samples are learned.",
    "data": "Pairs of inputs and labels, as tensors or as a data set.",
    "density": "Fraction of nonzero entries, or of structured features.",
    "depth": "Number of layers.",
    "depths": "The depths at which H is returned.",
    "device": "The device of the tensors.",
    "devices": "Number of devices of Lightning Fabric.",
    "dilation": "As in `nn.Conv2d`.",
    "dim": "Number of rows and columns.",
    "directions": "What `find_directions` returned.",
    "dtype": "The dtype of the tensors.",
    "epochs": "Number of passes through the training set.",
    "excess": "Number of random features per equation.",
    "excesses": "Features per equation of every point of the sweep.",
    "explained_variance": "Fraction of the targets' variance that a linear fit to the last signal explains.",
    "features": "Name of the distribution, as in `draw`, or the drawn features.",
    "folder": "The folder of the files.",
    "functions": "The torch functions that the rule is for.",
    "gamma": "Strength of the random part of every layer.",
    "generator": "The source of randomness; None uses the first positions.",
    "groups": "As in `nn.Conv2d`.",
    "handle": "What `only_norms` returned.",
    "heads": "Number of attention heads.",
    "held_out": "Inputs and labels that are not in the sample.",
    "high": "Upper ends of the ranges.",
    "how": "The scheme, by name.",
    "image_size": "Height and width of the images.",
    "images": "The images.",
    "in_channels": "Number of channels of the input.",
    "in_features": "Number of inputs.",
    "init": 'The initial weights: "standard" or another initialization by name.',
    "initial_loss_ratio": "The loss before training, relative to that of a constant prediction.",
    "input_cosine": "Mean cosine of the inputs.",
    "inputs": "A batch of inputs.",
    "is_filled": "Whether gamma represents the weight of the layer, or has its initial values.",
    "is_grouped": "Whether the distribution is drawn in groups of features.",
    "k": "How many eigenvalues.",
    "kernel": 'Which frozen convolution has the kernel, "first" or "second".',
    "kernel_size": "As in `nn.Conv2d`.",
    "kind": "The name of the kind.",
    "label_smoothing": "Label smoothing of the cross entropy.",
    "labels": "Class labels, or real targets where these are allowed.",
    "layer": "Name of the layer; features of different names are independent.",
    "layers": "The measures of all layers.",
    "least_norm": "Whether gamma has minimum norm; False accepts any exact gamma.",
    "left": "The left features (out, feat).",
    "left_mask": "Which entries of the left features are nonzero.",
    "loggers": "The loggers of Lightning Fabric.",
    "loss": "The loss, from the output of the model and the targets; by default cross entropy or mean squared error.",
    "low": "Lower ends of the ranges.",
    "lr": "The largest learning rate.",
    "map": "The affine map.",
    "matrix": "The matrix (out, inp), a tensor or a NumPy array.",
    "mean": "The mean of every channel.",
    "memory": "Memory limit in bytes.",
    "method": "The method, by name.",
    "minimum_width": "Whether to solve for a scale per output too, which needs fewer features.",
    "model": "The given model.",
    "momentum": "Momentum of SGD.",
    "n": "How many values.",
    "n_blocks": "Number of groups of outputs with separate features, for random distributions.",
    "n_chains": "Number of independent chains.",
    "n_classes": "Number of classes.",
    "n_equations": "Number of equations, one per weight of the target.",
    "n_features": "Number of features.",
    "n_inputs": "Number of inputs of the target.",
    "n_layers": "Number of frozen layers.",
    "n_outputs": "Number of outputs of the target.",
    "n_samples": "Number of samples.",
    "n_steps": "Number of steps.",
    "n_test": "Number of samples of the test set.",
    "n_train": "Number of samples of the training set.",
    "name": "The name.",
    "near": "The gamma to which the solution is closest.",
    "network": "The network that was built.",
    "norm": "The norms of the network, by name.",
    "norms": '"batch" for batch norms, "affine" for scales and shifts.',
    "on_step": "A function that is called after every step.",
    "operator": "The matrix of the system, which is never built.",
    "optimizer": '"sgd" or "adamw".',
    "options": "The options of the features.",
    "out_channels": "Number of channels of the output.",
    "out_features": "Number of outputs.",
    "output": "What a model returned, or a function that selects the logits from it.",
    "outputs": "The outputs of a network.",
    "padding": "As in `nn.Conv2d`.",
    "padding_mode": "As in `nn.Conv2d`.",
    "patch": "Height and width of a patch.",
    "path": "The path of the file.",
    "patience": "Number of epochs without improvement after which training stops; None for no limit.",
    "plain": "The layer that is replaced.",
    "positions": 'How positions become columns: "pool" or "samples".',
    "precision": "Precision of Lightning Fabric.",
    "precondition": "Whether features are whitened; None decides by their anisotropy.",
    "prediction": "The condition number, as a number or a `Prediction`.",
    "preparation": "Seconds that the directions took, which are added to those of the result.",
    "progress": "True for a bar, or a function that is called with (done, total, message).",
    "quantities": "The averaged quantities, by name.",
    "results": "The results that are shown, one section each.",
    "returned": "What the model returned.",
    "right": "The right features (feat, inp).",
    "right_mask": "Which entries of the right features are nonzero.",
    "schedule": "The training options, by default `Schedule()`.",
    "seed": "The seed of everything random.",
    "seeds": "The seeds; results are averaged over them.",
    "severity": "How strong the corruption is, from 0 to 5.",
    "shape": "The shape of the target weight: (out, inp) or (out, inp, *kernel).",
    "shared_column": "The position that id_cond_minimal represents by the second norm.",
    "sizes": "The sizes of the noise, relative to the scale of the data.",
    "source_kernel": "Kernel size of the frozen convolution, if it is larger than the target's.",
    "spec": "A built-in name, a file, or package.module:factory.",
    "spectrum": "Singular values of id_cond features: a condition number, or a tensor with one value per feature.",
    "stages": "The widths of the layers of every stage.",
    "statistics": 'What happens to batch statistics: "track", "freeze" or "recalibrate".',
    "std": "The standard deviation of every channel.",
    "strategy": "Strategy of Lightning Fabric.",
    "stretch": "The largest |log| of a singular value, g.",
    "stride": "As in `nn.Conv2d`.",
    "target": "The weight that is to be computed.",
    "targets": "Class labels (integers) or real values.",
    "task_type": "The task type of the PEFT configuration.",
    "tau": "The threshold of sigma^2 / N.",
    "template": "The path of the template.",
    "test_share": "Fraction of the samples in the test set.",
    "text": "A text below the title.",
    "thresholds": "The limits of the verdict.",
    "title": "The title of the page.",
    "tolerance": "Maximum relative residual; by default 1e-10.",
    "unit_length": "Whether features are scaled to unit length first.",
    "value": "The value.",
    "values": "The values of the template.",
    "variance": "The variance of every channel.",
    "weight_decay": "Weight decay.",
    "weights": "The weights: a file of them, a law by name, or the frozen matrices.",
    "widths": "The widths of all layers, inputs first.",
    "width": "Number of units or channels.",
    "x": "The values at which it is evaluated.",
}  # fmt: skip
"""What parameters mean wherever a docstring does not describe them."""


def describe(name: str) -> dict[str, str]:
    """A description for every parameter of a public function or class: from its list, a sentence, or `COMMON`."""
    thing = named(name)
    lists = [thing, *(base for base in getattr(thing, "__mro__", ())[1:] if base.__module__.startswith("onlynorm"))]
    listed: dict[str, str] = {}
    for one in lists:
        listed = _items(inspect.getdoc(one) or "") | listed
    prose = _THEORY.sub("", _without_items((inspect.getdoc(thing) or "").partition("\nExamples:\n")[0]))
    sentences = _SENTENCE.split(" ".join(prose.split()))
    return {
        _starred(one): listed.get(one.name)
        or OWN.get(f"{name} {one.name}")
        or _defined(one.name, sentences)
        or COMMON.get(one.name)
        or _mentioned(one.name, sentences)
        for one in parameters(thing)
    }


def parameters(thing: Any) -> list[inspect.Parameter]:
    """The parameters of a function, or of the constructor of a class."""
    try:
        return [one for one in inspect.signature(thing).parameters.values() if one.name != "self"]
    except ValueError:
        return []


def with_table(name: str, text: str) -> str:
    """The docstring of a public name with a section of its parameters, from which mkdocstrings makes the table."""
    rows = describe(name)
    if not rows:
        return text
    prose, mark, examples = _without_items(inspect.cleandoc(text)).partition("\nExamples:\n")
    section = "".join(f"    {parameter}: {meaning}\n" for parameter, meaning in rows.items())
    return f"{prose.rstrip()}\n\nArgs:\n{section}{mark}{examples}"


class ParameterTables(griffe.Extension):
    """Adds the section of parameters to what mkdocstrings reads."""

    def __init__(self) -> None:
        self.names = {f"{thing.__module__}.{thing.__qualname__}": name for name, thing in callables().items()}

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        """Called for every function and class that was read."""
        name = self.names.get(obj.path)
        if name is not None and obj.docstring is not None:
            obj.docstring.value = with_table(name, obj.docstring.value)


def _items(text: str) -> dict[str, str]:
    """Descriptions in a list such as "- `a`, `b`: what they are."."""
    found = {}
    for names, meaning in _ITEM.findall(text):
        described = _capitalized(" ".join(meaning.split()))
        found |= dict.fromkeys(re.findall(r"`(\w+)`", names), described)
    return found


def _without_items(text: str) -> str:
    return re.sub(r"\n{3,}", "\n\n", _ITEM.sub("", text))


def _defined(name: str, sentences: list[str]) -> str:
    """The sentence that begins with the parameter; "`a` is the limit." becomes "The limit."."""
    for sentence in sentences:
        said = re.match(rf"(?:With )?`{name}(=[^`]*)?`(,? )(?!and |or |as )", sentence)
        if said:
            plain = re.sub(rf"^`{name}` (?:is |are )?(?=[a-z0-9\"])", "", sentence)
            plain = re.sub(rf"^`{name}=True` shows", "True shows", plain)
            return _capitalized(plain.rstrip(";.")) + "."
    return ""


def _mentioned(name: str, sentences: list[str]) -> str:
    """The first sentence that names the parameter."""
    return next((one.rstrip(";.") + "." for one in sentences if f"`{name}`" in one), "")


def _starred(parameter: inspect.Parameter) -> str:
    kinds = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}
    return kinds.get(parameter.kind, "") + parameter.name


def _capitalized(text: str) -> str:
    return text[:1].upper() + text[1:]
