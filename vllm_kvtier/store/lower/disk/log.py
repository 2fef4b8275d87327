"""The reactor's side of what blocks: appends to the journal and syncs of the data, on a thread each.

Whatever comes while one is under way shares the next: a group commit.
"""

from collections.abc import Callable

from vllm_kvtier.store.lower.disk import journal as j
from vllm_kvtier.store.lower.disk.files import FULL, Files, Workers, in_words

Done = Callable[[str], None]  # "" or why not, in words
LEAST_LOG = 16 << 20  # bytes since the last snapshot; a new one is made when there are more, and more than in that


class Log:
    """``snapshot()``: all that holds, with every entry that was ever appended and did not fail."""

    def __init__(
        self, journal: j.Journal, workers: Workers, snapshot: Callable[[], list[j.Entry]], least: int = LEAST_LOG
    ):
        self._journal, self._workers, self._snapshot, self._least = journal, workers, snapshot, least
        self._queue: list[tuple[list[j.Entry], Done]] = []
        self._busy = False
        self.broken = ""  # why nothing can be appended until it is opened again

    def append(self, entries: list[j.Entry], done: Done) -> None:
        """``done`` once these, and all that came before, are durable; perhaps before this returns. Nothing appended:
        only that."""
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
        if journal.appended > max(self._least, journal.base):
            snapshot = self._snapshot()

        def job() -> list[str]:
            errors = self._append(group)
            if snapshot is not None and not journal.broken:
                try:
                    journal.replace(snapshot)
                except OSError:
                    if journal.broken:
                        raise
                    self._least = 2 * journal.appended  # the old one will do for a while
            return errors

        self._workers.submit(job, lambda errors, error: self._ended(group, errors, error))

    def _append(self, group: list[tuple[list[j.Entry], Done]]) -> list[str]:
        """On the thread. Where the disk is full, what was given up is still written down."""
        try:
            self._journal.append([entry for entries, _ in group for entry in entries])
            return [""] * len(group)
        except OSError as error:
            if self._journal.broken or error.errno not in FULL:
                raise
            only_gone = [all(kind == j.GONE for kind, _ in entries) for entries, _ in group]
            self._journal.append([entry for entries, _ in group for entry in entries if entry[0] == j.GONE])
            return ["" if fits else in_words(error) for fits in only_gone]

    def _ended(self, group: list, errors: object, error: OSError | None) -> None:
        self._busy = False
        if error is not None:
            self.broken = f"its journal cannot be written ({in_words(error)})"
            errors = [self.broken] * len(group)
            group += self._queue
            errors += [self.broken] * len(self._queue)
            self._queue = []
        for (_, done), words in zip(group, errors, strict=True):
            done(words)
        self._go_on()


class Syncs:
    """Of the data file."""

    def __init__(self, files: Files, fd: int, workers: Workers):
        self._files, self._fd, self._workers = files, fd, workers
        self._waiting: list[Done] = []
        self._busy = False

    def ask(self, done: Done) -> None:
        """``done`` once all that had been written when this was called is durable."""
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
            done("" if error is None else in_words(error))
        self._go_on()
