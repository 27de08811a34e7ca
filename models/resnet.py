"""ResNet (He et al., 2015) and ResNeXt (Xie et al., 2016), as torchvision defines them."""

from __future__ import annotations

import math

import onnx

from models.builder import Net, spread


def _residual_net(
    name: str,
    stages: tuple[int, int, int, int],
    depth: int,
    seed: int,
    *,
    width: int,
    image: int,
    fold_batchnorm: bool,
    bottleneck: bool,
    cardinality: int = 1,
) -> onnx.ModelProto:
    """`depth` residual blocks over four stages of `width`, 2, 4 and 8 times `width` channels (four times as many after
    bottlenecks).

    With `cardinality` > 1 the bottleneck's 3x3 convolution has that many groups and twice the channels.
    """
    net = Net(name, seed, fold_batchnorm=fold_batchnorm)
    branch = 1 / math.sqrt(depth)  # scale of a block's branch: activations keep their magnitude at any depth
    x = net.input("pixels", (1, 3, image, image))
    with net.scope("stem"):
        x = net.relu(net.conv(x, width, 7, stride=2, norm=1.0))
        x = net.pool("MaxPool", x, 3, 2, 1)
    for stage, blocks in enumerate(spread(depth, stages)):
        planes = width << stage
        channels = planes * 4 if bottleneck else planes
        for block in range(blocks):
            stride = 2 if stage and not block else 1
            with net.scope(f"layer{stage + 1}", block):
                if bottleneck:
                    inner = planes * 2 if cardinality > 1 else planes
                    y = net.relu(net.conv(x, inner, norm=1.0))
                    y = net.relu(net.conv(y, inner, 3, stride=stride, groups=cardinality, norm=1.0))
                    y = net.conv(y, channels, norm=branch)
                else:
                    y = net.relu(net.conv(x, channels, 3, stride=stride, norm=1.0))
                    y = net.conv(y, channels, 3, norm=branch)
                if net.shape(x) != net.shape(y):
                    with net.scope("downsample"):
                        x = net.conv(x, channels, stride=stride, norm=0.7)
                x = net.relu(net.add(y, x))
    net.classifier(x, 1000)
    return net.model()


def resnet18(
    depth: int, seed: int, *, width: int = 64, image: int = 224, fold_batchnorm: bool = True
) -> onnx.ModelProto:
    """ResNet-18: pixels[1,3,224,224] -> logits[1,1000]."""
    return _residual_net(
        "resnet18",
        (2, 2, 2, 2),
        depth,
        seed,
        width=width,
        image=image,
        fold_batchnorm=fold_batchnorm,
        bottleneck=False,
    )


def resnet50(
    depth: int, seed: int, *, width: int = 64, image: int = 224, fold_batchnorm: bool = True
) -> onnx.ModelProto:
    """ResNet-50: pixels[1,3,224,224] -> logits[1,1000]."""
    return _residual_net(
        "resnet50",
        (3, 4, 6, 3),
        depth,
        seed,
        width=width,
        image=image,
        fold_batchnorm=fold_batchnorm,
        bottleneck=True,
    )


def resnext50(
    depth: int, seed: int, *, width: int = 64, image: int = 224, fold_batchnorm: bool = True
) -> onnx.ModelProto:
    """ResNeXt-50 32x4d: pixels[1,3,224,224] -> logits[1,1000]. A smaller width has fewer groups of 4 channels."""
    return _residual_net(
        "resnext50",
        (3, 4, 6, 3),
        depth,
        seed,
        width=width,
        image=image,
        fold_batchnorm=fold_batchnorm,
        bottleneck=True,
        cardinality=max(1, width // 2),
    )
