"""Which library belongs to which model of a folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from xrlflow.backends import BackendError
from xrlflow.backends.library_files import check_library_path, library_of, library_path

DOMAIN = b"in a file: xrlflow.0123456789abcdef0123456789abcdef, a domain"


@pytest.mark.parametrize(
    ("model", "library"),
    [
        ("a.onnx", "a.so"),
        ("a.ort", "a.ort.so"),
        ("net.v1", "net.v1.so"),
        ("net.v2.onnx", "net.v2.so"),
        ("a", "a.so"),
    ],
)
def test_the_library_has_the_name_of_the_model(model: str, library: str, tmp_path: Path) -> None:
    assert library_path(tmp_path / model) == tmp_path / library


def test_models_of_one_stem_have_their_own_libraries(tmp_path: Path) -> None:
    for suffix, digit in ((".onnx", b"0"), (".ort", b"1")):
        content = b"xrlflow." + digit * 32
        (tmp_path / f"a{suffix}").write_bytes(content)
        library_path(tmp_path / f"a{suffix}").write_bytes(content)
    for suffix in (".onnx", ".ort"):
        assert library_of(tmp_path / f"a{suffix}") == str(library_path(tmp_path / f"a{suffix}"))


@pytest.mark.parametrize(("first", "second"), [("a", "a.onnx"), ("a.onnx", "a"), ("a.b", "a.b.onnx")])
def test_a_library_of_another_model_is_not_replaced(first: str, second: str, tmp_path: Path) -> None:
    (tmp_path / first).write_bytes(DOMAIN)
    library_path(tmp_path / first).write_bytes(DOMAIN)
    check_library_path(tmp_path / first)
    with pytest.raises(BackendError, match=rf"has the kernels of {first}: .* for {second}"):
        check_library_path(tmp_path / second)
    (tmp_path / first).write_bytes(b"another model")
    check_library_path(tmp_path / second)


def test_a_model_has_no_name_of_a_library(tmp_path: Path) -> None:
    with pytest.raises(BackendError, match=r"a\.so: is a model's name as a library"):
        check_library_path(tmp_path / "a.so")
