"""What happens around the steps of every run: when it is measured and saved, its progress bar, and Ctrl-C."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any

from tqdm import tqdm

from bnet_transformer._core.distributed import Ranks
from bnet_transformer.errors import one_of, put, whole
from bnet_transformer.files.checkpoint import Checkpoints


@dataclass(frozen=True)
class LoopConfig:
    """What happens around the steps of a run.

    Args:
        every: Steps from one measure, and checkpoint, to the next; None for ten in a run.
        checkpoints: Where checkpoints go; None for none.
        progress: True for a progress bar, False for none, None for one in a terminal.
    """

    every: int | None = None
    checkpoints: Checkpoints | None = None
    progress: bool | None = None

    def __post_init__(self) -> None:
        one_of("progress", self.progress, (True, False, None))
        if self.every is not None:
            put(self, every=whole("every", self.every))

    @property
    def shared(self) -> tuple[object, ...]:
        """What several processes must have in common, for at a pause they wait for each other."""
        return self.every, None if self.checkpoints is None else self.checkpoints.resume

    @property
    def has_checkpoint(self) -> bool:
        """True where there is a checkpoint to go on from."""
        return self.checkpoints is not None and self.checkpoints.path().exists()

    def is_pause(self, step: int, steps: int) -> bool:
        """True after the steps at which the run is measured and saved, the last one among them."""
        return step % (self.every or max(1, steps // 10)) == 0 or step == steps

    def progress_bar(self, ranks: Ranks, steps: int, initial: int, unit: str = "step") -> Any:
        """The progress bar of a run, which the first of several processes shows."""
        hide = True if not ranks.first or self.progress is False else False if self.progress else None
        return tqdm(total=steps, initial=initial, disable=hide, unit=unit, leave=False)


@contextmanager
def asked_to_stop() -> Iterator[list[int]]:
    """Whether Ctrl-C came: the step is finished first. A second one is not waited for."""
    asked: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield asked
        return

    def note(number: int, frame: FrameType | None) -> None:
        if asked:
            raise KeyboardInterrupt
        asked.append(number)

    before = signal.signal(signal.SIGINT, note)
    try:
        yield asked
    finally:
        signal.signal(signal.SIGINT, before)
