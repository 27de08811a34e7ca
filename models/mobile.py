"""Small CNNs: SqueezeNet 1.1, MobileNetV2 and EfficientNet-B0, as torchvision defines them."""

from __future__ import annotations

import math
from collections.abc import Callable

import onnx

from models.builder import Net, divisible, spread


def squeezenet(depth: int, seed: int, *, width: int = 64, image: int = 224) -> onnx.ModelProto:
    """SqueezeNet 1.1 (Iandola et al., 2016): pixels[1,3,224,224] -> logits[1,1000]; `depth` Fire modules."""
    net = Net("squeezenet", seed)

    def fire(x: str, squeeze: int) -> str:
        with net.scope("squeeze"):
            x = net.relu(net.conv(x, squeeze))
        with net.scope("expand1x1"):
            narrow = net.relu(net.conv(x, 4 * squeeze))
        with net.scope("expand3x3"):
            wide = net.relu(net.conv(x, 4 * squeeze, 3))
        return net.concat(narrow, wide)

    def shrink(x: str) -> str:
        return net.node("MaxPool", x, ceil_mode=1, kernel_shape=(3, 3), pads=(0,) * 4, strides=(2, 2))

    x = net.input("pixels", (1, 3, image, image))
    with net.scope("stem"):
        x = shrink(net.relu(net.conv(x, width, 3, stride=2, padding=0)))
    for stage, modules in enumerate(spread(depth, (2, 2, 2, 2))):
        for module in range(modules):
            with net.scope(f"fire{stage + 1}", module):
                x = fire(x, (stage + 1) * width // 4)
        if stage < 2:
            x = shrink(x)
    with net.scope("classifier"):
        x = net.relu(net.conv(x, 1000))
        net.output(net.reshape(net.global_mean(x), 1, 1000), "logits")
    return net.model()


# The stages of both networks: expansion, kernel, channels, blocks, stride of the first block.
_MOBILENET_V2 = (
    (1, 3, 16, 1, 1),
    (6, 3, 24, 2, 2),
    (6, 3, 32, 3, 2),
    (6, 3, 64, 4, 2),
    (6, 3, 96, 3, 1),
    (6, 3, 160, 3, 2),
    (6, 3, 320, 1, 1),
)
_EFFICIENTNET_B0 = (
    (1, 3, 16, 1, 1),
    (6, 3, 24, 2, 2),
    (6, 5, 40, 2, 2),
    (6, 3, 80, 3, 2),
    (6, 5, 112, 3, 1),
    (6, 5, 192, 4, 2),
    (6, 3, 320, 1, 1),
)


def _inverted_residuals(
    net: Net,
    stages: tuple[tuple[int, int, int, int, int], ...],
    depth: int,
    *,
    width: int,
    image: int,
    activation: Callable[[str], str],
    excite: bool,
    gain: float,
) -> None:
    """A stem, `depth` inverted residuals (expand, depthwise, in EfficientNet squeeze and excite, project), and a head.

    `gain`: the scale of a BatchNormalization before an activation, chosen so that activations keep their magnitude.
    """
    ratio = width / 32
    branch = gain / math.sqrt(depth)

    def squeeze_excite(x: str, squeezed: int) -> str:
        with net.scope("se"):
            gate = activation(net.conv(net.global_mean(x), squeezed))
            return net.mul(net.sigmoid(net.conv(gate, net.shape(x)[1])), x)

    x = net.input("pixels", (1, 3, image, image))
    with net.scope("stem"):
        x = activation(net.conv(x, width, 3, stride=2, norm=gain))
    for stage, (blocks, spec) in enumerate(
        zip(spread(depth, [blocks for *_, blocks, _ in stages]), stages, strict=True)
    ):
        expansion, kernel, planes, _, first_stride = spec
        channels = divisible(planes * ratio)
        for block in range(blocks):
            stride = first_stride if block == 0 else 1
            with net.scope(f"blocks{stage}", block):
                before = net.shape(x)[1]
                y = x
                if expansion > 1:
                    y = activation(net.conv(y, before * expansion, norm=gain))
                hidden = net.shape(y)[1]
                y = activation(net.conv(y, hidden, kernel, stride=stride, groups=hidden, norm=gain))
                if excite:
                    y = squeeze_excite(y, max(1, before // 4))
                residual = stride == 1 and before == channels
                y = net.conv(y, channels, norm=branch if residual else gain)
                x = net.add(y, x) if residual else y
    with net.scope("head"):
        x = activation(net.conv(x, divisible(1280 * ratio), norm=gain))
    net.classifier(x, 1000)


def mobilenetv2(
    depth: int, seed: int, *, width: int = 32, image: int = 224, fold_batchnorm: bool = True
) -> onnx.ModelProto:
    """MobileNetV2 (Sandler et al., 2018): pixels[1,3,224,224] -> logits[1,1000]; `depth` inverted residuals."""
    net = Net("mobilenetv2", seed, fold_batchnorm=fold_batchnorm)
    _inverted_residuals(
        net,
        _MOBILENET_V2,
        depth,
        width=width,
        image=image,
        activation=net.relu6,
        excite=False,
        gain=1.0,
    )
    return net.model()


def efficientnet_b0(
    depth: int, seed: int, *, width: int = 32, image: int = 224, fold_batchnorm: bool = True
) -> onnx.ModelProto:
    """EfficientNet-B0 (Tan and Le, 2019): pixels[1,3,224,224] -> logits[1,1000]; `depth` MBConv blocks."""
    net = Net("efficientnet-b0", seed, fold_batchnorm=fold_batchnorm)
    _inverted_residuals(
        net,
        _EFFICIENTNET_B0,
        depth,
        width=width,
        image=image,
        activation=net.silu,
        excite=True,
        gain=1.15,
    )
    return net.model()
