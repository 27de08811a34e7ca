"""Where measurements are kept, and that passwords are not shown. No server is needed."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from xrlflow.cost.database import _LAYOUT as PRICES
from xrlflow.cost.database import Database
from xrlflow.options import OptionError, Options
from xrlflow.storage.stores import StoreError, masked, opened, server_of

URL = "postgresql://me:s3cret@db.example/x"


def test_what_is_meant(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("XRLFLOW_STORE", raising=False)
    assert server_of(None) is None
    assert server_of(tmp_path) is None
    assert server_of(URL) == URL
    monkeypatch.setenv("XRLFLOW_STORE", f" {URL}\n")
    assert server_of(None) == URL
    assert server_of("here.sqlite") is None  # what is said on the command line comes first
    monkeypatch.setenv("XRLFLOW_STORE", "s3cret")
    with pytest.raises(StoreError, match="XRLFLOW_STORE is no URL") as raised:
        server_of(None)
    assert "s3cret" not in str(raised.value)
    monkeypatch.setenv("XRLFLOW_STORE", "")
    assert opened(None, tmp_path / "mine", PRICES, 1.0).path == tmp_path / "mine"
    assert opened(tmp_path / "named", tmp_path / "mine", PRICES, 1.0).path == tmp_path / "named"


def test_without_the_driver_it_is_said_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "psycopg" else find(name))
    with pytest.raises(StoreError, match=r"pip install 'xrlflow\[postgres\]'"):
        Database(URL)


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        (URL, "postgresql://***@db.example/x"),
        ("postgres//me:s3cret@db.example/x", "***@db.example/x"),
        ("me:s3c@ret@db.example/x?password=s3cret", "***@db.example/x"),
        ("postgresql://h/x?password=s3cret", "postgresql://h/x"),
        ("kernels.sqlite", "kernels.sqlite"),
    ],
)
def test_passwords_are_masked(given: str, shown: str) -> None:
    assert masked(given) == shown


def test_options_do_not_show_passwords() -> None:
    options = Options(store=URL)
    assert options.server == URL
    assert "s3cret" not in repr(options)


def test_a_store_is_a_url_for_any_backend_and_else_a_file(tmp_path: Path) -> None:
    assert Options(backend="onnxruntime", store=URL).server == URL
    with pytest.raises(OptionError, match="store has no meaning with backend 'onnxruntime'"):
        Options(backend="onnxruntime", store=tmp_path)
    with pytest.raises(OptionError, match="is neither a file") as raised:
        Options(backend="hybrid", store="postgres//me:s3cret@db/x")
    assert "s3cret" not in str(raised.value)
