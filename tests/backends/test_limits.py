"""The limits of a process, with files as Linux and container engines write them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from xrlflow.backends import limits

V2 = "31 23 0:28 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup rw\n"
V1 = (
    "31 23 0:28 / /sys/fs/cgroup rw,relatime - tmpfs tmpfs rw,mode=755\n"
    "32 31 0:29 {top} /sys/fs/cgroup/cpu,cpuacct rw,relatime shared:9 - cgroup cgroup rw,cpu,cpuacct\n"
    "35 31 0:32 {top} /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory\n"
)


def files(root: Path, groups: str, mounts: str, **contents: dict[str, str]) -> Path:
    """Create a root folder with the groups of a process, the mounts, and files by folder. `__` in the name of a folder
    stands for a slash."""
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/cgroup").write_text(groups)
    (root / "proc/self/mountinfo").write_text(mounts)
    for folder, texts in contents.items():
        place = root / "sys/fs/cgroup" / folder.replace("__", "/").lstrip("/")
        place.mkdir(parents=True, exist_ok=True)
        for name, text in texts.items():
            (place / name).write_text(text)
    return root


def test_version_2_takes_the_least_of_all_groups_around(tmp_path: Path) -> None:
    root = files(
        tmp_path, "0::/slice/unit\n", V2,
        slice={"cpu.max": "150000 100000\n", "memory.max": "max\n"},
        slice__unit={
            "cpu.max": "max 100000\n", "memory.max": "1073741824\n", "memory.current": "4096\n",
            "cpu.stat": "usage_usec 12\nnr_periods 40\nnr_throttled 10\nthrottled_usec 7\n",
        },
    )  # fmt: skip
    result = limits.limits(root)
    assert result == limits.Limits((2,), 1.5, 1 << 30, 4096, 40, 10)


@pytest.mark.parametrize("top", ["/", "/docker/a1b2"])
def test_version_1_with_and_without_a_namespace(tmp_path: Path, top: str) -> None:
    """Without a namespace, a container sees the paths of its host, and its own group is the root of the mount."""
    own = "/" if top == "/" else top
    root = files(
        tmp_path, f"9:name=systemd:{own}\n4:memory:{own}\n2:cpu,cpuacct:{own}\n0::/\n", V1.format(top=top),
        **{
            "cpu,cpuacct": {"cpu.cfs_quota_us": "250000\n", "cpu.cfs_period_us": "100000\n"},
            "memory": {"memory.limit_in_bytes": "536870912\n", "memory.usage_in_bytes": "1024\n"},
        },
    )  # fmt: skip
    assert limits.limits(root) == limits.Limits((1,), 2.5, 1 << 29, 1024)


def test_no_limit_is_none(tmp_path: Path) -> None:
    root = files(
        tmp_path, "4:memory:/\n2:cpu,cpuacct:/\n", V1.format(top="/"),
        **{
            "cpu,cpuacct": {"cpu.cfs_quota_us": "-1\n", "cpu.cfs_period_us": "100000\n"},
            "memory": {"memory.limit_in_bytes": "9223372036854771712\n"},
        },
    )  # fmt: skip
    assert limits.limits(root) == limits.Limits((1,))
    assert limits.limits(tmp_path / "none") == limits.Limits()


@pytest.mark.parametrize(
    "text",
    ["", "garbage", "1 2 3", "100000 0", "100000 -5", "-5 100000", "0 100000", "\xff",
     f"{'9' * 400} 1", f"1 {'9' * 400}"],
)  # fmt: skip
def test_what_is_not_understood_is_no_limit(tmp_path: Path, text: str) -> None:
    root = files(
        tmp_path, "0::/../..\nnonsense\n", V2 + "short - cgroup2\n",
        **{"": {"cpu.max": text, "memory.max": text, "cpu.stat": f"{text}\nnr_periods\n"}},
    )  # fmt: skip
    result = limits.limits(root)
    assert (result.cpus, result.memory) == (None, None)


@pytest.mark.parametrize("group", ["a/" * 3000, "a\0b", "hidden/group"])
def test_a_group_that_cannot_be_looked_at_is_the_one_that_is_mounted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, group: str
) -> None:
    root = files(tmp_path, f"0::/{group}\n", V2, **{"": {"cpu.max": "300000 100000"}})
    real = os.stat

    def stat(path: object, *arguments: object, **options: object) -> os.stat_result:
        if "hidden" in os.fspath(path):  # type: ignore[call-overload]
            raise PermissionError(13, "Permission denied")
        return real(path, *arguments, **options)  # type: ignore[call-overload, no-any-return]

    monkeypatch.setattr(os, "stat", stat)
    assert limits.limits(root).cpus == 3.0


def test_the_name_of_another_group_is_no_prefix(tmp_path: Path) -> None:
    """/docker/ab is not inside /docker/a."""
    root = files(
        tmp_path, "2:cpu,cpuacct:/docker/ab\n", V1.format(top="/docker/a"),
        **{"cpu,cpuacct": {"cpu.cfs_quota_us": "300000", "cpu.cfs_period_us": "100000"}},
    )  # fmt: skip
    assert limits.limits(root).cpus == 3.0


@pytest.mark.parametrize(
    ("quota", "cpus", "threads"),
    [("max", 8, 4), ("350000", 3, 3), ("120000", 1, 1), ("50000", 1, 1), ("900000", 8, 4)],
)
def test_threads_do_not_exceed_the_quota(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quota: str, cpus: int, threads: int
) -> None:
    monkeypatch.setattr(limits, "allowed_cpus", lambda: list(range(8)))
    monkeypatch.setattr(limits, "one_cpu_a_core", lambda cpus: cpus[::2])
    monkeypatch.setattr(limits.psutil, "cpu_count", lambda logical=True: 8 if logical else 4)
    root = files(tmp_path, "0::/\n", V2, **{"": {"cpu.max": f"{quota} 100000"}})
    assert limits.available_cpus(root) == cpus
    assert limits.default_threads(root) == threads


def test_both_threads_of_a_core_are_one_core(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(limits, "allowed_cpus", lambda: [0, 4])
    monkeypatch.setattr(limits, "one_cpu_a_core", lambda cpus: [0])
    monkeypatch.setattr(limits.psutil, "cpu_count", lambda logical=True: 8 if logical else 4)
    assert limits.default_threads(tmp_path) == 1
    assert limits.available_cpus(tmp_path) == 2


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system has no affinities")
def test_the_affinity_counts(tmp_path: Path) -> None:
    allowed = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(allowed)})
        assert limits.default_threads(tmp_path) == limits.available_cpus(tmp_path) == 1
    finally:
        os.sched_setaffinity(0, allowed)
