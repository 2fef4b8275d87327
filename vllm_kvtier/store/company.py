"""What engines tell the server of their own caches, and the server them: the directory's side of the connections."""

from collections.abc import Callable

from vllm_kvtier.store import messages as m
from vllm_kvtier.store.directory import Directory, Sought


class Company:
    """On the server's reactor thread. ``tell(client, message)`` sends; ``soon`` calls a function after whatever else
    is waiting. Raises records.BadRequest, as Directory does."""

    def __init__(self, tell: Callable[[int, m.Company], None], soon: Callable[[Callable[[], None]], None]):
        self._tell, self._soon = tell, soon
        self._directory = Directory()
        self._told: dict[int, int] = {}  # by client: how many others it knows of
        self._sweeping = False

    def present(self, client: int, r: m.Present) -> None:
        self._directory.present(client, r.family, r.host, r.port, r.instance)
        self._told.pop(client, None)  # whoever presents itself is told at once
        self._membership_changed()

    def resident(self, client: int, r: m.Resident) -> None:
        self._directory.update(client, r.added, r.gone, r.anew)
        if r.anew:
            self._begin_sweep()

    def left(self, client: int) -> None:
        """The connection ended."""
        self._directory.leave(client)
        self._told.pop(client, None)
        self._membership_changed()

    def holders(self, client: int, sought: Sought | None) -> list[m.Holder]:
        return self._directory.holders(client, sought)

    def counts(self) -> m.DirectoryCounts:
        return self._directory.counts()

    def _membership_changed(self) -> None:
        for client, others in self._directory.others().items():
            if self._told.get(client) != others:
                self._told[client] = others
                self._tell(client, m.Company(others))
        self._begin_sweep()

    def _begin_sweep(self) -> None:
        if not self._sweeping:
            self._sweep()

    def _sweep(self) -> None:
        """In parts: one engine's keys may be millions, and the others' questions go between."""
        self._sweeping = self._directory.sweep()
        if self._sweeping:
            self._soon(self._sweep)
