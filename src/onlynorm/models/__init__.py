"""Reference networks, and networks by name: built-in, or returned by a user function.

Reading order: build, plain, resnet, vit, by_name.
"""

from onlynorm.models.build import INITS, NORMS
from onlynorm.models.by_name import BUILT_IN, BuiltIn, load_model, load_weights, make_model, run_factory
from onlynorm.models.plain import ACTIVATIONS, VGG_STAGES, digits_cnn, mlp, vgg
from onlynorm.models.resnet import CifarBlock, CifarResNet, ResNet, cifar_resnet, resnet
from onlynorm.models.vit import ViT, vit

__all__ = [
    "ACTIVATIONS",
    "BUILT_IN",
    "INITS",
    "NORMS",
    "VGG_STAGES",
    "BuiltIn",
    "CifarBlock",
    "CifarResNet",
    "ResNet",
    "ViT",
    "cifar_resnet",
    "digits_cnn",
    "load_model",
    "load_weights",
    "make_model",
    "mlp",
    "resnet",
    "run_factory",
    "vgg",
    "vit",
]
