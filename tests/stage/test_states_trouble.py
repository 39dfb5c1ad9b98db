"""A disk that fails, fills up, turns read-only, and loses or changes files, while stages keep states there.

Nothing of it reaches a client: what cannot be restored is computed. Every failure is counted, few are logged.
"""

from __future__ import annotations

import errno
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing

from skippy.kv.durable import QUARANTINED_FILES
from skippy.kv.folders import PrivateFolder
from tests.stage.test_chain import unsplit_tokens, wait_for_sequences
from tests.stage.test_states import ONE, PROMPTS, ask, tier
from tests.support.cached import cache_of, cached_cluster, complete
from tests.support.cluster import Cluster
from tests.support.driver import driver_of

LAST = len(PROMPTS[0]) - 1
ERRORS = (errno.ENOSPC, errno.EROFS, errno.EACCES, errno.EIO, errno.EMFILE)


def flip(path: Path, dice: random.Random) -> None:
    data = bytearray(path.read_bytes())
    if data:
        data[dice.randrange(len(data))] ^= 1 << dice.randrange(8)
        path.write_bytes(data)


def replace(path: Path, dice: random.Random) -> None:
    path.unlink()
    kind = dice.randrange(4)
    if kind == 0:
        path.mkdir()
        (path / "inside").touch()
    elif kind == 1:
        path.symlink_to("/dev/zero")
    elif kind == 2:
        os.mkfifo(path)
    else:
        path.touch()


DAMAGE: tuple[Callable[[Path, random.Random], object], ...] = (
    flip,
    replace,
    lambda path, dice: path.unlink(),
    lambda path, dice: os.truncate(path, dice.randrange(path.stat().st_size + 1)),
    lambda path, dice: path.open("ab").write(b"more"),
    lambda path, dice: path.rename(path.with_name(dice.randbytes(32).hex() + ".kv")),
)


def damage(root: Path, dice: random.Random) -> None:
    """Do something to some files of states."""
    for path in sorted(root.glob("*/states/*.kv")):
        if path.is_file() and not path.is_symlink() and dice.random() < 0.5:
            dice.choice(DAMAGE)(path, dice)


class FailingFolder:
    """Operations on folders fail now and then, each with one of ERRORS."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, dice: random.Random) -> None:
        self.share = 0.0
        for name in ("open_file", "create_file", "move", "remove", "sync", "names", "stat", "free_bytes"):
            monkeypatch.setattr(PrivateFolder, name, self._failing(getattr(PrivateFolder, name), dice))

    def _failing(self, real: Callable[..., Any], dice: random.Random) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            if dice.random() < self.share:
                number = dice.choice(ERRORS)
                raise OSError(number, os.strerror(number))
            return real(*arguments)

        return call


def check_counts(cluster: Cluster, *, undamaged: bool) -> None:
    """What entries have is in the store, and within its budget; ``undamaged``: and that is what there is."""
    for index in range(len(cluster.stages)):
        durable = tier(cluster, index).durable
        assert durable is not None
        stats = durable.stats()
        assert stats.bytes <= durable.max_bytes
        entries = cache_of(cluster, index).index.entries()
        assert stats.files == sum(entry.state is not None for entry in entries)
        if undamaged:
            found = list((durable.path / "states").iterdir())
            assert (stats.files, stats.bytes) == (len(found), sum(path.stat().st_size for path in found))
            kept = [path for path in (durable.path / "quarantine").iterdir() if not path.is_dir()]
            assert len(kept) <= QUARANTINED_FILES


@pytest.mark.parametrize("seed", range(3))
async def test_random_trouble(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    dice = random.Random(seed)
    folder = FailingFolder(monkeypatch, dice)
    kv = {"directory": str(tmp_path), "directory_max_bytes": dice.choice((9_000, 25_000, 2**30))}
    with trio.fail_after(60):
        for life in ("a", "b", "c"):
            async with cached_cluster(3, kv=kv, **ONE) as cluster, driver_of(cluster) as driver:
                for _ in range(12):
                    folder.share = dice.choice((0.0, 0.0, 0.3, 1.0))
                    prompt = dice.choice(PROMPTS)
                    answer = await complete(driver, prompt, 4)
                    assert answer.tokens == unsplit_tokens(prompt, 4)
                    await trio.testing.wait_all_tasks_blocked()
                    if dice.random() < 0.4:
                        damage(tmp_path, dice)
                # When all is well again, so is the cache.
                folder.share = 0.0
                await ask(driver, PROMPTS[0], 0, namespace=life)
                check_counts(cluster, undamaged=False)
                await ask(driver, PROMPTS[1], 0, namespace=life)
                await ask(driver, PROMPTS[0], LAST, namespace=life)
                await wait_for_sequences(cluster)
        async with cached_cluster(3, kv=kv, **ONE) as cluster:
            await trio.testing.wait_all_tasks_blocked()
            check_counts(cluster, undamaged=True)
    told = [record.msg["event"] for record in caplog.records]  # type: ignore[call-overload]
    assert len(told) <= 4 * 3 * 5, "each stage tells of each thing once, in each of its lives"


async def test_budgets_around_the_size_of_one_file(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """What does not fit is not kept, and what is there stays; nobody notices."""
    kv: dict[str, Any] = {"directory": str(tmp_path)}
    with trio.fail_after(30):
        async with cached_cluster(1, kv=kv, **ONE) as cluster, driver_of(cluster) as driver:
            await ask(driver, PROMPTS[0], 0)
            durable = tier(cluster, 0).durable
            assert durable is not None
            size, path = durable.stats().bytes, durable.path / "states"
        for budget, kept in ((size, 1), (size - 1, 0), (1, 0), (2 * size, 2)):
            kv["directory_max_bytes"] = budget
            async with cached_cluster(1, kv=kv, **ONE) as cluster, driver_of(cluster) as driver:
                cache_of(cluster, 0).forget_all("all")
                for prompt in PROMPTS[:4]:
                    await ask(driver, prompt, 0)
                assert len(os.listdir(path)) == kept
                assert sum(file.stat().st_size for file in path.iterdir()) <= budget
                await ask(driver, PROMPTS[3], LAST)
                await ask(driver, PROMPTS[1], 0)
        assert not caplog.records


async def test_a_folder_that_is_removed_under_a_stage(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    kv = {"directory": str(tmp_path / "kv")}
    with trio.fail_after(30):
        async with cached_cluster(2, kv=kv, **ONE) as cluster, driver_of(cluster) as driver:
            for prompt in PROMPTS[:3]:
                await ask(driver, prompt, 0)
            shutil.rmtree(tmp_path / "kv")
            for prompt in (*PROMPTS[:2], *PROMPTS[:2]):
                await ask(driver, prompt, 0)
            durable = tier(cluster, 0).durable
            assert durable is not None
            assert durable.stats().unreadable == 2
            assert durable.stats().failed >= 4
        told = {record.msg["event"] for record in caplog.records}  # type: ignore[call-overload]
        assert "states are not written to disk" in told
        assert len(caplog.records) <= 2 * len(told)
        async with cached_cluster(2, kv=kv, **ONE) as cluster, driver_of(cluster) as driver:
            for prompt in PROMPTS[:2]:
                await ask(driver, prompt, 0)
            await ask(driver, PROMPTS[0], LAST)
