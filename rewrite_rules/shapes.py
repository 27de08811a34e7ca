"""Helpers that assemble long `shapes` declarations from parts."""

from __future__ import annotations

from itertools import product


def either(*groups: tuple[str, ...] | str) -> str:
    """A declaration whose alternatives combine one text of each group: either("x[n]", ("c[]", "c[n]"))."""
    options = [(g,) if isinstance(g, str) else g for g in groups]
    return " | ".join(" ".join(choice) for choice in product(*options))


def per_rank(*templates: str, ranks: tuple[int, ...] = (1, 2, 3)) -> str:
    """A template for tensors with one, two or three spatial dimensions: "x[n,c{h}] w[m,c{k}] b[m{1}]".

    {h} becomes named dimensions (",h0,h1"), and so does any other letter; {1} becomes ones.
    """
    out = []
    for rank in ranks:
        names = {letter: "".join(f",{letter}{i}" for i in range(rank)) for letter in "hkrt"}
        for template in templates:
            text = template.replace("{1}", ",1" * rank)
            for letter, dims in names.items():
                text = text.replace(f"{{{letter}}}", dims)
            out.append(text)
    return " | ".join(out)
