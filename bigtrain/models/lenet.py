"""LeNet-5 (LeCun et al. 1998): a small convolutional network that can be cut into stages."""

from __future__ import annotations

from torch import Tensor, nn

from bigtrain.errors import ConfigError

IMAGE_SIDE = 32
"""Height and width of LeNet's images, in pixels."""


class LeNet(nn.Module):
    """A classifier: images (batch, in_channels, 32, 32) to logits (batch, num_classes).

    Args:
        num_classes: the number of logits.
        in_channels: 1 for grey images, 3 for colour images.

    Raises:
        ConfigError: an argument is not a whole number, at least 1.
    """

    def __init__(self, num_classes: int = 10, in_channels: int = 1) -> None:
        super().__init__()
        for name, value in (("num_classes", num_classes), ("in_channels", in_channels)):
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ConfigError(
                    f"model.args.{name}={value!r} needs a whole number, at least 1. "
                    f"Use model.args.{name}={10 if name == 'num_classes' else 1}."
                )
        self.features = nn.Sequential(
            nn.Conv2d(in_channels, 6, kernel_size=5),
            nn.Tanh(),
            nn.AvgPool2d(2),
            nn.Conv2d(6, 16, kernel_size=5),
            nn.Tanh(),
            nn.AvgPool2d(2),
            nn.Conv2d(16, 120, kernel_size=5),
            nn.Tanh(),
        )
        self.classifier = nn.Sequential(
            nn.Flatten(),
            nn.Linear(120, 84),
            nn.Tanh(),
            nn.Linear(84, num_classes),
        )

    def forward(self, images: Tensor) -> Tensor:
        """Return the logits of each image.

        Raises:
            ConfigError: the images are not 32 x 32.
        """
        height, width = images.shape[-2:]
        if (height, width) != (IMAGE_SIDE, IMAGE_SIDE):
            raise ConfigError(
                f"model.name=lenet: the images are {height} x {width}, needed are "
                f"{IMAGE_SIDE} x {IMAGE_SIDE}. Pad or resize them to "
                f"{IMAGE_SIDE} x {IMAGE_SIDE}, or use model.name=resnet18."
            )
        logits: Tensor = self.classifier(self.features(images))
        return logits
