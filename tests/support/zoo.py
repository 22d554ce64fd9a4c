"""torchvision's models by name: one of each family runs in every session, the rest are `full`."""

from __future__ import annotations

from torchvision import models

CLASSIFICATION = models.list_models(module=models)
SEGMENTATION = models.list_models(module=models.segmentation)
NAMES = [*CLASSIFICATION, *SEGMENTATION]
# Prefixes of the names of a family; the longest matching prefix counts. The smallest model of a
# family represents it, unless that takes half a minute.
FAMILIES = {
    "alexnet": "alexnet",
    "convnext": "convnext_tiny",
    "deeplabv3": "deeplabv3_mobilenet_v3_large",
    "densenet": "densenet121",
    "efficientnet": "efficientnet_b0",
    "efficientnet_v2": "efficientnet_v2_s",
    "fcn": "fcn_resnet50",
    "googlenet": "googlenet",
    "inception": "inception_v3",
    "lraspp": "lraspp_mobilenet_v3_large",
    "maxvit": "maxvit_t",
    "mnasnet": "mnasnet0_5",
    "mobilenet_v2": "mobilenet_v2",
    "mobilenet_v3": "mobilenet_v3_small",
    "regnet_x": "regnet_x_400mf",
    "regnet_y": "regnet_y_400mf",
    "resnet": "resnet18",
    "resnext": "resnext50_32x4d",
    "shufflenet": "shufflenet_v2_x0_5",
    "squeezenet": "squeezenet1_1",
    "swin": "swin_t",
    "swin_v2": "swin_v2_t",
    "vgg": "vgg13",
    "vit": "vit_b_16",
    "wide_resnet": "wide_resnet50_2",
}


def family_of(name: str) -> str:
    """The family that a model belongs to."""
    return max((start for start in FAMILIES if name.startswith(start)), key=len)
