"""InceptionV3 (Szegedy et al., 2015), as torchvision defines it."""

from __future__ import annotations

import onnx

from models.builder import Net, Pair, spread

_POOL_FEATURES = (32, 64)  # in the first and in the further A modules
_SEVEN_FEATURES = (128, 160, 160, 192)  # inner channels of the C modules


def inceptionv3(
    depth: int, seed: int, *, width: int = 32, image: int = 299, fold_batchnorm: bool = True
) -> onnx.ModelProto:
    """pixels[1,3,299,299] -> logits[1,1000]; `depth` modules of the kinds A, C and E (3, 4 and 2 in the paper).

    Between the kinds there are always two modules that halve the image. `width` is the number of channels of the first
    convolution; those of all others scale with it. `image` is at least 75 pixels.
    """
    net = Net("inceptionv3", seed, fold_batchnorm=fold_batchnorm)

    def conv(x: str, channels: int, kernel: Pair = 1, *, stride: int = 1, padding: Pair | None = None) -> str:
        """Convolution, BatchNormalization, Relu."""
        scaled = max(1, channels * width // 32)
        return net.relu(net.conv(x, scaled, kernel, stride=stride, padding=padding, norm=1.0, epsilon=1e-3))

    def chain(x: str, *layers: tuple[int, Pair]) -> str:
        for channels, kernel in layers:
            x = conv(x, channels, kernel)
        return x

    def pooled(x: str, channels: int) -> str:
        return conv(net.pool("AveragePool", x, 3, 1, 1), channels)

    def module_a(x: str, pool_features: int) -> str:
        return net.concat(
            conv(x, 64),
            chain(x, (48, 1), (64, 5)),
            chain(x, (64, 1), (96, 3), (96, 3)),
            pooled(x, pool_features),
        )

    def halve_a(x: str) -> str:
        return net.concat(
            conv(x, 384, 3, stride=2, padding=0),
            conv(chain(x, (64, 1), (96, 3)), 96, 3, stride=2, padding=0),
            net.pool("MaxPool", x, 3, 2),
        )

    def module_c(x: str, inner: int) -> str:
        return net.concat(
            conv(x, 192),
            chain(x, (inner, 1), (inner, (1, 7)), (192, (7, 1))),
            chain(x, (inner, 1), (inner, (7, 1)), (inner, (1, 7)), (inner, (7, 1)), (192, (1, 7))),
            pooled(x, 192),
        )

    def halve_c(x: str) -> str:
        return net.concat(
            conv(conv(x, 192), 320, 3, stride=2, padding=0),
            conv(chain(x, (192, 1), (192, (1, 7)), (192, (7, 1))), 192, 3, stride=2, padding=0),
            net.pool("MaxPool", x, 3, 2),
        )

    def module_e(x: str) -> str:
        three, double = conv(x, 384), chain(x, (448, 1), (384, 3))
        return net.concat(
            conv(x, 320),
            net.concat(conv(three, 384, (1, 3)), conv(three, 384, (3, 1))),
            net.concat(conv(double, 384, (1, 3)), conv(double, 384, (3, 1))),
            pooled(x, 192),
        )

    modules_a, modules_c, modules_e = spread(depth, (3, 4, 2))
    x = net.input("pixels", (1, 3, image, image))
    with net.scope("stem"):
        x = conv(x, 32, 3, stride=2, padding=0)
        x = conv(conv(x, 32, 3, padding=0), 64, 3)
        x = net.pool("MaxPool", x, 3, 2)
        x = conv(conv(x, 80), 192, 3, padding=0)
        x = net.pool("MaxPool", x, 3, 2)
    for i in range(modules_a):
        with net.scope("mixed5", i):
            x = module_a(x, _POOL_FEATURES[min(i, 1)])
    with net.scope("mixed6a"):
        x = halve_a(x)
    for i in range(modules_c):
        with net.scope("mixed6", i):
            x = module_c(x, _SEVEN_FEATURES[min(i, 3)])
    with net.scope("mixed7a"):
        x = halve_c(x)
    for i in range(modules_e):
        with net.scope("mixed7", i):
            x = module_e(x)
    net.classifier(x, 1000)
    return net.model()
