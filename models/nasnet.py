"""NasNet-A (Zoph et al., 2017), as TASO and its successors measure it."""

from __future__ import annotations

import onnx

from models.builder import Net, spread

# Scales of the BatchNormalizations, chosen so that activations keep their magnitude over any number of cells.
_SQUEEZE, _SEPARABLE = 0.75, 0.3


def nasnet_a(
    depth: int, seed: int, *, width: int = 128, image: int = 224, fold_batchnorm: bool = True
) -> onnx.ModelProto:
    """pixels[1,3,224,224] -> logits[1,1000]; `depth` normal cells over three stages.

    The normal cells of the three stages have `width`, 2 `width` and 4 `width` channels. A stage ends with a reduction
    cell of twice its channels. A cell squeezes its two inputs by 1x1 convolutions, adds up five pairs of results of
    separable convolutions, pools and identities, and concatenates the sums.
    """
    net = Net("nasnet-a", seed, fold_batchnorm=fold_batchnorm)

    def squeeze(x: str, channels: int) -> str:
        return net.relu(net.conv(x, channels, norm=_SQUEEZE))

    def fit(previous: str, current: str) -> str:
        """Convert `previous` to the shape of `current`: by a 1x1 convolution, or by a 3x3 convolution of stride 2."""
        channels = net.shape(current)[1]
        if net.shape(previous)[2] == net.shape(current)[2]:
            return squeeze(previous, channels)
        return net.relu(net.conv(previous, channels, 3, stride=2, norm=_SQUEEZE))

    def separable(x: str, kernel: int, stride: int = 1) -> str:
        channels = net.shape(x)[1]
        x = net.conv(x, channels, kernel, stride=stride, groups=channels, norm=1.0)
        return net.conv(x, channels, norm=_SEPARABLE)

    def average(x: str, stride: int = 1) -> str:
        return net.pool("AveragePool", x, 3, stride, 1)

    def maximum(x: str, stride: int = 1) -> str:
        return net.pool("MaxPool", x, 3, stride, 1)

    def normal_cell(previous: str, current: str, channels: int) -> str:
        current = squeeze(current, channels)
        previous = fit(previous, current)
        return net.concat(
            net.add(separable(current, 3), current),
            net.add(separable(previous, 3), separable(current, 5)),
            net.add(average(current), previous),
            net.add(average(previous), average(previous)),
            net.add(separable(previous, 5), separable(previous, 3)),
        )

    def reduction_cell(previous: str, current: str, channels: int) -> str:
        current = squeeze(current, channels)
        previous = fit(previous, current)
        first = net.add(separable(previous, 7, 2), separable(current, 5, 2))
        second = net.add(maximum(current, 2), separable(previous, 7, 2))
        third = net.add(average(current, 2), separable(previous, 5, 2))
        fourth = net.add(maximum(current, 2), separable(first, 3))
        fifth = net.add(average(first), second)
        return net.concat(first, second, third, fourth, fifth)

    x = net.input("pixels", (1, 3, image, image))
    with net.scope("stem"):
        x = net.pool("MaxPool", net.relu(net.conv(x, width // 2, 7, stride=2, norm=1.0)), 3, 2, 1)
    for stage, cells in enumerate(spread(depth, (5, 5, 5))):
        if not cells:
            continue
        previous = current = x
        for cell in range(cells):
            with net.scope(f"stage{stage}", cell):
                previous, current = current, normal_cell(previous, current, width << stage)
        with net.scope(f"stage{stage}", "reduction"):
            x = reduction_cell(previous, current, width << (stage + 1))
    net.classifier(x, 1000)
    return net.model()
