"""The runner's progress on a terminal: a bar per stage, one line each elsewhere."""

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn


class ConsoleDisplay:
    """A `Display` on a rich console; a context manager."""

    def __init__(self, console: Console):
        self._console = console
        self._live = console.is_terminal
        self._progress = Progress(
            TextColumn("{task.description:<14}"),
            BarColumn(bar_width=30),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[note]}"),
            console=console,
            disable=not self._live,
        )
        self._tasks = {}

    def __enter__(self):
        self._progress.start()
        return self

    def __exit__(self, *exc_info):
        self._progress.stop()

    def stage(self, name: str, total: int | None) -> None:
        self._tasks[name] = self._progress.add_task(name, total=total, note="")
        if not self._live:
            self._console.print(f"{name} ...")

    def step(self, name: str, event: dict) -> None:
        loss = event["losses"].get("lm loss")
        note = f"{event['seconds'] * 1e3:.0f} ms/step"
        if loss is not None:
            note = f"loss {loss:.4f}  {note}"
        self._progress.update(self._tasks[name], advance=1, note=note)

    def finished(self, name: str, note: str) -> None:
        task = self._progress.tasks[self._tasks[name]]
        if note:
            short = escape(note.splitlines()[0][:80])
            self._progress.update(task.id, note=f"[red]{short}[/]")
            if not self._live:
                self._console.print(f"{name}: {note}", style="red", markup=False)
        elif task.total is None:
            self._progress.update(task.id, total=1, completed=1)
        self._progress.stop_task(task.id)
