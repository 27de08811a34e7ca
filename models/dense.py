"""Networks with outputs for each pixel or position: a UNet of a diffusion model, and a detector like YOLOv8."""

from __future__ import annotations

import math

import numpy as np
import onnx

from models.builder import Net, divisible, spread

_GROUPS = 32


def unet(depth: int, seed: int, *, width: int = 128, image: int = 32) -> onnx.ModelProto:
    """Two levels of a diffusion model's UNet (Ho et al., 2020, as `diffusers` has them): latent[1,4,32,32] and the
    embedded time step embedding[1,512] -> noise[1,4,32,32].

    Each of the two levels, of `width` and 2 `width` channels, has `depth` residual blocks on the way down and `depth` +
    1 on the way up; between the ways is attention over the pixels.
    """
    net = Net("unet", seed)
    x = net.input("latent", (1, 4, image, image))
    time = net.input("embedding", (1, 4 * width))
    x = net.conv(x, width, 3)
    skips = [x]
    for level, channels in enumerate((width, 2 * width)):
        with net.scope("down", level):
            if level:
                x = net.conv(x, width, 3, stride=2)
                skips.append(x)
            for block in range(depth):
                with net.scope(block):
                    x = _residual(net, x, time, channels)
                skips.append(x)
    with net.scope("middle"):
        x = _residual(net, x, time, 2 * width)
        x = _residual(net, _pixel_attention(net, x), time, 2 * width)
    for level, channels in enumerate((2 * width, width)):
        with net.scope("up", level):
            for block in range(depth + 1):
                with net.scope(block):
                    x = _residual(net, net.concat(x, skips.pop()), time, channels)
            if not level:
                with net.scope("resize"):
                    x = net.conv(_twice(net, x), channels, 3)
    with net.scope("out"):
        net.output(net.conv(net.silu(_norm(net, x)), 4, 3), "noise")
    return net.model()


def _norm(net: Net, x: str) -> str:
    """GroupNorm, as the exporter decomposes it: an instance normalisation of the groups, a scale and a shift."""
    batch, channels, *sizes = net.shape(x)
    groups = min(_GROUPS, channels // 4)
    ones, zeros = net.literal(np.ones(groups), np.float32), net.literal(np.zeros(groups), np.float32)
    y = net.node("InstanceNormalization", net.reshape(x, batch, groups, -1), ones, zeros, epsilon=1e-5)
    y = net.reshape(y, batch, channels, *sizes)
    y = net.mul(y, net.weight("weight", net.normal((channels, *[1] * len(sizes)), 0.1, mean=1.0)))
    return net.add(y, net.weight("bias", net.normal((channels, *[1] * len(sizes)), 0.05)))


def _residual(net: Net, x: str, time: str, channels: int) -> str:
    """Two convolutions, with the time step added between them."""
    y = net.conv(net.silu(_norm(net, x)), channels, 3)
    shift = net.gemm(net.silu(time), channels)
    y = net.add(y, net.reshape(shift, 1, channels, 1, 1))
    y = net.conv(net.silu(_norm(net, y)), channels, 3)
    if net.shape(x)[1] != channels:
        x = net.conv(x, channels)
    return net.add(x, y)


def _pixel_attention(net: Net, x: str) -> str:
    batch, channels, height, wide = net.shape(x)
    heads = max(1, channels // 64)
    y = net.transpose(net.reshape(_norm(net, x), batch, channels, height * wide), 0, 2, 1)
    q, k, v = (net.reshape(net.linear(y, channels), batch, height * wide, heads, -1) for _ in range(3))
    scale = net.scalar(1 / math.sqrt(channels // heads))
    scores = net.mul(net.node("MatMul", net.transpose(q, 0, 2, 1, 3), net.transpose(k, 0, 2, 3, 1)), scale)
    mixed = net.node("MatMul", net.softmax(scores), net.transpose(v, 0, 2, 1, 3))
    mixed = net.reshape(net.transpose(mixed, 0, 2, 1, 3), batch, height * wide, channels)
    out = net.transpose(net.linear(mixed, channels), 0, 2, 1)
    return net.add(x, net.reshape(out, batch, channels, height, wide))


def _twice(net: Net, x: str) -> str:
    """Repeat each pixel four times: returns an image of twice the height and width."""
    batch, channels, height, wide = net.shape(x)
    return net.node(
        "Resize",
        x,
        "",
        "",
        net.ints(batch, channels, 2 * height, 2 * wide),
        coordinate_transformation_mode="asymmetric",
        mode="nearest",
        nearest_mode="floor",
    )


# The stages of the smallest YOLOv8's backbone: channels, and number of residual blocks.
_STAGES = ((32, 1), (64, 2), (128, 2), (256, 1))
_BINS = 16


def yolo(
    depth: int, seed: int, *, width: int = 16, image: int = 640, fold_batchnorm: bool = True
) -> onnx.ModelProto:
    """A detector like YOLOv8n (Jocher et al., 2023): pixels[1,3,640,640] -> boxes[1,84,8400].

    A backbone of `depth` residual blocks, a pyramid of features, and heads at three scales. For each position the
    output has a box (the distances to its left, top, right and bottom, each a mean over 16 bins) and scores of 80
    classes.
    """
    net = Net("yolo", seed, fold_batchnorm=fold_batchnorm)
    ratio = width / 16
    x = net.input("pixels", (1, 3, image, image))
    x = _unit(net, x, width, 3, 2)
    outputs = []
    for level, ((channels, _), blocks) in enumerate(zip(_STAGES, spread(depth, [n for _, n in _STAGES]))):
        with net.scope("stage", level):
            width_here = divisible(channels * ratio)
            x = _stage(net, _unit(net, x, width_here, 3, 2), width_here, blocks, add=True)
        outputs.append(x)
    with net.scope("sppf"):
        half = _unit(net, x, net.shape(x)[1] // 2)
        pools = [half]
        for _ in range(3):
            pools.append(net.pool("MaxPool", pools[-1], 5, 1, 2))
        outputs[-1] = _unit(net, net.concat(*pools), net.shape(x)[1])
    with net.scope("pyramid"):
        scales = _pyramid(net, *outputs[1:])
    heads = []
    for level, features in enumerate(scales):
        with net.scope("head", level):
            boxes = net.conv(_unit(net, _unit(net, features, 4 * width, 3), 4 * width, 3), 4 * _BINS)
            classes = net.conv(_unit(net, _unit(net, features, 5 * width, 3), 5 * width, 3), 80)
            heads.append(net.reshape(net.concat(boxes, classes), 1, 4 * _BINS + 80, -1))
    with net.scope("decode"):
        boxes, classes = net.nodes(
            "Split", net.concat(*heads, axis=2), net.ints(4 * _BINS, 80), outputs=2, axis=1
        )
        positions = net.shape(boxes)[2]
        bins = net.transpose(net.reshape(boxes, 1, 4, _BINS, positions), 0, 2, 1, 3)
        weights = net.literal(np.arange(_BINS).reshape(1, _BINS, 1, 1), np.float32)
        means = net.node("Conv", net.node("Softmax", bins, axis=1), weights, kernel_shape=(1, 1))
        net.output(net.concat(net.reshape(means, 1, 4, positions), net.sigmoid(classes)), "boxes")
    return net.model()


def _unit(net: Net, x: str, channels: int, kernel: int = 1, stride: int = 1) -> str:
    return net.silu(net.conv(x, channels, kernel, stride=stride, norm=1.04))


def _stage(net: Net, x: str, channels: int, blocks: int, add: bool) -> str:
    """Half of the channels go through the blocks; the results of all blocks are concatenated."""
    with net.scope("c2f"):
        parts = net.split(_unit(net, x, channels), 2, 1)
        for block in range(blocks):
            with net.scope("m", block):
                half = channels // 2
                y = _unit(net, _unit(net, parts[-1], half, 3), half, 3)
                parts.append(net.add(parts[-1], y) if add else y)
        return _unit(net, net.concat(*parts), channels)


def _pyramid(net: Net, small: str, middle: str, large: str) -> tuple[str, str, str]:
    """Features of three scales, each combined with the features of the other scales: first from coarse to fine, then
    back."""
    sizes = [net.shape(f)[1] for f in (small, middle, large)]
    middle = _stage(net, net.concat(_twice(net, large), middle), sizes[1], 1, add=False)
    small = _stage(net, net.concat(_twice(net, middle), small), sizes[0], 1, add=False)
    middle = _stage(net, net.concat(_unit(net, small, sizes[0], 3, 2), middle), sizes[1], 1, add=False)
    large = _stage(net, net.concat(_unit(net, middle, sizes[1], 3, 2), large), sizes[2], 1, add=False)
    return small, middle, large
