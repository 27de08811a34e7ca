"""How many threads torch uses."""

from __future__ import annotations

import pytest
import torch

from xrlflow.learn import threads


def test_torch_gets_no_more_than_the_process_may_use(monkeypatch: pytest.MonkeyPatch) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    try:
        for permitted, used in ((3, 3), (8, 4)):
            monkeypatch.setattr(threads, "default_threads", lambda permitted=permitted: permitted)
            with threads.permitted_threads():
                assert torch.get_num_threads() == used
            assert torch.get_num_threads() == 4
        with threads.one_thread():
            assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(before)
