"""Group commit: appends to the journal, and syncs of the data file, on one thread each. Requests that come during one
share the next."""

from collections.abc import Callable

from vllm_kvtier.store.tiers.disk import journal as j
from vllm_kvtier.store.tiers.disk.file_ops import FULL, Files, Workers, error_text

Done = Callable[[str], None]  # error or ""
MIN_LOG = 16 << 20  # bytes appended before a new snapshot is made; also, as many as the last snapshot has


class Log:
    """``snapshot()``: the current state, including all entries appended so far."""

    def __init__(
        self, journal: j.Journal, workers: Workers, snapshot: Callable[[], list[j.Entry]], min_log: int = MIN_LOG
    ):
        self._journal, self._workers, self._snapshot, self._min_log = journal, workers, snapshot, min_log
        self._queue: list[tuple[list[j.Entry], Done]] = []
        self._busy = False
        self.broken = ""  # why nothing can be appended until the journal is opened again

    def append(self, entries: list[j.Entry], done: Done) -> None:
        """Call ``done`` when these entries and all before them are durable, perhaps before this returns. ``entries``
        may be empty."""
        if self.broken:
            done(self.broken)
        elif entries or self._busy or self._queue:
            self._queue.append((entries, done))
            self._go_on()
        else:
            done("")

    def _go_on(self) -> None:
        if self._busy or not self._queue:
            return
        self._busy = True
        group, self._queue = self._queue, []
        journal, snapshot = self._journal, None
        if journal.appended > max(self._min_log, journal.base):
            snapshot = self._snapshot()

        def job() -> list[str]:
            errors = self._append(group)
            if snapshot is not None and not journal.broken:
                try:
                    journal.replace(snapshot)
                except OSError:
                    if journal.broken:
                        raise
                    self._min_log = 2 * journal.appended  # go on with the old file for a while
            return errors

        self._workers.submit(job, lambda errors, error: self._ended(group, errors, error))

    def _append(self, group: list[tuple[list[j.Entry], Done]]) -> list[str]:
        """On the thread. If the disk is full, removals are still recorded."""
        try:
            self._journal.append([entry for entries, _ in group for entry in entries])
            return [""] * len(group)
        except OSError as error:
            if self._journal.broken or error.errno not in FULL:
                raise
            only_gone = [all(kind == j.GONE for kind, _ in entries) for entries, _ in group]
            self._journal.append([entry for entries, _ in group for entry in entries if entry[0] == j.GONE])
            return ["" if fits else error_text(error) for fits in only_gone]

    def _ended(
        self, group: list[tuple[list[j.Entry], Done]], errors: list[str] | None, error: OSError | None
    ) -> None:
        self._busy = False
        if error is not None or errors is None:
            self.broken = f"its journal cannot be written ({error_text(error) if error else 'no result'})"
            group, self._queue = group + self._queue, []
            errors = [self.broken] * len(group)
        for (_, done), text in zip(group, errors, strict=True):
            done(text)
        self._go_on()


class Syncs:
    """Syncs of the data file."""

    def __init__(self, files: Files, fd: int, workers: Workers):
        self._files, self._fd, self._workers = files, fd, workers
        self._waiting: list[Done] = []
        self._busy = False

    def ask(self, done: Done) -> None:
        """Call ``done`` when all bytes written before this call are durable."""
        self._waiting.append(done)
        self._go_on()

    def _go_on(self) -> None:
        if self._busy or not self._waiting:
            return
        self._busy = True
        asked, self._waiting = self._waiting, []
        self._workers.submit(lambda: self._files.sync(self._fd), lambda _, error: self._ended(asked, error))

    def _ended(self, asked: list[Done], error: OSError | None) -> None:
        self._busy = False
        for done in asked:
            done("" if error is None else error_text(error))
        self._go_on()
